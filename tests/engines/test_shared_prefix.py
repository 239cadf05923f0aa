"""What all prompts begin with, a system message or worked examples, is computed once: the same results from fewer
inputs."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from small_policy import VOCAB, build_model, build_policy, minibatch, sequences, weights
from varlen_attention import documented

from exgrpo_cli.algo import batching
from exgrpo_cli.algo.batching import MiniBatch, packed_batches, shared_prefix
from exgrpo_cli.base.types import Rollout, RolloutRequest, SamplingParams, TokenSequence
from exgrpo_cli.engines.hf.generator import HFGenerator
from exgrpo_cli.engines.policy import packing
from exgrpo_cli.engines.policy import policy as policies
from exgrpo_cli.engines.policy.packing import pack

EXAMPLES = np.arange(7, 16, dtype=np.int32)


def beginning_alike(rows: list[TokenSequence]) -> list[TokenSequence]:
    return [replace(row, prompt_ids=np.concatenate([EXAMPLES, row.prompt_ids])) for row in rows]


def update() -> MiniBatch:
    batch = minibatch()
    rows = beginning_alike([row.sequence for row in batch.rows])
    return replace(
        batch, rows=tuple(replace(row, sequence=longer) for row, longer in zip(batch.rows, rows, strict=True))
    )


@pytest.mark.parametrize(("microbatch_tokens", "checkpointing"), [(34, False), (1000, True)])
def test_nothing_moves(microbatch_tokens: int, checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by what is shared, nor with segments, as a GPU runs attention, in the place of blocks."""
    monkeypatch.setattr(packing, "varlen_attn", documented)
    scored, moved = [], []
    for by_segments, shortest, most_repeated in product((False, True), (1000, len(EXAMPLES)), (1000, 0)):
        monkeypatch.setattr(policies, "takes_segments", lambda parts, chosen=by_segments: chosen)
        monkeypatch.setattr(batching, "SHORTEST_PREFIX", shortest)
        monkeypatch.setattr(packing, "MOST_REPEATED", most_repeated)
        model = build_model()
        policy = build_policy(model, microbatch_tokens=microbatch_tokens, gradient_checkpointing=checkpointing)
        before = weights(model)
        scores = policy.score(beginning_alike(sequences()))
        scored.append(torch.cat([torch.from_numpy(each.logprobs) for each in scores]))
        assert policy.update(update()).applied
        moved.append(weights(model) - before)
    for scores, change in zip(scored[1:], moved[1:], strict=True):
        torch.testing.assert_close(scores, scored[0], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(change, moved[0], rtol=1e-6, atol=1e-10)
    assert moved[0].abs().max() > 1e-6


def test_inputs_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "SHORTEST_PREFIX", 3)

    def row(*prompt: int) -> TokenSequence:
        return TokenSequence(prompt_ids=np.array(prompt, dtype=np.int32), response_ids=np.zeros(3, dtype=np.int32))

    rows = [row(4, 5, 6, 1), row(4, 5, 6, 2, 2), row(4, 5, 6), row(4, 5, 6, 1)]
    assert shared_prefix([row.prompt_ids for row in rows]) == 3
    # 3 shared, 1 + 2 + 2 of the first and last row, 2 + 2 of the second, 0 + 2 of the third.
    packed = pack(rows, torch.device("cpu"))
    assert packed.input_ids.tolist() == [[4, 5, 6, 1, 0, 0, 2, 2, 0, 0, 0, 0, 0, 0]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 3, 4, 4, 5]]
    assert packed.predicting.tolist() == [3, 4, 5, 7, 8, 9, 2, 10, 11, 3, 12, 13]
    assert packed_batches(rows, 14) == [[0, 3, 1, 2]]
    # The shared tokens come again with every micro-batch: 3 + 5 and 3 + 4 + 2.
    assert packed_batches(rows, 13) == [[0, 3, 1], [2]]
    assert packed_batches(rows, 9) == [[0, 3], [1, 2]]


def test_prompts_that_part_early_share_nothing() -> None:
    def prompt(*tokens: int) -> np.ndarray:
        return np.array(tokens, dtype=np.int32)

    same = [7] * batching.SHORTEST_PREFIX
    assert shared_prefix([prompt(*same, 1), prompt(*same, 2)]) == batching.SHORTEST_PREFIX
    assert shared_prefix([prompt(*same[1:], 1), prompt(*same[1:], 2)]) == 0
    assert shared_prefix([prompt(*same, 1), prompt(*same, 1)]) == shared_prefix([]) == 0


def test_rollouts_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a prompt that is the shared tokens alone, too."""
    questions = [np.concatenate([EXAMPLES, np.arange(count, dtype=np.int32)]) for count in (0, 1, 4)]
    requests = [
        RolloutRequest(question_id=str(index), prompt_ids=prompt, seeds=(index, 9 + index))
        for index, prompt in enumerate(questions)
    ]
    params = SamplingParams(max_new_tokens=6, temperature=0.8, top_p=1.0)
    drawn: list[list[Rollout]] = []
    passes: list[list[int]] = []

    def count(module: torch.nn.Module, positional: tuple[()], named: dict[str, torch.Tensor]) -> None:
        passes[-1].append(named["input_ids"].numel())

    for shortest in (1000, len(EXAMPLES)):
        monkeypatch.setattr(batching, "SHORTEST_PREFIX", shortest)
        model = build_model()
        generator = HFGenerator(model, max_rows=6, eos_ids=[VOCAB - 1])
        passes.append([])
        model.model.register_forward_pre_hook(count, with_kwargs=True)
        groups = generator.generate(requests, params)
        drawn.append([rollout for group in groups for rollout in group])
    for own, other in zip(*drawn, strict=True):
        assert own.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(own.engine_logprobs, other.engine_logprobs, rtol=1e-6)
    # Prompts of 9, 10 and 13 tokens, padded; then the 8 of which none is a prompt's last, and what is left.
    assert passes[0][:1] == [39] and passes[1][:2] == [8, 15]
