"""Questions of reasoning-gym (extra `gym`), such as `gym:spell_backward`, each with what its scorer needs.

A keyed hash of the question's text says whether it is for training or held out, so that no seed or option can bring one
into both.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from exgrpo_cli.base import errors, types
from exgrpo_cli.config.names import GYM
from exgrpo_cli.config.sections.data import GymSettings
from exgrpo_cli.grading.verifiers import grade_gym, require_task
from exgrpo_cli.questions.made.pools import Pool, Split, made_question, pool_of_key

_POOL_KEY = b"exgrpo-gym"
_REQUEST = "Put the final answer in \\boxed{}."
_DRAWS_PER_QUESTION = 20
"""Draws for each question asked for, before a task counts as having no more."""
_MOST_DRAWS = {"word_ladder": 20_000}
"""Limits of tasks that refuse a larger data set."""


def make_gym(source: str, settings: GymSettings) -> Split:
    """Different questions of a task; one whose gold does not score itself is left out.

    Raises InputError for a task that is not allowed, an option that it does not have, where reasoning-gym is not
    installed, and where a task has fewer questions than are asked for.
    """
    task = source.removeprefix(GYM)
    require_task(task)
    drawn: dict[bool, dict[str, types.Question]] = {True: {}, False: {}}
    wanted = {True: settings.num_train, False: settings.num_heldout}
    num_draws = min(_DRAWS_PER_QUESTION * sum(wanted.values()), _MOST_DRAWS.get(task, sys.maxsize))
    unscored: set[str] = set()
    for entry in _entries(task, settings, num_draws):
        is_train = pool_of_key(entry["question"], _POOL_KEY) is Pool.TRAIN
        if len(drawn[is_train]) < wanted[is_train] and entry["question"] not in drawn[is_train]:
            known = {"verifier": source, "entry": {"answer": entry["answer"], "metadata": entry["metadata"]}}
            text = f"{entry['question'].strip()}\n\n{_REQUEST}"
            question = made_question(source, text, entry["answer"], metadata=known)
            if grade_gym(question.metadata, question.answer).verdict is types.Verdict.CORRECT:
                drawn[is_train][entry["question"]] = question
            else:
                unscored.add(entry["question"])
        if all(len(drawn[part]) == count for part, count in wanted.items()):
            return Split(train=list(drawn[True].values()), heldout=list(drawn[False].values()))
    left_out = f", with {len(unscored)} left out whose gold does not score itself" if unscored else ""
    found = f"{len(drawn[True])} training and {len(drawn[False])} held-out questions{left_out}"
    raise errors.InputError(f"{source} runs out at {found}: ask for fewer (gym.num_train, gym.num_heldout).")


def _entries(task: str, settings: GymSettings, count: int) -> Iterator[Mapping[str, Any]]:
    import reasoning_gym

    try:
        yield from reasoning_gym.create_dataset(task, size=count, seed=settings.seed, **json.loads(settings.options))
    except (TypeError, ValueError, AssertionError, IndexError) as error:
        raise errors.InputError(f"gym.options = {settings.options!r} do not suit gym:{task}: {error}") from error
