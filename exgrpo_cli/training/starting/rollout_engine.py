"""The rollout engine that the settings name, with the backbone's weights."""

import torch

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.config.settings import Config
from exgrpo_cli.engines.protocols import Generator
from exgrpo_cli.engines.ranked_generator import RankedGenerator
from exgrpo_cli.models.load import Backbone, locate
from exgrpo_cli.ranks.ranks import Ranks
from exgrpo_cli.training.parts import Prompts


def make_generator(
    config: Config, backbone: Backbone, prompts: Prompts, device: torch.device, ranks: Ranks
) -> Generator:
    """A Generator for `prompts`; `hf` shares the policy's module, `vllm` holds weights of its own.

    Raises InputError when the engine is not installed, or a prompt and its response exceed the backbone's window.
    """
    local = _local_generator(config, backbone, prompts, device)
    if ranks.world_size == 1:
        return local
    return RankedGenerator(local, ranks, tensor_parallel=config.rollout.tensor_parallel)


def _local_generator(config: Config, backbone: Backbone, prompts: Prompts, device: torch.device) -> Generator:
    if config.rollout.engine == "hf":
        from exgrpo_cli.engines.hf.generator import HFGenerator

        return HFGenerator(backbone.model, max_rows=config.rollout.max_rows, eos_ids=backbone.eos_ids)
    from exgrpo_cli.engines.vllm.generator import VLLMGenerator
    from exgrpo_cli.engines.vllm.proof import Canary
    from exgrpo_cli.engines.vllm.start import VLLMSettings, config_overrides

    folder = locate(config.backbone, config.tiny)
    settings = VLLMSettings(
        folder=folder,
        dtype=config.backbone.dtype,
        device=device.type,
        max_tokens=longest_row(config, backbone, prompts),
        max_rows=config.rollout.max_rows,
        gpu_memory_fraction=config.rollout.gpu_memory_fraction,
        tensor_parallel=config.rollout.tensor_parallel,
        hf_overrides=config_overrides(
            folder,
            rope_theta=config.backbone.rope_theta,
            max_position_embeddings=config.backbone.max_position_embeddings,
        ),
    )
    canary = Canary.of_prompt(next(iter(prompts.values())), config.rollout.temperature)
    return VLLMGenerator(settings, eos_ids=backbone.eos_ids, canary=canary)


def longest_row(config: Config, backbone: Backbone, prompts: Prompts) -> int:
    """Tokens of the longest prompt with the longest response; raises InputError when the window is smaller."""
    longest = max(map(len, prompts.values()))
    needed = longest + config.rollout.max_response_tokens
    window = getattr(backbone.model.config, "max_position_embeddings", None)
    if window is not None and needed > window:
        raise InputError(
            f"the longest prompt has {longest} tokens and rollout.max_response_tokens = "
            f"{config.rollout.max_response_tokens}: {needed} exceed the backbone's window of {window}. Lower "
            f"rollout.max_response_tokens to {window - longest}, or raise backbone.max_position_embeddings."
        )
    return needed
