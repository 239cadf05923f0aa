"""Replay statistics: hand-made ledgers with counted answers, simulated runs, and draws against their promise."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import store_calls
from scipy import stats
from synthetic_run import SyntheticRun, write_config, write_questions, write_run

from exgrpo_cli.base.errors import DamageWarning, InputError
from exgrpo_cli.config.sections.objective import ObjectiveSettings
from exgrpo_cli.ledger.schemas import LedgerIdentity
from exgrpo_cli.replay import by_question, replace, store, warm_start
from exgrpo_cli.runs.folder import read_metrics
from exgrpo_cli.show import asked, draw_test
from exgrpo_cli.show.record import Columns, read_run
from exgrpo_cli.show.statistics import plain, report_json, report_runs, report_tables, summarise
from exgrpo_cli.show.tables import overview

IDS = ["aaa1", "aab2", "bbb3", "ccc4"]
IDENTITY = LedgerIdentity(
    tokenizer_hash="t", template="chat", group_size=4, questions_hash="q", logprob_source="trainer"
)


def numbers_of(run: Path) -> dict[str, Any]:
    return summarise(read_run(run))


def fresh_row(token: int, length: int, entropy: float) -> store.FreshRow:
    tokens, logprobs = np.full(length, token, dtype=np.int32), np.full(length, -entropy, dtype=np.float32)
    return store.FreshRow(token_ids=tokens, behaviour_logprobs=logprobs, entropy=entropy, nll=entropy)


def visit(
    buffer: store.Store, question: str, step: int, k: int, entropies: tuple[float, ...] = (), replayed: int = 0
) -> None:
    rows = [fresh_row(100 * step + i, 10 + i, entropy) for i, entropy in enumerate(entropies)]
    counts = {"success_count": k, "num_fresh_successes": k - replayed, "num_replayed": replayed}
    known = {"weight_version": step - 1, "verifier_failed": False, "rows": rows, **counts}
    store_calls.record(buffer, store.Visit(question_id=question, step=step, **known))


def replay(buffer: store.Store, question: str, step: int, position: int) -> None:
    store_calls.replay(buffer, step, store_calls.candidates_of(buffer, question), position)


@pytest.fixture
def small_run(tmp_path: Path) -> Path:
    """K = 4, B = 2, four questions, three steps:

    step 1: aaa1 solved by 2 of 4 (entropies .2, .6), aab2 by none;
    step 2: aaa1 replays its trajectory 0 and is then solved by 3 (one new: .4); bbb3 by 1 (.8);
    step 3: bbb3 replays its only trajectory and is then solved by 4: retired; ccc4 by 4: retired.
    """
    run = tmp_path / "run"
    write_questions(run, IDS)
    write_config(run, SyntheticRun(steps=3, questions_per_step=2, group_size=4))
    with store.Store(run / "replay", identity=IDENTITY, rules=replace.Replace(), question_ids=IDS) as buffer:
        visit(buffer, "aaa1", 1, 2, entropies=(0.2, 0.6))
        visit(buffer, "aab2", 1, 0)
        buffer.flush(1)
        replay(buffer, "aaa1", 2, 0)
        visit(buffer, "aaa1", 2, 3, entropies=(0.4,), replayed=1)
        visit(buffer, "bbb3", 2, 1, entropies=(0.8,))
        buffer.flush(2)
        replay(buffer, "bbb3", 3, 0)
        visit(buffer, "bbb3", 3, 4, replayed=1)
        visit(buffer, "ccc4", 3, 4)
        buffer.flush(3)
    lines = [
        {"step": 1, "phase": "on-policy", "batch/questions": 2, "tokens/trained": 100},
        {"step": 2, "phase": "mixed", "batch/questions": 1, "tokens/trained": 110, "policy/ratio_replay": 1.5},
        {"step": 3, "phase": "mixed", "batch/questions": 1, "tokens/trained": 90, "policy/ratio_replay": 2.0},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_a_small_run_counted_by_hand(small_run: Path) -> None:
    told = plain(numbers_of(small_run))
    series = told["over_time"]
    # After steps 0, 1, 2, 3: aaa1 is in bucket 2, then 3; bbb3 is in bucket 1 after step 2 only.
    assert series["buckets"] == {"1": [0, 0, 1, 0], "2": [0, 1, 0, 0], "3": [0, 0, 1, 1]}
    assert series["questions"] == [0, 1, 2, 1] and series["retired"] == [0, 0, 0, 2]
    # Fresh draws: 2, then 1, then 1, so that 0, 2, 3, 4 questions are seen; what is neither stored nor retired is aab2.
    assert series["tried"] == [0, 1, 1, 1] and series["unseen"] == [4, 2, 1, 0]
    # Two of aaa1, then a third and one of bbb3; the one of the retired bbb3 leaves with it.
    assert series["trajectories"] == [0, 2, 4, 3]
    now = [told[name] for name in ("buckets", "questions", "retired", "trajectories", "stored", "first_mixed_step")]
    assert now == [{"3": 1}, 1, 2, 3, 4, 2]
    # Trajectory 0 (born in step 1) is replayed in step 2, trajectory 3 (born in step 2, of bbb3) in step 3.
    assert told["age"] == {"mean": 1.0, "median": 1.0, "p90": 1.0, "max": 1, "histogram": {"1": 2}}
    assert (told["reuse"]["histogram"], told["reuse"]["never"]) == ({"0": 2, "1": 2}, 2)
    assert series["age"] == [None, None, 1.0, 1.0]
    # Both have 10 tokens, of 300 that were trained on.
    assert told["share"] == {"steps": 2 / 3, "tokens": 20 / 300}
    assert told["ratios"]["mean"] == [None, 1.5, 2.0]
    # aaa1 went from bucket 2 to 3, bbb3 from 1 to retirement.
    assert told["flow"] == {
        "1": {"after": {}, "retired": 1, "dropped": 0},
        "2": {"after": {"3": 1}, "retired": 0, "dropped": 0},
    }


def test_entropies_of_choice_and_of_birth(small_run: Path) -> None:
    told = numbers_of(small_run)
    series, chosen = told["over_time"], told["entropy"]
    # Step 2: .2 of (.2, .6), mean .4. Step 3: the only one, .8. Each draw counts once.
    np.testing.assert_allclose(series["entropy_selected"], [np.nan, np.nan, 0.2, 0.8])
    np.testing.assert_allclose(series["entropy_available"], [np.nan, np.nan, 0.4, 0.8])
    np.testing.assert_allclose(series["candidates"], [np.nan, np.nan, 2, 1])
    assert [chosen["selected"], chosen["available"], chosen["share_with_choice"]] == pytest.approx([0.5, 0.6, 0.5])
    groups = {group["name"]: (group["trajectories"], round(group["mean"], 6)) for group in chosen["by_bucket"]}
    assert groups == {"1": (1, 0.8), "2": (2, 0.4), "3": (1, 0.4)}
    # 1 of 4 is hard, 2 of 4 medium, 3 of 4 easy.
    difficulty = {group["name"]: group["trajectories"] for group in chosen["by_difficulty"]}
    assert difficulty == {"hard": 1, "medium": 2, "easy": 1}


def test_questions_come_with_their_text_and_history(small_run: Path) -> None:
    record = read_run(small_run)
    first, second = summarise(record)["most_replayed"]
    names = ("question_id", "replays", "distinct", "trajectories", "state")
    assert [[row[name] for name in names] for row in (first, second)] == [
        ["aaa1", 1, 1, 3, "bucket 3"],
        ["bbb3", 1, 1, 1, "retired"],
    ]
    assert first["question"]["text"] == "What is 0 + 3?"
    history = asked.question_history(record, "aaa")
    told = [(row["step"], row["event"], row["trajectory_id"], row["bucket"]) for row in history["events"]]
    assert told == [
        (1, "collected", 0, 2), (1, "collected", 1, 2), (2, "scored", 1, None), (2, "selected", 0, 2),
        (2, "moved", None, 3), (2, "collected", 2, 3),
    ]  # fmt: skip
    assert [row["entropy"] for row in history["events"]] == [0.2, 0.6, 0.6, 0.2, None, 0.4]
    assert [history[name] for name in ("question_id", "answer", "state")] == ["aaa1", "3", "bucket 3"]
    never_solved = asked.question_history(record, "aab2")
    assert (never_solved["events"], never_solved["state"]) == ([], "not buffered")


def test_an_unknown_question_is_refused(small_run: Path) -> None:
    record = read_run(small_run)
    for given, told in (("aa", "'aa' is the beginning of 2 ids"), ("zzzz", "Ids are in the column `id`")):
        with pytest.raises(InputError, match=f"question .*{told}"):
            asked.question_history(record, given)


RULES = {
    "paper": replace.Replace(),
    "limits": replace.Replace(max_per_question=3, max_age=8, cooldown=4, eviction="longest"),
    "readmission": replace.Replace(readmit_fraction=0.3, readmit_every=5),
    "fresh only": replace.Replace(count_fresh_only=True, sampler="linear", metric="random"),
    "no retirement": replace.Replace(retirement=False, sampler="uniform", metric="ppl", direction="max"),
}


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES.keys())
def test_states_rebuilt_from_events_are_those_the_buffer_counted(tmp_path: Path, rules: replace.Replace) -> None:
    run = tmp_path / "run"
    write_run(run, SyntheticRun(steps=20, num_questions=200, questions_per_step=16, rules=rules, mixed_from=3))
    told, metrics = numbers_of(run), read_metrics(run)
    now = told["over_time"]
    logged = {f"replay/{name}": now[name] for name in ("questions", "retired", "trajectories")}
    logged |= {f"replay/bucket/{k}": now["buckets"].get(k, np.zeros(21)) for k in range(8)}
    for name, rebuilt in logged.items():
        np.testing.assert_array_equal(rebuilt[1:], np.nan_to_num(metrics.series(name)), err_msg=name)
    assert (now["tried"] is None) == (now["unseen"] is None) == bool(rules.readmit_fraction)
    if now["tried"] is not None:
        assert set((now["questions"] + now["retired"] + now["tried"] + now["unseen"]).tolist()) == {200}
    assert told["used"] == np.nansum(metrics.series("replay/used"))
    selected = metrics.series("replay/entropy_selected")
    np.testing.assert_allclose(now["entropy_selected"][1:], selected, rtol=1e-12, equal_nan=True)
    json.dumps(plain(told), allow_nan=False)


def test_a_torn_ledger_is_read_up_to_its_last_whole_step_and_says_so(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_run(run, SyntheticRun(steps=6, num_questions=100, questions_per_step=8, mixed_from=2))
    whole = numbers_of(run)
    lines = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(lines[:-40])  # as a run that is still writing
    torn = numbers_of(run)
    # The ledger knows of step 6, whose line is half there.
    assert (torn["steps"], torn["ratios"]["steps"].tolist()) == (6, [1, 2, 3, 4, 5])
    np.testing.assert_array_equal(torn["over_time"]["unseen"], whole["over_time"]["unseen"])
    (run / "metrics.jsonl").write_text(lines)
    newest = max((run / "replay" / "events").iterdir())
    os.truncate(newest, newest.stat().st_size // 2)
    torn = numbers_of(run)
    assert whole["incomplete"] == ""
    said = "ledger read up to step 5; events/part-00000006-00000006.parquet"
    assert torn["incomplete"].startswith(f"{said} is truncated")
    np.testing.assert_array_equal(torn["over_time"]["questions"], whole["over_time"]["questions"][:6])
    # Step 6 was logged, but what it replayed is not known: it counts in neither half of a share.
    assert (torn["steps"], torn["ratios"]["steps"].tolist()) == (5, [1, 2, 3, 4, 5])
    with pytest.warns(DamageWarning, match=f"run: {said}"), pytest.raises(InputError, match="--step 6 is not in"):
        report_runs([run], step=6)


def test_a_run_before_its_first_replay_or_without_its_questions(tmp_path: Path) -> None:
    rules = replace.Replace(retirement=False)
    run = tmp_path / "run"
    write_run(run, SyntheticRun(steps=2, num_questions=100, questions_per_step=8, mixed_from=50, rules=rules))
    told = plain(numbers_of(run))
    assert [told[name] for name in ("questions", "trajectories", "used", "first_mixed_step")] == [0, 0, 0, None]
    assert told["entropy"]["selected"] is told["draws"]["p_value"] is told["age"]["mean"] is None
    assert told["over_time"]["tried"] == [0, 8, 16]
    (run / "data" / "train.parquet").unlink()
    assert numbers_of(run)["unseen"] is None


def test_after_a_warm_start_nobody_can_tell_the_tried_from_the_unseen(small_run: Path, tmp_path: Path) -> None:
    """aaa1 comes along; aab2 is visited without success, which no event says and aaa1's visit might not have said."""
    run = tmp_path / "warm"
    write_questions(run, IDS)
    write_config(run, SyntheticRun(steps=1, questions_per_step=2, group_size=4))
    with store.Store(run / "replay", identity=IDENTITY, rules=replace.Replace(), question_ids=IDS) as buffer:
        warm_start.warm_start(buffer, small_run / "replay", ObjectiveSettings(), 99)
        visit(buffer, "aab2", 1, 0)
        buffer.flush(1)
    (run / "metrics.jsonl").write_text('{"step": 1, "phase": "mixed", "batch/questions": 2}\n')
    reports = report_runs([run])
    told = report_json(reports)
    assert told["over_time"]["questions"] == [1, 1]
    assert [told["tried"], told["unseen"], told["questions"], told["stored"]] == [None, None, 1, 3]
    assert not {"tried, nothing stored", "unseen"} & set(overview(reports).columns[0].cells), "rows without a number"


def refusal(run: Path) -> str:
    with pytest.raises(InputError) as caught:
        read_run(run)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_no_run_keeps_no_ledger_or_is_broken_is_refused(small_run: Path, tmp_path: Path) -> None:
    assert "it has no config.toml. Name the --output folder of a run." in refusal(tmp_path / "nowhere")
    (small_run / "metrics.jsonl").write_text("{oops\n" + (small_run / "metrics.jsonl").read_text())
    assert "metrics.jsonl, line 1 is not JSON" in refusal(small_run)
    (small_run / "metrics.jsonl").unlink()
    assert "has no metrics.jsonl" in refusal(small_run)
    (small_run / "replay").rename(tmp_path / "elsewhere")
    assert "no replay ledger" in refusal(small_run) and "Wait for the run's first step" in refusal(small_run)
    (small_run / "config.toml").write_text("[run\n")
    assert "config.toml is not TOML" in refusal(small_run)


def draws_of(rows: list[tuple[int, int, int, float, int]]) -> Columns:
    """(step, bucket, num_questions, probability, num_drawn) rows of a run with K = 8."""
    names = ("step", "bucket", "num_questions", "probability", "num_drawn")
    arrays = map(np.array, zip(*rows, strict=True))
    return Columns(num_members=np.full(len(rows), 8), **dict(zip(names, arrays, strict=True)))


def test_with_equal_probabilities_it_is_pearsons() -> None:
    # Two steps draw 50 each from p = (.2, .3, .5): expected (20, 30, 50), drawn (26, 24, 50).
    # 6^2/20 + 6^2/30 + 0 = 1.8 + 1.2 = 3.0 with 2 degrees of freedom: exp(-1.5) = .2231.
    rows = [
        (1, 3, 900, 0.2, 12), (1, 4, 900, 0.3, 13), (1, 5, 900, 0.5, 25),
        (2, 3, 900, 0.2, 14), (2, 4, 900, 0.3, 11), (2, 5, 900, 0.5, 25),
    ]  # fmt: skip
    test = draw_test.draw_test(draws_of(rows))
    assert test["chi_square"] == pytest.approx(3.0) and test["degrees_of_freedom"] == 2
    assert test["p_value"] == pytest.approx(0.22313, abs=1e-5)
    assert [(row["bucket"], row["drawn"]) for row in test["buckets"]] == [(3, 26), (4, 24), (5, 50)]
    assert [row["expected"] for row in test["buckets"]] == pytest.approx([20, 30, 50])


def test_rare_buckets_are_pooled() -> None:
    # Expected 2, 4, 44 and 50 of 100: the first two are one cell of 6. Drawn 8, 0 | 42 | 50.
    # Cells (8-6)^2/6 + (42-44)^2/44 + 0 = .6667 + .0909 with 2 degrees of freedom.
    test = draw_test.draw_test(
        draws_of([(1, 1, 900, 0.02, 8), (1, 2, 900, 0.04, 0), (1, 4, 900, 0.44, 42), (1, 5, 900, 0.5, 50)])
    )
    assert test["degrees_of_freedom"] == 2 and test["chi_square"] == pytest.approx(4 / 6 + 4 / 44)


def test_a_draw_without_a_choice_has_no_p_value() -> None:
    # Everything that there is was drawn, 3 of 3 and 4 of 4, though the promise is half of 7 each.
    everything = draw_test.draw_test(draws_of([(1, 3, 3, 0.5, 3), (1, 4, 4, 0.5, 4)]))
    assert (everything["p_value"], everything["degrees_of_freedom"]) == (None, 0)
    assert [row["expected"] for row in everything["buckets"]] == [3.5, 3.5]
    assert draw_test.draw_test(draws_of([(1, 3, 3, 0.0, 0)]))["p_value"] is None


def simulated(rng: np.random.Generator, promised: np.ndarray, drawn_by: np.ndarray, steps: int = 40) -> float | None:
    """p-value of a run whose sampler promises one thing and draws by another; one draw of five can overflow."""
    rows = []
    for step in range(1, steps + 1):
        sizes = rng.integers(2 if step % 5 == 0 else 16, 40, len(promised))
        buckets = [
            by_question.Bucket(success_count=k + 1, num_members=8, question_ids=[f"{k}-{i}" for i in range(size)])
            for k, size in enumerate(sizes.tolist())
        ]
        drawn = by_question.draw_by_weights(buckets, drawn_by.tolist(), 16, rng).question_ids
        counts = [sum(question.startswith(f"{k}-") for question in drawn) for k in range(len(promised))]
        rows += [(step, k + 1, int(sizes[k]), float(promised[k]), counts[k]) for k in range(len(promised))]
    return draw_test.draw_test(draws_of(rows))["p_value"]


WEIGHTS = np.exp(-0.5 * ((np.arange(1, 8) / 8 - 0.5) / 0.125) ** 2)
PROMISED = WEIGHTS / WEIGHTS.sum()


def test_the_samplers_own_draws_give_uniform_p_values_where_some_buckets_overflow() -> None:
    rng = np.random.default_rng(5)
    values = [simulated(rng, PROMISED, PROMISED) for _ in range(60)]
    # Kolmogorov-Smirnov against the uniform; a test that ignored the overflow would give p near 0 every time.
    assert stats.kstest(values, "uniform").pvalue > 0.01


def test_another_sampler_than_the_promised_one_is_found_out() -> None:
    rng = np.random.default_rng(6)
    flat = np.full(7, 1 / 7)
    assert max(simulated(rng, PROMISED, flat) for _ in range(5)) < 1e-3


def test_shares_are_fractions_in_every_table(tmp_path: Path) -> None:
    """As scores are: no per cent here and fractions there."""
    run = tmp_path / "run"
    write_run(run, SyntheticRun(steps=12, num_questions=60, questions_per_step=8, mixed_from=3))
    reports = report_runs([run], step=8)
    cells = [str(cell) for table in report_tables(reports) for column in table.columns for cell in column.cells]
    assert len(cells) > 100 and [cell for cell in cells if "%" in cell] == []
