"""Rows as public sets have them: all of the question, the right gold, and an error where half of it would be lost."""

import json
import random
from pathlib import Path

import pytest
from question_sources import pairs, read, write

from exgrpo_cli.base import errors, types
from exgrpo_cli.config.sections.run import GradingSettings
from exgrpo_cli.grading import GradingPool

FILE = Path(__file__).with_name("public_rows.jsonl")
PUBLIC = {case["set"]: case for case in map(json.loads, FILE.read_text(encoding="utf-8").splitlines())}
"""Rows of public sets, each with the question and the gold that are to be read."""


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_set_is_read_whole(tmp_path, name, suffix):
    case = PUBLIC[name]
    reading = read(write(tmp_path / f"set{suffix}", case["row"], case["row"]))
    assert pairs(reading) == [(case["question"], case["answer"])] and not reading.dropped


def test_countdown_rows_bring_a_solution_and_their_verifier(tmp_path):
    rng, rows = (
        random.Random(3),
        [{"nums": [7, 7], "target": 5}, {"nums": "x", "target": 1}, {"nums": [3], "target": 3}],
    )
    for _ in range(30):
        numbers = [rng.randint(1, 99) for _ in range(rng.choice([3, 4]))]
        rows.append({"nums": numbers, "target": numbers[0] * numbers[1] - sum(numbers[2:])})
    reading = read(write(tmp_path / "set.jsonl", *rows))
    assert reading.layout == "countdown" and len(reading.questions) == 30
    assert dict(reading.dropped) == {"no solution, or over 5 numbers": 2, "no numbers and target": 1}
    first = reading.questions[0]
    assert json.loads(first.metadata) == {
        "verifier": "countdown",
        "numbers": rows[3]["nums"],
        "target": rows[3]["target"],
    }
    assert first.prompt[0].content.endswith(f"to make {rows[3]['target']}.")
    with GradingPool(GradingSettings()) as pool:
        golds = pool.verify_gold([own.answer for own in reading.questions], [own.metadata for own in reading.questions])
    assert set(golds) == {types.Verdict.CORRECT}


def test_a_column_that_holds_most_of_the_words_and_is_not_read_is_an_error(tmp_path):
    facts = "In the shop of the old man there are five red and four green apples on the shelf."
    path = write(
        tmp_path / "set.jsonl",
        *({"Narrative": f"{facts} {n}", "question": f"How many, {n}?", "answer": "9"} for n in range(3)),
    )
    with pytest.raises(
        errors.InputError,
        match=r"set.jsonl: the column 'Narrative' has more words than 'question' .*-field Narrative\+question",
    ):
        read(path)
    for named, text in (("Narrative+question", f"{facts} 0 How many, 0?"), ("question", "How many, 0?")):
        assert pairs(read(path, question_field=named, answer_field="answer"))[0] == (text, "9")
    with pytest.raises(errors.InputError, match=r"no column 'Narrativ' for --question-field. Did you mean 'Narrative'"):
        read(path, question_field="Narrativ+question", answer_field="answer")


BESIDE = (
    "solution,generations,r1_solution_1,rationale,Pre-Revision Question,Explanation,qwq_response,long_cot,prompt_text"
)


@pytest.mark.parametrize("column", BESIDE.split(","))
def test_traces_and_notes_beside_a_question_may_be_long(tmp_path, column):
    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1), column: "word after word " * 40} for n in range(3)]
    assert len(read(write(tmp_path / "set.jsonl", *rows)).questions) == 3
    # The question in other words, under any name.
    rows = [
        {
            "question": f"What is the sum {n} + 1?",
            "answer": "1",
            "x": f"User: What is the sum {n} + 1? Now answer it, please, as well as you can.",
        }
        for n in range(3)
    ]
    assert len(read(write(tmp_path / "set.jsonl", *rows)).questions) == 3


def test_what_the_first_rows_leave_empty_is_not_lost_later(tmp_path):
    """Options are a reason to leave a row out, a passage is put before its question."""
    rows = [{"passage": None, "question": f"Sum {n}?", "options": None, "answer": str(n)} for n in range(30)]
    rows[25]["options"], rows[26]["passage"] = ["(A)1", "(B)2"], "Add them."
    reading = read(write(tmp_path / "set.jsonl", *rows))
    assert dict(reading.dropped) == {"options, which the first rows have not": 1}
    assert ("Add them. Sum 26?", "26") in pairs(reading) and len(reading.questions) == 29
