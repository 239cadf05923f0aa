"""Running attention of our own inside a transformers model, through its AttentionInterface."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedModel

from exgrpo_cli.errors import InputError

UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Arguments by which some models change what attention computes."""


@contextmanager
def use_attention(body: PreTrainedModel, name: str) -> Iterator[None]:
    """Run `body` with attention `name`, and with its own again afterwards: the config is shared by all its layers."""
    config = body.config
    own = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = own


def refuse_unsupported(module: nn.Module, arguments: dict[str, object]) -> None:
    """Raise InputError where a model asks for more than plain softmax attention."""
    for name in UNSUPPORTED:
        if arguments.get(name) is not None:
            raise InputError(
                f"{type(module).__name__} asks its attention for {name!r}, which the hf and torch engines do not "
                f"compute; use a backbone with plain softmax attention."
            )
