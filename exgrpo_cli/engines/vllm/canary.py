"""Proof that weights arrived in a vLLM engine: names, bits of some parameters, and log-probs of fixed tokens.

vLLM fuses, shards and repacks what it loads, so parameters alone do not prove what its kernels compute with: with tied
embeddings an update that leaves `lm_head.weight` out changes the parameter and not the packed copy behind it. Log-probs
show that; small changes below the precision of a bfloat16 log-prob are what the checksums show.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float32, Int32
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from exgrpo_cli.errors import RunError
from exgrpo_cli.types import TokenSequence

CHECKED_PARAMETERS = 8
"""Parameters whose bits are compared at each sync, spread from the first to the last."""
SAMPLED_ELEMENTS = 2**20
"""Elements of a parameter that enter its checksum, evenly spaced: milliseconds for any vocabulary."""
CANARY_TOKENS = 16
"""Tokens scored by both sides at each sync."""
MAX_GAPS = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest mean |log pi_trainer - log pi_engine|. Rounding alone gives about 1e-6 and 1e-2; a missed update of the tiny
backbone 1e-2 and more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Canary:
    """Fixed tokens whose log-probs both sides compute after every sync."""

    sequence: TokenSequence
    temperature: float
    """That of the policy's log-probs."""

    @classmethod
    def of_prompt(cls, prompt_ids: Int32[np.ndarray, " prompt_tokens"], temperature: float) -> "Canary":
        """The end of a real prompt stands for the response: likely tokens, at which rounding is small."""
        split = max(1, len(prompt_ids) - CANARY_TOKENS)
        response = prompt_ids[split:] if len(prompt_ids) > 1 else prompt_ids
        sequence = TokenSequence(prompt_ids=prompt_ids[:split], response_ids=response)
        return cls(sequence=sequence, temperature=temperature)


class SentWeights:
    """Weights on their way into an engine, with their names and the checksums of those that are checked."""

    def __init__(self, weights: Iterator[tuple[str, Tensor]], checked: Mapping[str, Tensor], rank: int) -> None:
        """`checked` are parameters of the engine, of which tensor-parallel rank `rank` holds its shards."""
        self.names: set[str] = set()
        self.shapes: dict[str, torch.Size] = {}
        """Of the checked ones, as this rank holds them, without padding."""
        self.checksums: dict[str, int] = {}
        self._weights = weights
        self._held = {name: (held.shape, held.dtype) for name, held in checked.items()}
        self._rank = rank

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, sent in self._weights:
            self.names.add(name)
            if name in self._held:
                shape, dtype = self._held[name]
                part = shard(sent.detach(), shape, self._rank)
                self.shapes[name] = part.shape
                self.checksums[name] = bit_checksum(part.to(dtype))
            # vLLM holds on to the parts of a fused layer until the last has come; a gathered weight is gone by then.
            yield name, sent.detach().clone()


def checked_parameters(names: frozenset[str], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A few of an engine's parameters that go by the same name in the state dict, from the first to the last."""
    # Repacked weights are left empty by vLLM; fused ones have no name of their own in a state dict.
    shared = [name for name, held in parameters.items() if name in names and held.numel()]
    picks = np.linspace(0, len(shared) - 1, min(CHECKED_PARAMETERS, len(shared))).round().astype(int)
    return {shared[pick]: parameters[shared[pick]] for pick in picks}


def require_arrived(sent: SentWeights, names: frozenset[str], parameters: Mapping[str, Tensor]) -> None:
    """Raise RunError naming the first of `names` that was not sent, or the first parameter that is not what was."""
    missing = sorted(names - sent.names)
    if missing:
        raise RunError(
            f"{len(missing)} weights were not sent to the rollout engine, {missing[0]!r} first; "
            f"send the whole state dict, tied weights under each of their names."
        )
    for name, expected in sent.checksums.items():
        arrived = bit_checksum(parameters[name][tuple(slice(0, size) for size in sent.shapes[name])])
        if arrived != expected:
            raise RunError(
                f"weight {name!r} did not reach the rollout engine: checksum {arrived:x} instead of {expected:x}; "
                f"its rollouts would be stale, so the run stops."
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


def state_dict_names(folder: Path) -> frozenset[str]:
    """Names of the backbone's whole state dict, without reading its weights."""
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return frozenset(model.state_dict())


def require_equal_logprobs(
    trainer: Float32[np.ndarray, " tokens"], engine: Float32[np.ndarray, " tokens"], dtype: str
) -> None:
    """Raise RunError when the mean absolute difference exceeds what rounding in `dtype` explains."""
    gap = float(np.abs(trainer - engine).mean())
    bound = MAX_GAPS[dtype]
    if not gap <= bound:
        raise RunError(
            f"the rollout engine's log-probs of fixed tokens differ from the trainer's by {gap:.3g} on average, bound "
            f"{bound:g} in {dtype}: it does not compute with the weights it was sent, so the run stops."
        )
