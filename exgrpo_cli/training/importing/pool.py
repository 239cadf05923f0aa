"""A pool: rollouts of a file as an experience ledger, in a folder that `--replay-from` and `replay-stats` take.

Rows of one question, group and step make a visit: k is its number of rewarded rows, over as many members as there are.
Nothing that the file lacks is filled in: without log-probs they are NaN (`logprob_source` "none"), the advantage of a
row is null unless the file has it or its visit is a whole group of K, and no EOS is appended to a text.
"""

import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np

from exgrpo_cli.algo.advantages import centred_advantages
from exgrpo_cli.base.console.reporter import Reporter
from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.files import write_text
from exgrpo_cli.config.sections.replay import ReplaySettings
from exgrpo_cli.config.settings import Config, to_toml
from exgrpo_cli.ledger.schemas import FOREIGN_WEIGHTS, LedgerIdentity
from exgrpo_cli.models.load import load_tokenizer
from exgrpo_cli.questions.prepare import DATA_FOLDER
from exgrpo_cli.questions.question_file.questions import write_questions
from exgrpo_cli.questions.sources.formats import stem_of
from exgrpo_cli.replay.buffer import ExperienceBuffer
from exgrpo_cli.replay.visits import FreshRow, Visit
from exgrpo_cli.runs.folder import POOL_FILE, RunFolder
from exgrpo_cli.training.importing.rows import LoggedRow, RowReader, UnknownQuestion
from exgrpo_cli.training.starting.assemble import choose_run_template, tokenizer_hash
from exgrpo_cli.training.starting.run_questions import load_questions

MOST_MEMBERS = 10**6
"""Whatever the number of rows of a visit, all of them are stored."""
LOGGED_ELSEWHERE = "file"
"""Source of log-probs that a file brought."""


@dataclass(kw_only=True, slots=True)
class PoolReport:
    """What a file of rollouts brought, and what it lacks."""

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
        missing = {
            f"rows left out: their question is not in the question set, {self.first_unknown[:60]!r} first": (
                self.unknown_questions
            ),
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

    It appears under its name when it is whole. Raises InputError as `RowReader.read` does, and where no row is left.
    """
    check_pool(file, output)
    questions = load_questions(config, reporter)
    tokenizer = load_tokenizer(config.backbone, config.tiny, reporter.progress)
    identity = LedgerIdentity(
        tokenizer_hash=tokenizer_hash(tokenizer),
        template=choose_run_template(config, tokenizer).name,
        group_size=config.rollout.group_size,
        questions_hash=questions.train_hash,
        logprob_source=LOGGED_ELSEWHERE,
    )
    report = PoolReport(source=str(file), output=str(output))
    output.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        rows = _counted(RowReader(questions.train, tokenizer).read(file), report)
        _fill(folder / "replay", rows, identity, [question.id for question in questions.train], report)
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
        folder.chmod(0o755)
        folder.rename(output)
    except BaseException:
        shutil.rmtree(folder)
        raise
    return report


def _counted(rows: Iterable[LoggedRow | UnknownQuestion], report: PoolReport) -> Iterator[LoggedRow]:
    for row in rows:
        if isinstance(row, UnknownQuestion):
            report.unknown_questions += 1
            report.first_unknown = report.first_unknown or row.named
            continue
        report.rows += 1
        report.right += row.reward > 0
        report.without_logprobs += row.logprobs is None
        report.from_text += row.from_text
        yield row


def _fill(
    folder: Path, rows: Iterable[LoggedRow], identity: LedgerIdentity, question_ids: Sequence[str], report: PoolReport
) -> None:
    """Write the ledger, one step of the file after the other; memory holds one step."""
    rules = ReplaySettings(composition="join", store="all", lower_bound=-1, upper_bound=MOST_MEMBERS, retirement=False)
    seen: Counter[str] = Counter()
    with ExperienceBuffer.create(folder, identity=identity, rules=rules, question_ids=question_ids) as buffer:
        for step, of_step in groupby(rows, key=lambda row: row.step):
            visits: dict[tuple[str, str], list[LoggedRow]] = {}
            for row in of_step:
                visits.setdefault((row.question_id, row.group), []).append(row)
            for members in visits.values():
                visit = _visit(members, step, identity.group_size)
                buffer.record_visit(visit)
                seen[visit.question_id] += 1
                report.visits += 1
                report.whole_groups += len(members) == identity.group_size
                report.without_advantage += sum(bool(np.isnan(row.advantage)) for row in visit.rows)
            buffer.flush(step)
        buffer.seal()
    report.questions = len(seen)


def _visit(members: Sequence[LoggedRow], step: int, group_size: int) -> Visit:
    rewards = np.array([row.reward for row in members])
    advantages = np.array([row.advantage for row in members])
    if len(members) == group_size:
        advantages = np.where(np.isnan(advantages), centred_advantages(rewards), advantages)
    right = int((rewards > 0).sum())
    return Visit(
        question_id=members[0].question_id,
        step=step,
        weight_version=FOREIGN_WEIGHTS,
        success_count=right,
        num_fresh_successes=right,
        num_replayed=0,
        num_members=len(members),
        verifier_failed=False,
        rows=[_fresh_row(row, float(advantage)) for row, advantage in zip(members, advantages, strict=True)],
    )


def _fresh_row(row: LoggedRow, advantage: float) -> FreshRow:
    logprobs = np.full(len(row.token_ids), np.nan, dtype=np.float32) if row.logprobs is None else row.logprobs
    return FreshRow(
        token_ids=row.token_ids,
        behaviour_logprobs=logprobs,
        entropy=np.nan,
        nll=float(-logprobs.mean(dtype=np.float64)),
        reward=row.reward,
        advantage=advantage,
    )
