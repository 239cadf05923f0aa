"""Sources: files of every format, the layouts of the field recognised by their columns."""

import csv
import json
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.questions.audit import Tally
from exgrpo_cli.questions.choices import find_choices
from exgrpo_cli.questions.files import iter_rows
from exgrpo_cli.questions.layouts import NamedFields, UnusableRow, gold_text
from exgrpo_cli.questions.prepare import read_source
from exgrpo_cli.questions.sources import default_name


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as text:
            writer = csv.DictWriter(text, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path, dropped=None, **fields):
    return read_source(str(path), NamedFields(**fields), Tally() if dropped is None else dropped, lambda *_: None)


def pairs(reading):
    return [(question.prompt[-1].content, question.answer) for question in reading.questions]


TRACE = [{"role": "assistant", "content": "long"}]
CASES = {
    "gsm8k": (
        {"question": "How many?", "answer": "48 / 2 = <<48/2=24>>24\n#### 1,272"},
        [("How many?", "1272")],
    ),
    "math": (
        {
            "problem": "Area?",
            "level": "Level 5",
            "solution": "First we try \\boxed{1}. That is too much for the square. Its half is \\boxed{\\frac{1}{2}}.",
        },
        [("Area?", "\\frac{1}{2}")],
    ),
    "openr1": (
        {"problem": "Sum?", "answer": "7", "generations": ["a", "b"], "correctness_math_verify": [True, False]},
        [("Sum?", "7")],
    ),
    "question and answer": ({"Problem": "Sum?", "Solution": "Because.", "Answer": 204}, [("Sum?", "204")]),
    "verl": (
        {
            "data_source": "openr1",
            "prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": "Sum?"}],
            "target": TRACE,
            "reward_model": {"ground_truth": "7", "style": "rule"},
        },
        [("Sum?", "7")],
    ),
    "canonical": (
        {"id": "x", "prompt": [{"role": "user", "content": "Sum?"}], "answer": "7", "source": "s", "level": "2"},
        [("Sum?", "7")],
    ),
    "prompt and answer": ({"prompt": "Sum?", "answer": 7.0}, [("Sum?", "7")]),
}


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json"])
@pytest.mark.parametrize("layout", CASES)
def test_a_layout_is_recognised_named_and_read(tmp_path, layout, suffix):
    row, expected = CASES[layout]
    reading = read(write(tmp_path / f"set{suffix}", [row]))
    assert (reading.layout, pairs(reading)) == (layout, expected)
    assert (reading.num_read, reading.num_folded) == (1, 0)


@pytest.mark.parametrize("layout", ["gsm8k", "math", "question and answer"])
def test_a_csv_file_is_read(tmp_path, layout):
    row, expected = CASES[layout]
    assert pairs(read(write(tmp_path / "set.csv", [row]))) == expected


def test_source_and_level_come_from_the_row_or_the_source(tmp_path):
    math, verl = (read(write(tmp_path / f"{name}.jsonl", [CASES[name][0]])).questions[0] for name in ("math", "verl"))
    assert (math.source, math.level) == ("math", "Level 5")
    assert (verl.source, verl.level, verl.prompt[0].role) == ("openr1", None, "system")


CHOICES = "Which?\n\nA. one\nB. two\nC. three"


@pytest.mark.parametrize(
    "row",
    [
        {"question": "Which?", "choices": ["one", "two", "three"], "answer": 1},
        {"question": "Which?", "options": ["one", "two", "three"], "answer": "B", "answer_index": 1},
        {"question": "Which?", "options": ["one", "two", "three"], "answer": "two"},
        {
            "question": "Which?",
            "choices": {"text": ["one", "two", "three"], "label": ["1", "2", "3"]},
            "answerKey": "2",
        },
        {"question": "Which?", "A": "one", "B": "two", "C": "three", "answer": "B"},
        {"question": "Which?", "options": {"A": "one", "B": "two", "C": "three", "D": None}, "answer": "B"},
    ],
)
def test_multiple_choice_in_its_forms(tmp_path, row):
    reading = read(write(tmp_path / "set.jsonl", [row]))
    assert (reading.layout, pairs(reading)) == ("multiple choice", [(CHOICES, "B")])


@pytest.mark.parametrize(
    ("options", "answer", "reason"),
    [
        (["one", "two"], "²", "the answer is none of the options"),
        (["one", "two"], "2", "the answer is none of the options"),
        (["one", "two"], "9" * 5000, "the answer is none of the options"),
        ({"text": ["one", "two"], "label": ["A", "B", "C"]}, "C", "as many labels as options are needed"),
        (["one"], "A", "fewer than two options"),
        (["one", " "], "A", "an option is missing"),
    ],
)
def test_multiple_choice_rows_without_a_gold_option_say_why(tmp_path, options, answer, reason):
    rows = [{"question": "Which?", "options": ["x", "y"], "answer": "A"}]
    rows.append({"question": "And?", "options": options, "answer": answer})
    dropped = Tally()
    reading = read_source(str(write(tmp_path / "set.jsonl", rows)), NamedFields(), dropped, lambda *_: None)
    assert (reading.num_read, len(reading.questions), list(dropped)) == (2, 1, [reason])


def test_right_and_wrong_answers_apart_are_placed_by_the_question(tmp_path):
    rows = [
        {
            "Question": f"Which is {n}?",
            "Correct Answer": "right",
            **{f"Incorrect Answer {i}": f"w{i}" for i in (1, 2, 3)},
        }
        for n in range(40)
    ]
    reading = read(write(tmp_path / "gpqa.csv", rows))
    placed = [question.answer for question in reading.questions]
    for question in reading.questions:
        options = find_choices(question.prompt[0].content).options
        assert options["ABCD".index(question.answer)] == "right" and sorted(options) == ["right", "w1", "w2", "w3"]
    # 40 questions over four places: each place is taken (a place stays empty with probability 4 * 0.75^40 = 4e-5).
    assert set(placed) == set("ABCD")
    assert placed == [question.answer for question in read(tmp_path / "gpqa.csv").questions]


def test_named_fields_reach_into_structs_and_patterns_cut_the_gold_out(tmp_path):
    row = {"task": {"text": "Sum?"}, "out": "x = 3, so the answer is 12; final: 7", "extra": 1}
    path = write(tmp_path / "set.parquet", [row])
    reading = read(path, question="task.text", answer="out", answer_pattern=r"(?:is|final:) (\d+)")
    assert (reading.layout, pairs(reading)) == ("named fields", [("Sum?", "7")])
    assert pairs(read(path, question="task.text", answer="out", answer_pattern=r"\d+"))[0][1] == "7"


def test_rows_that_are_no_questions_are_counted_with_their_reason(tmp_path):
    rows = [
        {"question": "1?", "answer": "so #### 1"},
        {"question": "2?", "answer": "nothing"},
        {"question": " ", "answer": "#### 3"},
        {"question": "4?", "answer": None},
        {"question": "half \ud800", "answer": "#### 5"},
    ]
    dropped = Tally()
    reading = read(write(tmp_path / "set.jsonl", rows), dropped)
    assert pairs(reading) == [("1?", "1")]
    assert {reason: finding.count for reason, finding in dropped.items()} == {
        "no #### answer": 1,
        "no question": 1,
        "no answer": 1,
        "text is not valid Unicode": 1,
    }
    assert dropped["no #### answer"].examples[0].startswith(f"{tmp_path / 'set.jsonl'}: row 2: ")


def test_exact_duplicates_are_folded_and_one_id_with_other_messages_is_an_error(tmp_path):
    row = {"prompt": [{"role": "user", "content": "Sum?"}], "answer": "7"}
    spaced = {"prompt": [{"role": "user", "content": " Sum?\n"}], "answer": "7 "}
    reading = read(write(tmp_path / "set.jsonl", [row, spaced, row]))
    assert (len(reading.questions), reading.num_read, reading.num_folded) == (1, 3, 2)
    other = {"prompt": [{"role": "user", "content": "Hi"}, {"role": "user", "content": "Sum?"}], "answer": "7"}
    path = write(tmp_path / "other.jsonl", [row, other])
    with pytest.raises(InputError, match=r"other.jsonl: row 1 and .*other.jsonl: row 2 have the id"):
        read(path)


def test_traces_beside_the_questions_are_not_read(tmp_path):
    path = write(tmp_path / "set.parquet", [{"problem": "Sum?", "answer": "7", "generations": ["long"]}])
    assert [row for _, row in iter_rows(path, ("problem", "answer"))] == [{"problem": "Sum?", "answer": "7"}]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("set.jsonl", '{"question": "1?", "answer": "1"}\n{"question": \n', "line 2 is not JSON"),
        ("set.jsonl", "[1, 2]\n", r"line 1 is '\[1, 2\]', it must be an object"),
        ("set.json", '[{"question": "1?", "answer": "1"}, {"que', "row 2 is not JSON"),
        ("set.json", '[{"question": "1?", "answer": "1"},', "row 2 is not JSON"),
        ("set.csv", "question,answer\n1?,1\n2?,2,3\n", "row 2 has more fields than the header"),
        ("set.parquet", "PAR1 no", "cannot be read as parquet"),
        ("set.jsonl", "", "no rows, so there are no questions"),
        (
            "set.jsonl",
            '{"text": "1?", "gold": "1"}\n',
            r"no known layout: its columns are \['text', 'gold'\]. Name the two",
        ),
        ("set.txt", "1?", "the suffix '.txt': questions are read from"),
    ],
)
def test_a_wrong_file_names_itself_and_the_row(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message) as raised:
        read(tmp_path / name)
    assert str(tmp_path / name) in str(raised.value)


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "set.csv").write_bytes(b"question,answer\n\xff\xfe,1\n")
    with pytest.raises(InputError, match=r"set.csv is not UTF-8 text"):
        read(tmp_path / "set.csv")


@pytest.mark.parametrize("rows", [3, 40_000])
def test_json_rows_across_chunks(tmp_path, rows):
    # 40,000 rows of about 40 characters are more than one chunk of 2^20, so some row is cut by its end.
    values = [{"question": f"What is {n}?", "answer": str(n)} for n in range(rows)]
    array = write(tmp_path / "array.json", values)
    lines = write(tmp_path / "lines.jsonl", values).rename(tmp_path / "lines.json")
    for path in (array, lines):
        assert [row for _, row in iter_rows(path)] == values


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"question": "questoin", "answer": "answer"},
            "no column 'questoin' for --question-field. Did you mean 'question'",
        ),
        ({"question": "question"}, "--answer-field is missing"),
        ({"answer_pattern": "("}, r"--answer-pattern '\(' is no regular expression"),
    ],
)
def test_wrong_field_names(tmp_path, fields, message):
    path = write(tmp_path / "set.jsonl", [{"question": "1?", "answer": "1"}])
    with pytest.raises(InputError, match=message):
        read(path, **fields)


def test_a_folder_of_shards_is_one_split(tmp_path):
    for number in (0, 1):
        name = f"data/train-0000{number}-of-00002.parquet"
        write(tmp_path / name, [{"question": f"{number}?", "answer": str(number)}])
    write(tmp_path / "data/test-00000-of-00001.parquet", [{"question": "9?", "answer": "9"}])
    assert pairs(read(tmp_path)) == [("0?", "0"), ("1?", "1")]
    assert pairs(read(f"{tmp_path}:test")) == [("9?", "9")]
    assert pairs(read(f"{tmp_path}:data/test-00000-of-00001.parquet")) == [("9?", "9")]
    (tmp_path / "data/train-00001-of-00002.parquet").unlink()
    with pytest.raises(InputError, match="has 1 of the 2 parts of data/train"):
        read(tmp_path)


def test_a_folder_of_several_layouts_or_none(tmp_path):
    write(tmp_path / "a.jsonl", [{"question": "1?", "answer": "1"}])
    write(tmp_path / "b.jsonl", [{"problem": "2?", "solution": "\\boxed{2}"}])
    with pytest.raises(InputError, match=r"a.jsonl has the question and answer layout and .*b.jsonl the math one"):
        read(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"empty has no .parquet, .* files: there are no questions"):
        read(tmp_path / "empty")


def test_default_names(tmp_path):
    write(tmp_path / "my set" / "train.jsonl", [{"question": "1?", "answer": "1"}])
    assert default_name("Elliott/Openr1-Math-46k-8192") == "Openr1-Math-46k-8192"
    assert default_name("openai/gsm8k@v1:main:test") == "gsm8k-main-test"
    assert default_name(str(tmp_path / "my set" / "train.jsonl")) == "train"
    assert default_name(f"{tmp_path / 'my set'}:train") == "my set-train"
    assert default_name("arithmetic") == "arithmetic"


@pytest.mark.parametrize(
    ("value", "gold"),
    [
        (72.0, "72"),
        (0.1, "0.1"),
        # math-verify would read the e of 1e-05 as Euler's number.
        (1e-05, "0.00001"),
        (1e22, "1" + "0" * 22),
        (Decimal("12.50"), "12.50"),
        (Decimal("3.00"), "3"),
        (["7"], "7"),
        ([1, 2.5], "1, 2.5"),
    ],
)
def test_a_gold_that_is_no_text_is_written_as_one(value, gold):
    assert gold_text(value) == gold


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "no answer"),
        (float("nan"), "no answer"),
        (float("inf"), "answer is infinite"),
        ([], "no answer"),
        ([["7"]], "answer is a list of lists"),
        ({"a": 1}, "answer is a dict"),
    ],
)
def test_what_cannot_be_a_gold_says_why(value, reason):
    with pytest.raises(UnusableRow, match=reason):
        gold_text(value)


def test_integers_of_any_length_are_read(tmp_path):
    digits = "9" * 5000
    for name, text in (("set.jsonl", f'{{"answer": {digits}}}\n'), ("set.json", f'[{{"answer": {digits}}}]')):
        (tmp_path / name).write_text(text)
        assert [row for _, row in iter_rows(tmp_path / name)] == [{"answer": digits}]


@pytest.mark.parametrize("name", ["deep.json", "deep.jsonl"])
def test_brackets_without_end_are_named_by_row(tmp_path, name):
    (tmp_path / name).write_text('{"question": "What?", "answer": "1"}\n' + '{"question":' * 100_000)
    with pytest.raises(InputError, match=rf"{name}: (row|line) 2 nests more brackets than can be read"):
        list(iter_rows(tmp_path / name))


def test_spaces_after_the_commas_of_a_csv_file_are_no_part_of_its_fields(tmp_path):
    (tmp_path / "set.csv").write_text('question, answer\n"What, is it?", "1, 2"\n')
    assert [row for _, row in iter_rows(tmp_path / "set.csv")] == [{"question": "What, is it?", "answer": "1, 2"}]


def test_a_column_name_that_stands_twice_is_refused(tmp_path):
    (tmp_path / "set.csv").write_text("question,answer,question\na,1,b\n")
    columns = [pa.array(["a"]), pa.array(["1"]), pa.array(["b"])]
    pq.write_table(pa.Table.from_arrays(columns, names=["question", "answer", "question"]), tmp_path / "set.parquet")
    for name in ("set.csv", "set.parquet"):
        with pytest.raises(InputError, match=rf"{name} has several columns named 'question'"):
            list(iter_rows(tmp_path / name))


def test_a_line_that_is_not_utf_8_is_named(tmp_path):
    (tmp_path / "set.jsonl").write_bytes(b'{"question": "What?"}\n{"question": "Caf\xe9?"}\n')
    with pytest.raises(InputError, match=r"set\.jsonl: line 2 is not UTF-8 text"):
        list(iter_rows(tmp_path / "set.jsonl"))
