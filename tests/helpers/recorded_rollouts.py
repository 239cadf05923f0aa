"""A run that notes its rollouts and gradients, and a run on the noted rollouts."""

import pickle
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from exgrpo_cli.base.reporter import SilentReporter
from exgrpo_cli.base.types import Rollout, RolloutRequest
from exgrpo_cli.config.settings import resolve
from exgrpo_cli.engines.generators import Generator
from exgrpo_cli.engines.policy.policy import Policy
from exgrpo_cli.ranks import Ranks
from exgrpo_cli.training import run, setup

Noted = dict[tuple[str, int], Rollout]
"""Rollouts by question and seed."""


def note_rollouts(generator: Generator, noted: Noted) -> Generator:
    """`generator`, noting what it samples."""
    sample = generator.generate

    def generate(requests: Sequence[RolloutRequest], *arguments: Any, **options: Any) -> list[list[Rollout]]:
        groups = sample(requests, *arguments, **options)
        for request, group in zip(requests, groups, strict=True):
            noted.update(zip(((request.question_id, seed) for seed in request.seeds), group, strict=True))
        return groups

    generator.generate = generate
    return generator


def replay_rollouts(generator: Generator, noted: Noted) -> Generator:
    """`generator`, returning what was noted; a question or visit that was not asked for then is a KeyError."""

    def generate(
        requests: Sequence[RolloutRequest], params: Any, heard: Any = None, enough: Any = None
    ) -> list[list[Rollout]]:
        groups = [[noted[request.question_id, seed] for seed in request.seeds] for request in requests]
        for index, group in enumerate(groups if heard else ()):
            for rollout in group:
                heard(index, rollout)
        return groups

    generator.generate = generate
    return generator


def train_and_note(ranks: Ranks, folder: Path) -> list[Tensor]:
    """Train by `folder/settings.toml` in `folder/run-<ranks>`; returns the gradient of each update.

    One rank samples and leaves `folder/rollouts.pkl`; several train on what it holds.
    """
    file = folder / "rollouts.pkl"
    gradients: list[Tensor] = []
    noted: Noted = {} if ranks.world_size == 1 else pickle.loads(file.read_bytes())
    wrapper = note_rollouts if ranks.world_size == 1 else replay_rollouts
    make_engines = setup.make_engines

    def recorded(*parts: Any) -> tuple[Policy, Generator]:
        policy, generator = make_engines(*parts)
        return policy, wrapper(generator, noted)

    def note(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        gradients.append(torch.cat([weight.grad.flatten() for weight in weights]).clone())

    hook = register_optimizer_step_pre_hook(note)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(setup, "make_engines", recorded)
            run.train(
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
