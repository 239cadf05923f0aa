"""CPU seconds of attention over one packed micro-batch, forwards and backwards, by slices and by blocks of whole rows.

    python benchmarks/attention.py

One thread, medians of interleaved repeats, random states. From its last column comes `batching.SLICED_WIDTH`; rows that
repeat their prompts above `batching.MOST_REPEATED` go by slices at any width, and are told here by blocks all the same.
"""

import argparse
import statistics
import time
from unittest import mock

import numpy as np
import torch
from torch import nn

from exgrpo_cli.algo import batching
from exgrpo_cli.base.types import TokenSequence
from exgrpo_cli.engines.policy.attention import packed_causal
from exgrpo_cli.engines.policy.packing import pack

SHAPES = {
    "tiny": (16, 15, 43, 4, 2, 32),
    "tiny, short answers": (16, 100, 10, 4, 2, 32),
    "256 wide": (16, 15, 43, 8, 4, 32),
    "30 M": (8, 15, 48, 8, 4, 64),
    "SmolLM2": (8, 60, 48, 9, 3, 64),
    "SmolLM2, long prompts": (4, 340, 24, 9, 3, 64),
    "SmolLM2, long answers": (2, 60, 400, 9, 3, 64),
}
"""Questions (8 rows each), mean tokens of prompts and of responses, query heads, key-value heads, width."""


def main() -> None:
    """Print a line a shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    for name, (questions, prompt, response, heads, shared, width) in SHAPES.items():
        rng = np.random.default_rng(0)
        rows = []
        for _ in range(questions):
            ids = rng.integers(0, 99, rng.integers(prompt * 3 // 4, prompt * 5 // 4 + 1)).astype(np.int32)
            lengths = rng.integers(response // 2, response * 3 // 2, 8)
            rows += [TokenSequence(prompt_ids=ids, response_ids=np.zeros(length, np.int32)) for length in lengths]
        with mock.patch.object(batching, "MOST_REPEATED", 99):
            ways = {way: pack(rows, torch.device("cpu"), way=way) for way in ("blocks", "slices")}
        packed = ways["blocks"].input_ids.shape[1]
        states = [torch.randn(1, each, packed, width, requires_grad=True) for each in (heads, shared, shared)]
        weights = torch.randn(1, packed, heads, width)
        took: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(repeats):
            for way, batch in ways.items():
                began = time.process_time()
                mixed, _ = packed_causal(nn.Module(), *states, None, 0.2, layout=batch.layout)
                torch.autograd.grad(mixed, states, weights)
                took[way].append(time.process_time() - began)
        blocks, slices = (statistics.median(took[way]) for way in ("blocks", "slices"))
        print(f"{name}: blocks {1e3 * blocks:.1f} ms, slices {1e3 * slices:.1f} ms, {slices / blocks:.2f}")


if __name__ == "__main__":
    main()
