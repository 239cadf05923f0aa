"""Tables of answers and their verdicts, one per grader, with the awkward ones."""

import sys
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
from grading_pools import pool_of

from exgrpo_cli.base.types import AnswerFormat, Verdict
from exgrpo_cli.grading import GradingItem, GradingPool
from exgrpo_cli.grading.notation.notation import plain_notation
from exgrpo_cli.grading.workers.messages import Task

CORRECT, WRONG, NO_ANSWER, UNPARSABLE = Verdict.CORRECT, Verdict.WRONG, Verdict.NO_ANSWER, Verdict.UNPARSABLE_GOLD
ANYWHERE = AnswerFormat(opens_think=False, requires_box=False, require_eos=False)
BOXED = AnswerFormat(opens_think=False, requires_box=True, require_eos=False)

MATH = [
    # Several boxes: the last counts, and neighbours are one answer, as math-verify has it.
    ("2", r"first \boxed{1}. After checking everything once more, with care, the value I find is \boxed{2}", CORRECT),
    (r"\{1,2\}", r"The solutions are $\boxed{1}$ and $\boxed{2}$", CORRECT),
    ("2", r"\boxed{1} and \boxed{2}", WRONG),
    ("2", r"\boxed{2} = \boxed{2}", CORRECT),
    ("7", r"\boxed{x=\boxed{7}}", CORRECT),
    # An unfinished box takes nothing away, and gives nothing.
    ("3", r"\boxed{3} and then \boxed{\frac{4}{5}", CORRECT),
    ("4", r"\boxed{3} and then \boxed{4", WRONG),
    ("7", r"\boxed{}", NO_ANSWER),
    ("7", r"\boxed{?}", WRONG),
    # Where boxes stand.
    ("7", r"$$\boxed{7}$$", CORRECT),
    ("7", r"\[\boxed {7}\]", CORRECT),
    ("7", r"\boxed{ 7\, }", CORRECT),
    ("7", "the total is 7", CORRECT),
    ("72", "#### 72", CORRECT),
    (r"\text{east}", "The answer is east.", CORRECT),
    (r"\text{east}", "The answer is west.", NO_ANSWER),
    ("4343_6", "The answer is $4343_6$.", CORRECT),
    ("4343_6", "The answer is $4343_7$.", WRONG),
    (r"24\text{ cm}^2", "The area is 24 cm^2.", CORRECT),
    (r"24\text{ cm}^2", "The area is 24 cm^3", WRONG),
    (r"24\text{ cm}^2", r"It is $24\text{ cm}^3$.", WRONG),
    ("7", "It is 7, for $3+4=7$.", CORRECT),
    ("7", "no idea", NO_ANSWER),
    # Inequalities and intervals: the gold sets the form.
    ("1<x<2", r"\boxed{(1,2)}", CORRECT),
    ("(1,2)", r"\boxed{1<x<2}", WRONG),
    ("1<x<2", r"\boxed{x\in(1,2)}", CORRECT),
    ("1<x<2", r"\boxed{1<x<2}", CORRECT),
    ("[1,2)", r"\boxed{[1,2]}", WRONG),
    (r"(-\infty,2)\cup(3,\infty)", r"\boxed{(3,\infty)\cup(-\infty,2)}", CORRECT),
    # Per cent.
    ("0.5", r"\boxed{50\%}", CORRECT),
    (r"50\%", r"\boxed{0.5}", CORRECT),
    (r"50\%", r"\boxed{50}", CORRECT),
    (r"50\%", r"\boxed{\frac12}", CORRECT),
    (r"50\%", r"\boxed{5}", WRONG),
    # Units are dropped where only one side names them.
    (r"5\text{ cm}", r"\boxed{5}", CORRECT),
    ("5", r"\boxed{5\text{ cm}}", CORRECT),
    (r"5\text{ cm}", r"\boxed{5\text{ m}}", WRONG),
    (r"15\mbox{ cm}^2", r"\boxed{15}", CORRECT),
    (r"\$18.90", r"\boxed{18.9}", CORRECT),
    (r"90^\circ", r"\boxed{90}", CORRECT),
    # Sets have no order, tuples have one.
    (r"\{1,2\}", r"\boxed{\{2,1\}}", CORRECT),
    ("3, 5, 7", r"\boxed{7,5,3}", CORRECT),
    ("(1,2)", r"\boxed{(2,1)}", WRONG),
    (r"1 \pm \sqrt{19}", r"\boxed{1-\sqrt{19},1+\sqrt{19}}", CORRECT),
    # Matrices.
    (
        r"\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix}",
        r"\boxed{\begin{bmatrix} -\frac13 \\ \frac23 \end{bmatrix}}",
        CORRECT,
    ),
    (r"\begin{pmatrix} 1&2\\3&4 \end{pmatrix}", r"\boxed{\begin{pmatrix} 1&2\\4&3 \end{pmatrix}}", WRONG),
    # Fractions: in words they are words.
    (r"\frac{2}{3}", r"\boxed{\text{two thirds}}", WRONG),
    (r"\frac{2}{3}", "The answer is two thirds.", NO_ANSWER),
    (r"\frac23", r"\boxed{0.667}", WRONG),
    (r"\frac13", r"\boxed{0.333333}", CORRECT),
    (r"1\frac{4}{5}", r"\boxed{\frac95}", CORRECT),
    # Equations.
    ("x=5", r"\boxed{5}", CORRECT),
    ("5", r"\boxed{x=5}", CORRECT),
    ("x=5", r"\boxed{y=5}", WRONG),
    ("y=2x+3", r"\boxed{2x-y+3=0}", CORRECT),
    # Expressions.
    ("(a+7)(b-3)", r"\boxed{ab-3a+7b-21}", CORRECT),
    ("(a+7)(b-3)", r"\boxed{ab-3a+7b-20}", WRONG),
    (r"\cot x", r"\boxed{\frac{\cos x}{\sin x}}", CORRECT),
    ("6 - 5i", r"\boxed{-5i+6}", CORRECT),
    ("1000", r"\boxed{10^3}", CORRECT),
    # Words, letters, bases.
    (r"\text{Evelyn}", r"\boxed{Evelyn}", CORRECT),
    (r"\text{even}", r"\boxed{\text{odd}}", WRONG),
    (r"\text{(C)}", r"\boxed{C}", CORRECT),
    ("52_8", r"\boxed{52_8}", CORRECT),
    ("52_8", r"\boxed{42}", WRONG),
    # Plain numbers.
    (r"10,\!080", r"\boxed{10080}", CORRECT),
    ("1000", r"\boxed{1,000}", CORRECT),
    ("1000", r"\boxed{1 000}", CORRECT),
    ("-5", r"\boxed{−5}", CORRECT),
    (".35625", r"\boxed{0.35625}", CORRECT),
    # Golds that cannot serve.
    ("", r"\boxed{7}", UNPARSABLE),
    (r"\boxed{7}", r"\boxed{7}", CORRECT),
    # Of which only the text is left: nothing else can be compared with it.
    (r"\text{x", r"\boxed{7}", UNPARSABLE),
    (r"\text{x", r"\text{x", CORRECT),
    (r"\frac13E_1+\frac23E_2", r"\boxed{\frac23}", UNPARSABLE),
    # Longer than the bound, at once; the explanation around a box may be as long as it likes.
    ("7", r"\boxed{" + "7" * 2001 + "}", NO_ANSWER),
    ("7", r"\boxed{" + "{" * 100_000 + "7" + "}" * 100_000 + "}", NO_ANSWER),
    ("7", "because " * 1000 + "7", NO_ANSWER),
    ("7", "because " * 1000 + r"\boxed{7}", CORRECT),
]

CAPITALS = ("Paris", "London", "Rome", "Berlin")
CHOICE = [
    ("C", "C", CORRECT),
    ("C", "(C)", CORRECT),
    ("C", "c.", CORRECT),
    ("C", "ANSWER: C", CORRECT),
    ("C", "It is not A or B.\nANSWER: C\n", CORRECT),
    ("C", "Answer: B\nNo, wait. Answer: C", CORRECT),
    ("C", "The answer is C because Rome is in Italy.", CORRECT),
    ("C", "**Answer: (C) Rome.**", CORRECT),
    ("C", r"The answer is \(\text{C}\)", CORRECT),
    ("C", "My answer is B.", WRONG),
    ("C", "Answer: B. No, wait. Answer: C", CORRECT),
    ("C", "The answer is not A. The answer is C, as no other answer will do.", CORRECT),
    ("C", "The answer is C.\nThe answer of the others was a guess.", NO_ANSWER),
    ("C", "Answer: C\nThat is my answer.", CORRECT),
    ("C", "The correct option is C.", CORRECT),
    ("C", "Answer：C", CORRECT),
    ("C", "Answer - C", CORRECT),
    ("C", "Option C", CORRECT),
    ("C", r"\boxed{\text{Choice (C)}}", CORRECT),
    ("C", "Option", NO_ANSWER),
    ("C", r"\boxed{C}", CORRECT),
    ("C", r"$\boxed{\textbf{(C)}}$", CORRECT),
    ("C", r"\boxed{B}. The other answer: C", WRONG),
    ("C", r"\boxed{Rome}", CORRECT),
    ("C", r"\boxed{C. Rome}", CORRECT),
    ("C", r"\boxed{C. London}", NO_ANSWER),
    ("C", "rome", CORRECT),
    ("C", "Answer: Rome", CORRECT),
    ("Rome", "C", CORRECT),
    (r"\text{(C)}", "C", CORRECT),
    ("C", "Answer: B or C", NO_ANSWER),
    ("C", r"\boxed{A, C}", NO_ANSWER),
    ("A", "Answer: A good question", NO_ANSWER),
    ("A", "A good question", NO_ANSWER),
    ("C", r"\boxed{E}", NO_ANSWER),
    ("C", "I answered this before.", NO_ANSWER),
    ("E", r"\boxed{A}", UNPARSABLE),
    ("C", "C is correct.", CORRECT),
    ("C", "Rome is in Italy, so (C) is the right answer.", CORRECT),
    ("C", "I compare them one by one.\nHence option C.", CORRECT),
    ("C", "Hence choice (C), since Rome is in Italy.", CORRECT),
    ("C", "Option A is wrong.\nOption C is correct.", CORRECT),
    ("C", "The answer is clear: C is correct.", CORRECT),
    ("A", "Answer: A is correct", CORRECT),
    ("C", "B is correct.", WRONG),
    ("C", "A is not correct.", NO_ANSWER),
    ("C", "Either option B or option C.", NO_ANSWER),
    ("C", "Option C is incorrect.", NO_ANSWER),
    ("C", "It is not option C.", NO_ANSWER),
    ("C", "We rule out option C.", NO_ANSWER),
    ("C", "Neither B nor C is correct.", NO_ANSWER),
    ("C", "The wrong answer is C.", NO_ANSWER),
    ("C", "Is the answer C? No, it is B.", NO_ANSWER),
    ("C", "The answer: C? No: D", NO_ANSWER),
    ("C", "The answer must be C.", CORRECT),
    ("C", "The answer is (c), because Rome is in Italy.", CORRECT),
    ("C", "Hence option c.", CORRECT),
    ("C", "(c) is correct.", CORRECT),
    ("C", "<answer>C</answer>", CORRECT),
    ("C", "<answer>\nC\n</answer>", CORRECT),
    ("C", '{"answer": "C"}', CORRECT),
    ("c", "ANSWER: C", CORRECT),
    ("(c)", "c", CORRECT),
    ("C", "[C]", CORRECT),
    ("C", "ANSWER: [C]", CORRECT),
    ("C", "C)Rome", CORRECT),
    ("C", r"\boxed{C.Rome}", CORRECT),
    ("C", r"\boxed{C - Rome}", CORRECT),
    ("C", "Answer: Rome (C)", CORRECT),
    ("C", r"\boxed{C (Oslo)}", NO_ANSWER),
    ("C", "So the right option is C", CORRECT),
    # Options that are numbered; a letter names the same one by its place.
    ("3", "ANSWER: 3", CORRECT),
    ("3", r"\boxed{3}", CORRECT),
    ("3", r"\boxed{(3)}", CORRECT),
    ("3", "The answer is (3) because Rome is in Italy.", CORRECT),
    ("3", "ANSWER: C", CORRECT),
    ("3", "3) Rome", CORRECT),
    ("3", "Rome", CORRECT),
    ("3", "2", WRONG),
    ("3", "ANSWER: B", WRONG),
    ("3", "ANSWER: 5", NO_ANSWER),
    ("3", "ANSWER: 3.5", NO_ANSWER),
    ("5", "5", UNPARSABLE),
    ("C", "3", NO_ANSWER),
    ("C", "x " * 5000 + "\nAnswer: C", CORRECT),
    ("C", "answer: " + "C" * 5000, NO_ANSWER),
]

EXACT = [
    ("Monday", "Monday", CORRECT),
    ("Monday", "  Monday\n", CORRECT),
    ("two words", "two\n words", CORRECT),
    ("Monday", r"It was \boxed{Monday}", CORRECT),
    ("Monday", "monday", WRONG),
    ("1/2", "0.5", WRONG),
    ("Monday", r"\boxed{}", NO_ANSWER),
    ("Monday", "M" * 2001, NO_ANSWER),
]


def item(gold: str, response: str, **changes: object) -> GradingItem:
    fields = {"gold": gold, "response": response, "finished": True, "answer_format": ANYWHERE} | changes
    return GradingItem(**fields)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def math_pool() -> Iterator[GradingPool]:
    with pool_of("math") as pool:
        yield pool


@pytest.mark.parametrize(("gold", "response", "verdict"), MATH)
def test_math(math_pool: GradingPool, gold: str, response: str, verdict: Verdict) -> None:
    assert math_pool.grade([item(gold, response)]) == [verdict]


@pytest.mark.parametrize(("gold", "response", "verdict"), CHOICE)
def test_choice(gold: str, response: str, verdict: Verdict) -> None:
    with pool_of("choice") as pool:
        assert pool.grade([item(gold, response, options=CAPITALS)]) == [verdict]


def test_choice_without_known_options_goes_by_letters_alone() -> None:
    with pool_of("choice") as pool:
        items = [item("J", r"\boxed{J}"), item("C", r"\boxed{C) anything}"), item("C", "Rome")]
        assert pool.grade(items) == [CORRECT, CORRECT, NO_ANSWER]


def test_numbered_options_that_are_numbers_are_meant_by_their_label() -> None:
    numbers = ("30", "3", "1", "2")
    with pool_of("choice") as pool:
        items = [item("3", response, options=numbers) for response in ("ANSWER: 3", "ANSWER: 2", "3) 1", "30", "C")]
        assert pool.grade(items) == [CORRECT, WRONG, CORRECT, WRONG, CORRECT]
        lettered = [item("B", response, options=numbers) for response in ("3", "B. 3", "ANSWER: 2")]
        assert pool.grade(lettered) == [CORRECT, CORRECT, WRONG]
        vitamins = [item("A", response, options=("C", "D", "A", "b")) for response in ("ANSWER: A", "C", "A. C", "b")]
        assert pool.grade(vitamins) == [CORRECT, WRONG, CORRECT, WRONG]


def test_the_line_that_a_choice_question_demands_counts_without_a_box(math_pool: GradingPool) -> None:
    responses = {
        "so\nANSWER: C": CORRECT,
        "so\n**Answer: B**": WRONG,
        "so\nThe answer is (C).": CORRECT,
        "so\n<answer>C</answer>": CORRECT,
        'so\n"answer": "C"': CORRECT,
        "so it is C": NO_ANSWER,
        "Answer: C\nor not": NO_ANSWER,
    }
    items = [item("C", response, options=CAPITALS, answer_format=BOXED) for response in responses]
    assert math_pool.grade(items) == list(responses.values())
    # Without options a template that asks for a box wants one.
    assert math_pool.grade([item("C", "ANSWER: C", answer_format=BOXED)]) == [NO_ANSWER]
    # A gold that is a letter and no more, as of a file whose options were not recognised.
    assert math_pool.grade([item("C", "ANSWER: C"), item("C", "The answer is (B).")]) == [CORRECT, WRONG]


def test_math_grades_a_question_with_options_by_them(math_pool: GradingPool) -> None:
    responses = {r"\boxed{C}": CORRECT, r"\boxed{Rome}": CORRECT, "ANSWER: (B)": WRONG, r"\boxed{Oslo}": NO_ANSWER}
    items = [item("C", response, options=CAPITALS) for response in responses]
    assert math_pool.grade(items) == list(responses.values())
    assert math_pool.same_answer([(r"\boxed{C}", "Rome"), (r"\boxed{C}", "Paris")], CAPITALS) == [True, False]


@pytest.mark.parametrize(("gold", "response", "verdict"), EXACT)
def test_exact(gold: str, response: str, verdict: Verdict) -> None:
    with pool_of("exact") as pool:
        assert pool.grade([item(gold, response)]) == [verdict]


def test_audit_of_golds(math_pool: GradingPool) -> None:
    golds = {
        "5": CORRECT,
        r"\frac{1}{2}": CORRECT,
        r"(-\infty, 2) \cup (3, \infty)": CORRECT,
        "1<x<2": CORRECT,
        "": UNPARSABLE,
        "5.": CORRECT,
        # math-verify keeps its text, which only the very same text would match.
        r"\text{x": UNPARSABLE,
        # Parses to zoo, which equals nothing.
        r"\frac{1}{0}": WRONG,
    }
    assert dict(zip(golds, math_pool.verify_gold(list(golds)), strict=True)) == golds
    with pool_of("choice") as pool:
        assert pool.verify_gold(["C", "(b)", "42"]) == [CORRECT, CORRECT, UNPARSABLE]
    with pool_of("exact") as pool:
        # No answer of 2,001 characters is read, so the last gold could never be met.
        assert pool.verify_gold(["anything", " ", "M" * 2001]) == [CORRECT, UNPARSABLE, NO_ANSWER]


def test_identical_pairs_are_graded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pool_of("math") as pool:
        held: list[tuple[Task, Future[Verdict]]] = []
        send = pool._remote.submit
        monkeypatch.setattr(pool._remote, "submit", lambda task, future: held.append((task, future)))
        same = [pool.submit(item("x+y+z", r"\boxed{z+y+x}")) for _ in range(3)]
        # All three wait for one answer of the worker, which gets its task only now.
        assert len(held) == 1 and same[0] is same[1] is same[2]
        send(*held[0])
        assert same[0].result() is CORRECT
        # Known by now: no waiting at all.
        assert pool.submit(item("x+y+z", r"So $\boxed{z+y+x}$.")).done()


@pytest.mark.parametrize("answer", ["," * 1999, "7" + " " * 1998 + "x", r"7\text{ }" * 250, "x," * 1000])
def test_an_answer_of_nothing_but_marks_is_brought_to_plain_notation_in_few_steps(answer: str) -> None:
    looks = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal looks
        looks += event == "c_call"

    sys.setprofile(count)
    try:
        plain_notation.__wrapped__(answer)
    finally:
        sys.setprofile(None)
    # Each a regular expression that reads the text once: a mark taken away at a time made it thousands.
    assert looks < 1000
