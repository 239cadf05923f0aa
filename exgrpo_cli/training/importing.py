"""Rollouts that were logged elsewhere, as an experience ledger that `--replay-from` and `replay-stats` take: a pool.

Rows of one question, group and step make a visit: k is its number of rewarded rows, over as many members as there are.
Nothing that the file lacks is filled in: without log-probs they are NaN (`logprob_source` "none"), the advantage of a
row is null unless the file has it or its visit is a whole group of K, and no EOS is appended to a text.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32
from transformers import PreTrainedTokenizerBase

from exgrpo_cli.algo.advantages import centred_advantages
from exgrpo_cli.base.console.reporter import Reporter
from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.files import whole_folder, write_text
from exgrpo_cli.base.types import Question
from exgrpo_cli.config.settings import Config, to_toml
from exgrpo_cli.ledger.schemas import FOREIGN_WEIGHTS, LedgerIdentity
from exgrpo_cli.models.load import load_tokenizer
from exgrpo_cli.questions.files import Row, iter_rows, stem_of
from exgrpo_cli.questions.prepare import DATA_FOLDER
from exgrpo_cli.questions.question_file import normalised, question_text, write_questions
from exgrpo_cli.replay.join import Join
from exgrpo_cli.replay.store import FreshRow, Store, Visit
from exgrpo_cli.runs.folder import POOL_FILE, RunFolder
from exgrpo_cli.training.questions import load_questions
from exgrpo_cli.training.setup import identity_of

COLUMNS = ("question_id", "question", "token_ids", "text", "logprobs", "reward", "advantage", "group", "step")
WORDS = ("question_id", "question", "text", "group")
LARGEST_LOGPROB = 1e-4
"""A log-prob above 0 by more than float32 leaves behind is none."""
MOST_MEMBERS = 10**6
"""Whatever the number of rows of a visit, all of them are stored."""
LOGGED_ELSEWHERE = "file"
"""Source of log-probs that a file brought."""


@dataclass(kw_only=True, slots=True)
class PoolReport:
    """Counts of what a file of rollouts brought, and of what it lacks."""

    source: str
    output: str
    rows: int = 0
    """Kept."""
    right: int = 0
    """Of those, rewarded."""
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
        """As `prepare --json` prints it."""
        return asdict(self)

    def lines(self, group_size: int) -> list[str]:
        """For people: what there is, then what is missing and what follows from it."""
        lines = [
            f"{self.output}: {self.rows} rollouts, {self.right} of them right, of {self.questions} questions",
            f"{self.visits} visits, {self.whole_groups} of them whole groups of K = {group_size}",
        ]
        unknown = f"rows left out: their question is not in the question set, {self.first_unknown[:60]!r} first"
        missing = {
            unknown: self.unknown_questions,
            "rows without log-probs: replayed with objective.importance = 'old' or replay_surrogate = 'likelihood'": (
                self.without_logprobs
            ),
            "rows without advantage: append and refill take them with replay_surrogate = 'likelihood' alone": (
                self.without_advantage
            ),
            "rows were text: their tokens are this tokenizer's, and none ends with an EOS that the text lacks": (
                self.from_text
            ),
        }
        return lines + [f"{count} {what}" for what, count in missing.items() if count]


def pool_folder(file: Path) -> Path:
    """Where the pool of a file goes when nothing else is said."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedRollout:
    """A rollout that somebody else sampled."""

    question_id: str
    group: str
    """Rows of a question with one group were sampled together; empty where the file does not say."""
    step: int
    row: FreshRow
    """Its log-probs are NaN, and so is its advantage, where the file has none."""


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
    for number, row in iter_rows(file):
        where = f"{file}: row {number}"
        question_id = row["question_id"] if _has(row, "question_id") else _question_asked(row, by_text, where)
        if question_id not in ids:
            report.unknown_questions += 1
            report.first_unknown = report.first_unknown or str(row.get("question_id") or row.get("question"))
            continue
        token_ids = _tokens(row, tokenizer, where)
        last_step = _step(row, last_step, where)
        if not _has(row, "reward"):
            raise InputError(f"{where} has no reward: write 1 for a right answer and 0 for a wrong one in every row.")
        logprobs = _logprobs(row, len(token_ids), where)
        rollout = FreshRow(
            token_ids=token_ids,
            behaviour_logprobs=logprobs,
            entropy=np.nan,
            nll=float(-logprobs.mean(dtype=np.float64)),
            reward=_number(row, "reward", where),
            advantage=_number(row, "advantage", where) if _has(row, "advantage") else math.nan,
        )
        report.rows += 1
        report.right += rollout.reward > 0
        report.without_logprobs += not _has(row, "logprobs")
        report.from_text += not _has(row, "token_ids")
        group = str(row["group"]) if _has(row, "group") else ""
        yield LoggedRollout(question_id=question_id, group=group, step=last_step, row=rollout)


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
    with Store.create(folder, identity=identity, rules=rules, question_ids=question_ids) as buffer:
        for step, of_step in groupby(rollouts, key=lambda rollout: rollout.step):
            visits: dict[tuple[str, str], list[FreshRow]] = {}
            for rollout in of_step:
                visits.setdefault((rollout.question_id, rollout.group), []).append(rollout.row)
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


def _question_asked(row: Row, by_text: dict[str, list[str]], where: str) -> str:
    """The id of the question by its text; empty where no question has it."""
    found = by_text.get(normalised(str(_required(row, "question", where))), [])
    if len(found) > 1:
        raise InputError(
            f"{where}: {len(found)} questions ask {row['question'][:60]!r}, with different answers: "
            "name the one that is meant by question_id."
        )
    return found[0] if found else ""


def _tokens(row: Row, tokenizer: PreTrainedTokenizerBase, where: str) -> Int32[np.ndarray, " tokens"]:
    if _has(row, "token_ids"):
        token_ids, known = _array(row, "token_ids", np.int64, where), len(tokenizer)
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
        token_ids = np.array(tokenizer.encode(text, add_special_tokens=False), dtype=np.int64)
    if not len(token_ids):
        raise InputError(f"{where} is a response without a token: leave it out.")
    return token_ids.astype(np.int32)


def _step(row: Row, last_step: int, where: str) -> int:
    step = _number(row, "step", where) if _has(row, "step") else last_step
    if step % 1:
        raise InputError(f"{where}: step = {step} is not a whole number.")
    if step < last_step:
        raise InputError(f"{where}: step = {step:.0f} comes after step {last_step}: sort the rows by step, from 1.")
    return int(step)


def _logprobs(row: Row, num_tokens: int, where: str) -> Float32[np.ndarray, " tokens"]:
    if not _has(row, "logprobs"):
        return np.full(num_tokens, np.nan, dtype=np.float32)
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


def _has(row: Row, name: str) -> bool:
    """Whether a field is there; a NaN among words is what pandas makes of a missing one."""
    value = row.get(name)
    return value is not None and not (name in WORDS and isinstance(value, float) and math.isnan(value))


def _required(row: Row, name: str, where: str) -> Any:
    if not _has(row, name):
        other = {"question": "question_id", "text": "token_ids"}[name]
        raise InputError(
            f"{where} has neither {other} nor {name}, its fields are {', '.join(row)}: name them {', '.join(COLUMNS)}."
        )
    return row[name]


def _number(row: Row, name: str, where: str) -> float:
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
