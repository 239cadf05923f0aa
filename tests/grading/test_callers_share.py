"""The asking process reads a model's text in proportion to its length, and nothing that can hang."""

import re
import sys
import tracemalloc

import pytest
from processes import python

from exgrpo_cli.base import data, types
from exgrpo_cli.config.sections.run import GradingSettings
from exgrpo_cli.grading import GradingItem, GradingPool, choice, extract, plain, pool, routes

FORMAT = types.AnswerFormat(opens_think=False, requires_box=True, require_eos=False)
LONG = 1 << 16
PIECES: dict[str, list[str]] = data.tables(__file__, "pieces.toml")
"""The piece that a hostile text repeats, and the end that closes it."""


class Counted:
    """A pattern that counts the characters it is given."""

    given = 0

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern

    def __getattr__(self, name: str):
        method = getattr(self._pattern, name)

        def call(*arguments):
            texts = [each for each in arguments if isinstance(each, str)]
            Counted.given += len(texts[-1])
            return method(*arguments)

        return call


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (extract, choice, choice._RE, plain):
        for name, value in list(vars(module).items()):
            if isinstance(value, re.Pattern):
                monkeypatch.setattr(module, name, Counted(value))


def hostile(piece: str, closing: str, length: int, *, boxed: bool) -> str:
    times = (length - 20) // len(piece + closing)
    text = piece * times + "7" + closing * times
    return rf"\boxed{{{text}}}" if boxed else text


def steps(text: str, grader: str) -> int:
    """Characters given to patterns, and functions called, to decide a response or to pass it on."""
    item = GradingItem(gold="7", response=text, finished=True, answer_format=FORMAT)
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    Counted.given = 0
    route = routes.Route(grader=grader, max_answer_chars=2000)
    sys.setprofile(count)
    try:
        routes.route_item(route, item)
    finally:
        sys.setprofile(None)
    return Counted.given + calls


@pytest.mark.parametrize("grader", ["math", "choice", "exact", "oat"])
def test_what_the_caller_does_grows_with_the_length_of_a_text_and_no_faster(counted: None, grader: str) -> None:
    for name, (piece, closing) in PIECES.items():
        for boxed in (False, True):
            half, whole = (steps(hostile(piece, closing, length, boxed=boxed), grader) for length in (LONG // 2, LONG))
            # Of a line with "answer" in it 2,000 characters are read from each "answer" on, whatever the length.
            assert whole <= 2.2 * half + 1000, (name, boxed)
            assert whole <= 30 * LONG, (name, boxed)


def test_what_the_caller_holds_is_a_few_times_the_text() -> None:
    for name in ("nested boxes", "unclosed boxes", "one box after the other", "nested braces", "announcements"):
        text = hostile(*PIECES[name], LONG, boxed=False)
        item = GradingItem(gold="7", response=text, finished=True, answer_format=FORMAT, options=("7", "8"))
        tracemalloc.start()
        routes.route_item(routes.Route(grader="choice", max_answer_chars=2000), item)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 64 * LONG, name


def test_the_notation_of_an_answer_is_not_even_loaded_where_it_is_asked_for() -> None:
    """Its patterns may take any time, so workers alone have them."""
    code = (
        "import sys; from exgrpo_cli.grading import GradingPool; "
        "print({'notation', 'quantities', 'comparison'} & {name.rpartition('.')[2] for name in sys.modules})"
    )
    done = python("-c", code, check=True)
    assert done.stdout.strip() == "set()"


def test_an_answer_that_hangs_its_reader_costs_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pattern that takes forever, as one for units once did on a hundred characters, in the worker alone."""
    slow = "import re; from exgrpo_cli.grading import comparison; "
    slow += "comparison.split_unit = lambda text: (re.fullmatch('(a|a)*', 'a' * 60 + 'b'), None)"
    monkeypatch.setattr(pool, "_BOOT", pool._BOOT.replace("; main(", f"; {slow}; main("))
    with GradingPool(GradingSettings(deadline_seconds=0.5)) as opened:
        [late, fine] = opened.grade(
            [
                GradingItem(gold=gold, response=rf"\boxed{{{answer}}}", finished=True, answer_format=FORMAT)
                for gold, answer in ((r"x^2", r"5\text{ m}"), ("7", "7"))
            ]
        )
    assert (late, fine) == (types.Verdict.TIMEOUT, types.Verdict.CORRECT)
