"""Graders as a user would write them."""

import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def user_graders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of graders as a user would write them, on the path of this process."""
    tmp_path.joinpath("graders_of_mine.py").write_text(
        textwrap.dedent(
            """
            import os, time
            from exgrpo_cli.base.types import Verdict

            def work():
                end = time.process_time() + 0.4
                while time.process_time() < end:
                    pass

            DEEDS = {
                "die": lambda gold: os.kill(os.getpid(), 9),
                "raise": lambda gold: 1 / 0,
                "hoard": lambda gold: [bytearray(8 << 20) for _ in range(9 ** 9)],
                "wait": lambda gold: time.sleep(float(gold)) or True,
                "work": lambda gold: work() or True,
                "hang": lambda gold: 9 ** 9 ** 9 ** 9,
                "verdict": lambda gold: Verdict.NO_ANSWER,
                "number": lambda gold: 0.5,
                "": lambda gold: print("noise on stdout") or True,
            }

            def by_command(gold, text):
                return next(deed for word, deed in DEEDS.items() if word in text)(gold)
            """
        )
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "python:graders_of_mine:by_command"
