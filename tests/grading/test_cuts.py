"""The part of a response that is graded: the text after the thinking, and the last of its boxes."""

import re
import tomllib
from pathlib import Path

import pytest

from exgrpo_cli.base.types import AnswerFormat
from exgrpo_cli.grading import answer_text, last_boxed

FORMATS = {
    "anywhere": AnswerFormat(opens_think=False, requires_box=False, require_eos=False),
    "boxed": AnswerFormat(opens_think=False, requires_box=True, require_eos=False),
    "thinking": AnswerFormat(opens_think=True, requires_box=False, require_eos=False),
    "strict": AnswerFormat(opens_think=True, requires_box=True, require_eos=True),
}
CASES = tomllib.loads(Path(__file__).with_name("cuts.toml").read_text())
PARTS = [
    (name, *case, *nothing)
    for kind, nothing in (("graded", ()), ("nothing_graded", (None,)))
    for name, cases in CASES[kind].items()
    for case in cases
]


@pytest.mark.parametrize(("name", "finished", "response", "graded"), PARTS)
def test_graded_text(name: str, finished: bool, response: str, graded: str | None) -> None:
    assert answer_text(response, finished=finished, answer_format=FORMATS[name]) == graded


@pytest.mark.parametrize("case", CASES["last_boxed"]["cases"], ids=lambda case: case[0])
def test_last_boxed(case: list[str]) -> None:
    text = re.sub("«([0-9]+):([^»]*)»", lambda found: int(found[1]) * found[2], case[0])
    assert last_boxed(text) == (case[1] if len(case) > 1 else None)
