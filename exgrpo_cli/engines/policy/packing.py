"""Rows laid end to end without a pad token, each prompt once for all the rows that share it.

A row is a prompt and its response without the last token, which is never an input. In the packed batch the prompt comes
first, then the responses of its rows; positions count from 0 in each row. Only attention needs whole rows: it gathers
them, padded on the right, in blocks of similar length, where plain causal attention without a mask is exact, because no
real token sees a pad token on its right.

Axes: packed = inputs of the micro-batch, tokens = response tokens of all rows one after the other, cells = rows of a
block times its longest row, hidden = model width.
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

from exgrpo_cli.algo.batching import micro_batches
from exgrpo_cli.algo.logprobs import token_logprobs
from exgrpo_cli.engines.model.attention import use_attention
from exgrpo_cli.engines.model.causal_lm import CausalLM
from exgrpo_cli.engines.policy.attention import PACKED_CAUSAL, AttentionBlock, AttentionLayout
from exgrpo_cli.engines.policy.segments import Segments, segments_of
from exgrpo_cli.errors import InputError
from exgrpo_cli.types import TokenSequence

BLOCK_PADDING = 0.1
"""Pad cells allowed in an attention block: more blocks would cost more calls than they save."""
BLOCK_CELLS = 2**18
"""Largest attention block."""
PROVED_LAYERS, PROVED_TOKENS = 2, 16
"""Of a narrow model, copied to prove packing."""
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
    starts: dict[bytes, int] = {}
    rows: list[np.ndarray] = []
    filled = 0
    for sequence in sequences:
        prompt, inputs = sequence.prompt_ids, sequence.response_ids[:-1]
        key = prompt.tobytes()
        if key not in starts:
            starts[key] = filled
            pieces.append(prompt)
            reads.append(filled + np.arange(len(prompt)))
            filled += len(prompt)
        rows.append(
            np.concatenate([np.arange(starts[key], starts[key] + len(prompt)), filled + np.arange(len(inputs))])
        )
        pieces.append(inputs)
        reads.append(rows[-1])
        filled += len(inputs)
    position_ids = np.empty(filled, dtype=np.int64)
    for row in rows:
        position_ids[row] = np.arange(len(row))
    predicting = [row[len(sequence.prompt_ids) - 1 :] for row, sequence in zip(rows, sequences, strict=True)]

    def on_device(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(np.int64, copy=False)).to(device)

    return PackedBatch(
        input_ids=on_device(np.concatenate(pieces))[None],
        position_ids=on_device(position_ids)[None],
        layout=segments_of(pieces, reads, device) if by_segments else _attention_layout(rows, filled, device),
        predicting=on_device(np.concatenate(predicting)),
        targets=on_device(np.concatenate([sequence.response_ids for sequence in sequences])),
    )


def response_hidden(parts: CausalLM, batch: PackedBatch) -> Float[Tensor, "tokens hidden"]:
    """Hidden states that predict the response tokens.

    Where the body recomputes its layers in the backward pass, that runs under `use_attention(..., PACKED_CAUSAL)` too.
    """
    return _packed_hidden(parts.body, batch)


def _packed_hidden(body: PreTrainedModel, batch: PackedBatch) -> Float[Tensor, "tokens hidden"]:
    with use_attention(body, PACKED_CAUSAL):
        output = body(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, layout=batch.layout)
    # An embedding look-up, for its backward pass: many times faster on a CPU than that of index_select.
    return F.embedding(batch.predicting, output.last_hidden_state[0])


def packed_scores(
    parts: CausalLM, batch: PackedBatch, temperature: float
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """Log-probs and entropies of the response tokens, of softmax(logits / temperature), in nats."""
    hidden = response_hidden(parts, batch)
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
    packed = _packed_hidden(body, pack(rows, parts.device)).split([3, 5])
    for row, hidden in zip(rows, packed, strict=True):
        alone = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids]).astype(np.int64)).to(parts.device)
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


def _attention_layout(rows: Sequence[np.ndarray], num_packed: int, device: torch.device) -> AttentionLayout:
    blocks = []
    # A prompt's tokens stand in several rows with the same result: whichever is written last is read.
    cell_of = np.zeros(num_packed, dtype=np.int64)
    num_cells = 0
    for block in micro_batches([len(row) for row in rows], BLOCK_CELLS, max_padding=BLOCK_PADDING):
        length = len(rows[block[0]])
        cells = np.zeros((len(block), length), dtype=np.int64)
        for index, row in enumerate(block):
            cells[index, : len(rows[row])] = rows[row]
            cell_of[rows[row]] = num_cells + index * length + np.arange(len(rows[row]))
        blocks.append(AttentionBlock(cells=torch.from_numpy(cells.ravel()).to(device), num_rows=len(block)))
        num_cells += cells.size
    return AttentionLayout(blocks=tuple(blocks), cell_of=torch.from_numpy(cell_of).to(device))
