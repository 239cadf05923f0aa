"""A sampler and a policy on the simulated device beside the same ones on the CPU: `python -m` prints what was counted.

One JSON object: for each job the times the host waited, the units of work, and how far the results are from the CPU's.
"""

import gc
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import numpy as np
import pytest
import simulated_device
import torch
from simulated_device import counted
from small_policy import VOCAB, build_model, build_policy, minibatch, sequences, weights
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from exgrpo_cli.algo.batching import packed_batches
from exgrpo_cli.base.types import RolloutRequest, SamplingParams
from exgrpo_cli.config.layers import build_config
from exgrpo_cli.engines.hf.generator import DecodeBatch, HFGenerator
from exgrpo_cli.engines.lora import plain_copy
from exgrpo_cli.machine.memory import memory_plan, shape_of
from exgrpo_cli.training.check import Check, Meter

TOKENS = 40
BUDGET = 30
"""Inputs of a micro-batch: the twelve rows make several."""
Phases = dict[str, tuple[int, int]]


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


class Watched(Meter):
    """Counts the bytes of this device."""

    def _begin(self) -> None:
        counted.peak_bytes = counted.live_bytes

    def _taken(self) -> int:
        return counted.peak_bytes


def memory(device: torch.device, *assignments: str) -> Phases:
    """Planned bytes, and the most that was alive, of each phase of a check's two steps.

    Rows are short and no head shares its keys: torch has no fused attention for this device, and what it keeps in its
    place (scores of each pair of tokens, repeated keys) no GPU would.
    """
    config = Qwen2Config(
        vocab_size=1000, hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=64,
    )  # fmt: skip
    limits = ("data.max_prompt_tokens=8", "rollout.max_response_tokens=16", "rollout.questions_per_step=4")
    others = ("data.heldout=none", "optim.minibatches=1", "optim.microbatch_tokens=256", *assignments)
    settings = build_config(assignments=[*limits, *others])
    optim, questions, shape = settings.optim, settings.rollout.questions_per_step, shape_of(config)
    planned = dict(memory_plan(shape, settings, gpus=1, on_gpu=False).peaks)
    if settings.backbone.dtype == "float32":
        # The device is no CPU: no weights are laid out anew for a native decoding step.
        planned["rollouts"] -= 4 * shape.num_parameters
    gc.collect()
    meter = Watched(device)
    meter._before = counted.live_bytes
    model = Qwen2ForCausalLM(config).to(getattr(torch, settings.backbone.dtype)).to(device)
    sampled = plain_copy(model) if settings.lora.rank > 0 else model
    checkpointing = settings.backbone.gradient_checkpointing
    chosen = {"microbatch_tokens": optim.microbatch_tokens, "gradient_checkpointing": checkpointing}
    policy = build_policy(model, optim=optim, lora=settings.lora, **chosen)
    generator = HFGenerator(sampled, max_rows=512, eos_ids=())
    rng = np.random.default_rng(0)
    prompts = {str(n): rng.integers(0, config.vocab_size, 8).astype(np.int32) for n in range(questions)}
    about = {"config": settings, "meter": meter, "prompts": prompts, "trained": questions}
    check = Check(policy=policy, generator=generator, **about)
    check.sync()
    for step in (1, 2):
        check.train(step)
    return {name: (bound, meter.peaks[name]) for name, bound in planned.items()}


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
    for dtype, checkpointing, rank in product(("float32", "bfloat16"), ("false", "true"), (-1, 8)):
        asked = f"backbone.dtype={dtype}", f"backbone.gradient_checkpointing={checkpointing}", f"lora.rank={rank}"
        figures[f"memory-{dtype}-{checkpointing}-{rank}"] = memory(device, *asked)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
