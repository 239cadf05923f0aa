"""Which sources the program makes itself, and the making of each from its own section of settings."""

from collections.abc import Callable, Mapping
from typing import Any

from exgrpo_cli.config.names import GYM, section_of_made
from exgrpo_cli.questions.made.arithmetic import make_questions
from exgrpo_cli.questions.made.countdown import make_countdown
from exgrpo_cli.questions.made.gym import make_gym
from exgrpo_cli.questions.made.modular import make_modular
from exgrpo_cli.questions.made.pools import Split
from exgrpo_cli.questions.made.word_problems import make_word_problems

_MAKERS: Mapping[str, Callable[[Any], Split]] = {
    "arithmetic": make_questions,
    "word-problems": make_word_problems,
    "countdown": make_countdown,
    "modular": make_modular,
}


def make_split(source: str, settings: Any) -> Split:
    """Training and held-out questions of a made source; `settings` has its section under the section's name.

    Raises InputError where there are fewer questions than asked for, and for a task of reasoning-gym that is refused.
    """
    if source.startswith(GYM):
        return make_gym(source, settings.gym)
    return _MAKERS[source](getattr(settings, section_of_made(source)))
