"""A sampler and a policy on the simulated device beside the same ones on the CPU: `python -m` prints what was counted.

One JSON object: for each job the times the host waited, the units of work, and how far the results are from the CPU's.
"""

import json

import numpy as np
import simulated_device
import torch
from simulated_device import counted
from small_policy import VOCAB, build_model, build_policy, minibatch, sequences, weights

from exgrpo_cli.algo.batching import packed_batches
from exgrpo_cli.engines.hf.generator import HFGenerator
from exgrpo_cli.types import RolloutRequest, SamplingParams

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


def rollouts(device: torch.device, max_rows: int) -> list[list[int]]:
    """Token ids of all rollouts."""
    model = build_model().to(device).eval()
    params = SamplingParams(temperature=0.9, top_p=1.0, max_new_tokens=TOKENS)
    groups = HFGenerator(model, max_rows=max_rows, eos_ids=(3, 7)).generate(requests(), params)
    return [rollout.token_ids.tolist() for group in groups for rollout in group]


def main() -> None:
    """Every job on the CPU, then on the device."""
    device, cpu = simulated_device.install(), torch.device("cpu")
    figures: dict[str, object] = {}
    for max_rows in (20, 6):
        expected, before = rollouts(cpu, max_rows), counted.waits.copy()
        own = rollouts(device, max_rows)
        # The proof of the head, when the model is cut in two, looks at three numbers.
        waits = (counted.waits - before).total() - 3
        figures[f"rollouts-{max_rows}"] = {"waits": waits, "equal": own == expected, "longest": max(map(len, own))}
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
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
