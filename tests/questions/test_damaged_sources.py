"""Sources damaged at random: other values at random places, other bytes; each is read, or one line names the file."""

import json
import os
import random
import re

import pytest
from question_sources import read, write

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.questions.question_file import read_questions, write_questions

SUFFIXES = (".parquet", ".jsonl", ".json", ".csv", ".tsv", ".jsonl.gz", ".csv.zst", ".json.zst")
ROWS = (
    {"question": "What is 1+1?", "answer": "2"},
    {"question": "Which?", "options": ["a", "b"], "answer": "A"},
    {"Body": "There are two.", "Question": "How many are number0?", "Numbers": "1 2", "Answer": "9 (apples)"},
    {"prompt": [{"role": "user", "content": "Sum?"}], "answer": "1"},
    {"nums": [1, 2, 3], "target": 6},
    {"problem_text": "What mass?", "answer_number": "1", "unit": "m"},
    {
        "question": {"stem": "Which?", "choices": [{"label": "A", "text": "x"}, {"label": "B", "text": "y"}]},
        "answerKey": "B",
    },
)
VALUES = (
    None, "x", "", -1, 1e308, 1e-320, float("nan"), 10**30, True, [], {}, [None], [[[[]]]], ["a", 1], "9" * 5000,
    "\ud800", "\x1b[2J", {"a": [1, {"b": None}]}, {"text": ["a", "b"], "label": 7}, [{"text": 1}], [{"role": 1}],
    "(A)x", "a ) 1 , b )",
)  # fmt: skip
NAMES = [
    "choices", "label", "passage", "solution", "reward_model", "extra_info", "0", "1", "A", "B", "metadata", "level",
    "source", "id", "question_stem",
]  # fmt: skip


def harm(data: bytearray, rng: random.Random) -> bytes:
    for _ in range(rng.choice([1, 3, 20])):
        place = rng.randrange(len(data))
        match rng.randrange(4):
            case 0 | 1:
                data[place] ^= 1 << rng.randrange(8)
            case 2:
                data[place:place] = rng.randbytes(8)
            case 3 if place:
                del data[place:]
    return bytes(data)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_pipe_is_not_waited_for(tmp_path, suffix):
    path = tmp_path / f"set{suffix}"
    os.mkfifo(path)
    for reading in (read, read_questions):
        with pytest.raises(InputError, match=rf"set{re.escape(suffix)} is a device, a pipe or a folder"):
            reading(path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_damaged_source_is_read_or_named(tmp_path, suffix):
    rng, path = random.Random(suffix), tmp_path / f"set{suffix}"
    for _ in range(150):
        rows = [dict(rng.choice(ROWS))] * rng.randint(1, 30)
        rows = [
            {name: str(value) if ".csv" in suffix or ".tsv" in suffix else value for name, value in row.items()}
            for row in rows
        ]
        for _ in range(rng.randrange(4)):
            row = rng.choice(rows)
            row[rng.choice([*row] * 3 + NAMES)] = rng.choice(VALUES)
        try:
            write(path, *rows)
        except (ValueError, TypeError, OverflowError, NotImplementedError):
            # Parquet takes no column of two kinds, CSV no further column.
            continue
        if rng.random() < 0.5:
            path.write_bytes(harm(bytearray(path.read_bytes()), rng))
        try:
            reading = read(path)
        except InputError as error:
            assert str(path) in str(error) and "\n" not in str(error), json.dumps(rows)
            continue
        # What was read can be kept.
        write_questions(tmp_path / "kept.parquet", reading.questions, {})
        assert not reading.questions or read_questions(tmp_path / "kept.parquet").questions == tuple(reading.questions)
