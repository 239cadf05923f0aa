"""Command lines that are refused before work starts: one line, exit code 2, nothing on stdout and nothing written."""

import shlex
import tomllib
from pathlib import Path

import pytest

from exgrpo_cli.commands import run

REFUSED = tomllib.loads(Path(__file__).with_name("refused.toml").read_text())
REFUSED |= {f"train --steps {'9' * 5000}": "9... (5002 characters) Unable to parse"}
REFUSED |= {f"train --output {'a' * 300}": "is longer than a name may be"}
REFUSED |= {f"train --dry-run --set run.steps={'9' * 5000}": "a number that no setting has"}
REFUSED |= {f"train --dry-run --set run.steps=0x{'f' * 5000}": "thousands of digits is out of range"}
REFUSED |= {f"train --dry-run --set run.log={'[' * 5000}": "too deep"}
WORK = ("exgrpo: reading ", "exgrpo: asking ", "exgrpo: loading ")
"""Lines of what takes a while, before whatever comes of it."""


@pytest.fixture
def before(workdir: Path) -> list[Path]:
    """All that lies in the working folder, which some of the lines name; no GPU is there."""
    (workdir / "old/replay").mkdir(parents=True)
    (workdir / "taken").mkdir()
    (workdir / "taken/notes.txt").touch()
    (workdir / "set.jsonl").write_text('{"q": "What is 1 + 0?", "gold": "answer: 1"}\n')
    return sorted(workdir.rglob("*"))


@pytest.mark.parametrize(("line", "said"), REFUSED.items(), ids=[line[:60] for line in REFUSED])
def test_a_refusal_is_one_line(line: str, said: str, before: list[Path], tmp_path: Path, capsys) -> None:
    assert run(shlex.split(line)) == 2
    out, err = capsys.readouterr()
    told = [line for line in err.splitlines() if not line.startswith(WORK)]
    assert out == "" and len(told) == 1 and told[0].startswith("exgrpo: ") and said in told[0]
    assert len(err) < 1500
    assert sorted(tmp_path.rglob("*")) == before
