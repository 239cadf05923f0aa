"""Verifiers that a question or a user brings: countdown, reasoning-gym's scorers, one's own function, sums by line.

What a question carries beside its gold answer is a JSON table: `{"verifier": "countdown", "numbers": [2, 3], "target":
6}` names the verifier of the question. The default grader `math` grades such a question by it; a grader that was chosen
instead is used as chosen.
"""

import ast
import inspect
import json
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from importlib.util import find_spec
from numbers import Real
from typing import Any, NamedTuple

from exgrpo_cli.base import files, types, versions
from exgrpo_cli.base.errors import InputError, first_line, nearest, shown
from exgrpo_cli.config.names import GYM, load_function
from exgrpo_cli.grading import extract, plain

COUNTDOWN = "countdown"
_MOST_CHARS = 200
"""Length of a countdown answer; bounds the depth of its brackets too."""
_SUMS_AND_PRODUCTS = re.compile(r"[\d\s+\-*/()]*")
_OPERATIONS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip

ALLOWED: Mapping[str, str] = {task: reason for reason, tasks in plain.tables()["gym"].items() for task in tasks.split()}
"""Task of reasoning-gym and the reason why its scorer may see what a model wrote."""
_SCORER_OPTIONS: Mapping[str, Mapping[str, Any]] = {"word_ladder": {"min_word_length": 3, "max_word_length": 5}}
"""Options of tasks whose scorer looks things up in its own data set: it knows what any options of a question led to."""


@lru_cache(maxsize=4096)
def read_metadata(metadata: str | None) -> dict[str, Any]:
    """The table in a question's metadata, empty without any; not to be changed by callers.

    Raises InputError for text that is no JSON table, or that no verifier could read.
    """
    try:
        value = files.parse_json(metadata) if metadata else {}
    # No JSON, or a number of more digits than Python reads.
    except ValueError as error:
        raise InputError(f"a question's metadata {shown(metadata)} cannot be read: {first_line(error)}.") from error
    if not isinstance(value, dict):
        raise InputError(f"a question's metadata {shown(metadata)} is no JSON table; write {{}} or leave it empty.")
    return value


def verifier_of(metadata: str | None) -> str | None:
    """Name of the verifier that a question brings; None of most."""
    name = read_metadata(metadata).get("verifier")
    return None if name is None else str(name)


def grade_countdown(metadata: Mapping[str, Any], answer: str) -> types.Verdict:
    """Whether `answer` uses `metadata["numbers"]`, each once, and comes to `metadata["target"]`.

    Python reads the expression, of digits, + - * / and brackets alone, as a tree, and it is worked out in fractions:
    nothing that a model wrote is ever run as code. What is no expression is WRONG, what is empty NO_ANSWER.

    Raises:
        InputError: the metadata have no list of whole numbers, or no number as target.
    """
    given, target = _whole_numbers(COUNTDOWN, metadata, "numbers"), metadata.get("target")
    if type(target) not in (int, float):
        raise InputError(f"a question of {COUNTDOWN!r} needs a number in metadata.target, not {shown(target)}.")
    text = " ".join(answer.split())
    if not text:
        return types.Verdict.NO_ANSWER
    if len(answer.strip()) > _MOST_CHARS or not _SUMS_AND_PRODUCTS.fullmatch(text):
        return types.Verdict.WRONG
    numbers = Counter(map(int, re.findall(r"\d+", text)))
    try:
        # Python reads no number with a leading zero.
        tree = ast.parse(re.sub(r"\d+", lambda found: str(int(found[0])), text), mode="eval")
        value = _value(tree.body)
    except (SyntaxError, ZeroDivisionError):
        return types.Verdict.WRONG
    return plain.verdict_of(numbers == Counter(given) and value == target)


def _whole_numbers(kind: str, metadata: Mapping[str, Any], key: str) -> list[int]:
    numbers = metadata.get(key)
    if not isinstance(numbers, list) or not numbers or any(type(number) is not int for number in numbers):
        raise InputError(f"a question of {kind!r} needs whole numbers in metadata.{key}, not {shown(numbers)}.")
    return numbers


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int(number)):
            return Fraction(number)
        case ast.BinOp() if type(node.op) in _OPERATIONS:
            return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    raise SyntaxError(f"{type(node).__name__} is no sum or product of numbers")


def require_task(task: str) -> None:
    """Raise InputError for a task of reasoning-gym that is not allowed, and where that is not installed."""
    if task not in ALLOWED:
        raise InputError(
            f"{GYM}{task} is not among the {len(ALLOWED)} tasks of reasoning-gym whose scorers are known to read an "
            f"answer as data and never as code.{nearest(task, sorted(ALLOWED))}"
        )
    if find_spec("reasoning_gym") is None:
        raise InputError(f"{GYM}{task} needs reasoning-gym: {versions.install_command('gym')}.")


@lru_cache(maxsize=8)
def scorer_of(task: str) -> Any:
    """The data set of a task, for its `score_answer`. Raises InputError as `require_task` does."""
    require_task(task)
    import reasoning_gym

    return reasoning_gym.create_dataset(task, size=1, seed=0, **_SCORER_OPTIONS.get(task, {}))


def grade_gym(metadata: str | None, answer: str, success_at: float = 1.0) -> types.Grade:
    """Grade by the score on the entry in the question's metadata; what the scorer cannot read earns nothing.

    A scorer may give part of a point, which is a success from `success_at` on. Runs in workers.
    """
    known = read_metadata(metadata)
    scorer = scorer_of(str(known["verifier"]).removeprefix(GYM))
    # A copy: scorers may write into what they are given.
    entry = json.loads(json.dumps(known["entry"]))
    try:
        score = scorer.score_answer(answer, entry)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError):
        return types.Grade.of(types.Verdict.WRONG)
    # Shares of a point that are added up may come to 1.0000000000000002 for a wrong answer: that is just under a point.
    return grade_of(types.Score(max(0.0, min(float(score), math.nextafter(1, 0)) if score != 1 else 1.0)), success_at)


def grade_of(result: object, success_at: float) -> types.Grade:
    """Grade of what a grader returned; raises ValueError where that is none of the forms it may have."""
    # A number of numpy or torch is one all the same.
    result = result.item() if hasattr(result, "item") else result
    if isinstance(result, types.Verdict | bool):
        return types.Grade.of(result if isinstance(result, types.Verdict) else plain.verdict_of(result))
    score = result if isinstance(result, types.Score) else types.Score(result)  # type: ignore[arg-type]
    reward, correct = score.reward, score.correct
    well_made = all(isinstance(name, str) and _is_number(value) for name, value in score.parts.items())
    if not (well_made and _is_number(reward) and 0 <= reward <= 1 and correct in (True, False, None)):
        raise ValueError(shown(result))
    verdict = plain.verdict_of(reward >= success_at if correct is None else bool(correct))
    return types.Grade(verdict, float(reward), {name: float(value) for name, value in score.parts.items()})


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def load_own(grader: str, success_at: float = 1.0) -> Callable[[str, str, str | None, str], types.Grade]:
    """The function that `python:module:function` names, as (gold, text, metadata, response) -> Grade; runs in workers.

    `text` is the graded text of a response; a function with a parameter `metadata` gets the table of the question's
    metadata by that name, empty without any, one with a parameter `response` the whole response. It returns a bool, a
    number in [0, 1], a Verdict or a Score. What it raises ends its worker: the answer counts as crashed. What it
    returns otherwise raises InputError, which ends the run: it would not mend itself.

    Raises:
        InputError: the setting has another form, or the module or function does not exist.
    """
    function: Callable[..., object] = load_function("grading.grader", grader)
    wanted = inspect.signature(function).parameters

    def grade(gold: str, text: str, metadata: str | None, response: str) -> types.Grade:
        more = {"metadata": dict(read_metadata(metadata)), "response": response}
        result = function(gold, text, **{name: value for name, value in more.items() if name in wanted})
        try:
            return grade_of(result, success_at)
        except (ValueError, TypeError, AttributeError) as error:
            forms = "True or False, a number from 0 to 1, a Verdict, or a Score of such a number and finite parts"
            said = f"returned {shown(result)} for the answer {shown(text)}"
            raise InputError(f"grader {grader!r} {said}: return {forms}.") from error

    return grade


# Every line of a worked answer, checked where the question lets it, to tell luck from reasoning.
# A running sum (`questions.made.arithmetic`) or a sum modulo m (`questions.made.modular`) is worked out
# validly when each line takes numbers that are at hand, terms of the question not yet used or results of earlier lines,
# when what it says is true, and when the last result uses up everything and is the boxed answer. The order and the
# grouping are free; what is taken away may be added up first and taken away together. Lines after the last result, such
# as a check of it, only have to be true.
_SUM = re.compile(r"(\d{1,9}(?:[+-]\d{1,9})+)=\?")
_LINE = re.compile(r"(-?\d{1,9}(?:[+-]\d{1,9})+)=(-?\d{1,9})")
_NUMBER = re.compile(r"[+-]?\d+")
ARITHMETIC = "arithmetic"
"""Source of running sums, as a question file has it."""


class Sum(NamedTuple):
    """The terms that a question asks to be added up."""

    terms: tuple[int, ...]
    """Signed."""
    modulus: int | None = None


Held = tuple[int, int]
"""A number at hand: its size (0 or more) that counts for the sum, or against it where its sign, the second, is -1."""
Line = tuple[tuple[int, ...], int]
"""Signed operands and what the line says they come to."""


def sum_asked(question: types.Question) -> Sum | None:
    """The sum that a question asks for, by its metadata or its text; None for any other question.

    Raises InputError for metadata of a sum without its terms.
    """
    known = read_metadata(question.metadata)
    if known.get("trace") == "sum":
        modulus = known.get("modulus")
        if modulus is not None and type(modulus) is not int:
            raise InputError(f"a question of 'sum' needs a whole number in metadata.modulus, not {shown(modulus)}.")
        return Sum(terms=tuple(_whole_numbers("sum", known, "terms")), modulus=modulus)
    is_plain = question.source == ARITHMETIC and not known
    asked = _SUM.fullmatch(question.prompt[-1].content) if is_plain else None
    return Sum(terms=_numbers(asked[1])) if asked else None


def valid_trace(question: types.Question, response: str) -> bool | None:
    """Whether the working of `response` holds; None where the question's cannot be checked."""
    asked = sum_asked(question)
    if asked is None:
        return None
    thinking, ended, answer = response.partition(extract.THINK_END)
    read = [_LINE.fullmatch(text.strip()) for text in thinking.strip().splitlines()]
    lines = [(_numbers(line[1]), int(line[2])) for line in read if line]
    if not ended or not lines or None in read:
        return False
    result = _result(lines, Counter(_held(term, 1) for term in asked.terms), asked.modulus)
    return result is not None and extract.last_boxed(answer) == str(result)


def _result(lines: Sequence[Line], at_hand: Counter[Held], modulus: int | None) -> int | None:
    """The number that the lines come to; None where one of them does not hold, or where they leave something over."""
    if at_hand.total() == 1:
        ((size, sign),) = at_hand.elements()
        return sign * size if all(_is_true(line, modulus) for line in lines) else None
    if not lines or not _is_true(lines[0], modulus):
        return None
    operands, value = lines[0]
    # A line adds up what counts for the sum, or, modulo nothing, what counts against it.
    for sign in (1,) if modulus else (1, -1):
        taken = Counter(_held(operand, sign) for operand in operands)
        if taken <= at_hand:
            result = _result(lines[1:], at_hand - taken + Counter([_held(value, sign)]), modulus)
            if result is not None:
                return result
    return None


def _held(value: int, sign: int) -> Held:
    """A zero counts for the sum."""
    return abs(value), sign * ((value > 0) - (value < 0)) or 1


def _is_true(line: Line, modulus: int | None) -> bool:
    operands, value = line
    return value == (sum(operands) % modulus if modulus else sum(operands))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in _NUMBER.findall(text))
