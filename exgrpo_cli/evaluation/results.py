"""The results folder of one benchmark and one model: its protocol, what was asked, finished questions, and the scores.

`protocol.json` and `questions.jsonl` are written once, before the first sample. `records.jsonl` grows by one line per
finished question; a line that a kill tore off is dropped when the folder is opened again. The protocol is everything
that a score depends on; it stands in every result, and is compared before results are put together.

Protocol, results and every line of records hold a checksum of themselves, the protocol that of the questions too: what
is read is what was written, or is refused.
"""

import hashlib
import importlib.util
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec
from filelock import AcquireReturnProxy, FileLock

from exgrpo_cli import __version__
from exgrpo_cli.base import files, types, versions
from exgrpo_cli.base.errors import DamageWarning, InputError
from exgrpo_cli.evaluation.sampling import Evaluation, QuestionRecord, Sample, graders_beside, open_pool, regrade
from exgrpo_cli.grading import GradingPool
from exgrpo_cli.grading.plain import tables

Stamp = dict[str, dict[str, Any]]
"""Section -> key -> plain value, as it stands in `protocol.json`."""
# What may differ when an interrupted evaluation goes on: the machine, and where the same model and questions lie.
MAY_DIFFER_ON_RESUME = ("environment.", "model.path", "benchmark.origin")
# What may differ between two compared models: all of the above, the models, and the random numbers. Which answer format
# "auto" means is the models' own affair as well.
MAY_DIFFER_IN_COMPARISON = (
    "environment.", "model.", "engine.", "sampling.seed", "prompt.opens_think", "prompt.requires_box",
    "benchmark.origin", "benchmark.folded_rows",
)  # fmt: skip
_FAILURES = tables()["failures"]
_STAMP = {
    "benchmark": {"name": str},
    "model": {"name": str},
    "prompt": dict.fromkeys(("opens_think", "requires_box", "require_eos"), bool),
    "grader": {"name": str},
}
"""Keys that are read of a stored stamp, whoever wrote it."""


class ResultsFolder:
    """Written by one process at a time, within `create` or `open`; made by its path alone it is only read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._protocol = path / "protocol.json"
        self._questions = path / "questions.jsonl"
        self._records = path / "records.jsonl"
        self._result = path / "results.json"
        self._lock = FileLock(path / ".lock")

    @classmethod
    @contextmanager
    def create(cls, path: Path, stamp: Stamp, records: Sequence[QuestionRecord]) -> Iterator["ResultsFolder"]:
        """A folder for this protocol: a new one, or one that an interrupted evaluation of the same protocol left.

        Raises InputError where the folder holds something else, another protocol, or cannot be written.
        """
        folder = cls(path)
        cls.check_place(path)
        path.mkdir(parents=True, exist_ok=True)
        with folder._taken():
            held = folder.stamp if folder._protocol.is_file() else stamp
            if unlike := differences(held, stamp, may_differ=MAY_DIFFER_ON_RESUME):
                remedy = "Choose another --output, or remove the folder"
                raise InputError(f"{path} holds results of another protocol: {'; '.join(unlike)}. {remedy}.")
            if folder._questions.is_file() or folder._records.is_file():
                folder._check_questions(records)
            else:
                rows = ({key: value for key, value in asdict(each).items() if key != "samples"} for each in records)
                text = files.json_lines(rows)
                folder.write_stamp(stamp, hashlib.sha256(text.encode()).hexdigest())
                files.write_text(folder._questions, text)
            yield folder

    @classmethod
    def check_place(cls, path: Path) -> None:
        """Raise InputError where no results folder is nor could be made."""
        folder = cls(path)
        # A lock or half a protocol is what a set-up that was stopped leaves.
        is_own = path.is_dir() and (folder._protocol.is_file() or all(own.name[0] == "." for own in path.iterdir()))
        if path.exists() and not is_own:
            raise InputError(f"{path} exists and is no results folder (no protocol.json): choose another --output.")
        files.require_writable(folder._protocol)

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator["ResultsFolder"]:
        """A folder that is there already; raises InputError otherwise."""
        folder = cls(path)
        if not folder._protocol.is_file():
            raise InputError(f"{path} is no results folder: it has no protocol.json. Run `exgrpo evaluate` first.")
        with folder._taken():
            yield folder

    def _taken(self) -> AcquireReturnProxy:
        return files.take(self._lock, f"{self.path} is in use by another evaluation: wait for it to end.")

    def _check_questions(self, records: Sequence[QuestionRecord]) -> None:
        for found, wanted in zip_longest(self.questions(), records):
            if found != wanted:
                place = (found or wanted).question.id
                unlike = f"is not what would be asked now (first: question {place})"
                raise InputError(f"{self._questions} {unlike}: restore it from a copy, or choose another --output.")

    @property
    def stamp(self) -> Stamp:
        """Everything the score depends on; raises InputError where `protocol.json` is damaged."""
        return self._stamp_and_sum()[0]

    def _stamp_and_sum(self) -> tuple[Stamp, object]:
        """The stamp, and the checksum of the questions that was written with it."""
        stamp: Stamp = files.read_json(self._protocol, dict[str, dict[str, Any]])
        sums = stamp.pop(_SUMS, {})
        _require(sums.get("protocol"), files.values_digest(stamp), self._protocol, _AGAIN)
        files.require_shape(stamp, _STAMP, str(self._protocol))
        return stamp, sums.get("questions")

    def write_stamp(self, stamp: Stamp, questions: str | None = None) -> None:
        """Replace `protocol.json`, with the checksums of itself and of the questions."""
        sums = {"protocol": files.values_digest(stamp), "questions": questions or files.file_digest(self._questions)}
        files.write_json(self._protocol, {**stamp, _SUMS: sums})

    @property
    def benchmark(self) -> str:
        """Name of the benchmark."""
        return str(self.stamp["benchmark"]["name"])

    def questions(self) -> list[QuestionRecord]:
        """The questions in their order, without samples; raises InputError where they are not as they were written."""
        rows = list(files.read_json_lines(self._questions))
        again = f"restore it from a copy, or {self._protocol}, which has the checksum; or choose another --output."
        _require(self._stamp_and_sum()[1], files.file_digest(self._questions), self._questions, again)
        try:
            return msgspec.convert(rows, list[QuestionRecord])
        except msgspec.ValidationError as error:
            raise InputError(f"{self._questions} is damaged ({error}): {_AGAIN}") from error

    def records(self) -> dict[str, QuestionRecord]:
        """Finished questions by id, in the order in which they finished, without a torn last line.

        A line that is there twice counts once. Raises InputError for any other damage.
        """
        writable = self._lock.is_locked
        if writable and self._records.is_file():
            files.drop_torn_line(self._records)
        questions = {record.question.id: record for record in self.questions()}
        records: dict[str, QuestionRecord] = {}
        rows = list(files.read_json_lines(self._records)) if self._records.exists() else []
        for number, row in enumerate(rows, start=1):
            where = f"{self._records}, line {number}"
            _require(row.pop(_SUM, None), files.values_digest(row), where, _LINE)
            try:
                samples = msgspec.convert(row["samples"], tuple[Sample, ...])
                record = replace(questions[row["question_id"]], samples=samples)
            except (KeyError, TypeError, msgspec.ValidationError) as error:
                raise InputError(f"{where} is no record of a question that was asked ({error}): {_LINE}") from error
            if records.setdefault(record.question.id, record) != record:
                raise InputError(f"{where} is another record of question {record.question.id}: {_LINE}")
        if writable and len(records) < len(rows):
            self.rewrite(records.values())
        return records

    def evaluation(self) -> Evaluation:
        """All questions in the order they were asked; raises InputError while some are unfinished."""
        ids, records = [record.question.id for record in self.questions()], self.records()
        if not ids or len(records) < len(ids):
            held = f"{len(records)} of {len(ids)} questions (records.jsonl)"
            raise InputError(f"{self.path} holds {held}: finish the evaluation first.")
        if len({len(record.samples) for record in records.values()}) > 1 or not records[ids[0]].samples:
            raise InputError(f"{self._records} has questions with other numbers of samples: {_AGAIN}")
        return Evaluation(records=tuple(records[question_id] for question_id in ids))

    def second_graders(self) -> dict[str, Any]:
        """Second grader to its score, as `results.json` holds it; none, and a warning, where that is not there.

        Raises InputError where it is damaged.
        """
        if not self.has_result:
            text = f"{self._result} is missing, and with it the scores of second graders, which are left out: "
            warnings.warn(text + _RESCORE.format(self.path), DamageWarning, stacklevel=2)
            return {}
        return dict(self.result().get("second_graders", {}))

    @property
    def has_result(self) -> bool:
        """Whether the evaluation has come to its end."""
        return self._result.is_file()

    def result(self) -> dict[str, Any]:
        """The content of `results.json`; raises InputError where it is damaged."""
        result: dict[str, Any] = files.read_json(self._result)
        _require(result.pop(_SUM, None), files.values_digest(result), self._result, _RESCORE.format(self.path))
        return result

    def write_results(self, result: Mapping[str, Any]) -> None:
        """Replace `results.json`, with a checksum of itself."""
        files.write_json(self._result, {**result, _SUM: files.values_digest(result)})

    def append(self, records: Iterable[QuestionRecord]) -> None:
        """Add finished questions in one write, flushed before it returns.

        Raises RunError where the disk is full; what was there stays readable.
        """
        files.append_json_lines(self._records, map(_record_row, records))

    def rewrite(self, records: Iterable[QuestionRecord]) -> None:
        """Replace all records."""
        files.write_json_lines(self._records, map(_record_row, records))


_SUMS, _SUM = "checksums", "checksum"
_AGAIN = "restore it from a copy, or evaluate again with another --output."
_RESCORE = "`exgrpo evaluate --rescore --output {}` writes it again."
_LINE = "remove the line, and the same evaluation asks its question again."


def _require(written: object, found: str, where: object, then: str) -> None:
    """Raise InputError where the checksum that was written is not that of what is there."""
    if written != found:
        raise InputError(f"{where} is damaged (its checksum differs): {then}")


def _record_row(record: QuestionRecord) -> dict[str, Any]:
    row = {"question_id": record.question.id, "samples": [asdict(sample) for sample in record.samples]}
    return {**row, _SUM: files.values_digest(row)}


def differences(one: Stamp, other: Stamp, *, may_differ: tuple[str, ...]) -> list[str]:
    """Every key whose values differ, as `sampling.temperature is 0.6 and 1.0`."""
    first, second = (
        {f"{section}.{key}": value for section, values in stamp.items() for key, value in values.items()}
        for stamp in (one, other)
    )
    return [
        f"{key} is {first.get(key, 'absent')} and {second.get(key, 'absent')}"
        for key in dict.fromkeys([*first, *second])
        if not key.startswith(may_differ) and first.get(key) != second.get(key)
    ]


def stamped_format(stamp: Stamp) -> types.AnswerFormat:
    """Places where the protocol says answers are to be looked for."""
    return msgspec.convert(stamp["prompt"], types.AnswerFormat)


def environment() -> dict[str, Any]:
    """Versions and hardware; recorded, never compared."""
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return versions.describe_machine() | {"gpus": gpus}


def grader_version(grader: str) -> str:
    """Version of whoever decides: math-verify for `math`, the toolkit for its own, the code's hash for a user's."""
    if grader == "math":
        return f"math-verify {versions.installed_version('math-verify')}"
    if grader.startswith("python:"):
        module = importlib.util.find_spec(grader.split(":")[1])
        origin = module.origin if module else None
        return f"sha256 {hashlib.sha256(Path(origin).read_bytes()).hexdigest()[:16]}" if origin else "unknown"
    return f"exgrpo {__version__}"


def model_hash(folder: Path) -> str:
    """Hash over names and contents of the files that decide what a model folder answers."""
    decide = (".safetensors", ".json", ".jinja", ".model", ".txt", ".tiktoken")
    paths = [path for path in sorted(folder.iterdir()) if path.is_file() and path.suffix in decide]
    return files.values_digest({path.name: files.file_digest(path) for path in paths})


def score_folder(folder: ResultsFolder, pool: GradingPool, second_graders: Sequence[str] = ()) -> dict[str, Any]:
    """Write `results.json` and `samples.parquet`; return the results.

    `second_graders` come on top of those that always stand beside the protocol's. One that the pool has uses its
    workers; one of the user's own gets as many of its own. Raises InputError while questions are unfinished.
    """
    stamp, evaluation = folder.stamp, folder.evaluation()
    answer_format = stamped_format(stamp)
    if any(sample.verdict is types.Verdict.TIMEOUT for sample in evaluation.all_samples):
        evaluation = evaluation.with_verdicts(regrade(evaluation, answer_format, pool, late_only=True))
        folder.rewrite(evaluation.records)
    result = evaluation.figures()
    beside = graders_beside(stamp["grader"]["name"], (record.question for record in evaluation.records))
    by_second: dict[str, list[types.Verdict]] = {}
    for grader in dict.fromkeys((*beside, *second_graders)):
        with nullcontext(pool) if pool.has(grader) else open_pool(grader) as second_pool:
            by_second[grader] = regrade(evaluation, answer_format, second_pool, grader=grader)
        figures = evaluation.with_verdicts(by_second[grader]).figures()
        both = zip(evaluation.all_samples, by_second[grader], strict=True)
        result.setdefault("second_graders", {})[grader] = {
            **{key: figures[key] for key in ("avg_at_k", "low", "high", "verdicts")},
            "version": grader_version(grader),
            "disagreements": sum(sample.verdict.reward != verdict.reward for sample, verdict in both),
        }
    result["protocol"] = stamp
    write_samples(folder.path / "samples.parquet", evaluation, by_second)
    folder.write_results(result)
    return result


def rescore(folder: ResultsFolder, pool: GradingPool) -> None:
    """Grade all stored samples again with the protocol's grader as it is today."""
    stamp, evaluation = folder.stamp, Evaluation(records=tuple(folder.records().values()))
    folder.rewrite(evaluation.with_verdicts(regrade(evaluation, stamped_format(stamp), pool)).records)
    stamp["grader"]["version"] = grader_version(stamp["grader"]["name"])
    folder.write_stamp(stamp)


def ungraded(result: Mapping[str, Any]) -> str:
    """Failures of the verifier, to stand beside the score, in which it counts as wrong; empty where it never did."""
    verdicts = result["verdicts"]
    counts = [f"{verdicts[verdict]} {text}" for verdict, text in _FAILURES.items() if verdicts.get(verdict)]
    return f"counted as wrong: {', '.join(counts)}" if counts else ""


def write_samples(path: Path, evaluation: Evaluation, by_second: Mapping[str, Sequence[types.Verdict]]) -> None:
    """One row per sample in the order of the questions, for notebooks; a second grader adds `verdict_<name>`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    numbers = {"member": pa.int32(), "seed": pa.int64(), "tokens": pa.int32(), "logprob": pa.float64()}
    rows = []
    for record in evaluation.records:
        of_question = {"question_id": record.question.id, "prompt": record.prompt_text, "gold": record.question.answer}
        for sample in record.samples:
            plain = {name: getattr(sample, name) for name in ("member", "seed", "text", "logprob")}
            ended = {"stop_reason": sample.stop_reason.value, "tokens": sample.num_tokens}
            rows.append(of_question | plain | ended | {"verdict": sample.verdict.value, "level": record.question.level})
    for name, verdicts in by_second.items():
        rows = [row | {f"verdict_{name}": verdict.value} for row, verdict in zip(rows, verdicts, strict=True)]
    schema = pa.schema([(name, numbers.get(name, pa.string())) for name in rows[0]])
    table = pa.Table.from_pylist(rows, schema)
    files.write_whole(path, lambda file: pq.write_table(table, file, compression="zstd"))
