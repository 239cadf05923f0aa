"""Tables of what another policy would have drawn."""

from rich.table import Table

from exgrpo_cli.replay_stats.output.cells import nan_mean, number, percent, table_of
from exgrpo_cli.replay_stats.summary import ReplaySummary
from exgrpo_cli.replay_stats.what_if.metric import MetricOutcome
from exgrpo_cli.replay_stats.what_if.policy import metric_title, sampler_title
from exgrpo_cli.replay_stats.what_if.sampler import SamplerOutcome
from exgrpo_cli.replay_stats.what_if.units import GateOutcome, PriorityOutcome


def sampler_outcome(label: str, outcome: SamplerOutcome, summary: ReplaySummary) -> Table:
    """Questions drawn by the run and by the other sampler."""
    title = f"{label}: questions drawn, had the sampler been {outcome.title}"
    table = table_of(title, "successes", sampler_title(summary.config.replay), outcome.title)
    for bucket in sorted({*outcome.drawn, *outcome.expected}):
        table.add_row(str(bucket), f"{outcome.drawn.get(bucket, 0):,}", f"{outcome.expected.get(bucket, 0.0):,.1f}")
    table.add_row("mean pass rate", number(nan_mean(outcome.pass_rate)), number(nan_mean(outcome.expected_pass_rate)))
    return table


def metric_outcome(label: str, outcome: MetricOutcome, summary: ReplaySummary) -> Table:
    """Trajectories chosen by the run and by the other metric."""
    other = outcome.title
    values = "" if outcome.measured else ", values at birth"
    table = table_of(
        f"{label}: trajectories replayed, had the metric been {other}{values}",
        "mean of",
        metric_title(summary.config.replay),
        other,
    )
    for name in outcome.chosen:
        table.add_row(name, number(outcome.chosen[name]), number(outcome.other[name]))
    table.add_row("same trajectory, of draws with a choice", "", percent(outcome.share_same))
    table.add_row("draws, with a choice", f"{outcome.draws:,}", percent(outcome.share_with_choice))
    return table


def priority_outcome(label: str, outcome: PriorityOutcome) -> Table:
    """Units taken by the run and by the other priority."""
    table = table_of(
        f"{label}: units replayed, had the priority been {outcome.other}", "mean of", outcome.own, outcome.other
    )
    for name in outcome.taken:
        table.add_row(name, number(outcome.taken[name]), number(outcome.expected[name]))
    table.add_row("units; share that both take", f"{outcome.units:,}", percent(outcome.share_same))
    return table


def gate_outcome(label: str, outcome: GateOutcome) -> Table:
    """Units scanned, by the run's bound on their drift and by the other."""
    table = table_of(f"{label}: units within a drift of", "", f"{outcome.own:g}", f"{outcome.other:g}")
    table.add_row(f"of {outcome.scanned:,} scanned", f"{outcome.accepted:,}", f"{outcome.would_accept:,}")
    table.add_row("steps with as many as the run took", f"{outcome.steps:,}", f"{outcome.steps_enough:,}")
    table.add_row("scans of these, mean", number(outcome.scans), number(outcome.scans_needed))
    return table
