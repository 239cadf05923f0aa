"""Tables of a run's whole record, and of several runs side by side."""

import math
from collections.abc import Sequence

import numpy as np
from rich.table import Table

from exgrpo_cli.config.sections.replay import ReplaySettings
from exgrpo_cli.replay_stats.entropy import GROUPS
from exgrpo_cli.replay_stats.output.as_json import occupied
from exgrpo_cli.replay_stats.output.cells import (
    NO_VALUE,
    excerpt,
    maybe,
    mean,
    nan_mean,
    number,
    percent,
    significant,
    table_of,
)
from exgrpo_cli.replay_stats.output.report import RunReport
from exgrpo_cli.replay_stats.summary import ReplaySummary
from exgrpo_cli.replay_stats.what_if.policy import metric_title, priority_title

TIMES_SHOWN = 8
"""Rows of a table over time."""


def overview(reports: Sequence[RunReport]) -> Table:
    """The main figures, one column per run."""
    table = table_of("Experience buffer", "", *(report.label for report in reports))
    columns = [_overview(report.summary) for report in reports]
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    return table


def _overview(summary: ReplaySummary) -> dict[str, str]:
    now, replays, config, chosen = summary.occupancy, summary.replays, summary.config, summary.selection
    never = (replays.reuse == 0).mean() if len(replays.reuse) else math.nan
    p_value = summary.draws.p_value
    return {
        "method": config.run.method,
        "drawn by": _drawn_by(config.replay),
        "steps (mixed from)": f"{summary.last_step} ({maybe(summary.first_mixed_step)})",
        "questions buffered": f"{summary.questions:,}",
        "retired": f"{summary.retired:,}",
        "tried, nothing stored": f"{int(now.tried[-1]):,}" if now.visits_known else NO_VALUE,
        "unseen": f"{int(now.unseen[-1]):,}" if now.visits_known else NO_VALUE,
        "trajectories in the buffer": f"{summary.trajectories:,}",
        "trajectories ever stored": f"{summary.stored:,}",
        "replays": f"{len(replays.step):,}",
        "steps with replay": percent(summary.shares.share_of_steps),
        "trained tokens replayed": percent(summary.shares.share_of_tokens),
        "entropy replayed / available": f"{number(chosen.mean_selected)} / {number(chosen.mean_available)}",
        "draws with a choice": percent(chosen.share_with_choice),
        "age: mean, median, oldest": _spread(replays.age),
        "replays of a trajectory: mean, most": f"{number(mean(replays.reuse))}, {int(replays.reuse.max(initial=0))}",
        "never replayed": percent(never),
        "importance ratio, mean": number(nan_mean(summary.ratios.mean)),
        "effective sample size, mean": number(nan_mean(summary.ratios.effective_sample_size)),
        "draws as promised: p": NO_VALUE if p_value is None else f"{p_value:.3f}",
    }


def _drawn_by(rules: ReplaySettings) -> str:
    if rules.draws_units:
        return priority_title(rules)
    return metric_title(rules) if rules.composition == "join" else f"{rules.sampler}, {metric_title(rules)}"


def buckets_over_time(summary: ReplaySummary) -> Table:
    """Questions per bucket at a few steps."""
    shown = occupied(summary)
    table = table_of(
        f"Questions by successes of {summary.config.rollout.group_size}", "step", *map(str, shown), "buffered"
    )
    for step in _times(summary):
        counts = summary.occupancy.in_bucket[step]
        table.add_row(str(step), *(f"{counts[bucket]:,}" for bucket in shown), f"{counts.sum():,}")
    return table


def dynamics(summary: ReplaySummary) -> Table:
    """Questions by state, entropies, ages and ratios at a few steps; the latter are means since the row before."""
    table = table_of(
        "Over time (from entropy on: means since the row above)",
        "step",
        "retired",
        "tried",
        "unseen",
        "entropy",
        "avail.",
        "cand.",
        "age",
        "ratio",
        "ESS",
    )
    # Ten columns fit 80 characters only so.
    table.padding = (0, 1, 0, 0)
    now, chosen, ratios = summary.occupancy, summary.selection, summary.ratios
    before = -1
    for step in _times(summary):
        window = slice(before + 1, step + 1)
        logged = (ratios.steps > before) & (ratios.steps <= step)
        table.add_row(
            str(step),
            f"{now.retired[step]:,}",
            f"{now.tried[step]:,}" if now.visits_known else NO_VALUE,
            f"{now.unseen[step]:,}" if now.visits_known else NO_VALUE,
            *(
                number(nan_mean(values[window]))
                for values in (chosen.selected, chosen.available, chosen.candidates, summary.age_over_time)
            ),
            number(nan_mean(ratios.mean[logged])),
            number(nan_mean(ratios.effective_sample_size[logged])),
        )
        before = step
    return table


def draws(summary: ReplaySummary) -> Table:
    """What the sampler promised and what was drawn."""
    test = summary.draws
    outcome = "" if test.p_value is None else f", p = {test.p_value:.3f}"
    table = table_of(
        f"Drawn against promised ({summary.config.replay.sampler}{outcome})", "bucket", "promised", "drawn"
    )
    for row in test.buckets:
        table.add_row(f"{row.bucket}/{row.num_members}", f"{row.expected:,.1f}", f"{row.drawn:,}")
    return table


def units(summary: ReplaySummary) -> Table:
    """Units scanned and taken at a few steps: sums and means since the row before."""
    table = table_of(
        "Units scanned (since the row above)", "step", "scanned", "taken", "priority", "weight", "drift of the scanned"
    )
    found, before = summary.scans, -1
    for step in _times(summary):
        window = slice(before + 1, step + 1)
        table.add_row(
            str(step),
            f"{found.scanned[window].sum():,}",
            f"{found.taken[window].sum():,}",
            *(significant(nan_mean(values[window])) for values in (found.priority, found.weight, found.drift)),
        )
        before = step
    return table


def entropies(summary: ReplaySummary) -> Table:
    """Entropy at birth by bucket and difficulty."""
    table = table_of("Entropy of trajectories at birth (nats)", "successes", "trajectories", "mean", "median", "5-95 %")
    for group in (*summary.entropy.by_bucket, *summary.entropy.by_difficulty):
        low, _, median, _, high = group.quantiles
        table.add_row(
            group.name, f"{group.trajectories:,}", number(group.mean), number(median), f"{low:.3f}-{high:.3f}"
        )
    return table


def difficulty_windows(summary: ReplaySummary) -> Table:
    """Mean entropy at birth by difficulty within stretches of steps, last over the whole run."""
    table = table_of("Entropy at birth by difficulty, within steps (nats)", "steps", *GROUPS, "hard / easy")
    for window in (*summary.entropy_windows, summary.entropy):
        means = {group.name: group.mean for group in window.by_difficulty}
        steps = "all" if window is summary.entropy else window.steps
        table.add_row(steps, *(number(means.get(name)) for name in GROUPS), number(window.hard_over_easy))
    return table


def flow(summary: ReplaySummary) -> Table:
    """Where replay visits took questions: success count before, then after."""
    shown = np.flatnonzero(summary.flow.visits + summary.flow.between.sum(axis=0)).tolist()
    table = table_of("Replay visits: successes before (rows), after", "", *map(str, shown), "retired", "dropped")
    for before in np.flatnonzero(summary.flow.visits).tolist():
        counts = (*summary.flow.between[before, shown], summary.flow.retired[before], summary.flow.dropped[before])
        table.add_row(str(before), *(f"{count:,}" for count in counts))
    return table


def replayed_questions(summary: ReplaySummary) -> Table:
    """The questions replayed most often."""
    table = table_of("Most replayed questions", "id", "replays", "different", "stored", "now", "question")
    table.columns[-1].justify = "left"
    for row in summary.most_replayed:
        table.add_row(
            row.question_id[:12],
            str(row.replays),
            str(row.distinct),
            str(row.trajectories),
            row.state,
            excerpt(row.question.text),
        )
    return table


def buckets_side_by_side(reports: Sequence[RunReport]) -> Table:
    """Questions per bucket now, one column per run."""
    table = table_of("Questions by successes, now", "successes", *(report.label for report in reports))
    for bucket in sorted({bucket for report in reports for bucket in occupied(report.summary)}):
        table.add_row(str(bucket), *(f"{report.summary.buckets.get(bucket, 0):,}" for report in reports))
    return table


def _times(summary: ReplaySummary) -> list[int]:
    """Up to TIMES_SHOWN steps, evenly spaced, the last one among them."""
    first = min(1, summary.last_step)
    return sorted({round(step) for step in np.linspace(first, summary.last_step, TIMES_SHOWN)})


def _spread(values: np.ndarray) -> str:
    if not len(values):
        return NO_VALUE
    return f"{values.mean():.1f}, {np.median(values):g}, {values.max()}"
