"""Random legal combinations of all settings of replay, through the real loop, held against what each of them promises.

Verdicts are a hash of the answer, so that groups are of all kinds. Every run dies inside an update and is resumed; it
must end as one that did not, and its ledger and mini-batches must agree on who was stored, drawn, trained and let go.
"""

import math
import random
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path

import pytest
from run_leaves import assert_same_run, metrics

from exgrpo_cli.algo.batching import MiniBatch
from exgrpo_cli.base import errors, reporter, types
from exgrpo_cli.config.settings import Config
from exgrpo_cli.engines.policy.policy import Policy, rows_with_gradient
from exgrpo_cli.grading import GradingItem, GradingPool
from exgrpo_cli.ledger.reader import LedgerReader
from exgrpo_cli.training import run as run_module
from exgrpo_cli.training.run import train

pytestmark = pytest.mark.slow
B, K, STEPS = 4, 4, 6
BASE = (
    "arithmetic.num_train=12", "data.heldout=none", f"rollout.questions_per_step={B}", f"rollout.group_size={K}",
    f"run.steps={STEPS}", "run.save_every=2", "rollout.max_response_tokens=12", "replay.readmit_every=2",
)  # fmt: skip
SPACE: dict[str, Sequence[object]] = {
    "replay.composition": ("replace", "join", "append", "append", "refill", "refill", "prefix", "revisit"),
    "replay.store": ("successes", "failures", "all", "all", "all", "none"), "replay.unit": ("row", "group"),
    "replay.cut": ("uniform", "share", "entropy-peak"),
    "replay.per_question": (1, 2, 5), "replay.min_stored": (1, 2, 4),
    "replay.metric": ("ent", "ppl", "random", "reward", "age"),
    "replay.priority": ("uniform", "latest", "advantage", "reward", "headroom", "signal"),
    "replay.draw": ("proportional", "top"), "replay.exponent": (1, 0.5, 2), "replay.age_decay": (0, 3),
    "replay.bias_correction": (0, 0.4), "replay.advantage_over": ("group", "own"),
    "replay.order": ("mixed", "first", "last"), "replay.lower_bound": (0, -1, 1), "replay.upper_bound": (-1, 2, 9),
    "replay.retirement": ("true", "false", "false"), "replay.retire_at": (0, 3),
    "replay.readmit_fraction": (0, 0.5), "replay.start_threshold": (0, 0, 0.2), "replay.warmup_steps": (0, 1),
    "replay.collect_before_start": ("true", "false"), "replay.capacity": (0, 2, 6),
    "replay.eviction": ("oldest", "longest", "random", "lowest-priority"), "replay.max_uses": (0, 1, 2),
    "replay.max_age": (0, 1, 3), "replay.max_drift": (0, 0.0005, 1), "replay.max_per_question": (0, 3),
    "replay.cooldown": (0, 1), "replay.ess_bound": (0, 0.99), "replay.ratio": (0.5, 1.0, 0.25),
    "objective.replay_surrogate": ("shaped", "raw", "clipped", "likelihood", "m2po"),
    "objective.replay_denominator": ("joint", "own"), "objective.importance": ("behaviour", "old"),
    "objective.aggregation": ("constant", "token-mean"), "objective.advantage": ("mean", "normalised"),
    "objective.dual_clip": (0, 3), "objective.entropy_coefficient": (0, 0.01), "rollout.max_rounds": (1, 3),
    "rollout.logprobs": ("trainer", "engine", "sampler"), "optim.minibatches": (1, 3),
}  # fmt: skip
POOL = (
    "replay.composition=join", "replay.store=all", "replay.lower_bound=-1", "replay.upper_bound=9",
    "replay.retirement=false", "replay.start_threshold=0",
)  # fmt: skip


class Crash(BaseException):
    """Stands for a run's sudden end."""


def grade(pool: GradingPool, item: GradingItem) -> Callable[[], types.Grade]:
    """Right by chance, of some golds more often than of others."""

    def chance(text: str) -> float:
        return int(sha256(text.encode()).hexdigest()[:8], 16) / 2**32

    if chance("fails" + item.response) < 0.02:
        return lambda: types.Grade.of(types.Verdict.TIMEOUT)
    is_right = chance(item.gold + item.response) < 0.5 + 1.2 * (chance(item.gold) - 0.5)
    return lambda: types.Grade.of(types.Verdict.CORRECT if is_right else types.Verdict.WRONG)


@pytest.fixture(scope="module")
def pool(small_config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that stored everything."""
    run = tmp_path_factory.mktemp("pool") / "run"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(GradingPool, "judge", grade)
        train(small_config(*BASE, *POOL), run, reporter=reporter.SilentReporter())
    return run


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, MiniBatch]]:
    """The mini-batches that the policy was given, each with its step; those of a step that is taken anew are gone."""
    seen: list[tuple[int, MiniBatch]] = []
    steps = [0]
    update, run_step = Policy.update, run_module.run_step

    def noted(policy: Policy, batch: MiniBatch) -> object:
        seen.append((steps[0], batch))
        return update(policy, batch)

    def begun(parts: object, state: object, step: int, *rest: object) -> object:
        steps[0] = step
        seen[:] = [each for each in seen if each[0] < step]
        return run_step(parts, state, step, *rest)

    monkeypatch.setattr(GradingPool, "judge", grade)
    monkeypatch.setattr(Policy, "update", noted)
    monkeypatch.setattr(run_module, "run_step", begun)
    return seen


def drawn_config(rng: random.Random, small_config, pool: Path) -> Config:
    """The first combination that is not refused."""
    while True:
        names = ["replay.composition", *rng.sample(list(SPACE)[1:], rng.choice([3, 5, 8, 12]))]
        chosen = {"replay.start_threshold": 0, **{name: rng.choice(SPACE[name]) for name in names}}
        if chosen.get("replay.store") == "none" or rng.random() < 0.3:
            chosen["replay.warm_start"] = pool
        try:
            return small_config(*BASE, *(f"{name}={value}" for name, value in chosen.items()))
        except errors.InputError:
            continue


@pytest.mark.parametrize("seed", range(12))
def test_any_method_keeps_its_promises_and_resumes(seed, small_config, pool, tmp_path, batches, monkeypatch) -> None:
    rng = random.Random(seed)
    config = drawn_config(rng, small_config, pool)
    train(config, tmp_path / "whole", reporter=reporter.SilentReporter())
    num_updates = len(batches)
    if num_updates:
        left, update = rng.randrange(num_updates), Policy.update

        def dies(policy: Policy, batch: MiniBatch) -> object:
            if len(batches) == left:
                raise Crash
            return update(policy, batch)

        with monkeypatch.context() as patched:
            patched.setattr(Policy, "update", dies)
            batches.clear()
            with pytest.raises(Crash):
                train(config, tmp_path / "cut", reporter=reporter.SilentReporter())
        train(config, tmp_path / "cut", resume=True, reporter=reporter.SilentReporter())
        assert_same_run(tmp_path / "cut", tmp_path / "whole")
    require_promises(config, tmp_path / "whole", batches)


def require_promises(config: Config, run: Path, batches: list[tuple[int, MiniBatch]]) -> None:
    """What the ledger says was replayed is what the journal counts and the mini-batches train, step by step."""
    replay, reader = config.replay, LedgerReader(run / "replay")
    rows = reader.trajectories().to_pandas().set_index("trajectory_id", drop=False)
    names = ("replays", "events", "visits", "prefixes")
    replays, events, visits, prefixes = (reader.table(name).to_pandas() for name in names)
    body = dict(zip(rows.trajectory_id, reader.bodies(rows.trajectory_id.tolist()), strict=True))
    unit = rows.group_id if replay.draws_groups else rows.trajectory_id
    for line in metrics(run):
        step = line["step"]
        now, scanned = events[events.step == step], replays[replays.step == step]
        selected = now[now.event == "selected"].trajectory_id.astype(int).tolist()
        taken = scanned[scanned.accepted].unit_id
        replayed = [*selected, *(i for number in taken for i in rows.trajectory_id[unit == number])]
        assert (rows.step_born[replayed] < step).all(), "only what was there before the step"
        assert line["phase"] == "mixed" or not (len(scanned) or selected)
        assert line["replay/used"] == len(replayed)
        assert all(math.isfinite(value) for value in line.values() if isinstance(value, float))
        own = [batch for at, batch in batches if at == step]
        assert line["tokens/trained"] == sum(
            row.num_tokens for batch in own for row in rows_with_gradient(batch, config.objective)
        )
        trained = [row for batch in own for row in batch.rows]
        again = sorted(row.sequence.response_ids.tolist() for row in trained if row.replayed)
        if replay.composition == "prefix":
            begun = prefixes[prefixes.step == step]
            assert begun.trajectory_id.tolist() == selected and not again
        if replay.composition == "revisit":
            asked = visits[visits.step == step].question_id.tolist()
            assert {rows.question_id[i] for i in selected} <= {*asked} and len({*asked}) == len(asked)
        if replay.composition in ("prefix", "revisit"):
            replayed = []
        assert again == sorted(body[i][0].tolist() for i in replayed)
        mixed = visits[(visits.step == step) & (visits.num_fresh_successes % K > 0)]
        if replay.composition == "refill" and line["phase"] == "mixed":
            assert len(trained) - len(again) == K * len(mixed)
