"""All figures of a run folder, drawn and saved."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from exgrpo_cli.plots import replay
from exgrpo_cli.plots.diagnostics import policy_diagnostics
from exgrpo_cli.plots.learning import heldout_scores, learning_curve
from exgrpo_cli.plots.style import save
from exgrpo_cli.replay.statistics import ReplaySummary, summarise
from exgrpo_cli.replay.statistics_metrics import read_metrics
from exgrpo_cli.replay.statistics_source import LEDGER_FOLDER, read_setup

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLOTS_FOLDER = "plots"


def save_all(run: Path, output: Path | None = None) -> list[Path]:
    """Draw every figure that the run has data for, as PNG and SVG in `output` (RUN/plots); return their paths.

    A run without replay gets its learning curve and diagnostics only. Raises InputError for a folder that is no run.
    """
    folder = output or run / PLOTS_FOLDER
    paths = [path for name, figure in training_figures(run) for path in save(figure, folder, name)]
    if read_setup(run).enabled and (run / LEDGER_FOLDER).is_dir():
        paths += save_replay(summarise(run), folder)
    return paths


def save_replay(summary: ReplaySummary, folder: Path) -> list[Path]:
    """Draw the figures of the experience buffer into `folder`; return their paths."""
    return [path for name, figure in replay_figures(summary) for path in save(figure, folder, name)]


def training_figures(run: Path) -> Iterator[tuple[str, "Figure"]]:
    """Name and figure of what needs the step metrics alone."""
    metrics = read_metrics(run)
    yield "learning", learning_curve(metrics, heldout_scores(run, metrics))
    yield "diagnostics", policy_diagnostics(metrics)


def replay_figures(summary: ReplaySummary) -> Iterator[tuple[str, "Figure"]]:
    """Name and figure of everything about the experience buffer."""
    yield "replay-buckets", replay.bucket_occupancy(summary)
    yield "replay-questions", replay.question_states(summary)
    yield "replay-entropy", replay.entropy_of_choice(summary)
    yield "replay-age-reuse", replay.age_and_reuse(summary)
    yield "replay-entropy-by-bucket", replay.entropy_by_bucket(summary)
    yield "replay-draws", replay.draws_against_promise(summary)
