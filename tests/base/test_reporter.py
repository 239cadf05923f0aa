"""What a person sees of a step and of a table: whole words and whole numbers, however narrow the terminal."""

import io

import pytest
from rich.console import Console
from rich.table import Table

from exgrpo_cli.base.output import wrapped
from exgrpo_cli.base.reporter import LiveReporter, PlainReporter, answer_rows, as_rows, print_table, step_view

LINE = {
    "step": 12, "phase": "on-policy", "batch/pass_at_1": 0.53125, "reward/mean": 0.53125, "replay/pass_at_1": 0.4,
    "policy/entropy": 0.61, "replay/questions": 1234, "replay/trajectories": 98765, "replay/retired": 7,
    "replay/bucket/1": 30, "replay/bucket/4": 15, "length/mean": 61.2, "time/step": 1.25,
}  # fmt: skip
SHOWN = (
    "held-out 0.500 before training", "0.531 on new questions", "0.400 on replayed ones", "1,234 questions", "98,765",
    "7 questions retired", "correct of 8:", "1:█30", "4:▅15", "5:-0", "61 tokens long", "entropy 0.610",
    "1.25 s a step",
)  # fmt: skip


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_every_figure_of_a_step_is_shown_whole(width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    console.print(as_rows(step_view(LINE, 8, "0.500 before training")))
    shown = console.file.getvalue()
    assert max(map(len, shown.splitlines())) <= width
    words = " ".join(shown.split())
    assert [figure for figure in SHOWN if figure not in words] == []
    assert len(shown.splitlines()) <= 6 or width < 120
    # A mixed step that drew nothing says so, and is not called one of new rollouts only.
    assert "new rollouts alone" in words
    assert (
        step_view({**LINE, "phase": "mixed"}, 8, "")["phase"] == "mixed: nothing of the buffer was drawn in this step"
    )
    # Nothing of a buffer is said of a run that has none.
    bare = step_view({"step": 1, "phase": "on-policy", "batch/pass_at_1": 0.25, "length/mean": 4.0}, 8, "")
    assert list(bare) == ["pass@1", "rollouts"]


def test_plain_lines_hold_the_figures_and_come_now_and_then() -> None:
    out = io.StringIO()
    reporter = PlainReporter(Console(file=out, width=200), interval=1000.0)
    for done in (1, 2, 10):
        reporter.progress(done, 10, "warm start")
    reporter.step({"step": 1, "phase": "mixed", "batch/pass_at_1": 0.25, "replay/questions": 3}, 2)
    reporter.step({"step": 2, "phase": "mixed", "batch/pass_at_1": 0.25, "replay/questions": 3}, 2)
    first, second, *terms, one, two = out.getvalue().splitlines()
    assert (first, second) == ("warm start: 1/10", "warm start: 10/10")
    # Each term once, where it first appears.
    assert [term.split(":")[0].strip() for term in terms] == ["pass@1", "phase", "buffer", "entropy"]
    assert (one, two) == (
        "step 1/2  mixed  pass@1 0.250  buffer 3 questions",
        "step 2/2  mixed  pass@1 0.250  buffer 3 questions",
    )
    assert "\x1b" not in out.getvalue() and "\r" not in out.getvalue()


def test_a_meaning_is_told_once() -> None:
    out = io.StringIO()
    reporter = PlainReporter(Console(file=out, width=80))
    for value in ("0.1", "0.2"):
        reporter.rows({"pass@4": (value, "questions with a correct answer among 4")})
    assert out.getvalue().splitlines() == ["  pass@4: 0.1 (questions with a correct answer among 4)", "  pass@4: 0.2"]


def test_notes_of_a_terminal_wrap_between_words_and_end_with_a_command_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "30")
    said = "stopped in step 3, before its first checkpoint: exgrpo train --resume --output runs/one"
    lines = ["stopped in step 3, before its", "first checkpoint:", "  exgrpo train --resume --output runs/one"]
    assert wrapped(said, Terminal()).splitlines() == lines and wrapped(said, io.StringIO()) == said


@pytest.mark.parametrize(
    "answer, shown",
    [
        (("2+2=?", "4", "2+2=\n4", "correct"), "2+2= 4 (correct)"),
        (("2+2=?", "4", "5", "wrong"), "5 (wrong, 4 is correct)"),
        (("Write.", "", "x", "wrong"), "x (wrong)"),
        (("2+2=?", "4", "a" * 300 + "b" * 300, "no answer"), f"{'a' * 240} ... {'b' * 240} (no answer, 4 is correct)"),
    ],
)
def test_an_answer_is_shown_with_its_verdict_and_without_its_middle(answer: tuple[str, ...], shown: str) -> None:
    assert answer_rows(*answer) == {"question": answer[0], "answer": shown}


def printed(width: int) -> str:
    table = Table("run", title="replay of some run")
    for name in ("questions", "trajectories", "retired", "replayed"):
        table.add_column(name, justify="right")
    table.add_row("runs/exgrpo-tiny-20260101", "2,368", "10,441", "1,207", "31,902")
    out = io.StringIO()
    print_table(table, Console(file=out, width=width))
    return out.getvalue()


@pytest.mark.parametrize("width", [120, 80, 60])
def test_numbers_are_never_cut(width: int) -> None:
    text = printed(width)
    for number in ("2,368", "10,441", "1,207", "31,902"):
        assert number in text, text
    assert all(len(line) <= width for line in text.splitlines())
    # Too wide a table becomes several.
    assert text.count("┏") == text.count("runs/exgrpo-tiny-20260101") == {120: 1, 80: 1, 60: 2}[width]


def test_a_bar_is_there_before_anything_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first answer of a real model may take minutes."""
    out = io.StringIO()
    PlainReporter(Console(file=out, width=80)).progress(0, 500, "held-out, before training")
    assert out.getvalue() == "held-out, before training: 0/500\n"
    loading = io.StringIO()
    with PlainReporter(Console(file=loading, width=80)).showing("loading some/model"):
        assert loading.getvalue() == "loading some/model\n"
    assert loading.getvalue() == "loading some/model\n"
    live = io.StringIO()
    reporter = LiveReporter(Console(file=live, width=100, force_terminal=True))
    monkeypatch.setattr("exgrpo_cli.base.reporter._LEAST_SHOWN", -1.0)
    reporter.phase("loading some/model")
    reporter.progress(0, 500, "held-out, before training")
    tasks = reporter._progress.tasks
    # They swing: nothing is done that could be counted.
    assert [(task.description, task.total) for task in tasks] == [
        ("loading some/model", None),
        ("held-out, before training", None),
    ]
    reporter.progress(100, 500, "held-out, before training")
    reporter._live.refresh()
    assert tasks[1].total == 500
    assert "loading some/model" in live.getvalue() and "100 of 500" in live.getvalue()
    reporter.close()


def test_no_column_is_squeezed_to_nothing_by_one_that_must_not_wrap() -> None:
    table = Table("claim")
    table.add_column("contrast", justify="right")
    words = ["Right", "answers", "of", "low", "entropy", "are", "more", "often", "valid"]
    table.add_row(" ".join(words), "valid_auc_within: exgrpo minus 0.5 > 0.05")
    for width in (120, 66, 50):
        out = io.StringIO()
        print_table(table, Console(file=out, width=width))
        assert all(word in out.getvalue() for word in words)
