"""Bounds on foreign bytes: counted while they come, over before they fill the memory, set by a variable."""

import itertools

import pytest

from exgrpo_cli.base.bounds import MEGABYTES, ROWS, bounded_lines
from exgrpo_cli.base.errors import InputError


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


@pytest.mark.parametrize("value", ["many", "0", "-1", "nan", "inf", "1e300"])
def test_a_bound_is_a_positive_number(monkeypatch, value) -> None:
    monkeypatch.setenv("EXGRPO_MAX_ROWS", value)
    with pytest.raises(InputError, match=rf"EXGRPO_MAX_ROWS='{value}' is no bound: use a number of rows above 0"):
        ROWS.require("file", 1)
    assert MEGABYTES.value == 64
