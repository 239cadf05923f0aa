"""Proof that weights arrived in a vLLM engine: names, what is read back of each, and log-probs of fixed tokens.

Reading back shows which weights the engine computes with, to the bit; log-probs show that it computes the same model
(rope base, scaling, temperature), as far as rounding lets them. In bfloat16 rounding depends on the model: how far the
two sides are apart is measured at the first sync, when every weight is known to be the right one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float32, Int32
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from exgrpo_cli.base.errors import RunError
from exgrpo_cli.base.types import TokenSequence
from exgrpo_cli.engines.vllm.readback import HeldWeight, SentWeights

CANARY_TOKENS = 16
"""Tokens scored by both sides at each sync."""
MAX_GAPS = {"float32": 1e-3, "bfloat16": 0.5}
"""Largest mean |log pi_trainer - log pi_engine|. Rounding alone gives about 1e-6, and in bfloat16 0.003 to 0.11."""
NOISE_FACTOR = 4.0
"""Room above the gap of the first sync: training makes logits larger, and rounding with them."""
LEAST_NOISY_GAP = 0.05
"""Allowed in bfloat16 however small the first gap was."""


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


def require_arrived(sent: SentWeights, names: frozenset[str], held: Mapping[str, HeldWeight]) -> None:
    """Raise RunError naming the first of `names` that was not sent, or the first of `held` that is not what was."""
    missing = sorted(names - sent.names)
    if missing:
        raise RunError(
            f"{len(missing)} weights were not sent to the rollout engine, {missing[0]!r} first; "
            f"send the whole state dict, tied weights under each of their names."
        )
    for name, (shape, expected) in sent.expected.items():
        if held[name].arrived(shape) != expected:
            raise RunError(
                f"weight {name!r} did not reach the rollout engine: what is read back is not what was sent; its "
                "rollouts would be stale, so the run stops."
            )


def state_dict_names(folder: Path) -> frozenset[str]:
    """Names of the backbone's whole state dict, without reading its weights."""
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return frozenset(model.state_dict())


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
        raise RunError(
            f"the rollout engine's log-probs of fixed tokens differ from the trainer's by {gap:.3g} on average"
            f"{before}, bound {bound:.3g} in {dtype}: it computes the model otherwise, or with other weights, so the "
            "run stops."
        )
    return gap
