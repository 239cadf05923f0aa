"""Workers, supervisors and parents killed for real, answers that hang, wait or take too much memory: nothing lives on,
and only the answer at fault is charged."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from grading_pools import TOWER, assert_all_gone, boxed, descendants, is_alive, plain, pool_of, supervisors

from exgrpo_cli.base.errors import InputError, RunError
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
        (supervisor,) = supervisors()
        before = supervisor.cpu_times().children_user
        assert pool.try_again([hang[0], work, *hang[1:]]) == [Verdict.TIMEOUT, Verdict.CORRECT, *[Verdict.TIMEOUT] * 2]
        # The second and third time the same answer hangs it is not tried: one killed worker, of 0.8 s.
        assert supervisor.cpu_times().children_user - before < 1.5


def test_equal_text_is_correct_before_any_worker() -> None:
    with pool_of(deadline_seconds=DEADLINE) as pool:
        assert pool.grade([boxed(TOWER, TOWER), boxed("a(", "a(")]) == [Verdict.CORRECT] * 2
        assert descendants() == []
        # Nor does a worker parse what differs in white space alone.
        assert pool.grade([boxed(TOWER, f" {TOWER} "), boxed("a(", "a (")]) == [Verdict.CORRECT] * 2


def test_answer_that_hung_once_gets_less_time_against_the_next_gold() -> None:
    with pool_of(deadline_seconds=2.0) as pool:
        assert pool.grade([boxed("7", TOWER)]) == [Verdict.TIMEOUT]
        (supervisor,) = supervisors()
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


def test_pool_leaves_no_process_and_no_answer_behind() -> None:
    with pool_of(workers=2, deadline_seconds=30) as pool:
        late = pool.submit(boxed("7", TOWER))
        pool.grade([boxed("x", "y")])
        processes = descendants()
        assert len(processes) == 3, "one supervisor and two workers"
    assert_all_gone(processes, within_seconds=60)
    with pytest.raises(RunError, match="closed before this answer was graded"):
        late.result(timeout=120)
    with pytest.raises(RunError, match="pool is closed"):
        pool.submit(boxed("7", "7"))


def test_killed_worker_charges_only_the_answer_it_held(user_graders: str) -> None:
    with pool_of(user_graders, deadline_seconds=60, memory_mb=256) as pool:
        assert pool.grade([plain("fine")]) == [Verdict.CORRECT]
        (supervisor,) = supervisors()
        (worker,) = supervisor.children()
        idle = worker.cpu_times().user
        held = pool.submit(plain("hang"))
        waiting = pool.submit(plain("fine"))
        while worker.cpu_times().user < idle + 0.3:
            time.sleep(0.01)
        worker.send_signal(signal.SIGKILL)
        assert held.result(timeout=120).verdict is Verdict.CRASHED
        assert waiting.result(timeout=120).verdict is Verdict.CORRECT


def test_killed_supervisor_is_replaced_and_charges_nothing(user_graders: str) -> None:
    with pool_of(user_graders, workers=2, deadline_seconds=2, memory_mb=256) as pool:
        (supervisor,) = supervisors()
        workers = supervisor.children()
        held = pool.submit(plain("hang"))
        time.sleep(0.3)
        supervisor.send_signal(signal.SIGKILL)
        assert_all_gone(workers, within_seconds=60)
        assert pool.grade([plain("fine")]) == [Verdict.CORRECT]
        # Graded again from the start by the new supervisor.
        assert held.result(timeout=120).verdict is Verdict.TIMEOUT


def test_supervisor_that_cannot_live_is_given_up(user_graders: str) -> None:
    with pool_of(user_graders, deadline_seconds=60, memory_mb=256) as pool:
        held = pool.submit(plain("hang"))
        killed: set[int] = set()
        while len(killed) < 3:
            for supervisor in supervisors():
                if supervisor.pid not in killed:
                    killed.add(supervisor.pid)
                    supervisor.send_signal(signal.SIGKILL)
            time.sleep(0.01)
        with pytest.raises(RunError, match="supervisor died with exit code -9"):
            held.result(timeout=120)


PARENT = """
import os, time
from grading_pools import plain, pool_of
if __name__ == "__main__":
    pool = pool_of("python:graders_of_mine:by_command", workers=2, deadline_seconds=600, memory_mb=256)
    hanging = [pool.submit(plain("hang")), pool.submit(plain("hang, too"))]
    {before}
    print("ready", flush=True)
    hanging[0].result()
"""


def run_script(folder: Path, script: str) -> "subprocess.Popen[str]":
    """A process of its own session that runs `script` beside the user's graders in `folder`."""
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
    assert parent.stdout is not None and parent.stdout.readline() == "ready\n"
    processes = psutil.Process(parent.pid).children(recursive=True)
    assert len(processes) >= 3
    return parent, processes


def test_kill_9_of_the_parent_leaves_no_process_though_a_forked_child_lives_on(
    user_graders: str, tmp_path: Path
) -> None:
    live_on = "child = os.fork(); child or (os.close(1), os.close(2), time.sleep(600), os._exit(0))"
    parent, processes = start_parent(tmp_path, before=live_on)
    child = next(process for process in processes if process.cmdline()[-1].endswith("script.py"))
    parent.kill()
    parent.communicate()
    try:
        assert_all_gone([process for process in processes if process != child], within_seconds=60)
        assert is_alive(child)
    finally:
        child.kill()


def test_ctrl_c_reaches_the_parent_alone_and_leaves_no_process(user_graders: str, tmp_path: Path) -> None:
    # A suite started in the background of a shell inherits that SIGINT is ignored; a terminal's Ctrl-C is not.
    parent, processes = start_parent(tmp_path, before="import signal; signal.signal(2, signal.default_int_handler)")
    os.killpg(parent.pid, signal.SIGINT)
    _, stderr = parent.communicate(timeout=120)
    assert stderr.count("KeyboardInterrupt") == 1
    assert_all_gone(processes, within_seconds=60)


FORKING = """
import multiprocessing
from grading_pools import plain, pool_of

def grade(queue):
    queue.put([verdict.value for verdict in pool.grade([plain("fine"), plain("hang")])])
    pool.close()

# Under spawn the child imports this file and opens a pool of its own.
pool = pool_of("python:graders_of_mine:by_command", deadline_seconds=1, memory_mb=256)
if __name__ == "__main__":
    hanging = pool.submit(plain("hang"))
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        queue = context.SimpleQueue()
        process = context.Process(target=grade, args=(queue,))
        process.start()
        print(method, queue.get(), flush=True)
        process.join()
        print(process.exitcode)
    print("parent", pool.grade([plain("fine")])[0].value, hanging.result().verdict.value)
    pool.close()
"""


def test_pool_works_in_forked_and_spawned_children_and_still_in_the_parent(user_graders: str, tmp_path: Path) -> None:
    stdout, stderr = run_script(tmp_path, FORKING).communicate(timeout=120)
    assert stdout.splitlines() == [
        "fork ['correct', 'timeout']", "0", "spawn ['correct', 'timeout']", "0", "parent correct timeout",
    ], stderr  # fmt: skip
