"""The question file: identity, both layouts there and back, and every way a file can be wrong."""

import hashlib
import random
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from benchmark_layouts import SYSTEM, verl
from question_sources import question, write

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.commands import run
from exgrpo_cli.evaluation.benchmarks import benchmark_questions, own_benchmark
from exgrpo_cli.questions import question_file

ASKED = [{"role": "user", "content": "2+2=?"}]
VERL = {"data_source": "x", "prompt": ASKED}


def canonical_row(**changes):
    return {"id": "a1", "prompt": ASKED, "answer": "4", "source": "here", "level": None} | changes


def test_the_id_is_the_hash_of_the_normalised_last_user_message_and_the_answer():
    expected = hashlib.sha256(b"1 + 2 = ?\x1f3").hexdigest()[:16]
    assert question("1 + 2 = ?", answer="3").id == expected
    # Full-width digits are NFKC-equal to plain ones; runs of white space are one blank; the answer is stripped.
    assert question(" １ +\n２  = ?", answer=" 3 ").id == expected
    assert question(("system", "Think."), "1 + 2 = ?", answer="3").id == expected
    assert question("1 + 2 = ?", answer="4").id != expected
    assert question("Hello", ("assistant", "Yes?"), "1 + 2 = ?", answer="3").id == expected
    with pytest.raises(InputError, match=r"roles \['system'\] has no user message"):
        question(("system", "Think."))


@pytest.mark.parametrize("layout", ["canonical", "verl"])
def test_what_is_written_is_read_again(tmp_path, layout):
    asked = (
        question(level="3"),
        question(("system", "Denke nach."), "Wie groß ist $\\pi$? 圆周率\n\nzwei Zeilen", answer="\\frac{22}{7}"),
        question("9\u2028-1", answer="8", source="elsewhere"),
        question("2=2?", metadata='{"verifier": "countdown", "numbers": [2], "target": 2}'),
    )
    path = tmp_path / "new folder" / "questions.parquet"
    question_file.write_questions(
        path, asked, {"made_by": question_file.MADE_BY_PREPARE, "options": {"seed": 3}}, layout
    )
    found = question_file.read_questions(path)
    assert (found.questions, found.num_folded) == (asked, 0)
    assert found.content_hash == question_file.content_hash(asked) == found.metadata["content_hash"]
    assert found.metadata["options"] == {"seed": 3} and question_file.is_prepared(found.metadata)
    assert list(path.parent.iterdir()) == [path]


def test_the_content_hash_is_sha256_over_the_rows_in_order():
    one, two = question(), question("3+3=?", answer="6", level="1")
    lines = f'["{one.id}",[["user","2+2=?"]],"4","here",null]\n["{two.id}",[["user","3+3=?"]],"6","here","1"]\n'
    assert question_file.content_hash([one, two]) == hashlib.sha256(lines.encode()).hexdigest()
    assert question_file.content_hash([two, one]) != question_file.content_hash([one, two])
    lines = lines.replace('"here",null]', '"here",null,"{}"]')
    assert question_file.content_hash([replace(one, metadata="{}"), two]) == hashlib.sha256(lines.encode()).hexdigest()


def test_the_canonical_schema(tmp_path):
    question_file.write_questions(tmp_path / "q.parquet", [question()], {})
    schema = pq.read_schema(tmp_path / "q.parquet")
    assert schema.names == ["id", "prompt", "answer", "source", "level", "metadata"]
    assert schema.field("prompt").type.value_type == pa.struct([("role", pa.string()), ("content", pa.string())])
    assert schema.field("level").nullable and not schema.field("answer").nullable


def test_a_verl_file_as_others_write_it(tmp_path):
    # Metadata of others are not ours.
    more = {"extra_info": {"index": 0, "split": "default", "metadata": {"url": "x"}}}
    row = {**verl("aime", system=True)("2+2=?", "4"), **more, "target": [{"role": "assistant", "content": "a trace"}]}
    found = question_file.read_questions(write(tmp_path / "verl.parquet", row, row))
    assert found.questions == (question(("system", SYSTEM["content"]), "2+2=?", source="aime"),)
    assert (found.num_folded, found.metadata) == (1, {})


def test_unusual_arrow_types_of_text_are_read(tmp_path):
    table = pa.Table.from_pylist([canonical_row(level="2")])
    table = table.set_column(3, "source", table["source"].dictionary_encode())
    table = table.set_column(2, "answer", table["answer"].cast(pa.large_string()))
    pq.write_table(table, tmp_path / "q.parquet")
    assert question_file.read_questions(tmp_path / "q.parquet").questions[0].answer == "4"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"question": "2+2=?"}], r"lacks the columns \['id', 'prompt', 'answer', 'source'\] and has \['question'\]"),
        ([canonical_row(answer=4)], "row 1, field 'answer' is 4: every question needs a text there"),
        ([canonical_row(prompt="2+2=?")], r"row 1, field 'prompt' is '2\+2=\?': a question needs a list of messages"),
        ([canonical_row(metadata=2)], "field 'metadata' is 2: it must be a JSON table"),
        ([canonical_row(metadata="[1]")], r"row 1, field 'metadata' is '\[1\]': it must be a JSON table, or null"),
        ([canonical_row(metadata="{1")], "field 'metadata' is '{1': it must be a JSON table"),
        ([canonical_row(), canonical_row(id="a2", answer=None)], "row 2, field 'answer' is None"),
        ([canonical_row(answer=" ")], "row 1, field 'answer' is ' '"),
        ([canonical_row(), canonical_row(id=None)], "row 2, field 'id' is None"),
        ([canonical_row(), canonical_row(id="a2", prompt=[])], r"row 2, field 'prompt' is \[\]"),
        ([canonical_row(prompt=[{"role": "user", "content": None}, *ASKED])], "prompt', message 1: 'content' is None"),
        ([canonical_row(prompt=[{"role": "system", "content": "x"}])], r"'prompt' has the roles \['system'\]"),
        ([canonical_row(), canonical_row(answer="5")], "row 1 and .*: row 2 have the id 'a1' but different content"),
        ([VERL | {"reward_model": {"style": "rule"}}], "row 1, field 'reward_model.ground_truth' is None"),
        ([VERL | {"reward_model": {"ground_truth": 4}}], "field 'reward_model.ground_truth' is 4"),
    ],
)
def test_a_wrong_file_names_file_row_field_and_value(tmp_path, rows, message):
    path = write(tmp_path / "wrong.parquet", *rows)
    with pytest.raises(InputError, match=message) as raised:
        question_file.read_questions(path)
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("empty.parquet", "has no questions"), (".", "is a folder, not a question file"),
        ("text.parquet", "cannot be read .*fetch it again"), ("nowhere.parquet", "does not exist"),
    ],
)  # fmt: skip
def test_an_empty_file_a_folder_another_format_and_no_file(tmp_path, name, message):
    question_file.write_questions(tmp_path / "empty.parquet", [], {})
    (tmp_path / "text.parquet").write_text("hello")
    with pytest.raises(InputError, match=message):
        question_file.read_questions(tmp_path / name)


def test_metadata_of_other_files_is_empty(tmp_path):
    assert question_file.read_metadata(tmp_path / "nowhere.parquet") == {}
    assert question_file.read_metadata(write(tmp_path / "other.parquet", {"x": 1})) == {}
    assert not question_file.is_prepared({}) and not question_file.is_prepared({"made_by": "train"})


def test_text_that_is_no_unicode_is_refused():
    with pytest.raises(InputError, match=r"row 7, field 'prompt', message 1: 'content' is .*ud800', it must be text"):
        question_file.prompt_of([{"role": "user", "content": "half of a pair: \ud800"}], "file: row 7")


def harmed(path, seed):
    """Another row, order or value under the same metadata; returns it in words."""
    rng = random.Random(seed)
    table = pq.read_table(path)
    order = list(range(len(table)))
    column = rng.choice(["id", "prompt", "answer", "level"])
    done = rng.choice(["reversed", "lost", "column shifted"])
    if done == "column shifted":
        place = table.column_names.index(column)
        table = table.set_column(place, table.schema.field(place), table.column(column).take([*order[1:], 0]))
        done += f" ({column})"
    else:
        lost = rng.choice(order)
        table = table.take(order[::-1] if done == "reversed" else [place for place in order if place != lost])
    pq.write_table(table, path)
    return done


@pytest.mark.parametrize("layout", ["canonical", "verl"])
def test_a_file_whose_rows_are_not_those_it_was_written_with_is_refused(tmp_path, capsys, layout):
    """Any of them, wherever a question file is read; `prepare` takes it as it is and says so."""
    path = tmp_path / "file.parquet"
    asked = [question(f"{n}+{n}=?", answer=str(2 * n), level=str(n)) for n in range(1, 20)]
    for seed in range(12 if layout == "canonical" else 1):
        question_file.write_questions(path, asked, {"made_by": question_file.MADE_BY_PREPARE}, layout)
        question_file.require_content(path)
        if layout == "verl":
            pq.write_table(pq.read_table(path).slice(1), path)
        else:
            harmed(path, seed)
        for reading in (question_file.read_questions, question_file.require_content):
            with pytest.raises(InputError, match=r"file.parquet is damaged or was edited: .*content hash \w{16}, not"):
                reading(path)
    with pytest.raises(InputError, match="is damaged or was edited"):
        benchmark_questions(own_benchmark("file"), path)
    # One without a column, which is no question file any more, is not trained on as if it were raw data.
    pq.write_table(pq.read_table(path).drop_columns(["source" if layout == "canonical" else "data_source"]), path)
    assert run(["train", "--data", str(path), "--heldout", "none", "--dry-run"]) == 2
    assert "file.parquet" in capsys.readouterr().err
    assert run(["prepare", str(path), "--output", str(tmp_path / "new.parquet")]) == 0
    assert "file not as it was written, taken as it is" in capsys.readouterr().out
    question_file.read_questions(tmp_path / "new.parquet")


@pytest.mark.parametrize("metadata", [b"{", b"[" * 100_000, b"[1]", b"\xff\xfe", b"null1"])
def test_metadata_that_are_no_table_are_damage(tmp_path, metadata):
    path = tmp_path / "file.parquet"
    question_file.write_questions(path, [question()], {})
    pq.write_table(pq.read_table(path).replace_schema_metadata({question_file.METADATA_KEY: metadata}), path)
    with pytest.raises(
        InputError, match=r"file.parquet is damaged: the metadata that `prepare` wrote are no JSON table"
    ):
        question_file.read_questions(path)
    assert question_file.read_metadata(path) == {}


@pytest.mark.parametrize(
    "metadata",
    [
        "[" * 100_000,
        '{"verifier": "countdown"}',
        '{"verifier": "countdown", "numbers": ["2"], "target": 2}',
        '{"verifier": "countdown", "numbers": [2], "target": %s}' % ("9" * 4000),
        '{"verifier": "countdown", "numbers": [2], "target": %s}' % ("9" * 5000),
        '{"verifier": "gym:spell_backward"}',
        '{"trace": "sum", "terms": 3}',
    ],
)
def test_a_verifier_without_what_it_needs_is_refused(tmp_path, metadata):
    path = write(tmp_path / "file.parquet", canonical_row(metadata=metadata))
    with pytest.raises(InputError, match=r"row 1, field 'metadata' is .*: it must be a JSON table, or null"):
        question_file.read_questions(path)


def test_any_flipped_bytes_leave_the_questions_or_one_line_with_the_file(tmp_path):
    path = tmp_path / "file.parquet"
    asked = tuple(question(f"What is {n}+{n}?", answer=str(2 * n), level=str(n)) for n in range(1, 60))
    question_file.write_questions(path, asked, {"made_by": question_file.MADE_BY_PREPARE})
    whole, rng = path.read_bytes(), random.Random(32)
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.choice([1, 1, 16])):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        try:
            assert question_file.read_questions(path).questions == asked
        except InputError as error:
            assert "file.parquet" in str(error) and "\n" not in str(error)
