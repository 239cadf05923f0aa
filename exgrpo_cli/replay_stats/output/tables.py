"""Which tables a replay report shows."""

from collections.abc import Iterator, Sequence

from rich.table import Table

from exgrpo_cli.replay_stats.output import detail_tables, summary_tables, what_if_tables
from exgrpo_cli.replay_stats.output.report import RunReport


def report_tables(reports: Sequence[RunReport]) -> Iterator[Table]:
    """What was asked for of each run; otherwise of one run all tables, of several those that set them side by side."""
    for report in reports:
        yield from _details(report)
    if any(report.detailed for report in reports):
        return
    yield summary_tables.overview(reports)
    if len(reports) == 1:
        summary = reports[0].summary
        yield summary_tables.buckets_over_time(summary)
        yield summary_tables.dynamics(summary)
        composition = summary.config.replay.composition
        if composition == "replace":
            yield summary_tables.draws(summary)
        if summary.config.replay.draws_units:
            yield summary_tables.units(summary)
        yield summary_tables.entropies(summary)
        yield summary_tables.difficulty_windows(summary)
        if not summary.config.replay.draws_units:
            yield summary_tables.flow(summary)
        yield summary_tables.replayed_questions(summary)
    else:
        yield summary_tables.buckets_side_by_side(reports)


def _details(report: RunReport) -> Iterator[Table]:
    if report.step:
        if report.step.units:
            yield detail_tables.step_units(report.label, report.step)
        elif report.step.offers or not report.step.questions:
            yield detail_tables.step_offers(report.label, report.step)
        if report.step.questions:
            yield detail_tables.step_choices(report.label, report.step)
    if report.history:
        yield detail_tables.question_table(report.label, report.history)
        yield detail_tables.response_table(report.history)
    if report.sampler:
        yield what_if_tables.sampler_outcome(report.label, report.sampler, report.summary)
    if report.metric:
        yield what_if_tables.metric_outcome(report.label, report.metric, report.summary)
    if report.priority:
        yield what_if_tables.priority_outcome(report.label, report.priority)
    if report.gate:
        yield what_if_tables.gate_outcome(report.label, report.gate)
