"""Plain data with something odd at one place, as damage or somebody else's program leaves it."""

import functools
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

ODD = (None, "x", -1, 0.5, 1e308, 10**30, [], {}, True, "correct", "9" * 5000, [[[]]])


def places(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every key and index of plain data, from the outside inwards."""
    if before:
        yield before
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*before, key))


def changed(value: Any, rng: random.Random, odd: Sequence[Any] = ODD) -> Any:
    """A copy with something else, or nothing, at one place."""
    value = json.loads(json.dumps(value))
    *outer, last = rng.choice(list(places(value)))
    holder = functools.reduce(lambda own, key: own[key], outer, value)
    if rng.random() < 0.2:
        del holder[last]
    else:
        holder[last] = rng.choice(odd)
    return value
