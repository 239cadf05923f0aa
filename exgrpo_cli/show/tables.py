"""Tables of a report: each is a title, and under every heading how a row's cell is written."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from exgrpo_cli.replay.place import Place
from exgrpo_cli.replay.replace import Replace
from exgrpo_cli.show.queries import GROUPS, Numbers, span_of
from exgrpo_cli.show.what_if import metric_title, priority_title

if TYPE_CHECKING:
    from exgrpo_cli.show.statistics import RunReport

Cell = Callable[[Any], str]

TEXT_SHOWN = 60
"""Characters of a question's text."""
TIMES_SHOWN = 8
"""Rows of a table over time."""
NO_VALUE = "–"
NARROW = (0, 1, 0, 0)
"""Padding without a blank on the left."""


def table_of(
    title: str,
    columns: Mapping[str, Cell],
    rows: Iterable[Any],
    *,
    caption: str = "",
    words: bool = False,
    bold: str = "",
) -> Table:
    """A row of cells for each of `rows`: the first column flush left, the others right.

    With `words` the last column alone is broken over lines: numbers stay whole however narrow the terminal is. Rows
    that have the key `bold` are bold.
    """
    table = Table(title=title, title_justify="left", title_style="bold", caption=caption or None, box=SIMPLE_HEAD)
    table.caption_justify, table.min_width = "left", len(title)
    for place, heading in enumerate(columns):
        left = place == 0 or (words and place == len(columns) - 1)
        whole = place < len(columns) - 1 if words else place == 0
        table.add_column(heading, justify="left" if left else "right", overflow="fold", no_wrap=whole)
    for row in rows:
        table.add_row(*(cell(row) for cell in columns.values()), style="bold" if bold and bold in row else None)
    if words:
        table.padding = NARROW
    return table


def excerpt(text: str, length: int = TEXT_SHOWN) -> str:
    """A text on one line, cut to `length` characters."""
    line = " ".join(text.split())
    return line if len(line) <= length else f"{line[: length - 1]}…"


def written(form: str) -> Callable[[float | None], str]:
    """Numbers in a format, with a dash for what is missing or not finite."""
    return lambda value: NO_VALUE if value is None or not math.isfinite(value) else format(value, form)


number, percent, precise, significant, count = (written(form) for form in (".3f", ".1%", ".2%", ".3g", ",d"))


def of(key: str, text: Callable[[Any], str] = str) -> Cell:
    """The value under `key` as `text`; a dash where it is None, nothing in a row without it."""
    return lambda row: "" if key not in row else NO_VALUE if row[key] is None else text(row[key])


def finite_mean(values: np.ndarray) -> float:
    """The mean of what is finite; NaN without any."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan


def drawn_by(rules: Place) -> str:
    """How a run's replay is drawn and chosen."""
    if rules.draws_units:
        return priority_title(rules)
    return f"{rules.sampler}, {metric_title(rules)}" if isinstance(rules, Replace) else metric_title(rules)


FACTS: dict[str, Callable[[Numbers], str]] = {
    "method": of("method"),
    "drawn by": of("drawn_by"),
    "steps (mixed from)": lambda told: f"{told['steps']} ({of('first_mixed_step')(told)})",
    "questions buffered": of("questions", count),
    "retired": of("retired", count),
    "tried, nothing stored": of("tried", count),
    "unseen": of("unseen", count),
    "trajectories in the buffer": of("trajectories", count),
    "trajectories ever stored": of("stored", count),
    "replays": of("used", count),
    "steps with replay": lambda told: percent(told["share"]["steps"]),
    "trained tokens replayed": lambda told: percent(told["share"]["tokens"]),
    "entropy replayed / available": lambda told: " / ".join(
        number(told["entropy"][name]) for name in ("selected", "available")
    ),
    "draws with a choice": lambda told: percent(told["entropy"]["share_with_choice"]),
    "age: mean, median, oldest": lambda told: (
        NO_VALUE if told["age"]["mean"] is None else "{mean:.1f}, {median:g}, {max}".format(**told["age"])
    ),
    "replays of a trajectory: mean, most": lambda told: f"{number(told['reuse']['mean'])}, {told['reuse']['max'] or 0}",
    "never replayed": lambda told: percent(told["reuse"]["never"] / told["stored"] if told["stored"] else None),
    "importance ratio, mean": lambda told: number(finite_mean(told["ratios"]["mean"])),
    "effective sample size, mean": lambda told: number(finite_mean(told["ratios"]["ess"])),
    "draws as promised: p": lambda told: number(told["draws"]["p_value"]),
}
"""Row of the overview -> how a run's numbers are written there."""


def overview(reports: "Sequence[RunReport]") -> Table:
    """The main numbers, one column per run."""
    told = [report.numbers | {"drawn_by": drawn_by(report.rules)} for report in reports]
    columns: dict[str, Cell] = {"": lambda fact: fact}
    for report, numbers in zip(reports, told, strict=True):
        columns[report.label] = lambda fact, numbers=numbers: FACTS[fact](numbers)  # type: ignore[misc]
    return table_of("Experience buffer", columns, FACTS)


def buckets_side_by_side(reports: "Sequence[RunReport]") -> Table:
    """Questions per bucket now, one column per run."""
    columns: dict[str, Cell] = {"successes": str}
    for report in reports:
        now = report.numbers["buckets"]
        columns[report.label] = lambda bucket, now=now: f"{now.get(bucket, 0):,}"  # type: ignore[misc]
    ever = {bucket for report in reports for bucket in report.numbers["over_time"]["buckets"]}
    return table_of("Questions by successes, now", columns, sorted(ever))


def _over_time(title: str, report: "RunReport", columns: Mapping[str, Cell]) -> Table:
    """Rows of (step before, step) for a few steps, evenly spaced, the last one among them."""
    last = report.record.last_step
    times = sorted({round(step) for step in np.linspace(min(1, last), last, TIMES_SHOWN)})
    return table_of(title, {"step": lambda row: str(row[1]), **columns}, zip([-1, *times], times, strict=False))


def _at(values: np.ndarray | None) -> Cell:
    return lambda row: NO_VALUE if values is None else f"{values[row[1]]:,}"


def _since(
    values: np.ndarray, how: Callable[[np.ndarray], float] = finite_mean, text: Callable[[float], str] = number
) -> Cell:
    """Of the steps since the row before."""
    return lambda row: text(how(values[row[0] + 1 : row[1] + 1]))


def buckets_over_time(report: "RunReport") -> Table:
    """Questions per bucket at a few steps."""
    series = report.numbers["over_time"]
    columns = {str(bucket): _at(values) for bucket, values in series["buckets"].items()}
    title = f"Questions by successes of {report.numbers['group_size']}"
    return _over_time(title, report, columns | {"buffered": _at(series["questions"])})


def dynamics(report: "RunReport") -> Table:
    """Questions by state, entropies, ages and ratios at a few steps; the latter are means since the row before."""
    series, ratios = report.numbers["over_time"], report.numbers["ratios"]
    means = {"entropy": "entropy_selected", "avail.": "entropy_available", "cand.": "candidates", "age": "age"}
    columns = {name: _at(series[name]) for name in ("retired", "tried", "unseen")}
    columns |= {heading: _since(series[name]) for heading, name in means.items()}
    for heading, name in (("ratio", "mean"), ("ESS", "ess")):
        by_step = np.full(report.record.last_step + 1, np.nan)
        by_step[ratios["steps"]] = ratios[name]
        columns[heading] = _since(by_step)
    table = _over_time("Over time (from entropy on: means since the row above)", report, columns)
    table.padding = NARROW  # ten columns fit 80 characters only so
    return table


def units(report: "RunReport") -> Table:
    """Units scanned and taken at a few steps: sums and means since the row before."""
    found = report.numbers["over_time"]["units"]
    columns = {name: _since(found[name], np.sum, count) for name in ("scanned", "taken")}
    means = {"priority": "priority", "weight": "weight", "drift of the scanned": "drift"}
    columns |= {heading: _since(found[name], text=significant) for heading, name in means.items()}
    return _over_time("Units scanned (since the row above)", report, columns)


def draws(report: "RunReport") -> Table:
    """Questions that the sampler promised and drew."""
    found = report.numbers["draws"]
    outcome = "" if found["p_value"] is None else f", p = {found['p_value']:.3f}"
    columns: dict[str, Cell] = {
        "bucket": lambda row: f"{row['bucket']}/{row['num_members']}",
        "promised": of("expected", written(",.1f")),
        "drawn": of("drawn", count),
    }
    return table_of(
        f"Drawn against promised ({getattr(report.rules, 'sampler', '')}{outcome})", columns, found["buckets"]
    )


def entropies(report: "RunReport") -> Table:
    """Entropy at birth by bucket and difficulty."""
    found = report.numbers["entropy"]
    columns: dict[str, Cell] = {
        "successes": of("name"),
        "trajectories": of("trajectories", count),
        "mean": of("mean", number),
        "median": lambda row: number(row["quantiles"]["50%"]),
        "5-95 %": lambda row: "-".join(f"{row['quantiles'][name]:.3f}" for name in ("5%", "95%")),
    }
    rows = [*found["by_bucket"], *found["by_difficulty"]]
    return table_of("Entropy of trajectories at birth (nats)", columns, rows)


def difficulty_windows(report: "RunReport") -> Table:
    """Mean entropy at birth by difficulty within stretches of steps, last over the whole run."""
    whole = report.numbers["entropy"]
    rows = [{group["name"]: group["mean"] for group in each["by_difficulty"]} for each in (*whole["windows"], whole)]
    for row, each in zip(rows, (*whole["windows"], whole), strict=True):
        row |= {"steps": span_of(each), "hard / easy": each["hard_over_easy"]}
    columns: dict[str, Cell] = {"steps": of("steps")}
    columns |= {name: lambda row, name=name: number(row.get(name)) for name in (*GROUPS, "hard / easy")}  # type: ignore[misc]
    return table_of("Entropy at birth by difficulty, within steps (nats)", columns, rows)


def flow(report: "RunReport") -> Table:
    """Destinations of replay visits: success count before, then after."""
    found = report.numbers["flow"]
    columns: dict[str, Cell] = {"": lambda before: str(before)}
    for after in sorted({*found, *(after for row in found.values() for after in row["after"])}):
        columns[str(after)] = lambda before, after=after: f"{found[before]['after'].get(after, 0):,}"  # type: ignore[misc]
    for name in ("retired", "dropped"):
        columns[name] = lambda before, name=name: f"{found[before][name]:,}"  # type: ignore[misc]
    return table_of("Replay visits: successes before (rows), after", columns, found)


def replayed_questions(report: "RunReport") -> Table:
    """The questions replayed most often."""
    columns = {
        "id": of("question_id", lambda name: name[:12]),
        "replays": of("replays"),
        "different": of("distinct"),
        "stored": of("trajectories"),
        "now": of("state"),
        "question": of("question", lambda question: excerpt(question.text)),
    }
    table = table_of("Most replayed questions", columns, report.numbers["most_replayed"])
    table.columns[-1].justify = "left"
    return table


def asked_tables(report: "RunReport") -> Iterator[Table]:
    """Tables of what was asked for of a run besides its numbers: a step, a question, another policy."""
    told = report.numbers
    if "step" in told:
        yield from _step_tables(report.label, told["step"])
    if "question" in told:
        yield from _question_tables(report.label, told["question"])
    for kind, outcome in told.get("what_if", {}).items():
        yield _what_if_table(report, kind, outcome)


def _step_tables(label: str, step: Numbers) -> Iterator[Table]:
    caption = step["nothing"]
    if step["units"]:
        rows = [row for unit in step["units"] for row in (unit, *unit["rows"])]
        yield table_of(
            f"{label}: scanned at step {step['step']} (> is replayed)",
            UNIT,
            rows,
            caption=caption,
            words=True,
            bold="unit_id",
        )
    elif step["buckets"] or not step["questions"]:
        yield table_of(f"{label}: buckets at step {step['step']}", OFFER, step["buckets"], caption=caption)
    if step["questions"]:
        rows = [row for drawn in step["questions"] for row in (drawn, *drawn["candidates"])]
        title = f"{label}: drawn at step {step['step']} (> is replayed)"
        yield table_of(title, DRAWN, rows, words=True, bold="question_id")


def _successes(row: Numbers) -> str:
    if "num_members" not in row:
        return ""
    return NO_VALUE if row["bucket"] is None else f"{row['bucket']}/{row['num_members']}"


def _words(row: Numbers) -> str:
    """Question and answer of a heading row, else a response."""
    if "question" not in row:
        return excerpt(row["text"] or NO_VALUE)
    question = row["question"]
    return f"{excerpt(question.text)} → {question.answer}" if question.text else ""


def _marked(key: str, chosen: str) -> Cell:
    return lambda row: f"{'> ' if row[chosen] else ''}{row[key]}" if key in row else ""


OFFER: dict[str, Cell] = {
    "successes": _successes,
    "questions": of("questions", count),
    "probability": of("probability", percent),
    "drawn": of("drawn"),
}
DRAWN: dict[str, Cell] = {
    "question": of("question_id", lambda name: name[:8]),
    "succ.": _successes,
    "prob.": of("probability", precise),
    "trajectory": _marked("trajectory_id", "chosen"),
    "age": of("age"),
    "tokens": of("num_tokens"),
    "entropy": of("entropy", number),
    "nll": of("nll", number),
    "text": _words,
}
UNIT: dict[str, Cell] = {
    "unit": _marked("unit_id", "accepted"),
    "question": of("question_id", lambda name: name[:8]),
    "succ.": of("success_count"),
    "age": of("age"),
    "priority": of("priority", significant),
    "prob.": of("probability", percent),
    "drift": of("drift", significant),
    "headr.": of("headroom", significant),
    "weight": of("weight", significant),
    "tokens": lambda row: str(sum(each["num_tokens"] for each in row["rows"]) if "rows" in row else row["num_tokens"]),
    "text": lambda row: (
        _words(row)
        if "rows" in row
        else f"{row['trajectory_id']}: r {row['reward']:g}, A {significant(row['advantage'])}: {_words(row)}"
    ),
}
EVENT: dict[str, Cell] = {
    "step": of("step"),
    "event": of("event"),
    "trajectory": of("trajectory_id"),
    "bucket": of("bucket"),
    "prob.": of("probability", precise),
    "age": of("age"),
    "tokens": of("num_tokens"),
    "entropy": of("entropy", number),
    "nll": of("nll", number),
}


def _question_tables(label: str, history: Numbers) -> Iterator[Table]:
    level = f", level {history['level']}" if history["level"] else ""
    said = f"{excerpt(history['text'], 400)} Answer: {history['answer']}{level}" if history["text"] else ""
    title = f"{label}: question {history['question_id']}, {history['state']}"
    yield table_of(title, EVENT, history["events"], caption=said)
    born = {row["trajectory_id"]: row["step"] for row in history["events"] if row["event"] == "collected"}
    replays = Counter(row["trajectory_id"] for row in history["events"] if row["event"] == "selected")
    columns: dict[str, Cell] = {
        "trajectory": lambda row: str(row[0]),
        "born": lambda row: str(born.get(row[0], NO_VALUE)),
        "replays": lambda row: str(replays[row[0]]),
        "text": lambda row: excerpt(row[1], 400),
    }
    yield table_of("Responses", columns, history["responses"].items(), words=True)


WHAT_IF = {
    "sampler": ("questions drawn, had the sampler been {}", "successes"),
    "metric": ("trajectories replayed, had the metric been {}", "mean of"),
    "priority": ("units replayed, had the priority been {}", "mean of"),
    "max_drift": ("units within a drift of {}", ""),
}
"""Title of the table of each kind of what-if, and the heading of its first column."""


def _what_if_table(report: "RunReport", kind: str, outcome: Numbers) -> Table:
    """The run's numbers and those of the other policy; the two may be named alike."""
    own, other = report.titles[kind]
    title, first = WHAT_IF[kind]
    title = title.format(other) + ("" if outcome.get("measured", True) else ", values at birth")
    table = table_of(f"{report.label}: {title}", {first: str}, ())
    for name in (own, other):
        table.add_column(name, justify="right", overflow="fold")
    for row in _what_if_rows(kind, outcome):
        table.add_row(*row)
    return table


def _what_if_rows(kind: str, outcome: Numbers) -> Iterator[tuple[str, ...]]:
    if kind == "sampler":
        for bucket in sorted({*outcome["drawn"], *outcome["expected"]}):
            yield str(bucket), f"{outcome['drawn'].get(bucket, 0):,}", f"{outcome['expected'].get(bucket, 0.0):,.1f}"
        yield "mean pass rate", *(number(finite_mean(outcome[name])) for name in ("pass_rate", "expected_pass_rate"))
    elif kind == "max_drift":
        scanned = f"of {outcome['scanned']:,} scanned"
        yield scanned, count(outcome["accepted"]), count(outcome["would_accept"])
        yield "steps with as many as the run took", count(outcome["steps"]), count(outcome["steps_enough"])
        yield "scans of these, mean", number(outcome["scans"]), number(outcome["scans_needed"])
    else:
        names = ("chosen", "other") if kind == "metric" else ("taken", "expected")
        for name in outcome[names[0]]:
            yield name, *(number(outcome[whose][name]) for whose in names)
        if kind == "metric":
            yield "same trajectory, of draws with a choice", "", percent(outcome["share_same"])
            yield "draws, with a choice", count(outcome["draws"]), percent(outcome["share_with_choice"])
        else:
            yield "units; share that both take", count(outcome["units"]), percent(outcome["share_same"])
