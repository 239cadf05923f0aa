"""A policy's weights and optimizer state on disk, restored bit for bit."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from exgrpo_cli.base.errors import InputError, RunError, first_line
from exgrpo_cli.engines.policy.master_weights import MasterWeights

WEIGHTS_FILE = "weights.safetensors"
OPTIMIZER_FILE = "optimizer.pt"


def save_policy(folder: Path, model: nn.Module, masters: MasterWeights, optimizer: torch.optim.Optimizer) -> None:
    """Write weights and optimizer state into `folder`, which is created.

    What is stored of a trainable weight is its master, from which the model's own is rounded again when loaded; tied
    weights are stored once.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().contiguous() for name, tensor in _stored(model, masters).items()}
    save_file(tensors, folder / WEIGHTS_FILE)
    torch.save(optimizer.state_dict(), folder / OPTIMIZER_FILE)


@torch.no_grad()
def load_policy(folder: Path, model: nn.Module, masters: MasterWeights, optimizer: torch.optim.Optimizer) -> None:
    """Restore what `save_policy` wrote.

    Raises RunError when it was written for another model, InputError naming a file that cannot be read.
    """
    own = _stored(model, masters)
    with reading_file(folder / WEIGHTS_FILE):
        saved = load_file(folder / WEIGHTS_FILE)
    if saved.keys() != own.keys():
        differing = sorted(saved.keys() ^ own.keys())
        raise RunError(
            f"{folder / WEIGHTS_FILE} belongs to another model: {differing[0]!r} and {len(differing) - 1} other "
            f"weights are on one side only; resume with the backbone of the run."
        )
    for name, tensor in own.items():
        if saved[name].shape != tensor.shape or saved[name].dtype != tensor.dtype:
            raise RunError(
                f"{folder / WEIGHTS_FILE} belongs to another model: {name!r} is {_kind(saved[name])} there and "
                f"{_kind(tensor)} here; resume with the backbone and the precision of the run."
            )
        tensor.copy_(saved[name])
    masters.publish()
    with reading_file(folder / OPTIMIZER_FILE):
        optimizer.load_state_dict(torch.load(folder / OPTIMIZER_FILE, map_location="cpu", weights_only=True))


@contextmanager
def reading_file(path: Path) -> Iterator[None]:
    """Raises InputError naming the file where it is missing, cut short or damaged."""
    try:
        yield
    except (
        OSError,
        SafetensorError,
        RuntimeError,
        UnpicklingError,
        EOFError,
        ValueError,
        KeyError,
        TypeError,
    ) as error:
        # What torch advises for such a file would run whatever code is in it.
        reason = "more than tensors is in it" if isinstance(error, UnpicklingError) else first_line(error)
        raise InputError(
            f"{path} cannot be read ({reason}): restore it from a copy, or remove this checkpoint to resume "
            "from the one before."
        ) from error


def _stored(model: nn.Module, masters: MasterWeights) -> dict[str, Tensor]:
    """Masters of trainable weights, then frozen weights and persistent buffers; tied ones under their first name."""
    stored = dict(masters.named_tensors())
    trainable = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    stored |= {name: weight for name, weight in model.named_parameters() if name not in stored}
    stored |= {name: buffer for name, buffer in model.state_dict().items() if name not in trainable}
    return stored


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
