"""Statistics of a run's replay, each declared once: its numbers, its tables, its figures and how to read them.

`--json`, the terminal, the files in `plots/` and the page of a run all read STATISTICS. Needs neither a model nor
torch, and works while the run goes on.
"""

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.table import Table

from exgrpo_cli.base import errors, files
from exgrpo_cli.show import asked, queries, tables
from exgrpo_cli.show.figures import replay as figures
from exgrpo_cli.show.figures.run import training_figures
from exgrpo_cli.show.figures.written import save
from exgrpo_cli.show.queries import Numbers
from exgrpo_cli.show.record import LEDGER_FOLDER, RunRecord, read_config, read_run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLOTS_FOLDER = "plots"


@dataclass(frozen=True, slots=True)
class Statistic:
    """One statistic of a run; a table or a figure that the run has no data for is left out."""

    query: Callable[[RunRecord], Numbers]
    """Its part of the object of `--json`."""
    tables: Sequence[Callable[[Numbers], Table | None]] = ()
    figures: "Mapping[str, Callable[[Numbers], Figure | None]]" = field(default_factory=dict)
    """Maker of a figure by the name of its file; how to read it is in `figures/words.toml`."""


STATISTICS = (
    Statistic(queries.run_facts),
    Statistic(queries.importance_ratios),
    Statistic(
        queries.question_states,
        (tables.buckets_over_time, tables.dynamics),
        {"replay-buckets": figures.bucket_occupancy, "replay-questions": figures.question_states},
    ),
    Statistic(queries.draws_and_promise, (tables.draws,), {"replay-draws": figures.draws_against_promise}),
    Statistic(queries.scanned_units, (), {"replay-units": figures.units_scanned}),
    Statistic(queries.begun_groups),
    Statistic(queries.entropy_of_choice, (), {"replay-entropy": figures.entropy_of_choice}),
    Statistic(queries.entropy_at_birth, (tables.entropies,), {"replay-entropy-by-bucket": figures.entropy_at_birth}),
    Statistic(queries.bucket_flow, (), {"replay-flow": figures.bucket_flow}),
    Statistic(lambda record: {"lives": record.lives}, (tables.lives,), {"replay-lives": figures.lives}),
    Statistic(queries.replays, (tables.replayed_questions,), {"replay-age-reuse": figures.age_and_reuse}),
)


def report_runs(
    runs: Sequence[Path], *, step: int | None = None, question_id: str = "", other: str = ""
) -> dict[str, Numbers]:
    """The numbers of every run by its label, with arrays; besides what `step` replayed, the history of `question_id`,
    and what an `other` policy, as `--what-if` names it, would have drawn.

    A label is the shortest end of a run's path that no other run shares. Warns (DamageWarning) of what is left out.
    Raises InputError for what is no run or named twice, a step that it has not finished, an unknown question or a
    policy that cannot be read.
    """
    reports = {}
    for run, label in zip(runs, _labels(runs), strict=True):
        record = read_run(run)
        if record.incomplete:
            warnings.warn(f"{run}: {record.incomplete}", errors.DamageWarning, stacklevel=2)
        reports[label] = numbers = summarise(record)
        if step is not None:
            numbers["step"] = asked.step_replay(record, step)
        if question_id:
            numbers["question"] = asked.question_history(record, question_id)
        if other:
            numbers["what_if"] = asked.what_if(record, other)
    return reports


def summarise(record: RunRecord) -> Numbers:
    """All statistics of a run as one object, with arrays."""
    numbers: Numbers = {}
    for statistic in STATISTICS:
        for name, value in statistic.query(record).items():
            numbers[name] = numbers[name] | value if name in numbers else value
    return numbers


def _labels(runs: Sequence[Path]) -> list[str]:
    parts = [run.resolve().parts for run in runs]
    twice = [run for position, run in enumerate(runs) if parts[position] in parts[:position]]
    if twice:
        raise errors.InputError(f"{twice[0]} is named twice. Name each run once.")
    lengths = range(1, max(map(len, parts)) + 1)
    return next(labels for n in lengths if len(set(labels := ["/".join(own[-n:]) for own in parts])) == len(runs))


def report_json(reports: Mapping[str, Numbers]) -> dict[str, Any]:
    """One run's object; of several runs {"runs": {label: object}}."""
    objects = plain(reports)
    return next(iter(objects.values())) if len(reports) == 1 else {"runs": objects}


def plain(value: Any) -> Any:
    """A value as JSON holds it: arrays as lists, keys as text, null for NaN and infinities."""
    return msgspec.json.decode(msgspec.json.encode(value, enc_hook=lambda own: own.tolist()))


def report_tables(reports: Mapping[str, Numbers]) -> Iterator[Table]:
    """Tables of what was asked for; else all tables of one run, or those that set several side by side."""
    if found := [table for label, told in reports.items() for table in tables.asked_tables(label, told)]:
        yield from found
        return
    yield tables.overview(reports)
    if len(reports) == 1:
        [told] = reports.values()
        yield from filter(None, (table(told) for statistic in STATISTICS for table in statistic.tables))


def replay_figures(told: Numbers) -> "Iterator[tuple[str, Figure]]":
    """Name and figure of everything about the experience buffer that has data, and of how its run draws from it."""
    for name, draw in itertools.chain(*(statistic.figures.items() for statistic in STATISTICS)):
        if figure := draw(told):
            yield name, figure
    if "what_if" in told and (figure := figures.what_if_figure(told)):
        yield "replay-what-if", figure


def run_figures(run: Path) -> "Iterator[tuple[str, Figure]]":
    """Name and figure of everything that the run has data for: of one without replay how its training went.

    Raises InputError for a folder that is no run.
    """
    replays = read_config(run).replay.enabled and (run / LEDGER_FOLDER).is_dir()
    yield from training_figures(run)
    if replays:
        yield from replay_figures(summarise(read_run(run)))


def save_all(run: Path) -> list[Path]:
    """Draw every figure of a run (`run_figures`), as PNG and SVG in RUN/plots; return their paths.

    Raises InputError as `run_figures`, RunError where a figure cannot be written.
    """
    return _saved(run_figures(run), run / PLOTS_FOLDER)


def _saved(drawn: "Iterable[tuple[str, Figure]]", folder: Path) -> list[Path]:
    return [path for name, figure in drawn for path in save(figure, folder, name)]


def plot_folders(reports: Mapping[str, Numbers], output: Path | None) -> list[Path]:
    """Folder of each run's figures: RUN/plots, or in `output`, a folder for each of several runs.

    Raises InputError for one that cannot be written, before anything is drawn.
    """
    folders = [Path(told["run"]) / PLOTS_FOLDER for told in reports.values()]
    if output:
        folders = [output / label for label in reports] if len(reports) > 1 else [output]
    for folder in folders:
        files.require_writable(folder / "replay-buckets.png")
    return folders


def save_reports(reports: Mapping[str, Numbers], folders: Sequence[Path]) -> None:
    """All figures of every run into its folder, and of several runs one that compares them into the first."""
    for told, folder in zip(reports.values(), folders, strict=True):
        _saved(itertools.chain(training_figures(Path(told["run"])), replay_figures(told)), folder)
    if len(reports) > 1 and (compared := figures.buffers_compared(reports)):
        save(compared, folders[0], "replay-comparison")
