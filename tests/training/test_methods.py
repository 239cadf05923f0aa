"""Replay methods through the real loop, read back from the ledger: how many rows were taken, whose, and what shows it.

Who is scanned and weighted how, by numbers worked by hand: `test_worked_numbers`.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from run_leaves import assert_same_run, killed, metrics, train_and_die

from exgrpo_cli.base import errors, reporter
from exgrpo_cli.base.types import Grade, Verdict
from exgrpo_cli.commands import run as exgrpo
from exgrpo_cli.config.settings import Config
from exgrpo_cli.ledger.reader import LedgerReader
from exgrpo_cli.presets import load_preset, preset_names
from exgrpo_cli.show import asked, statistics
from exgrpo_cli.show.record import read_run
from exgrpo_cli.training import run as training
from exgrpo_cli.training.run import train
from exgrpo_cli.training.state import Parts
from exgrpo_cli.training.step import rollouts
from exgrpo_cli.training.step.groups import UnderWay

B, K, STEPS = 4, 4, 5
SMALL = (
    "arithmetic.levels=[2]", "arithmetic.num_train=12", "data.heldout=none", f"rollout.questions_per_step={B}",
    f"rollout.group_size={K}", f"run.steps={STEPS}", "run.save_every=2", "replay.start_threshold=0",
)  # fmt: skip
EARLY = {
    "adv-per": ("replay.warmup_steps=1",), "repo": ("replay.min_stored=4", "replay.per_question=4"),
    "su01": ("replay.upper_bound=2", "replay.retire_at=3"), "headroom-drift": ("replay.max_drift=0.5",),
    "prefix": ("arithmetic.num_train=4",), "failure-prefix": ("arithmetic.num_train=4",),
    "prompt-replay": ("replay.cooldown=1",),
    "review": ("replay.lower_bound=3", "replay.upper_bound=4", "replay.cooldown=1", "replay.ratio=0.25"),
}  # fmt: skip
"""What lets a method replay within a few steps of a few questions."""
METHODS = [name for name in preset_names("methods") if load_preset("methods", name)["about"].get("group") == "replay"]
ENGINES = pytest.mark.engines
"""Other processes run for long: beside the quick tests, these run on every change too."""
ON_POLICY = ("dynamic-sampling", "dapo", "dbb", "ngrpo", "lens", "unsolved-only", "boundary-gate")
"""Those that replay nothing, and keep something else from step to step."""
EVERY_OTHER = {"prefix": 0, "failure-prefix": K, "prompt-replay": 0, "review": K}
"""Those that wait for questions half solved and by none, or by all: right in every second step."""
OFTEN = ("headroom-drift", "fresh-per", "trl-refill", "repo")


@contextmanager
def given_verdicts(method: str) -> Iterator[None]:
    """Every second step as `EVERY_OTHER` says of the method and half right between, instead of by a grader."""
    really = rollouts.grade

    def grade(parts: Parts, groups: Sequence[UnderWay], begun: rollouts.Begun) -> None:
        really(parts, groups, begun)
        right = K // 2 if parts.main_store.writer.last_step % 2 == 0 else EVERY_OTHER[method]
        for own in groups:
            for member, (text, _) in own.grades.items():
                own.grades[member] = text, Grade.of(Verdict.CORRECT if member < right else Verdict.WRONG)

    with pytest.MonkeyPatch.context() as patched:
        if method in EVERY_OTHER:
            patched.setattr(rollouts, "grade", grade)
        yield


@pytest.fixture(scope="module")
def config_of(small_config) -> Callable[..., Config]:
    return lambda method, *settings: small_config(*SMALL, *EARLY.get(method, ()), *settings, method=method)


@pytest.fixture(scope="module")
def run_of(config_of: Callable[..., Config], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A finished run of a method; each is made once."""
    runs = tmp_path_factory.mktemp("methods")

    def make(method: str) -> Path:
        if not (runs / method).exists():
            pool = (f"replay.warm_start={make('uniform-fifo')}",) if method == "rlep" else ()
            with given_verdicts(method):
                train(config_of(method, *pool), runs / method, reporter=reporter.SilentReporter())
        return runs / method

    return make


class Stored:
    """The rows of a run's ledger, and the units they make."""

    def __init__(self, run: Path, *, groups: bool) -> None:
        self.reader = LedgerReader(run / "replay")
        self.rows = self.reader.trajectories().to_pandas()
        self.replays = self.reader.replays().to_pandas()
        self.visits = self.reader.visits().to_pandas()
        self.unit = self.rows.group_id if groups else self.rows.trajectory_id

    def units_before(self, step: int) -> list[int]:
        return sorted(self.unit[self.rows.step_born < step].unique().tolist())

    def mixed_fresh(self, step: int) -> int:
        """Fresh groups of a step that are neither all right nor all wrong."""
        visits = self.visits[self.visits.step == step]
        return int(((visits.num_fresh_successes > 0) & (visits.num_fresh_successes < K)).sum())


@pytest.mark.parametrize(
    ("method", "ratio"),
    [
        ("adv-per", 0.5),
        pytest.param("fresh-per", 1.0, marks=ENGINES),
        pytest.param("uniform-fifo", 1.0, marks=pytest.mark.slow),
        pytest.param("sft-successes", 0.25, marks=pytest.mark.slow),
    ],
)
def test_as_many_rows_are_appended_as_the_mixed_groups_say(run_of, method, ratio) -> None:
    """round(ratio * K * mixed fresh groups), or all there are."""
    run = run_of(method)
    stored = Stored(run, groups=False)
    for line in metrics(run):
        wanted = round(ratio * K * stored.mixed_fresh(line["step"]))
        there = len(stored.units_before(line["step"])) if line["phase"] == "mixed" else 0
        assert line["replay/used"] == min(wanted, there)


def test_refilled_groups_take_the_places_of_groups_that_are_not_mixed(run_of: Callable[[str], Path]) -> None:
    """What trains are K tokens-rows per mixed fresh group and per stored one drawn, and nothing else."""
    run = run_of("trl-refill")
    stored = Stored(run, groups=True)
    for line in metrics(run):
        step = line["step"]
        missing = int((stored.visits.step == step).sum()) - stored.mixed_fresh(step)
        assert line["replay/refilled"] == min(missing, len(stored.units_before(step)))
        taken = stored.replays[stored.replays.step == step].unit_id
        fresh = stored.rows[(stored.rows.step_born == step)]
        replayed = stored.rows[stored.unit.isin(taken)]
        # All mixed fresh groups are stored, so their tokens are known too.
        assert len(fresh) == K * stored.mixed_fresh(step)
        assert line["tokens/trained"] == fresh.num_tokens.sum() + replayed.num_tokens.sum()


def test_replay_stats_count_units(run_of: Callable[[str], Path]) -> None:
    run = run_of("headroom-drift")
    stored = Stored(run, groups=True)
    [told] = statistics.report_runs([run]).values()
    taken = stored.replays[stored.replays.accepted]
    assert {"replay-units", "replay-entropy-by-bucket"} <= {name for name, _ in statistics.replay_figures(told)}
    units = statistics.plain(told)["over_time"]["units"]
    by_step = stored.replays.groupby("step")
    assert [units["scanned"][step] for step in by_step.groups] == by_step.size().tolist()
    assert [units["taken"][step] for step in by_step.groups] == by_step.accepted.sum().tolist()
    assert [units["drift"][step] for step in by_step.groups] == pytest.approx(by_step.drift.mean().tolist())
    right = stored.rows[stored.rows.reward > 0]
    assert sum(group["trajectories"] for group in told["entropy"]["by_bucket"]) == len(right) < len(stored.rows)
    assert told["used"] == K * len(taken) and told["share"]["tokens"] > 0
    with pytest.raises(errors.InputError, match="unknown key 'sampler': composition = 'append' can be asked for none"):
        statistics.report_runs([run], other="sampler=linear")


def test_a_step_shows_the_units_that_it_scanned(run_of, capsys) -> None:
    """As the ledger has them, in the order drawn, each with its rows; a question's history has its uses."""
    run = run_of("headroom-drift")
    stored = Stored(run, groups=True)
    scanned = stored.replays[stored.replays.step == STEPS]
    assert exgrpo(["replay-stats", str(run), "--step", str(STEPS), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["step"]
    assert told["nothing"] == "" and len(told["units"]) == len(scanned)
    for unit, row in zip(told["units"], scanned.itertuples(), strict=True):
        for name in ("unit_id", "accepted", "priority", "weight", "drift", "headroom"):
            assert unit[name] == getattr(row, name), name
        assert unit["probability"] is None
        rows = stored.rows[stored.rows.group_id == row.unit_id]
        assert unit["age"] == STEPS - rows.step_born.iloc[0] and unit["question_id"] == rows.question_id.iloc[0]
        for name in ("trajectory_id", "advantage", "num_tokens"):
            assert [one[name] for one in unit["rows"]] == rows[name].tolist()
        assert all(one["text"] for one in unit["rows"])
    taken = stored.replays[stored.replays.accepted].merge(stored.rows[["group_id", "question_id"]], on="group_id")
    question, times = next(iter(taken.question_id.value_counts().items()))
    [history] = statistics.report_runs([run], question_id=question).values()
    assert sum(row["event"] == "selected" for row in history["question"]["events"]) == times
    [first] = statistics.report_runs([run_of("adv-per")], step=1).values()
    step = first["step"]
    assert step["nothing"] == "on-policy phase: replay begins with step 2" and not step["units"]


def test_joined_rows_are_the_best_of_their_question(run_of: Callable[[str], Path]) -> None:
    """Four of those that a question holds, successes first, of equals the oldest; replay starts at its second visit."""
    stored = Stored(run_of("repo"), groups=False)
    scores = stored.reader.scores().to_pandas().merge(stored.rows[["trajectory_id", "reward"]], on="trajectory_id")
    assert len(scores)
    for (step, question), group in scores.groupby(["step", "question_id"]):
        held = stored.rows[(stored.rows.question_id == question) & (stored.rows.step_born < step)]
        assert sorted(group.trajectory_id) == sorted(held.trajectory_id)
        best = group.sort_values(["reward", "trajectory_id"], ascending=[False, True]).head(4)
        assert sorted(best.trajectory_id) == sorted(group[group.chosen].trajectory_id)
    record = read_run(run_of("repo"))
    drawn, empty = asked.step_replay(record, int(scores.step.iloc[0])), asked.step_replay(record, 1)
    shown = {one["trajectory_id"]: one["chosen"] for question in drawn["questions"] for one in question["candidates"]}
    assert shown == dict(scores[scores.step == drawn["step"]][["trajectory_id", "chosen"]].values)
    assert empty["nothing"] == "no question of the step held replay.min_stored rows that could be replayed"


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(
    "method",
    [pytest.param(name, marks=ENGINES if name in OFTEN else pytest.mark.slow) for name in (*METHODS, *ON_POLICY)],
)
def test_every_method_replays_and_resumes_after_a_kill(method, run_of, config_of, tmp_path) -> None:
    """Replays twice; killed after its third step, it ends as the uninterrupted run, bit for bit."""
    whole, cut = run_of(method), tmp_path / "cut"
    if method not in ON_POLICY:
        assert sum(line["replay/used"] > 0 for line in metrics(whole)) >= 2
    config = config_of(method, *([f"replay.warm_start={run_of('uniform-fifo')}"] if method == "rlep" else []))
    with given_verdicts(method):
        train_and_die(killed(training, "run_step", when=lambda parts, state, step, clock: step == 4), cut, config)
        assert len(metrics(cut)) == 3
        train(config, cut, resume=True, reporter=reporter.SilentReporter())
    assert_same_run(cut, whole)
