"""Small question sets in the layouts that benchmarks come in, each with what is right and what is wrong at it.

Each question holds a mark of its own (`q3;`), by which a server that was sent its text can tell it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

SYSTEM = {"role": "system", "content": "Think first, then put the answer in \\boxed{}."}


class Known(NamedTuple):
    """What is right and what is wrong at one question; option texts where it has options."""

    right: str
    wrong: str


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A small question set in one layout."""

    file: str
    rows: Sequence[Any]
    known: Sequence[Known]
    benchmark: str = ""
    """Asked for by this name; without one as a file of the user's own."""


def rows_of(make: Callable[[str, str], Any], answers: Sequence[str]) -> list[Any]:
    return [make(f"q{n}; what is it?", answer) for n, answer in enumerate(answers)]


NUMBERS = ("4", "7", "1/2", "-3")
NUMBERS_KNOWN = (Known("4", "5"), Known("7.0", "8"), Known("\\frac{1}{2}", "\\frac{1}{3}"), Known("-3", "3"))
COUNTS_KNOWN = (Known("4", "5"), Known("1272", "1273"))
# The right option of each question by its place, and options that are long enough to be told apart.
OPTIONS = (("oak", "birch", "elm", "ash"), ("iron", "lead", "zinc", "gold"), ("red", "blue", "green", "white"))
PLACES = (0, 2, 3)
LABELS = "ABCD"
OPTIONS_KNOWN = tuple(Known(options[place], options[place - 1]) for options, place in zip(OPTIONS, PLACES, strict=True))


def choice_rows(make: Callable[[str, Sequence[str], int], Any]) -> list[Any]:
    pairs = enumerate(zip(OPTIONS, PLACES, strict=True))
    return [make(f"q{n}; which one?", options, place) for n, (options, place) in pairs]


def verl(source: str, system: bool = False) -> Callable[[str, str], dict[str, Any]]:
    def make(question: str, answer: str) -> dict[str, Any]:
        return {
            "data_source": source,
            "prompt": [*([SYSTEM] if system else []), {"role": "user", "content": question}],
            "ability": "math",
            "reward_model": {"ground_truth": answer, "style": "rule"},
            "extra_info": {"index": 0, "split": "default"},
        }

    return make


def asked_in_text(source: str, label: str, request: str, *, labels: str = LABELS) -> Any:
    """Options in the prompt itself, as the verl-layout files of multiple-choice benchmarks have them."""
    make = verl(source)

    def convert(question: str, options: Sequence[str], place: int) -> dict[str, Any]:
        lines = "\n".join(label.format(name, text) for name, text in zip(labels, options, strict=True))
        return make(f"{question}\n\n{lines}{request}", labels[place])

    return convert


IN_A_LINE = (
    "\n\nThink it over. The last line of your response has to be of the form ANSWER: C, with one of the letters."
)


def boxed_solution(question: str, answer: str) -> dict[str, Any]:
    solution = f"At first one would say \\boxed{{99}}. That is far too much. It is \\boxed{{{answer}}}."
    return {"problem": question, "level": "Level 5", "type": "Algebra", "solution": solution}


LAYOUTS = {
    "gsm8k": Layout(
        file="train.jsonl",
        rows=rows_of(lambda q, a: {"question": q, "answer": f"2+2=<<2+2=4>>4\n#### {a}"}, ("4", "1,272")),
        known=COUNTS_KNOWN,
    ),
    "math": Layout(file="set.json", rows=rows_of(boxed_solution, NUMBERS), known=NUMBERS_KNOWN),
    "openr1 as the paper's training set has it": Layout(
        file="set.parquet", rows=rows_of(verl("openr1", system=True), NUMBERS), known=NUMBERS_KNOWN
    ),
    "orz": Layout(
        file="set.json",
        rows=rows_of(
            lambda q, a: [{"from": "human", "value": q}, {"from": "assistant", "ground_truth": {"value": a}}], NUMBERS
        ),
        known=NUMBERS_KNOWN,
    ),
    "aime24 in verl, rows repeated": Layout(
        file="set.parquet",
        rows=rows_of(verl("aime"), ("204", "033", "7")) * 4,
        known=(Known("204", "205"), Known("33", "34"), Known("7", "70")),
        benchmark="aime24",
    ),
    "math500 in verl": Layout(
        file="set.parquet",
        rows=rows_of(verl("math"), ("\\left( 3, \\frac{\\pi}{2} \\right)", "\\frac{14}{3}", "p - q", "10\\%")),
        known=(
            Known("(3, \\frac{\\pi}{2})", "(3, \\pi)"),
            Known("\\frac{14}{3}", "\\frac{3}{14}"),
            Known("-q + p", "q - p"),
            Known("10\\%", "11\\%"),
        ),
        benchmark="math500",
    ),
    "amc in verl with floats as text": Layout(
        file="set.parquet",
        rows=rows_of(verl("amc"), ("142.0", "9.0")),
        known=(Known("142", "141"), Known("9", "-9")),
        benchmark="amc",
    ),
    "arc with letters": Layout(
        file="set.jsonl",
        rows=choice_rows(
            lambda q, o, p: {"question": q, "choices": {"text": o, "label": [*LABELS]}, "answerKey": LABELS[p]}
        ),
        known=OPTIONS_KNOWN,
    ),
    "gpqa as the released code writes it": Layout(
        file="set.parquet",
        rows=choice_rows(asked_in_text("gpqa", "{}) {}", IN_A_LINE)),
        known=OPTIONS_KNOWN,
        benchmark="gpqa-diamond",
    ),
    "arc in verl with digits": Layout(
        file="set.parquet",
        rows=choice_rows(asked_in_text("arc-c", "{}. {}", "", labels="1234")),
        known=OPTIONS_KNOWN,
        benchmark="arc-c",
    ),
    "small letters, a list and a request behind it": Layout(
        file="set.jsonl",
        rows=choice_rows(asked_in_text("quiz", "- ({}) {}", "\nThe last line is 'ANSWER: X'.", labels="abcd")),
        known=OPTIONS_KNOWN,
    ),
    "mmlu": Layout(
        file="set.jsonl",
        rows=choice_rows(lambda q, o, p: {"question": q, "choices": o, "answer": p}),
        known=OPTIONS_KNOWN,
    ),
    "gpqa as published": Layout(
        file="gpqa_diamond.csv",
        rows=choice_rows(
            lambda q, o, p: {
                "Question": q,
                "Correct Answer": o[p],
                **{f"Incorrect Answer {n}": text for n, text in enumerate([*o[:p], *o[p + 1 :]], start=1)},
            }
        ),
        known=OPTIONS_KNOWN,
    ),
}
