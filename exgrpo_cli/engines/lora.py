"""LoRA by `peft`: a model whose linear layers carry an adapter, and the weights that both come to.

An adapted weight is W + alpha / r x B A, with W frozen. The policy trains A and B in place; everything that samples or
is written as a model takes the merged weights, under the names of the plain model, so that engines, checksums and
exports know nothing of an adapter.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.versions import install_command
from exgrpo_cli.config.sections.run import LoraSettings
from exgrpo_cli.engines.vllm.proof import bit_checksum

ADAPTER = "default"
"""Name of the one adapter, as peft calls it."""
IN_FILES = "base_model.model."
"""Beginning of the names of tensors in peft's files."""
FACTOR = ".lora_"
"""Beginning of what follows an adapted layer's path in the names of A and B."""
WRAPPED = ".base_layer."
"""Part of the names of an adapted layer's own tensors."""


def adapt(model: PreTrainedModel, settings: LoraSettings, seed: int) -> None:
    """Freeze `model` and give its layers an adapter, in place: A drawn by `seed`, B zero, both of its precision.

    Raises InputError where peft is missing or a target is no linear layer inside the model.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise InputError(f"lora.rank = {settings.rank} needs peft ({error}): {install_command('lora')}.") from error
    head = model.get_output_embeddings()
    linear = (name for name, each in model.named_modules() if isinstance(each, nn.Linear) and each is not head)
    known = sorted({name.rpartition(".")[2] for name in linear})
    targets = known if settings.targets == "all-linear" else [each.strip() for each in settings.targets.split(",")]
    if unknown := [each for each in targets if each not in known]:
        raise InputError(
            f"lora.targets names {unknown[0]!r}, which {type(model).__name__} has not below its head: "
            f"use all-linear, or some of {', '.join(known)}."
        )
    config = LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=targets, task_type="CAUSAL_LM")
    # What initialising draws, nothing else may notice.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # peft's own door: the one of transformers asks for a peft that came out after it.
        inject_adapter_in_model(config, model, ADAPTER)


def fingerprint(model: PreTrainedModel) -> int:
    """A number that tells the weights of a model, as it is loaded for an adapter, from others."""
    return sum(place * bit_checksum(each) for place, each in enumerate(model.state_dict().values(), 1)) % 2**63


def plain_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model that is not adapted yet, for merged weights: embeddings and head, which stay, are shared."""
    shared = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    return copy.deepcopy(model, {id(weight): weight for weight in shared})


def plain_name(name: str) -> str:
    """Name of an adapted model's tensor in the plain one."""
    return name.replace(WRAPPED, ".")


def merged(
    weight: Float[Tensor, "outs ins"], down: Float[Tensor, "rank ins"], up: Float[Tensor, "outs rank"], scaling: float
) -> Float[Tensor, "outs ins"]:
    """W + scaling x B A, computed in float32 or wider and rounded once; in float32 what peft makes of it."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return (weight.to(wide) + (up.to(wide) @ down.to(wide)) * scaling).to(weight.dtype)


def merged_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The state dict of the plain model, one tensor at a time, adapted weights merged."""
    tensors = model.state_dict()
    for name, tensor in tensors.items():
        path, wrapped, leaf = name.rpartition(WRAPPED)
        if wrapped and leaf == "weight":
            down, up = (tensors[f"{path}.lora_{each}.{ADAPTER}.weight"] for each in "AB")
            tensor = merged(tensor, down, up, cast(Any, model.get_submodule(path)).scaling[ADAPTER])
        if FACTOR not in name:
            yield plain_name(name), tensor


def unmerged_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The frozen weights under the names of the plain model, and beside them A and alpha / r x B of adapted layers."""
    for name, tensor in model.state_dict().items():
        path, factor, _ = name.partition(".lora_B.")
        if factor:
            tensor = tensor * cast(Any, model.get_submodule(path)).scaling[ADAPTER]
        yield plain_name(name).replace(f".{ADAPTER}.", "."), tensor


def adapter_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """A and B of each adapted layer, by their names in peft's files; empty for a plain model."""
    found = {name: tensor for name, tensor in model.state_dict().items() if FACTOR in name}
    return {f"{IN_FILES}{name.replace(f'.{ADAPTER}.', '.')}": tensor for name, tensor in found.items()}


@contextmanager
def adapter_off(model: PreTrainedModel) -> Iterator[None]:
    """Compute with the frozen weights alone."""
    from peft.functional import set_adapter

    set_adapter(model, [])
    try:
        yield
    finally:
        set_adapter(model, ADAPTER)
