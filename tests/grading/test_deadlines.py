"""Answers that hang, wait or take too much memory: charged alone, tried again, bounded."""

import time
from pathlib import Path

import psutil
import pytest
from grading_pools import TOWER, boxed, descendants, plain, pool_of

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.types import Verdict

DEADLINE = 1.0


def test_hostile_answer_is_charged_alone_and_costs_one_deadline() -> None:
    with pool_of(deadline_seconds=DEADLINE) as pool:
        pool.grade([boxed("x", "y")])
        began = time.monotonic()
        verdicts = pool.grade([boxed("x^2", "x^2"), boxed("7", TOWER), boxed("x^2", "x^3"), boxed(r"\pi", r"\pi")])
        seconds = time.monotonic() - began
    assert verdicts == [Verdict.CORRECT, Verdict.TIMEOUT, Verdict.WRONG, Verdict.CORRECT]
    assert seconds >= DEADLINE


def test_waiting_is_not_held_against_an_answer(user_graders: str) -> None:
    # A deadline is of CPU time: a busy machine's doing is charged to no answer, up to 4 deadlines of wall time.
    with pool_of(user_graders, deadline_seconds=DEADLINE, memory_mb=256) as pool:
        seconds = ("2.5", "30", "0.6")
        items = [plain("wait", gold) for gold in seconds]
        began = time.monotonic()
        verdicts = [pool.grade([item])[0] for item in items]
        waited = time.monotonic() - began
    assert verdicts == [Verdict.CORRECT, Verdict.TIMEOUT, Verdict.CORRECT]
    assert waited >= 2.5 + 4 * DEADLINE + 0.6


def test_what_timed_out_is_tried_again_with_four_times_the_deadline(user_graders: str) -> None:
    # 0.4 s of work against 0.2 s, then 0.8 s.
    work = plain("work")
    hang = [plain("hang", gold) for gold in ("7", "8", "9")]
    with pool_of(user_graders, deadline_seconds=0.2, memory_mb=256) as pool:
        assert pool.grade([work, *hang]) == [Verdict.TIMEOUT] * 4
        (supervisor,) = psutil.Process().children()
        before = supervisor.cpu_times().children_user
        assert pool.try_again([hang[0], work, *hang[1:]]) == [Verdict.TIMEOUT, Verdict.CORRECT, *[Verdict.TIMEOUT] * 2]
        # The second and third time the same answer hangs it is not tried: one killed worker, of 0.8 s.
        assert supervisor.cpu_times().children_user - before < 1.5


def test_equal_text_is_correct_before_any_worker() -> None:
    with pool_of(deadline_seconds=DEADLINE) as pool:
        equal = [boxed(TOWER, TOWER), boxed("a(", "a(")]
        assert pool.grade(equal) == [Verdict.CORRECT] * 2
        assert descendants() == []
        # Nor does a worker parse what differs in white space alone.
        assert pool.grade([boxed(TOWER, f" {TOWER} "), boxed("a(", "a (")]) == [Verdict.CORRECT] * 2


def test_answer_that_hung_once_gets_less_time_against_the_next_gold() -> None:
    with pool_of(deadline_seconds=2.0) as pool:
        assert pool.grade([boxed("7", TOWER)]) == [Verdict.TIMEOUT]
        (supervisor,) = psutil.Process().children()
        before = supervisor.cpu_times().children_user
        # A tenth of a second of CPU time each, where 2 s / 32 would be less.
        assert pool.grade([boxed(gold, TOWER) for gold in ("8", "9")]) == [Verdict.TIMEOUT] * 2
        assert supervisor.cpu_times().children_user - before < 1.0


def test_number_too_large_for_memory_crashes_its_worker_and_is_not_called_wrong() -> None:
    # One allocation of 40 GB, which fails at once: math-verify takes MemoryError for an answer that does not parse.
    huge = "1E99999999999"
    with pool_of(deadline_seconds=20) as pool:
        assert pool.grade([boxed("7", huge), boxed("x", "x")]) == [Verdict.CRASHED, Verdict.CORRECT]
        assert pool.verify_gold([huge, "x^2"]) == [Verdict.CRASHED, Verdict.CORRECT]


def test_gold_that_hangs_is_not_held_against_the_next_one(user_graders: str) -> None:
    # An audit calls a user's grader with the gold as the text. 0.4 s of work is more than the 2 s / 32 of a suspect.
    with pool_of(user_graders, deadline_seconds=2.0, memory_mb=256) as pool:
        assert pool.verify_gold(["hang", "work"]) == [Verdict.TIMEOUT, Verdict.CORRECT]


def test_memory_cap_below_the_graders_own_need_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.joinpath("large_grader.py").write_text("held = bytearray(300 << 20)\ndef same(gold, text): return True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InputError, match=r"grading\.memory_mb is 256, but the grader itself holds 3[0-9][0-9] MiB"):
        pool_of("python:large_grader:same", memory_mb=256)
