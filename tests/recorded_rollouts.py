"""A run that notes its rollouts and gradients, and a run on the noted rollouts."""

import pickle
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from exgrpo_cli.config import resolve
from exgrpo_cli.engines.protocols import Generator, Score
from exgrpo_cli.engines.ranks import Ranks
from exgrpo_cli.training import assemble, launch
from exgrpo_cli.training.reporter import SilentReporter
from exgrpo_cli.types import Rollout, RolloutRequest, SamplingParams

Noted = dict[tuple[str, int], Rollout]
"""Rollouts by question and seed."""


class Recorder:
    """Implements `protocols.Generator`: another one, whose rollouts are noted."""

    def __init__(self, generator: Generator, noted: Noted) -> None:
        self._generator = generator
        self._noted = noted

    @property
    def weight_version(self) -> int:
        return self._generator.weight_version

    def generate(
        self,
        requests: Sequence[RolloutRequest],
        params: SamplingParams,
        on_finished: Callable[[int, Rollout], None] | None = None,
    ) -> list[list[Rollout]]:
        groups = self._generator.generate(requests, params, on_finished)
        for request, group in zip(requests, groups, strict=True):
            self._noted |= zip(((request.question_id, seed) for seed in request.seeds), group, strict=True)
        return groups

    def sleep(self) -> None:
        self._generator.sleep()

    def sync(self, weights: Iterator[tuple[str, Tensor]], weight_version: int, score: Score | None = None) -> None:
        self._generator.sync(weights, weight_version, score)

    def close(self) -> None:
        self._generator.close()


class Replayer(Recorder):
    """Returns what was noted; a question or visit that was not asked for then is a KeyError."""

    def generate(
        self,
        requests: Sequence[RolloutRequest],
        params: SamplingParams,
        on_finished: Callable[[int, Rollout], None] | None = None,
    ) -> list[list[Rollout]]:
        return [[self._noted[request.question_id, seed] for seed in request.seeds] for request in requests]


def train_and_note(ranks: Ranks, folder: Path) -> list[Tensor]:
    """Train by `folder/settings.toml` in `folder/run-<ranks>`; returns the gradient of each update.

    One rank samples and leaves `folder/rollouts.pkl`; several train on what it holds.
    """
    file = folder / "rollouts.pkl"
    gradients: list[Tensor] = []
    noted: Noted = {} if ranks.world_size == 1 else pickle.loads(file.read_bytes())
    wrapper = Recorder if ranks.world_size == 1 else Replayer
    make_generator = assemble.make_generator

    def note(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        gradients.append(torch.cat([weight.grad.flatten() for weight in weights]).clone())

    hook = register_optimizer_step_pre_hook(note)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(assemble, "make_generator", lambda *parts: wrapper(make_generator(*parts), noted))
            launch.train(
                resolve([("settings.toml", tomllib.loads((folder / "settings.toml").read_text()))]),
                folder / f"run-{ranks.world_size}",
                reporter=SilentReporter(),
                ranks=ranks,
            )
    finally:
        hook.remove()
    if ranks.world_size == 1:
        file.write_bytes(pickle.dumps(noted))
    return gradients
