"""Of right answers to word problems of level 1: is the asked operation done on the asked numbers, and what tells it.

Run as `.venv/bin/python docs/results/sound_working.py RUN...` on runs of `smollm2-135m` with a ledger: a line of JSON
of each; on a file of such lines (`*.jsonl`): by predictor the mean over its runs, and what entropy has over its
rivals. A right answer is *sound* where one of its equations is the one that the question asks for and none of them is
wrong. For low entropy, short responses and high log-prob: the share of pairs of a sound and an unsound right answer to
one question in which the sound one has less of it (AUC within questions, ties count half).
"""

import json
import re
import sys
from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

import exgrpo_cli
from exgrpo_cli.base.data import tables
from exgrpo_cli.base.statistics import t_interval
from exgrpo_cli.questions.made import make_split, word_problems
from exgrpo_cli.studies.measure import auc

SIGNS = {"x": "*", "X": "*", "×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", r"\times": "*", r"\div": "/"}
EQUATION = re.compile(
    r"(\d+)(?: [a-z]+)?\s*(\\times|\\div|[-+*/xX×·÷−–])\s*(\d+)(?: [a-z]+)?\s*=\s*(\d+)"  # "6 minutes x 3 = 18 minutes"
)
PREDICTORS = ("entropy", "num_tokens", "nll")


@cache
def _patterns() -> list[tuple[str, re.Pattern[str]]]:
    """Sign, and how a question of one step begins, for every way to tell it."""
    told = tables(word_problems.__file__, "stories.toml")
    found = []
    for story in told["stories"]:
        may_be = {"a": told["names"], "b": told["names"], "thing": story["things"]}
        for start, (sign, steps) in product(story["starts"], story["steps"].items()):
            for step in steps:
                pattern = re.escape(f"{start} {step}").replace(re.escape("{n}"), r"(\d+)")
                for name, values in may_be.items():
                    one_of = f"(?P<{name}>{'|'.join(map(re.escape, values))})"
                    first, *others = pattern.split(re.escape(f"{{{name}}}"))
                    pattern = first + one_of + f"(?P={name})".join(others) if others else first
                found.append((sign, re.compile(pattern, re.IGNORECASE)))
    return found


def asked(question: str) -> tuple[int, str, int]:
    """Start, sign and operand of a question of level 1."""
    ((sign, match),) = [(sign, match) for sign, pattern in _patterns() if (match := pattern.match(question))]
    start, operand, *_ = (int(number) for number in match.groups() if number and number.isdigit())
    return start, sign, operand


def is_sound(response: str, start: int, sign: str, operand: int) -> bool:
    """Whether the asked equation stands in a response, and no wrong one."""
    right = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": lambda a, b: a / b}
    found = [(int(a), SIGNS.get(op, op), int(b), int(c)) for a, op, b, c in EQUATION.findall(response)]
    orders = {(start, operand), (operand, start)} if sign in "+*" else {(start, operand)}
    return (
        any(op == sign and (a, b) in orders for a, op, b, _ in found)
        and all(b != 0 or op != "/" for _, op, b, _ in found)
        and all(right[op](a, b) == c for a, op, b, c in found)
    )


def judged(run: Path) -> dict[str, Any]:
    """Of one run: right answers stored, how many are sound, and by predictor the AUC within questions."""
    opened = exgrpo_cli.open_run(run)
    questions = {each.id: each.prompt[-1].content for each in make_split("word-problems", opened.config).train}
    rows = [row for row in opened.ledger().to_pylist() if row["correct"]]
    texts = opened.texts([row["trajectory_id"] for row in rows])
    sound = np.array([is_sound(texts[row["trajectory_id"]], *asked(questions[row["question_id"]])) for row in rows])
    _, question = np.unique([row["question_id"] for row in rows], return_inverse=True)
    found = {name: auc(np.array([row[name] for row in rows], dtype=np.float64), sound, question) for name in PREDICTORS}
    return {"right": len(rows), "sound": int(sound.sum())} | found


def main(places: Sequence[str]) -> None:
    """Print a line of each run, and by predictor the mean over the runs of a file that have pairs to compare."""
    for place in map(Path, places):
        if place.suffix != ".jsonl":
            print(json.dumps({"run": f"{place.parent.name}/{place.name}"} | judged(place)))
            continue
        found = [json.loads(line) for line in place.read_text().splitlines()]
        print(f"{len(found)} runs, {sum(each['right'] for each in found)} right answers", end=", ")
        print(f"{sum(each['sound'] for each in found)} of them sound")
        known = np.array([[each[name] for name in PREDICTORS] for each in found if each["entropy"] is not None])
        for index, name in enumerate(PREDICTORS):
            over = t_interval(list(known[:, index]), bounds=(0.0, 1.0))
            ahead = t_interval(list(known[:, 0] - known[:, index]))
            print(f"low {name}: {over.mean:.3f} [{over.low:.3f}, {over.high:.3f}]", end="; ")
            print(f"entropy less it {ahead.mean:+.3f} [{ahead.low:.3f}, {ahead.high:.3f}]")


if __name__ == "__main__":
    main(sys.argv[1:])
