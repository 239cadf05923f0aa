"""Small question sets in the layouts that benchmarks come in, each with what is right and what is wrong at it.

Each question holds a mark of its own (`q3;`), by which a server that was sent its text can tell it.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
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


def asked_in_text(source: str, label: str, request: str, *, labels: str = "ABCD") -> Any:
    """Options in the prompt itself, as the verl-layout files of multiple-choice benchmarks have them."""
    make = verl(source)

    def convert(question: str, options: Sequence[str], place: int) -> dict[str, Any]:
        lines = "\n".join(label.format(name, text) for name, text in zip(labels, options, strict=True))
        return make(f"{question}\n\n{lines}{request}", labels[place])

    return convert


IN_A_LINE = (
    "\n\nThink it over. The last line of your response has to be of the form ANSWER: C, with one of the letters."
)


def _layout(line: str) -> tuple[str, Layout]:
    layout = json.loads(line)
    return layout.pop("name"), Layout(**layout | {"known": [Known(*own) for own in layout["known"]]})


LAYOUTS = dict(map(_layout, Path(__file__).with_suffix(".jsonl").read_text().splitlines()))
