"""Figures of how a run's training went, from its step metrics: learning, its cost, memorising, health."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float64

from exgrpo_cli.runs.folder import RunMetrics, read_metrics
from exgrpo_cli.runs.result import RESULT_FILE, Memorising, read_result, read_summary
from exgrpo_cli.show.figures import style
from exgrpo_cli.show.figures.style import BLACK, MAXIMA, Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUMMARY_FILE = "summary.json"
CAPTIONS = {
    "learning": "Success on fresh, replayed and held-out questions. Held-out is what counts: fresh and replayed "
    "questions are drawn by the method itself.",
    "learning-tokens": "Held-out success against the tokens generated until then.",
    "memorising": "Memorised or learnt: success before and after training on questions that were replayed, only rolled "
    "out, or never seen.",
    "diagnostics": "A healthy run: entropy falls slowly, ratios stay near 1, few updates are skipped, and the gap "
    "between trainer and engine stays as small as it was.",
}
"""Captions: how to read each figure."""
LEAST_LOGGED = 0.1
"""Share of the steps that must have logged a value: with fewer its panel is empty but for a corner."""
DIAGNOSTICS = {
    "policy entropy (nats)": {"": "policy/entropy"},
    "ratio $w$, fresh tokens": {"mean": "policy/ratio_fresh", MAXIMA: "policy/ratio_fresh_max"},
    "ratio $w^*$, replayed tokens": {"mean": "policy/ratio_replay", MAXIMA: "policy/ratio_replay_max"},
    "effective sample size (share)": {"": "replay/ess"},
    "gradient norm": {"": "optim/grad_norm"},
    "skipped updates": {"": "optim/updates_skipped"},
    "clipped tokens (share)": {"": "policy/clip_fraction"},
    "log-prob gap, trainer to engine": {"mean": "policy/logprob_gap_mean", MAXIMA: "policy/logprob_gap_max"},
    "response length (tokens)": {"": "length/mean"},
    "solved by all / by none (share)": {"all": "batch/solve_all", "none": "batch/solve_none"},
}
"""Title of each panel, and the metrics that it draws by their labels."""
LOGARITHMIC = ("ratio", "gradient", "log-prob")
"""Beginnings of the titles whose values may need a logarithmic axis; the others begin at 0."""

Scores = Float64[np.ndarray, "scores 4"]
"""Step, pass@1 and the ends of its 95 % interval (NaN where it is not known), in order of steps."""


def training_figures(run: Path, heldout: Mapping[str, Any] | None = None) -> "Iterator[tuple[str, Figure]]":
    """Name and figure of what needs the step metrics alone.

    `heldout` are the scores before and after training, where summary.json does not have them yet. Raises InputError for
    a folder that is no run.
    """
    metrics = read_metrics(run)
    scores = heldout_scores(run, metrics, heldout)
    result = run / RESULT_FILE
    memorising = read_result(result).memorising if result.is_file() else None
    figures = {
        "learning": learning_curve(metrics, scores),
        "learning-tokens": accuracy_by_tokens(metrics, scores) if scores else None,
        "memorising": memorising_figure({run.name: [memorising]}) if memorising else None,
        "diagnostics": policy_diagnostics(metrics),
    }
    yield from ((name, figure) for name, figure in figures.items() if figure)


def heldout_scores(run: Path, metrics: RunMetrics, ends: Mapping[str, Any] | None = None) -> dict[str, Scores]:
    """Held-out scores by benchmark name.

    From the step keys `val/<name>`, `val/<name>/low` and `/high`, and from `ends`, or else summary.json once the run
    has ended, whose scores before and after training are of the one benchmark that the run validated on.
    """
    scores = {}
    for key in (name for name in metrics.names("val/") if name.count("/") == 1):
        columns = np.stack([metrics.steps, *(metrics.series(name) for name in (key, f"{key}/low", f"{key}/high"))])
        scores[key.removeprefix("val/")] = columns.T[np.isfinite(columns[1])]
    own = _ends(run, int(metrics.steps[-1]) if len(metrics.steps) else 0, ends)
    if len(own):
        name = next(iter(scores), "held-out")
        known = scores.get(name, own[:0])
        joined = np.concatenate([own, known[~np.isin(known[:, 0], own[:, 0])]])
        scores[name] = joined[np.argsort(joined[:, 0])]
    return {name: found for name, found in scores.items() if len(found)}


def _ends(run: Path, last_step: int, heldout: Mapping[str, Any] | None) -> Scores:
    path = run / SUMMARY_FILE
    if heldout is None and path.is_file():
        summary = read_summary(path)
        # A run that was lengthened goes on past the step its summary was written at.
        last_step, heldout = summary["steps"], summary["heldout"]
    asked = [(step, (heldout or {}).get(name)) for name, step in (("before", 0), ("after", last_step))]
    rows = [(step, score["pass_at_1"], score["low"], score["high"]) for step, score in asked if score]
    return np.array(rows, dtype=np.float64).reshape(-1, 4)


def learning_curve(metrics: RunMetrics, heldout: Mapping[str, Scores]) -> "Figure | None":
    """pass@1 over the steps: fresh questions, replayed ones (their fresh members), held-out ones with intervals.

    None before the first step.
    """
    logged = {"fresh questions": "batch/pass_at_1", "replayed questions (fresh rollouts)": "replay/pass_at_1"}
    drawn = {label: metrics.series(key) for label, key in logged.items() if metrics.has(key)}
    if not drawn and not heldout:
        return None
    with style.styled():
        figure, (axes,) = style.new_figure(width=5.0, height=3.0)
        looks = style.looks_of(list(logged))
        windows = [style.draw_line(axes, metrics.steps, own, name, **looks[name]) for name, own in drawn.items()]
        _draw_heldout(axes, heldout, lambda steps: steps)
        last_step = int(metrics.steps[-1]) if len(metrics.steps) else 0
        style.step_axis(axes, last_step)
        axes.set(ylabel="pass@1", ylim=(0, 1), xlim=(-0.02 * max(last_step, 1), 1.02 * max(last_step, 1)))
        style.mark_phase_start(axes, metrics.first_mixed_step, label=True)
        figure.legend(loc="outside upper center", ncols=3)
        style.explain_smoothing(figure, max(windows, default=0))
        return figure


def accuracy_by_tokens(metrics: RunMetrics, heldout: Mapping[str, Scores]) -> "Figure":
    """Held-out pass@1 against the tokens generated until then, the cost that methods share."""
    totals = np.concatenate([[0.0], np.nan_to_num(metrics.series("tokens/generated")).cumsum()])
    with style.styled():
        figure, (axes,) = style.new_figure(width=style.SINGLE_COLUMN, height=2.5)
        _draw_heldout(axes, heldout, lambda steps: totals[np.searchsorted(metrics.steps, steps, side="right")])
        axes.set(xlabel="tokens generated", ylabel="held-out pass@1", ylim=(0, 1))
        style.token_axis(axes)
        style.legend_above(axes)
        return figure


def _draw_heldout(axes: "Axes", heldout: Mapping[str, Scores], place_of: Any) -> None:
    """Scores with their intervals where `place_of` puts their steps, a marker a benchmark."""
    look: dict[str, Any] = {"color": BLACK, "linewidth": 0.9, "elinewidth": 0.9, "clip_on": False, "zorder": 3}
    for (name, scores), marker in zip(heldout.items(), "DosvP^X" * len(heldout), strict=False):
        label = name if name == "held-out" else f"held-out: {name}"
        label += " (95 %)" if np.isfinite(scores[:, 2:]).any() else ""
        style.draw_curve(axes, place_of(scores[:, 0]), *scores.T[1:], band=False, marker=marker, label=label, **look)


def policy_diagnostics(metrics: RunMetrics) -> "Figure | None":
    """One small panel for each diagnostic with something to see: what was hardly ever logged, or always 0, is not."""
    panels = []
    for title, keys in DIAGNOSTICS.items():
        values = {label: metrics.series(key) for label, key in keys.items()}
        if any(np.nan_to_num(own).any() and np.isfinite(own).mean() >= LEAST_LOGGED for own in values.values()):
            lines = {label: own for label, own in values.items() if np.isfinite(own).any()}
            panels.append(Panel(title, lines, metrics.steps, logarithmic=title.startswith(LOGARITHMIC)))
    last_step = int(metrics.steps[-1]) if len(metrics.steps) else 0
    return style.series_figure(panels, last_step, metrics.first_mixed_step)


KINDS = {
    "replayed": "replayed",
    "rolled_out": "rolled out, never replayed",
    "never_seen": "never seen, same levels",
    "heldout": "held-out, all",
}
"""Field of Memorising to its label."""
TITLE_COLUMNS = 87
"""Characters of titles beside each other across the figure."""


def memorising_figure(runs: Mapping[str, Sequence[Memorising]]) -> "Figure | None":
    """pass@1 before and after training of replayed, rolled out and never seen questions: a panel for each name, means
    over its runs, all on one vertical axis; None where none asked training questions."""

    def asked_training(memorising: Memorising) -> bool:
        return memorising.replayed.questions + memorising.rolled_out.questions > 0

    asked = {name: found for name, each in runs.items() if (found := list(filter(asked_training, each)))}
    if not asked:
        return None
    columns = 2 if len(asked) == 4 else min(3, len(asked))
    with style.styled():
        figure, panels = style.panel_grid(len(asked), columns, row_height=2.0, sharey=True)
        looks = style.looks_of(list(KINDS.values()))
        for axes, (name, found) in zip(panels, asked.items(), strict=True):
            for kind, label in KINDS.items():
                rates = [(rate.before, rate.after) for rate in (getattr(each, kind) for each in found)]
                if known := [pair for pair in rates if None not in pair]:
                    axes.plot(["before", "after"], np.mean(known, axis=0), label=label, **looks[label])
            axes.margins(x=0.2)
            axes.tick_params(labelleft=True)
            questions = np.mean([each.trained_questions for each in found])
            axes.set_title(fill(f"{name} ({questions:,.0f} questions)", TITLE_COLUMNS // columns))
        panels[0].set_ylabel("pass@1")
        style.legend_of_all(figure, panels, list(KINDS.values()), ncols=2)
        return figure
