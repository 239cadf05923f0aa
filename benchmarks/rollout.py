"""Tokens per second of sampling, scoring and training with the plain engines, on a model of the tiny backbone's shape.

    python benchmarks/rollout.py                    # one thread, 32 questions x 8 rollouts
    python benchmarks/rollout.py --threads 2 --json
    python benchmarks/rollout.py --shape smollm2    # sampling over its arithmetic floor: tiny, 30m or smollm2
    python benchmarks/rollout.py --shape 30m --reference    # the native decoding step beside transformers' pass

Sampling: `skewed`, lengths spread geometrically from 1 to 4 times their mean, rows replaced as they end; `full`, an
uninterrupted batch, all rows running to twice that mean, so that a token has as many before it on average. Scoring and
training: response tokens of rows of 20 to 72 tokens with prompts of 12 to 17, which are computed but not counted; every
row has an advantage, so none is left out of an update. Figures are the best of several repeats,
per second of CPU time and thread, which other work on the machine disturbs least; `gemm_gflops` is what a large
float32 matrix product reaches at that moment.

With `--shape` the CPU seconds of one batch, its prompts and the packing of weights included, are held against a floor
at that rate: 2 FLOP a weight and token, 4 a column attended to, layer and channel; each prompt, and what
all prompts begin with, once. Medians; the rate is measured before each repeat.
"""

import argparse
import json
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from exgrpo_cli.algo.batching import MiniBatch, TrainingRow
from exgrpo_cli.base.errors import ToolkitWarning
from exgrpo_cli.base.types import RolloutRequest, SamplingParams, TokenSequence
from exgrpo_cli.config.sections.objective import ObjectiveSettings
from exgrpo_cli.config.sections.run import OptimSettings
from exgrpo_cli.engines.hf import native
from exgrpo_cli.engines.hf.generator import HFGenerator
from exgrpo_cli.engines.policy.adamw import torch_policy

VOCAB = 40
GROUP_SIZE = 8
MEAN_TOKENS = 40
MAX_TOKENS = 72
SIZES = ("hidden", "ffn", "layers", "heads", "kv", "vocab", "questions", "same", "own", "mean", "most")
SHAPES = {
    "tiny": (128, 256, 3, 4, 2, 40, 32, 4, 11, 40, 97),
    "30m": (512, 1920, 8, 8, 4, 40, 4, 4, 11, 0, 48),
    "smollm2": (576, 1536, 30, 9, 3, 49152, 8, 290, 50, 20, 48),
}
"""SIZES of a model and of its batch: prompts of `same` and `own` tokens, responses of geometric lengths with this mean,
cut at `most`; with a mean of 0 all run to it."""
SKEWED_WAVES = 16
"""Skewed rollouts per row: enough that filling up and running dry hardly count."""


def build_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCAB, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, eos_token_id=1,
        )
    )  # fmt: skip


def requests(num_questions: int, rng: np.random.Generator) -> list[RolloutRequest]:
    return [
        RolloutRequest(
            question_id=str(index),
            prompt_ids=rng.integers(2, VOCAB, int(rng.integers(12, 18))).astype(np.int32),
            seeds=tuple(int(seed) for seed in rng.integers(0, 2**63 - 1, GROUP_SIZE)),
        )
        for index in range(num_questions)
    ]


def training_rows(num_questions: int, rng: np.random.Generator) -> list[TrainingRow]:
    rows = []
    for request in requests(num_questions, rng):
        for member in range(GROUP_SIZE):
            length = int(np.clip(rng.normal(MEAN_TOKENS, 10), 20, MAX_TOKENS))
            rows.append(
                TrainingRow(
                    sequence=TokenSequence(
                        prompt_ids=request.prompt_ids, response_ids=rng.integers(2, VOCAB, length).astype(np.int32)
                    ),
                    advantage=float(rng.normal()),
                    behaviour_logprobs=np.full(length, -np.log(VOCAB), dtype=np.float32),
                    replayed=member == 0,
                )
            )
    return rows


def rate(work: Callable[[], int], repeats: int) -> float:
    """Tokens per second of CPU time and thread, best of `repeats`."""
    best = 0.0
    for _ in range(repeats):
        start = time.process_time()
        num_tokens = work()
        best = max(best, num_tokens / (time.process_time() - start) * torch.get_num_threads())
    return best


def gemm_gflops() -> float:
    matrix = torch.randn(1024, 1024)
    return rate(lambda: torch.mm(matrix, matrix).shape[0] and 2 * 1024**3, 10) / 1e9


def sampling(model: Qwen2ForCausalLM, num_questions: int, *, skewed: bool) -> Callable[[], int]:
    # A randomly initialised model draws its tokens almost uniformly: one end token in 40 gives a mean length of 40.
    generator = HFGenerator(model, max_rows=num_questions * GROUP_SIZE, eos_ids=[1] if skewed else [VOCAB])
    load = requests(num_questions * (SKEWED_WAVES if skewed else 1), np.random.default_rng(0))
    params = SamplingParams(
        temperature=1.0, top_p=1.0, max_new_tokens=(4 if skewed else 2) * MEAN_TOKENS
    )  # fmt: skip
    return lambda: sum(len(row.token_ids) for group in generator.generate(load, params) for row in group)


def sampling_flops(shape: dict[str, int], lengths: list[int]) -> float:
    """The floor of a batch whose responses have these `lengths`."""
    hidden, width = shape["hidden"], shape["layers"] * shape["hidden"]
    grouped = hidden * shape["kv"] // shape["heads"]
    layer = hidden * (2 * hidden + 2 * grouped) + 3 * hidden * shape["ffn"]
    prompt, questions = shape["same"] + shape["own"], shape["questions"]
    read = shape["same"] + questions * shape["own"] + sum(lengths) - len(lengths)
    columns = (shape["same"] ** 2 + questions * (prompt**2 - shape["same"] ** 2)) / 2
    columns += sum((prompt + (length - 1) / 2) * (length - 1) for length in lengths)
    heads = questions + sum(lengths) - len(lengths)
    return 2 * shape["layers"] * layer * read + 2 * hidden * shape["vocab"] * heads + 4 * width * columns


def loaded(shape: dict[str, int]) -> tuple[HFGenerator, list[RolloutRequest], SamplingParams]:
    """A model of this shape with random weights, by the decoding step that the environment chooses, and its batch."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=shape["vocab"], hidden_size=shape["hidden"], intermediate_size=shape["ffn"],
            num_hidden_layers=shape["layers"], num_attention_heads=shape["heads"], num_key_value_heads=shape["kv"],
            max_position_embeddings=512, tie_word_embeddings=True,
        )
    )  # fmt: skip
    rng, vocab = np.random.default_rng(0), shape["vocab"]
    same = rng.integers(0, vocab, shape["same"])
    load = [
        replace(each, prompt_ids=np.append(same, rng.integers(0, vocab, shape["own"])).astype(np.int32))
        for each in requests(shape["questions"], rng)
    ]
    ends = range(vocab // shape["mean"]) if shape["mean"] else [vocab]
    generator = HFGenerator(model, max_rows=shape["questions"] * GROUP_SIZE, eos_ids=[*ends])
    return generator, load, SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=shape["most"], entropies=True)


def over_floor(shape: dict[str, int], repeats: int) -> dict[str, float]:
    generator, load, params = loaded(shape)
    found = []
    for _ in range(repeats + 1):
        floor_rate, start = gemm_gflops(), time.process_time()
        lengths = [len(row.token_ids) for group in generator.generate(load, params) for row in group]
        seconds = time.process_time() - start
        floor = sampling_flops(shape, lengths) / floor_rate / 1e9
        found.append((floor_rate, sum(lengths), seconds, floor, seconds / floor))
    names = "gemm_gflops", "tokens", "seconds", "floor_seconds", "over_floor"
    return dict(zip(names, np.median(found[1:], axis=0).tolist(), strict=True))


def beside_reference(shape: dict[str, int]) -> dict[str, float]:
    """Tokens alike and log-probs apart. Raises SystemExit where there is no native decoding step."""
    by_engine = []
    for switch in ("1", "0"):
        os.environ[native.SWITCH] = switch
        native.native_library.cache_clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ToolkitWarning)
            generator, load, params = loaded(shape)
        if switch == "1" and isinstance(reason := native.native_library(), str):
            raise SystemExit(f"no native decoding step: {reason}")
        by_engine.append([row for group in generator.generate(load, params) for row in group])
    alike, compared = 0, []
    for ours, theirs in zip(*by_engine, strict=True):
        both = min(len(ours.token_ids), len(theirs.token_ids))
        same = ours.token_ids[:both] == theirs.token_ids[:both]
        alike += int(same.sum())
        until = both if same.all() else int(same.argmin())
        compared.append(np.abs(ours.engine_logprobs[:until] - theirs.engine_logprobs[:until]))
    apart = np.concatenate(compared)
    return {
        "tokens": float(sum(len(row.token_ids) for row in by_engine[1])),
        "tokens_alike": float(alike),
        "logprobs_apart_mean": float(apart.mean()),
        "logprobs_apart_most": float(apart.max()),
    }


def measure(num_questions: int, repeats: int) -> dict[str, float]:
    model = build_model()
    policy = torch_policy(
        model,
        temperature=1.0,
        objective=ObjectiveSettings(),
        optim=OptimSettings(microbatch_tokens=4096),
    )
    rows = tuple(training_rows(num_questions, np.random.default_rng(0)))
    batch = MiniBatch(rows=rows, num_rollouts=len(rows), max_response_tokens=MAX_TOKENS, clip=False)
    full = rate(sampling(model, num_questions, skewed=False), repeats)
    skewed = rate(sampling(model, num_questions, skewed=True), max(1, repeats // 4))
    return {
        "gemm_gflops": gemm_gflops(),
        "sampling_full": full,
        "sampling_skewed": skewed,
        "skewed_share": skewed / full,
        "scoring": rate(lambda: len(policy.score([row.sequence for row in rows])) and batch.num_tokens, repeats),
        "training": rate(lambda: policy.update(batch).num_tokens, repeats),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=32, help="questions a step, 8 rollouts each")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--shape", choices=sorted(SHAPES), help="sampling of this shape over its floor, and no more")
    parser.add_argument("--reference", action="store_true", help="of --shape, the native step beside transformers'")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    if arguments.reference and not arguments.shape:
        parser.error("--reference compares the rollouts of a --shape")
    torch.set_num_threads(arguments.threads)
    if arguments.shape:
        shape = dict(zip(SIZES, SHAPES[arguments.shape], strict=True))
        figures = beside_reference(shape) if arguments.reference else over_floor(shape, arguments.repeats)
    else:
        figures = measure(arguments.questions, arguments.repeats)
    if arguments.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        plain = value < 1000 or arguments.shape
        form = ".1e" if name.startswith("logprobs") else ",.2f"
        print(f"{name:20} {value:12{form}}" if plain else f"{name:20} {value:12,.0f} tokens/s")


if __name__ == "__main__":
    main()
