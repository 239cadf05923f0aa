"""Rows laid end to end without a pad token, each prompt once for all the rows that share it, and their attention.

A row is a prompt and its response without the last token, which is never an input. In the packed batch the prompt comes
first, then the responses of its rows; where all prompts begin alike, with the same worked examples, say, what they
share comes before all of them. Positions count from 0 in each row. Only attention needs whole rows.

On a GPU it is FlashAttention over segments of unlike length, where nothing is padded. A segment is a prompt, which its
rows share, or the response of one row. Its queries stay where they are packed; its keys are those of the row up to its
own end, gathered behind one another. Causal attention is aligned at the end of a segment's keys, so the first token of
a response sees its whole prompt. Elsewhere rows of similar length are gathered into padded blocks.

Axes: packed = inputs of the micro-batch, tokens = response tokens of all rows one after the other, hidden = model
width, keys = key tokens of all segments, bounds = segments + 1, heads = query heads, kv_heads = key-value heads,
columns = tokens of a block's rows, asking = those of them that are queries, width = head dimension.
"""

import copy
import inspect
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int32
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel

from exgrpo_cli.algo import batching, cpu, logprobs
from exgrpo_cli.base import errors, types
from exgrpo_cli.engines.causal_lm import CausalLM, refuse_unsupported, to_device, use_attention

try:
    # Torch's attention over rows of unequal length: from torch 2.12 on also of heads that share keys.
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None  # type: ignore[assignment]

PROVED_LAYERS, PROVED_TOKENS = 2, 16
"""Layers and tokens of a narrow model, copied to prove packing."""
PACKING_ROUNDINGS = 512
"""Roundings by which packed and plain hidden states may differ: many layers, two orders of summation."""
SEGMENT_LENGTHS = (3, 5, 200)
"""Response tokens of rows by which segments are proved: some end within a kernel's tile, one goes over several."""
SEGMENT_ROOM = 4.0
"""Room above the distance of blocks from float32, for that of segments: both round, in other places."""
PACKED_CAUSAL = "exgrpo_packed_causal"
BLOCK_PADDING = 0.1
"""Pad cells allowed in an attention block: more blocks would cost more calls than they save."""
BLOCK_CELLS = 2**18
"""Largest attention block."""
MASK_CELLS = 2**24
"""Largest mask of a block: 64 MiB in float32."""
CAUSAL = (-1, 0)
"""The window that torch takes for causal attention."""
WIDEST_HEAD = 256
"""FlashAttention's limit; narrower ones must be multiples of 8."""
LEAST_CAPABILITY = (8, 0)
"""Compute capability that FlashAttention 2 needs: Ampere."""


Scored = tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]
"""Log-probs and entropies of response tokens, in nats."""
Asked = tuple[int, np.ndarray]
"""Number of queries a row has, and the packed positions that it reads: its queries are the last of them."""


class Segments(NamedTuple):
    """Beginnings of the segments of a packed micro-batch, and what they attend to."""

    keys: Int[Tensor, " keys"]
    """Packed positions of the keys."""
    bounds: tuple[Int32[Tensor, " bounds"], Int32[Tensor, " bounds"], int, int]
    """Packed positions at which their queries and their keys begin, and the most queries and keys that one has."""


class AttentionBlock(NamedTuple):
    """Rows of similar length, padded on the right."""

    num_rows: int
    columns: int
    asking: int
    visible: Bool[Tensor, "rows 1 asking columns"] | None
    """Mask of what each query sees; None where all of a row asks, and sees what is on its left."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionLayout:
    """Indices by which the rows of a packed micro-batch are gathered for attention, and its results put back."""

    blocks: tuple[AttentionBlock, ...]
    keys: Int[Tensor, " cells"]
    """The packed position in each cell, row by row and block by block; pad cells name any position."""
    queries: Int[Tensor, " query_cells"]
    """Likewise of the tokens that ask."""
    cell_of: Int[Tensor, " packed"]
    """For each packed position, one of its query cells."""


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


def pack(sequences: Sequence[types.TokenSequence], device: torch.device, *, by_segments: bool = False) -> PackedBatch:
    """Lay out rows, response tokens staying in the order of `sequences`; `by_segments` is how attention reads them."""
    pieces: list[np.ndarray] = []
    asked: list[Asked] = []
    """Attention of each prompt and each response."""
    filled = 0

    def lay(tokens: np.ndarray, before: np.ndarray) -> np.ndarray:
        """Packed positions of what a row has read when it ends in `tokens`."""
        nonlocal filled
        read = np.concatenate([before, filled + np.arange(len(tokens))])
        # A response of one token is no input: it has no query.
        if len(tokens):
            asked.append((len(tokens), read))
        pieces.append(tokens)
        filled += len(tokens)
        return read

    prefix = batching.shared_prefix(sequence.prompt_ids for sequence in sequences)
    shared = lay(sequences[0].prompt_ids[:prefix], np.arange(0))
    prompts: dict[bytes, np.ndarray] = {}
    rows: list[np.ndarray] = []
    for sequence in sequences:
        key = sequence.prompt_ids.tobytes()
        if key not in prompts:
            prompts[key] = lay(sequence.prompt_ids[prefix:], shared)
        rows.append(lay(sequence.response_ids[:-1], prompts[key]))
    # Inputs that nobody attends to, for products that need no copy of theirs.
    padded = device.type == "cpu" and not by_segments and cpu.onednn_pays()
    pieces.append(np.zeros(cpu.missing_rows(filled) if padded else 0, dtype=np.int64))
    position_ids = np.zeros(filled + len(pieces[-1]), dtype=np.int64)
    for row in rows:
        position_ids[row] = np.arange(len(row))
    predicting = [row[len(sequence.prompt_ids) - 1 :] for row, sequence in zip(rows, sequences, strict=True)]

    def on_device(array: np.ndarray) -> Tensor:
        return to_device(array.astype(np.int64, copy=False), device)

    return PackedBatch(
        input_ids=on_device(np.concatenate(pieces))[None],
        position_ids=on_device(position_ids)[None],
        layout=segments_of(asked, device) if by_segments else attention_layout(rows, asked, len(position_ids), device),
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


def packed_scores(parts: CausalLM, batch: PackedBatch, temperature: float) -> Scored:
    """Log-probs and entropies of the response tokens, of softmax(logits / temperature), in nats."""
    hidden = response_hidden(parts.body, batch)
    return logprobs.token_logprobs(hidden, parts.head.weight, batch.targets, temperature=temperature)


@torch.no_grad()
def prove_packing(parts: CausalLM) -> None:
    """Run two short rows of one prompt packed and alone; raises InputError where the hidden states differ.

    In float32 or wider, where a difference stands out from rounding: of a narrower model two layers are copied.
    """
    if parts.head.weight.is_meta:
        return
    narrow = torch.finfo(parts.head.weight.dtype).bits < 32 or cpu.has_rounded_matmuls(parts.body)
    body = _first_layers(parts.body) if narrow else parts.body
    ids = np.arange(8, dtype=np.int32) % parts.head.weight.shape[0]
    rows = [types.TokenSequence(prompt_ids=ids[:3], response_ids=ids[3 : 3 + length]) for length in (3, 5)]
    packed = response_hidden(body, pack(rows, parts.device)).split([3, 5])
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
def proved_segments(parts: CausalLM) -> bool:
    """Whether rows are packed by segments: torch has a kernel, and in the model's own precision hidden states are as
    near to those of float32 with it as with blocks; warns where they are not. Two layers are copied."""
    if not takes_segments(parts):
        return False
    ids = np.arange(max(SEGMENT_LENGTHS) + 3, dtype=np.int32) % min(PROVED_TOKENS, parts.head.weight.shape[0])
    rows = [types.TokenSequence(prompt_ids=ids[:3], response_ids=ids[3 : 3 + length]) for length in SEGMENT_LENGTHS]
    blocks, segments = (pack(rows, parts.device, by_segments=way) for way in (False, True))
    body = _first_layers(parts.body)
    exact = response_hidden(body, blocks)
    precision = parts.head.weight.dtype
    torch.nn.Module.to(body, precision)
    near, gap = (float((response_hidden(body, each) - exact).abs().max()) for each in (blocks, segments))
    bound = SEGMENT_ROOM * max(near, torch.finfo(precision).eps * float(exact.abs().max()))
    if not gap <= bound:
        slower = f"torch's attention by segments is {gap:.3g} away from float32, that by blocks {near:.3g}"
        warnings.warn(f"{slower}: rows are packed in blocks, which takes longer.", errors.ToolkitWarning, stacklevel=2)
    return gap <= bound


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
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return (
        varlen_attn is not None
        and {"scale", "window_size", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys()
        and parts.device.type == "cuda"
        and parts.head.weight.dtype in (torch.bfloat16, torch.float16)
        and width % 8 == 0
        and width <= WIDEST_HEAD
        and getattr(config, "v_head_dim", None) is None
        and torch.cuda.get_device_capability(parts.device) >= LEAST_CAPABILITY
    )


def segments_of(asked: Sequence[Asked], device: torch.device) -> Segments:
    """Segments in the order in which they are packed."""
    counts = np.array([(count, len(read)) for count, read in asked])
    queries, keys = (to_device(np.cumsum([0, *column]).astype(np.int32), device) for column in counts.T)
    most_queries, most_keys = counts.max(axis=0).tolist()
    read = np.concatenate([read for _, read in asked]).astype(np.int64, copy=False)
    return Segments(to_device(read, device), (queries, keys, most_queries, most_keys))


def attention_layout(
    rows: Sequence[np.ndarray], asked: Sequence[Asked], num_packed: int, device: torch.device
) -> AttentionLayout:
    """Blocks of whole `rows` (packed positions), or of what prompts and responses ask for, each by itself."""
    if sum(map(len, rows)) <= batching.MOST_REPEATED * sum(count for count, _ in asked):
        asked = [(len(row), row) for row in rows]
    # A prompt's tokens may stand in several rows with the same result: whichever is written last is read.
    cell_of = np.zeros(num_packed, dtype=np.int64)
    blocks, all_keys, all_queries, num_cells = [], [], [], 0
    for block in _similar(asked):
        columns, asking = max(len(read) for _, read in block), max(count for count, _ in block)
        keys, queries = (np.zeros((len(block), width), dtype=np.int64) for width in (columns, asking))
        for index, (count, read) in enumerate(block):
            keys[index, : len(read)] = read
            queries[index, :count] = read[-count:]
            cell_of[read[-count:]] = num_cells + index * asking + np.arange(count)
        before = np.array([len(read) - count for count, read in block])
        visible = None
        if before.any():
            seen = np.arange(columns) <= before[:, None, None] + np.arange(asking)[:, None]
            visible = to_device(seen[:, None], device)
        blocks.append(AttentionBlock(len(block), columns, asking, visible))
        all_keys.append(keys.ravel())
        all_queries.append(queries.ravel())
        num_cells += queries.size
    keys, queries = (np.concatenate(cells) for cells in (all_keys, all_queries))
    return AttentionLayout(
        blocks=tuple(blocks),
        keys=to_device(keys, device),
        queries=to_device(queries, device),
        cell_of=to_device(cell_of, device),
    )


def _similar(asked: Sequence[Asked]) -> Iterator[list[Asked]]:
    """Cut into blocks by length and by number of queries, those that ask all that they read apart from the others."""
    whole = [each for each in asked if each[0] == len(each[1])]
    ending = [each for each in asked if each[0] < len(each[1])]
    for part, budget in (
        (whole, BLOCK_CELLS),
        (ending, min(BLOCK_CELLS, MASK_CELLS // max([1, *(count for count, _ in ending)]))),
    ):
        for block in batching.micro_batches([len(read) for _, read in part], budget, max_padding=BLOCK_PADDING):
            # Of rows that read alike some ask little, and few queries of many keys pay for a block of their own.
            asked_by = [part[index][0] for index in block]
            small = batching.SMALL_MICRO_BATCH * max(asked_by) // len(part[block[0]][1])
            for alike in batching.micro_batches(asked_by, budget, max_padding=BLOCK_PADDING, small=small):
                yield [part[block[index]] for index in alike]


def packed_causal(
    module: nn.Module,
    query: Float[Tensor, "1 heads packed width"],
    key: Float[Tensor, "1 kv_heads packed width"],
    value: Float[Tensor, "1 kv_heads packed width"],
    attention_mask: None,
    scaling: float,
    layout: AttentionLayout | Segments | None = None,
    **kwargs: object,
) -> tuple[Float[Tensor, "1 packed heads width"], None]:
    """Causal attention within each row of a packed micro-batch."""
    refuse_unsupported(module, kwargs, layout)
    assert layout is not None
    packed_query, packed_key, packed_value = (states[0].transpose(0, 1) for states in (query, key, value))
    if isinstance(layout, Segments):
        assert varlen_attn is not None, "rows are packed by segments only where torch can attend by them"
        read_keys, read_values = (states.index_select(0, layout.keys) for states in (packed_key, packed_value))
        shared = query.shape[1] != key.shape[1]
        options: dict[str, Any] = {"scale": scaling, "window_size": CAUSAL, "enable_gqa": shared}
        segmented = varlen_attn(packed_query, read_keys, read_values, *layout.bounds, **options)
        return cast(Tensor, segmented)[None], None
    # All blocks in one look-up each: backwards, one for each block would fill and add as many tensors of all tokens.
    queries = _gathered(packed_query, layout.queries, [block.num_rows * block.asking for block in layout.blocks])
    sizes = [block.num_rows * block.columns for block in layout.blocks]
    keys, values = (_gathered(states, layout.keys, sizes) for states in (packed_key, packed_value))
    results = []
    for block, *cells in zip(layout.blocks, queries, keys, values, strict=True):
        asked, read, taken = (states.view(block.num_rows, -1, *states.shape[1:]).transpose(1, 2) for states in cells)
        mixed = causal_attention(asked, read, taken, scaling, block.visible)
        results.append(mixed.transpose(1, 2).flatten(0, 1).flatten(1))
    packed = F.embedding(layout.cell_of, torch.cat(results) if len(results) > 1 else results[0])
    return packed.view(1, len(layout.cell_of), query.shape[1], -1), None


def _gathered(
    states: Float[Tensor, "packed heads width"], cells: Int[Tensor, " cells"], sizes: Sequence[int]
) -> tuple[Float[Tensor, "block_cells heads width"], ...]:
    """The states of `cells`, cut into blocks of so many."""
    # An embedding look-up, for its backward pass: many times faster on a CPU than that of index_select.
    return F.embedding(cells, states.flatten(1)).view(-1, *states.shape[1:]).split(list(sizes))


def causal_attention(
    queries: Float[Tensor, "rows heads asking width"],
    keys: Float[Tensor, "rows kv_heads columns width"],
    values: Float[Tensor, "rows kv_heads columns width"],
    scaling: float,
    visible: Bool[Tensor, "rows 1 asking columns"] | None = None,
) -> Float[Tensor, "rows heads asking width"]:
    """Causal attention without a mask, or of what is `visible` to each query.

    Heads that share keys are told to the kernel, but on a GPU in float32 or with a mask: none there takes them apart
    from the one that writes out all scores, columns x columns of every head, so keys are repeated for another one.
    """
    shared = queries.shape[1] // keys.shape[1]
    if shared > 1 and repeats_keys(queries.device, queries.dtype, masked=visible is not None):
        keys, values = keys.repeat_interleave(shared, dim=1), values.repeat_interleave(shared, dim=1)
        shared = 1
    return F.scaled_dot_product_attention(
        queries, keys, values, visible, is_causal=visible is None, scale=scaling, enable_gqa=shared > 1
    )


def repeats_keys(device: torch.device, dtype: torch.dtype, *, masked: bool = False) -> bool:
    """Whether attention on this device has no kernel of its own for heads that share keys."""
    return device.type == "cuda" and (masked or dtype == torch.float32)


AttentionInterface.register(PACKED_CAUSAL, packed_causal)
