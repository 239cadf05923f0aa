"""A causal language model cut in two: a body that makes hidden states, and a linear head read tile by tile."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from exgrpo_cli.base.errors import InputError

PROBE_TOKENS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class CausalLM:
    """The parts of a transformers model that scoring and training use."""

    model: PreTrainedModel
    body: PreTrainedModel
    """Token ids to hidden states, final norm included."""
    head: nn.Linear
    """Hidden states to logits; its weight may be tied to the embedding."""

    @property
    def device(self) -> torch.device:
        """Device of the head's weight, and with it of the inputs."""
        return self.head.weight.device


def split_causal_lm(model: PreTrainedModel) -> CausalLM:
    """Find body and head, and prove on a few tokens that logits = body(tokens) @ head.weight.T.

    Refused with InputError: soft-capped or scaled logits and a head with a bias (their log-probs would be wrong),
    dropout (it makes importance ratios random), sliding windows and recurrent layers (their state is not a row of
    keys and values), and models that do not run their attention through transformers' AttentionInterface.
    """
    name = type(model).__name__
    body, head = model.base_model, model.get_output_embeddings()
    if body is model or not isinstance(head, nn.Linear):
        raise InputError(f"{name} has no separate body and linear head; use a causal language model of transformers.")
    if head.bias is not None:
        raise InputError(f"{name} has an output head with a bias, which is not supported; use a model without one.")
    rates = [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    dropout = max([float(getattr(model.config, "attention_dropout", 0.0) or 0.0), *rates])
    if dropout > 0:
        raise InputError(
            f"{name} has dropout {dropout:g}, which makes importance ratios random; set it to 0 in its config."
        )
    _refuse_other_attention(model)
    parts = CausalLM(model=model, body=body, head=head)
    _prove_linear_head(parts)
    return parts


def _refuse_other_attention(model: PreTrainedModel) -> None:
    name, config = type(model).__name__, model.config.get_text_config()
    # Without transformers' word a model is believed: the proof of packing tells one whose attention is its own.
    if not getattr(model, SAYS_SO, True):
        raise InputError(f"{name} does not use transformers' attention interface; use a model that does, or vllm.")
    kinds = set(getattr(config, "layer_types", None) or [])
    if not kinds and getattr(config, "sliding_window", None) is not None:
        kinds = {"sliding_attention"}
    other = sorted(kinds - {"full_attention"})
    if other:
        raise InputError(
            f"{name} has {other[0]} layers, which the hf and torch engines do not run; switch the window off in its "
            f"config (sliding_window = null) or use another backbone."
        )


@torch.no_grad()
def _prove_linear_head(parts: CausalLM) -> None:
    if parts.head.weight.is_meta:
        return
    was_training = parts.model.training
    parts.model.eval()
    tokens = torch.arange(PROBE_TOKENS, device=parts.device)[None] % parts.head.weight.shape[0]
    own = parts.model(input_ids=tokens, use_cache=False).logits.cpu().double()
    ours = parts.head(parts.body(input_ids=tokens, use_cache=False).last_hidden_state).cpu().double()
    parts.model.train(was_training)
    if not torch.isfinite(ours).all():
        raise InputError(
            f"{type(parts.model).__name__} gives logits that are NaN or infinite: its weights are damaged, or training "
            "that made them diverged; use another checkpoint, or fetch the model again."
        )
    # Rounding of the dtype, with room for another order of summation; soft-capping and scaling move logits far more.
    tolerance = 64 * torch.finfo(parts.head.weight.dtype).eps * max(1.0, float(ours.abs().max()))
    gap = float((own - ours).abs().max())
    if not gap <= tolerance:
        raise InputError(
            f"{type(parts.model).__name__} does something to its logits after the head (they differ by {gap:.3g}; "
            f"soft-capping or scaling?), which is not supported; use a model whose logits are the head's output."
        )


SAYS_SO = "_supports_attention_backend"
"""Attribute by which a transformers model says that its attention goes through the interface."""
OWN_ATTENTION = "_attn_implementation"
"""Attribute of its config that names the attention of loading; of a body, that set last."""
UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Arguments by which some models change what attention computes."""


@contextmanager
def use_attention(body: PreTrainedModel, name: str) -> Iterator[None]:
    """Run `body` with attention `name`, and with its own again afterwards: the config is shared by all its layers."""
    own = own_attention(body)
    _switch_attention(body, name)
    try:
        yield
    finally:
        _switch_attention(body, own)


def own_attention(body: PreTrainedModel) -> str:
    """Name of the attention that `body` runs now: the last set, or that of loading."""
    return str(vars(body).get(OWN_ATTENTION) or getattr(body.config, OWN_ATTENTION, "sdpa"))


def _switch_attention(body: PreTrainedModel, name: str) -> None:
    body.set_attn_implementation(name)
    vars(body)[OWN_ATTENTION] = name


def refuse_unsupported(module: nn.Module, arguments: dict[str, object], own: object) -> None:
    """Raise InputError where a model asks for more than plain softmax attention, or does not hand on `own`."""
    if not own:
        raise InputError(
            f"{type(module).__name__} keeps arguments from its attention; use a model of transformers' own."
        )
    for name in UNSUPPORTED:
        if arguments.get(name) is not None:
            raise InputError(
                f"{type(module).__name__} asks its attention for {name!r}, which the hf and torch engines do not "
                f"compute; use a backbone with plain softmax attention."
            )


def reading(body: nn.Module, cache: Cache) -> dict[str, Any]:
    """Arguments of a pass that reads and writes `cache`: transformers 5.24 has another name for it than 5.19."""
    name = "cache" if "cache" in inspect.signature(type(body).forward).parameters else "past_key_values"
    return {name: cache, "use_cache": True}


def to_device(array: np.ndarray, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """`array` on `device`, of its own dtype or of `dtype`; on a CPU it shares memory with `array` where it can.

    A copy from memory that is not pinned, or one that converts on its way, makes a GPU's host wait.
    """
    host = torch.from_numpy(array)
    if dtype is not None:
        host = host.to(dtype)
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)
