"""A mixed step of every append and refill method beside what its trained and scored tokens say that it costs.

    python benchmarks/replay_methods.py --steps 30

One run a method, in which every other step is on-policy: both kinds meet the same policy, buffer and machine. On-policy
steps tell the CPU time of a scored token (phase `logprobs`), of a trained one (`update`) and of storing the
step's rows (`replay`); a mixed step is said to take its own tokens times these. Medians over steps.

Tokens are those of responses, or all inputs of the model: the rows of a group share one prompt, a row that is drawn
alone brings its own. A prompt costs less than a response, which has logits too, so the truth is between the two.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from exgrpo_cli.base.reporter import SilentReporter
from exgrpo_cli.config.layers import build_config
from exgrpo_cli.engines.policy import packing
from exgrpo_cli.engines.policy.packing import PackedBatch, pack
from exgrpo_cli.training import metrics
from exgrpo_cli.training.run import train
from exgrpo_cli.training.state import RunState

METHODS = (
    "headroom-drift",
    "latest",
    "adv-per",
    "fresh-per",
    "uniform-fifo",
    "m2po",
    "sft-successes",
    "trl-refill",
    "bapo-refill",
)
SETTINGS = (
    "data.heldout=none",
    "arithmetic.num_heldout=10",
    "run.plots=false",
    "run.threads=1",
    "replay.collect_before_start=true",
    # Too small to matter, but rows without advantage are part of the update too, as their tokens say.
    "objective.entropy_coefficient=1e-12",
    # What a scored token costs is told by the steps without replay, which score all rollouts.
    "rollout.logprobs=trainer",
)
OWN = {"adv-per": ("replay.warmup_steps=1",), "headroom-drift": ("replay.max_drift=0.05",)}
SKIPPED = 4
"""First steps, which warm caches and find an empty store."""


class Inputs:
    """What goes into the model, prompts included, by step: scored without gradients, trained with them."""

    def __init__(self) -> None:
        self.step = 0
        self.scored: Counter[int] = Counter()
        self.trained: Counter[int] = Counter()

    def is_mixed(self, state: RunState, step: int, *rest: object) -> bool:
        """Stands for `RunState.is_mixed`, which a step asks first."""
        self.step = step
        return step % 2 == 0

    def pack(self, *rows: Any, **settings: Any) -> PackedBatch:
        """Stands for `pack`."""
        batch = pack(*rows, **settings)
        (self.trained if torch.is_grad_enabled() else self.scored)[self.step] += batch.input_ids.numel()
        return batch


def lines_of(method: str, steps: int, settings: list[str]) -> list[dict[str, Any]]:
    """The journal of a run of the method, on-policy in its odd steps, with the model's inputs."""
    config = build_config(method=method, assignments=[*SETTINGS, *OWN.get(method, ()), *settings, f"run.steps={steps}"])
    inputs = Inputs()
    RunState.is_mixed = lambda *asked: inputs.is_mixed(*asked)  # type: ignore[method-assign]
    packing.pack = inputs.pack
    with tempfile.TemporaryDirectory() as folder:
        train(config, Path(folder) / "run", reporter=SilentReporter())
        lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["inputs/scored"], line["inputs/trained"] = inputs.scored[line["step"]], inputs.trained[line["step"]]
    return lines


def cost_of(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Medians of a run: tokens, CPU time of mixed steps, and that time over what the tokens say."""
    kept = [line for line in lines if line["step"] > SKIPPED]
    fresh = [line for line in kept if line["phase"] != "mixed"]
    mixed = [line for line in kept if line["phase"] == "mixed" and line["replay/used"]]
    storing = statistics.median(line["time/replay"] for line in fresh)
    took = [line["time/logprobs"] + line["time/replay"] + line["time/update"] for line in mixed]

    def over_said(counted: str) -> float:
        scored = statistics.median(line["time/logprobs"] / line[f"{counted}/scored"] for line in fresh)
        trained = statistics.median(line["time/update"] / line[f"{counted}/trained"] for line in fresh)
        said = [storing + scored * line[f"{counted}/scored"] + trained * line[f"{counted}/trained"] for line in mixed]
        return statistics.median(one / other for one, other in zip(took, said, strict=True))

    return {
        "steps": len(mixed),
        "trained": statistics.median(line["tokens/trained"] for line in mixed),
        "scored": statistics.median(line["tokens/scored"] for line in mixed),
        "took_ms": 1e3 * statistics.median(took),
        "over_said_by_tokens": over_said("tokens"),
        "over_said_by_inputs": over_said("inputs"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--methods", default=",".join(METHODS), help="comma separated")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="further settings")
    options = parser.parse_args()
    # What other programs take does not count.
    metrics.time = SimpleNamespace(perf_counter=time.process_time)  # type: ignore[attr-defined]
    for method in options.methods.split(","):
        found = cost_of(lines_of(method, options.steps, options.set))
        print(f"{method:16}" + "".join(f"  {name} {value:,.2f}" for name, value in found.items()), flush=True)


if __name__ == "__main__":
    main()
