"""One row of a file of rollouts, checked as it is read: what is missing stays missing."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32
from transformers import PreTrainedTokenizerBase

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.types import Question
from exgrpo_cli.questions.question_file.identity import normalised, question_text
from exgrpo_cli.questions.sources.files import Row, iter_rows

COLUMNS = ("question_id", "question", "token_ids", "text", "logprobs", "reward", "advantage", "group", "step")
NAMES = ("question_id", "question", "text", "group")
LARGEST_LOGPROB = 1e-4
"""A log-prob above 0 by more than float32 leaves behind is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedRow:
    """A rollout that somebody else sampled."""

    question_id: str
    token_ids: Int32[np.ndarray, " tokens"]
    logprobs: Float32[np.ndarray, " tokens"] | None
    """Of the policy that sampled it; None where the file has none."""
    reward: float
    advantage: float
    """NaN where the file has none."""
    group: str
    """Rows of a question with one group were sampled together; empty where the file does not say."""
    step: int
    from_text: bool
    """Its tokens are those of this tokenizer, not the sampler's own."""


@dataclass(frozen=True, slots=True)
class UnknownQuestion:
    """A row of a question that the question set does not have."""

    named: str


class RowReader:
    """Reads rows against one question set and one tokenizer."""

    def __init__(self, questions: Iterable[Question], tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._ids: set[str] = set()
        self._by_text: dict[str, list[str]] = {}
        for question in questions:
            self._ids.add(question.id)
            self._by_text.setdefault(normalised(question_text(question)), []).append(question.id)

    def read(self, file: Path) -> Iterator[LoggedRow | UnknownQuestion]:
        """Every row in its order.

        Raises InputError naming file, row, field and value for a row without question, response or reward, for token
        ids that the tokenizer does not have, and for log-probs that do not fit the tokens.
        """
        last_step = 1
        for number, row in iter_rows(file):
            where = f"{file}: row {number}"
            question_id = self._question(row, where)
            if question_id is None:
                yield UnknownQuestion(str(row.get("question_id") or row.get("question")))
                continue
            token_ids = self._tokens(row, where)
            step = _number(row, "step", where) if _has(row, "step") else last_step
            if step % 1:
                raise InputError(f"{where}: step = {step} is not a whole number.")
            if step < max(1, last_step):
                raise InputError(
                    f"{where}: step = {step:.0f} comes after step {last_step}: sort the rows by step, from 1."
                )
            last_step = int(step)
            yield LoggedRow(
                question_id=question_id,
                token_ids=token_ids,
                logprobs=_logprobs(row, len(token_ids), where),
                reward=self._reward(row, where),
                advantage=_number(row, "advantage", where) if _has(row, "advantage") else math.nan,
                group=str(row["group"]) if _has(row, "group") else "",
                step=last_step,
                from_text=not _has(row, "token_ids"),
            )

    def _question(self, row: Row, where: str) -> str | None:
        if _has(row, "question_id"):
            return row["question_id"] if row["question_id"] in self._ids else None
        found = self._by_text.get(normalised(str(_required(row, "question", where))), [])
        if len(found) > 1:
            raise InputError(
                f"{where}: {len(found)} questions ask {row['question'][:60]!r}, with different answers: "
                "name the one that is meant by question_id."
            )
        return found[0] if found else None

    def _tokens(self, row: Row, where: str) -> Int32[np.ndarray, " tokens"]:
        if _has(row, "token_ids"):
            token_ids = _array(row, "token_ids", np.int64, where)
            known = len(self._tokenizer)
            strange = token_ids[(token_ids < 0) | (token_ids >= known)]
            if len(strange):
                raise InputError(
                    f"{where}: token id {strange[0]} is not one of the {known} of this tokenizer: "
                    "name the backbone whose tokens these are with --backbone."
                )
        else:
            text = _required(row, "text", where)
            if not isinstance(text, str):
                raise InputError(f"{where}: text = {str(text)[:60]!r} is not a text.")
            token_ids = np.array(self._tokenizer.encode(text, add_special_tokens=False), dtype=np.int64)
        if not len(token_ids):
            raise InputError(f"{where} is a response without a token: leave it out.")
        return token_ids.astype(np.int32)

    @staticmethod
    def _reward(row: Row, where: str) -> float:
        if not _has(row, "reward"):
            raise InputError(f"{where} has no reward: write 1 for a right answer and 0 for a wrong one in every row.")
        return _number(row, "reward", where)


def _has(row: Row, name: str) -> bool:
    """Whether a field is there; a NaN among names is what pandas makes of a missing one."""
    value = row.get(name)
    return value is not None and not (name in NAMES and isinstance(value, float) and math.isnan(value))


def _required(row: Row, name: str, where: str) -> Any:
    if not _has(row, name):
        other = {"question": "question_id", "text": "token_ids"}[name]
        raise InputError(
            f"{where} has neither {other} nor {name}, its fields are {', '.join(row)}: name them {', '.join(COLUMNS)}."
        )
    return row[name]


def _number(row: Mapping[str, Any], name: str, where: str) -> float:
    value = row[name]
    if isinstance(value, str) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InputError(f"{where}: {name} = {value!r} is not a finite number.")
    return float(value)


def _array(row: Row, name: str, kind: type, where: str) -> np.ndarray:
    value = row[name]
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise InputError(f"{where}: {name} = {str(value)[:60]!r} is not a list.")
    try:
        found = np.array(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError(f"{where}: {name} holds something else than numbers.") from None
    if found.ndim != 1 or (kind is np.int64 and (found % 1 != 0).any()):
        raise InputError(f"{where}: {name} is not a flat list of {'whole ' if kind is np.int64 else ''}numbers.")
    return found.astype(kind)


def _logprobs(row: Row, num_tokens: int, where: str) -> Float32[np.ndarray, " tokens"] | None:
    if not _has(row, "logprobs"):
        return None
    logprobs = _array(row, "logprobs", np.float32, where)
    if len(logprobs) != num_tokens:
        raise InputError(
            f"{where}: {len(logprobs)} logprobs for {num_tokens} tokens: give the token_ids that they belong to, "
            "or leave logprobs out."
        )
    wrong = logprobs[~(np.isfinite(logprobs) & (logprobs <= LARGEST_LOGPROB))]
    if len(wrong):
        raise InputError(f"{where}: {wrong[0]} among the logprobs is no log-probability: they are finite, at most 0.")
    return logprobs
