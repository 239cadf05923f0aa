"""Tables keep their numbers whole, however narrow the terminal."""

import io

import pytest
from rich.console import Console
from rich.table import Table

from exgrpo_cli.base.console.reporter import LiveReporter, print_table


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


def test_a_table_that_does_not_fit_becomes_a_list() -> None:
    assert "questions     2,368" in printed(30)


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
