"""An engine's weights read back under the names of a state dict, and held against those that were sent.

vLLM fuses and shards what it loads. A part of a fused layer is found by the rows it takes there. On the CPU a linear
layer computes with a packed copy that nothing can read, and the parameter beside it may be empty or stale: inputs that
are 0 but for one 1 make the layer say columns of its weight, exactly, in any precision.

Axes: rows, columns = those of a weight as this rank holds it; asked = columns that a layer is asked for.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

SAMPLED_ELEMENTS = 2**20
"""Elements of a weight that enter its checksum, evenly spaced: milliseconds for any vocabulary."""
ASKED_COLUMNS = 16
"""Columns that a layer with a packed weight is asked for, evenly spaced."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldWeight:
    """Where an engine holds one weight of the state dict, or this rank's shard of it."""

    module: Any
    """The vLLM layer, fused or not."""
    leaf: str
    """Name of the parameter in it."""
    rows: slice
    """Of the parameter."""
    shape: torch.Size
    """Of those rows, padding included."""
    dtype: torch.dtype
    rank: int
    """Number of the shard."""
    is_readable: bool
    """Whether the parameter is there; else the layer computes with a packed copy alone."""
    is_packed: bool
    """Whether the layer computes with a copy of the parameter."""

    def expected(self, sent: Tensor) -> tuple[torch.Size, tuple[int, ...]]:
        """The shard of a weight on its way here, without padding: its shape, and checksums of what is read back."""
        part = shard(sent.detach(), self.shape, self.rank).to(self.dtype)
        checksums = [bit_checksum(part)] if self.is_readable else []
        if self.is_packed:
            checksums.append(bit_checksum(part[:, _asked(part.shape)] + 0.0))
        return part.shape, tuple(checksums)

    def arrived(self, size: torch.Size) -> tuple[int, ...]:
        """The same checksums of what is here, of the first `size` entries along each axis."""
        checksums = []
        if self.is_readable:
            held = getattr(self.module, self.leaf)[self.rows]
            checksums.append(bit_checksum(held[tuple(slice(0, length) for length in size)]))
        if self.is_packed:
            checksums.append(bit_checksum(self._columns(size)))
        return tuple(checksums)

    @torch.no_grad()
    def _columns(self, size: torch.Size) -> Float[Tensor, "rows asked"]:
        """What the layer multiplies with, 0 for -0."""
        asked = _asked(size)
        inputs = torch.zeros(len(asked), self.shape[1], dtype=self.dtype)
        inputs[torch.arange(len(asked)), asked] = 1.0
        return self.module.quant_method.apply(self.module, inputs)[:, self.rows][:, : size[0]].T + 0.0


class SentWeights:
    """Weights on their way into an engine, with their names and the checksums of those that can be read back."""

    def __init__(self, weights: Iterator[tuple[str, Tensor]], held: Mapping[str, HeldWeight]) -> None:
        self.names: set[str] = set()
        self.expected: dict[str, tuple[torch.Size, tuple[int, ...]]] = {}
        self._weights = weights
        self._held = held

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, sent in self._weights:
            self.names.add(name)
            if name in self._held:
                self.expected[name] = self._held[name].expected(sent)
            # vLLM holds on to the parts of a fused layer until the last has come; a gathered weight is gone by then.
            yield name, sent.detach().clone()


def held_weights(names: frozenset[str], model: nn.Module, rank: int) -> dict[str, HeldWeight]:
    """Those of `names` that tensor-parallel rank `rank` can read back from `model`, one of vLLM's."""
    modules = dict(model.named_modules(remove_duplicate=False))
    fusions: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    wholes = {part: (whole, index) for whole, parts in fusions.items() for index, part in enumerate(parts)}
    found = {}
    for name in sorted(names):
        path, _, leaf = name.rpartition(".")
        module, rows, shard_rank = modules.get(path), slice(None), rank
        if module is None:
            parent, _, part = path.rpartition(".")
            whole, index = wholes.get(part, ("", 0))
            module = modules.get(f"{parent}.{whole}")
            sizes = getattr(module, "output_partition_sizes", [])
            if index >= len(sizes):
                continue
            rows = slice(sum(sizes[:index]), sum(sizes[: index + 1]))
            # Keys and values of fewer heads than ranks are held by several of these.
            shard_rank = rank // (getattr(module, "num_kv_head_replicas", 1) if index else 1)
        if isinstance(parameter := getattr(module, leaf, None), Tensor):
            found[name] = _held_weight(module, leaf, parameter, rows, shard_rank)
    return found


def _held_weight(module: Any, leaf: str, parameter: Tensor, rows: slice, rank: int) -> HeldWeight:
    whole = parameter.shape
    if not parameter.numel():
        whole = torch.Size([sum(module.output_partition_sizes), module.input_size_per_partition])
    return HeldWeight(
        module=module,
        leaf=leaf,
        rows=rows,
        shape=torch.Size([len(range(*rows.indices(whole[0]))), *whole[1:]]),
        dtype=parameter.dtype,
        rank=rank,
        is_readable=bool(parameter.numel()),
        is_packed=leaf == "weight" and hasattr(module, "cpu_linear"),
    )


def shard(full: Tensor, local: torch.Size, rank: int) -> Tensor:
    """The part of `full` that tensor-parallel rank `rank` holds in a parameter of shape `local`, without padding."""
    for axis, (size, held) in enumerate(zip(full.shape, local, strict=True)):
        if size != held:
            start = min(rank * held, size)
            full = full.narrow(axis, start, min(held, size - start))
    return full


def bit_checksum(tensor: Tensor) -> int:
    """Position-weighted sum of the bit patterns modulo 2^64: the same on every device, and swapped entries show."""
    flat = tensor.detach().reshape(-1)
    flat = flat[:: max(1, flat.numel() // SAMPLED_ELEMENTS)]
    bits = flat.contiguous().view({2: torch.int16, 4: torch.int32}[flat.element_size()]).to(torch.int64)
    places = torch.arange(1, bits.numel() + 1, device=bits.device)
    return int((bits * places).sum()) % 2**64


def _asked(shape: torch.Size) -> Tensor:
    columns = shape[1]
    return torch.linspace(0, columns - 1, min(ASKED_COLUMNS, columns)).round().long()
