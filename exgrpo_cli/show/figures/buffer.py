"""Figures of the experience buffer and of what is drawn from it, from the numbers of a report.

Each is None while there is nothing to draw.
"""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from exgrpo_cli.show.figures import style
from exgrpo_cli.show.figures.style import Panel, new_figure
from exgrpo_cli.show.queries import GROUPS, Numbers, series, span_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOUR_MAP = "viridis"
HISTOGRAM_BINS = 30
CHANGES = ("fewer", "as many", "more")
"""Successes after a replay visit against those before, in the order of the difference's sign."""


def over_time(titles: Mapping[str, Mapping[str, str]], told: Numbers) -> "Figure | None":
    """A panel over the steps for each title: its lines by their labels, each with the path of its values."""
    lines = {title: {name: series(told, path) for name, path in paths.items()} for title, paths in titles.items()}
    panels = [Panel(title, own) for title, own in lines.items() if not any(each is None for each in own.values())]
    return style.series_figure(panels, told["steps"], told["first_mixed_step"])


question_states = partial(
    over_time,
    {
        "questions": {"buffered": "over_time.questions", "retired": "over_time.retired"},
        "tried, nothing stored": {"": "over_time.tried"},
        "unseen": {"": "over_time.unseen"},
    },
)
units_scanned = partial(
    over_time,
    {
        "units": {"replayed": "over_time.units.taken", "scanned": "over_time.units.scanned"},
        "priority of the replayed": {"": "over_time.units.priority"},
        "drift of the scanned": {"": "over_time.units.drift"},
    },
)
entropy_of_choice = partial(
    over_time,
    {
        "mean token entropy (nats)": {
            "replayed": "over_time.entropy_selected",
            "available (mean of candidates)": "over_time.entropy_available",
        },
        "candidates per question": {"": "over_time.candidates"},
    },
)
COMPARED = {
    "questions buffered": "over_time.questions",
    "questions retired": "over_time.retired",
    "trajectories in the buffer": "over_time.trajectories",
    "entropy of replayed (nats)": "over_time.entropy_selected",
    "age of replayed (steps)": "over_time.age",
    "effective sample size (share)": "ratios.ess",
}
"""Panels in which several runs are set beside each other, each with the path of its values."""


def buffers_compared(reports: Mapping[str, Numbers]) -> "Figure | None":
    """Contents of each buffer and draws from it, one line per run in every panel."""
    panels = [
        Panel(title, {label: series(told, path) for label, told in reports.items()}) for title, path in COMPARED.items()
    ]
    return style.series_figure(panels, max(told["steps"] for told in reports.values()), one_legend=True)


def bucket_occupancy(told: Numbers) -> "Figure | None":
    """Questions per bucket and step as a heat map of logarithmic counts."""
    from matplotlib.colors import LogNorm

    by_bucket = told["over_time"]["buckets"]
    if not by_bucket:
        return None
    shown = np.arange(min(by_bucket), max(by_bucket) + 1)
    none = np.zeros(told["steps"] + 1, dtype=np.int64)
    questions = np.stack([by_bucket.get(bucket, none) for bucket in shown.tolist()])
    with style.styled():
        figure, (axes,) = new_figure(height=2.9)
        edges = np.arange(-0.5, questions.shape[1]), np.append(shown - 0.5, shown[-1] + 0.5)
        norm = LogNorm(1, max(int(questions.max()), 2))
        # Rasterised: one picture in a vector file, not a rectangle per step and bucket.
        shades: dict[str, Any] = {"norm": norm, "cmap": COLOUR_MAP, "rasterized": True}
        image = axes.pcolormesh(*edges, np.ma.masked_equal(questions, 0), **shades)
        axes.grid(visible=False)
        figure.colorbar(image, pad=0.02, aspect=30, label="questions (white: none)", format="{x:g}").minorticks_off()
        axes.set(yticks=shown, ylabel=f"successes of {told['group_size']} at the last visit")
        style.step_axis(axes, told["steps"])
        style.mark_phase_start(axes, told["first_mixed_step"])
        return figure


def bucket_flow(told: Numbers) -> "Figure | None":
    """Outcomes of replay visits: of each success count before, the shares of questions with fewer successes afterwards,
    as many, more, retired, or dropped from the buffer."""
    flow = told["flow"]
    if not flow:
        return None
    shares: dict[str, dict[int, list[float]]] = {name: {} for name in (*CHANGES, "retired", "dropped")}
    labels = []
    for place, (before, row) in enumerate(flow.items()):
        visits = {name: row.get(name, 0) for name in shares}
        for after, num in row["after"].items():
            visits[CHANGES[np.sign(after - before) + 1]] += num
        total = sum(visits.values())
        labels.append(f"{before}\n({total:,})")
        for name, num in visits.items():
            shares[name][place] = [num / total] * 3
    x = f"successes of {told['group_size']} before (visits)"
    return style.categories_figure(labels, shares, xlabel=x, ylabel="share of the visits", ylim=(0, 1))


def age_and_reuse(told: Numbers) -> "Figure | None":
    """Ages of replayed trajectories, and how often each stored one was replayed.

    Both on logarithmic scales: most replays are young and most trajectories never replayed, and the tails matter.
    """
    age, reuse = told["age"], told["reuse"]
    if not age["histogram"]:
        return None
    with style.styled():
        figure, (ages, uses) = new_figure(1, 2, height=2.4)
        never = f"{reuse['never'] / told['stored']:.0%} never"
        ages.set(xlabel=f"age when replayed (steps; median {age['median']:g})", ylabel="replays")
        uses.set(xlabel=f"times replayed ({never})", ylabel="trajectories")
        for axes, counts in ((ages, age["histogram"]), (uses, reuse["histogram"])):
            width = max(1, max(counts) // HISTOGRAM_BINS)
            edges = np.arange(-0.5, max(counts) + width + 0.5, width).tolist()
            axes.hist(list(counts), edges, weights=list(counts.values()), rwidth=0.92)
            axes.grid(visible=False, axis="x")
            style.logarithmic_axis(axes)
            style.whole_ticks(axes)
        return figure


def entropy_at_birth(told: Numbers) -> "Figure | None":
    """Entropy at birth of correct trajectories by difficulty, within stretches of steps.

    Over a whole run hard questions' trajectories are older than easy ones' and entropies fall with the steps: a pooled
    comparison says more of time than of difficulty.
    """
    windows = told["entropy"]["windows"]
    points: dict[str, dict[int, list[float]]] = {name: {} for name in GROUPS}
    for number, window in enumerate(windows):
        for group in window["by_difficulty"]:
            points[group["name"]][number] = [group["mean"], *(group["quantiles"][end] for end in ("5%", "95%"))]
    if not any(points.values()):
        return None
    labels = [
        f"{span_of(each)}\nhard/easy {each['hard_over_easy']:.2f}".replace("\nhard/easy nan", "") for each in windows
    ]
    note = "means, bars 5-95 % of the trajectories; hard: pass rate up to 1/4, easy: from 3/4"
    axis: dict[str, Any] = {"xlabel": "steps", "ylabel": "mean token entropy (nats)", "ylim": (0, None)}
    return style.categories_figure(labels, points, note, **axis)


def draws_against_promise(told: Numbers) -> "Figure | None":
    """Questions drawn from each bucket over the run beside what the sampler promised."""
    found = told["draws"]
    rows = [row for row in found["buckets"] if row["expected"] > 0 or row["drawn"]]
    if not rows:
        return None
    labels = [f"{row['bucket']}/{row['num_members']}" for row in rows]
    points = {
        label: {place: [row[name]] * 3 for place, row in enumerate(rows)}
        for label, name in (("drawn", "drawn"), ("promised", "expected"))
    }
    note = "" if found["p_value"] is None else f"chi-square p = {found['p_value']:.2g}"
    axis: dict[str, Any] = {"xlabel": "successes at the last visit", "ylabel": "questions drawn", "ylim": (0, None)}
    return style.categories_figure(labels, points, note, **axis)


WHAT_IF = {
    "sampler": {"pass rate of the drawn": ("pass_rate", "expected_pass_rate")},
    "metric": {
        "entropy of the chosen (nats)": ("by_step.chosen.entropy", "by_step.other.entropy"),
        "age of the chosen (steps)": ("by_step.chosen.age", "by_step.other.age"),
    },
}
"""Panels of each kind of what-if: title, and where its outcome has the run's values and the other's."""


def what_if_figure(told: Numbers) -> "Figure | None":
    """The run beside the other policy, a panel over the steps for each number by which they differ."""
    panels = []
    for kind, outcome in told["what_if"].items():
        names = [f"{who}: {title}" for who, title in zip(("run", "what if"), outcome["names"], strict=True)]
        for title, paths in WHAT_IF[kind].items():
            lines = {name: series(outcome, path) for path, name in zip(paths, names, strict=True)}
            panels.append(Panel(title, lines, outcome["steps"]))
    return style.series_figure(panels, told["steps"])
