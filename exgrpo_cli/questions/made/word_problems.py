"""Word problems in plain English, made by the program: a language model's counterpart of the arithmetic questions.

A problem of level n is a chain of n operations on whole numbers, for example 7, +3, *2, told as a story about counts,
prices, ages or times in one of several phrasings, and asks for its answer in `\\boxed{}`. A keyed hash of the chain
alone says which pool it belongs to: no story, name, seed or size can bring one chain into two pools.
"""

from collections.abc import Iterator

import numpy as np

from exgrpo_cli.base.data import tables
from exgrpo_cli.base.types import Message, Question
from exgrpo_cli.config.sections.data import WordProblemSettings
from exgrpo_cli.questions.made.pools import Pool, Split, draw_split, made_question, pool_of_key

Chain = tuple[tuple[str, int], ...]
"""(sign, operand) from the start on; the start's own sign is empty."""

_POOL_KEY = b"exgrpo-word-problems"
_LARGEST = 120
"""No value of a story exceeds it: ages, prices and minutes stay such as one meets."""
_OPERANDS = {"+": range(2, 13), "-": range(2, 13), "*": range(2, 5), "/": range(2, 5)}
_STARTS = range(2, 25)


def make_word_problems(settings: WordProblemSettings) -> Split:
    """Different problems, each level as often as the others, up to one; training and held-out ones share no chain.

    Raises InputError where a level has fewer problems than are asked for.
    """
    examples = worked_examples(settings)

    def draws(level: int, pool: Pool, rng: np.random.Generator) -> Iterator[Question]:
        while True:
            chain = draw_chain(level, pool, rng)
            answer = f"{values_of(chain)[-1]:.0f}"
            yield made_question("word-problems", tell(chain, rng), answer, level=level, before=examples)

    return draw_split(settings, "Word problems", draws)


def worked_examples(settings: WordProblemSettings) -> tuple[Message, ...]:
    """Questions of the settings' levels in turn and their solutions, the same before every question of either part.

    Their chains are of the pool that is neither trained on nor held out.
    """
    rng = np.random.default_rng([settings.seed, 2])
    turns: list[Message] = []
    for index in range(settings.examples):
        chain = draw_chain(settings.levels[index % len(settings.levels)], Pool.WARM_START, rng)
        turns += [Message(role="user", content=tell(chain, rng)), Message(role="assistant", content=solution(chain))]
    return tuple(turns)


def solution(chain: Chain) -> str:
    """The operations one after the other, and the answer in a box."""
    values = values_of(chain)
    made = zip(chain[1:], values[:-1], values[1:], strict=True)
    steps = [f"{before:.0f} {sign} {operand} = {after:.0f}" for (sign, operand), before, after in made]
    return f"{', '.join(steps)}. The answer is \\boxed{{{values[-1]:.0f}}}."


def draw_chain(level: int, pool: Pool, rng: np.random.Generator) -> Chain:
    """A chain of `level` operations from this pool; every value on the way is a whole number from 1 to 120."""
    while True:
        chain: Chain = (("", int(rng.choice(_STARTS))),)
        for _ in range(level):
            sign = str(rng.choice(list(_OPERANDS)))
            chain = (*chain, (sign, int(rng.choice(_OPERANDS[sign]))))
        told_in_whole_numbers = all(value.is_integer() and 1 <= value <= _LARGEST for value in values_of(chain))
        if told_in_whole_numbers and pool_of(chain) is pool:
            return chain


def pool_of(chain: Chain) -> Pool:
    """The only pool that stories of a chain may be used in."""
    return pool_of_key(expression(chain), _POOL_KEY)


def expression(chain: Chain) -> str:
    """The chain as it is read from left to right: 7+3*2, which is 20 here."""
    return "".join(f"{sign}{operand}" for sign, operand in chain)


def values_of(chain: Chain) -> list[float]:
    """The value after the start and after each operation."""
    values = [float(chain[0][1])]
    for sign, operand in chain[1:]:
        last = values[-1]
        values.append({"+": last + operand, "-": last - operand, "*": last * operand, "/": last / operand}[sign])
    return values


def tell(chain: Chain, rng: np.random.Generator) -> str:
    """The chain as one of its stories."""
    phrasings = tables(__file__, "stories.toml")
    stories, all_names = phrasings["stories"], phrasings["names"]
    story = stories[int(rng.integers(len(stories)))]
    moves_on = story.get("moves_on", False)
    names = [all_names[int(place)] for place in rng.permutation(len(all_names))]
    thing = rng.choice(story["things"])
    sentences = [rng.choice(story["starts"]).format(a=names[0], n=chain[0][1], thing=thing)]
    person = 0
    for sign, operand in chain[1:]:
        other = names[person + 1] if moves_on else names[1 + int(rng.integers(len(names) - 1))]
        sentences.append(rng.choice(story["steps"][sign]).format(a=names[person], b=other, n=operand, thing=thing))
        person += moves_on
    sentences.append(rng.choice(story["ends"]).format(a=names[person], thing=thing))
    text = " ".join(sentence[0].upper() + sentence[1:] for sentence in sentences)
    return f"{text} {rng.choice(phrasings['requests'])}"
