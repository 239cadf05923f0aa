"""Replay reports as tables for a terminal."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from exgrpo_cli.replay_stats.entropy import GROUPS
from exgrpo_cli.replay_stats.output.as_json import occupied
from exgrpo_cli.replay_stats.output.report import RunReport
from exgrpo_cli.replay_stats.questions import QuestionHistory
from exgrpo_cli.replay_stats.step import StepReplay
from exgrpo_cli.replay_stats.summary import ReplaySummary
from exgrpo_cli.replay_stats.what_if.sampler import MetricOutcome, SamplerOutcome, metric_title, sampler_title
from exgrpo_cli.replay_stats.what_if.units import GateOutcome, PriorityOutcome, priority_title

TIMES_SHOWN = 8
"""Rows of a table over time."""
TEXT_SHOWN = 60
"""Characters of a question's text."""
NO_VALUE = "–"


def report_tables(reports: Sequence[RunReport]) -> Iterator[Table]:
    """What was asked for of each run; otherwise of one run all tables, of several those that set them side by side."""
    for report in reports:
        yield from _details(report)
    if any(report.detailed for report in reports):
        return
    yield overview(reports)
    if len(reports) == 1:
        summary = reports[0].summary
        yield buckets_over_time(summary)
        yield dynamics(summary)
        yield draws(summary)
        yield entropies(summary)
        yield difficulty_windows(summary)
        yield flow(summary)
        yield replayed_questions(summary)
    else:
        yield buckets_side_by_side(reports)


def _details(report: RunReport) -> Iterator[Table]:
    if report.step:
        yield step_offers(report.label, report.step)
        if report.step.questions:
            yield step_choices(report.label, report.step)
    if report.history:
        yield question_table(report.label, report.history)
        yield response_table(report.history)
    if report.sampler:
        yield sampler_outcome(report.label, report.sampler, report.summary)
    if report.metric:
        yield metric_outcome(report.label, report.metric, report.summary)
    if report.priority:
        yield priority_outcome(report.label, report.priority)
    if report.gate:
        yield gate_outcome(report.label, report.gate)


def overview(reports: Sequence[RunReport]) -> Table:
    """The main figures, one column per run."""
    table = _table("Experience buffer", "", *(report.label for report in reports))
    columns = [_overview(report.summary) for report in reports]
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    return table


def _overview(summary: ReplaySummary) -> dict[str, str]:
    now, replays, config = summary.occupancy, summary.replays, summary.config
    never = (replays.reuse == 0).mean() if len(replays.reuse) else math.nan
    p_value = summary.draws.p_value
    return {
        "method": config.run.method,
        "drawn by": priority_title(config.replay)
        if config.replay.draws_units
        else f"{config.replay.sampler}, {metric_title(config.replay)}",
        "steps (mixed from)": f"{summary.last_step} ({_maybe(summary.first_mixed_step)})",
        "questions buffered": f"{summary.questions:,}",
        "retired": f"{summary.retired:,}",
        "tried, nothing stored": f"{int(now.tried[-1]):,}" if now.visits_known else NO_VALUE,
        "unseen": f"{int(now.unseen[-1]):,}" if now.visits_known else NO_VALUE,
        "trajectories in the buffer": f"{summary.trajectories:,}",
        "trajectories ever stored": f"{summary.stored:,}",
        "replays": f"{len(replays.step):,}",
        "steps with replay": _percent(summary.shares.share_of_steps),
        "trained tokens replayed": _percent(summary.shares.share_of_tokens),
        "entropy replayed / available": _pair(summary.selection.mean_selected, summary.selection.mean_available),
        "draws with a choice": _percent(summary.selection.share_with_choice),
        "age: mean, median, oldest": _spread(replays.age),
        "replays of a trajectory: mean, most": f"{_number(_mean(replays.reuse))}, {int(replays.reuse.max(initial=0))}",
        "never replayed": _percent(never),
        "importance ratio, mean": _number(_nan_mean(summary.ratios.mean)),
        "effective sample size, mean": _number(_nan_mean(summary.ratios.effective_sample_size)),
        "draws as promised: p": NO_VALUE if p_value is None else f"{p_value:.3f}",
    }


def buckets_over_time(summary: ReplaySummary) -> Table:
    """Questions per bucket at a few steps."""
    shown = occupied(summary)
    table = _table(
        f"Questions by successes of {summary.config.rollout.group_size}", "step", *map(str, shown), "buffered"
    )
    for step in _times(summary):
        counts = summary.occupancy.in_bucket[step]
        table.add_row(str(step), *(f"{counts[bucket]:,}" for bucket in shown), f"{counts.sum():,}")
    return table


def dynamics(summary: ReplaySummary) -> Table:
    """Questions by state, entropies, ages and ratios at a few steps; the latter are means since the row before."""
    table = _table(
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
                _number(_nan_mean(values[window]))
                for values in (chosen.selected, chosen.available, chosen.candidates, summary.age_over_time)
            ),
            _number(_nan_mean(ratios.mean[logged])),
            _number(_nan_mean(ratios.effective_sample_size[logged])),
        )
        before = step
    return table


def draws(summary: ReplaySummary) -> Table:
    """What the sampler promised and what was drawn."""
    test = summary.draws
    outcome = "" if test.p_value is None else f", p = {test.p_value:.3f}"
    table = _table(f"Drawn against promised ({summary.config.replay.sampler}{outcome})", "bucket", "promised", "drawn")
    for row in test.buckets:
        table.add_row(f"{row.bucket}/{row.num_members}", f"{row.expected:,.1f}", f"{row.drawn:,}")
    return table


def entropies(summary: ReplaySummary) -> Table:
    """Entropy at birth by bucket and difficulty."""
    table = _table("Entropy of trajectories at birth (nats)", "successes", "trajectories", "mean", "median", "5-95 %")
    for group in (*summary.entropy.by_bucket, *summary.entropy.by_difficulty):
        low, _, median, _, high = group.quantiles
        table.add_row(
            group.name, f"{group.trajectories:,}", _number(group.mean), _number(median), f"{low:.3f}-{high:.3f}"
        )
    return table


def difficulty_windows(summary: ReplaySummary) -> Table:
    """Mean entropy at birth by difficulty within stretches of steps, last over the whole run."""
    table = _table("Entropy at birth by difficulty, within steps (nats)", "steps", *GROUPS, "hard / easy")
    for window in (*summary.entropy_windows, summary.entropy):
        means = {group.name: group.mean for group in window.by_difficulty}
        steps = "all" if window is summary.entropy else window.steps
        table.add_row(steps, *(_number(means.get(name)) for name in GROUPS), _number(window.hard_over_easy))
    return table


def flow(summary: ReplaySummary) -> Table:
    """Where replay visits took questions: success count before, then after."""
    shown = np.flatnonzero(summary.flow.visits + summary.flow.between.sum(axis=0)).tolist()
    table = _table("Replay visits: successes before (rows), after", "", *map(str, shown), "retired", "dropped")
    for before in np.flatnonzero(summary.flow.visits).tolist():
        counts = (*summary.flow.between[before, shown], summary.flow.retired[before], summary.flow.dropped[before])
        table.add_row(str(before), *(f"{count:,}" for count in counts))
    return table


def replayed_questions(summary: ReplaySummary) -> Table:
    """The questions replayed most often."""
    table = _table("Most replayed questions", "id", "replays", "different", "stored", "now", "question")
    table.columns[-1].justify = "left"
    for row in summary.most_replayed:
        table.add_row(
            row.question_id[:12],
            str(row.replays),
            str(row.distinct),
            str(row.trajectories),
            row.state,
            _excerpt(row.question.text),
        )
    return table


def buckets_side_by_side(reports: Sequence[RunReport]) -> Table:
    """Questions per bucket now, one column per run."""
    table = _table("Questions by successes, now", "successes", *(report.label for report in reports))
    for bucket in sorted({bucket for report in reports for bucket in occupied(report.summary)}):
        table.add_row(str(bucket), *(f"{report.summary.buckets.get(bucket, 0):,}" for report in reports))
    return table


def sampler_outcome(label: str, outcome: SamplerOutcome, summary: ReplaySummary) -> Table:
    """Questions drawn by the run and by the other sampler."""
    title = f"{label}: questions drawn, had the sampler been {outcome.title}"
    table = _table(title, "successes", sampler_title(summary.config.replay), outcome.title)
    for bucket in sorted({*outcome.drawn, *outcome.expected}):
        table.add_row(str(bucket), f"{outcome.drawn.get(bucket, 0):,}", f"{outcome.expected.get(bucket, 0.0):,.1f}")
    table.add_row(
        "mean pass rate", _number(_nan_mean(outcome.pass_rate)), _number(_nan_mean(outcome.expected_pass_rate))
    )
    return table


def metric_outcome(label: str, outcome: MetricOutcome, summary: ReplaySummary) -> Table:
    """Trajectories chosen by the run and by the other metric."""
    other = outcome.title
    values = "" if outcome.measured else ", values at birth"
    table = _table(
        f"{label}: trajectories replayed, had the metric been {other}{values}",
        "mean of",
        metric_title(summary.config.replay),
        other,
    )
    for name in outcome.chosen:
        table.add_row(name, _number(outcome.chosen[name]), _number(outcome.other[name]))
    table.add_row("same trajectory, of draws with a choice", "", _percent(outcome.share_same))
    table.add_row("draws, with a choice", f"{outcome.draws:,}", _percent(outcome.share_with_choice))
    return table


def priority_outcome(label: str, outcome: PriorityOutcome) -> Table:
    """Units taken by the run and by the other priority."""
    table = _table(
        f"{label}: units replayed, had the priority been {outcome.other}", "mean of", outcome.own, outcome.other
    )
    for name in outcome.taken:
        table.add_row(name, _number(outcome.taken[name]), _number(outcome.expected[name]))
    table.add_row("units; share that both take", f"{outcome.units:,}", _percent(outcome.share_same))
    return table


def gate_outcome(label: str, outcome: GateOutcome) -> Table:
    """Units scanned, by the run's bound on their drift and by the other."""
    table = _table(f"{label}: units within a drift of", "", f"{outcome.own:g}", f"{outcome.other:g}")
    table.add_row(f"of {outcome.scanned:,} scanned", f"{outcome.accepted:,}", f"{outcome.would_accept:,}")
    table.add_row("steps with as many as the run took", f"{outcome.steps:,}", f"{outcome.steps_enough:,}")
    table.add_row("scans of these, mean", _number(outcome.scans), _number(outcome.scans_needed))
    return table


def step_offers(label: str, replay: StepReplay) -> Table:
    """The buckets that a step could draw from."""
    table = _table(f"{label}: buckets at step {replay.step}", "successes", "questions", "probability", "drawn")
    table.caption = replay.nothing or None
    for offer in replay.offers:
        table.add_row(
            f"{offer.bucket}/{offer.num_members}", f"{offer.questions:,}", _percent(offer.probability), str(offer.drawn)
        )
    return table


def step_choices(label: str, replay: StepReplay) -> Table:
    """The questions that a step drew, each with its candidates; the chosen one is marked."""
    table = _table(
        f"{label}: drawn at step {replay.step} (> is replayed)",
        "question",
        "succ.",
        "prob.",
        "trajectory",
        "age",
        "tokens",
        "entropy",
        "nll",
        "text",
    )
    _text_column_last(table)
    for drawn in replay.questions:
        successes = NO_VALUE if drawn.bucket is None else f"{drawn.bucket}/{drawn.num_members}"
        probability = NO_VALUE if drawn.probability is None else f"{drawn.probability:.2%}"
        text = f"{_excerpt(drawn.question.text)} → {drawn.question.answer}" if drawn.question.text else ""
        table.add_row(drawn.question_id[:8], successes, probability, "", "", "", "", "", text, style="bold")
        for one in drawn.candidates:
            table.add_row(
                "",
                "",
                "",
                f"{'> ' if one.chosen else ''}{one.trajectory_id}",
                str(one.age),
                str(one.num_tokens),
                _number(one.entropy),
                _number(one.nll),
                _excerpt(one.text or NO_VALUE),
            )
    return table


def question_table(label: str, history: QuestionHistory) -> Table:
    """Everything that happened to one question."""
    text = history.question
    table = _table(
        f"{label}: question {history.question_id}, {history.state}",
        "step",
        "event",
        "trajectory",
        "bucket",
        "prob.",
        "age",
        "tokens",
        "entropy",
        "nll",
    )
    if text.text:
        level = f", level {text.level}" if text.level else ""
        table.caption = f"{_excerpt(text.text, 400)} Answer: {text.answer}{level}"
    for row in history.rows:
        table.add_row(
            str(row.step),
            row.event,
            _maybe(row.trajectory_id),
            _maybe(row.bucket),
            NO_VALUE if row.probability is None else f"{row.probability:.2%}",
            _maybe(row.age),
            _maybe(row.num_tokens),
            _number(row.entropy),
            _number(row.nll),
        )
    return table


def response_table(history: QuestionHistory) -> Table:
    """The stored responses to one question, and how often each was replayed."""
    table = _table("Responses", "trajectory", "born", "replays", "text")
    _text_column_last(table)
    born = {row.trajectory_id: row.step for row in history.rows if row.event == "collected"}
    replays = Counter(row.trajectory_id for row in history.rows if row.event == "selected")
    for trajectory_id, text in history.texts.items():
        table.add_row(
            str(trajectory_id), _maybe(born.get(trajectory_id)), str(replays[trajectory_id]), _excerpt(text, 400)
        )
    return table


def _text_column_last(table: Table) -> None:
    """Let the last column alone be broken over lines: numbers stay whole however narrow the terminal is."""
    for column in table.columns[:-1]:
        column.no_wrap = True
    table.columns[-1].justify = "left"
    # More columns fit without the blank on the left.
    table.padding = (0, 1, 0, 0)


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        caption_justify="left",
        box=SIMPLE_HEAD,
        min_width=len(title),
    )
    table.add_column(first, justify="left", no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", overflow="fold")
    return table


def _times(summary: ReplaySummary) -> list[int]:
    """Up to TIMES_SHOWN steps, evenly spaced, the last one among them."""
    first = min(1, summary.last_step)
    return sorted({round(step) for step in np.linspace(first, summary.last_step, TIMES_SHOWN)})


def _excerpt(text: str, length: int = TEXT_SHOWN) -> str:
    line = " ".join(text.split())
    return line if len(line) <= length else f"{line[: length - 1]}…"


def _maybe(value: int | None) -> str:
    return NO_VALUE if value is None else str(value)


def _number(value: float | None) -> str:
    return NO_VALUE if value is None or not math.isfinite(value) else f"{value:.3f}"


def _percent(share: float) -> str:
    return NO_VALUE if not math.isfinite(share) else f"{share:.1%}"


def _pair(first: float, second: float) -> str:
    return f"{_number(first)} / {_number(second)}"


def _spread(values: np.ndarray) -> str:
    if not len(values):
        return NO_VALUE
    return f"{values.mean():.1f}, {np.median(values):g}, {values.max()}"


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else math.nan


def _nan_mean(values: np.ndarray) -> float:
    return _mean(values[np.isfinite(values)])
