"""Figures of one run: how its training went, from its step metrics.

Each is None while there is nothing to draw.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float64

from exgrpo_cli.base.statistics import avg_at_k
from exgrpo_cli.runs import folder, validations
from exgrpo_cli.runs.result import RESULT_FILE, Memorising, read_result
from exgrpo_cli.show.figures import style
from exgrpo_cli.show.figures.style import BLACK, Panel, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEAST_LOGGED = 0.1
"""Share of the steps that must have logged a value: with fewer its panel is empty but for a corner."""
LOGARITHMIC = ("ratio", "gradient", "log-prob")
"""Beginnings of the titles whose values may need a logarithmic axis; the others begin at 0."""

TRAINING = ("learning", "diagnostics", "learning-tokens", "memorising")
"""Names of the figures that every run has, where there is something to see."""
Scores = Float64[np.ndarray, "scores 4"]
"""Step, pass@1 and the ends of its 95 % interval (NaN where it is not known), in order of steps."""


def training_figures(run: Path, names: Sequence[str] = TRAINING) -> "Iterator[tuple[str, Figure]]":
    """Name and figure of what needs the step metrics and validations alone.

    Raises InputError for a folder that is no run.
    """
    metrics = folder.read_metrics(run)
    scores = heldout_scores(run, metrics)
    result = run / RESULT_FILE
    memorising = read_result(result).memorising if result.is_file() else None
    draw: dict[str, Callable[[], Figure | None]] = {
        "learning": lambda: learning_curve(metrics, scores),
        "diagnostics": lambda: policy_diagnostics(metrics),
        "learning-tokens": lambda: accuracy_by_tokens(metrics, scores) if scores else None,
        "memorising": lambda: memorising_figure({run.name: [memorising]}) if memorising else None,
    }
    yield from ((name, figure) for name in names if (figure := draw[name]()))


def heldout_scores(run: Path, metrics: folder.RunMetrics) -> dict[str, Scores]:
    """Held-out scores by benchmark name.

    From the step keys `val/<name>`, `val/<name>/low` and `/high`; before the first step and after the last one from
    validations.jsonl, whose questions are those of the one benchmark that the run validated on.
    """
    scores: dict[str, dict[float, Sequence[float]]] = {}
    for key in (name for name in metrics.names("val/") if name.count("/") == 1):
        columns = np.stack([metrics.steps, *(metrics.series(name) for name in (key, f"{key}/low", f"{key}/high"))])
        scores[key.removeprefix("val/")] = {row[0]: row for row in columns.T if np.isfinite(row[1])}
    own = scores.setdefault(next(iter(scores), "held-out"), {})
    for each in validations.read_validations(run):
        if each.step not in own:
            score = avg_at_k(each.correct, each.samples, np.random.default_rng(0))
            own[each.step] = (each.step, score.value, score.low, score.high)
    return {name: np.array([row for _, row in sorted(found.items())]) for name, found in scores.items() if found}


def learning_curve(metrics: folder.RunMetrics, heldout: Mapping[str, Scores]) -> "Figure | None":
    """pass@1 over the steps: fresh questions, replayed ones (their fresh members), held-out ones with intervals.

    None before the first step.
    """
    logged = {"fresh questions": "batch/pass_at_1", "replayed questions (fresh rollouts)": "replay/pass_at_1"}
    drawn = {label: own for label, key in logged.items() if np.isfinite(own := metrics.series(key)).any()}
    if not drawn and not heldout:
        return None
    with style.styled():
        figure, (axes,) = new_figure(height=3.2)
        looks = style.looks_of(list(logged))
        windows = [style.draw_line(axes, metrics.steps, own, name, **looks[name]) for name, own in drawn.items()]
        _draw_heldout(axes, heldout, lambda steps: steps)
        style.count_axis(axes, "step", int(max(metrics.steps, default=0)), margin=0.02)
        axes.set(ylabel="pass@1", ylim=(0, 1))
        style.mark_phase_start(axes, metrics.first_mixed_step, label=True)
        names = axes.get_legend_handles_labels()[1]
        style.legend_of_all(figure, [axes], names, ncols=1 + (len(names) > 2))
        style.explain_smoothing(figure, *max(windows, default=(0, 1)))
        title = learning_title(metrics, heldout)
        return style.entitle(figure, f"{title[0].upper()}{title[1:]}" if heldout else title)


def learning_title(metrics: folder.RunMetrics, heldout: Mapping[str, Scores]) -> str:
    """Course of pass@1 in words: of held-out questions, or without any of the first and last tenth of fresh ones."""
    for name, scores in heldout.items():
        whose = f"held-out pass@1{f' ({name})' * (len(heldout) > 1)}"
        if len(scores) == 1:
            return f"{whose} is {scores[0, 1]:.3f} at step {scores[0, 0]:,.0f}"
        first, last = scores[0], scores[-1]
        span = f"between steps {first[0]:,.0f} and {last[0]:,.0f}" if first[0] else f"in {last[0]:,.0f} steps"
        return f"{whose} {went(first[1], last[1])} {span}"
    fresh = metrics.series("batch/pass_at_1")
    known, tenth = fresh[np.isfinite(fresh)], max(1, len(fresh) // 10)
    if not len(known):
        return "no step has been scored"
    return f"pass@1 of fresh questions {went(known[:tenth].mean(), known[-tenth:].mean())} in {len(fresh):,} steps"


def went(first: float, last: float) -> str:
    """Course of a number in words."""
    verb = "stayed at" if f"{first:.3f}" == f"{last:.3f}" else "rose from" if last > first else "fell from"
    return f"{verb} {first:.3f}" + ("" if verb == "stayed at" else f" to {last:.3f}")


def accuracy_by_tokens(metrics: folder.RunMetrics, heldout: Mapping[str, Scores]) -> "Figure":
    """Held-out pass@1 against the tokens generated until then, the cost that methods share."""
    totals = np.concatenate([[0.0], np.nan_to_num(metrics.series("tokens/generated")).cumsum()])
    with style.styled():
        figure, (axes,) = new_figure(height=2.6)
        _draw_heldout(axes, heldout, lambda steps: totals[np.searchsorted(metrics.steps, steps, side="right")])
        style.count_axis(axes, "tokens generated", totals[-1], margin=0.03)
        axes.set(ylabel="held-out pass@1", ylim=(0, 1))
        style.legend_above(axes)
        final = next(iter(heldout.values()))[-1, 1]
        return style.entitle(figure, f"Held-out pass@1 was {final:.3f} once {totals[-1]:,.0f} tokens were generated")


def _draw_heldout(axes: "Axes", heldout: Mapping[str, Scores], place_of: Any) -> None:
    """Scores with their intervals where `place_of` puts their steps, a marker a benchmark."""
    look: dict[str, Any] = {"color": BLACK, "linewidth": 0.9, "elinewidth": 0.9, "clip_on": False, "zorder": 3}
    for (name, scores), marker in zip(heldout.items(), "DosvP^X" * len(heldout), strict=False):
        label = name if name == "held-out" else f"held-out: {name}"
        label += " (95 %)" if np.isfinite(scores[:, 2:]).any() else ""
        places = place_of(scores[:, 0])
        style.draw_curve(axes, places, *scores.T[1:], band=False, marker=marker, label=label, **look)
        for number in range(len(scores))[:: -(1 + len(scores) // style.MOST_AREAS)][::-1]:
            place, (step, value, low, high) = places[number], scores[number].tolist()
            ends = f" [{low:.3f}, {high:.3f}]" if np.isfinite(low) else ""
            style.tell(axes, place, f"step {step:g}\n{label.removesuffix(' (95 %)')}: {value:.3f}{ends}")


def policy_diagnostics(metrics: folder.RunMetrics) -> "Figure | None":
    """One small panel for each diagnostic with something to see: what was hardly ever logged, or always 0, is not."""
    panels = []
    shown = style.WORDS["panels"]["diagnostics"]
    mean, right = metrics.series("reward/mean"), metrics.series("batch/pass_at_1")
    if not np.array_equal(mean, right, equal_nan=True):
        parts = {name.removeprefix("reward/part/"): name for name in metrics.names("reward/part/")}
        # Those of another scale, such as lengths, would flatten the rewards.
        wide = {name: {"": key} for name, key in parts.items() if np.nanmax(np.abs(metrics.series(key))) > 1}
        near = {name: key for name, key in parts.items() if name not in wide}
        shown = {"reward and its parts": {"reward": "reward/mean", **near}} | wide | shown
    for title, keys in shown.items():
        values = {label: metrics.series(key) for label, key in keys.items()}
        if any(np.nan_to_num(own).any() and np.isfinite(own).mean() >= LEAST_LOGGED for own in values.values()):
            lines = {label: own for label, own in values.items() if np.isfinite(own).any()}
            panels.append(Panel(title, lines, metrics.steps, logarithmic=title.startswith(LOGARITHMIC)))
    figure = style.series_figure(panels, int(max(metrics.steps, default=0)), metrics.first_mixed_step)
    entropy, skipped = metrics.series("policy/entropy"), np.nansum(metrics.series("optim/updates_skipped"))
    known = entropy[np.isfinite(entropy)]
    found = f"the policy's entropy {went(known[0], known[-1])} nats, " if len(known) else ""
    return figure and style.entitle(figure, f"How training went: {found}{skipped:.0f} updates were skipped")


KINDS: Mapping[str, str] = style.WORDS["memorising"]
"""Field of Memorising to its label."""
MOMENTS = ("before", "after")


def memorising_figure(runs: Mapping[str, Sequence[Memorising]]) -> "Figure | None":
    """pass@1 before and after training of replayed, rolled out and never seen questions: a panel for each name, means
    over its runs, all on one vertical axis; None where none asked training questions."""

    def asked_training(memorising: Memorising) -> bool:
        return memorising.replayed.questions + memorising.rolled_out.questions > 0

    asked = {name: found for name, each in runs.items() if (found := list(filter(asked_training, each)))}
    if not asked:
        return None
    columns = min(2, len(asked))
    with style.styled():
        figure, panels = style.panel_grid(len(asked), columns, row_height=2.0, sharey=True)
        looks = style.looks_of(list(KINDS.values()))
        for axes, (name, found) in zip(panels, asked.items(), strict=True):
            for kind, label in KINDS.items():
                rates = [(rate.before, rate.after) for rate in (getattr(each, kind) for each in found)]
                if known := [pair for pair in rates if None not in pair]:
                    ends = np.mean(known, axis=0)
                    axes.plot([0, 1], ends, label=label, **looks[label])
                    for place, when in enumerate(MOMENTS):
                        style.tell(axes, place, f"{when} training\n{label}: {ends[place]:.3f}")
            axes.set_xticks([0, 1], MOMENTS)
            axes.margins(x=0.2)
            axes.tick_params(labelleft=True)
            questions = np.mean([each.trained_questions for each in found])
            axes.set_title(fill(f"{name} ({questions:,.0f} questions)", style.TITLE_COLUMNS // columns))
        panels[0].set_ylabel("pass@1")
        style.legend_of_all(figure, panels, list(KINDS.values()), ncols=2)
        return style.entitle(figure, "pass@1 before and after training, by what training did with the questions")
