"""Files of every format: packed or not, rows inside an object, damaged, of other systems; each named when wrong."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from question_sources import PACK, pairs, read, text_of, write

from exgrpo_cli.base import data, errors
from exgrpo_cli.commands import run
from exgrpo_cli.questions.files import iter_rows

ROWS = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(3)]


@pytest.mark.parametrize(
    "suffix", [".parquet", *(text + packed for text in (".jsonl", ".json", ".csv", ".tsv") for packed in PACK)]
)
def test_a_format_is_read_packed_or_not_as_a_file_and_in_a_folder(tmp_path, suffix):
    folder = tmp_path / "set"
    path = write(folder / f"data/train-00000-of-00001{suffix}", *ROWS)
    expected = [(row["question"], row["answer"]) for row in ROWS]
    assert pairs(read(path)) == pairs(read(folder)) == expected
    write(folder / f"data/test.en{suffix}", {"question": "And 7?", "answer": "7"})
    assert pairs(read(f"{folder}:test")) == pairs(read(f"{folder}:data/test.en{suffix}")) == [("And 7?", "7")]
    # A second part belongs to the same split, and a missing one is noticed.
    path = path.rename(folder / f"data/train-00000-of-00002{suffix}")
    with pytest.raises(errors.InputError, match="has 1 of the 2 parts of data/train"):
        read(folder)
    write(folder / f"data/train-00001-of-00002{suffix}", {"question": "And 8?", "answer": "8"})
    assert pairs(read(folder)) == [*expected, ("And 8?", "8")]


def test_lines_and_parts_put_together_by_cat_are_one_file(tmp_path):
    one, two = (json.dumps(row).encode() + b"\n" for row in ROWS[:2])
    for name, pack in (("a.jsonl.gz", PACK[".gz"]), ("a.jsonl.zst", PACK[".zst"])):
        (tmp_path / name).write_bytes(pack(one) + pack(two))
        assert [row for _, row in iter_rows(tmp_path / name)] == ROWS[:2]


# A changed byte is noticed by gzip, which adds up what it packs; zstd adds that only where it is asked to.
@pytest.mark.parametrize(
    ("suffix", "harm"), [(".gz", "cut"), (".zst", "cut"), (".gz", "other"), (".zst", "other"), (".gz", "flipped")]
)
def test_a_damaged_packed_file_is_one_line(tmp_path, capsys, suffix, harm):
    text = text_of(".jsonl", *ROWS).encode() * 500
    data = PACK[suffix](text)
    half, rest = data[: len(data) // 2], data[len(data) // 2 + 8 :]
    path = tmp_path / f"set.jsonl{suffix}"
    path.write_bytes({"cut": half, "other": text, "flipped": half + b"\xff" * 8 + rest}[harm])
    code = run(["prepare", str(path), "--output", str(tmp_path / "out.parquet"), "--quiet"])
    said = capsys.readouterr().err
    assert (code, str(path) in said, said.count("\n")) == (2, True, 1)
    assert not (tmp_path / "out.parquet").exists()


@pytest.mark.parametrize(
    "text",
    [
        '{"data": %s}',
        ' {\n "version": "1.0 \\"beta\\"", "count": 3, "ok": true,\n"data": %s }\n',
        '{"questions": %s, "licence": {"name": "CC"}}',
    ],
)
def test_rows_inside_an_object(tmp_path, text):
    (tmp_path / "set.json").write_text(text % json.dumps(ROWS))
    assert [row for _, row in iter_rows(tmp_path / "set.json")] == ROWS
    # A row whose own columns hold lists is a row.
    row = {"prompt": [{"role": "user", "content": "Sum?"}], "answer": "7", "data": [1]}
    (tmp_path / "set.json").write_text(json.dumps(row))
    assert [found for _, found in iter_rows(tmp_path / "set.json")] == [row]


WRONG = data.tables(__file__, "cases.toml")["wrong_files"] | {
    "line 2 is not JSON .*utf-8": ("set.jsonl", b'{"question": "What?"}\n{"question": "Caf\xe9?"}\n'),
    "line 2 is not JSON .*recursion": ("set.jsonl", '{"a": 1}\n' + '{"a":' * 100_000),
    "set.json is not JSON .*recursion": ("set.json", '{"a":' * 100_000),
    "line 1 is not JSON .*limit .*for integer string": ("set.jsonl", '{"answer": %s}' % ("9" * 5000)),
    "cannot be read .*UTF-8": ("set.csv", b"question,answer\n\xff\xfe,1\n"),
    r"the suffix '.gz': questions are .*\.gz and \.zst": ("set.parquet.gz", gzip.compress(b"PAR1", mtime=0)),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_file_names_itself_and_the_row(tmp_path, message):
    name, content = WRONG[message]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(errors.InputError, match=message) as raised:
        read(tmp_path / name)
    assert str(tmp_path / name) in str(raised.value)


def test_a_parquet_column_that_stands_twice_is_refused(tmp_path):
    columns = [pa.array(["a"]), pa.array(["1"]), pa.array(["b"])]
    pq.write_table(pa.Table.from_arrays(columns, names=["question", "answer", "question"]), tmp_path / "set.parquet")
    with pytest.raises(errors.InputError, match="has several columns named 'question'"):
        read(tmp_path / "set.parquet")


def test_spaces_after_commas_and_columns_without_a_name_are_left_aside(tmp_path):
    # The first column as pandas writes its index, the last two as a spreadsheet does.
    (tmp_path / "set.csv").write_text(',question, answer,,\n0,"What, is it?", "1, 2",,\n')
    assert pairs(read(tmp_path / "set.csv")) == [("What, is it?", "1, 2")]


def test_marks_and_line_ends_of_other_systems(tmp_path):
    lines = [json.dumps({"question": f"{n}?", "answer": str(n)}) for n in (1, 2)]
    (tmp_path / "set.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode() + b"\r\n\r\n")
    (tmp_path / "set.csv").write_bytes(b'\xef\xbb\xbfquestion,answer\r\n"1?",1\r\n"2?",2\r\n')
    (tmp_path / "set.json").write_bytes(b"\xef\xbb\xbf[" + ",\r\n".join(lines).encode() + b"]\r\n")
    for name in ("set.jsonl", "set.csv", "set.json"):
        assert pairs(read(tmp_path / name)) == [("1?", "1"), ("2?", "2")], name
