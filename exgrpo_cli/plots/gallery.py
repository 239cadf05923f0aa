"""All figures of a run folder, drawn and saved."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.plots.buffer import buckets, draws
from exgrpo_cli.plots.buffer.comparison import buffers_compared
from exgrpo_cli.plots.buffer.what_if import what_if_figure
from exgrpo_cli.plots.diagnostics import policy_diagnostics
from exgrpo_cli.plots.learning import accuracy_by_tokens, heldout_scores, learning_curve
from exgrpo_cli.plots.memorising import memorising_figure
from exgrpo_cli.plots.style import save
from exgrpo_cli.replay_stats.output.report import RunReport
from exgrpo_cli.replay_stats.record import LEDGER_FOLDER, read_config
from exgrpo_cli.replay_stats.summary import ReplaySummary, summarise
from exgrpo_cli.runs.metrics import read_metrics
from exgrpo_cli.runs.result import RESULT_FILE, read_result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLOTS_FOLDER = "plots"


def save_all(run: Path, output: Path | None = None, *, heldout: Mapping[str, Any] | None = None) -> list[Path]:
    """Draw every figure that the run has data for, as PNG and SVG in `output` (RUN/plots); return their paths.

    `heldout` are the scores before and after training, where summary.json does not tell them yet. A run without replay
    gets its learning curve and diagnostics only. Raises InputError for a folder that is no run, RunError where a
    figure cannot be written.
    """
    folder = output or run / PLOTS_FOLDER
    paths = [path for name, figure in training_figures(run, heldout) for path in save(figure, folder, name)]
    if read_config(run).replay.enabled and (run / LEDGER_FOLDER).is_dir():
        paths += save_replay(summarise(run), folder)
    return paths


def save_replay(summary: ReplaySummary, folder: Path) -> list[Path]:
    """Draw the figures of the experience buffer into `folder`; return their paths."""
    return [path for name, figure in replay_figures(summary) for path in save(figure, folder, name)]


def plot_folders(reports: Sequence[RunReport], output: Path | None) -> list[Path]:
    """Where each run's figures go: RUN/plots, or in `output`, a folder for each of several runs.

    Raises InputError for one that cannot be written, before anything is drawn.
    """
    if output is None:
        folders = [report.summary.run / PLOTS_FOLDER for report in reports]
    elif len(reports) == 1:
        folders = [output]
    else:
        folders = [output / report.label for report in reports]
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
        paths += [path for name, figure in training_figures(report.summary.run) for path in save(figure, folder, name)]
        paths += save_replay(report.summary, folder)
        if any((report.sampler, report.metric, report.priority, report.gate)):
            paths += save(what_if_figure(report), folder, "replay-what-if")
    if len(reports) > 1:
        figure = buffers_compared([report.label for report in reports], [report.summary for report in reports])
        paths += save(figure, folders[0], "replay-comparison")
    return paths


def training_figures(run: Path, heldout: Mapping[str, Any] | None = None) -> Iterator[tuple[str, "Figure"]]:
    """Name and figure of what needs the step metrics alone; `heldout` as for `save_all`."""
    metrics = read_metrics(run)
    scores = heldout_scores(run, metrics, heldout)
    yield "learning", learning_curve(metrics, scores)
    by_tokens = accuracy_by_tokens(metrics, scores)
    if by_tokens is not None:
        yield "learning-tokens", by_tokens
    memorised = memorising_of(run)
    if memorised is not None:
        yield "memorising", memorised
    yield "diagnostics", policy_diagnostics(metrics)


def memorising_of(run: Path) -> "Figure | None":
    """What the run learnt of questions that it replayed and of others; None where it asked none, or has not ended."""
    path = run / RESULT_FILE
    found = read_result(path).memorising if path.is_file() else None
    return memorising_figure({run.name: [found]}) if found else None


def replay_figures(summary: ReplaySummary) -> Iterator[tuple[str, "Figure"]]:
    """Name and figure of everything about the experience buffer, and of how its run draws from it."""
    rules = summary.config.replay
    yield "replay-buckets", buckets.bucket_occupancy(summary)
    yield "replay-questions", buckets.question_states(summary)
    if rules.draws_units:
        yield "replay-units", draws.units_scanned(summary)
    else:
        yield "replay-flow", buckets.bucket_flow(summary)
        yield "replay-entropy", draws.entropy_of_choice(summary)
    yield "replay-age-reuse", draws.age_and_reuse(summary)
    yield "replay-entropy-by-bucket", draws.entropy_by_bucket(summary)
    if rules.composition == "replace":
        yield "replay-draws", draws.draws_against_promise(summary)
