"""Texts of others on a terminal, in tables, on pages: shown, never obeyed."""

import contextlib
import io
import json
import logging
import os
import pty
import random
import re
import subprocess
import sys
import unicodedata
import warnings
from pathlib import Path

import pytest
from rich.table import Table
from stored_results import with_successes

from exgrpo_cli.base.output import PrintableRecord, in_markdown, printable, say, tell_warnings
from exgrpo_cli.base.reporter import LiveReporter, PlainReporter, PrintableConsole, print_table
from exgrpo_cli.commands import run as exgrpo
from exgrpo_cli.show.figures import comparisons, style, written
from exgrpo_cli.show.page import Links, Page, Paragraph, Response, figure_block, write_page
from exgrpo_cli.studies.output import markdown

BIDI = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
ATTACKS = [
    "\x1b]0;owned\x07", "\x1b[2J", "\x9b2J", "\x1b[8m", "\r", "\x08" * 9, "\x7f", "\u202eevil\u202c", "\x1bc", "\u2028",
    *(chr(code) for code in (*range(9), *range(11, 32), *range(127, 160))), *BIDI,
]  # fmt: skip
SEEDS = range(6)


def hostile(seed: int, *, name: bool = False) -> str:
    """A text that attacks a terminal, by its seed; with `name` it may be that of a file."""
    rng = random.Random(seed)
    text = "".join(rng.choice(ATTACKS) + rng.choice(["red", " on", "[bold]", "größe"]) for _ in range(6))
    return text.replace("\0", "") if name else text


def obeyed(text: str) -> list[str]:
    """Characters of the text that a terminal obeys."""
    kinds = ((each, unicodedata.category(each)) for each in text if each not in "\n\t")
    return [each for each, kind in kinds if each in BIDI or kind in ("Cc", "Zl", "Zp")]


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_shown_is_not_obeyed_and_what_is_plain_stays(seed: int) -> None:
    text = hostile(seed)
    assert obeyed(text) and not obeyed(printable(text))
    assert json.loads(f'"{printable(text)}"') == text, "as JSON reads it back"
    plain = "Größe 日本語 שלום, 👩‍🔬\tx\n\\boxed{7}"
    assert printable(plain) == plain


@pytest.mark.parametrize("seed", SEEDS)
def test_every_way_of_the_terminal_is_printable(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    text, out = hostile(seed), io.StringIO()
    console = PrintableConsole(file=out, width=100, markup=False, highlight=False)
    table = Table(text, "n", title=text, caption=text)
    table.add_row(text, "7")
    print_table(table, console)
    print_table(table, PrintableConsole(file=out, width=20, markup=False))
    console.print(text)
    for reporter in (PlainReporter(console), LiveReporter(console)):
        reporter.note(text)
        reporter.progress(1, 2, text)
        reporter.progress(2, 2, text)
        reporter.close()
    assert not obeyed(re.sub(r"\x1b\[\?25[lh]", "", out.getvalue()))
    say(text)
    made = logging.getLogRecordFactory()
    logging.setLogRecordFactory(PrintableRecord)
    shown_by, logger = logging.StreamHandler(), logging.getLogger("some.package")
    logger.addHandler(shown_by)
    logger.error("model %s is not known", text)
    logger.removeHandler(shown_by)
    logging.setLogRecordFactory(made)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        tell_warnings(lambda line, is_damage: say(line), others=True)
        warnings.warn(text, stacklevel=1)
    said = capsys.readouterr()
    assert len(said.err.splitlines()) > 3 and not obeyed(said.err + said.out)


def test_a_terminal_gets_the_consoles_own_codes_alone() -> None:
    out = io.StringIO()
    console = PrintableConsole(
        file=out, width=60, force_terminal=True, color_system="standard", markup=False, highlight=False
    )
    console.print("\x1b[2Jhello", style="bold")
    assert out.getvalue() == "\x1b[1m\\u001b[2Jhello\x1b[0m\n"


@pytest.mark.parametrize("seed", SEEDS)
def test_commands_show_foreign_files_without_obeying_them(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = hostile(seed, name=True)
    rows = [{"question": f"{text} {number}?", "answer": f"{number}"} for number in range(3)]
    file = tmp_path / "q.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = ["--output", str(tmp_path / "q.parquet"), "--show", "2", "--backbone", "tiny"]
    assert exgrpo(["prepare", str(file), *shown]) == 0
    named = text.replace("/", "")
    assert exgrpo(["prepare", str(tmp_path / f"{named}.jsonl")]) == 2
    assert exgrpo(["report", str(tmp_path / named)]) == 2
    assert exgrpo(["report", str(tmp_path / named), "--debug"]) == 2
    assert exgrpo(["train", f"--{named}", "1"]) == 2
    assert exgrpo(["train", "--dry-run", "--set", f"rollout.{named}=1"]) == 2
    shown = capsys.readouterr()
    assert "\\u" in shown.err and not obeyed(shown.out + shown.err)


def on_a_terminal(arguments: list[str], folder: Path) -> str:
    """All that a terminal gets of a command, as a process, but for the codes that a console sends of itself."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "exgrpo_cli", *arguments]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, cwd=folder):
        os.close(theirs)
        got = b""
        # Linux ends a terminal that nobody writes to any more with an error.
        with contextlib.suppress(OSError):
            while more := os.read(ours, 65536):
                got += more
    os.close(ours)
    return re.sub(r"\x1b\[(\?25[lh]|[0-9;]*m|[0-9]*[AK])|\r", "", got.decode())


def test_a_real_terminal_is_not_obeying(tmp_path: Path) -> None:
    attack = "\x1b]0;owned\x07\x1b[2J\x9b8m\u202eabc"
    row = {"question": f"{attack} 1+1?", "answer": "2"}
    name = "q\x1b]0;owned\x07\u202e.jsonl"
    (tmp_path / name).write_text(json.dumps(row) + "\n")
    for arguments in (["prepare", name, "--show", "1", "--backbone", "tiny"], ["report", attack]):
        shown = on_a_terminal(arguments, tmp_path)
        assert "\\u001b]0;owned\\u0007" in shown and not obeyed(shown), arguments


@pytest.mark.parametrize("seed", SEEDS[:4])
def test_names_of_models_are_harmless_in_comparisons_and_their_files(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"{hostile(seed)}|<script>alert(1)</script><img src=x onerror=alert(1)>![a](javascript:b) $\\foo$"
    first = with_successes(tmp_path / "a", [4, 4, 4, 4])
    other = with_successes(tmp_path / "b", [0, 4, 4, 4], model__name=name)
    assert exgrpo(["evaluate", "--compare", str(first), str(other), "--output", str(tmp_path / "out")]) == 0
    table = (tmp_path / "out" / "table.md").read_text()
    shown = capsys.readouterr()
    assert not obeyed(table + shown.out + shown.err)
    assert "<script" not in table and "<img" not in table and "](" not in table
    assert len({line.count("|") for line in table.splitlines() if line.startswith("| ")}) == 1
    assert not obeyed((tmp_path / "out" / "accuracy.svg").read_text())


@pytest.mark.parametrize("seed", SEEDS)
def test_pages_cards_and_figures_hold_nothing_that_is_obeyed(seed: int, tmp_path: Path) -> None:
    text = hostile(seed) + "<script>alert(1)</script>|![x](http://a)"
    cells = markdown([["arm", text], [text, "[0.1, 0.2]"]])
    assert not obeyed(cells) and "<script" not in cells and "](" not in cells and "[0.1, 0.2]" in cells
    assert [line.count("|") for line in cells.splitlines()] == [3, 3, 3]
    assert in_markdown("a & b") == "a &amp; b"
    figure = comparisons.accuracy_by_benchmark([(f"{text} $\\nosuch{{$", "x", {"value": 0.5, "low": 0.4, "high": 0.6})])
    style.tell(figure.axes[0], 0.0, f"pointed at {text}")
    written.save(figure, tmp_path, "accuracy")
    assert "pointed at" in (tmp_path / "accuracy.svg").read_text()
    assert not obeyed(written.as_svg(figure, {}) + (tmp_path / "accuracy.svg").read_text())
    blocks = [
        Paragraph(text),
        Response(question=text, answer=text, text=text, facts=text, good=True),
        figure_block("ablation", figure),
        Links({text: text, "javascript:alert(1)": text}, linked=True),
    ]
    write_page(
        Page(title=text, headline=text, subtitle=text, sections={text: blocks}, footer=text), tmp_path / "page.html"
    )
    page = (tmp_path / "page.html").read_text()
    assert not obeyed(page) and "<script" not in page and 'href="javascript' not in page
