"""Multiple-choice questions: options in a recorded order, their letters in the prompt, the gold a letter."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

import numpy as np

from exgrpo_cli.data.questions import question_id
from exgrpo_cli.errors import InputError
from exgrpo_cli.evaluation.benchmarks import Benchmark
from exgrpo_cli.types import Message, Question

INSTRUCTION = "Answer with the letter of the correct option."


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceQuestion:
    """A question and its options as they are asked, A first."""

    question: Question
    options: tuple[str, ...]


def choice_question(benchmark: Benchmark, row: Mapping[str, Any], where: str) -> ChoiceQuestion:
    """One row of a multiple-choice source, options shuffled.

    The order depends on the seed, the question's text and its options, not on the row's place in the file. Raises
    InputError, opening with `where`, for a row whose answer names none of its options.
    """
    source = benchmark.source
    text = str(column(row, source.question, where)).strip()
    options = _options(row, source.options, where)
    right = _right_option(benchmark, row, options, where)
    if len(options) > len(ascii_uppercase):
        raise InputError(f"{where} has {len(options)} options: at most {len(ascii_uppercase)} have a letter.")
    order = _order(benchmark.protocol.shuffle_seed, text, options)
    shuffled = tuple(options[index] for index in order)
    listed = "\n".join(f"{letter}. {option}" for letter, option in zip(ascii_uppercase, shuffled, strict=False))
    prompt = (Message(role="user", content=f"{text}\n\n{listed}\n\n{INSTRUCTION}"),)
    answer = ascii_uppercase[order.index(right)]
    level = str(column(row, source.level, where)) if source.level else None
    question = Question(
        id=question_id(prompt, answer), prompt=prompt, answer=answer, source=source.dataset, level=level
    )
    return ChoiceQuestion(question=question, options=shuffled)


def column(row: Mapping[str, Any], dotted: str, where: str) -> Any:
    """A value of a row, dots leading into nested columns; raises InputError naming the column and those there are."""
    value: Any = row
    for name in dotted.split("."):
        if not isinstance(value, Mapping) or value.get(name) is None:
            raise InputError(f"{where} has no value in column {dotted!r}: found {sorted(row)}.")
        value = value[name]
    return value


def _options(row: Mapping[str, Any], columns: Sequence[str], where: str) -> tuple[str, ...]:
    options: list[str] = []
    for name in columns:
        value = column(row, name, where)
        options += [str(item).strip() for item in value] if isinstance(value, list) else [str(value).strip()]
    if len(options) < 2:
        raise InputError(f"{where} has {len(options)} options: a multiple-choice question needs at least two.")
    return tuple(options)


def _right_option(benchmark: Benchmark, row: Mapping[str, Any], options: Sequence[str], where: str) -> int:
    source = benchmark.source
    if source.answer_names == "first":
        return 0
    answer = column(row, source.answer, where)
    if source.answer_names == "index":
        names = list(range(len(options)))
    elif source.answer_names == "label":
        names = column(row, source.labels, where)
    else:
        names, answer = list(options), str(answer).strip()
    if answer not in names:
        raise InputError(f"{where}: {source.answer} is {answer!r}, which names none of the options {list(names)}.")
    return names.index(answer)


def _order(seed: int, text: str, options: Sequence[str]) -> list[int]:
    key = "\x1f".join((str(seed), text, *options)).encode()
    digest = hashlib.blake2b(key, digest_size=8, person=b"exgrpo-options").digest()
    return [int(index) for index in np.random.default_rng(int.from_bytes(digest, "big")).permutation(len(options))]
