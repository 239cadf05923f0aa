"""Tables of one step, and of one question and its responses."""

from collections import Counter

from rich.table import Table

from exgrpo_cli.replay_stats.output.cells import (
    NO_VALUE,
    excerpt,
    maybe,
    number,
    percent,
    significant,
    table_of,
    text_column_last,
)
from exgrpo_cli.replay_stats.questions import QuestionHistory
from exgrpo_cli.replay_stats.step import StepReplay


def step_offers(label: str, replay: StepReplay) -> Table:
    """The buckets that a step could draw from."""
    table = table_of(f"{label}: buckets at step {replay.step}", "successes", "questions", "probability", "drawn")
    table.caption = replay.nothing or None
    for offer in replay.offers:
        table.add_row(
            f"{offer.bucket}/{offer.num_members}", f"{offer.questions:,}", percent(offer.probability), str(offer.drawn)
        )
    return table


def step_choices(label: str, replay: StepReplay) -> Table:
    """The questions that a step drew, each with its candidates; the chosen one is marked."""
    table = table_of(
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
    text_column_last(table)
    for drawn in replay.questions:
        successes = NO_VALUE if drawn.bucket is None else f"{drawn.bucket}/{drawn.num_members}"
        probability = NO_VALUE if drawn.probability is None else f"{drawn.probability:.2%}"
        text = f"{excerpt(drawn.question.text)} → {drawn.question.answer}" if drawn.question.text else ""
        table.add_row(drawn.question_id[:8], successes, probability, "", "", "", "", "", text, style="bold")
        for one in drawn.candidates:
            table.add_row(
                "",
                "",
                "",
                f"{'> ' if one.chosen else ''}{one.trajectory_id}",
                str(one.age),
                str(one.num_tokens),
                number(one.entropy),
                number(one.nll),
                excerpt(one.text or NO_VALUE),
            )
    return table


def step_units(label: str, replay: StepReplay) -> Table:
    """The units that a step scanned, each with its rows; those that were taken are marked."""
    table = table_of(
        f"{label}: scanned at step {replay.step} (> is replayed)",
        "unit",
        "question",
        "succ.",
        "age",
        "priority",
        "prob.",
        "drift",
        "headr.",
        "weight",
        "tokens",
        "text",
    )
    table.caption = replay.nothing or None
    text_column_last(table)
    for unit in replay.units:
        text = f"{excerpt(unit.question.text)} → {unit.question.answer}" if unit.question.text else ""
        table.add_row(
            f"{'> ' if unit.accepted else ''}{unit.unit_id}",
            unit.question_id[:8],
            str(unit.success_count),
            str(unit.age),
            significant(unit.priority),
            percent(unit.probability),
            significant(unit.drift),
            significant(unit.headroom),
            significant(unit.weight),
            str(sum(row.num_tokens for row in unit.rows)),
            text,
            style="bold",
        )
        for row in unit.rows:
            judged = f"r {row.reward:g}, A {significant(row.advantage)}"
            table.add_row(
                *("",) * 9, str(row.num_tokens), f"{row.trajectory_id}: {judged}: {excerpt(row.text or NO_VALUE)}"
            )
    return table


def question_table(label: str, history: QuestionHistory) -> Table:
    """Everything that happened to one question."""
    text = history.question
    table = table_of(
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
        table.caption = f"{excerpt(text.text, 400)} Answer: {text.answer}{level}"
    for row in history.rows:
        table.add_row(
            str(row.step),
            row.event,
            maybe(row.trajectory_id),
            maybe(row.bucket),
            NO_VALUE if row.probability is None else f"{row.probability:.2%}",
            maybe(row.age),
            maybe(row.num_tokens),
            number(row.entropy),
            number(row.nll),
        )
    return table


def response_table(history: QuestionHistory) -> Table:
    """The stored responses to one question, and how often each was replayed."""
    table = table_of("Responses", "trajectory", "born", "replays", "text")
    text_column_last(table)
    born = {row.trajectory_id: row.step for row in history.rows if row.event == "collected"}
    replays = Counter(row.trajectory_id for row in history.rows if row.event == "selected")
    for trajectory_id, text in history.texts.items():
        table.add_row(
            str(trajectory_id), maybe(born.get(trajectory_id)), str(replays[trajectory_id]), excerpt(text, 400)
        )
    return table
