"""The results folder of one benchmark and one model: what was asked, and each finished question as it comes.

`protocol.json` and `questions.jsonl` are written once, before the first sample. `records.jsonl` grows by one line per
finished question; a line that a kill tore off is dropped when the folder is opened again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
from filelock import FileLock, Timeout

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.files import (
    append_json_lines,
    drop_torn_line,
    read_json,
    read_json_lines,
    write_json,
    write_json_lines,
)
from exgrpo_cli.evaluation.records import Evaluation, QuestionRecord, Sample
from exgrpo_cli.evaluation.stamp import MAY_DIFFER_ON_RESUME, Stamp, differences


class ResultsFolder:
    """Open for one process at a time; a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._protocol = path / "protocol.json"
        self._questions = path / "questions.jsonl"
        self._records = path / "records.jsonl"
        self._lock = FileLock(path / ".lock")

    @classmethod
    def create(cls, path: Path, stamp: Stamp, asked: Sequence[QuestionRecord]) -> "ResultsFolder":
        """A folder for this protocol: a new one, or one that an interrupted evaluation of the same protocol left.

        Raises InputError where the folder holds something else, another protocol, or cannot be written.
        """
        folder = cls(path)
        if path.exists() and (not path.is_dir() or (any(path.iterdir()) and not folder._protocol.is_file())):
            raise InputError(f"{path} exists and is no results folder: choose another --output.")
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{path} cannot be created ({error.strerror}): choose another --output.") from error
        folder._acquire()
        try:
            if folder._protocol.is_file():
                folder._check(stamp, asked)
            else:
                rows = ({key: value for key, value in asdict(each).items() if key != "samples"} for each in asked)
                write_json_lines(folder._questions, rows)
                write_json(folder._protocol, stamp)
        except BaseException:
            folder.close()
            raise
        return folder

    @classmethod
    def open(cls, path: Path) -> "ResultsFolder":
        """A folder that is there already; raises InputError otherwise."""
        folder = cls.read(path)
        folder._acquire()
        return folder

    @classmethod
    def read(cls, path: Path) -> "ResultsFolder":
        """A folder that is only read: not locked, nothing in it repaired. Raises InputError where there is none."""
        folder = cls(path)
        if not folder._protocol.is_file():
            raise InputError(f"{path} is no results folder: it has no protocol.json. Run `exgrpo evaluate` first.")
        return folder

    def _acquire(self) -> None:
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise InputError(f"{self.path} is in use by another evaluation: wait for it to end.") from None

    def _check(self, stamp: Stamp, asked: Sequence[QuestionRecord]) -> None:
        unlike = differences(self.stamp, stamp, may_differ=MAY_DIFFER_ON_RESUME)
        if unlike:
            raise InputError(
                f"{self.path} holds results of another protocol: {'; '.join(unlike)}. Choose another --output, or "
                "remove the folder."
            )
        if [record.question.id for record in self.asked()] != [record.question.id for record in asked]:
            raise InputError(f"{self.path}/questions.jsonl lists other questions than {self._protocol.name} says.")

    @property
    def stamp(self) -> Stamp:
        """Everything the score depends on; raises InputError where `protocol.json` is damaged."""
        stamp: Stamp = read_json(self._protocol)
        return stamp

    @property
    def benchmark(self) -> str:
        """Name of the benchmark."""
        return str(self.stamp["benchmark"]["name"])

    def asked(self) -> list[QuestionRecord]:
        """The questions in their order, without samples."""
        return [msgspec.convert(row, QuestionRecord) for row in read_json_lines(self._questions)]

    def records(self) -> dict[str, QuestionRecord]:
        """Finished questions by id, in the order in which they finished, without a torn last line.

        Raises InputError for any other damage.
        """
        if self._lock.is_locked and self._records.exists():
            drop_torn_line(self._records)
        asked = {record.question.id: record for record in self.asked()}
        records: dict[str, QuestionRecord] = {}
        rows = read_json_lines(self._records) if self._records.exists() else ()
        for number, row in enumerate(rows, start=1):
            try:
                samples = msgspec.convert(row["samples"], tuple[Sample, ...])
                records[row["question_id"]] = replace(asked[row["question_id"]], samples=samples)
            except (KeyError, msgspec.ValidationError) as error:
                raise InputError(f"{self._records}: line {number} is no record ({error!r}): remove it.") from error
        return records

    def evaluation(self) -> Evaluation:
        """All questions in the order they were asked; raises InputError while some are unfinished."""
        ids, records = [record.question.id for record in self.asked()], self.records()
        if len(records) < len(ids):
            raise InputError(f"{self.path} holds {len(records)} of {len(ids)} questions: finish the evaluation first.")
        return Evaluation(records=tuple(records[question_id] for question_id in ids))

    def append(self, records: Iterable[QuestionRecord]) -> None:
        """Add finished questions in one write, flushed before it returns.

        Raises RunError where the disk is full; what was there stays readable.
        """
        append_json_lines(self._records, map(_record_row, records))

    def rewrite(self, records: Iterable[QuestionRecord]) -> None:
        """Replace all records."""
        write_json_lines(self._records, map(_record_row, records))

    def close(self) -> None:
        """Leave the folder to other processes."""
        self._lock.release()

    def __enter__(self) -> "ResultsFolder":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _record_row(record: QuestionRecord) -> dict[str, Any]:
    return {"question_id": record.question.id, "samples": [asdict(sample) for sample in record.samples]}
