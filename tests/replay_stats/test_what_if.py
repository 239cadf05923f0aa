"""What another policy would have drawn: settings read, states rebuilt, choices checked against a slow reference."""

import sys
from pathlib import Path

import numpy as np
import pytest

from exgrpo_cli.base.errors import InputError, RunError
from exgrpo_cli.config.sections.replay import ReplaySettings
from exgrpo_cli.replay_stats.record import RunRecord, read_run
from exgrpo_cli.replay_stats.what_if.metric import other_metric
from exgrpo_cli.replay_stats.what_if.policy import REPETITIONS, WhatIf, parse_what_if
from exgrpo_cli.replay_stats.what_if.sampler import other_sampler, states_at_draws

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from synthetic_run import SyntheticRun, write_run

OWN = ReplaySettings(sampler="normal", mu=0.5, sigma=0.125, metric="ent", direction="min")
LIMITS = ReplaySettings(max_per_question=4, max_age=6, cooldown=3, readmit_fraction=0.5, readmit_every=4)


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    run = tmp_path_factory.mktemp("what-if") / "run"
    write_run(run, SyntheticRun(steps=20, num_questions=250, questions_per_step=16, mixed_from=2))
    return read_run(run)


@pytest.mark.parametrize(
    ("text", "sampler", "metric", "direction", "mu"),
    [
        ("sampler=linear", "linear", "", "min", 0.5),
        ("metric=ppl", "", "ppl", "min", 0.5),
        ("metric=ent:max", "", "ent", "max", 0.5),
        ("sampler=uniform, metric=length, direction=max", "uniform", "length", "max", 0.5),
        ("mu=0.25", "normal", "", "min", 0.25),
        ("direction=max", "", "ent", "max", 0.5),
        ("metric=python:mine:score", "", "python:mine:score", "min", 0.5),
    ],
)
def test_what_is_not_named_is_as_in_the_run(text: str, sampler: str, metric: str, direction: str, mu: float) -> None:
    expected = WhatIf(sampler=sampler, metric=metric, direction=direction, mu=mu, sigma=0.125)
    assert parse_what_if(text, OWN) == expected


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("linear", "'linear' is not a new key=value; write sampler=linear,metric=ppl."),
        ("sampler=linear,sampler=sqrt", "'sampler=sqrt' is not a new key=value"),
        ("samples=linear", "unknown key 'samples'. Did you mean 'sampler'?"),
        ("mu=half", "mu = 'half' is not a number."),
        ("sigma=0", "sigma = 0 is out of range"),
        ("metric=ent,direction=low", "direction = 'low' is not known."),
        ("metric=ent:max,direction=min", "metric says max and direction min; give one."),
        ("sampler=linear,mu=0.3", "mu and sigma are those of the sampler normal, not of linear."),
    ],
)
def test_what_cannot_be_read_is_refused(text: str, told: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_what_if(text, OWN)
    assert told in str(caught.value)


def test_an_unknown_sampler_or_metric_names_the_nearest(record: RunRecord) -> None:
    with pytest.raises(InputError, match="Did you mean 'linear'"):
        other_sampler(record, parse_what_if("sampler=linaer", OWN), np.random.default_rng(0))
    with pytest.raises(InputError, match="Did you mean 'ppl'"):
        other_metric(record, parse_what_if("metric=pll", OWN), np.random.default_rng(0))


@pytest.mark.parametrize(
    "rules", [ReplaySettings(), LIMITS, ReplaySettings(count_fresh_only=True)], ids=["paper", "limits", "fresh"]
)
def test_the_states_at_each_draw_are_those_the_run_offered_its_sampler(tmp_path: Path, rules: ReplaySettings) -> None:
    write_run(
        tmp_path / "run", SyntheticRun(steps=16, num_questions=80, questions_per_step=10, mixed_from=2, rules=rules)
    )
    run = read_run(tmp_path / "run")
    steps = np.unique(run.draws.step)
    assert len(steps) >= 12
    for step, states in zip(steps, states_at_draws(run, steps), strict=True):
        own = run.draws.step == step
        offered = zip(run.draws.bucket[own], run.draws.num_members[own], run.draws.num_questions[own], strict=True)
        rebuilt = [(key.success_count, key.num_members, len(bucket)) for key, bucket in states.drawable()]
        assert rebuilt == [tuple(int(value) for value in row) for row in offered]


def test_the_runs_own_metric_chooses_the_same_trajectories(record: RunRecord) -> None:
    own = other_metric(record, parse_what_if("metric=ent", OWN), np.random.default_rng(0))
    assert own.share_same == 1.0
    assert own.chosen == own.other
    assert own.draws == len(np.unique(record.scores.step * 1000 + record.trajectories.question[record.scores.row]))


def test_another_metric_chooses_as_a_slow_reference_does(record: RunRecord) -> None:
    outcome = other_metric(record, parse_what_if("metric=length:max", OWN), np.random.default_rng(0))
    by_draw: dict[tuple[int, int], list[tuple[int, int, float]]] = {}
    for i in range(len(record.scores.step)):
        row = int(record.scores.row[i])
        key = (int(record.scores.step[i]), int(record.trajectories.question[row]))
        tokens, trajectory_id = int(record.trajectories.num_tokens[row]), int(record.trajectories.trajectory_id[row])
        by_draw.setdefault(key, []).append((-tokens, trajectory_id, float(record.scores.entropy[i])))
    longest = [min(rows) for rows in by_draw.values()]  # of equal lengths the lowest id
    assert outcome.other["num_tokens"] == pytest.approx(np.mean([-row[0] for row in longest]))
    assert outcome.other["entropy"] == pytest.approx(np.mean([row[2] for row in longest]))
    assert outcome.other["num_tokens"] > outcome.chosen["num_tokens"]
    for place, step in enumerate(outcome.steps):
        mine = [min(rows) for key, rows in by_draw.items() if key[0] == step]
        assert outcome.other_by_step["num_tokens"][place] == pytest.approx(np.mean([-row[0] for row in mine]))
    assert set(outcome.steps.tolist()) == {step for step, _ in by_draw}
    assert outcome.share_with_choice == np.mean([len(rows) > 1 for rows in by_draw.values()])


def test_another_sampler_draws_as_many_from_what_was_there(record: RunRecord) -> None:
    outcome = other_sampler(record, parse_what_if("sampler=linear", OWN), np.random.default_rng(0))
    assert sum(outcome.drawn.values()) == record.draws.num_drawn.sum()
    by_step = np.bincount(record.draws.step, weights=record.draws.num_drawn)[outcome.steps]
    assert outcome.drawn_by_step.sum(axis=1).tolist() == by_step.tolist()
    assert outcome.expected_by_step.sum(axis=1) == pytest.approx(by_step)
    assert outcome.drawn_by_step.sum(axis=0).tolist() == [outcome.drawn.get(k, 0) for k in range(9)]
    # Each repetition draws as many as the run did, so that the means add up to whole multiples of 1/REPETITIONS.
    assert sum(outcome.expected.values()) == pytest.approx(sum(outcome.drawn.values()), abs=1 / REPETITIONS)
    # Linear weights prefer solved questions; the normal ones those that are half solved.
    assert np.mean(outcome.expected_pass_rate) > np.mean(outcome.pass_rate)


def test_the_runs_own_sampler_draws_alike_on_average(record: RunRecord) -> None:
    outcome = other_sampler(record, parse_what_if("sampler=normal", OWN), np.random.default_rng(0))
    # About 150 draws with a standard deviation of about .15: .04 is more than two standard errors of the difference.
    assert np.mean(outcome.expected_pass_rate) == pytest.approx(np.mean(outcome.pass_rate), abs=0.04)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("[buckets[0].question_ids[0]]", "returned a list; it must return a QuestionDraw"),
        (
            "QuestionDraw(question_ids=('q',), probabilities=np.ones(len(buckets)) / len(buckets))",
            "drew question q, which was not offered",
        ),
        ("QuestionDraw(question_ids=tuple('abcdefghi'), probabilities=np.ones(1))", "drew 9 questions, 9 distinct, of"),
    ],
)
def test_a_sampler_of_the_user_is_checked_as_in_training(
    record: RunRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, told: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    name = f"mine{abs(hash(body))}"
    (tmp_path / f"{name}.py").write_text(
        "import numpy as np\nfrom exgrpo_cli.replay.drawing.sampling import QuestionDraw\n"
        f"def draw(buckets, num, rng):\n    return {body}\n"
    )
    what_if = parse_what_if(f"sampler=python:{name}:draw", OWN)
    with pytest.raises(RunError, match=told):
        other_sampler(record, what_if, np.random.default_rng(0))
