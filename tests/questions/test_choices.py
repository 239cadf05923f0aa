"""Multiple-choice questions in the layouts of public sets: found in the text, and put in another order."""

import pytest
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
        # The last list counts: the first holds statements.
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
