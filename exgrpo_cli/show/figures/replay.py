"""Figures of what the experience buffer of a run held and gave; each is None while there is nothing to draw."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from exgrpo_cli.base.statistics import wilson
from exgrpo_cli.config.names import is_function
from exgrpo_cli.show.figures import style
from exgrpo_cli.show.figures.style import BLUE, Panel, new_figure
from exgrpo_cli.show.queries import GROUPS, Numbers, series, span_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HISTOGRAM_BINS = 30
LEAST_P = 0.01
"""p-value below which draws do not go with what was promised."""
CHANGES = ("fewer", "as many", "more")
"""Successes after a replay visit against those before, in the order of the difference's sign."""


def over_time(name: str, told: Numbers) -> "Figure | None":
    """The figure of that name: panels over the steps, as `words.toml` has them with the figure's title."""
    titles = style.WORDS["panels"][name]
    lines = {title: {label: series(told, path) for label, path in paths.items()} for title, paths in titles.items()}
    panels = [Panel(title, own) for title, own in lines.items() if not any(each is None for each in own.values())]
    figure = style.series_figure(panels, told["steps"], told["first_mixed_step"])
    return figure and style.entitle(figure, style.WORDS["titles"][name].format_map(told))


question_states, units_scanned, entropy_of_choice = (
    partial(over_time, name) for name in ("replay-questions", "replay-units", "replay-entropy")
)


def buffers_compared(reports: Mapping[str, Numbers]) -> "Figure | None":
    """Contents of each buffer and draws from it, one line per run in every panel."""
    paths = style.WORDS["panels"]["replay-comparison"].items()
    panels = [Panel(title, {label: series(told, path[""]) for label, told in reports.items()}) for title, path in paths]
    figure = style.series_figure(panels, max(told["steps"] for told in reports.values()), one_legend=True)
    return figure and style.entitle(figure, f"Replay buffers of {len(reports)} runs, and what was drawn from them")


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
        # Rasterised: one picture in a vector file, not a rectangle per step and bucket.
        look: dict[str, Any] = {"norm": LogNorm(1, max(int(questions.max()), 2)), "cmap": "viridis", "rasterized": True}
        image = axes.pcolormesh(*edges, np.ma.masked_equal(questions, 0), **look)
        axes.grid(visible=False)
        figure.colorbar(image, pad=0.02, aspect=30, label="questions (blank: none)", format="{x:g}").minorticks_off()
        axes.set(yticks=shown, ylabel=f"successes of {told['group_size']} at the last visit")
        style.count_axis(axes, "step", told["steps"])
        style.mark_phase_start(axes, told["first_mixed_step"])
        for k, counts in zip(shown.tolist(), questions, strict=True):
            style.tell_line(axes, "step", f"{k} of {told['group_size']} right", np.arange(len(counts)), counts)
        title = f"Questions in the replay buffer by how often they were solved: {told['questions']:,} at the end"
        return style.entitle(figure, title)


def bucket_flow(told: Numbers) -> "Figure | None":
    """Outcomes of replay visits: of each success count before, the shares of questions with fewer successes afterwards,
    as many, more, retired, or dropped from the buffer."""
    flow = told["flow"]
    if not flow:
        return None
    outcomes = (*CHANGES, "retired", "dropped")
    visits = np.zeros((len(outcomes), len(flow)), dtype=np.int64)
    for place, (before, row) in enumerate(flow.items()):
        visits[len(CHANGES) :, place] = row["retired"], row["dropped"]
        for after, num in row["after"].items():
            visits[np.sign(after - before) + 1, place] += num
    totals = visits.sum(axis=0)
    labels = [f"{before}\n({total:,})" for before, total in zip(flow, totals, strict=True)]
    shares = zip(outcomes, (visits / totals).tolist(), strict=True)
    points = {name: {place: [share] * 3 for place, share in enumerate(own)} for name, own in shares}
    x = f"successes of {told['group_size']} before (visits)"
    figure = style.categories_figure(labels, points, xlabel=x, ylabel="share of the visits", ylim=(-0.03, 1.03))
    fewer, _, more, *_ = visits.sum(axis=1)
    said = f"Of {totals.sum():,} replay visits {more:,} found more right answers than before, {fewer:,} fewer"
    return style.entitle(figure, said)


def lives(told: Numbers) -> "Figure | None":
    """Share of solved questions that their next visit loses, and of lost ones that it regains, by the steps between."""
    points: dict[str, dict[int, list[float]]] = {"solved, then lost": {}, "lost, then regained": {}}
    for place, row in enumerate(told["lives"]["by_delay"]):
        for name, some, other in zip(points, ("lost", "regained"), ("kept", "still_lost"), strict=True):
            if total := row[some] + row[other]:
                points[name][place] = [row[some] / total, *wilson(row[some], total)]
    if not any(points.values()):
        return None
    labels = [row["delay"] for row in told["lives"]["by_delay"]]
    x, y = "steps between two visits of a question", "share of the visits (95 %)"
    figure = style.categories_figure(labels, points, xlabel=x, ylabel=y, ylim=(-0.03, 1.03))
    said = "Of {solved:,} questions that a visit solved {lost_now:,} were lost when they were last visited"
    return style.entitle(figure, said.format_map(told["lives"]))


def age_and_reuse(told: Numbers) -> "Figure | None":
    """Ages of replayed trajectories, and how often each stored one was replayed.

    Both on logarithmic scales: most replays are young and most trajectories never replayed, and the tails matter.
    """
    age, reuse = told["age"], told["reuse"]
    if not age["histogram"]:
        return None
    with style.styled():
        figure, (ages, uses) = new_figure(1, 2, height=2.4)
        ages.set(xlabel="age when replayed (steps)", ylabel="replays")
        uses.set(xlabel="times replayed", ylabel="trajectories (stored answers)")
        for axes, counts in ((ages, age["histogram"]), (uses, reuse["histogram"])):
            width = max(1, max(counts) // HISTOGRAM_BINS)
            edges = np.arange(-0.5, max(counts) + width + 0.5, width).tolist()
            axes.hist(list(counts), edges, weights=list(counts.values()), rwidth=0.92, color=BLUE)
            axes.grid(visible=False, axis="x")
            style.logarithmic_axis(axes)
            axes.locator_params(axis="x", nbins=6, integer=True)
            places, numbers = np.array(sorted(counts.items())).T
            style.tell_line(axes, axes.get_xlabel(), axes.get_ylabel(), places, numbers)
        never = f"{reuse['never']:,} of {told['stored']:,} stored answers were never replayed"
        return style.entitle(figure, f"Half of the replays were at most {age['median']:g} steps old; {never}")


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
    labels = [f"{span_of(each)}\nhard/easy {each['hard_over_easy']:.2f}" for each in windows]
    labels = [label.replace("\nhard/easy nan", "") for label in labels]
    unit = "mean token entropy (nats)"
    ratios = [each["hard_over_easy"] for each in windows if np.isfinite(each["hard_over_easy"])]
    ends = " to ".join(dict.fromkeys(f"{end(ratios):.2f}" for end in (min, max))) if ratios else ""
    known = f": {ends} times that of easy ones of the same steps" if ratios else ", by difficulty"
    figure = style.categories_figure(labels, points, xlabel="steps", ylabel=unit, ylim=(0, None))
    return style.entitle(figure, f"Entropy of right answers to hard questions{known}")


def draws_against_promise(told: Numbers) -> "Figure | None":
    """Questions drawn from each bucket over the run beside what the sampler promised."""
    found = told["draws"]
    rows = [row for row in found["buckets"] if row["expected"] > 0 or row["drawn"]]
    if not rows:
        return None
    labels = [f"{row['bucket']}/{row['num_members']}" for row in rows]
    keys = {"drawn": "drawn", "promised": "expected"}
    points = {label: {place: [row[key]] * 3 for place, row in enumerate(rows)} for label, key in keys.items()}
    axis: dict[str, Any] = {"xlabel": "successes at the last visit", "ylabel": "questions drawn", "ylim": (0, None)}
    figure, p_value = style.categories_figure(labels, points, **axis), found["p_value"]
    if p_value is None:
        return style.entitle(figure, "Questions drawn for replay, and what the sampler promised")
    verdict = "as the sampler promised" if p_value >= LEAST_P else "not as the sampler promised"
    return style.entitle(figure, f"Questions were drawn for replay {verdict} (chi-square p = {p_value:.2g})")


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
        # Of a function of the user its own name: with the module's it is wider than a panel.
        titles = (title.split(":", 2)[-1] if is_function(title) else title for title in outcome["names"])
        names = [f"{who}: {title}" for who, title in zip(("run", "what if"), titles, strict=True)]
        for title, paths in WHAT_IF[kind].items():
            lines = {name: series(outcome, path) for path, name in zip(paths, names, strict=True)}
            panels.append(Panel(title, lines, outcome["steps"]))
    figure = style.series_figure(panels, told["steps"])
    return figure and style.entitle(figure, "What was replayed, and what another policy would have replayed")
