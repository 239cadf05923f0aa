"""The learning curve: success on the training stream, on replayed questions, and on held-out ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from exgrpo_cli.base.shapes import NUMBER, read_json, require_shape
from exgrpo_cli.plots.series import FEW, draw_series, explain_smoothing
from exgrpo_cli.plots.style import (
    BLACK,
    BLUE,
    ORANGE,
    SINGLE_COLUMN,
    legend_above,
    mark_phase_start,
    new_figure,
    say_nothing_to_show,
    step_axis,
    styled,
    token_axis,
)
from exgrpo_cli.runs.metrics import RunMetrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUMMARY_FILE = "summary.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldoutScore:
    """pass@1 on the held-out questions at one step, with its 95 % interval (NaN where it is not known)."""

    step: int
    value: float
    low: float
    high: float


def heldout_scores(
    run: Path, metrics: RunMetrics, ends: Mapping[str, Any] | None = None
) -> dict[str, list[HeldoutScore]]:
    """Held-out scores by benchmark name, in order of steps.

    From the step keys `val/<name>`, `val/<name>/low` and `/high`, and from `ends`, or else summary.json once the run
    has ended, whose scores before and after training are of the one benchmark that the run validated on.
    """
    names = [name for name in metrics.names("val/") if name.count("/") == 1]
    scores = {name.removeprefix("val/"): _logged(metrics, name) for name in names}
    own = _ends(run, int(metrics.steps[-1]) if len(metrics.steps) else 0, ends)
    if own:
        name = next(iter(scores), "held-out")
        known = {score.step for score in own}
        scores[name] = sorted(
            [*own, *(s for s in scores.get(name, []) if s.step not in known)], key=lambda score: score.step
        )
    return scores


def _logged(metrics: RunMetrics, name: str) -> list[HeldoutScore]:
    columns = (metrics.steps, metrics.series(name), metrics.series(f"{name}/low"), metrics.series(f"{name}/high"))
    return [
        HeldoutScore(step=int(step), value=float(value), low=float(low), high=float(high))
        for step, value, low, high in zip(*columns, strict=True)
        if np.isfinite(value)
    ]


def _ends(run: Path, last_step: int, heldout: Mapping[str, Any] | None) -> list[HeldoutScore]:
    path = run / SUMMARY_FILE
    if heldout is None:
        if not path.is_file():
            return []
        figures = read_json(path, {"steps": int, "heldout?": dict | None})
        # A run that was lengthened goes on past the step its summary was written at.
        last_step, heldout = figures["steps"], figures.get("heldout") or {}
        for score in (heldout.get("before"), heldout.get("after")):
            require_shape(score or {}, {"pass_at_1?": NUMBER | None, "low?": NUMBER, "high?": NUMBER}, str(path))
    return [
        HeldoutScore(
            step=step,
            value=heldout[name]["pass_at_1"],
            low=heldout[name].get("low", float("nan")),
            high=heldout[name].get("high", float("nan")),
        )
        for name, step in (("before", 0), ("after", last_step))
        if (heldout.get(name) or {}).get("pass_at_1") is not None
    ]


def learning_curve(metrics: RunMetrics, heldout: dict[str, list[HeldoutScore]]) -> "Figure":
    """pass@1 over the steps: fresh questions, replayed ones (their fresh members), held-out ones with intervals."""
    with styled():
        figure, (axes,) = new_figure(width=5.0, height=3.0)
        last_step = int(metrics.steps[-1]) if len(metrics.steps) else 0
        batch, replayed = metrics.series("batch/pass_at_1"), metrics.series("replay/pass_at_1")
        if not (np.isfinite(batch).any() or heldout):
            say_nothing_to_show(axes, "no step has finished yet")
            return figure
        window = draw_series(axes, metrics.steps, batch, colour=BLUE, label="fresh questions")
        if np.isfinite(replayed).any():
            draw_series(axes, metrics.steps, replayed, colour=ORANGE, label="replayed questions (fresh rollouts)")
        for (name, scores), marker in zip(heldout.items(), "DosvP^X" * len(heldout), strict=False):
            places = [score.step for score in scores]
            draw_heldout(axes, places, scores, marker, "held-out" if name == "held-out" else f"held-out: {name}")
        axes.set_ylabel("pass@1")
        axes.set_ylim(0, 1)
        step_axis(axes, last_step)
        axes.set_xlim(-0.02 * max(last_step, 1), 1.02 * max(last_step, 1))
        mark_phase_start(axes, metrics.first_mixed_step, label=True)
        figure.legend(loc="outside upper center", ncols=3)
        explain_smoothing(figure, window)
        return figure


def accuracy_by_tokens(metrics: RunMetrics, heldout: dict[str, list[HeldoutScore]]) -> "Figure | None":
    """Held-out pass@1 against the tokens generated until then, the cost that methods share; None without scores."""
    if not any(heldout.values()):
        return None
    with styled():
        figure, (axes,) = new_figure(width=SINGLE_COLUMN, height=2.5)
        for (name, scores), marker in zip(heldout.items(), "DosvP^X" * len(heldout), strict=False):
            tokens = generated_by(metrics, [score.step for score in scores])
            draw_heldout(axes, tokens, scores, marker, name)
        axes.set_xlabel("tokens generated")
        axes.set_ylabel("held-out pass@1")
        axes.set_ylim(0, 1)
        token_axis(axes)
        legend_above(axes)
        return figure


def generated_by(metrics: RunMetrics, steps: Sequence[int]) -> list[float]:
    """Tokens generated up to and including each of `steps`."""
    totals = np.concatenate([[0.0], np.nan_to_num(metrics.series("tokens/generated")).cumsum()])
    return totals[np.searchsorted(metrics.steps, steps, side="right")].tolist()


def draw_heldout(
    axes: "Axes", places: Sequence[float], scores: Sequence[HeldoutScore], marker: str, label: str
) -> None:
    """Scores with their intervals at `places`; fewer than FEW are not joined by a line."""
    values = np.array([score.value for score in scores])
    below = np.array([np.nan_to_num(score.value - score.low) for score in scores]).clip(0)
    above = np.array([np.nan_to_num(score.high - score.value) for score in scores]).clip(0)
    axes.errorbar(
        places,
        values,
        yerr=np.stack([below, above]),
        color=BLACK,
        marker=marker,
        linestyle="-" if len(scores) >= FEW else "none",
        linewidth=0.9,
        elinewidth=0.9,
        capsize=2.5,
        label=f"{label} (95 %)" if (below + above).any() else label,
        clip_on=False,
        zorder=3,
    )
