"""What is on the screen before anything slow is imported."""

import subprocess
import sys
from pathlib import Path

import pytest

UP_TO_THE_FIRST_SLOW_IMPORT = """
import os, sys
from exgrpo_cli.base.output import SLOW

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name in SLOW:
            os._exit(7)

sys.meta_path.insert(0, Slow())
sys.argv = ["exgrpo", *sys.argv[1:]]
from exgrpo_cli.main import main
main()
"""


@pytest.mark.parametrize(
    "arguments",
    [["train"], ["evaluate", "arithmetic", "--model", "tiny"], ["ablate"], ["prepare"]],
    ids=lambda arguments: arguments[0],
)
def test_a_line_comes_before_what_is_slow_to_import(arguments: list[str], tmp_path: Path) -> None:
    def outcome(*more: str) -> tuple[int, str, str]:
        command = [sys.executable, "-c", UP_TO_THE_FIRST_SLOW_IMPORT, *arguments, *more]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        return done.returncode, done.stdout, done.stderr

    code, data, talk = outcome()
    assert (code, data, talk[:8]) == (7, "", "exgrpo: ")
    assert list(tmp_path.iterdir()) == []
    if arguments[0] == "train":
        assert outcome("--quiet") == (7, "", "")
        (tmp_path / "taken").mkdir()
        (tmp_path / "taken" / "config.toml").write_text("")
        code, data, talk = outcome("--output", "taken")
        # No headline of a run that is refused.
        assert (code, data, talk.count("exgrpo on tiny")) == (
            2,
            "",
            0,
        ) and "taken exists: choose another --output" in talk
