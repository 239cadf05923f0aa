"""Rows laid end to end without a pad token, each prompt once for all the rows that share it.

A row is a prompt and its response without the last token, which is never an input. In the packed batch the prompt comes
first, then the responses of its rows; where all prompts begin alike, with the same worked examples, say, what they
share comes before all of them. Positions count from 0 in each row. Only attention needs whole rows.

Axes: packed = inputs of the micro-batch, tokens = response tokens of all rows one after the other, hidden = model
width.
"""

import copy
import inspect
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from exgrpo_cli.algo import batching, cpu, logprobs
from exgrpo_cli.base import errors, types
from exgrpo_cli.engines.causal_lm import CausalLM, to_device, use_attention
from exgrpo_cli.engines.policy import attention

PROVED_LAYERS, PROVED_TOKENS = 2, 16
"""Layers and tokens of a narrow model, copied to prove packing."""
PACKING_ROUNDINGS = 512
"""Roundings by which packed and plain hidden states may differ: many layers, two orders of summation."""
SEGMENT_LENGTHS = (3, 5, 200)
"""Response tokens of rows by which segments are proved: some end within a kernel's tile, one goes over several."""
SEGMENT_ROOM = 4.0
"""Room above the distance of blocks from float32, for that of segments: both round, in other places."""
WIDEST_HEAD = 256
"""FlashAttention's limit; narrower ones must be multiples of 8."""
LEAST_CAPABILITY = (8, 0)
"""Compute capability that FlashAttention 2 needs: Ampere."""


Scored = tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]
"""Log-probs and entropies of response tokens, in nats."""
Way = Literal["blocks", "segments", "slices"]
"""Name of a way by which attention reads the rows of a micro-batch (`attention`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch:
    """One micro-batch, ready for the model."""

    input_ids: Int[Tensor, "1 packed"]
    position_ids: Int[Tensor, "1 packed"]
    layout: attention.Layout
    predicting: Int[Tensor, " tokens"]
    """For each response token, the packed position whose hidden state predicts it."""
    targets: Int[Tensor, " tokens"]
    """The response tokens."""


def pack(sequences: Sequence[types.TokenSequence], device: torch.device, *, way: Way = "blocks") -> PackedBatch:
    """Lay out rows, response tokens staying in the order of `sequences`; `way` is how attention reads them."""
    pieces: list[np.ndarray] = []
    segments: list[attention.Ranges] = []
    """Ranges that each prefix, prompt and response reads, itself at the end."""
    filled = 0

    def lay(tokens: np.ndarray, before: attention.Ranges) -> attention.Ranges:
        """Packed positions of what a row has read when it ends in `tokens`."""
        nonlocal filled
        pieces.append(tokens)
        # A response of one token is no input: it has no query.
        if not len(tokens):
            return before
        segments.append((*before, range(filled, filled + len(tokens))))
        filled += len(tokens)
        return segments[-1]

    prefix = batching.shared_prefix(sequence.prompt_ids for sequence in sequences)
    shared = lay(sequences[0].prompt_ids[:prefix], ())
    prompts: dict[bytes, attention.Ranges] = {}
    rows: list[np.ndarray] = []
    for sequence in sequences:
        key = sequence.prompt_ids.tobytes()
        if key not in prompts:
            prompts[key] = lay(sequence.prompt_ids[prefix:], shared)
        rows.append(attention.positions(lay(sequence.response_ids[:-1], prompts[key])))
    may_slice = device.type == "cpu" and attention.TAKES_SLICES
    if may_slice and way == "blocks" and sum(map(len, rows)) > batching.MOST_REPEATED * filled:
        way = "slices"
    # Inputs that nobody attends to, for products that need no copy of theirs.
    padded = device.type == "cpu" and way != "segments" and cpu.onednn_pays()
    pieces.append(np.zeros(cpu.missing_rows(filled) if padded else 0, dtype=np.int64))
    position_ids = np.zeros(filled + len(pieces[-1]), dtype=np.int64)
    for row in rows:
        position_ids[row] = np.arange(len(row))
    predicting = [row[len(sequence.prompt_ids) - 1 :] for row, sequence in zip(rows, sequences, strict=True)]

    def on_device(array: np.ndarray) -> Tensor:
        return to_device(array.astype(np.int64, copy=False), device)

    layout: attention.Layout
    if way == "slices":
        layout = attention.slices_of(segments)
    elif way == "segments":
        layout = attention.segments_of(segments, device)
    else:
        layout = attention.blocks_of(rows, len(position_ids), device)
    return PackedBatch(
        input_ids=on_device(np.concatenate(pieces))[None],
        position_ids=on_device(position_ids)[None],
        layout=layout,
        predicting=on_device(np.concatenate(predicting)),
        targets=on_device(np.concatenate([sequence.response_ids for sequence in sequences])),
    )


def response_hidden(body: PreTrainedModel, batch: PackedBatch) -> Float[Tensor, "tokens hidden"]:
    """Hidden states that predict the response tokens.

    Where the body recomputes its layers in the backward pass, that runs under this attention too.
    """
    with use_attention(body, attention.PACKED_CAUSAL):
        output = body(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, layout=batch.layout)
    # An embedding look-up, for its backward pass: many times faster on a CPU than that of index_select.
    return F.embedding(batch.predicting, output.last_hidden_state[0])


def packed_scores(parts: CausalLM, batch: PackedBatch, temperature: float) -> Scored:
    """Log-probs and entropies of the response tokens, of softmax(logits / temperature), in nats."""
    hidden = response_hidden(parts.body, batch)
    return logprobs.token_logprobs(hidden, parts.head.weight, batch.targets, temperature=temperature)


@torch.no_grad()
def prove_packing(parts: CausalLM, way: Way = "blocks") -> None:
    """Run two short rows of one prompt packed and alone; raises InputError where the hidden states differ. Segments,
    which have a proof of their own, stand aside for blocks.

    In float32 or wider, where a difference stands out from rounding: of a narrower model two layers are copied.
    """
    if parts.head.weight.is_meta:
        return
    narrow = torch.finfo(parts.head.weight.dtype).bits < 32 or cpu.has_rounded_matmuls(parts.body)
    body = _first_layers(parts.body) if narrow else parts.body
    ids = np.arange(8, dtype=np.int32) % parts.head.weight.shape[0]
    rows = [types.TokenSequence(prompt_ids=ids[:3], response_ids=ids[3 : 3 + length]) for length in (3, 5)]
    way = "blocks" if way == "segments" else way
    packed = response_hidden(body, pack(rows, parts.device, way=way)).split([3, 5])
    for row, hidden in zip(rows, packed, strict=True):
        alone = to_device(np.concatenate([row.prompt_ids, row.response_ids]).astype(np.int64), parts.device)
        expected = body(input_ids=alone[None], use_cache=False).last_hidden_state[0, len(row.prompt_ids) - 1 : -1]
        tolerance = PACKING_ROUNDINGS * torch.finfo(hidden.dtype).eps * max(1.0, float(expected.abs().max()))
        gap = float((hidden - expected).abs().max())
        if not gap <= tolerance:
            raise errors.InputError(
                f"{type(parts.model).__name__} gives other hidden states (by {gap:.3g}) when rows are packed; "
                f"it must take its positions from position_ids; use another backbone."
            )


@torch.no_grad()
def proved_way(parts: CausalLM) -> Way:
    """The way of this model's rows: segments where torch has a kernel, and in the model's own precision hidden states
    are as near to those of float32 with it as with blocks; warns where they are not. Two layers are copied."""
    if not takes_segments(parts):
        heads, width = _heads(parts)
        sliced = parts.device.type == "cpu" and attention.TAKES_SLICES and heads * width >= batching.SLICED_WIDTH
        return "slices" if sliced else "blocks"
    ids = np.arange(max(SEGMENT_LENGTHS) + 3, dtype=np.int32) % min(PROVED_TOKENS, parts.head.weight.shape[0])
    rows = [types.TokenSequence(prompt_ids=ids[:3], response_ids=ids[3 : 3 + length]) for length in SEGMENT_LENGTHS]
    blocks, segments = pack(rows, parts.device), pack(rows, parts.device, way="segments")
    body = _first_layers(parts.body)
    exact = response_hidden(body, blocks)
    precision = parts.head.weight.dtype
    torch.nn.Module.to(body, precision)
    near, gap = (float((response_hidden(body, each) - exact).abs().max()) for each in (blocks, segments))
    bound = SEGMENT_ROOM * max(near, torch.finfo(precision).eps * float(exact.abs().max()))
    if not gap <= bound:
        slower = f"torch's attention by segments is {gap:.3g} away from float32, that by blocks {near:.3g}"
        warnings.warn(f"{slower}: rows are packed in blocks, which takes longer.", errors.ToolkitWarning, stacklevel=2)
    return "segments" if gap <= bound else "blocks"


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


def takes_segments(parts: CausalLM) -> bool:
    """Whether torch has a kernel for this model's heads and precision on its device."""
    config = parts.model.config.get_text_config()
    _, width = _heads(parts)
    return (
        attention.varlen_attn is not None
        and {"scale", "window_size", "enable_gqa"} <= inspect.signature(attention.varlen_attn).parameters.keys()
        and parts.device.type == "cuda"
        and parts.head.weight.dtype in (torch.bfloat16, torch.float16)
        and width % 8 == 0
        and width <= WIDEST_HEAD
        and getattr(config, "v_head_dim", None) is None
        and torch.cuda.get_device_capability(parts.device) >= LEAST_CAPABILITY
    )


def _heads(parts: CausalLM) -> tuple[int, int]:
    """Number of query heads, and the width of one."""
    config = parts.model.config.get_text_config()
    heads = config.num_attention_heads
    return heads, getattr(config, "head_dim", None) or config.hidden_size // heads
