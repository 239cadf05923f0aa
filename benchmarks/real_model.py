"""Tokens per second of sampling and updating, of a real model's shape: ours, vLLM, transformers and PyTorch.

    python benchmarks/real_model.py --backbone smollm2-135m                  # every engine, float32
    python benchmarks/real_model.py --dtype bfloat16 --engines hf,vllm --rows 32,128

Weights are random, which changes no time. Prompts of `--prompt` tokens begin with the same `--shared` ones, as worked
examples or a system message do, with 8 rollouts each; every response has `--response` tokens. Sampling counts response
tokens; its time has the prompts in it. `transformers` is its `generate` on one batch. An update is an on-policy one,
`padded` the same loss in plain PyTorch: rows side by side, whole logits of responses, `--padded-rows` at a time.
Figures are medians of `--repeats`, wall clock, all of one process but vLLM's.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from exgrpo_cli.algo.batching import MiniBatch, TrainingRow
from exgrpo_cli.base.types import RolloutRequest, SamplingParams, TokenSequence
from exgrpo_cli.config.layers import build_config
from exgrpo_cli.config.sections.objective import ObjectiveSettings
from exgrpo_cli.config.sections.run import OptimSettings
from exgrpo_cli.engines.hf.generator import HFGenerator
from exgrpo_cli.engines.policy.adamw import torch_policy
from exgrpo_cli.machine.memory import architecture

GROUP_SIZE = 8
WORDS = 1000
"""Token ids that prompts are made of."""

VLLM = """
import json, os, sys, tempfile, time
os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "4"}
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
from transformers import AutoConfig
from vllm import LLM, SamplingParams
if __name__ == "__main__":  # the engine's own process reads this file again
    folder, asked = sys.argv[1], json.load(sys.stdin)
    engine = LLM(model=folder, load_format="dummy", dtype=asked["dtype"], skip_tokenizer_init=True,
                 max_model_len=asked["length"], max_num_seqs=256, enable_prefix_caching=True, enforce_eager=True)
    params = SamplingParams(n=8, temperature=1.0, max_tokens=asked["response"], ignore_eos=True, detokenize=False)
    for count in asked["questions"]:
        times = []
        for repeat in range(asked["repeats"]):
            start = time.perf_counter()
            engine.generate([{"prompt_token_ids": ids} for ids in asked["prompts"][repeat][:count]], params,
                            use_tqdm=False)
            times.append(time.perf_counter() - start)
        print("TIMES", json.dumps([count, times]), flush=True)
"""


def prompts(arguments: argparse.Namespace, seed: int, count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    shared = rng.integers(2, WORDS, arguments.shared)
    own = arguments.prompt - arguments.shared
    return [np.concatenate([shared, rng.integers(2, WORDS, own)]).astype(np.int32) for _ in range(count)]


def timed(work: Callable[[int], object], repeats: int) -> float:
    """Median seconds of `work(repeat)`."""
    times = []
    for repeat in range(repeats):
        start = time.perf_counter()
        work(repeat)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def sample_hf(model: PreTrainedModel, arguments: argparse.Namespace, questions: int) -> float:
    generator = HFGenerator(model, max_rows=questions * GROUP_SIZE, eos_ids=[model.config.vocab_size])
    params = SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=arguments.response)

    def work(repeat: int) -> object:
        return generator.generate(
            [
                RolloutRequest(question_id=str(index), prompt_ids=prompt, seeds=tuple(range(GROUP_SIZE)))
                for index, prompt in enumerate(prompts(arguments, repeat, questions))
            ],
            params,
        )

    return timed(work, arguments.repeats)


def sample_transformers(model: PreTrainedModel, arguments: argparse.Namespace, questions: int) -> float:
    def work(repeat: int) -> object:
        ids = torch.from_numpy(np.repeat(prompts(arguments, repeat, questions), GROUP_SIZE, axis=0).astype(np.int64))
        return model.generate(  # type: ignore[operator]
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0,
            max_new_tokens=arguments.response, min_new_tokens=arguments.response,
        )  # fmt: skip

    return timed(work, arguments.repeats)


def sample_vllm(folder: str, arguments: argparse.Namespace) -> dict[int, float]:
    """Seconds by number of questions, from a process of its own."""
    most = max(arguments.rows) // GROUP_SIZE
    asked = {
        "dtype": arguments.dtype,
        "length": arguments.prompt + arguments.response,
        "response": arguments.response,
        "repeats": arguments.repeats,
        "questions": [rows // GROUP_SIZE for rows in arguments.rows],
        "prompts": [[ids.tolist() for ids in prompts(arguments, seed, most)] for seed in range(arguments.repeats)],
    }
    script = Path(folder) / "with_vllm.py"
    script.write_text(VLLM)
    done = subprocess.run([sys.executable, script, folder], input=json.dumps(asked), stdout=subprocess.PIPE, text=True)
    lines = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("TIMES ")]
    return {count * GROUP_SIZE: statistics.median(times) for count, times in lines}


def training_rows(arguments: argparse.Namespace, questions: int) -> list[TrainingRow]:
    rng = np.random.default_rng(0)
    return [
        TrainingRow(
            sequence=TokenSequence(
                prompt_ids=prompt, response_ids=rng.integers(2, WORDS, arguments.response).astype(np.int32)
            ),
            advantage=float(rng.normal()),
            behaviour_logprobs=np.full(arguments.response, -np.log(WORDS), dtype=np.float32),
            replayed=False,
        )
        for prompt in prompts(arguments, 0, questions)
        for _ in range(GROUP_SIZE)
    ]


def update_padded(model: PreTrainedModel, rows: list[TrainingRow], num_rows: int, optimizer: torch.optim.AdamW) -> None:
    """The clipped surrogate of rows padded side by side."""
    response = len(rows[0].sequence.response_ids)
    for first in range(0, len(rows), num_rows):
        some = rows[first : first + num_rows]
        ids = torch.stack(
            [
                torch.from_numpy(np.concatenate([row.sequence.prompt_ids, row.sequence.response_ids]).astype(np.int64))
                for row in some
            ]
        )
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=response + 1).logits[:, :-1].float()
        logprobs = logits.log_softmax(-1).gather(2, ids[:, -response:, None])[..., 0]
        ratio = (logprobs - torch.from_numpy(np.stack([row.behaviour_logprobs for row in some]))).exp()
        advantages = torch.tensor([[row.advantage] for row in some])
        gain = torch.minimum(advantages * ratio, advantages * ratio.clamp(0.8, 1.2))
        (-gain.sum() / (len(rows) * response)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def updates(model: PreTrainedModel, arguments: argparse.Namespace, questions: int) -> dict[str, float]:
    rows = training_rows(arguments, questions)
    batch = MiniBatch(rows=tuple(rows), num_rollouts=len(rows), max_response_tokens=arguments.response, clip=True)
    seconds = {}
    if "padded" in arguments.engines:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-7)
        seconds["update, padded"] = timed(
            lambda _: update_padded(model, rows, arguments.padded_rows, optimizer), arguments.repeats
        )
    policy = torch_policy(
        model, temperature=1.0, objective=ObjectiveSettings(), optim=OptimSettings(microbatch_tokens=arguments.tokens)
    )
    seconds["scoring, ours"] = timed(lambda _: policy.score([row.sequence for row in rows]), arguments.repeats)
    seconds["update, ours"] = timed(lambda _: policy.update(batch), arguments.repeats)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="smollm2-135m")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--engines", default="hf,transformers,vllm,padded", help="of these, comma-separated")
    parser.add_argument("--rows", default="8,32,64,128", help="rollouts at once")
    parser.add_argument("--prompt", type=int, default=340)
    parser.add_argument("--shared", type=int, default=290)
    parser.add_argument("--response", type=int, default=32)
    parser.add_argument("--update-rows", type=int, default=64)
    parser.add_argument("--padded-rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048, help="of a micro-batch of ours")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    arguments.rows = [int(rows) for rows in arguments.rows.split(",")]
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    preset = build_config(backbone=arguments.backbone)
    config = architecture(preset.backbone, preset.tiny)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, arguments.dtype)).eval()
    seconds: dict[str, dict[int, float]] = {}
    for name, sample in (("hf", sample_hf), ("transformers", sample_transformers)):
        if name in arguments.engines:
            seconds[name] = {rows: sample(model, arguments, rows // GROUP_SIZE) for rows in arguments.rows}
    if "vllm" in arguments.engines:
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            seconds["vllm"] = sample_vllm(folder, arguments)
    print(f"{arguments.backbone}, {arguments.dtype}, {arguments.threads} threads; generated tokens a second")
    print("rows          " + "".join(f"{rows:>10}" for rows in arguments.rows))
    for name, own in seconds.items():
        rates = [rows * arguments.response / own[rows] if rows in own else float("nan") for rows in arguments.rows]
        print(f"{name:14}" + "".join(f"{rate:10.0f}" for rate in rates))
    for name, took in updates(model, arguments, arguments.update_rows // GROUP_SIZE).items():
        print(f"{name:16} {took:8.2f} s of {arguments.update_rows} rows")


if __name__ == "__main__":
    main()
