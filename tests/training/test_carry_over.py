"""Rollouts that go on in the next step, through the real loop: none lost, none doubled, exact ratios and resumes."""

import base64
import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_leaves import assert_same_run, killed, metrics, train_and_die

from exgrpo_cli.base.reporter import SilentReporter
from exgrpo_cli.engines.hf.generator import HFGenerator
from exgrpo_cli.ledger.reader import LedgerReader
from exgrpo_cli.replay.store import Store
from exgrpo_cli.training import run, start
from exgrpo_cli.training import run as training
from exgrpo_cli.training.step.groups import Group

B, K = 4, 4
CARRIED = (
    "rollout.carry_over=0.5", f"rollout.questions_per_step={B}", f"rollout.group_size={K}", "optim.learning_rate=1e-3",
    "replay.retirement=false", "arithmetic.num_heldout=4", "validation.samples=1",
)  # fmt: skip


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Group]]:
    """Groups that a run trains, each with its step."""
    found: list[tuple[int, Group]] = []
    step = training.run_step

    def noted(*given: Any) -> Any:
        result = step(*given)
        assert result is not None
        found.extend((result[0]["step"], group) for group in result[1])
        return result

    monkeypatch.setattr(training, "run_step", noted)
    return found


@pytest.mark.parametrize("logprobs", ["sampler", "trainer"])
def test_every_rollout_is_trained_once_with_the_log_probs_of_whoever_sampled_each_token(
    logprobs: str, small_config: Any, tmp_path: Path, trained: list[tuple[int, Group]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """B of B / (1 - 1/2) groups end a step. Log-probs are held against a pass in float64 of each version's weights."""
    models: dict[int, Any] = {}
    asked: Counter[int] = Counter()
    generate = HFGenerator.generate

    def sampled(generator: HFGenerator, requests: Any, params: Any, on_finished: Any = None, enough: Any = None) -> Any:
        groups = generate(generator, requests, params, on_finished, enough)
        if enough is not None:
            models[generator.weight_version] = copy.deepcopy(generator._parts.model).double()
            asked.update(seed for request in requests if not request.drawn for seed in request.seeds)
            tokens.append(sum(len(rollout.token_ids) for group in groups for rollout in group))
            in_line = [*dict.fromkeys(request.question_id for request in requests)]
            assert in_line[: len(unfinished)] == unfinished, "what has begun comes first"
            rows = (rollout for group in groups for rollout in group if rollout.is_unfinished)
            unfinished[:] = dict.fromkeys(rollout.question_id for rollout in rows)
        return groups

    tokens: list[int] = []
    unfinished: list[str] = []
    visits: list[Any] = []
    record = Store.record_visits
    monkeypatch.setattr(HFGenerator, "generate", sampled)

    def recorded(store: Store, own: Any, **how: Any) -> None:
        visits.extend(own)
        record(store, own, **how)

    monkeypatch.setattr(Store, "record_visits", recorded)
    run.train(small_config(*CARRIED, f"rollout.logprobs={logprobs}"), tmp_path / "run", reporter=SilentReporter())

    lines, groups = metrics(tmp_path / "run"), [group for _, group in trained]
    state = json.loads((tmp_path / "run" / "checkpoints" / "step-000006" / "state.json").read_text())["state"]
    assert len(groups) == len(visits) == 6 * B and len(state["carried"]) == B
    assert sum(state["visits"].values()) == 6 * B
    # Begun once each, in whatever step.
    left = [each["token_ids"] for group in state["carried"] for each in group["rollouts"]]
    assert len(asked) == sum(len(group.fresh) for group in groups) + len(left) and max(asked.values()) == 1
    # Tokens count in the step that generates them: four bytes each in the checkpoint.
    assert [line["tokens/generated"] for line in lines] == tokens
    under_way = sum(len(base64.b64decode(each)) // 4 for each in left)
    assert sum(tokens) == under_way + sum(len(member.rollout.token_ids) for group in groups for member in group.fresh)
    spans = [member.rollout for group in groups for member in group.fresh]
    assert max(1 + len(rollout.earlier) for rollout in spans) > 1, "the example shows nothing"
    assert max(line["rollout/versions_max"] for line in lines) == max(1 + len(rollout.earlier) for rollout in spans)
    for group, visit in zip(groups, visits, strict=True):
        firsts = [(*each.rollout.earlier, (each.rollout.weight_version, 0))[0] for each in group.fresh]
        assert visit.weight_version == min(version for version, _ in firsts)
        for member, row in zip(group.fresh, visit.rows, strict=True):
            rollout, start = member.rollout, 0
            ids = torch.from_numpy(np.concatenate([group.prompt_ids, rollout.token_ids]).astype(np.int64))[None]
            own = (rollout.weight_version, len(rollout.token_ids) - rollout.num_earlier)
            for version, count in (*rollout.earlier, own):
                with torch.no_grad():
                    logits = models[version](input_ids=ids).logits[0, len(group.prompt_ids) - 1 : -1]
                drawn = torch.log_softmax(logits, -1).gather(1, ids[0, len(group.prompt_ids) :, None])[:, 0].numpy()
                part = slice(start, start + count)
                np.testing.assert_allclose(row.behaviour_logprobs[part], drawn[part], rtol=0, atol=2e-5)
                start += count
            assert start == len(row.behaviour_logprobs)


def test_a_killed_run_resumes_to_the_bit(small_config: Any, tmp_path: Path) -> None:
    """Killed when step 5 would be recorded; the checkpoint of step 3 holds rollouts under way."""
    config = small_config(*CARRIED)
    run.train(config, tmp_path / "whole", reporter=SilentReporter())
    train_and_die(killed(Store, "flush", when=lambda store, step: step == 5), tmp_path / "cut", config)
    state = json.loads((tmp_path / "cut" / "checkpoints" / "step-000003" / "state.json").read_text())["state"]
    assert any(each["token_ids"] for group in state["carried"] for each in group["rollouts"])
    run.train(start.resumed_config(tmp_path / "cut"), tmp_path / "cut", resume=True, reporter=SilentReporter())
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


def test_a_replayed_row_stays_with_its_group_until_that_is_complete(
    small_config: Any, tmp_path: Path, trained: list[tuple[int, Group]]
) -> None:
    """Its question is passed over meanwhile, by the stream and by the draw. The ledger has the step that drew it, the
    journal counts it in the one that trains it."""
    run.train(
        small_config(*CARRIED, "replay.start_threshold=0", "run.steps=8"), tmp_path / "run", reporter=SilentReporter()
    )
    events = LedgerReader(tmp_path / "run" / "replay").events().to_pylist()
    selected = {(each["trajectory_id"], each["step"]) for each in events if each["event"] == "selected"}
    waited = []
    for step, group in trained:
        assert len(group.fresh) + len(group.replayed) == K
        for row in group.replayed:
            waited.append(min(step - own for id, own in selected if id == row.trajectory.trajectory_id and own <= step))
    assert waited and max(waited) > 0, "the example shows nothing"
    for step in range(1, 9):
        ids = [group.question.id for own, group in trained if own == step]
        assert len(set(ids)) == len(ids) == B
    used = Counter(step for step, group in trained for _ in group.replayed)
    assert [line["replay/used"] for line in metrics(tmp_path / "run")] == [used[step] for step in range(1, 9)]
    state = json.loads((tmp_path / "run" / "checkpoints" / "step-000008" / "state.json").read_text())["state"]
    assert used.total() == state["replayed"] == len(waited)
    assert len(selected) == used.total() + sum(len(group["replayed"]) for group in state["carried"])
