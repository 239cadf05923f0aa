"""The part of a response that is graded: the text after the thinking, and the last of its boxes."""

import pytest

from exgrpo_cli.base.types import AnswerFormat
from exgrpo_cli.grading import answer_text, last_boxed

ANYWHERE = AnswerFormat(opens_think=False, requires_box=False, require_eos=False)
BOXED = AnswerFormat(opens_think=False, requires_box=True, require_eos=False)
THINKING = AnswerFormat(opens_think=True, requires_box=False, require_eos=False)
STRICT = AnswerFormat(opens_think=True, requires_box=True, require_eos=True)


@pytest.mark.parametrize(
    ("answer_format", "finished", "response", "graded"),
    [
        (ANYWHERE, True, " 7 ", "7"),
        (ANYWHERE, False, "7", "7"),
        (ANYWHERE, True, "  ", None),
        # Even where the template opens no <think>, what a model thinks is not its answer.
        (ANYWHERE, True, "3 or 4</think>7", "7"),
        (THINKING, True, "it is 7", None),
        (THINKING, True, r"\boxed{7}</think>", None),
        (THINKING, True, "hm</think>7", "7"),
        (THINKING, True, "hm</think>7</think>8", "7"),
        (BOXED, True, "7", None),
        (BOXED, True, r"\boxed{7", None),
        (BOXED, True, r"\boxed{7}", r"\boxed{7}"),
        # The box has to stand after the thinking.
        (STRICT, True, r"\boxed{7}</think>7", None),
        (STRICT, True, r"</think>\boxed{7}", r"\boxed{7}"),
        (STRICT, False, r"</think>\boxed{7}", None),
    ],
)
def test_graded_text(answer_format: AnswerFormat, finished: bool, response: str, graded: str | None) -> None:
    assert answer_text(response, finished=finished, answer_format=answer_format) == graded


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("7", None),
        (r"\boxed{7", None),
        (r"\boxed{7}", "7"),
        (r"\boxed {\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"} \boxed{7} {", "7"),
        (r"\boxed{x=\boxed{7}}", "7"),
        (r"\boxed{3} and \boxed{4", "3"),
        (r"\boxed{" * 100_000 + "7" + "}" * 100_000, "7"),
        # 9 characters between them, then 10; the comma joins up to 69 characters, and what is equal is said once.
        (r"\boxed{1}" + "-" * 9 + r"\boxed{2}", "1,2"),
        (r"\boxed{1}" + "-" * 10 + r"\boxed{2}", "2"),
        (r"\boxed{1}," + "-" * 68 + r"\boxed{2}", "1,2"),
        (r"\boxed{1}," + "-" * 69 + r"\boxed{2}", "2"),
        (r"\boxed{2}," + "-" * 30 + r"\boxed{2}", "2"),
        (r"\boxed{1}, \boxed{2}, \boxed{3}", "1,2,3"),
        # A box without content speaks of boxes, before the answer or behind it.
        (r"\boxed{}", ""),
        (r"put it in \boxed{}, so \boxed{7}", "7"),
        (r"\boxed{} \boxed{7}", "7"),
        (r"\boxed{7} as asked in \boxed{...}", "7"),
        (r"\boxed{1}, \boxed{ \ldots }, \boxed{2}", "1,2"),
        # The end of what no model writes.
        (r"\boxed{7}" + " " * 1_000_001, None),
        ("{" * 1_000_000 + r"\boxed{7}", "7"),
    ],
)
def test_last_boxed(text: str, content: str | None) -> None:
    assert last_boxed(text) == content
