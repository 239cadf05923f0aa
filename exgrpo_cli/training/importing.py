"""Rollouts that were logged elsewhere, as an experience ledger that `--replay-from` and `replay-stats` take: a pool.

Rows of one question, group and step make a visit: k is its number of rewarded rows, over as many members as there are.
Nothing that the file lacks is filled in: without log-probs they are NaN (`logprob_source` "none"), the advantage of a
row is null unless the file has it or its visit is a whole group of K, and no EOS is appended to a text.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from jaxtyping import Float32, Int32
from transformers import PreTrainedTokenizerBase

from exgrpo_cli.algo.advantages import centred_advantages
from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.files import whole_folder, write_text
from exgrpo_cli.base.reporter import Reporter
from exgrpo_cli.base.types import Question
from exgrpo_cli.config.settings import Config, to_toml
from exgrpo_cli.ledger.schemas import FOREIGN_WEIGHTS, LedgerIdentity
from exgrpo_cli.models.load import load_tokenizer
from exgrpo_cli.questions.files import iter_rows, stem_of
from exgrpo_cli.questions.prepare import DATA_FOLDER
from exgrpo_cli.questions.question_file import normalised, question_text, write_questions
from exgrpo_cli.replay.join import Join
from exgrpo_cli.replay.store import FreshRow, Store, Visit
from exgrpo_cli.runs.folder import POOL_FILE, RunFolder
from exgrpo_cli.training.questions import load_questions
from exgrpo_cli.training.setup import identity_of

LARGEST_LOGPROB = 1e-4
"""A log-prob above 0 by more than float32 leaves behind is none."""
MOST_MEMBERS = 10**6
"""Whatever the number of rows of a visit, all of them are stored."""
LOGGED_ELSEWHERE = "file"
"""Source of log-probs that a file brought."""
LoggedRollout = tuple[int, tuple[str, str], FreshRow]
"""A rollout that somebody else sampled: its step, question and group, and its row.

Rows of a question with one group were sampled together; it is empty where the file has none. Log-probs are NaN, and so
is the advantage, where the file has none."""


class LoggedRow(msgspec.Struct, kw_only=True):
    """A row of the file, fields that are null or NaN left out."""

    question_id: str = ""
    question: str = ""
    token_ids: list[int] | None = None
    text: str | None = None
    logprobs: list[float] | None = None
    reward: float | bool
    advantage: float = math.nan
    group: str | float = ""
    step: float = 0


@dataclass(kw_only=True, slots=True)
class PoolReport:
    """Counts of what a file of rollouts brought, and of what it lacks."""

    source: str
    output: str
    rows: int = 0
    """Kept."""
    right: int = 0
    """Rewarded ones among them."""
    questions: int = 0
    visits: int = 0
    whole_groups: int = 0
    """Visits of exactly K rows."""
    unknown_questions: int = 0
    """Rows left out, for their question is not in the question set."""
    first_unknown: str = ""
    without_logprobs: int = 0
    without_advantage: int = 0
    from_text: int = 0

    def to_json(self) -> dict[str, Any]:
        """The object that `prepare --json` prints."""
        return asdict(self)

    def lines(self, group_size: int) -> list[str]:
        """For people: what there is, then what is missing and what follows from it."""
        lines = [
            f"{self.output}: {self.rows} rollouts, {self.right} of them right, of {self.questions} questions",
            f"{self.visits} visits, {self.whole_groups} of them whole groups of K = {group_size}",
        ]
        unknown = f"rows left out: their question is not in the question set, {self.first_unknown[:60]!r} first"
        for count, what in (
            (self.unknown_questions, unknown),
            (
                self.without_logprobs,
                "rows without log-probs: replayed with importance = 'old' or replay_surrogate = 'likelihood'",
            ),
            (self.without_advantage, "rows without advantage: append and refill take them as a likelihood alone"),
            (self.from_text, "rows were text: their tokens are this tokenizer's, and no EOS was appended"),
        ):
            lines += [f"{count} {what}"] * (count > 0)
        return lines


def pool_folder(file: Path) -> Path:
    """Default folder of the pool of a file."""
    return DATA_FOLDER / f"{stem_of(file)}-pool"


def check_pool(file: Path, output: Path) -> None:
    """Raise InputError for a file that is not there and an output that is."""
    if not file.is_file():
        raise InputError(f"--experience {file} does not exist: name a .jsonl or .parquet file of rollouts.")
    RunFolder.check_new(output)


def prepare_pool(file: Path, output: Path, config: Config, reporter: Reporter) -> PoolReport:
    """Make the pool `output` of the rollouts in `file`, for the questions, tokenizer, template and K of `config`.

    It appears under its name when it is whole. Raises InputError as `read_rollouts` does, and where no row is left.
    """
    check_pool(file, output)
    questions = load_questions(config, reporter)
    tokenizer = load_tokenizer(config.backbone, config.tiny, reporter.progress)
    identity = identity_of(config, tokenizer, questions, LOGGED_ELSEWHERE)
    report = PoolReport(source=str(file), output=str(output))
    with whole_folder(output) as folder:
        rollouts = read_rollouts(file, questions.train, tokenizer, report)
        _fill(folder / "replay", rollouts, identity, [question.id for question in questions.train], report)
        if not report.rows and not report.unknown_questions:
            raise InputError(f"{file} holds no rollouts: write question, text and reward of one a line.")
        if not report.rows:
            raise InputError(
                f"{file}: none of its {report.unknown_questions} rows is of a question in {config.data.train}, "
                f"{report.first_unknown[:60]!r} first: name the question set they were sampled for."
            )
        (folder / "data").mkdir()
        write_questions(folder / "data" / "train.parquet", questions.train, {"made_by": "prepare --experience"})
        write_text(folder / POOL_FILE, to_toml(config))
    return report


def read_rollouts(
    file: Path, questions: Iterable[Question], tokenizer: PreTrainedTokenizerBase, report: PoolReport
) -> Iterator[LoggedRollout]:
    """Every row of one of the questions, in its order; counted in `report`, as are the others.

    Raises InputError naming file, row, field and value for a row without question, response or reward, for token ids
    that the tokenizer does not have, for log-probs that do not fit the tokens, and for steps that fall.
    """
    by_text: dict[str, list[str]] = {}
    for question in questions:
        by_text.setdefault(normalised(question_text(question)), []).append(question.id)
    ids = {question_id for named in by_text.values() for question_id in named}
    last_step = 1
    for number, values in iter_rows(file):
        try:
            # A NaN is what pandas makes of a missing value.
            row = msgspec.convert({name: v for name, v in values.items() if v is not None and v == v}, LoggedRow)
            question_id = row.question_id or _question_asked(row, by_text)
            if question_id not in ids:
                report.unknown_questions += 1
                report.first_unknown = report.first_unknown or row.question_id or row.question
                continue
            token_ids = _tokens(row, tokenizer)
            logprobs = _logprobs(row, len(token_ids))
            if not math.isfinite(row.reward) or math.isinf(row.advantage):
                raise ValueError(f"reward = {row.reward} and advantage = {row.advantage} are to be finite numbers")
            if row.step % 1 or 0 < row.step < last_step or (row.step == 0 and "step" in values):
                raise ValueError(f"step = {row.step:g} comes after step {last_step}: sort rows by whole steps from 1")
        except ValueError as error:
            raise InputError(
                f"{file}: row {number}: {str(error).rstrip('.')}. A row has question_id or question, token_ids or "
                "text, and reward (1 right, 0 wrong); it may have logprobs, advantage, group and step."
            ) from error
        last_step = int(row.step) or last_step
        report.rows += 1
        report.right += row.reward > 0
        report.without_logprobs += row.logprobs is None
        report.from_text += row.token_ids is None
        yield (
            last_step,
            (question_id, str(row.group)),
            FreshRow(
                token_ids=token_ids,
                behaviour_logprobs=logprobs,
                entropy=np.nan,
                nll=float(-logprobs.mean(dtype=np.float64)),
                reward=float(row.reward),
                advantage=row.advantage,
            ),
        )


def _fill(
    folder: Path,
    rollouts: Iterable[LoggedRollout],
    identity: LedgerIdentity,
    question_ids: Sequence[str],
    report: PoolReport,
) -> None:
    """Write the ledger, one step of the file after the other; memory holds one step."""
    rules = Join(store="all", lower_bound=-1, upper_bound=MOST_MEMBERS, retirement=False)
    seen: set[str] = set()
    with Store(folder, identity=identity, rules=rules, question_ids=question_ids) as buffer:
        for step, of_step in groupby(rollouts, key=itemgetter(0)):
            visits: dict[tuple[str, str], list[FreshRow]] = {}
            for _, visited, row in of_step:
                visits.setdefault(visited, []).append(row)
            for (question_id, _), members in visits.items():
                visit = _visit(question_id, members, step, identity.group_size)
                buffer.record_visits([visit])
                seen.add(question_id)
                report.visits += 1
                report.whole_groups += len(members) == identity.group_size
                report.without_advantage += sum(bool(np.isnan(row.advantage)) for row in visit.rows)
            buffer.flush(step)
        buffer.seal()
    report.questions = len(seen)


def _visit(question_id: str, members: Sequence[FreshRow], step: int, group_size: int) -> Visit:
    rewards = np.array([row.reward for row in members])
    advantages = np.array([row.advantage for row in members])
    if len(members) == group_size:
        advantages = np.where(np.isnan(advantages), centred_advantages(rewards), advantages)
    right = int((rewards > 0).sum())
    return Visit(
        question_id=question_id,
        step=step,
        weight_version=FOREIGN_WEIGHTS,
        success_count=right,
        num_fresh_successes=right,
        num_replayed=0,
        num_members=len(members),
        verifier_failed=False,
        rows=[replace(row, advantage=float(own)) for row, own in zip(members, advantages, strict=True)],
    )


def _question_asked(row: LoggedRow, by_text: dict[str, list[str]]) -> str:
    """The id of the question by its text; empty where no question has it."""
    found = by_text.get(normalised(row.question), [])
    if not row.question or len(found) > 1:
        asked = f"{len(found)} questions, with different answers, ask" if found else "no question_id, and"
        raise ValueError(f"{asked} question = {row.question[:60]!r}: name the one that is meant by question_id")
    return found[0] if found else ""


def _tokens(row: LoggedRow, tokenizer: PreTrainedTokenizerBase) -> Int32[np.ndarray, " tokens"]:
    ids = row.token_ids
    if ids is None:
        ids = tokenizer.encode(row.text or "", add_special_tokens=False)
    if not ids:
        raise ValueError("a response without a token: leave it out")
    if strange := [token for token in ids if not 0 <= token < len(tokenizer)]:
        raise ValueError(
            f"token id {strange[0]} is not one of the {len(tokenizer)} of this tokenizer: name the backbone whose "
            "tokens these are with --backbone"
        )
    return np.array(ids, dtype=np.int32)


def _logprobs(row: LoggedRow, num_tokens: int) -> Float32[np.ndarray, " tokens"]:
    if row.logprobs is None:
        return np.full(num_tokens, np.nan, dtype=np.float32)
    logprobs = np.array(row.logprobs, dtype=np.float32)
    if len(logprobs) != num_tokens:
        raise ValueError(
            f"{len(logprobs)} logprobs for {num_tokens} tokens: give the token_ids that they belong to, or none"
        )
    wrong = logprobs[~(np.isfinite(logprobs) & (logprobs <= LARGEST_LOGPROB))]
    if len(wrong):
        raise ValueError(f"{wrong[0]} among the logprobs is no log-probability: they are finite, at most 0")
    return logprobs
