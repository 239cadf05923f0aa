"""Taking over a policy's weights tensor by tensor, and proving that they arrived."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from exgrpo_cli.base.errors import RunError


@torch.no_grad()
def take_weights(module: nn.Module, weights: Iterator[tuple[str, Tensor]]) -> None:
    """Copy every named tensor into `module`; those that already are its own memory are left alone.

    Raises RunError when a name is unknown or missing, a shape differs, or the checksum of what arrived is not that of
    what was sent.
    """
    own = module.state_dict()
    missing = dict.fromkeys(own)
    for name, sent in weights:
        if name not in own:
            raise RunError(
                f"weight {name!r} was sent but the generator's model has none of that name; use one backbone."
            )
        target = own[name]
        if target.shape != sent.shape:
            raise RunError(
                f"weight {name!r} is {list(sent.shape)} in the policy and {list(target.shape)} in the generator; "
                f"use one backbone."
            )
        missing.pop(name, None)
        if target.data_ptr() == sent.data_ptr():
            continue
        target.copy_(sent)
        expected, arrived = checksum(sent.to(target.dtype)), checksum(target)
        if expected != arrived:
            raise RunError(
                f"weight {name!r} did not reach the generator: checksum {arrived:.9g} instead of {expected:.9g}; "
                f"its rollouts would be stale, so the run stops."
            )
    if missing:
        raise RunError(
            f"{len(missing)} weights were not sent to the generator, {next(iter(missing))!r} first; "
            f"send the whole state dict, tied weights under each of their names."
        )


def checksum(tensor: Tensor) -> float:
    """A float64 sum in which every entry has its own weight, so that swapped entries show."""
    flat = tensor.detach().flatten().double()
    return float(flat @ torch.linspace(1, 2, flat.numel(), dtype=torch.float64, device=flat.device))
