"""Bounds on foreign bytes: counted while they come, over before they fill the memory, set by a variable."""

import io
import itertools
import time

import pytest

from exgrpo_cli.base.bounds import MEGABYTES, ROWS, bounded_lines, read_bounded
from exgrpo_cli.base.errors import InputError


def test_bytes_without_end_are_left_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXGRPO_MAX_MB", "0.5")
    given = 0

    def read(size: int) -> bytes:
        nonlocal given
        given += size
        return b"a" * size

    with pytest.raises(InputError, match=r"the reply is over the bound of 0.5 MB: .* EXGRPO_MAX_MB"):
        read_bounded(read, "the reply")
    assert 2**19 < given <= 2**19 + 2**16
    assert read_bounded(io.BytesIO(b"a" * 2**19).read1, "the reply") == b"a" * 2**19


def test_bytes_that_drip_end_in_time() -> None:
    def read(_: int) -> bytes:
        time.sleep(0.01)
        return b"a"

    with pytest.raises(InputError, match=r"the reply is not whole after 0.1 seconds"):
        read_bounded(read, "the reply", seconds=0.1)


@pytest.mark.parametrize(
    ("variable", "content", "message"),
    [
        ("EXGRPO_MAX_MB", b"12\n345\n6\n", r"file: line 2 is over the bound of 3\.\d*e-06 MB"),
        ("EXGRPO_MAX_ROWS", b"\n" * 8, r"file is over the bound of 3.\d+ rows"),
    ],
)
def test_lines_are_bounded(tmp_path, monkeypatch, variable, content, message) -> None:
    (tmp_path / "file").write_bytes(content)
    with (tmp_path / "file").open("rb") as lines:
        assert len(list(bounded_lines(lines.readline, tmp_path / "file"))) == content.count(b"\n")
    monkeypatch.setenv(variable, str(3.5 / (2**20 if "MB" in variable else 1)))
    with (tmp_path / "file").open("rb") as lines, pytest.raises(InputError, match=message):
        list(bounded_lines(lines.readline, tmp_path / "file"))


def test_what_is_packed_without_measure_is_refused(tmp_path, monkeypatch) -> None:
    """The lines of a small file come to more than a thousand times its size, and more than 256 MB."""
    (tmp_path / "file").write_bytes(b"x" * 1000)
    line = b"y" * 2**20
    lines, read = bounded_lines(lambda size: line, tmp_path / "file"), []
    with pytest.raises(
        InputError, match=r"what is packed in it is over the bound of 1,000 times its size .*MAX_GROWTH"
    ):
        read.extend(lines)
    assert len(read) == 256
    monkeypatch.setenv("EXGRPO_MAX_GROWTH", str(2**20))
    assert len(list(itertools.islice(bounded_lines(lambda size: line, tmp_path / "file"), 500))) == 500


@pytest.mark.parametrize("value", ["many", "0", "-1", "nan"])
def test_a_bound_is_a_positive_number(monkeypatch, value) -> None:
    monkeypatch.setenv("EXGRPO_MAX_ROWS", value)
    with pytest.raises(InputError, match=rf"EXGRPO_MAX_ROWS='{value}' is no bound: set it to a number of rows above 0"):
        ROWS.require("file", 1)
    assert MEGABYTES.value == 64
