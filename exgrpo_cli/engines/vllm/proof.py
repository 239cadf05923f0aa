"""An engine's weights read back under the names of a state dict, and held against those that were sent.

vLLM fuses and shards what it loads. A part of a fused layer is found by the rows it takes there. On the CPU a linear
layer computes with a packed copy that nothing can read, and the parameter beside it may be empty or stale: inputs that
are 0 but for one 1 make the layer say columns of its weight, exactly, in any precision.

Axes: rows, columns = those of a weight as this rank holds it; asked = columns that a layer is asked for.
"""

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float32, Int32
from torch import Tensor, nn

from exgrpo_cli.base import errors, types

SAMPLED_ELEMENTS = 2**20
"""Elements of a weight that enter its checksum, evenly spaced: milliseconds for any vocabulary."""
ASKED_COLUMNS = 16
"""Columns that a layer with a packed weight is asked for, evenly spaced."""


class HeldWeight:
    """Place in an engine of one weight of the state dict, or of this rank's shard of it."""

    def __init__(self, module: Any, leaf: str, rows: slice, rank: int) -> None:
        """`rows` of parameter `leaf` of a vLLM layer, fused or not: shard number `rank`.

        Read now: while weights are on their way, the parameter may be another.
        """
        parameter: Tensor = getattr(module, leaf)
        self.is_readable = bool(parameter.numel())
        """Whether the parameter is there; else the layer computes with a packed copy alone."""
        whole = list(parameter.shape)
        if not self.is_readable:
            whole = [sum(module.output_partition_sizes), module.input_size_per_partition]
        self.shape = torch.Size([len(range(*rows.indices(whole[0]))), *whole[1:]])
        """Shape of those rows, padding included."""
        self.is_packed = leaf == "weight" and hasattr(module, "cpu_linear")
        """Whether the layer computes with a copy of the parameter."""
        self._module, self._leaf, self._rows, self._rank = module, leaf, rows, rank
        self._dtype = parameter.dtype

    def expected(self, sent: Tensor) -> tuple[torch.Size, tuple[int, ...]]:
        """The shard of a weight on its way here, without padding: its shape, and checksums of what is read back."""
        part = shard(sent.detach(), self.shape, self._rank).to(self._dtype)
        checksums = [bit_checksum(part)] if self.is_readable else []
        if self.is_packed:
            checksums.append(bit_checksum(part[:, _asked(part.shape)] + 0.0))
        return part.shape, tuple(checksums)

    def arrived(self, size: torch.Size) -> tuple[int, ...]:
        """The same checksums of what is here, of the first `size` entries along each axis."""
        checksums = []
        if self.is_readable:
            held = getattr(self._module, self._leaf)[self._rows]
            checksums.append(bit_checksum(held[tuple(slice(0, length) for length in size)]))
        if self.is_packed:
            checksums.append(bit_checksum(self._columns(size)))
        return tuple(checksums)

    @torch.no_grad()
    def _columns(self, size: torch.Size) -> Float[Tensor, "rows asked"]:
        """Columns of the weight that the layer multiplies with, 0 for -0."""
        asked = _asked(size)
        inputs = torch.zeros(len(asked), self.shape[1], dtype=self._dtype)
        inputs[torch.arange(len(asked)), asked] = 1.0
        return self._module.quant_method.apply(self._module, inputs)[:, self._rows][:, : size[0]].T + 0.0


Sent = dict[str, tuple[torch.Size, tuple[int, ...]] | None]
"""By name, `HeldWeight.expected` of each weight that was sent; None of one that cannot be read back."""


def noted(
    weights: Iterator[tuple[str, Tensor]], held: Mapping[str, HeldWeight], sent: Sent
) -> Iterator[tuple[str, Tensor]]:
    """Weights on their way into an engine, each written down in `sent`."""
    for name, weight in weights:
        sent[name] = held[name].expected(weight) if name in held else None
        # vLLM holds on to the parts of a fused layer until the last has come; a gathered weight is gone by then.
        yield name, weight.detach().clone()


def held_weights(names: frozenset[str], model: nn.Module, rank: int, lora_rank: int = -1) -> dict[str, HeldWeight]:
    """Those of `names` that tensor-parallel rank `rank` can read back from `model`, one of vLLM's; factors of an
    adapter have rank `lora_rank`, and vLLM room for more."""
    modules = dict(model.named_modules(remove_duplicate=False))
    fusions: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    wholes = {part: (whole, index) for whole, parts in fusions.items() for index, part in enumerate(parts)}
    found = {}
    for name in sorted(names):
        path, _, leaf = name.rpartition(".")
        path, _, factor = path.partition(".lora_")
        module, rows, index, shard_rank = modules.get(path), slice(None), 0, rank
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
        if factor:
            stacked = getattr(module, f"lora_{factor.lower()}_stacked", ())
            for held in stacked[index : index + 1]:
                part = held[0, 0, :lora_rank] if factor == "A" else held[0, 0, :, :lora_rank]
                found[name] = HeldWeight(SimpleNamespace(weight=part), leaf, slice(None), shard_rank)
            continue
        # What is adapted is wrapped.
        module = getattr(module, "base_layer", module)
        if isinstance(getattr(module, leaf, None), Tensor):
            found[name] = HeldWeight(module, leaf, rows, shard_rank)
    return found


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
    bits = flat.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]).to(torch.int64)
    places = torch.arange(1, bits.numel() + 1, device=bits.device)
    return int((bits * places).sum()) % 2**64


def _asked(shape: torch.Size) -> Tensor:
    columns = shape[1]
    return torch.linspace(0, columns - 1, min(ASKED_COLUMNS, columns)).round().long()


CANARY_TOKENS = 16
"""Tokens scored by both sides at each sync."""
MAX_GAPS = {"float32": 1e-3, "bfloat16": 0.5}
"""Largest mean |log pi_trainer - log pi_engine|. Rounding alone gives about 1e-6, and in bfloat16 0.003 to 0.11."""
NOISE_FACTOR = 4.0
"""Room above the gap of the first sync: training makes logits larger, and rounding with them."""
LEAST_NOISY_GAP = 0.05
"""Allowed in bfloat16 however small the first gap was."""


def canary_of(prompt_ids: Int32[np.ndarray, " prompt_tokens"]) -> types.TokenSequence:
    """Fixed tokens whose log-probs both sides compute after every sync.

    The end of a real prompt stands for the response: likely tokens, at which rounding is small.
    """
    split = max(1, len(prompt_ids) - CANARY_TOKENS)
    response = prompt_ids[split:] if len(prompt_ids) > 1 else prompt_ids
    return types.TokenSequence(prompt_ids=prompt_ids[:split], response_ids=response)


def require_arrived(sent: Sent, names: frozenset[str], held: Mapping[str, HeldWeight]) -> None:
    """Raise RunError naming the first of `names` that was not sent, or the first of `held` that is not what was."""
    missing = sorted(names - sent.keys())
    if missing:
        raise errors.RunError(
            f"{len(missing)} weights were not sent to the rollout engine, {missing[0]!r} first; "
            f"send the whole state dict, tied weights under each of their names."
        )
    for name, expected in sent.items():
        if expected is not None and held[name].arrived(expected[0]) != expected[1]:
            raise errors.RunError(
                f"weight {name!r} did not reach the rollout engine: what is read back is not what was sent; its "
                "rollouts would be stale, so the run stops."
            )


def require_equal_logprobs(
    trainer: Float32[np.ndarray, " tokens"],
    engine: Float32[np.ndarray, " tokens"],
    dtype: str,
    first_gap: float | None = None,
) -> float:
    """The mean absolute difference, which is rounding in `dtype` where it is no more than a few times the first one.

    Raises RunError where it is more.
    """
    gap, bound = float(np.abs(trainer - engine).mean()), MAX_GAPS[dtype]
    if first_gap is not None:
        bound = min(bound, max(LEAST_NOISY_GAP, NOISE_FACTOR * first_gap))
    if not gap <= bound:
        before = "" if first_gap is None else f" ({first_gap:.3g} at the first sync)"
        raise errors.RunError(
            f"the rollout engine's log-probs of fixed tokens differ from the trainer's by {gap:.3g} on average"
            f"{before}, bound {bound:.3g} in {dtype}: it computes the model otherwise, or with other weights, so the "
            "run stops."
        )
    return gap
