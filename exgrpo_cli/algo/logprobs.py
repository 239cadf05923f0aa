"""Log-probs and entropies of softmax(logits / T) without the logits: tile by tile, recomputed in the backward pass.

The vocabulary is cut into tiles. The forward pass keeps a running log-sum-exp per token; the backward pass recomputes
each tile's logits, and because the final log-sum-exp is known by then, every tile's probabilities, and with them one
block of rows of the head's gradient, are complete at once: no second buffer of the head's size is ever needed. At most
TILE_ELEMENTS logits (GPU_TILE_ELEMENTS on a GPU) exist at a time, whatever the numbers of tokens and of vocabulary
entries.

Axes: tokens = scored positions of all rows, hidden = model width, vocab = vocabulary.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from exgrpo_cli.algo.cpu import transposed_matmul, wide_matmul

TILE_ELEMENTS = 2**24
"""Logits in one tile: 64 MiB in float32, and about five tensors of this size at the peak of the backward pass."""
GPU_TILE_ELEMENTS = 2**26
"""The same on a GPU, which smaller products leave idle: 256 MiB."""
MIN_TILE_COLUMNS = 128
"""Narrower tiles starve the matrix units: beyond TILE_ELEMENTS / 128 tokens the tokens are cut as well."""


def token_logprobs(
    hidden: Float[Tensor, "tokens hidden"],
    head_weight: Float[Tensor, "vocab hidden"],
    token_ids: Int[Tensor, " tokens"],
    *,
    temperature: float,
    tile_elements: int | None = None,
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """log p(token) and H = -sum_v p_v log p_v, in nats, for p = softmax(hidden @ head_weight.T / temperature).

    Both results are differentiable with respect to `hidden` and `head_weight`. The products run in the dtype of
    `hidden`, everything after them in float32 (float64 for float64 input); on a GPU their sums too. `tile_elements` are
    as many as suit the device where they are None.
    """
    tile_elements = tile_elements or (GPU_TILE_ELEMENTS if hidden.device.type == "cuda" else TILE_ELEMENTS)
    block = max(1, tile_elements // min(MIN_TILE_COLUMNS, head_weight.shape[0]))
    parts = [
        _TiledSoftmax.apply(part, head_weight, ids, temperature, tile_elements)
        for part, ids in zip(hidden.split(block), token_ids.split(block), strict=True)
    ]
    if len(parts) == 1:
        return parts[0]
    return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([entropies for _, entropies in parts])


class _TiledSoftmax(torch.autograd.Function):
    """With z = logits / T, p = softmax(z) and H its entropy: d log p_y / dz = e_y - p, dH / dz = -p (log p + H)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head_weight: Tensor, token_ids: Tensor, temperature: float, tile_elements: int
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        columns = max(1, tile_elements // max(1, hidden.shape[0]))
        maximum = hidden.new_full(hidden.shape[:1], -torch.inf, dtype=wide)
        exp_sum = torch.zeros_like(maximum)
        weighted_sum = torch.zeros_like(maximum)
        chosen = torch.zeros_like(maximum)
        for start in range(0, head_weight.shape[0], columns):
            scaled = _scaled_logits(hidden, head_weight[start : start + columns], temperature, wide)
            _pick_chosen(chosen, scaled, token_ids - start)
            new_maximum = torch.maximum(maximum, scaled.amax(dim=1))
            shrink = torch.exp(maximum - new_maximum)
            shifted = scaled - new_maximum[:, None]
            exponentials = shifted.exp()
            tile_sum = exponentials.sum(dim=1)
            # Relative to the new maximum, where old sums of e * z shrink and shift by the move of the maximum. The
            # first tile has nothing to move, and -inf * 0 would be NaN.
            moved = torch.zeros_like(maximum) if start == 0 else weighted_sum + (maximum - new_maximum) * exp_sum
            weighted_sum = shrink * moved + torch.einsum("tv,tv->t", exponentials, shifted)
            exp_sum = shrink * exp_sum + tile_sum
            maximum = new_maximum
        log_exp_sum = exp_sum.log()
        # H = log sum e - (sum e * s) / (sum e) with s = z - max: no difference of large numbers.
        entropies = log_exp_sum - weighted_sum / exp_sum
        log_normaliser = maximum + log_exp_sum
        ctx.save_for_backward(hidden, head_weight, token_ids, log_normaliser, entropies)
        ctx.temperature, ctx.columns = temperature, columns
        return chosen - log_normaliser, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        grad_logprobs, grad_entropies = grads
        hidden, head_weight, token_ids, log_normaliser, entropies = ctx.saved_tensors
        wide = log_normaliser.dtype
        # Summed over tiles in the wide dtype: tokens x hidden, small beside one tile.
        grad_hidden = torch.zeros_like(hidden, dtype=wide) if ctx.needs_input_grad[0] else None
        grad_weight = torch.empty_like(head_weight) if ctx.needs_input_grad[1] else None
        for start in range(0, head_weight.shape[0], ctx.columns):
            tile = head_weight[start : start + ctx.columns]
            log_p = _scaled_logits(hidden, tile, ctx.temperature, wide).sub_(log_normaliser[:, None])
            grad_tile = log_p.exp()
            log_p.add_(entropies[:, None]).mul_(grad_entropies[:, None]).add_(grad_logprobs[:, None])
            grad_tile.mul_(log_p).neg_()
            del log_p
            _add_at_chosen(grad_tile, grad_logprobs, token_ids - start)
            narrow = grad_tile.div_(ctx.temperature).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden += wide_matmul(narrow, tile.to(hidden.dtype).t(), wide)
            if grad_weight is not None:
                grad_weight[start : start + ctx.columns] = transposed_matmul(narrow, hidden)
        return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, None, None, None


def _scaled_logits(hidden: Tensor, tile: Tensor, temperature: float, wide: torch.dtype) -> Tensor:
    return wide_matmul(hidden, tile.to(hidden.dtype), wide).div_(temperature)


def _pick_chosen(chosen: Tensor, scaled: Tensor, columns: Tensor) -> None:
    """Copy each token's own z into `chosen` where its column lies in this tile."""
    inside = (columns >= 0) & (columns < scaled.shape[1])
    picked = scaled.gather(1, columns.clamp(0, scaled.shape[1] - 1)[:, None])[:, 0]
    torch.where(inside, picked, chosen, out=chosen)


def _add_at_chosen(grad_tile: Tensor, grad_logprobs: Tensor, columns: Tensor) -> None:
    """Add the e_y term of d log p_y / dz where the token's column lies in this tile."""
    inside = (columns >= 0) & (columns < grad_tile.shape[1])
    grad_tile.scatter_add_(1, columns.clamp(0, grad_tile.shape[1] - 1)[:, None], (grad_logprobs * inside)[:, None])
