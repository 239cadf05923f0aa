"""Figures of one run: how its training went, from its step metrics, and what its experience buffer held and gave.

Each is None while there is nothing to draw.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float64

from exgrpo_cli.runs.folder import RunMetrics, read_metrics
from exgrpo_cli.runs.result import RESULT_FILE, Memorising, read_result, read_summary
from exgrpo_cli.show.figures import style
from exgrpo_cli.show.figures.style import BLACK, MAXIMA, Panel, new_figure
from exgrpo_cli.show.queries import GROUPS, Numbers, series, span_of

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
    "diagnostics": "Signs of trouble: entropy that drops to 0, ratios far from 1, skipped updates, responses that grow "
    "to the limit, and a gap between trainer and engine that widens.",
    "replay-buckets": "Questions in the buffer by their latest success count.",
    "replay-questions": "All training questions by what has become of them.",
    "replay-draws": "Questions drawn against what the sampler promised; a small p-value means that they disagree.",
    "replay-units": "Units drawn by priority, and those replayed: the others have drifted beyond the bound.",
    "replay-entropy": "Entropy of replayed against available trajectories: where lines meet, there was no choice.",
    "replay-entropy-by-bucket": "Entropy at birth by difficulty. Compare within stretches of steps: it falls in time.",
    "replay-flow": "Replay visits by the success count before: what became of the questions.",
    "replay-age-reuse": "Age of replayed trajectories, and how often each was replayed.",
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
    scores: dict[str, dict[float, Sequence[float]]] = {}
    for key in (name for name in metrics.names("val/") if name.count("/") == 1):
        columns = np.stack([metrics.steps, *(metrics.series(name) for name in (key, f"{key}/low", f"{key}/high"))])
        scores[key.removeprefix("val/")] = {row[0]: row for row in columns.T if np.isfinite(row[1])}
    last_step, summary = int(metrics.steps[-1]) if len(metrics.steps) else 0, run / SUMMARY_FILE
    if ends is None and summary.is_file():
        told = read_summary(summary)
        # A run that was lengthened goes on past the step its summary was written at.
        last_step, ends = told["steps"], told["heldout"]
    own = scores.setdefault(next(iter(scores), "held-out"), {})
    for when, step in (("before", 0), ("after", last_step)):
        if score := (ends or {}).get(when):
            own[step] = (step, score["pass_at_1"], score["low"], score["high"])
    return {name: np.array([row for _, row in sorted(found.items())]) for name, found in scores.items() if found}


def learning_curve(metrics: RunMetrics, heldout: Mapping[str, Scores]) -> "Figure | None":
    """pass@1 over the steps: fresh questions, replayed ones (their fresh members), held-out ones with intervals.

    None before the first step.
    """
    logged = {"fresh questions": "batch/pass_at_1", "replayed questions (fresh rollouts)": "replay/pass_at_1"}
    series = {label: metrics.series(key) for label, key in logged.items()}
    drawn = {label: values for label, values in series.items() if np.isfinite(values).any()}
    if not drawn and not heldout:
        return None
    with style.styled():
        figure, (axes,) = new_figure(width=5.0, height=3.0)
        looks = style.looks_of(list(logged))
        windows = [style.draw_line(axes, metrics.steps, own, name, **looks[name]) for name, own in drawn.items()]
        _draw_heldout(axes, heldout, lambda steps: steps)
        last_step = int(metrics.steps[-1]) if len(metrics.steps) else 0
        style.count_axis(axes, "step", last_step, margin=0.02)
        axes.set(ylabel="pass@1", ylim=(0, 1))
        style.mark_phase_start(axes, metrics.first_mixed_step, label=True)
        figure.legend(loc="outside upper center", ncols=3)
        style.explain_smoothing(figure, max(windows, default=0))
        return figure


def accuracy_by_tokens(metrics: RunMetrics, heldout: Mapping[str, Scores]) -> "Figure":
    """Held-out pass@1 against the tokens generated until then, the cost that methods share."""
    totals = np.concatenate([[0.0], np.nan_to_num(metrics.series("tokens/generated")).cumsum()])
    with style.styled():
        figure, (axes,) = new_figure(width=3.5, height=2.5)
        _draw_heldout(axes, heldout, lambda steps: totals[np.searchsorted(metrics.steps, steps, side="right")])
        style.count_axis(axes, "tokens generated", totals[-1], margin=0.03)
        axes.set(ylabel="held-out pass@1", ylim=(0, 1))
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
        # Rasterised: one picture in a vector file, not a rectangle per step and bucket.
        shades: dict[str, Any] = {
            "norm": LogNorm(1, max(int(questions.max()), 2)),
            "cmap": "viridis",
            "rasterized": True,
        }
        image = axes.pcolormesh(*edges, np.ma.masked_equal(questions, 0), **shades)
        axes.grid(visible=False)
        figure.colorbar(image, pad=0.02, aspect=30, label="questions (white: none)", format="{x:g}").minorticks_off()
        axes.set(yticks=shown, ylabel=f"successes of {told['group_size']} at the last visit")
        style.count_axis(axes, "step", told["steps"])
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
    return style.categories_figure(labels, shares, xlabel=x, ylabel="share of the visits", ylim=(-0.03, 1.03))


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
            axes.locator_params(axis="x", nbins=6, integer=True)
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
