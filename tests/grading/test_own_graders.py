"""Graders of the user's own: what they return, raise and print, and those that cannot be used."""

import threading
from pathlib import Path

import pytest
from grading_pools import boxed, descendants, plain, pool_of

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.types import Verdict


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
def test_users_grader_is_charged_for_what_it_does(user_graders: str, text: str, verdict: Verdict) -> None:
    with pool_of(user_graders, deadline_seconds=1, memory_mb=256) as pool:
        assert pool.grade([plain("ok 1"), plain(text), plain("ok 2")]) == [Verdict.CORRECT, verdict, Verdict.CORRECT]


def test_users_grader_writes_nothing_to_stdout(user_graders: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pool_of(user_graders, deadline_seconds=1, memory_mb=256) as pool:
        assert pool.grade([plain("fine")]) == [Verdict.CORRECT]
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
