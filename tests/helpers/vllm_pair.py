"""A policy and vLLM on the CPU, which samples with its weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from exgrpo_cli.base.types import Rollout, RolloutRequest, TokenSequence
from exgrpo_cli.config.sections.objective import ObjectiveSettings
from exgrpo_cli.config.sections.run import BackboneSettings, LoraSettings, OptimSettings
from exgrpo_cli.engines.policy.adamw import torch_policy
from exgrpo_cli.engines.policy.policy import Policy
from exgrpo_cli.models.load import load_folder

MARKS = [
    pytest.mark.engines,
    # Of vLLM's own modules, some of them loaded when they are first needed.
    pytest.mark.filterwarnings("ignore:::vllm"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def schedule_asynchronously(patched: pytest.MonkeyPatch) -> None:
    """Let vLLM schedule as on a GPU, a step ahead of what it knows, which its CPU build leaves out."""
    from vllm.platforms.cpu import CpuPlatform

    configured = CpuPlatform.check_and_update_config.__func__

    def forced(cls: type, config: Any) -> None:
        configured(cls, config)
        config.scheduler_config.async_scheduling = True

    patched.setattr(CpuPlatform, "check_and_update_config", classmethod(forced))


@contextmanager
def opened(
    folder: Path,
    prompt: np.ndarray,
    *,
    dtype: str = "float32",
    temperature: float = 0.8,
    rank: int = -1,
    sync: str = "merged",
    **sizes: int,
) -> Iterator[tuple[Policy, Any]]:
    """The two, synced once; `prompt` is that of the canary, and `sizes` are `max_tokens` and `max_rows`."""
    from exgrpo_cli.engines.vllm.generator import VLLMGenerator, VLLMSettings
    from exgrpo_cli.engines.vllm.proof import canary_of

    precision = BackboneSettings(dtype=dtype)
    backbone = load_folder(folder, torch.device("cpu"), precision)
    parts = {"objective": ObjectiveSettings(), "optim": OptimSettings(), "lora": LoraSettings(rank=rank, sync=sync)}
    policy = torch_policy(backbone.model, temperature=temperature, **parts)
    settings = VLLMSettings(folder=folder, backbone=precision, device="cpu", lora=parts["lora"], **sizes)
    generator = VLLMGenerator(settings, eos_ids=backbone.eos_ids, canary=(canary_of(prompt), temperature))
    try:
        generator.sync(policy.sampled_weights(), 0, policy.score)
        yield policy, generator
    finally:
        generator.close()


def gaps(policy: Policy, requests: list[RolloutRequest], groups: list[list[Rollout]]) -> np.ndarray:
    """|log pi_trainer - log pi_engine| of all tokens."""
    rows = [(each.prompt_ids, rollout) for each, group in zip(requests, groups, strict=True) for rollout in group]
    scores = policy.score([TokenSequence(prompt_ids=ids, response_ids=rollout.token_ids) for ids, rollout in rows])
    both = [(score.logprobs, rollout.engine_logprobs) for score, (_, rollout) in zip(scores, rows, strict=True)]
    return np.concatenate([np.abs(ours - theirs) for ours, theirs in both])
