"""What a person sees of a step and of a table: whole words and whole numbers, however narrow the terminal."""

import io

import pytest
from rich.console import Console
from rich.table import Table

from exgrpo_cli.base.reporter import LiveReporter, PlainReporter, print_table, step_view

LINE = {
    "step": 12,
    "phase": "on-policy",
    "batch/pass_at_1": 0.53125,
    "reward/mean": 0.53125,
    "replay/pass_at_1": 0.4,
    "policy/entropy": 0.61,
    "replay/questions": 1234,
    "replay/trajectories": 98765,
    "replay/retired": 7,
    "replay/bucket/1": 30,
    "replay/bucket/4": 15,
    "length/mean": 61.2,
    "time/step": 1.25,
}
SHOWN = (
    "phase on-policy", "pass@1 0.531", "reward 0.531", "replayed pass@1 0.400", "entropy 0.610", "buffered 1234",
    "trajectories 98765", "retired 7", "length 61", "s/step 1.25", "k=1", "30", "k=4", "15",
)  # fmt: skip


@pytest.mark.parametrize("width", [40, 80, 200])
def test_every_figure_of_a_step_is_shown_whole(width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    console.print(*step_view(LINE))
    shown = console.file.getvalue()
    assert max(map(len, shown.splitlines())) <= width
    assert [figure for figure in SHOWN if figure not in shown] == []


def test_plain_lines_hold_the_figures_and_come_now_and_then() -> None:
    out = io.StringIO()
    reporter = PlainReporter(Console(file=out, width=200), interval=1000.0)
    for done in (1, 2, 10):
        reporter.progress(done, 10, "warm start")
    reporter.step({"step": 1, "phase": "mixed", "batch/pass_at_1": 0.25, "replay/questions": 3}, 2)
    reporter.step({"step": 2, "phase": "mixed", "batch/pass_at_1": 0.25, "replay/questions": 3}, 2)
    first, second, terms, *steps = out.getvalue().splitlines()
    assert (first, second) == ("warm start: 1/10", "warm start: 10/10")
    assert terms.startswith("phase: mixed steps replay") and "; pass@1: share of" in terms and "retired" not in terms
    assert steps == ["step 1/2  mixed  pass@1 0.250  buffered 3", "step 2/2  mixed  pass@1 0.250  buffered 3"]


def printed(width: int) -> str:
    table = Table("run", title="replay of some run")
    for name in ("questions", "trajectories", "retired", "replayed"):
        table.add_column(name, justify="right")
    table.add_row("runs/exgrpo-tiny-20260101", "2,368", "10,441", "1,207", "31,902")
    out = io.StringIO()
    print_table(table, Console(file=out, width=width))
    return out.getvalue()


@pytest.mark.parametrize("width", [120, 80, 60, 40, 25, 12])
def test_numbers_are_never_cut(width: int) -> None:
    text = printed(width)
    for number in ("2,368", "10,441", "1,207", "31,902"):
        assert number in text, text
    assert all(len(line) <= max(width, 25) for line in text.splitlines())
    # Too wide a table becomes several, and a list where not even two columns fit.
    assert text.count("┌") + text.count("┏") == {120: 1, 80: 1, 60: 2}.get(width, 0)
    assert text.count("runs/exgrpo-tiny-20260101") == {60: 2, 12: 0}.get(width, 1)


def test_a_study_of_four_arms_is_a_few_tables_of_four_rows() -> None:
    """Not a line for each value: at 120 columns its eleven columns take two tables."""
    names = "arm|seeds|before|after|95 %|minus on-policy|p (Holm)|s/run|pass@4|minus on-policy|p (Holm)"
    headings = names.split("|")
    cells = ["3", "0.256", "0.525", "[0.500, 0.550]", *["+0.010 [-0.010, 0.030]", "0.123", "61", "0.800"]]
    table = Table(headings[0], title="held-out pass@1")
    for heading in headings[1:]:
        table.add_column(heading, justify="right")
    for arm in ("on-policy", "ent:min", "ent:max", "random"):
        table.add_row(arm, *cells, "+0.010 [-0.010, 0.030]", "0.500")
    out = io.StringIO()
    print_table(table, Console(file=out, width=120))
    lines = out.getvalue().splitlines()
    assert len(lines) <= 18 and max(map(len, lines)) <= 120
    assert sum("ent:min" in line for line in lines) == 2


def test_a_bar_is_there_before_anything_is_done() -> None:
    """A first answer of a real model may take minutes."""
    out = io.StringIO()
    PlainReporter(Console(file=out, width=80)).progress(0, 500, "held-out, before training")
    assert out.getvalue() == "held-out, before training: 0/500\n"
    loading = io.StringIO()
    with PlainReporter(Console(file=loading, width=80)).showing("loading some/model"):
        assert loading.getvalue() == "loading some/model: 0/1\n"
    assert loading.getvalue().splitlines()[1:] == ["loading some/model: 1/1"]
    live = io.StringIO()
    reporter = LiveReporter(Console(file=live, width=100, force_terminal=True))
    reporter.progress(0, 500, "held-out, before training")
    reporter.close()
    assert "held-out, before training" in live.getvalue() and "0/500" in live.getvalue()


def test_no_column_is_squeezed_to_nothing_by_one_that_must_not_wrap() -> None:
    table = Table("claim")
    table.add_column("contrast", justify="right")
    words = ["Right", "answers", "of", "low", "entropy", "are", "more", "often", "valid"]
    table.add_row(" ".join(words), "valid_auc_within: exgrpo minus 0.5 > 0.05")
    for width in (120, 66, 50):
        out = io.StringIO()
        print_table(table, Console(file=out, width=width))
        assert all(word in out.getvalue() for word in words)


def test_work_that_is_done_is_said_to_be_done_once() -> None:
    out = io.StringIO()
    reporter = LiveReporter(Console(file=out, width=80, force_terminal=False))
    for _ in range(5):
        reporter.progress(6, 6, "ent:min, seed 0")
    reporter.progress(1, 6, "ent:min, seed 0")
    reporter.progress(6, 6, "ent:min, seed 0")
    reporter.close()
    assert out.getvalue().count("ent:min, seed 0: done") == 2
