"""Pools of graders for tests, answers for them, and what is left of their processes."""

import re
import time
from typing import Any

import psutil

from exgrpo_cli.base.types import AnswerFormat
from exgrpo_cli.config.sections.run import GradingSettings
from exgrpo_cli.grading import GradingItem, GradingPool

BOXED = AnswerFormat(opens_think=False, requires_box=True, require_eos=False)
ANY = AnswerFormat(opens_think=False, requires_box=False, require_eos=False)
TOWER = "9^{9^{9^9}}"
"""Hangs math-verify."""


def pool_of(
    grader: str = "math", *, deadline_seconds: float = 30, memory_mb: int = 512, **settings: Any
) -> GradingPool:
    limits = {"deadline_seconds": deadline_seconds, "memory_mb": memory_mb}
    settings = {"workers": 1, **settings}
    return GradingPool(GradingSettings(grader=grader, **limits, **settings))


def boxed(gold: str, answer: str) -> GradingItem:
    return GradingItem(gold=gold, response=rf"so \boxed{{{answer}}}", finished=True, answer_format=BOXED)


def plain(text: str, gold: str = "7") -> GradingItem:
    return GradingItem(gold=gold, response=text, finished=True, answer_format=ANY)


def supervisors() -> list[psutil.Process]:
    """Children of this process, without the server of a study's runs and its tracker, which other tests leave."""
    children = [each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE]
    return [each for each in children if not re.search("forkserver|resource_tracker", " ".join(each.cmdline()))]


def descendants() -> list[psutil.Process]:
    return [each for own in supervisors() for each in (own, *own.children(recursive=True))]


def assert_all_gone(processes: list[psutil.Process], *, within_seconds: float) -> None:
    deadline = time.monotonic() + within_seconds
    while alive := [process for process in processes if is_alive(process)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.02)


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs: orphans that nobody has collected yet are dead all the same."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
