"""Places that results must not take: devices, pipes, sockets, files and folders of somebody else's, links to them."""

import os
import socket
from pathlib import Path

import pytest

from exgrpo_cli.commands import run

FOLDERS = {
    "evaluate": ["evaluate", "arithmetic", "--endpoint", "http://127.0.0.1:1", "--model", "m"],
    "compare": ["evaluate", "--compare", "foreign", "foreign"],
    "train": ["train", "--steps", "1"],
    "ablate": ["ablate", "--methods", "grpo", "--seeds", "1"],
    "plan": ["ablate", "--methods", "grpo", "--seeds", "1", "--dry-run"],
    "pool": ["prepare", "--experience", "rollouts.jsonl"],
}
FILES = {"prepare": ["prepare"], "report": ["report", "foreign"]}
SPECIAL = ("/dev/null", "/dev/full", "pipe", "socket", "text.txt/x", "to-null", "to-pipe", "/proc/x", "n" * 300)
"""Places for neither a file nor a folder."""
CASES = [
    *((name, place) for name in (*FOLDERS, *FILES) for place in SPECIAL),
    *((name, place) for name in FOLDERS for place in ("text.txt", "to-text", "nowhere", "loop")),
    *((name, place) for name in ("evaluate", "train", "pool", *FILES) for place in ("foreign", "to-foreign", ".")),
    *((name, "text.txt") for name in FILES),
]


@pytest.fixture
def folder(workdir: Path) -> Path:
    """The working folder, with all that stands in the way."""
    os.mkfifo("pipe")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("socket")
    Path("text.txt").write_text("precious")
    Path("rollouts.jsonl").write_text('{"question": "1+1=?", "response": "2"}\n')
    Path("foreign").mkdir()
    Path("foreign/thesis.csv").write_text("precious")
    links = {"to-null": "/dev/null", "to-pipe": "pipe", "to-text": "text.txt", "to-foreign": "foreign"}
    for name, target in (links | {"nowhere": "not-there", "loop": "loop"}).items():
        Path(name).symlink_to(target)
    return workdir


def state(folder: Path) -> dict[str, object]:
    """Every name below with its kind, and what it holds or leads to."""
    found: dict[str, object] = {}
    for path in (*sorted(folder.rglob("*")), Path("/dev/null"), Path("/dev/full")):
        content = path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path)] = path.lstat().st_mode, content
    return found


@pytest.mark.parametrize(("name", "place"), CASES)
def test_what_stands_there_stays_and_is_named_before_work_starts(folder, capsys, name, place):
    before = state(folder)
    assert run([*(FOLDERS | FILES)[name], "--output", place]) == 2
    *_, line = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("exgrpo: ") and (place in line or "longer than a name may be" in line)
    assert state(folder) == before


def test_a_page_and_results_of_our_own_may_be_written_again(folder, capsys):
    Path("foreign/protocol.json").write_text("{}")
    assert run([*FOLDERS["compare"], "--output", "foreign"]) == 2
    assert "--output foreign holds results, whose table.md would be replaced" in capsys.readouterr().err
    Path("page.html").write_text("<!DOCTYPE html>")
    assert run(["report", "foreign", "--output", "page.html"]) == 2
    assert "foreign is neither a run" in capsys.readouterr().err
