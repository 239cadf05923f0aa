"""Memorising or learning: pass@1 before and after training of replayed, rolled out and never seen questions."""

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np

from exgrpo_cli.plots.style import BLACK, BLUE, FULL_WIDTH, GREY, ORANGE, new_figure, styled
from exgrpo_cli.runs.result import Memorising

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = {
    "replayed": ("replayed", ORANGE),
    "rolled_out": ("rolled out, never replayed", BLUE),
    "never_seen": ("never seen, same levels", BLACK),
    "heldout": ("held-out, all", GREY),
}
"""Field of Memorising to its label and colour."""
TITLE_COLUMNS = 87
"""Characters of titles beside each other across the figure."""


def memorising_figure(runs: Mapping[str, Sequence[Memorising]]) -> "Figure | None":
    """A panel for each name: pass@1 before and after, means over its runs; None where none asked training questions.

    All panels share one vertical axis.
    """
    asked = {name: [each for each in found if each.asked_training] for name, found in runs.items()}
    runs = {name: found for name, found in asked.items() if found}
    if not runs:
        return None
    with styled():
        columns = 2 if len(runs) == 4 else min(3, len(runs))
        rows = -(-len(runs) // columns)
        figure, panels = new_figure(rows, columns, width=FULL_WIDTH, height=0.6 + 2.0 * rows)
        for axes in panels[len(runs) :]:
            axes.set_visible(False)
        for axes, (name, found) in zip(panels, runs.items(), strict=False):
            for kind, (label, colour) in KINDS.items():
                rates = [getattr(each, kind) for each in found]
                known = [(rate.before, rate.after) for rate in rates if None not in (rate.before, rate.after)]
                if known:
                    axes.plot([0, 1], np.mean(known, axis=0), color=colour, marker="o", label=label)
            axes.set_xticks([0, 1], ["before", "after"])
            axes.set_xlim(-0.2, 1.2)
            trained = np.mean([each.trained_questions for each in found])
            axes.set_title(_title(name, f"({trained:,.0f} questions)", TITLE_COLUMNS // columns))
        for axes in panels[1 : len(runs)]:
            axes.sharey(panels[0])
        panels[0].autoscale(axis="y")
        panels[0].set_ylabel("pass@1")
        lines = {line.get_label(): line for axes in panels for line in axes.get_lines()}
        shown = [lines[label] for label, _ in KINDS.values() if label in lines]
        figure.legend(handles=shown, loc="outside upper center", ncols=2)
        return figure


def _title(name: str, questions: str, columns: int) -> str:
    """On one line where it has room there."""
    line = f"{name} {questions}"
    return line if len(line) <= columns else f"{fill(name, columns)}\n{questions}"
