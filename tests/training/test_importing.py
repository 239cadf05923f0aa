"""Rollouts logged elsewhere: a pool is made of them, replayed by real runs, and what it lacks is never filled in."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from question_sources import write
from run_leaves import metrics

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.reporter import SilentReporter
from exgrpo_cli.commands import run
from exgrpo_cli.config.settings import Config, to_toml
from exgrpo_cli.ledger.reader import LedgerReader
from exgrpo_cli.training.importing import PoolReport, prepare_pool
from exgrpo_cli.training.questions import load_questions
from exgrpo_cli.training.run import train

K = 4
SMALL = (
    "arithmetic.num_train=6", "data.heldout=none", "rollout.questions_per_step=4", f"rollout.group_size={K}",
    "run.steps=2", "replay.start_threshold=0",
)  # fmt: skip


@pytest.fixture(scope="module")
def config_of(small_config) -> Callable[..., Config]:
    return lambda method, *settings: small_config(*SMALL, *settings, method=method)


@pytest.fixture(scope="module")
def rows(config_of: Callable[..., Config]) -> list[dict]:
    """K rollouts of each of six questions, k = 1, 2, 3, 1, 2, 3 of them right, as somebody else's log has them."""
    found = []
    for position, question in enumerate(load_questions(config_of("exgrpo"), SilentReporter()).train):
        for member in range(K):
            right = member <= position % 3
            answer = question.answer if right else "no idea"
            text = f"try {member}</think>\\boxed{{{answer}}}"
            found.append({"question": question.prompt[-1].content, "text": text, "reward": float(right)})
    return found


@pytest.fixture
def pool_of(config_of: Callable[..., Config], tmp_path: Path) -> Callable[..., PoolReport]:
    """The pool of these rows, in a file of this format."""

    def make(rows: list[dict], name: str = "rollouts.jsonl") -> PoolReport:
        return prepare_pool(write(tmp_path / name, *rows), tmp_path / "pool", config_of("exgrpo"), SilentReporter())

    return make


@pytest.fixture
def replayed(config_of: Callable[..., Config], tmp_path: Path) -> Callable[..., list[dict]]:
    """The journal of a run that replays from the pool."""

    def run(method: str, *settings: str) -> list[dict]:
        config = config_of(method, f"replay.warm_start={tmp_path / 'pool'}", *settings)
        train(config, tmp_path / method, reporter=SilentReporter())
        return metrics(tmp_path / method)

    return run


def test_text_without_log_probs_is_the_pool_of_rlep(pool_of, replayed, rows, tmp_path) -> None:
    report = pool_of(rows)
    assert (report.rows, report.right, report.questions, report.visits) == (24, 12, 6, 6)
    assert (report.without_logprobs, report.without_advantage) == (24, 0)
    ledger = LedgerReader(tmp_path / "pool" / "replay")
    stored = ledger.trajectories().to_pandas()
    assert set(stored.logprob_source) == {"none"} and stored.nll.isna().all() and stored.entropy.isna().all()
    # k = 1 of 4: A = 1 - 1/4, then -1/4 three times.
    assert stored.advantage[:K].tolist() == [0.75, -0.25, -0.25, -0.25]
    assert stored.k.tolist()[::K] == [1, 2, 3, 1, 2, 3]
    [(token_ids, logprobs)] = ledger.bodies([0])
    assert len(token_ids) == len(logprobs) and np.isnan(logprobs).all()
    journal = replayed("rlep")
    # Two rows of every question that has two right ones, one of the others: successes alone.
    taken = LedgerReader(tmp_path / "rlep" / "replay")
    assert (taken.trajectories().to_pandas().reward == 1).all() and len(taken.trajectories()) == 12
    assert all(line["replay/used"] > 0 for line in journal)
    # Every ratio is to pi_old: 1 before the first update.
    assert np.isfinite([line[name] for line in journal for name in ("optim/grad_norm", "policy/ratio_replay")]).all()


@pytest.mark.engines
def test_traces_of_a_stronger_model_are_imitated(pool_of, replayed, rows) -> None:
    """No log-probs, no whole groups, hence no advantages: -log pi reads neither, and ratios are not reported."""
    report = pool_of([row for row in rows if row["reward"]])
    assert (report.rows, report.without_advantage) == (12, 12)
    for line in replayed("sft-successes", "replay.ratio=1"):
        assert line["replay/used"] > 0 and np.isfinite(line["optim/grad_norm"]) and line["optim/grad_norm"] > 0
        assert "policy/ratio_replay" not in line


@pytest.mark.parametrize(
    ("missing", "method", "settings", "said"),
    [
        ((), "exgrpo", (), r"12 of its 12 .* without log-probs, which objective.importance = 'behaviour' reads"),
        ((), "headroom-drift", (), r"24 of its 24 .* without log-probs, which replay.max_drift = 0.001 reads"),
        ((), "sft-successes", ("replay.priority=headroom",), r"without log-probs, which replay.priority = 'headroom'"),
        ((), "exgrpo", ("replay.ess_bound=0.1", "objective.importance=old"), r"which replay.ess_bound = 0.1 reads"),
        (
            (K - 1,), "adv-per", ("objective.importance=old",),
            r"3 of its 23 trajectories came without an advantage, which replay.priority = 'advantage' r",
        ),
    ],
)  # fmt: skip
def test_what_reads_missing_log_probs_or_advantages_is_refused(
    pool_of, replayed, rows, tmp_path, missing, method, settings, said
) -> None:
    pool_of([row for place, row in enumerate(rows) if place not in missing])
    with pytest.raises(InputError, match=said):
        replayed(method, "run.steps=1", *settings)
    assert not (tmp_path / method).exists()


def test_token_ids_log_probs_and_steps_are_kept_as_they_are(pool_of, rows, tmp_path) -> None:
    """Parquet with all columns; groups of a question by their name, k out of as many as there are."""
    own = []
    for position, row in enumerate(rows[: 2 * K]):
        # The first question's rows are two visits of two, the second's one of four.
        visit = {"group": f"visit {position // 2}", "step": 1} if position < K else {"group": "one", "step": 7}
        visit |= {"question": row["question"], "reward": row["reward"], "advantage": 0.125 * position}
        own.append({**visit, "token_ids": [10 + position, 11, 12], "logprobs": [-0.5, -1.0, -1.5]})
    report = pool_of(own, "rollouts.parquet")
    assert (report.visits, report.without_logprobs) == (3, 0)
    ledger = LedgerReader(tmp_path / "pool" / "replay")
    stored, visits = ledger.trajectories().to_pandas(), ledger.visits().to_pandas()
    assert visits[["step", "k", "num_members"]].values.tolist() == [[1, 1, 2], [1, 0, 2], [7, 2, 4]]
    assert stored.advantage.tolist() == [0.125 * position for position in range(2 * K)]
    assert set(stored.logprob_source) == {"file"} and stored.nll.tolist() == [1.0] * 2 * K
    assert stored.group_id.tolist() == [0, 0, 2, 2, 4, 4, 4, 4]
    token_ids, logprobs = ledger.bodies([5])[0]
    assert (token_ids.tolist(), logprobs.tolist()) == ([15, 11, 12], [-0.5, -1.0, -1.5])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"reward": None}, "row 2: Object missing required field `reward`. A row has .* reward"),
        ({"reward": "yes"}, r"row 2: Expected `bool . float`, got `str` - at `\$.reward`"),
        ({"reward": float("nan")}, "row 2: Object missing required field `reward`"),
        ({"reward": float("inf")}, "row 2: reward = inf .* finite"),
        ({"text": None}, "row 2: a response without a token: .* token_ids or text"),
        ({"text": ""}, "row 2: a response without a token"),
        ({"question": None}, "row 2: 0 questions have question = '': give a question_id"),
        ({"token_ids": [5, 99999]}, "row 2: token id 99999 is not one of the .* of this tokenizer"),
        ({"token_ids": [5, 1.5]}, r"row 2: Expected `int`, got `float` - at `\$.token_ids\[1\]`"),
        ({"token_ids": "5 6"}, r"row 2: Expected `array . null`, got `str` - at `\$.token_ids`"),
        ({"logprobs": [-1.0]}, r"row 2: 1 logprobs for \d+ tokens: give the token_ids"),
        ({"token_ids": [5], "logprobs": [0.5]}, "row 2: 0.5 among the logprobs is no log-probability"),
        ({"step": 1.5}, "row 2: step = 1.5 comes after step 1: sort rows by whole steps"),
        ({"step": 0}, r"row 2: Expected `float` >= 1.0 - at `\$.step`"),
    ],
)
def test_a_row_that_cannot_be_meant_is_named(pool_of, rows, tmp_path, change, said) -> None:
    with pytest.raises(InputError, match=said):
        pool_of([rows[0], rows[1] | change])
    assert [path.name for path in tmp_path.iterdir()] == ["rollouts.jsonl"]


def test_rows_without_a_group_are_one_visit_whoever_wrote_the_file(pool_of, rows) -> None:
    """pandas writes a missing number as NaN: two rows without a group are a visit of their own, as two with none."""
    groups = [1.0, 1.0, float("nan"), None]
    report = pool_of([row | {"group": group} for row, group in zip(rows, groups, strict=False)])
    assert (report.rows, report.visits) == (4, 2)


def test_rows_of_other_questions_are_counted_and_a_pool_of_none_is_refused(pool_of, rows) -> None:
    foreign = [{**rows[0], "question": "Who is it?"}]
    with pytest.raises(InputError, match=r"none of its 1 rows is of a question in arithmetic, 'Who is it\?' first"):
        pool_of(foreign)
    with pytest.raises(InputError, match=r"none of its 0 rows is .*: write question, text and reward"):
        pool_of([])
    report = pool_of(rows + foreign)
    assert (report.rows, report.unknown_questions) == (24, 1)


@pytest.mark.engines
def test_the_command_makes_a_pool_that_replay_stats_shows(config_of, rows, tmp_path, capsys) -> None:
    settings, pool = tmp_path / "settings.toml", tmp_path / "pool"
    settings.write_text(to_toml(config_of("exgrpo")))
    file = write(tmp_path / "rollouts.jsonl", *rows)
    command = ["prepare", "--experience", str(file), "--config", str(settings), "--output", str(pool)]
    assert run([*command, "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 24
    assert run(["replay-stats", str(pool), "--json", "--no-plots"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["trajectories"], shown["buckets"]) == (24, {"1": 2, "2": 2, "3": 2})
    for arguments, said in (
        (command, "pool exists"),
        (["prepare", "--experience", str(tmp_path / "none.jsonl")], "none.jsonl does not exist"),
        (["train", "--resume", "--output", str(pool)], "pool"),
    ):
        assert run(arguments) == 2
        assert said in capsys.readouterr().err
