"""Questions that bring their own verifier, and graders of one's own that ask for a question's metadata."""

import pytest

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.types import AnswerFormat, Verdict
from exgrpo_cli.grading.routes import GradingItem, Route, route_item
from exgrpo_cli.grading.verifiers import load_own

COUNTDOWN = '{"verifier": "countdown", "numbers": [2, 3, 4, 8], "target": 26}'


def item(response, metadata=COUNTDOWN):
    answer_format = AnswerFormat(opens_think=True, requires_box=True, require_eos=True)
    return GradingItem(gold="8*3+4-2", response=response, finished=True, answer_format=answer_format, metadata=metadata)


def test_math_grades_and_audits_by_the_questions_own_verifier():
    route = Route(grader="math", max_answer_chars=100)
    assert route_item(route, item("so\n</think>\n\\boxed{4+8*3-2}")) is Verdict.CORRECT
    # 26 is what the gold comes to, and no way to get there.
    assert route_item(route, item("</think>\n\\boxed{26}")) is Verdict.WRONG
    assert route_item(route, item("8*3+4-2")) is Verdict.NO_ANSWER
    assert route.audit("8*3+4-2", COUNTDOWN) is Verdict.CORRECT
    assert route.audit("8*3+4", COUNTDOWN) is Verdict.WRONG


def test_a_grader_that_was_chosen_is_used_as_chosen():
    assert route_item(Route(grader="exact", max_answer_chars=100), item("</think>\n\\boxed{4+8*3-2}")) is Verdict.WRONG
    assert (
        route_item(Route(grader="python:m:f", max_answer_chars=100), item("</think>\n\\boxed{1}")).metadata == COUNTDOWN
    )


def test_an_unknown_verifier_is_named():
    with pytest.raises(
        InputError, match="name the verifier 'judge', which is not known: use 'countdown' or 'gym:TASK'"
    ):
        route_item(Route(grader="math", max_answer_chars=100), item("</think>\n\\boxed{1}", '{"verifier": "judge"}'))


def test_a_grader_of_ones_own_gets_the_metadata_it_asks_for(tmp_path, monkeypatch):
    (tmp_path / "graders_with_metadata.py").write_text(
        "def near(gold, text, metadata):\n    return int(text) == metadata.get('target')\n"
        "def plain(gold, text):\n    return gold == text\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    near, plain = (load_own(f"python:graders_with_metadata:{name}") for name in ("near", "plain"))
    assert near("x", "26", COUNTDOWN) is Verdict.CORRECT and near("x", "26", None) is Verdict.WRONG
    assert plain("x", "x", COUNTDOWN) is Verdict.CORRECT
