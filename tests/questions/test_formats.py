"""Files as they are handed round: packed, tab-separated, rows inside an object, rows that are lists of turns."""

import csv
import gzip
import io
import json

import pyarrow as pa
import pytest

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.commands import run
from exgrpo_cli.questions import audit
from exgrpo_cli.questions.audit import Tally, near_duplicates
from exgrpo_cli.questions.files import iter_rows
from exgrpo_cli.questions.layouts import NamedFields
from exgrpo_cli.questions.prepare import Reading, read_source
from exgrpo_cli.questions.sources import default_name

ROWS = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(3)]


def read(path, dropped=None) -> Reading:
    return read_source(str(path), NamedFields(), Tally() if dropped is None else dropped, lambda *_: None)


def pairs(reading):
    return [(question.prompt[-1].content, question.answer) for question in reading.questions]


def separated(rows, delimiter):
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


TEXTS = {
    ".jsonl": "".join(json.dumps(row) + "\n" for row in ROWS),
    ".json": json.dumps(ROWS),
    ".csv": separated(ROWS, ","),
    ".tsv": separated(ROWS, "\t"),
}
PACK = {"": bytes, ".gz": gzip.compress, ".zst": lambda data: pa.compress(data, "zstd", asbytes=True)}


@pytest.mark.parametrize("packed", PACK)
@pytest.mark.parametrize("suffix", TEXTS)
def test_text_formats_are_read_packed_or_not_as_a_file_and_in_a_folder(tmp_path, suffix, packed):
    folder = tmp_path / "set"
    folder.mkdir()
    path = folder / f"train-00000-of-00001{suffix}{packed}"
    path.write_bytes(PACK[packed](TEXTS[suffix].encode()))
    expected = [(row["question"], row["answer"]) for row in ROWS]
    assert pairs(read(path)) == pairs(read(folder)) == expected
    # A second part belongs to the same split, and a missing one is noticed.
    other = [("And 7?", "7")]
    lines = separated([{"question": "And 7?", "answer": "7"}], "\t" if suffix == ".tsv" else ",")
    text = lines if suffix in (".csv", ".tsv") else json.dumps({"question": "And 7?", "answer": "7"})
    (folder / f"test.en{suffix}{packed}").write_bytes(PACK[packed](text.encode()))
    assert pairs(read(f"{folder}:test")) == other
    path.rename(folder / f"train-00000-of-00002{suffix}{packed}")
    with pytest.raises(InputError, match="has 1 of the 2 parts of train"):
        read(folder)


def test_a_packed_file_gives_its_name_without_the_endings(tmp_path):
    path = tmp_path / "My.set.JSONL.GZ"
    path.write_bytes(gzip.compress(TEXTS[".jsonl"].encode()))
    assert default_name(str(path)) == "My.set"
    assert read(path).questions[0].source == "My.set"


def test_lines_and_parts_put_together_by_cat_are_one_file(tmp_path):
    one, two = (json.dumps(row).encode() + b"\n" for row in ROWS[:2])
    for name, pack in (("a.jsonl.gz", PACK[".gz"]), ("a.jsonl.zst", PACK[".zst"])):
        (tmp_path / name).write_bytes(pack(one) + pack(two))
        assert [row for _, row in iter_rows(tmp_path / name)] == ROWS[:2]


# A changed byte is noticed by gzip, which adds up what it packs; zstd adds that only where it is asked to.
@pytest.mark.parametrize(
    ("suffix", "harm"),
    [(".gz", "cut"), (".zst", "cut"), (".gz", "other"), (".zst", "other"), (".gz", "flipped")],
)
def test_a_damaged_packed_file_is_one_line(tmp_path, capsys, suffix, harm):
    data = bytearray(PACK[suffix](TEXTS[".jsonl"].encode() * 500))
    if harm == "cut":
        data = data[: len(data) // 2]
    elif harm == "other":
        data = bytearray(b'{"question": "1?", "answer": "1"}\n')
    else:
        middle = len(data) // 2
        data[middle : middle + 8] = b"\xff" * 8
    path = tmp_path / f"set.jsonl{suffix}"
    path.write_bytes(data)
    code = run(["prepare", str(path), "--output", str(tmp_path / "out.parquet"), "--quiet"])
    said = capsys.readouterr().err
    assert (code, str(path) in said, said.count("\n")) == (2, True, 1)
    assert not (tmp_path / "out.parquet").exists()


def test_a_parquet_file_is_not_packed_again(tmp_path):
    (tmp_path / "set.parquet.gz").write_bytes(gzip.compress(b"PAR1"))
    with pytest.raises(
        InputError, match=r"the suffix '.gz': questions are read from .parquet, .jsonl, .*\.gz and \.zst"
    ):
        read(tmp_path / "set.parquet.gz")


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


def test_rows_inside_an_object_across_chunks_and_cut_short(tmp_path):
    # 40,000 rows of about 40 characters are more than one chunk of 2^20.
    rows = [{"question": f"What is {n}?", "answer": str(n)} for n in range(40_000)]
    whole = json.dumps({"data": rows, "name": "numbers"})
    (tmp_path / "set.json").write_text(whole)
    assert [row for _, row in iter_rows(tmp_path / "set.json")] == rows
    for end in (len(whole) - 1, whole.index('], "name"') + 1, whole.index('], "name"') - 4):
        (tmp_path / "set.json").write_text(whole[:end])
        with pytest.raises(InputError, match=r"set.json: row \d+ is not JSON"):
            list(iter_rows(tmp_path / "set.json"))


def test_a_row_whose_own_columns_hold_lists_is_a_row(tmp_path):
    row = {"prompt": [{"role": "user", "content": "Sum?"}], "answer": "7", "data": [1]}
    (tmp_path / "set.json").write_text(json.dumps(row))
    assert [found for _, found in iter_rows(tmp_path / "set.json")] == [row]


TURNS = [{"from": "human", "value": "Sum?"}, {"from": "assistant", "ground_truth": {"value": "7", "pass_at_n": 0.5}}]


@pytest.mark.parametrize("name", ["set.json", "set.jsonl"])
def test_rows_that_are_lists_of_turns(tmp_path, name):
    broken = [{"from": "human", "value": "And?"}, {"from": "assistant", "ground_truth": {"value": None}}]
    rows = [TURNS, broken]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / name).write_text(json.dumps(rows) if name == "set.json" else lines)
    dropped = Tally()
    reading = read(tmp_path / name, dropped)
    assert (reading.layout, pairs(reading), list(dropped)) == ("orz", [("Sum?", "7")], ["no answer"])


def test_turns_in_numbered_columns(tmp_path):
    (tmp_path / "set.jsonl").write_text(json.dumps({"0": TURNS[0], "1": TURNS[1]}) + "\n")
    assert pairs(read(tmp_path / "set.jsonl")) == [("Sum?", "7")]


@pytest.mark.parametrize("asked", ["question", "problem", "input", "prompt"])
@pytest.mark.parametrize("answer", ["expected_answer", "ground_truth", "ground_truth_answer", "target", "final_answer"])
def test_names_of_the_answer_column(tmp_path, asked, answer):
    row = {asked: "Sum?", "solution": "Long, so \\boxed{8}.", answer: "7"}
    (tmp_path / "set.jsonl").write_text(json.dumps(row) + "\n")
    reading = read(tmp_path / "set.jsonl")
    assert (pairs(reading), "answer" in reading.layout) == ([("Sum?", "7")], True)


def test_a_target_that_is_a_trace_is_no_answer(tmp_path):
    trace = [{"role": "assistant", "content": "long"}]
    row = {"problem": "Sum?", "target": trace, "answer": "7"}
    (tmp_path / "set.jsonl").write_text(json.dumps(row) + "\n")
    reading = read(tmp_path / "set.jsonl")
    assert (reading.layout, pairs(reading)) == ("openr1", [("Sum?", "7")])


def test_a_text_of_many_million_characters_is_compared_by_its_beginning(monkeypatch):
    seen = []
    words_of = audit.words_of
    monkeypatch.setattr(audit, "words_of", lambda text: seen.append(len(text)) or words_of(text))
    long = " ".join(f"word{n}" for n in range(1_000_000))
    pairs = near_duplicates([long, f"{long} and more"], threshold=0.8)
    assert [pair[:2] for pair in pairs] == [(0, 1)]
    # 11 million characters a text: what is turned into trigrams stays bounded.
    assert max(seen) <= 100_000
