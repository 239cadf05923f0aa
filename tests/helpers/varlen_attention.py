"""A stand-in for the kernel of torch's varlen_attn, which no CPU has: what its documentation says and no more."""

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import varlen


def documented(query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
               **options: Any) -> Tensor:  # fmt: skip
    """One segment after the other, its queries at the end of its keys."""
    inspect.signature(varlen.varlen_attn).bind(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **options)
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and options["window_size"] == (-1, 0)
    assert cu_seq_q[-1] == len(query) and cu_seq_k[-1] == len(key) == len(value)
    queries, keys = cu_seq_q.diff().tolist(), cu_seq_k.diff().tolist()
    assert (max_q, max_k) == (max(queries), max(keys)) and min(queries) > 0
    results = []
    for own, read, read_values in zip(query.split(queries), key.split(keys), value.split(keys), strict=True):
        mask = torch.ones(len(own), len(read), dtype=torch.bool).tril(len(read) - len(own))
        heads = [each.transpose(0, 1)[None] for each in (own, read, read_values)]
        mixed = F.scaled_dot_product_attention(*heads, mask, scale=options["scale"], enable_gqa=options["enable_gqa"])
        results.append(mixed[0].transpose(0, 1))
    return torch.cat(results)
