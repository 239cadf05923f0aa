"""Rollouts that were logged elsewhere, as an experience ledger that `--replay-from` and `replay-stats` take: a pool.

Rows of one question, group and step make a visit: k is its number of rewarded rows, over as many members as there are.
Nothing that the file lacks is filled in: without log-probs they are NaN (`logprob_source` "none"), the advantage of a
row is null unless the file has it or its visit is a whole group of K, and no EOS is appended to a text.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from jaxtyping import Float32, Int32
from transformers import PreTrainedTokenizerBase

from exgrpo_cli.algo.advantages import centred_advantages
from exgrpo_cli.base import errors, files, types
from exgrpo_cli.base.reporter import Reporter
from exgrpo_cli.config.settings import Config, to_toml
from exgrpo_cli.ledger.schemas import FOREIGN_WEIGHTS, LedgerIdentity
from exgrpo_cli.models.load import load_tokenizer
from exgrpo_cli.questions.files import iter_rows
from exgrpo_cli.questions.question_file import normalised, question_text, write_questions
from exgrpo_cli.replay.join import Join
from exgrpo_cli.replay.store import FreshRow, Store, Visit
from exgrpo_cli.runs.folder import POOL_FILE, RunFolder
from exgrpo_cli.training.questions import load_questions
from exgrpo_cli.training.setup import identity_of

LARGEST_LOGPROB = 1e-4
"""A log-prob above 0 by more than float32 leaves behind is none."""
LoggedRollout = tuple[int, tuple[str, str], FreshRow]
"""A rollout that somebody else sampled: its step, question and group, and its row.

Rows of a question with one group were sampled together; it is empty where the file has none. Log-probs are NaN, and so
is the advantage, where the file has none."""


class LoggedRow(msgspec.Struct, kw_only=True):
    """A row of the file, fields that are null or NaN left out."""

    question_id: str = ""
    question: str = ""
    token_ids: list[int] | None = None
    text: str = ""
    logprobs: list[float] | None = None
    reward: float | bool
    correct: bool | None = None
    advantage: float = math.nan
    group: str | float = ""
    step: Annotated[float, msgspec.Meta(ge=1)] | None = None


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
    unknown_questions: int = 0
    """Rows left out, for their question is not in the question set."""
    first_unknown: str = ""
    without_logprobs: int = 0
    without_advantage: int = 0


def prepare_pool(file: Path, output: Path, config: Config, reporter: Reporter) -> PoolReport:
    """Make the pool `output` of the rollouts in `file`, for the questions, tokenizer, template and K of `config`.

    It appears under its name when it is whole. Raises InputError as `read_rollouts` does, and where no row is left.
    """
    RunFolder.check_new(output)
    questions = load_questions(config, reporter)
    tokenizer = load_tokenizer(config.backbone, config.tiny, reporter.progress)
    identity = identity_of(config, tokenizer, questions, logprob_source="file")
    report = PoolReport(source=str(file), output=str(output))
    with files.whole_folder(output) as folder:
        rollouts = read_rollouts(file, questions.train, tokenizer, report)
        _fill(folder / "replay", rollouts, identity, [question.id for question in questions.train], report)
        if not report.rows:
            raise errors.InputError(
                f"{file}: none of its {report.unknown_questions} rows is of a question in {config.data.train}, "
                f"{report.first_unknown[:60]!r} first: write question, text and reward of a rollout of these a line."
            )
        (folder / "data").mkdir()
        write_questions(folder / "data" / "train.parquet", questions.train, {"made_by": "prepare --experience"})
        files.write_text(folder / POOL_FILE, to_toml(config))
    return report


def read_rollouts(
    file: Path, questions: Sequence[types.Question], tokenizer: PreTrainedTokenizerBase, report: PoolReport
) -> Iterator[LoggedRollout]:
    """Every row of one of the questions, in its order; counted in `report`, as are the others.

    Raises InputError naming file, row, field and value for a row without question, response or reward, for token ids
    that the tokenizer does not have, for log-probs that do not fit the tokens, and for steps that fall.
    """
    named = defaultdict(list, {question.id: [question.id] for question in questions})
    for question in questions:
        named[normalised(question_text(question))].append(question.id)
    step = 1
    for number, values in iter_rows(file):
        try:
            # A NaN is what pandas makes of a missing value.
            row = msgspec.convert({name: v for name, v in values.items() if v is not None and v == v}, LoggedRow)
            asked = named.get(row.question_id or normalised(row.question), [])
            if len(asked) > 1 or not (row.question_id or row.question):
                raise ValueError(f"{len(asked)} questions have question = {row.question[:60]!r}: give a question_id")
            if not asked:
                report.unknown_questions += 1
                report.first_unknown = report.first_unknown or row.question_id or row.question
                continue
            token_ids, logprobs = _response(row, tokenizer)
            if not math.isfinite(row.reward) or math.isinf(row.advantage):
                raise ValueError(f"reward = {row.reward} and advantage = {row.advantage} are to be finite numbers")
            if row.step is not None and (row.step % 1 or row.step < step):
                raise ValueError(f"step = {row.step:g} comes after step {step}: sort rows by whole steps from 1")
        except ValueError as error:
            raise errors.InputError(
                f"{file}: row {number}: {str(error).rstrip('.')}. A row has question_id or question, token_ids or "
                "text, and reward (1 right, 0 wrong); it may have correct, logprobs, advantage, group and step."
            ) from error
        step = int(row.step or step)
        report.rows += 1
        correct = row.reward > 0 if row.correct is None else row.correct
        report.right += correct
        report.without_logprobs += row.logprobs is None
        fresh = FreshRow(
            token_ids=token_ids,
            behaviour_logprobs=logprobs,
            entropy=np.nan,
            nll=float(-logprobs.mean(dtype=np.float64)),
            reward=float(row.reward),
            correct=correct,
            advantage=row.advantage,
        )
        yield step, (asked[0], str(row.group)), fresh


def _fill(
    folder: Path,
    rollouts: Iterable[LoggedRollout],
    identity: LedgerIdentity,
    question_ids: Sequence[str],
    report: PoolReport,
) -> None:
    """Write the ledger, one step of the file after the other; memory holds one step."""
    # Whatever the number of rows of a visit, all of them are stored.
    rules = Join(store="all", lower_bound=-1, upper_bound=10**6, retirement=False)
    with Store(folder, identity=identity, rules=rules, question_ids=question_ids) as store:
        for step, of_step in groupby(rollouts, key=itemgetter(0)):
            visits = defaultdict(list)
            for _, visited, row in of_step:
                visits[visited].append(row)
            for (question_id, _), members in visits.items():
                rewards = np.array([row.reward for row in members])
                advantages = np.array([row.advantage for row in members])
                if len(members) == identity.group_size:
                    advantages = np.where(np.isnan(advantages), centred_advantages(rewards), advantages)
                right = sum(row.correct for row in members)
                visit = Visit(
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
                store.record_visits([visit])
                report.without_advantage += int(np.isnan(advantages).sum())
            report.visits += len(visits)
            store.flush(step)
        store.seal()
        report.questions = store.counts.num_questions


def _response(
    row: LoggedRow, tokenizer: PreTrainedTokenizerBase
) -> tuple[Int32[np.ndarray, " tokens"], Float32[np.ndarray, " tokens"]]:
    """Tokens and log-probs of a row. Raises ValueError for those that cannot be meant."""
    ids = tokenizer.encode(row.text, add_special_tokens=False) if row.token_ids is None else row.token_ids
    if not ids:
        raise ValueError("a response without a token: leave it out")
    if strange := [token for token in ids if not 0 <= token < len(tokenizer)]:
        raise ValueError(
            f"token id {strange[0]} is not one of the {len(tokenizer)} of this tokenizer: name the backbone whose "
            "tokens these are with --backbone"
        )
    logprobs = np.array([np.nan] * len(ids) if row.logprobs is None else row.logprobs, dtype=np.float32)
    if len(logprobs) != len(ids):
        raise ValueError(
            f"{len(logprobs)} logprobs for {len(ids)} tokens: give the token_ids that they belong to, or none"
        )
    wrong = logprobs[~(np.isfinite(logprobs) & (logprobs <= LARGEST_LOGPROB))]
    if row.logprobs is not None and len(wrong):
        raise ValueError(f"{wrong[0]} among the logprobs is no log-probability: they are finite, at most 0")
    return np.array(ids, dtype=np.int32), logprobs
