"""Graders hold under hostile answers, signals, threads and forks: real processes, killed for real."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from exgrpo_cli.errors import InputError, RunError
from exgrpo_cli.grading import GradingItem, GradingPool
from exgrpo_cli.types import AnswerFormat, Verdict

FORMAT = AnswerFormat(opens_think=False, requires_box=True, require_eos=False)
ANY = AnswerFormat(opens_think=False, requires_box=False, require_eos=False)
TOWER = "9^{9^{9^9}}"
DEADLINE = 1.0


def boxed(gold: str, answer: str) -> GradingItem:
    return GradingItem(gold=gold, response=rf"so \boxed{{{answer}}}", finished=True, answer_format=FORMAT)


def math_pool(*, workers: int = 1, deadline_seconds: float = DEADLINE) -> GradingPool:
    return GradingPool(
        grader="math",
        workers=workers,
        deadline_seconds=deadline_seconds,
        memory_bytes=512 << 20,
        max_answer_chars=2000,
    )


@pytest.fixture
def user_graders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of graders as a user would write them, on the path of this process."""
    tmp_path.joinpath("graders_of_mine.py").write_text(
        textwrap.dedent(
            """
            import os
            from exgrpo_cli.types import Verdict

            def same(gold, text):
                return gold in text

            def by_command(gold, text):
                if "die" in text:
                    os.kill(os.getpid(), 9)
                if "raise" in text:
                    raise RuntimeError("a bug of the user's")
                if "hoard" in text:
                    hoard = []
                    while True:
                        hoard.append(bytearray(8 << 20))
                if "wait" in text:
                    import time
                    time.sleep(float(gold))
                    return True
                if "work" in text:
                    import time
                    end = time.process_time() + 0.4
                    while time.process_time() < end:
                        pass
                if "hang" in text:
                    9 ** 9 ** 9 ** 9
                if "verdict" in text:
                    return Verdict.NO_ANSWER
                if "number" in text:
                    return 0.5
                print("noise on stdout")
                return True
            """
        )
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "python:graders_of_mine:by_command"


def user_pool(grader: str, *, workers: int = 1, deadline_seconds: float = DEADLINE) -> GradingPool:
    return GradingPool(
        grader=grader,
        workers=workers,
        deadline_seconds=deadline_seconds,
        memory_bytes=256 << 20,
        max_answer_chars=2000,
    )


def plain(text: str) -> GradingItem:
    answer_format = AnswerFormat(opens_think=False, requires_box=False, require_eos=False)
    return GradingItem(gold="7", response=text, finished=True, answer_format=answer_format)


def descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def assert_all_gone(processes: list[psutil.Process], *, within_seconds: float) -> None:
    _, alive = psutil.wait_procs(processes, timeout=within_seconds)
    # Orphans that nobody has collected yet are dead all the same.
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


def test_hostile_answer_is_charged_alone_and_costs_one_deadline() -> None:
    with math_pool() as pool:
        pool.grade([boxed("x", "y")])
        began = time.monotonic()
        verdicts = pool.grade([boxed("x^2", "x^2"), boxed("7", TOWER), boxed("x^2", "x^3"), boxed(r"\pi", r"\pi")])
        seconds = time.monotonic() - began
    assert verdicts == [Verdict.CORRECT, Verdict.TIMEOUT, Verdict.WRONG, Verdict.CORRECT]
    assert seconds >= DEADLINE


def test_waiting_is_not_held_against_an_answer(user_graders: str) -> None:
    # A deadline is of processor time: a busy machine's doing is charged to no answer, but to 4 deadlines on the clock.
    with user_pool(user_graders) as pool:
        seconds = ("2.5", "30", "0.6")
        items = [GradingItem(gold=gold, response="wait", finished=True, answer_format=ANY) for gold in seconds]
        began = time.monotonic()
        verdicts = [pool.grade([item])[0] for item in items]
        waited = time.monotonic() - began
    assert verdicts == [Verdict.CORRECT, Verdict.TIMEOUT, Verdict.CORRECT]
    assert waited >= 2.5 + 4 * DEADLINE + 0.6


def test_what_timed_out_is_tried_again_with_four_times_the_deadline(user_graders: str) -> None:
    # 0.4 s of work against 0.2 s, then 0.8 s.
    work = GradingItem(gold="7", response="work", finished=True, answer_format=ANY)
    hang = [GradingItem(gold=gold, response="hang", finished=True, answer_format=ANY) for gold in ("7", "8", "9")]
    with user_pool(user_graders, deadline_seconds=0.2) as pool:
        assert pool.grade([work, *hang]) == [Verdict.TIMEOUT] * 4
        (supervisor,) = psutil.Process().children()
        before = supervisor.cpu_times().children_user
        assert pool.try_again([hang[0], work, *hang[1:]]) == [Verdict.TIMEOUT, Verdict.CORRECT, *[Verdict.TIMEOUT] * 2]
        # The second and third time the same answer hangs it is not tried: one killed worker, of 0.8 s.
        assert supervisor.cpu_times().children_user - before < 1.5


def test_equal_text_is_correct_before_any_worker() -> None:
    with math_pool() as pool:
        equal = [boxed(TOWER, TOWER), boxed("a(", "a ("), boxed(r"\frac{1}{2}E_{1}", r"\frac{1}{2} E_{1}")]
        assert [pool.submit(item).done() for item in equal] == [True] * 3
        assert pool.grade(equal) == [Verdict.CORRECT] * 3
        assert descendants() == []


def test_answer_that_hung_once_gets_less_time_against_the_next_gold() -> None:
    with math_pool(deadline_seconds=4.0) as pool:
        assert pool.grade([boxed("7", TOWER)]) == [Verdict.TIMEOUT]
        (supervisor,) = psutil.Process().children()
        before = supervisor.cpu_times().children_user
        # 4 s / 32 of processor time each.
        assert pool.grade([boxed("8", TOWER), boxed("9", TOWER)]) == [Verdict.TIMEOUT] * 2
        assert supervisor.cpu_times().children_user - before < 2.0


def test_number_too_large_for_memory_crashes_its_worker_and_is_not_called_wrong() -> None:
    # One allocation of 40 GB, which fails at once: math-verify takes MemoryError for an answer that does not parse.
    huge = "1E99999999999"
    with math_pool(deadline_seconds=20) as pool:
        assert pool.grade([boxed("7", huge), boxed("x", "x")]) == [Verdict.CRASHED, Verdict.CORRECT]
        assert pool.verify_gold([huge, "x^2"]) == [Verdict.CRASHED, Verdict.CORRECT]


def test_answer_held_by_two_workers_costs_one_deadline() -> None:
    with math_pool(workers=2, deadline_seconds=2.0) as pool:
        pool.grade([boxed("x", "y")])
        (supervisor,) = psutil.Process().children()
        before = supervisor.cpu_times().children_user
        first = pool.submit(boxed("7", TOWER))
        time.sleep(1)
        second = pool.submit(boxed("8", TOWER))
        assert first.result() is second.result() is Verdict.TIMEOUT
        # Not 4 s of work: one deadline left the other 2 s / 32 more than it had used.
        assert supervisor.cpu_times().children_user - before < 3.8


def test_gold_that_hangs_is_not_held_against_the_next_one(user_graders: str) -> None:
    # An audit calls a user's grader with the gold as the text. 0.4 s of work is more than the 2 s / 32 of a suspect.
    with user_pool(user_graders, deadline_seconds=2.0) as pool:
        assert pool.verify_gold(["hang", "work"]) == [Verdict.TIMEOUT, Verdict.CORRECT]


def test_pool_leaves_no_process_and_no_answer_behind() -> None:
    with math_pool(workers=2, deadline_seconds=30) as pool:
        late = pool.submit(boxed("7", TOWER))
        pool.grade([boxed("x", "y")])
        processes = descendants()
        assert len(processes) == 3, "one supervisor and two workers"
    assert_all_gone(processes, within_seconds=5)
    with pytest.raises(RunError, match="closed before this answer was graded"):
        late.result(timeout=5)
    with pytest.raises(RunError, match="pool is closed"):
        pool.submit(boxed("7", "7"))


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
    with user_pool(user_graders) as pool:
        assert pool.grade([plain("ok 1"), plain(text), plain("ok 2")]) == [Verdict.CORRECT, verdict, Verdict.CORRECT]


def test_users_grader_writes_nothing_to_stdout(user_graders: str, capfd: pytest.CaptureFixture[str]) -> None:
    with user_pool(user_graders) as pool:
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
        user_pool(grader)
    assert descendants() == []


def test_memory_cap_below_the_graders_own_need_is_refused() -> None:
    with (
        GradingPool(grader="math", workers=1, deadline_seconds=1, memory_bytes=16 << 20, max_answer_chars=2000) as pool,
        pytest.raises(InputError, match=r"grading\.memory_mb is 16, but the grader itself holds"),
    ):
        pool.grade([boxed("x", "y")])


def test_killed_worker_charges_only_the_answer_it_held(user_graders: str) -> None:
    with user_pool(user_graders, deadline_seconds=60) as pool:
        (supervisor,) = psutil.Process().children()
        held = pool.submit(plain("hang"))
        waiting = pool.submit(plain("fine"))
        time.sleep(0.3)
        supervisor.children()[0].send_signal(signal.SIGKILL)
        assert held.result(timeout=20) is Verdict.CRASHED
        assert waiting.result(timeout=20) is Verdict.CORRECT


def test_killed_supervisor_is_replaced_and_charges_nothing(user_graders: str) -> None:
    with user_pool(user_graders, workers=2, deadline_seconds=2) as pool:
        (supervisor,) = psutil.Process().children()
        workers = supervisor.children()
        held = pool.submit(plain("hang"))
        time.sleep(0.3)
        supervisor.send_signal(signal.SIGKILL)
        assert_all_gone(workers, within_seconds=5)
        assert pool.grade([plain("fine")]) == [Verdict.CORRECT]
        # Graded again from the start by the new supervisor.
        assert held.result(timeout=30) is Verdict.TIMEOUT


def test_supervisor_that_cannot_live_is_given_up(user_graders: str) -> None:
    with user_pool(user_graders, deadline_seconds=60) as pool:
        held = pool.submit(plain("hang"))
        killed: set[int] = set()
        while len(killed) < 3:
            for supervisor in psutil.Process().children():
                if supervisor.pid not in killed:
                    killed.add(supervisor.pid)
                    supervisor.send_signal(signal.SIGKILL)
            time.sleep(0.01)
        with pytest.raises(RunError, match="supervisor died with exit code -9"):
            held.result(timeout=10)


PARENT = """
import os, time
from helpers_of_child import item, pool_of
if __name__ == "__main__":
    pool = pool_of(workers=2, deadline_seconds=600)
    hanging = [pool.submit(item("hang")), pool.submit(item("hang, too"))]
    {before}
    print("ready", flush=True)
    hanging[0].result()
"""
HELPERS = """
from exgrpo_cli.grading import GradingItem, GradingPool
from exgrpo_cli.types import AnswerFormat
FORMAT = AnswerFormat(opens_think=False, requires_box=False, require_eos=False)
def item(text):
    return GradingItem(gold="7", response=text, finished=True, answer_format=FORMAT)
def pool_of(*, workers, deadline_seconds):
    return GradingPool(grader="python:graders_of_mine:by_command", workers=workers, deadline_seconds=deadline_seconds,
                       memory_bytes=256 << 20, max_answer_chars=2000)
"""


def run_script(folder: Path, script: str) -> "subprocess.Popen[str]":
    """A process of its own session that runs `script` beside the user's graders in `folder`."""
    folder.joinpath("helpers_of_child.py").write_text(HELPERS)
    folder.joinpath("script.py").write_text(script)
    return subprocess.Popen(
        [sys.executable, str(folder / "script.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )


def start_parent(folder: Path, *, before: str = "") -> tuple["subprocess.Popen[str]", list[psutil.Process]]:
    """A process that is grading two answers which never end, with all its descendants."""
    parent = run_script(folder, PARENT.format(before=before))
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    processes = psutil.Process(parent.pid).children(recursive=True)
    assert len(processes) >= 3
    return parent, processes


def test_kill_9_of_the_parent_leaves_no_process(user_graders: str, tmp_path: Path) -> None:
    parent, processes = start_parent(tmp_path)
    parent.kill()
    parent.communicate()
    assert_all_gone(processes, within_seconds=5)


def test_kill_9_of_the_parent_leaves_no_process_though_a_forked_child_lives_on(
    user_graders: str, tmp_path: Path
) -> None:
    live_on = "child = os.fork(); child or (os.close(1), os.close(2), time.sleep(30), os._exit(0))"
    parent, processes = start_parent(tmp_path, before=live_on)
    child = next(process for process in processes if process.cmdline()[-1].endswith("script.py"))
    parent.kill()
    parent.communicate()
    assert_all_gone([process for process in processes if process != child], within_seconds=5)
    assert child.is_running()
    child.kill()


def test_ctrl_c_reaches_the_parent_alone_and_leaves_no_process(user_graders: str, tmp_path: Path) -> None:
    # A suite started in the background of a shell inherits that SIGINT is ignored; a terminal's Ctrl-C is not.
    parent, processes = start_parent(tmp_path, before="import signal; signal.signal(2, signal.default_int_handler)")
    os.killpg(parent.pid, signal.SIGINT)
    _, stderr = parent.communicate(timeout=10)
    assert stderr.count("KeyboardInterrupt") == 1
    assert_all_gone(processes, within_seconds=5)


def test_the_working_directory_hides_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("json", "random", "sympy"):
        tmp_path.joinpath(f"{name}.py").write_text("raise SystemExit('a script of the user')")
    monkeypatch.chdir(tmp_path)
    with math_pool() as pool:
        assert pool.grade([boxed("x", "x")]) == [Verdict.CORRECT]


def test_many_threads_share_a_pool(user_graders: str) -> None:
    verdicts: dict[int, list[Verdict]] = {}

    def grade(thread: int) -> None:
        verdicts[thread] = pool.grade([plain(f"fine {number}") for number in range(20)])

    with user_pool(user_graders, workers=2) as pool:
        threads = [threading.Thread(target=grade, args=(thread,)) for thread in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert verdicts == {thread: [Verdict.CORRECT] * 20 for thread in range(4)}


FORKING = """
import multiprocessing
from helpers_of_child import item, pool_of

def grade(queue):
    queue.put([verdict.value for verdict in pool.grade([item("fine"), item("hang")])])
    pool.close()

# Under spawn the child imports this file and opens a pool of its own.
pool = pool_of(workers=1, deadline_seconds=1)
if __name__ == "__main__":
    hanging = pool.submit(item("hang"))
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        queue = context.SimpleQueue()
        process = context.Process(target=grade, args=(queue,))
        process.start()
        print(method, queue.get(), flush=True)
        process.join()
        print(process.exitcode)
    print("parent", pool.grade([item("fine")])[0].value, hanging.result().value)
    pool.close()
"""


def test_pool_works_in_forked_and_spawned_children_and_still_in_the_parent(user_graders: str, tmp_path: Path) -> None:
    stdout, stderr = run_script(tmp_path, FORKING).communicate(timeout=60)
    assert stdout.splitlines() == [
        "fork ['correct', 'timeout']",
        "0",
        "spawn ['correct', 'timeout']",
        "0",
        "parent correct timeout",
    ], stderr
