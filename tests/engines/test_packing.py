"""Packed rows: the beginning that all prompts share, a system message or worked examples, is computed once; and
attention by segments, as a GPU runs it: torch's own operation, without its kernel, and where it is taken."""

import inspect
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from small_policy import VOCAB, build_model, build_policy, minibatch, sequences, weights
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import varlen

from exgrpo_cli.algo import batching, cpu
from exgrpo_cli.base import errors, types
from exgrpo_cli.engines.causal_lm import CausalLM, split_causal_lm
from exgrpo_cli.engines.hf.generator import HFGenerator
from exgrpo_cli.engines.policy import attention, packing
from exgrpo_cli.engines.policy.packing import pack, proved_way, takes_segments

EXAMPLES = np.arange(7, 16, dtype=np.int32)


def documented(query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
               **options: Any) -> Tensor:  # fmt: skip
    """A stand-in for the kernel of torch's varlen_attn, which no CPU has: what its documentation says and no more.

    One segment after the other, its queries at the end of its keys.
    """
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


def prompt(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def beginning_alike(rows: list[types.TokenSequence]) -> list[types.TokenSequence]:
    return [replace(row, prompt_ids=np.concatenate([EXAMPLES, row.prompt_ids])) for row in rows]


def update() -> batching.MiniBatch:
    batch = minibatch()
    pairs = zip(batch.rows, beginning_alike([row.sequence for row in batch.rows]), strict=True)
    return replace(batch, rows=tuple(replace(row, sequence=sequence) for row, sequence in pairs))


@pytest.mark.parametrize(("microbatch_tokens", "checkpointing"), [(34, False), (1000, True)])
def test_nothing_moves(microbatch_tokens: int, checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by what is shared, nor by padding, nor with segments, as a GPU runs attention, or slices for blocks."""
    calls: list[Any] = []
    monkeypatch.setattr(
        attention, "varlen_attn", lambda *given, **how: calls.append(given) or documented(*given, **how)
    )
    scored, moved = [], []
    ways = product(("blocks", "segments", "slices"), (False, True), (1000, len(EXAMPLES)), (1000, 0))
    for way, padded, shortest, small in ways:
        monkeypatch.setattr(packing, "proved_way", lambda parts, chosen=way: chosen)
        monkeypatch.setattr(cpu, "onednn_pays", lambda chosen=padded: chosen)
        monkeypatch.setattr(batching, "SHORTEST_PREFIX", shortest)
        monkeypatch.setattr(batching, "MOST_REPEATED", small)
        monkeypatch.setattr(batching, "SMALL_MICRO_BATCH", small)
        model = build_model()
        policy = build_policy(model, microbatch_tokens=microbatch_tokens, gradient_checkpointing=checkpointing)
        before = weights(model)
        calls.clear()
        scores = policy.score(beginning_alike(sequences()))
        assert bool(calls) == (way == "segments")
        scored.append(torch.cat([torch.from_numpy(each.logprobs) for each in scores]))
        assert policy.update(update()).applied
        moved.append(weights(model) - before)
    for scores, change in zip(scored[1:], moved[1:], strict=True):
        torch.testing.assert_close(scores, scored[0], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(change, moved[0], rtol=1e-6, atol=1e-10)
    assert moved[0].abs().max() > 1e-6


def test_inputs_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "SHORTEST_PREFIX", 3)
    monkeypatch.setattr(cpu, "onednn_pays", lambda: False)

    prompts = [prompt(*tokens) for tokens in ((4, 5, 6, 1), (4, 5, 6, 2, 2), (4, 5, 6), (4, 5, 6, 1))]
    rows = [types.TokenSequence(prompt_ids=each, response_ids=prompt(0, 0, 0)) for each in prompts]
    assert batching.shared_prefix(prompts) == 3
    # 3 shared, 1 + 2 + 2 of the first and last row, 2 + 2 of the second, 0 + 2 of the third.
    packed = pack(rows, torch.device("cpu"))
    assert packed.input_ids.tolist() == [[4, 5, 6, 1, 0, 0, 2, 2, 0, 0, 0, 0, 0, 0]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 3, 4, 4, 5]]
    assert packed.predicting.tolist() == [3, 4, 5, 7, 8, 9, 2, 10, 11, 3, 12, 13]
    # Each reads itself; all behind the shared tokens read those at once, neighbours of one prompt read that.
    laid = [(0, 3), (3, 4), (4, 6), (6, 8), (8, 10), (10, 12), (12, 14)]
    read = [*((own, own) for own in laid), ((3, 14), (0, 3)), ((4, 6), (3, 4)), ((12, 14), (3, 4)), ((8, 10), (6, 8))]
    sliced = pack(rows, torch.device("cpu"), way="slices").layout
    assert [tuple((each.start, each.stop) for each in pair) for pair in sliced.reads] == read
    # Where rows of a product are padded, the batch is: 14 to 32.
    monkeypatch.setattr(cpu, "onednn_pays", lambda: True)
    padded = pack(rows, torch.device("cpu"))
    assert padded.input_ids.tolist() == [packed.input_ids[0].tolist() + [0] * 18]
    assert padded.predicting.tolist() == packed.predicting.tolist()
    assert batching.packed_batches(rows, 14) == [[0, 3, 1, 2]]
    # The shared tokens come again with every micro-batch: 3 + 5 and 3 + 4 + 2.
    assert batching.packed_batches(rows, 13) == [[0, 3, 1], [2]]
    assert batching.packed_batches(rows, 9) == [[0, 3], [1, 2]]


def test_prompts_that_part_early_share_nothing() -> None:
    same = [7] * batching.SHORTEST_PREFIX
    assert batching.shared_prefix([prompt(*same, 1), prompt(*same, 2)]) == batching.SHORTEST_PREFIX
    assert batching.shared_prefix([prompt(*same[1:], 1), prompt(*same[1:], 2)]) == 0
    assert batching.shared_prefix([prompt(*same, 1), prompt(*same, 1)]) == batching.shared_prefix([]) == 0


def test_rollouts_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a prompt that is the shared tokens alone, too."""
    questions = [prompt(*EXAMPLES, *range(count)) for count in (0, 1, 4)]
    requests = [
        types.RolloutRequest(question_id=str(index), prompt_ids=asked, seeds=(index, 9 + index))
        for index, asked in enumerate(questions)
    ]
    params = types.SamplingParams(max_new_tokens=6, temperature=0.8, top_p=1.0)
    drawn: list[list[types.Rollout]] = []
    passes: list[list[int]] = []

    def count(module: torch.nn.Module, positional: tuple[()], named: dict[str, torch.Tensor]) -> None:
        passes[-1].append(named["input_ids"].numel())

    for shortest in (1000, len(EXAMPLES)):
        monkeypatch.setattr(batching, "SHORTEST_PREFIX", shortest)
        model = build_model()
        generator = HFGenerator(model, max_rows=6, eos_ids=[VOCAB - 1])
        passes.append([])
        model.model.register_forward_pre_hook(count, with_kwargs=True)
        drawn.append([rollout for group in generator.generate(requests, params) for rollout in group])
    for own, other in zip(*drawn, strict=True):
        assert own.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(own.engine_logprobs, other.engine_logprobs, rtol=1e-6)
    # Prompts of 9, 10 and 13 tokens, padded; then the 8 of which none is a prompt's last, and what is left.
    assert passes[0][:1] == [39] and passes[1][:2] == [8, 15]


def test_segments_are_for_gpus_and_narrow_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow, wide = (split_causal_lm(build_model(dtype)) for dtype in (torch.bfloat16, torch.float32))
    assert not takes_segments(narrow)
    monkeypatch.setattr(CausalLM, "device", property(lambda parts: torch.device("cuda", 0)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert takes_segments(narrow) and not takes_segments(wide)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not takes_segments(narrow)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(attention, "varlen_attn", None)
    assert not takes_segments(narrow)


def test_segments_are_proved_in_the_precision_of_the_run_or_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = split_causal_lm(build_model(torch.bfloat16))
    monkeypatch.setattr(packing, "takes_segments", lambda parts: True)
    monkeypatch.setattr(attention, "varlen_attn", documented)
    assert proved_way(parts) == "segments"
    # Keys that are one place off.
    shifted = lambda query, key, *others, **options: documented(query, key.roll(1, 0), *others, **options)  # noqa: E731
    monkeypatch.setattr(attention, "varlen_attn", shifted)
    with pytest.warns(errors.ToolkitWarning, match="away from float32, that by blocks .*: rows are packed in blocks"):
        assert build_policy(build_model(torch.bfloat16))._way == "blocks"


@pytest.mark.parametrize(("there", "way"), [(True, "slices"), (False, "blocks")])
def test_slices_want_their_kernel(there: bool, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "TAKES_SLICES", there)
    monkeypatch.setattr(batching, "SLICED_WIDTH", 0)
    monkeypatch.setattr(batching, "MOST_REPEATED", 0)
    assert proved_way(split_causal_lm(build_model())) == way
    assert isinstance(pack(sequences(), torch.device("cpu")).layout, attention.Slices) == there


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("lengths", [(1,), (3, 1, 2), (0, 5, 4, 1, 7)])
def test_slices_are_softmax_attention(lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    """Output and gradients against the equation in float64; rows behind a shared beginning, some of a single token."""
    ends = np.cumsum(lengths).tolist()
    spans = [range(end - length, end) for end, length in zip(ends, lengths, strict=True) if length]
    whole = attention.slices_of([(spans[0],), *((spans[0], span) for span in spans[1:])])
    seen = torch.zeros(ends[-1], ends[-1], dtype=torch.bool)
    for span in spans:
        seen[span.start : span.stop, : spans[0].stop] = seen[span.start : span.stop, span.start : span.stop] = True
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(1, heads, ends[-1], 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2, 4)]
    *states, weights = (each.to(dtype) for each in made)
    query, key, value = exact = [each.double().requires_grad_() for each in states]
    scores = query @ key.repeat_interleave(2, 1).mT * 0.3
    expected = scores.masked_fill(~(seen.tril()), -torch.inf).softmax(-1) @ value.repeat_interleave(2, 1)
    own = [each.clone().requires_grad_() for each in states]
    found, _ = attention.packed_causal(torch.nn.Module(), *own, None, 0.3, layout=whole)
    found = found.transpose(1, 2)
    close = {"rtol": 1e-9, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(found.double(), expected, **close)
    gradients = [
        torch.autograd.grad((of * weights.to(of.dtype)).sum(), to) for of, to in ((found, own), (expected, exact))
    ]
    for mine, other in zip(*gradients, strict=True):
        torch.testing.assert_close(mine.double(), other, **close)


@pytest.mark.parametrize(("dtype", "on_gpu"), [(torch.float32, True), (torch.float32, False), (torch.bfloat16, True)])
def test_keys_are_repeated_in_float32_on_a_gpu_alone(dtype: torch.dtype, on_gpu: bool, monkeypatch) -> None:
    """No kernel there takes heads that share keys; repeated or shared, the output is that of slices."""
    shared: list[bool] = []
    own = F.scaled_dot_product_attention
    told = lambda *states, enable_gqa, **how: shared.append(enable_gqa) or own(*states, enable_gqa=enable_gqa, **how)  # noqa: E731
    layouts = [pack(sequences(), torch.device("cpu"), way=way).layout for way in ("slices", "blocks")]
    packed = len(layouts[1].cell_of)
    states = [
        torch.randn(1, heads, packed, 8, generator=torch.Generator().manual_seed(0)).to(dtype) for heads in (4, 2, 2)
    ]
    expected, _ = attention.packed_causal(torch.nn.Module(), *states, None, 0.3, layout=layouts[0])
    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", told)
    monkeypatch.setattr(torch.Tensor, "is_cuda", on_gpu)
    found, _ = attention.packed_causal(torch.nn.Module(), *states, None, 0.3, layout=layouts[1])
    assert set(shared) == {not (on_gpu and dtype == torch.float32)}
    last = max(span.stop for span, _ in layouts[0].reads)
    room = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(found[:, :last], expected[:, :last], rtol=room, atol=room)
