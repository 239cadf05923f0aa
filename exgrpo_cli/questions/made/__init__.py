"""Questions that the program makes itself, and the traces from which the tiny backbone learns their tasks."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from exgrpo_cli.config.names import GYM, section_of_made
from exgrpo_cli.questions.made import countdown, gym, pools, sums, word_problems

_MAKERS: dict[str, Callable[[Any], pools.Split]] = {
    "arithmetic": sums.make_arithmetic,
    "word-problems": word_problems.make_word_problems,
    "countdown": countdown.make_countdown,
    "modular": sums.make_modular,
}


def make_split(source: str, settings: Any) -> pools.Split:
    """Training and held-out questions of a made source; `settings` has its section under the section's name.

    Raises InputError where there are fewer questions than asked for, and for a task of reasoning-gym that is refused.
    """
    return _made(source, getattr(settings, section_of_made(source)))


@lru_cache(maxsize=1)
def _made(source: str, section: Any) -> pools.Split:
    """Those of one section: a run takes them once to train on and once to hold out."""
    return gym.make_gym(source, section) if source.startswith(GYM) else _MAKERS[source](section)
