"""The verifier of questions from reasoning-gym (extra `gym`): its own scorer, where that reads answers as data alone.

A scorer may give part of a point; that is no success. Only tasks whose scorer was read and treats the answer as text,
numbers or JSON are allowed: others evaluate it, or hand it to a parser that does. Runs in workers.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from exgrpo_cli.base.errors import InputError, nearest
from exgrpo_cli.base.types import Verdict
from exgrpo_cli.config.names import GYM
from exgrpo_cli.grading.metadata import read_metadata

_TEXT = "compares texts"
_NUMBER = "reads the answer with Decimal or int and compares numbers"
_WORDS = "splits the answer into words or letters and compares them"
_GRID = "reads digits of a grid and compares them"
ALLOWED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("aiw", "base_conversion", "binary_alternation", "caesar_cipher", "color_cube_rotation", "count_bits"),
            *("count_primes", "course_schedule", "family_relationships", "gcd", "isomorphic_strings", "largest_island"),
            *("lcm", "leg_counting", "letter_counting", "maze", "modulo_grid", "number_filtering", "number_sequence"),
            *("ransom_note", "rotate_matrix", "rotten_oranges", "self_reference", "simple_equations"),
            *("simple_geometry", "spell_backward", "string_manipulation", "string_splitting", "string_synthesis"),
            *("syllogism", "word_sequence_reversal", "zebra_puzzles"),
        ),
        _TEXT,
    ),
    **dict.fromkeys(("chain_sum", "products", "power_function"), _NUMBER),
    **dict.fromkeys(("knights_knaves", "word_sorting", "word_ladder"), _WORDS),
    "mini_sudoku": _GRID,
    "shortest_path": "walks the answer's words through the grid of the question",
}
"""Task and the reason why its scorer may see what a model wrote."""
_SCORER_OPTIONS: Mapping[str, Mapping[str, Any]] = {"word_ladder": {"min_word_length": 3, "max_word_length": 5}}
"""Of tasks whose scorer looks things up in its own data set, so that it knows what any options of a question led to."""


def require_task(task: str) -> None:
    """Raise InputError for a task that is not allowed, and where reasoning-gym is not installed."""
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


def grade(metadata: str | None, answer: str) -> Verdict:
    """CORRECT for a full score on the entry in the question's metadata; what the scorer cannot read is WRONG."""
    known = read_metadata(metadata)
    scorer = scorer_of(str(known["verifier"]).removeprefix(GYM))
    # A copy: scorers may write into what they are given.
    entry = json.loads(json.dumps(known["entry"]))
    try:
        score = scorer.score_answer(answer, entry)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError):
        return Verdict.WRONG
    # Never above: shares of a point that are added up may come to 1.0000000000000002 for a wrong answer.
    return Verdict.CORRECT if score == 1 else Verdict.WRONG
