"""Sums modulo m, for example `(7+5+8)%5=?`: a guess is right one time in m, and every line of a trace can be checked.

A question of level n adds n + 1 terms from 2 to 9. Its metadata say what was asked, so that
`exgrpo_cli.grading.valid_traces` can tell a derivation from a lucky hit.
"""

import numpy as np

from exgrpo_cli.base.types import Question
from exgrpo_cli.config.sections.data import ModularSettings
from exgrpo_cli.questions.made.arithmetic import Terms, expression
from exgrpo_cli.questions.made.pools import Pool, Split, distinct, draw_split, made_question, pool_of_key

SOURCE = "modular"
_TERMS = range(2, 10)
_POOL_KEY = b"exgrpo-modular"


def make_modular(settings: ModularSettings) -> Split:
    """Different sums, each level as often as the others, up to one; training and held-out ones share none.

    Raises InputError where a level has fewer sums than are asked for.
    """

    def draw(level: int, pool: Pool, rng: np.random.Generator) -> Question:
        terms = draw_terms(level, pool, rng)
        modulus = settings.modulus
        asked = {"trace": "sum", "terms": terms, "modulus": modulus}
        answer = str(sum(terms) % modulus)
        return made_question(SOURCE, prompt_text(terms, modulus), answer, level=level, metadata=asked)

    return draw_split(settings, distinct("Sums", draw))


def draw_terms(level: int, pool: Pool, rng: np.random.Generator) -> Terms:
    """`level` + 1 terms of this pool: the same sum is in the same pool whatever it is taken modulo."""
    while True:
        terms = tuple(rng.integers(_TERMS.start, _TERMS.stop, size=level + 1).tolist())
        if pool_of_key(expression(terms), _POOL_KEY) is pool:
            return terms


def prompt_text(terms: Terms, modulus: int) -> str:
    """What is asked: (7+5+8)%5=?"""
    return f"({expression(terms)})%{modulus}=?"
