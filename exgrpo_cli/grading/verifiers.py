"""Verifiers that a question or a user brings: countdown, reasoning-gym's scorers, a function of one's own.

What a question carries beside its gold answer is a JSON table: `{"verifier": "countdown", "numbers": [2, 3], "target":
6}` names the verifier of the question. The default grader `math` grades such a question by it; a grader that was chosen
instead is used as chosen.
"""

import ast
import inspect
import json
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from exgrpo_cli.base.errors import InputError, nearest
from exgrpo_cli.base.types import Verdict
from exgrpo_cli.config.names import GYM, load_function
from exgrpo_cli.grading.plain import tables, verdict_of

COUNTDOWN = "countdown"
_MOST_CHARS = 200
"""Length of a countdown answer; bounds the depth of its brackets too."""
_SUMS_AND_PRODUCTS = re.compile(r"[\d\s+\-*/()]*")
_OPERATIONS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip

ALLOWED: Mapping[str, str] = {task: reason for reason, tasks in tables()["gym"].items() for task in tasks.split()}
"""Task of reasoning-gym and the reason why its scorer may see what a model wrote."""
_SCORER_OPTIONS: Mapping[str, Mapping[str, Any]] = {"word_ladder": {"min_word_length": 3, "max_word_length": 5}}
"""Options of tasks whose scorer looks things up in its own data set: it knows what any options of a question led to."""


@lru_cache(maxsize=4096)
def read_metadata(metadata: str | None) -> dict[str, Any]:
    """The table in a question's metadata, empty without any; not to be changed by callers.

    Raises ValueError for text that is no JSON table.
    """
    value = json.loads(metadata) if metadata else {}
    if not isinstance(value, dict):
        raise ValueError(f"{metadata!r} is no JSON table")
    return value


def verifier_of(metadata: str | None) -> str | None:
    """Name of the verifier that a question brings; None of most."""
    name = read_metadata(metadata).get("verifier")
    return None if name is None else str(name)


def grade_countdown(metadata: Mapping[str, Any], answer: str) -> Verdict:
    """Whether `answer` uses `metadata["numbers"]`, each once, and comes to `metadata["target"]`.

    Python reads the expression, of digits, + - * / and brackets alone, as a tree, and it is worked out in fractions:
    nothing that a model wrote is ever run as code. What is no expression is WRONG, what is empty NO_ANSWER.
    """
    text = " ".join(answer.split())
    if not text:
        return Verdict.NO_ANSWER
    if len(answer.strip()) > _MOST_CHARS or not _SUMS_AND_PRODUCTS.fullmatch(text):
        return Verdict.WRONG
    numbers = Counter(map(int, re.findall(r"\d+", text)))
    try:
        # Python reads no number with a leading zero.
        tree = ast.parse(re.sub(r"\d+", lambda found: str(int(found[0])), text), mode="eval")
        value = _value(tree.body)
    except (SyntaxError, ZeroDivisionError):
        return Verdict.WRONG
    return verdict_of(numbers == Counter(metadata["numbers"]) and value == metadata["target"])


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
        raise InputError(f"{GYM}{task} needs reasoning-gym: pip install 'exgrpo[gym]'.")


@lru_cache(maxsize=8)
def scorer_of(task: str) -> Any:
    """The data set of a task, for its `score_answer`. Raises InputError as `require_task` does."""
    require_task(task)
    import reasoning_gym

    return reasoning_gym.create_dataset(task, size=1, seed=0, **_SCORER_OPTIONS.get(task, {}))


def grade_gym(metadata: str | None, answer: str) -> Verdict:
    """CORRECT for a full score on the entry in the question's metadata; what the scorer cannot read is WRONG.

    A scorer may give part of a point; that is no success. Runs in workers.
    """
    known = read_metadata(metadata)
    scorer = scorer_of(str(known["verifier"]).removeprefix(GYM))
    # A copy: scorers may write into what they are given.
    entry = json.loads(json.dumps(known["entry"]))
    try:
        score = scorer.score_answer(answer, entry)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError):
        return Verdict.WRONG
    # Never above: shares of a point that are added up may come to 1.0000000000000002 for a wrong answer.
    return verdict_of(score == 1)


def load_own(grader: str) -> Callable[[str, str, str | None], Verdict]:
    """The function that `python:module:function` names, as (gold, text, metadata) -> Verdict; runs in workers.

    `text` is the graded text of a response; a function with a parameter `metadata` gets the table of the question's
    metadata by that name, empty without any. The function returns a Verdict, or a bool: True is correct, False wrong.
    What it raises ends its worker: the answer counts as crashed.

    Raises:
        InputError: the setting has another form, or the module or function does not exist.
    """
    function: Callable[..., Verdict | bool] = load_function("grading.grader", grader)
    wants_metadata = "metadata" in inspect.signature(function).parameters

    def grade(gold: str, text: str, metadata: str | None) -> Verdict:
        more = {"metadata": dict(read_metadata(metadata))} if wants_metadata else {}
        result = function(gold, text, **more)
        if not isinstance(result, Verdict | bool):
            raise TypeError(f"grader {grader!r} returned {result!r}; a bool or a Verdict is needed.")
        return result if isinstance(result, Verdict) else verdict_of(result)

    return grade
