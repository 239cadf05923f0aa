"""Sources as they come out of spreadsheets, pandas and hands: gaps, numbers for labels, columns of other names."""

import json

import pytest

from exgrpo_cli.questions.audit import Tally
from exgrpo_cli.questions.layouts import NamedFields
from exgrpo_cli.questions.prepare import Reading, read_source


def read(path, dropped=None) -> Reading:
    return read_source(str(path), NamedFields(), Tally() if dropped is None else dropped, lambda *_: None)


def pairs(reading: Reading) -> list[tuple[str, str]]:
    return [(question.prompt[-1].content, question.answer) for question in reading.questions]


def write_lines(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_an_option_left_empty_does_not_move_the_letters_behind_it(tmp_path):
    (tmp_path / "set.csv").write_text("question,A,B,C,D,answer\nWhich?,one,,two,three,C\nAnd?,one,,two,three,three\n")
    # C is `two`, which the question then calls B, as its second option.
    options = "A. one\nB. two\nC. three"
    assert pairs(read(tmp_path / "set.csv")) == [(f"Which?\n\n{options}", "B"), (f"And?\n\n{options}", "C")]


@pytest.mark.parametrize("labels", [["1", "2", "3"], [1, 2, 3]])
@pytest.mark.parametrize("answer", ["1", 1, 1.0])
def test_a_label_is_compared_before_a_place_whether_text_or_number(tmp_path, labels, answer):
    choices = {"text": ["one", "two", "three"], "label": labels}
    path = write_lines(tmp_path / "set.jsonl", {"question": "Which?", "choices": choices, "answerKey": answer})
    assert pairs(read(path)) == [("Which?\n\nA. one\nB. two\nC. three", "A")]


def test_a_place_may_be_a_whole_float(tmp_path):
    # pandas turns a column of integers with a gap into floats.
    rows = [{"question": f"{n}?", "choices": ["one", "two"], "answer": value} for n, value in enumerate((1.0, 0.5))]
    dropped = Tally()
    assert pairs(read(write_lines(tmp_path / "set.jsonl", *rows), dropped)) == [("0?\n\nA. one\nB. two", "B")]
    assert list(dropped) == ["the answer is none of the options"]


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        (["one", None], "an option is missing"),
        ({"text": ["one", "two"], "label": 7}, "as many labels as options are needed"),
    ],
)
def test_options_without_a_text_or_a_label_are_no_options(tmp_path, choices, reason):
    good = {"question": "Which?", "choices": ["one", "two"], "answer": 0}
    dropped = Tally()
    reading = read(write_lines(tmp_path / "set.jsonl", good, {**good, "choices": choices}), dropped)
    assert (len(reading.questions), list(dropped)) == (1, [reason])


@pytest.mark.parametrize("first", [None, "it is 7"])
def test_gsm8k_is_told_by_most_of_its_first_rows(tmp_path, first):
    rows = [{"question": f"{n}?", "answer": answer} for n, answer in enumerate((first, "so\n#### 1,234", "#### 3"))]
    reading = read(write_lines(tmp_path / "set.jsonl", *rows))
    assert (reading.layout, pairs(reading)) == ("gsm8k", [("1?", "1234"), ("2?", "3")])


def test_one_answer_with_a_heading_does_not_make_a_gsm8k_set(tmp_path):
    rows = [{"question": f"{n}?", "answer": answer} for n, answer in enumerate(("#### Result 1", "2", "3"))]
    reading = read(write_lines(tmp_path / "set.jsonl", *rows))
    assert (reading.layout, len(reading.questions)) == ("question and answer", 3)


def test_files_of_one_layout_may_name_their_columns_differently(tmp_path):
    write_lines(tmp_path / "set" / "a.jsonl", {"question": "1?", "answer": "1"})
    write_lines(tmp_path / "set" / "b.jsonl", {"problem": "2?", "final_answer": "2", "level": 3})
    write_lines(tmp_path / "set" / "empty.jsonl")
    reading = read(tmp_path / "set")
    assert (reading.layout, pairs(reading)) == ("question and answer", [("1?", "1"), ("2?", "2")])
    assert [question.level for question in reading.questions] == [None, "3"]


def test_columns_without_a_name_are_left_aside(tmp_path):
    # The first as pandas writes its index, the last two as a spreadsheet does.
    (tmp_path / "set.csv").write_text(",question,answer,,\n0,1?,1,,\n1,2?,2,,\n")
    assert pairs(read(tmp_path / "set.csv")) == [("1?", "1"), ("2?", "2")]


def test_a_truth_value_is_no_answer_and_says_so(tmp_path):
    rows = [{"question": "1?", "answer": True}, {"question": "2?", "answer": 2}]
    dropped = Tally()
    assert pairs(read(write_lines(tmp_path / "set.jsonl", *rows), dropped)) == [("2?", "2")]
    assert list(dropped) == ["answer is a bool, not text or a number"]


def test_marks_and_line_ends_of_other_systems(tmp_path):
    lines = [json.dumps({"question": f"{n}?", "answer": str(n)}) for n in (1, 2)]
    (tmp_path / "set.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode() + b"\r\n\r\n")
    (tmp_path / "set.csv").write_bytes(b'\xef\xbb\xbfquestion,answer\r\n"1?",1\r\n"2?",2\r\n')
    (tmp_path / "set.json").write_bytes(b"\xef\xbb\xbf[" + ",\r\n".join(lines).encode() + b"]\r\n")
    for name in ("set.jsonl", "set.csv", "set.json"):
        assert pairs(read(tmp_path / name)) == [("1?", "1"), ("2?", "2")], name
