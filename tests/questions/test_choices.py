"""Multiple-choice questions in the layouts of public sets: found in the text, and put in another order."""

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from benchmark_layouts import IN_A_LINE
from question_sources import question

from exgrpo_cli.evaluation.benchmarks import shuffle_choices
from exgrpo_cli.questions.choices import find_choices, format_choices, options_of

DEMAND = "Answer the question. The last line has the format 'ANSWER: $LETTER', where LETTER is one of ABCD."
FILE = Path(__file__).with_name("choices.jsonl")
CASES = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
"""Texts with the labels and the options that are found in them, `why` where it is not plain; without any none are."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["text"][:40])
def test_options_are_found_where_there_are_some(case: dict[str, Any]) -> None:
    choices = find_choices(case["text"])
    assert (choices is None) == (not case["options"])
    if choices is not None:
        assert ("".join(choices.labels), choices.options) == (case["labels"], tuple(case["options"]))
        assert choices.reordered(range(len(choices.options))) == case["text"]


def test_a_gold_has_to_be_a_label_in_any_case() -> None:
    text = "Which?\n(a) one\n(b) two"
    named = {gold for gold in ("a", "B", "(b)", "c", "one") if options_of(question(text, answer=gold)) is not None}
    assert named == {"a", "B", "(b)"}


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        (f"{DEMAND}\n\nWhich?\n\nA) right\nB) left\n\nC) up\nD) down\n\n", "A"),
        ("Which?\n\n1) left\n2) up\n3) right\n4) down", "3"),
        ("Which?\n(A) left\n(B) right\n(C) up", "B"),
        (format_choices("Which?", ["left", " up\nthere ", "down", "right"]), "D"),
    ],
)
def test_the_gold_moves_with_its_option_and_the_layout_stays(text: str, gold: str) -> None:
    orders = set()
    for seed in range(12):
        shuffled = shuffle_choices(question(text, answer=gold), seed)
        found = find_choices(shuffled.question.prompt[-1].content)
        assert found is not None and found.options == shuffled.options
        place = found.place_of(shuffled.question.answer)
        assert place is not None and found.options[place] == "right"
        # Everything but the options is as before.
        assert len(found.text) == len(text) and found.text.split("Which?")[0] == text.split("Which?")[0]
        orders.add(shuffled.options)
    assert len(orders) > 2


STARTS = (
    "", ".", "(a) ", "(b) ", "a) ", "A. ", "B) ", "1. ", "= ", ") ", "- ", "**", "[A] ", "Answer: ", "How many? ",
    "\u2028",
)  # fmt: skip
WORDS = (
    "one", "44", "(a) 1, (b) 2", "B. two", "1) x 2) y", "answer", "\\frac{1}{2}", "A", "which", "(C)", "$x$.",
    "two\nlines",
)  # fmt: skip


def test_options_of_a_column_are_found_as_they_were_whatever_they_hold() -> None:
    rng = random.Random(32)
    for _ in range(2000):
        texts = [
            rng.choice(STARTS) + " ".join(rng.choices(WORDS, k=rng.randint(1, 3))) for _ in range(rng.randint(2, 12))
        ]
        asked = " ".join(rng.choices(WORDS, k=4)) + rng.choice(
            ["", "\n(a) x\n(b) y", "\nA. x\nB. y\n\nC. z", "\n\n1. x\n2. y\n3. z"]
        )
        found = find_choices(format_choices(asked, texts))
        assert found is not None and found.options == tuple(" ".join(text.split()) for text in texts)


@pytest.mark.parametrize("label", ["{}. ", "{}) ", "({}) ", "{}: ", "**{}.** ", "- {}) "])
def test_options_in_prose_are_found_with_lists_and_paragraphs_in_them(label: str) -> None:
    rng = random.Random(label)
    inner = ("(a) x, (b) y", "(a) x\n(b) y", ".44", "a\n\nb, c", "x\n\ny\n\nz", "1. x 2. y")
    for _ in range(300):
        texts = [rng.choice(inner) for _ in range(rng.randint(3, 6))]
        lines = "\n".join(label.format(name) + text for name, text in zip("ABCDEF", texts, strict=False))
        asked = rng.choice(["What is it?", "Given are\n(1) x\n(2) y\n(3) z\n\nWhat holds?"])
        found = find_choices(f"{asked}\n\n{lines}{rng.choice(['', IN_A_LINE])}")
        assert found is not None and found.options == tuple(texts)


@pytest.mark.parametrize(
    "lines",
    ["A. x\n", "(a) x\n(b) y\n", "1. x\n2. y\n3. z\nand more\n", "A. x\n\n", "A.\n", "A. \t \t", "\n", "1) x\n2) y\n"],
)
def test_a_text_of_nothing_but_labels_takes_no_time(lines: str) -> None:
    """A megabyte of them; looking at each list in it would take minutes."""
    began = time.process_time()
    find_choices(f"Which?\n{lines * (1_000_000 // len(lines))}and that is all")
    assert time.process_time() - began < 20
