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
            import os
            from exgrpo_cli.base.types import Verdict

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
