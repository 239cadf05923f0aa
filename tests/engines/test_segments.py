"""Attention by segments, as a GPU runs it: torch's own operation, without its kernel, and where it is taken."""

import pytest
import torch
from small_policy import build_model, sequences

from exgrpo_cli.engines.causal_lm import CausalLM, split_causal_lm
from exgrpo_cli.engines.policy import packing
from exgrpo_cli.engines.policy.packing import causal_attention, pack, packed_causal, repeats_keys, takes_segments


def test_torch_takes_what_it_is_given() -> None:
    """Its operation on the meta device, gradients too: arguments, shapes and precision, but no kernel."""
    batch = pack(sequences(), torch.device("meta"), by_segments=True)
    queries = torch.zeros(1, 4, batch.input_ids.numel(), 8, dtype=torch.bfloat16, device="meta", requires_grad=True)
    keys, values = (torch.zeros_like(queries[:, :2]) for _ in range(2))
    keys.requires_grad_()
    mixed, _ = packed_causal(torch.nn.Identity(), queries, keys, values, None, 0.3, layout=batch.layout)
    assert (mixed.shape, mixed.dtype) == (queries.transpose(1, 2).shape, torch.bfloat16)
    mixed.sum().backward()
    assert queries.grad.shape == queries.shape and keys.grad.shape == keys.shape


def test_segments_are_for_gpus_and_narrow_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow, wide = (split_causal_lm(build_model(dtype)) for dtype in (torch.bfloat16, torch.float32))
    assert not takes_segments(narrow)
    monkeypatch.setattr(CausalLM, "device", property(lambda parts: torch.device("cuda", 0)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert takes_segments(narrow) and not takes_segments(wide)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not takes_segments(narrow)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(packing, "varlen_attn", None)
    assert not takes_segments(narrow)


def test_no_mask_goes_to_the_kernel_that_writes_out_all_scores() -> None:
    """On a GPU in bfloat16, where torch has no segments: FlashAttention shares keys among heads, but takes no mask."""
    gpu = torch.device("cuda", 0)
    assert repeats_keys(gpu, torch.bfloat16, masked=True) and not repeats_keys(gpu, torch.bfloat16)
    assert repeats_keys(gpu, torch.float32) and not repeats_keys(torch.device("cpu"), torch.float32, masked=True)


def test_repeated_keys_are_shared_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """What float32 on a GPU does, where heads that share keys have no kernel."""
    states = [torch.randn(2, heads, 5, 8, dtype=torch.float64) for heads in (4, 2, 2)]
    shared = causal_attention(*states, 0.3)
    monkeypatch.setattr("exgrpo_cli.engines.policy.packing.repeats_keys", lambda *tensor, masked: True)
    torch.testing.assert_close(causal_attention(*states, 0.3), shared)
