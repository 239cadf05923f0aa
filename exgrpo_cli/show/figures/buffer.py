"""Figures of the experience buffer and of what is drawn from it, from the numbers of a report."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from exgrpo_cli.show.figures import style
from exgrpo_cli.show.figures.style import BLACK, BLUE, FULL_WIDTH, GREY, ORANGE, VERMILION, Line, Panel, new_figure
from exgrpo_cli.show.queries import GROUPS, Numbers, span_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from exgrpo_cli.show.statistics import RunReport

COLOUR_MAP = "viridis"
DARK_SHARE = 0.55
"""Share from which a cell is light enough for black numbers."""
HISTOGRAM_BINS = 30
DIFFICULTY_COLOURS = dict(zip(GROUPS, (VERMILION, ORANGE, style.SKY), strict=True))
PANEL_HEIGHT = 2.4
NOT_DRAWN = "nothing has been drawn yet"
NOT_REPLAYED = "nothing has been replayed yet"


def bucket_occupancy(report: "RunReport") -> "Figure":
    """Questions per bucket and step as a heat map of logarithmic counts, beside the draws from each bucket."""
    from matplotlib.colors import LogNorm

    told, by_bucket = report.numbers, report.numbers["over_time"]["buckets"]
    if not by_bucket:
        return style.empty_figure("no question has entered the buffer yet")
    shown = np.arange(min(by_bucket), max(by_bucket) + 1)
    none = np.zeros(told["steps"] + 1, dtype=np.int64)
    questions = np.stack([by_bucket.get(bucket, none) for bucket in shown.tolist()])
    edges = np.arange(-0.5, questions.shape[1]), np.append(shown - 0.5, shown[-1] + 0.5)
    with style.styled():
        figure, (counts, draws) = new_figure(1, 2, width=FULL_WIDTH, height=2.9, width_ratios=(3.2, 1), sharey=True)
        norm = LogNorm(1, max(int(questions.max()), 2))
        # Rasterised: one picture in a vector file, not a rectangle per step and bucket.
        image = counts.pcolormesh(*edges, np.ma.masked_equal(questions, 0), norm=norm, cmap=COLOUR_MAP, rasterized=True)
        counts.grid(visible=False)
        bar = figure.colorbar(image, ax=counts, pad=0.02, aspect=30)
        bar.set_label("questions (white: none)")
        bar.ax.yaxis.set_major_formatter("{x:g}")
        bar.ax.minorticks_off()
        size = told["group_size"]
        counts.set(yticks=shown, ylim=edges[1][[0, -1]], ylabel=f"successes of {size} at the last visit")
        style.step_axis(counts, told["steps"])
        style.mark_phase_start(counts, told["first_mixed_step"])
        if report.rules.composition != "replace":
            draws.set_axis_off()
            return figure
        drawn = [sum(row["drawn"] for row in told["draws"]["buckets"] if row["bucket"] == bucket) for bucket in shown]
        draws.barh(shown, drawn, height=0.8, color=BLUE)
        draws.grid(visible=False, axis="y")
        draws.tick_params(axis="y", length=0, labelleft=False)
        draws.set_xlabel("questions drawn")
        if not any(drawn):
            draws.set(xlim=(0, 1), xticks=[0])
        return figure


def question_states(report: "RunReport") -> "Figure":
    """Buffered, retired, tried and unseen questions after every step, stacked to the whole training set."""
    series, total = report.numbers["over_time"], report.record.num_training_questions
    layers = {"retired": (series["retired"], style.GREEN), "buffered": (series["questions"], BLUE)}
    known = series["retired"] + series["questions"]
    if series["tried"] is not None:
        layers |= {"tried, nothing stored": (series["tried"], ORANGE), "unseen": (series["unseen"], "#DDDDDD")}
    elif total:
        layers["tried or unseen"] = (np.clip(total - known, 0, None), "#DDDDDD")
    values, colours = zip(*layers.values(), strict=True)
    with style.styled():
        figure, (axes,) = new_figure(width=FULL_WIDTH, height=2.6)
        look: dict[str, Any] = {"labels": list(layers), "colors": colours, "linewidth": 0.25, "edgecolor": "white"}
        axes.stackplot(np.arange(len(known)), values, **look)
        axes.set(ylabel="questions", ylim=(0, max(total, int(known.max()), 1)))
        style.step_axis(axes, report.numbers["steps"])
        style.mark_phase_start(axes, report.numbers["first_mixed_step"], label=True)
        axes.legend(reverse=True, loc="center left", bbox_to_anchor=(1.0, 0.5))
        return figure


def bucket_flow(report: "RunReport") -> "Figure":
    """Destinations of replay visits: each row is one bucket, with shares of where its questions were next."""
    flow = report.numbers["flow"]
    if not flow:
        return style.empty_figure(NOT_REPLAYED)
    reached = sorted({after for row in flow.values() for after in row["after"]})
    ways = [*reached, *(name for name in ("retired", "dropped") if any(row[name] for row in flow.values()))]
    counts = np.array([[(row["after"] | row).get(way, 0) for way in ways] for row in flow.values()], dtype=np.int64)
    visits = counts.sum(axis=1)
    shares = counts / visits[:, None]
    brightest = max(float(shares.max()), 0.5)
    with style.styled():
        figure, (axes,) = new_figure(width=5.0, height=1.2 + 0.26 * max(len(flow), 4))
        axes.pcolormesh(shares, cmap=COLOUR_MAP, vmin=0, vmax=brightest, rasterized=True)
        for row, column in np.argwhere(shares).tolist():
            share = shares[row, column]
            colour = "black" if share > DARK_SHARE * brightest else "white"
            look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 6.5, "color": colour}
            axes.text(column + 0.5, row + 0.5, f"{share:.0%}", **look)
        names = [f"{before} ({num:,})" for before, num in zip(flow, visits.tolist(), strict=True)]
        axes.set_xticks(np.arange(len(ways)) + 0.5, [str(way) for way in ways])
        axes.set_yticks(np.arange(len(flow)) + 0.5, names)
        axes.tick_params(length=0)
        axes.grid(visible=False)
        size = report.numbers["group_size"]
        axes.set_xlabel(f"successes of {size} after a replay visit, the replayed one included")
        axes.set_ylabel("successes before (visits)")
        return figure


def entropy_of_choice(report: "RunReport") -> "Figure":
    """Mean entropy of what was replayed against what was available, and the number of candidates there were."""
    series = report.numbers["over_time"]
    available = _line(series["entropy_available"], VERMILION, "available (mean of candidates)")
    replayed = _line(series["entropy_selected"], BLUE, "replayed")
    title = (
        "mean token entropy (nats)"
        if getattr(report.rules, "needs_scores", False)
        else "mean token entropy at birth (nats)"
    )
    candidates = Panel("candidates per question", [_line(series["candidates"], BLACK)])
    return _panels(report, [Panel(title, [available, replayed]), candidates])


def units_scanned(report: "RunReport") -> "Figure":
    """Units scanned and taken in each step, the priority of those taken, and how far the scanned ones had drifted."""
    units = report.numbers["over_time"]["units"]
    if not units["scanned"].any():
        return style.empty_figure(NOT_DRAWN)
    counts = [_line(units["scanned"], VERMILION, "scanned"), _line(units["taken"], BLUE, "replayed")]
    panels = [Panel("units", counts), Panel("priority of the replayed", [_line(units["priority"])])]
    if np.isfinite(units["drift"]).any():
        bounds = [(getattr(report.rules, "max_drift", 0.0), GREY, "")]
        panels.append(Panel("drift of the scanned, bound", [_line(units["drift"], VERMILION)], bounds=bounds))
    return _panels(report, panels)


def _line(values: np.ndarray, colour: str = BLUE, label: str = "") -> Line:
    """One value a step, from step 0 on."""
    return Line(np.arange(len(values)), values, colour, label)


def _panels(report: "RunReport", panels: Sequence[Panel]) -> "Figure":
    told = report.numbers
    return style.series_figure(panels, len(panels), PANEL_HEIGHT, told["steps"], told["first_mixed_step"])


COMPARED = {
    "questions": "questions buffered",
    "retired": "questions retired",
    "trajectories": "trajectories in the buffer",
    "entropy_selected": "entropy of replayed (nats)",
    "age": "age of replayed (steps)",
    "ess": "effective sample size (share)",
}
"""Series of several runs that are set beside each other."""


def buffers_compared(reports: "Sequence[RunReport]") -> "Figure":
    """Contents of each buffer and draws from it, one line per run in every panel."""
    labels = [report.label for report in reports]
    looks = [(look["color"], look["linestyle"]) for look in style.looks_of(labels).values()]
    panels = []
    for name, title in COMPARED.items():
        lines = []
        for report, (colour, linestyle) in zip(reports, looks, strict=True):
            told = report.numbers["ratios" if name == "ess" else "over_time"]
            steps = told["steps"] if name == "ess" else np.arange(len(told[name]))
            lines.append(Line(steps, told[name], colour, report.label, linestyle=linestyle))
        panels.append(Panel(title, lines, nothing="not logged by these runs", legend=False))
    last_step = max(report.numbers["steps"] for report in reports)
    with style.styled():
        figure = style.series_figure(panels, 3, 2.0, last_step)
        style.legend_of_all(figure, figure.axes, labels, ncols=min(len(labels), 4))
        return figure


def age_and_reuse(report: "RunReport") -> "Figure":
    """Ages of replayed trajectories, and how often each stored one was replayed.

    Both on logarithmic scales: most replays are young and most trajectories never replayed, and the tails matter.
    """
    age, reuse = report.numbers["age"], report.numbers["reuse"]
    with style.styled():
        figure, (ages, uses) = new_figure(1, 2, width=FULL_WIDTH, height=PANEL_HEIGHT)
        _histogram(ages, age["histogram"], HISTOGRAM_BINS, NOT_REPLAYED)
        if age["histogram"]:
            ages.axvline(age["median"], color=VERMILION, linewidth=1.0)
            place, look = (age["median"], 1.0), {"color": VERMILION, "va": "top"}
            style.annotate(ages, f"median {age['median']:g}", place, ("data", "axes fraction"), (3, -2), **look)
            ages.set(xlabel="age when replayed (steps)", ylabel="replays")
        _histogram(uses, reuse["histogram"], 10**6, "nothing has been stored yet")
        if reuse["histogram"]:
            never = f"{reuse['never'] / report.numbers['stored']:.0%} never"
            style.annotate(uses, never, (0, max(reuse["never"], 0.7)), "data", (6, 0), va="bottom")
            uses.set(xlabel="times replayed", ylabel="trajectories")
        return figure


def _histogram(axes: "Axes", counts: dict[int, int], most: int, nothing: str) -> None:
    """Bars of whole numbers on a logarithmic scale, of so many together that at most `most` stand side by side."""
    if not counts:
        style.say_nothing_to_show(axes, nothing)
        return
    width = max(1, -(-(max(counts) + 1) // most))
    edges = np.arange(-0.5, max(counts) + width + 0.5, width)
    heights, _ = np.histogram(list(counts), edges, weights=list(counts.values()))
    axes.bar((edges[:-1] + edges[1:]) / 2, heights, width=0.92 * width, color=BLUE)
    style.logarithmic_axis(axes)
    axes.set(ylim=(0.7, 2.2 * heights.max()), xlim=(-0.6, max(max(counts), 1) + 0.6))
    axes.grid(visible=False, axis="x")
    style.whole_ticks(axes)


def entropy_by_bucket(report: "RunReport") -> "Figure":
    """Entropy at birth of correct trajectories, within stretches of steps: by success count, and by difficulty.

    Over a whole run hard questions' trajectories are older than easy ones' and entropies fall with the steps: the
    pooled comparison (dashed) says more of time than of difficulty.
    """
    import matplotlib

    whole = report.numbers["entropy"]
    windows = whole["windows"]
    if not whole["by_bucket"]:
        return style.empty_figure("no trajectory has been stored yet")
    with style.styled():
        figure, (buckets, groups) = new_figure(1, 2, width=FULL_WIDTH, height=2.9)
        # Dark to light; the last tenth is too pale on white.
        shades = [*matplotlib.colormaps[COLOUR_MAP](np.linspace(0, 0.92, len(windows))), GREY]
        for window, shade in zip([*windows, whole] if len(windows) > 1 else windows, shades, strict=False):
            means = {int(group["name"]): group["mean"] for group in window["by_bucket"]}
            look: dict[str, Any] = {"label": f"steps {span_of(window)}", "marker": "o"}
            look = {"linestyle": "--", "label": "whole run"} if window is whole else look
            buckets.plot(list(means), list(means.values()), color=shade, **look)
        buckets.set_xlabel(f"successes of {report.numbers['group_size']} when sampled")
        buckets.set_ylabel("mean token entropy (nats)")
        style.whole_ticks(buckets)
        style.legend_above(buckets, ncols=3)
        _difficulty_boxes(groups, windows)
        for axes in (buckets, groups):
            axes.set_ylim(0, None)
        note = "boxes 25-75 %, whiskers 5-95 %, diamonds means; hard: pass rate up to 1/4, easy: from 3/4"
        figure.supxlabel(note, fontsize=6.5, color=style.SOFT)
        return figure


BOX: dict[str, Any] = {
    "manage_ticks": False,
    "showmeans": True,
    "patch_artist": True,
    "widths": 0.22,
    "medianprops": {"color": "white", "linewidth": 1.2},
    "meanprops": {"marker": "D", "markerfacecolor": BLACK, "markeredgecolor": "white", "markersize": 3.5},
    "whiskerprops": {"linewidth": 0.7},
    "capprops": {"linewidth": 0.7},
}


def _difficulty_boxes(axes: "Axes", windows: Sequence[Numbers]) -> None:
    """Hard, medium and easy side by side in each stretch of steps, with the ratio of the means below."""
    from matplotlib.patches import Patch

    labels = []
    for number, window in enumerate(windows):
        for group in window["by_difficulty"]:
            quantiles = zip(("whislo", "q1", "med", "q3", "whishi"), group["quantiles"].values(), strict=True)
            place = number + 0.26 * (GROUPS.index(group["name"]) - 1)
            look = {"linewidth": 0.4, "facecolor": DIFFICULTY_COLOURS[group["name"]]}
            box = {"mean": group["mean"], "fliers": [], **dict(quantiles)}
            axes.bxp([box], positions=[place], boxprops=look, **BOX)
        ratio = window["hard_over_easy"]
        labels.append(span_of(window) + ("" if math.isnan(ratio) else f"\nhard/easy {ratio:.2f}"))
    axes.set_xticks(range(len(windows)), labels, fontsize=6)
    axes.set(xlim=(-0.5, len(windows) - 0.5), xlabel="steps")
    axes.grid(visible=False, axis="x")
    patches = [Patch(facecolor=colour, label=name) for name, colour in DIFFICULTY_COLOURS.items()]
    style.legend_above(axes, handles=patches, ncols=3)


def draws_against_promise(report: "RunReport") -> "Figure":
    """Questions drawn from each bucket over the run beside what the sampler promised."""
    found = report.numbers["draws"]
    rows = [row for row in found["buckets"] if row["expected"] > 0 or row["drawn"]]
    if not rows:
        return style.empty_figure(NOT_DRAWN)
    with style.styled():
        figure, (axes,) = new_figure(width=style.SINGLE_COLUMN, height=2.5)
        names = [f"{row['bucket']}/{row['num_members']}" for row in rows]
        style.draw_bars(axes, names, {"drawn": [row["drawn"] for row in rows]})
        promised = [row["expected"] for row in rows]
        axes.plot(range(len(rows)), promised, linestyle="none", marker="D", color=BLACK, label="promised")
        axes.set(xlabel="successes at the last visit", ylabel="questions drawn")
        if found["p_value"] is not None:
            axes.set_title(f"chi-square p = {found['p_value']:.2g}", loc="right", fontsize=7)
        figure.legend(loc="outside upper left", ncols=2)
        return figure


PAIRS = {
    "sampler": {"pass rate of the drawn": ("steps", "pass_rate", "expected_pass_rate")},
    "metric": {
        "entropy of the chosen (nats)": ("steps", "by_step.chosen.entropy", "by_step.other.entropy"),
        "age of the chosen (steps)": ("steps", "by_step.chosen.age", "by_step.other.age"),
    },
    "priority": {
        "age of the rows (steps)": ("steps", "taken_by_step.age", "expected_by_step.age"),
        "absolute advantage of the rows": ("steps", "taken_by_step.advantage", "expected_by_step.advantage"),
    },
    "max_drift": {"scanned units within the bound": ("scan_steps", "accepted_by_step", "would_accept_by_step")},
}
"""Panels of each kind of what-if: title, and where its outcome has the steps, the run's values and the other's."""


def what_if_figure(report: "RunReport") -> "Figure":
    """The run in blue, the other policy in orange, a row of two panels for each kind of draw that was asked about."""
    asked = report.numbers["what_if"]
    with style.styled():
        figure, places = style.full_rows(2 * len(asked), 2, row_height=PANEL_HEIGHT)
        windows = [0]
        for number, (kind, outcome) in enumerate(asked.items()):
            here = places[2 * number : 2 * number + 2]
            own, other = report.titles[kind]
            names = (f"run: {own}", f"what if: {other}")
            if kind == "sampler":
                _bars_of_draws(here.pop(0), outcome, names)
            panels = [_pair(title, outcome, paths, names) for title, paths in PAIRS[kind].items()]
            if kind == "max_drift":
                panels.append(_drift_panel(outcome, names))
            for axes, panel in zip(here, panels, strict=True):
                windows.append(style.draw_panel(axes, panel, report.numbers["steps"], None))
        style.explain_smoothing(figure, max(windows))
        return figure


def _pair(title: str, outcome: Numbers, paths: Sequence[str], names: Sequence[str]) -> Panel:
    steps, *values = (_under(outcome, path) for path in paths)
    lines = [Line(steps, *each) for each in zip(values, (BLUE, VERMILION), names, strict=True)]
    return Panel(title, lines)


def _under(numbers: Any, path: str) -> np.ndarray:
    for name in path.split("."):
        numbers = numbers[name]
    return numbers


def _drift_panel(outcome: Numbers, names: Sequence[str]) -> Panel:
    drift = Line(outcome["scan_steps"], outcome["drift_by_step"], GREY, "scanned, mean")
    bounds = list(zip((outcome["own"], outcome["other"]), (BLUE, VERMILION), names, strict=True))
    return Panel("drift, and its bounds", [drift], bounds=bounds, logarithmic=outcome["other"] > 0)


def _bars_of_draws(axes: "Axes", outcome: Numbers, names: Sequence[str]) -> None:
    buckets = sorted({*outcome["drawn"], *outcome["expected"]})
    if not buckets:
        style.say_nothing_to_show(axes, NOT_DRAWN)
        return
    counts = (outcome["drawn"], outcome["expected"])
    heights = {name: [each.get(k, 0) for k in buckets] for name, each in zip(names, counts, strict=True)}
    style.draw_bars(axes, [str(bucket) for bucket in buckets], heights)
    axes.set(xlabel="successes at the last visit", ylabel="questions drawn")
    style.legend_above(axes, ncols=2)
