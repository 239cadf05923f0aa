"""Rows laid end to end without a pad token, each prompt once for all the rows that share it.

A row is a prompt and its response without the last token, which is never an input. In the packed batch the prompt comes
first, then the responses of its rows; where all prompts begin alike, with the same worked examples, say, what they
share comes before all of them. Positions count from 0 in each row. Only attention needs whole rows: see
`policy/attention.py`.

Axes: packed = inputs of the micro-batch, tokens = response tokens of all rows one after the other, hidden = model
width.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from exgrpo_cli.algo.batching import shared_prefix
from exgrpo_cli.algo.logprobs import token_logprobs
from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.types import TokenSequence
from exgrpo_cli.engines.causal_lm import CausalLM, to_device, use_attention
from exgrpo_cli.engines.policy.attention import PACKED_CAUSAL, AttentionLayout, Segments, attention_layout, segments_of

PROVED_LAYERS, PROVED_TOKENS = 2, 16
"""Layers and tokens of a narrow model, copied to prove packing."""
PACKING_ROUNDINGS = 512
"""Roundings by which packed and plain hidden states may differ: many layers, two orders of summation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch:
    """One micro-batch, ready for the model."""

    input_ids: Int[Tensor, "1 packed"]
    position_ids: Int[Tensor, "1 packed"]
    layout: AttentionLayout | Segments
    predicting: Int[Tensor, " tokens"]
    """For each response token, the packed position whose hidden state predicts it."""
    targets: Int[Tensor, " tokens"]
    """The response tokens."""


def pack(sequences: Sequence[TokenSequence], device: torch.device, *, by_segments: bool = False) -> PackedBatch:
    """Lay out rows, response tokens staying in the order of `sequences`; `by_segments` is how attention reads them."""
    pieces: list[np.ndarray] = []
    reads: list[np.ndarray] = []
    filled = 0

    def lay(tokens: np.ndarray, before: np.ndarray) -> np.ndarray:
        """Packed positions of what a row has read when it ends in `tokens`."""
        nonlocal filled
        reads.append(np.concatenate([before, filled + np.arange(len(tokens))]))
        pieces.append(tokens)
        filled += len(tokens)
        return reads[-1]

    prefix = shared_prefix(sequence.prompt_ids for sequence in sequences)
    shared = lay(sequences[0].prompt_ids[:prefix], np.arange(0))
    prompts: dict[bytes, np.ndarray] = {}
    rows: list[np.ndarray] = []
    for sequence in sequences:
        key = sequence.prompt_ids.tobytes()
        if key not in prompts:
            prompts[key] = lay(sequence.prompt_ids[prefix:], shared)
        rows.append(lay(sequence.response_ids[:-1], prompts[key]))
    position_ids = np.empty(filled, dtype=np.int64)
    for row in rows:
        position_ids[row] = np.arange(len(row))
    predicting = [row[len(sequence.prompt_ids) - 1 :] for row, sequence in zip(rows, sequences, strict=True)]

    def on_device(array: np.ndarray) -> Tensor:
        return to_device(array.astype(np.int64, copy=False), device)

    return PackedBatch(
        input_ids=on_device(np.concatenate(pieces))[None],
        position_ids=on_device(position_ids)[None],
        layout=segments_of(pieces, reads, device) if by_segments else attention_layout(rows, pieces, reads, device),
        predicting=on_device(np.concatenate(predicting)),
        targets=on_device(np.concatenate([sequence.response_ids for sequence in sequences])),
    )


def response_hidden(body: PreTrainedModel, batch: PackedBatch) -> Float[Tensor, "tokens hidden"]:
    """Hidden states that predict the response tokens.

    Where the body recomputes its layers in the backward pass, that runs under `use_attention(..., PACKED_CAUSAL)` too.
    """
    with use_attention(body, PACKED_CAUSAL):
        output = body(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, layout=batch.layout)
    # An embedding look-up, for its backward pass: many times faster on a CPU than that of index_select.
    return F.embedding(batch.predicting, output.last_hidden_state[0])


def packed_scores(
    parts: CausalLM, batch: PackedBatch, temperature: float
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """Log-probs and entropies of the response tokens, of softmax(logits / temperature), in nats."""
    hidden = response_hidden(parts.body, batch)
    return token_logprobs(hidden, parts.head.weight, batch.targets, temperature=temperature)


@torch.no_grad()
def prove_packing(parts: CausalLM) -> None:
    """Run two short rows of one prompt packed and alone; raises InputError where the hidden states differ.

    In float32 or wider, where a difference stands out from rounding: of a narrower model two layers are copied.
    """
    if parts.head.weight.is_meta:
        return
    body = parts.body if torch.finfo(parts.head.weight.dtype).bits >= 32 else _first_layers(parts.body)
    ids = np.arange(8, dtype=np.int32) % parts.head.weight.shape[0]
    rows = [TokenSequence(prompt_ids=ids[:3], response_ids=ids[3 : 3 + length]) for length in (3, 5)]
    packed = response_hidden(body, pack(rows, parts.device)).split([3, 5])
    for row, hidden in zip(rows, packed, strict=True):
        alone = to_device(np.concatenate([row.prompt_ids, row.response_ids]).astype(np.int64), parts.device)
        expected = body(input_ids=alone[None], use_cache=False).last_hidden_state[0, len(row.prompt_ids) - 1 : -1]
        tolerance = PACKING_ROUNDINGS * torch.finfo(hidden.dtype).eps * max(1.0, float(expected.abs().max()))
        gap = float((hidden - expected).abs().max())
        if not gap <= tolerance:
            raise InputError(
                f"{type(parts.model).__name__} gives other hidden states (by {gap:.3g}) when rows are packed; "
                f"it must take its positions from position_ids; use another backbone."
            )


def _first_layers(body: PreTrainedModel) -> PreTrainedModel:
    """A float32 copy of the first layers of `body`, with the embeddings of a few tokens."""
    config = copy.deepcopy(body.config)
    config.num_hidden_layers = min(PROVED_LAYERS, config.num_hidden_layers)
    config.vocab_size, config.pad_token_id = min(PROVED_TOKENS, config.vocab_size), None
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    # Initialising draws random numbers, which nothing else may notice.
    with torch.random.fork_rng(devices=[]):
        small: PreTrainedModel = torch.nn.Module.float(type(body)(config))
    for name, weight in small.named_parameters():
        weight.copy_(body.get_parameter(name)[: weight.shape[0]])
    return torch.nn.Module.to(small, body.device).eval()
