"""Graders of the user's own: what they return, raise and print; verifiers that questions bring."""

import threading
from pathlib import Path

import pytest
from grading_pools import boxed, descendants, plain, pool_of

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.types import AnswerFormat, Verdict
from exgrpo_cli.grading.routes import GradingItem, Route, route_item
from exgrpo_cli.grading.verifiers import load_own


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("fine", Verdict.CORRECT),
        ("verdict", Verdict.NO_ANSWER),
        ("die", Verdict.CRASHED),
        ("raise", Verdict.CRASHED),
        ("number", Verdict.CRASHED),
        ("hoard", Verdict.CRASHED),
        ("hang", Verdict.TIMEOUT),
    ],
)
def test_users_grader_is_charged_for_what_it_does_and_writes_nothing_to_stdout(
    user_graders: str, text: str, verdict: Verdict, capfd: pytest.CaptureFixture[str]
) -> None:
    with pool_of(user_graders, deadline_seconds=1, memory_mb=256) as pool:
        assert pool.grade([plain("ok 1"), plain(text), plain("ok 2")]) == [Verdict.CORRECT, verdict, Verdict.CORRECT]
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("grader", "message"),
    [
        ("python:graders_of_mine", "write python:module:function"),
        ("python:no_such_module:grade", "cannot import no_such_module"),
        ("python:graders_of_mine:no_such", "graders_of_mine has no function no_such"),
    ],
)
def test_unusable_grader_is_refused_before_work_starts(user_graders: str, grader: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        pool_of(grader, deadline_seconds=1, memory_mb=256)
    assert descendants() == []


def test_the_working_directory_hides_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("json", "random", "sympy"):
        tmp_path.joinpath(f"{name}.py").write_text("raise SystemExit('a script of the user')")
    monkeypatch.chdir(tmp_path)
    with pool_of() as pool:
        assert pool.grade([boxed("x", "x")]) == [Verdict.CORRECT]


def test_many_threads_share_a_pool(user_graders: str) -> None:
    verdicts: dict[int, list[Verdict]] = {}

    def grade(thread: int) -> None:
        verdicts[thread] = pool.grade([plain(f"fine {number}") for number in range(20)])

    with pool_of(user_graders, workers=2, memory_mb=256) as pool:
        threads = [threading.Thread(target=grade, args=(thread,)) for thread in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert verdicts == {thread: [Verdict.CORRECT] * 20 for thread in range(4)}


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
    exact, own = (Route(grader=grader, max_answer_chars=100) for grader in ("exact", "python:m:f"))
    assert route_item(exact, item("</think>\n\\boxed{4+8*3-2}")) is Verdict.WRONG
    assert route_item(own, item("</think>\n\\boxed{1}")).metadata == COUNTDOWN


def test_an_unknown_verifier_is_named():
    with pytest.raises(InputError, match="the verifier 'judge', which is not known: use 'countdown' or 'gym:TASK'"):
        route_item(Route(grader="math", max_answer_chars=100), item("</think>\n\\boxed{1}", '{"verifier": "judge"}'))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ('{"verifier": "countdown", "target": 6}', "needs whole numbers in metadata.numbers, not None"),
        (
            '{"verifier": "countdown", "numbers": "2 3", "target": 6}',
            "needs whole numbers in metadata.numbers, not '2 3'",
        ),
        ('{"verifier": "countdown", "numbers": [2, [3]], "target": 6}', "needs whole numbers in metadata.numbers"),
        ('{"verifier": "countdown", "numbers": [2, 3]}', "needs a number in metadata.target, not None"),
        ('{"verifier": "countdown", "numbers": [2], "target": ' + "9" * 5000 + "}", "metadata .* cannot be read"),
        ('{"verifier": ' + "[" * 100_000, "metadata .* cannot be read"),
        ("[2, 3]", "is no JSON table"),
        ('{"verifier": "gym:lcm"}', "needs the task's own table in metadata.entry"),
    ],
)
def test_metadata_that_a_verifier_cannot_read_are_refused_in_one_line(metadata: str, message: str) -> None:
    if "gym" in metadata:
        pytest.importorskip("reasoning_gym")
    with pytest.raises(InputError, match=message) as refusal:
        route_item(Route(grader="math", max_answer_chars=100), item("</think>\n\\boxed{1}", metadata))
    assert len(str(refusal.value)) < 300 and "\n" not in str(refusal.value)


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
