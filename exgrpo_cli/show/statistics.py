"""Statistics of a run's replay, each declared once: its numbers, its tables, its figures and how to read them.

`--json`, the terminal, the files in `plots/` and the page of a run all read STATISTICS. Needs neither a model nor
torch, and works while the run goes on.
"""

import itertools
import math
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from exgrpo_cli.base.errors import DamageWarning, InputError
from exgrpo_cli.replay.place import Place
from exgrpo_cli.show import queries, tables, what_if
from exgrpo_cli.show.details import question_history, step_replay
from exgrpo_cli.show.figures import buffer
from exgrpo_cli.show.figures.style import save
from exgrpo_cli.show.figures.training import training_figures
from exgrpo_cli.show.queries import Numbers
from exgrpo_cli.show.record import LEDGER_FOLDER, RunRecord, read_config, read_run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLOTS_FOLDER = "plots"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """One run's record with its numbers."""

    label: str
    """Shortest end of the run's path that no other run of the report shares."""
    record: RunRecord
    numbers: Numbers
    """The object of `--json`, with arrays: `step`, `question` and `what_if` only where they were asked for."""
    other: Place | None = None
    """Rules of the policy that `what_if` is about."""

    @property
    def rules(self) -> Place:
        """The run's own rules of replay."""
        return self.record.config.replay

    def titles(self, kind: str) -> tuple[str, str]:
        """Names of the draws of a kind, of the run and of the other policy."""
        own, other = (what_if.titles(rules)[kind] for rules in (self.rules, self.other) if rules)
        return own, other


@dataclass(frozen=True, slots=True)
class Statistic:
    """One statistic of a run; a table or a figure that the run has no data for is left out."""

    query: Callable[[RunRecord], Numbers]
    """Its part of the object of `--json`."""
    tables: "Sequence[Callable[[RunReport], Table | None]]" = ()
    figures: "Mapping[str, tuple[Callable[[RunReport], Figure | None], str]]" = field(default_factory=dict)
    """By the name of its file, the maker of a figure and how to read it."""


OCCUPANCY = "Questions in the buffer by their latest success count."
STATES = "All training questions by what has become of them."
PROMISE = "Questions drawn against what the sampler promised; a small p-value means that they disagree."
SCANS = "Units drawn by priority, and those replayed: the others have drifted beyond the bound."
CHOICE = "Entropy of replayed against available trajectories: where the lines meet, selection has no choice."
BIRTH = "Entropy at birth by difficulty. Compare within stretches of steps: it falls in time."
FLOW = "Replay visits by the success count before: what became of the questions."
USE = "Age of replayed trajectories, and how often each was replayed."

STATISTICS = (
    Statistic(queries.run_facts),
    Statistic(queries.importance_ratios),
    Statistic(
        queries.question_states,
        (tables.buckets_over_time, tables.dynamics),
        {
            "replay-buckets": (buffer.bucket_occupancy, OCCUPANCY),
            "replay-questions": (buffer.question_states, STATES),
        },
    ),
    Statistic(queries.draws_and_promise, (tables.draws,), {"replay-draws": (buffer.draws_against_promise, PROMISE)}),
    Statistic(queries.scanned_units, (tables.units,), {"replay-units": (buffer.units_scanned, SCANS)}),
    Statistic(queries.entropy_of_choice, (), {"replay-entropy": (buffer.entropy_of_choice, CHOICE)}),
    Statistic(
        queries.entropy_at_birth,
        (tables.entropies,),
        {"replay-entropy-by-bucket": (buffer.entropy_at_birth, BIRTH)},
    ),
    Statistic(queries.bucket_flow, (), {"replay-flow": (buffer.bucket_flow, FLOW)}),
    Statistic(queries.replays, (tables.replayed_questions,), {"replay-age-reuse": (buffer.age_and_reuse, USE)}),
)
CAPTIONS = {name: caption for statistic in STATISTICS for name, (_, caption) in statistic.figures.items()}
"""Captions of the buffer's figures, by name: how to read each."""


def report_runs(
    runs: Sequence[Path], *, step: int | None = None, question_id: str = "", other: str = ""
) -> list[RunReport]:
    """The numbers of every run; besides what `step` replayed, the history of `question_id`, and what an `other` policy,
    as `--what-if` names it, would have drawn.

    Warns (DamageWarning) of what is left out. Raises InputError for what is no run, a step that it has not finished, an
    unknown question or a policy that cannot be read.
    """
    reports = []
    for run, label in zip(runs, _labels(runs), strict=True):
        record = read_run(run)
        if record.incomplete:
            warnings.warn(f"{run}: {record.incomplete}", DamageWarning, stacklevel=2)
        policy = what_if.parse_what_if(other, record.config.replay) if other else None
        numbers = summarise(record)
        if step is not None:
            numbers["step"] = step_replay(record, step)
        if question_id:
            numbers["question"] = question_history(record, question_id)
        if policy:
            numbers["what_if"] = what_if.ask(record, policy, np.random.default_rng(0))
        reports.append(RunReport(label=label, record=record, numbers=numbers, other=policy.rules if policy else None))
    return reports


def report_record(record: RunRecord) -> RunReport:
    """The numbers of one run that has been read."""
    return RunReport(label=record.run.resolve().name, record=record, numbers=summarise(record))


def summarise(record: RunRecord) -> Numbers:
    """All statistics of a run as one object, with arrays."""
    numbers: Numbers = {}
    for statistic in STATISTICS:
        for name, value in statistic.query(record).items():
            numbers[name] = numbers[name] | value if name in numbers else value
    return numbers


def _labels(runs: Sequence[Path]) -> list[str]:
    """The last parts of each path, as many as it takes to tell the runs apart.

    Raises InputError for a run that is named twice.
    """
    parts = [run.resolve().parts for run in runs]
    twice = [run for position, run in enumerate(runs) if parts[position] in parts[:position]]
    if twice:
        raise InputError(f"{twice[0]} is named twice. Name each run once.")
    lengths = range(1, max(map(len, parts)) + 1)
    return next(labels for n in lengths if len(set(labels := ["/".join(own[-n:]) for own in parts])) == len(runs))


def report_json(reports: Sequence[RunReport]) -> dict[str, Any]:
    """One run's object; of several runs {"runs": {label: object}}."""
    objects = {report.label: plain(report.numbers) for report in reports}
    return next(iter(objects.values())) if len(reports) == 1 else {"runs": objects}


def plain(value: Any) -> Any:
    """A value as JSON holds it: dataclasses as objects, arrays as lists, keys as text, null for NaN and infinities."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def report_tables(reports: Sequence[RunReport]) -> Iterator[Table]:
    """Tables of what was asked for; else all tables of one run, or those that set several side by side."""
    if asked := [table for report in reports for table in tables.asked_tables(report)]:
        yield from asked
        return
    yield tables.overview(reports)
    if len(reports) > 1:
        return
    for statistic in STATISTICS:
        yield from filter(None, (table(reports[0]) for table in statistic.tables))


def replay_figures(report: RunReport) -> "Iterator[tuple[str, Figure]]":
    """Name and figure of everything about the experience buffer that has data, and of how its run draws from it."""
    for statistic in STATISTICS:
        for name, (draw, _) in statistic.figures.items():
            if figure := draw(report):
                yield name, figure
    if "what_if" in report.numbers and (asked := buffer.what_if_figure(report)):
        yield "replay-what-if", asked


def save_all(run: Path, *, heldout: Mapping[str, Any] | None = None) -> list[Path]:
    """Draw every figure that the run has data for, as PNG and SVG in RUN/plots; return their paths.

    `heldout` are the scores before and after training, where summary.json does not have them yet. A run without replay
    gets its learning curve and diagnostics only. Raises InputError for a folder that is no run, RunError where a
    figure cannot be written.
    """
    drawn = [training_figures(run, heldout)]
    if read_config(run).replay.enabled and (run / LEDGER_FOLDER).is_dir():
        drawn.append(replay_figures(report_record(read_run(run))))
    return _saved(itertools.chain(*drawn), run / PLOTS_FOLDER)


def _saved(figures: "Iterable[tuple[str, Figure]]", folder: Path) -> list[Path]:
    return [path for name, figure in figures for path in save(figure, folder, name)]


def plot_folders(reports: Sequence[RunReport], output: Path | None) -> list[Path]:
    """Folder of each run's figures: RUN/plots, or in `output`, a folder for each of several runs.

    Raises InputError for one that cannot be written, before anything is drawn.
    """
    many = len(reports) > 1
    folders = [
        (output / (each.label if many else "")) if output else each.record.run / PLOTS_FOLDER for each in reports
    ]
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise InputError(
                f"{folder}: plots cannot be written there ({error.strerror}). "
                "Name another folder with --output, or leave them out with --no-plots."
            ) from None
    return folders


def save_reports(reports: Sequence[RunReport], folders: Sequence[Path]) -> list[Path]:
    """All figures of every run into its folder, and of several runs one that compares them into the first."""
    paths: list[Path] = []
    for report, folder in zip(reports, folders, strict=True):
        paths += _saved(itertools.chain(training_figures(report.record.run), replay_figures(report)), folder)
    if len(reports) > 1 and (compared := buffer.buffers_compared(reports)):
        paths += save(compared, folders[0], "replay-comparison")
    return paths
