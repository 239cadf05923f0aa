"""One writer, one reader, one appender: whole or absent, also where the disk refuses or the process is killed."""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from exgrpo_cli.base import files
from exgrpo_cli.base.errors import InputError, RunError
from exgrpo_cli.commands import run


@contextmanager
def full_disk() -> Iterator[None]:
    """A file size limit of 4 KiB stands for a full disk: the kernel refuses the write in the middle."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path, lines = tmp_path / "summary.json", tmp_path / "lines"
    files.write_text(path, "old")
    files.append_json_lines(lines, [{"step": 1}])
    refused = pytest.raises(RunError, match=r"cannot be written: File too large\. What was there before is unchanged")
    with full_disk(), refused:
        files.write_text(path, "x" * 100_000)
    with full_disk(), refused:
        files.append_json_lines(lines, [{"text": "x" * 100_000}])
    with pytest.raises(ZeroDivisionError):
        files.write_whole(path, lambda file: 1 / 0)
    assert path.read_text() == "old" and names(tmp_path) == ["lines", "summary.json"]
    assert list(files.read_json_lines(lines)) == [{"step": 1}]


def test_json_refuses_nan(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        files.write_json(tmp_path / "file", {"value": float("nan")})
    with pytest.raises(ValueError, match="JSON"):
        files.append_json_lines(tmp_path / "lines", [{"value": 1}, {"value": float("inf")}])
    assert names(tmp_path) == []
    files.write_json(tmp_path / "file", {"value": 1.5, "text": "ü"})
    assert json.loads((tmp_path / "file").read_text(encoding="utf-8")) == {"value": 1.5, "text": "ü"}


WRITE = """
import os, sys, time
from pathlib import Path
from exgrpo_cli.base.files import whole_folder, write_whole

def slowly(file):
    file.write(b"half")
    file.flush()
    print("writing", flush=True)
    time.sleep(60)

if sys.argv[2] == "file":
    write_whole(Path(sys.argv[1]), slowly)
else:
    with whole_folder(Path(sys.argv[1])) as partial, (partial / "one").open("wb") as file:
        slowly(file)
"""


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_killed_writer_leaves_what_was_there(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "thing"
    if kind == "file":
        files.write_text(path, "old")
    else:
        with files.whole_folder(path) as partial:
            (partial / "one").write_text("old")
    writer = subprocess.Popen([sys.executable, "-c", WRITE, str(path), kind], stdout=subprocess.PIPE)
    assert writer.stdout is not None and writer.stdout.readline() == b"writing\n"
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    assert (path if kind == "file" else path / "one").read_text() == "old"
    assert names(tmp_path) == [f".thing.partial-{files._host()}-{writer.pid}", "thing"]
    files.remove_partials(tmp_path)
    assert names(tmp_path) == ["thing"]


def test_the_next_writer_of_a_name_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    """And nothing else: neither another name's, nor what lives, nor what a process of another host may be writing."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    stays = [
        f".page.html.partial-{files._host()}-1",
        f".page.html.partial-00000000-{dead.pid}",
        f".other.html.partial-{files._host()}-{dead.pid}",
    ]
    for name in (*stays, f".page.html.partial-{files._host()}-{dead.pid}"):
        (tmp_path / name).write_text("half")
    files.write_text(tmp_path / "page.html", "whole")
    assert names(tmp_path) == sorted([*stays, "page.html"])


def fifo(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (fifo, "a device or a pipe"),
        (Path.mkdir, "a folder"),
        (lambda path: path.symlink_to("/dev/stdout"), "a device or a pipe"),
        (lambda path: path.symlink_to("/dev/full"), "a device or a pipe"),
    ],
    ids=["fifo", "folder", "link to /dev/stdout", "link to /dev/full"],
)
def test_a_file_takes_the_place_of_a_file_alone(tmp_path: Path, make, kind: str, capsys) -> None:
    path = tmp_path / "place"
    make(path)
    before = path.lstat()
    with pytest.raises(InputError, match=f"place is {kind}, where a file is to go: name another file"):
        files.write_text(path, "text")
    for command in (["report", str(tmp_path)], ["prepare", "arithmetic"]):
        assert run([*command, "--output", str(path)]) == 2 and str(path) in capsys.readouterr().err
    assert path.lstat().st_mode == before.st_mode and path.lstat().st_ino == before.st_ino


def test_a_link_to_a_file_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("precious")
    (tmp_path / "page.html").symlink_to(tmp_path / "theirs")
    files.write_text(tmp_path / "page.html", "page")
    assert (tmp_path / "theirs").read_text() == "precious" and not (tmp_path / "page.html").is_symlink()


@pytest.mark.parametrize("text", [b"\xff{}", b"[" * 100_000, b"{", b'{"a": 1' + b"9" * 5000 + b"}", None], ids=range(5))
def test_bytes_that_are_no_json_are_named(tmp_path: Path, text: bytes | None) -> None:
    path = tmp_path / "ledger.json"
    path.mkdir() if text is None else path.write_bytes(text)
    with pytest.raises(InputError, match=r"ledger.json (is not JSON|cannot be read|is no file).*restore it"):
        files.read_json(path)
    if text is not None:
        path.write_bytes(b'{"step": 1}\n' + text + b"\n")
        named = r"ledger.json, line 2 is not JSON \(.*\): remove the line, or restore the file from a copy"
        with pytest.raises(InputError, match=named):
            list(files.read_json_lines(path))
        assert files.last_json_line(path) in ({"step": 1}, None)
        path.write_bytes(b'{"step": 1}\n[2]\n')
        with pytest.raises(InputError, match=r"ledger.json, line 2 is no JSON object but \[2\]"):
            list(files.read_json_lines(path))


def test_a_folder_is_replaced_only_by_a_whole_one(tmp_path: Path) -> None:
    with files.whole_folder(tmp_path / "model") as partial:
        (partial / "weights").write_text("old")
    with pytest.raises(ZeroDivisionError), files.whole_folder(tmp_path / "model") as partial:
        (partial / "weights").write_text(str(1 / 0))
    assert (tmp_path / "model" / "weights").read_text() == "old" and names(tmp_path) == ["model"]
    with files.whole_folder(tmp_path / "model") as partial:
        (partial / "other").write_text("new")
    assert names(tmp_path / "model") == ["other"]


def test_lines_are_read_up_to_the_torn_one_and_appended_after_it_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    files.append_json_lines(path, [{"step": 1}, {"step": 2}])
    with path.open("a") as file:
        file.write('{"step": 3, "te')
    assert [row["step"] for row in files.read_json_lines(path)] == [1, 2]
    assert files.last_json_line(path) == {"step": 2}
    files.drop_torn_line(path)
    files.append_json_lines(path, [{"step": 3}])
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'
    files.drop_torn_line(path)
    assert files.last_json_line(path) == {"step": 3}
    # Of a long file the end alone is read.
    files.append_json_lines(path, ({"step": step, "text": "x" * 100} for step in range(1000)))
    assert files.last_json_line(path) == {"step": 999, "text": "x" * 100}
    assert files.last_json_line(tmp_path / "none") is None
