"""What another policy would have drawn: settings read, states rebuilt, choices checked against a slow reference."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_run import SyntheticRun, write_run

from exgrpo_cli.base.errors import InputError, RunError
from exgrpo_cli.replay.replace import Replace
from exgrpo_cli.show.asked import KEYS, REPETITIONS, parse_what_if, states_before, what_if
from exgrpo_cli.show.record import RunRecord, read_run

OWN = Replace(sampler="normal", mu=0.5, sigma=0.125, metric="ent", direction="min")
LIMITS = Replace(max_per_question=4, max_age=6, cooldown=3, readmit_fraction=0.5, readmit_every=4)


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    run = tmp_path_factory.mktemp("what-if") / "run"
    write_run(run, SyntheticRun(steps=20, num_questions=250, questions_per_step=16, mixed_from=2))
    return read_run(run)


def asked(record: RunRecord, text: str) -> dict[str, Any]:
    [outcome] = what_if(record, text).values()
    return outcome


READ = {
    "sampler=linear": {"sampler": "linear"},
    "metric=ent:max": {"direction": "max"},
    "mu=0.25": {"mu": 0.25},
    "metric=python:mine:score": {"metric": "python:mine:score"},
    "replay.sampler=uniform, metric=length": {"sampler": "uniform", "metric": "length"},
}


def test_what_is_not_named_is_as_in_the_run() -> None:
    for text, changed in READ.items():
        rules, kinds = parse_what_if(text, OWN)
        assert kinds == tuple(kind for kind, keys in KEYS.items() if changed.keys() & set(keys))
        assert rules == replace(OWN, enabled=False, **changed)


REFUSED = {
    "linear": "'linear' is not a new key=value; write sampler=linear,metric=ppl.",
    "sampler=linear,sampler=sqrt": "'sampler=sqrt' is not a new key=value",
    "samples=linear": "unknown key 'samples': composition = 'replace' can be asked for sampler, mu",
    "mu=half": "mu = 'half' must be a number",
    "sigma=0": "sigma = 0.0 is out of range",
    "metric=ent:max,direction=min": "metric says max and direction min; give one.",
    "sampler=linear,mu=0.3": "mu and sigma are those of the sampler normal, not of linear.",
    "metric=pll": "Did you mean 'ppl'",
}


def test_what_cannot_be_read_is_refused() -> None:
    for text, told in REFUSED.items():
        with pytest.raises(InputError) as caught:
            parse_what_if(text, OWN)
        assert told in str(caught.value)


@pytest.mark.parametrize("rules", [Replace(), LIMITS, Replace(count_fresh_only=True)], ids=["paper", "limits", "fresh"])
def test_the_buckets_at_each_draw_are_those_the_run_offered_its_sampler(tmp_path: Path, rules: Replace) -> None:
    spec = SyntheticRun(steps=16, num_questions=80, questions_per_step=10, mixed_from=2, rules=rules)
    write_run(tmp_path / "run", spec)
    run = read_run(tmp_path / "run")
    steps = np.unique(run.draws.step)
    assert len(steps) >= 12
    for step, states in zip(steps, states_before(run, steps), strict=True):
        own, buckets = run.draws.step == step, states.drawable(int(step))
        offered = zip(run.draws.bucket[own], run.draws.num_members[own], run.draws.num_questions[own], strict=True)
        rebuilt = [(bucket.success_count, bucket.num_members, len(bucket)) for bucket in buckets]
        assert rebuilt == [tuple(int(value) for value in row) for row in offered]
        assert all(list(bucket.question_ids) == sorted(bucket.question_ids) for bucket in buckets)


def test_the_runs_own_metric_chooses_the_same_trajectories(record: RunRecord) -> None:
    own = asked(record, "metric=ent")
    assert own["share_same"] == 1.0 and own["chosen"] == own["other"]
    assert own["draws"] == len(np.unique(record.scores.step * 1000 + record.trajectories.question[record.scores.row]))


def test_another_metric_chooses_as_a_slow_reference_does(record: RunRecord) -> None:
    outcome = asked(record, "metric=length:max")
    by_draw: dict[tuple[int, int], list[tuple[int, int, float]]] = {}
    for i in range(len(record.scores.step)):
        row = int(record.scores.row[i])
        key = (int(record.scores.step[i]), int(record.trajectories.question[row]))
        tokens, trajectory_id = int(record.trajectories.num_tokens[row]), int(record.trajectories.trajectory_id[row])
        by_draw.setdefault(key, []).append((-tokens, trajectory_id, float(record.scores.entropy[i])))
    longest = [min(rows) for rows in by_draw.values()]  # of equal lengths the lowest id
    assert outcome["other"]["num_tokens"] == pytest.approx(np.mean([-row[0] for row in longest]))
    assert outcome["other"]["entropy"] == pytest.approx(np.mean([row[2] for row in longest]))
    for place, step in enumerate(outcome["steps"]):
        mine = [min(rows) for key, rows in by_draw.items() if key[0] == step]
        assert outcome["by_step"]["other"]["num_tokens"][place] == pytest.approx(np.mean([-row[0] for row in mine]))
    assert set(outcome["steps"].tolist()) == {step for step, _ in by_draw}
    assert outcome["share_with_choice"] == np.mean([len(rows) > 1 for rows in by_draw.values()])


def test_another_sampler_draws_as_many_from_what_was_there(record: RunRecord) -> None:
    outcome = asked(record, "sampler=linear")
    drawn, expected = outcome["by_step"]["drawn"], outcome["by_step"]["expected"]
    by_step = np.bincount(record.draws.step, weights=record.draws.num_drawn)[outcome["steps"]]
    assert sum(drawn.values()).tolist() == by_step.tolist()
    assert sum(expected.values()) == pytest.approx(by_step)
    assert {k: values.sum() for k, values in drawn.items()} == outcome["drawn"]
    # Each repetition draws as many as the run did, so that the means add up to whole multiples of 1/REPETITIONS.
    total = sum(outcome["drawn"].values())
    assert sum(outcome["expected"].values()) == pytest.approx(total, abs=1 / REPETITIONS)
    # Linear weights prefer solved questions; the normal ones those that are half solved.
    assert np.mean(outcome["expected_pass_rate"]) > np.mean(outcome["pass_rate"])


def test_a_sampler_of_the_user_is_checked_as_in_training(
    record: RunRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_draws.py").write_text("def draw(buckets, num, rng):\n    return [buckets[0].question_ids[0]]\n")
    with pytest.raises(RunError, match="returned a list; it must return a QuestionDraw"):
        asked(record, "sampler=python:own_draws:draw")
