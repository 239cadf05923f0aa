"""Multiple-choice questions in the layouts of public sets: found in the text, and put in another order."""

import random
import time

import pytest
from benchmark_layouts import IN_A_LINE
from question_sources import question

from exgrpo_cli.evaluation.benchmarks import shuffle_choices
from exgrpo_cli.questions.choices import find_choices, format_choices, options_of

DEMAND = "Answer the question. The last line has the format 'ANSWER: $LETTER', where LETTER is one of ABCD."


@pytest.mark.parametrize(
    ("text", "labels", "options"),
    [
        (f"{DEMAND}\n\nWhich gas?\n\nA) argon\nB) ozone\n\nC) xenon\n\n", "ABC", ("argon", "ozone", "xenon")),
        ("Which?\n\nA. one\nB. two", "AB", ("one", "two")),
        ("Which?\n(A) one\n(B) two", "AB", ("one", "two")),
        ("Which?\nA: one\nB: two\nC: three", "ABC", ("one", "two", "three")),
        ("Which?\na) one\nb) two", "ab", ("one", "two")),
        ("Which?\n\n1) one\n2) two\n3) three\n4) four\n", "1234", ("one", "two", "three", "four")),
        ("Which?\n**A.** one\n**B.** two", "AB", ("one", "two")),
        ("Which?\n- A. one\n- B. two", "AB", ("one", "two")),
        ("Which?\n(a)one\n(b)two", "ab", ("one", "two")),
        ("Which?\nA.1.5\nB.2.5", "AB", ("1.5", "2.5")),
        ("Which?\nA:one\nB:two", "AB", ("one", "two")),
        ("Which?\n[A] one\n[B] two", "AB", ("one", "two")),
        # What asks for the answer is no part of the last option.
        ("Which?\nA. one\nB. two\nAnswer:", "AB", ("one", "two")),
        ("Which?\nA. one\nB. two\nwhich is more", "AB", ("one", "two\nwhich is more")),
        ("Which?\n1. one\n2. two\n3. three\n\nAnswer with the number of the option.", "123", ("one", "two", "three")),
        # Over lines up to the next label; behind a blank line the question goes on.
        ("Which?\nA) one\nor half\nB) two\n\nName a letter.", "AB", ("one\nor half", "two")),
        # One that begins with a sign, or on a line of its own.
        ("Which?\n\nA. .44\nB. .45", "AB", (".44", ".45")),
        ("Which?\nA. = 3\nB. :b", "AB", ("= 3", ":b")),
        ("Which?\nA.\n(a) 1\n(b) 2\nB.\n(a) 3\n(b) 4", "AB", ("(a) 1\n(b) 2", "(a) 3\n(b) 4")),
        # A list inside an option is a part of it.
        ("Which?\nA) one\nB) two\nC) all of\n1) x\n2) y\n3) z", "ABC", ("one", "two", "all of\n1) x\n2) y\n3) z")),
        ("(1) It rains.\n(2) It is dry.\n(3) It is.\n\nA. (1)\nB. (2), (3)", "AB", ("(1)", "(2), (3)")),
        # A paragraph that asks for nothing is the last option's, as it is the others'.
        ("Which?\nA) a\n\nmore\nB) b\n\nmore of b\n\nThink it over.", "AB", ("a\n\nmore", "b\n\nmore of b")),
        ("Which?\nA) a\nB) b\n\nThe last line is 'ANSWER: X'.", "AB", ("a", "b")),
        # The last list counts: the first holds statements.
        ("A. It rains.\nB. It is dry.\nWhich is true?\n(a) A\n(b) B", "ab", ("A", "B")),
        ("(1) It rains.\n(2) It is dry.\n\nWhich is true?\nA) 1\nB) 2", "AB", ("1", "2")),
    ],
)
def test_options_are_found(text: str, labels: str, options: tuple[str, ...]) -> None:
    choices = find_choices(text)
    assert choices is not None
    assert ("".join(choices.labels), choices.options) == (labels, options)
    assert choices.reordered(range(len(options))) == text


@pytest.mark.parametrize(
    "text",
    [
        "Which?",
        "Which?\n\nA. one\nC. two",
        "How many hold?\n1) x > 0\n2) x < 0",
        "How many hold?\n1) x > 0\n2) x < 0\n3) x = 0\n\nGive a number.",
        "How many hold?\n1) x > 0\n2) x < 0\n3) x = 0",
        "1) x > 0\n2) x < 0\n3) x = 0\nWhat holds if x is 1?",
        "Vitamin A. B. cereus needs none.",
        "Solve (1) x+y=2 (2) x-y=0 (3) z=1. Find x.",
        "How many of these hold? (1) x > 0 (2) x < 0 (3) x = 0",
        "Which? (A) one (B) two (C) three",
        "See [1], [2] and [3].",
        "See [A](one) and [B](two).",
        "Of A.B.\nB.C.\n only one is a product.",
        "Steps 1. 2. 3. follow",
    ],
)
def test_other_texts_have_no_options(text: str) -> None:
    assert find_choices(text) is None


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
    "",
    ".",
    "(a) ",
    "(b) ",
    "a) ",
    "A. ",
    "B) ",
    "1. ",
    "= ",
    ") ",
    "- ",
    "**",
    "[A] ",
    "Answer: ",
    "How many? ",
    "\u2028",
)
WORDS = (
    "one",
    "44",
    "(a) 1, (b) 2",
    "B. two",
    "1) x 2) y",
    "answer",
    "\\frac{1}{2}",
    "A",
    "which",
    "(C)",
    "$x$.",
    "two\nlines",
)


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
