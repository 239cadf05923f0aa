"""A sampler and a policy on the simulated device beside the same ones on the CPU: `python -m` prints what was counted.

One JSON object: for each job the times the host waited, the units of work, and how far the results are from the CPU's.
"""

import gc
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import simulated_device
import torch
from simulated_device import counted
from small_policy import VOCAB, build_model, build_policy, minibatch, sequences, weights
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from exgrpo_cli.algo.batching import TrainingRow, packed_batches
from exgrpo_cli.base.types import RolloutRequest, SamplingParams, TokenSequence
from exgrpo_cli.config.layers import build_config
from exgrpo_cli.config.sections.run import OptimSettings
from exgrpo_cli.engines.hf.generator import DecodeBatch, HFGenerator
from exgrpo_cli.engines.lora import plain_copy
from exgrpo_cli.machine.memory import memory_plan, shape_of

TOKENS = 40
BUDGET = 30
"""Inputs of a micro-batch: the twelve rows make several."""


def requests() -> list[RolloutRequest]:
    """Five prompts, four rollouts each."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, size).astype(np.int32) for size in (5, 1, 7, 3, 4)]
    seeds = rng.integers(0, 2**63 - 1, (len(prompts), 4)).tolist()
    return [
        RolloutRequest(question_id=f"q{index}", prompt_ids=prompt, seeds=tuple(own))
        for index, (prompt, own) in enumerate(zip(prompts, seeds, strict=True))
    ]


def rollouts(model: PreTrainedModel, max_rows: int) -> list[list[int]]:
    """Token ids of all rollouts."""
    params = SamplingParams(temperature=0.9, top_p=1.0, max_new_tokens=TOKENS)
    groups = HFGenerator(model, max_rows=max_rows, eos_ids=(3, 7)).generate(requests(), params)
    return [rollout.token_ids.tolist() for group in groups for rollout in group]


def blocking_copies(device: torch.device) -> int:
    """Waits of three copies from the host that a GPU's host waits for, and of one that it does not."""
    there, before = torch.zeros(3).to(device), counted.waits.copy()
    there[[0, 1]] = 1.0
    torch.tensor([1.0], device=device)
    torch.ones(3).to(device)
    torch.ones(3).to(device, non_blocking=True)
    return (counted.waits - before).total()


@contextmanager
def counting(calls: "Counter[str]") -> Iterator[None]:
    """Count tokens decoded (of all rows at once) and times that rows were let in."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("step", "admit"):

            def call(batch: DecodeBatch, name: str = name, plain: Any = getattr(DecodeBatch, name)) -> object:
                calls[name] += 1
                return plain(batch)

            patch.setattr(DecodeBatch, name, call)
        yield


def memory(device: torch.device, dtype: str, *, checkpointing: bool, rank: int) -> dict[str, tuple[int, int]]:
    """Planned bytes, and the most that was alive, of each phase of a second step: 4 questions, 8 rollouts each.

    Rows are short and no head shares its keys: torch has no fused attention for this device, and what it keeps in its
    place (scores of each pair of tokens, repeated keys) no GPU would.
    """
    prompt, response, questions = 8, 16, 4
    config = Qwen2Config(
        vocab_size=1000, hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=64,
    )  # fmt: skip
    settings = build_config(
        assignments=[
            f"backbone.dtype={dtype}", f"backbone.gradient_checkpointing={str(checkpointing).lower()}",
            f"data.max_prompt_tokens={prompt}", 'data.heldout=none', f"rollout.max_response_tokens={response}",
            f"rollout.questions_per_step={questions}", "optim.minibatches=1", "optim.microbatch_tokens=256",
            f"lora.rank={rank}",
        ]
    )  # fmt: skip
    shape = shape_of(config)
    plan = memory_plan(shape, settings, gpus=1, on_gpu=False)
    # The device is no CPU: no weights are laid out anew for a native decoding step.
    packed = 4 * shape.num_parameters if dtype == "float32" else 0
    gc.collect()
    before = counted.live_bytes
    model = Qwen2ForCausalLM(config).to(getattr(torch, dtype)).to(device)
    sampled, optim = plain_copy(model) if rank > 0 else model, OptimSettings(microbatch_tokens=256)
    chosen = {"optim": optim, "microbatch_tokens": 256, "gradient_checkpointing": checkpointing, "lora": settings.lora}
    policy = build_policy(model, **chosen)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 1000, prompt).astype(np.int32) for _ in range(questions)]
    asked = [RolloutRequest(question_id=str(n), prompt_ids=own, seeds=tuple(range(8))) for n, own in enumerate(prompts)]
    rows = [
        TokenSequence(prompt_ids=own, response_ids=rng.integers(0, 1000, response).astype(np.int32))
        for own in prompts
        for _ in range(8)
    ]
    flat = np.full(response, -7.0, dtype=np.float32)
    training = tuple(
        TrainingRow(sequence=row, advantage=(-1.0) ** index, behaviour_logprobs=flat, replayed=False)
        for index, row in enumerate(rows)
    )
    batch = minibatch(rows=training, num_rollouts=len(rows), max_response_tokens=response)
    # Optimizer state is there from the first update on.
    policy.update(batch)
    generator = HFGenerator(sampled, max_rows=512, eos_ids=())
    params = SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=response)
    phases = {
        "rollouts": (plan.peaks["rollouts"] - packed, lambda: generator.generate(asked, params)),
        "scoring": (plan.peaks["scoring"], lambda: policy.score(rows)),
        "update": (plan.peaks["update"], lambda: policy.update(batch)),
    }
    found = {}
    for name, (planned, work) in phases.items():
        counted.peak_bytes = counted.live_bytes
        work()
        found[name] = (planned, counted.peak_bytes - before)
    return found


def main() -> None:
    """Every job on the CPU, then on the device."""
    device = simulated_device.install()
    figures: dict[str, object] = {"counted": blocking_copies(device)}
    for max_rows in (20, 6):
        expected, model = rollouts(build_model().eval(), max_rows), build_model().to(device).eval()
        before, steps = counted.waits.copy(), Counter[str]()
        with counting(steps):
            own = rollouts(model, max_rows)
        # The proof of the head, when the model is cut in two, looks at three numbers.
        waits = (counted.waits - before).total() - 3
        figures[f"rollouts-{max_rows}"] = {"waits": waits, "equal": own == expected, **steps}
    for checkpointing in (False, True):
        there, here = build_model().to(device), build_model()
        policy, beside = (
            build_policy(model, microbatch_tokens=BUDGET, gradient_checkpointing=checkpointing)
            for model in (there, here)
        )
        before = counted.waits.copy()
        pairs = zip(policy.score(sequences()), beside.score(sequences()), strict=True)
        gaps = [float(np.abs(own.logprobs - other.logprobs).max()) for own, other in pairs]
        scoring = (counted.waits - before).total()
        before = counted.waits.copy()
        reports = [each.update(minibatch()) for each in (policy, beside)]
        updating = (counted.waits - before).total()
        figures[f"policy-{checkpointing}"] = {
            "micro_batches": len(packed_batches(sequences(), BUDGET)),
            "scoring": scoring,
            "updating": updating,
            "applied": [report.applied for report in reports],
            "logprob_gap": max(gaps),
            "weight_gap": float((weights(there).cpu() - weights(here)).abs().max()),
        }
    for dtype in ("float32", "bfloat16"):
        for checkpointing in (False, True):
            for rank in (-1, 8):
                name = f"memory-{dtype}-{checkpointing}-{rank}"
                figures[name] = memory(device, dtype, checkpointing=checkpointing, rank=rank)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
