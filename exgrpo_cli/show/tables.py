"""Tables of a report: of each row, how its cell is written under every heading."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from exgrpo_cli.base.data import tables
from exgrpo_cli.show.queries import Numbers, series, span_of

Cell = Callable[[Any], str]
Columns = Mapping[str, Cell]
"""By heading, how a row's cell is written."""

TEXT_SHOWN = 60
"""Characters of a question's text."""
RESPONSE_SHOWN = 400
"""Characters of a response."""
ROWS_SHOWN = 20
"""Rows of a step's table: a step may draw from hundreds."""
TIMES_SHOWN = 8
"""Rows of a table over time."""
NO_VALUE = "–"


def table_of(
    title: str, columns: Columns, rows: Sequence[Any], *, caption: str = "", words: bool = False, bold: str = ""
) -> Table:
    """A row of cells for each of `rows`: the first column flush left, with `words` the last one too, the others right.

    Rows that have the key `bold` are bold.
    """
    table = Table(title=title, title_justify="left", title_style="bold", caption=caption or None, box=SIMPLE_HEAD)
    table.caption_justify, table.min_width, table.padding = "left", max(len(title), min(len(caption), 76)), (0, 1, 0, 0)
    for place, heading in enumerate(columns):
        left = place == 0 or (words and place == len(columns) - 1)
        table.add_column(heading, justify="left" if left else "right", overflow="fold", no_wrap=place == 0)
    for row in rows:
        table.add_row(*(cell(row) for cell in columns.values()), style="bold" if bold and bold in row else None)
    return table


def excerpt(text: str, length: int = TEXT_SHOWN) -> str:
    """A text on one line, cut to `length` characters."""
    line = " ".join(text.split())
    return line if len(line) <= length else f"{line[: length - 1]}…"


def written(form: str) -> Callable[[float | None], str]:
    """Numbers in a format, with a dash for what is missing or not finite."""
    return lambda value: NO_VALUE if value is None or not math.isfinite(value) else format(value, form)


number, significant, count = (written(form) for form in (".3f", ".3g", ",d"))


def of(path: str, text: Callable[[Any], str] = str) -> Cell:
    """The value under a path such as `age.mean` as `text`; a dash where it is None, nothing in a row without it."""

    def cell(row: Any) -> str:
        for name in path.split("."):
            if name not in row:
                return ""
            row = row[name]
        return NO_VALUE if row is None else text(row)

    return cell


def average(values: np.ndarray) -> str:
    """The mean of what is finite, as text."""
    known = values[np.isfinite(values)]
    return number(float(known.mean()) if len(known) else None)


def latest(values: np.ndarray) -> str:
    """The last count, as text."""
    return count(values[-1])


def total(values: np.ndarray) -> str:
    """The sum of counts, as text."""
    return count(values.sum())


TABLES = tables(__file__, "tables.toml")
OVER_STEPS = {"average": average, "latest": latest, "total": total}
"""Ways to put values of several steps together as text."""


def declared(name: str, own: Columns) -> Columns:
    """The columns that tables.toml has under a name, those without a path there by cells of their `own`."""
    return {heading: own.get(heading) or _cell(said) for heading, said in TABLES[name].items()}


def _cell(said: str) -> Cell:
    path, _, form = said.partition(" ")
    return of(path, OVER_STEPS.get(form) or (written(form) if form else str))


FACTS = declared(
    "facts",
    {
        "steps (mixed from)": lambda told: f"{told['steps']} ({of('first_mixed_step')(told)})",
        "of these by successes": of("buckets", lambda found: ", ".join(f"{k}: {num:,}" for k, num in found.items())),
        "never replayed": lambda told: number(told["reuse"]["never"] / told["stored"] if told["stored"] else None),
    },
)
"""Row of the overview -> how a run's numbers are written there."""


LIVES = declared("lives", {})


def overview(reports: Mapping[str, Numbers]) -> Table:
    """The main numbers, one column per run."""
    return facts_table("Replay buffer", FACTS, reports)


def facts_table(title: str, facts: Columns, told: Mapping[str, Any]) -> Table:
    """A row for each fact, a column for each of what they are `told` of."""
    rows = [[fact, *(cell(each) for each in told.values())] for fact, cell in facts.items()]
    return listing(title, ["", *told], [row for row in rows if set(row[1:]) - {"", NO_VALUE}])


def listing(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, words: bool = False) -> Table:
    """A table of rows of cells."""
    columns = {heading: itemgetter(place) for place, heading in enumerate(header)}
    return table_of(title, columns, rows, words=words)


Since = tuple[str, Callable[[np.ndarray], str]]
"""Path of values, and how those of the steps since the row above are put together."""


def over_time(title: str, columns: Mapping[str, Since], told: Numbers) -> Table:
    """A few steps, evenly spaced, the last one among them, of what is known."""
    found = {heading: (series(told, path), text) for heading, (path, text) in columns.items()}
    known = {heading: each for heading, each in found.items() if each[0] is not None and np.isfinite(each[0]).any()}
    times = sorted({round(step) for step in np.linspace(min(1, told["steps"]), told["steps"], TIMES_SHOWN)})
    rows = [
        [str(step), *(text(values[before + 1 : step + 1]) for values, text in known.values())]
        for before, step in itertools.pairwise([-1, *times])
    ]
    return listing(title, ["step", *known], rows)


def buckets_over_time(told: Numbers) -> Table:
    """Questions per bucket at a few steps."""
    buckets: dict[str, Since] = {str(k): (f"over_time.buckets.{k}", latest) for k in told["over_time"]["buckets"]}
    columns = buckets | {"buffered": ("over_time.questions", latest)}
    return over_time(f"Questions by successes of {told['group_size']}", columns, told)


def dynamics(told: Numbers) -> Table:
    """The fate of the buffer and of what was replayed, at a few steps."""
    columns = {heading: said.split() for heading, said in TABLES["dynamics"].items()}
    title = "Over time (from entropy on: means and sums since the row above)"
    return over_time(title, {heading: (path, OVER_STEPS[how]) for heading, (path, how) in columns.items()}, told)


def draws(told: Numbers) -> Table | None:
    """Questions that the sampler promised and drew; None without a draw."""
    found = told["draws"]
    outcome = "" if found["p_value"] is None else f", p = {found['p_value']:.3f}"
    title = f"Drawn against promised ({told['sampler']}{outcome})"
    return table_of(title, PROMISE, found["buckets"]) if found["buckets"] else None


def entropies(told: Numbers) -> Table:
    """Mean entropy at birth by success count and difficulty, within stretches of steps and over the whole run."""
    whole = told["entropy"]
    rows = [[group["name"], count(group["trajectories"])] for group in (*whole["by_bucket"], *whole["by_difficulty"])]
    rows.append(["hard / easy", ""])
    spans = {span_of(each): each for each in (*whole["windows"], whole)}
    for each in spans.values():
        means = {group["name"]: group["mean"] for group in (*each["by_bucket"], *each["by_difficulty"])}
        for row in rows:
            row.append(number((means | {"hard / easy": each["hard_over_easy"]}).get(row[0])))
    title = "Entropy of trajectories at birth (nats), within steps"
    return listing(title, ["successes", "trajectories", *spans], rows)


def lives(told: Numbers) -> Table | None:
    """Outcomes of solved and of lost questions at their next visit, by the steps between."""
    of = told["lives"]
    repair = f"; those regained were so after {of['repair']:g} steps (median)" if of["repair"] is not None else ""
    caption = f"{of['lost_now']:,} of {of['solved']:,} questions once solved were lost at their last visit{repair}"
    rows = of["by_delay"]
    return table_of("Solved questions at their next visit", LIVES, rows, caption=caption) if rows else None


def replayed_questions(told: Numbers) -> Table:
    """The questions replayed most often."""
    return table_of("Most replayed questions", REPLAYED, told["most_replayed"], words=True)


def asked_tables(label: str, told: Numbers) -> Iterator[Table]:
    """Tables of what was asked for of a run besides its numbers: a step, a question, another policy."""
    if "step" in told:
        yield from _step_tables(label, told["step"])
    if "question" in told:
        yield from _question_tables(label, told["question"])
    for kind, outcome in told.get("what_if", {}).items():
        yield _what_if_table(label, kind, outcome)


def _step_tables(label: str, step: Numbers) -> Iterator[Table]:
    at, nothing = f"at step {step['step']}", step["nothing"]
    drawn = f"{at} (> is replayed)"
    if step["units"]:
        rows, caption = _beginning(step["units"], "rows", nothing)
        yield table_of(f"{label}: scanned {drawn}", UNIT, rows, caption=caption, words=True, bold="unit_id")
    elif (offers := step["buckets"]) or not step["questions"]:
        said = "succ.: right answers at the last visit; with 0, the stored ones are of an earlier visit" * bool(offers)
        yield table_of(f"{label}: buckets {at}", OFFER, offers, caption=nothing or said)
    if step["questions"]:
        rows, caption = _beginning(step["questions"], "candidates")
        yield table_of(f"{label}: drawn {drawn}", DRAWN, rows, caption=caption, words=True, bold="question_id")


def _beginning(found: Sequence[Numbers], below: str, said: str = "") -> tuple[list[Numbers], str]:
    """Rows of the first of what was `found`, each above those that it holds, and a caption on how many are left out."""
    sizes = itertools.accumulate(1 + len(each[below]) for each in found)
    shown = found[: max(1, sum(size <= ROWS_SHOWN for size in sizes))]
    if len(shown) < len(found):
        said += f"\nThe first {len(shown)} of {len(found)}; all of them, with whole texts: --json"
    return [row for each in shown for row in (each, *each[below])], said.strip()


def _question_tables(label: str, history: Numbers) -> Iterator[Table]:
    level = f", level {history['level']}" if history["level"] else ""
    said = f"{excerpt(history['text'], RESPONSE_SHOWN)} Answer: {history['answer']}{level}" if history["text"] else ""
    title = f"{label}: question {history['question_id']}, {history['state']}"
    yield table_of(title, EVENT, history["events"], caption=said)
    born = {row["trajectory_id"]: row["step"] for row in history["events"] if row["event"] == "collected"}
    replays = Counter(row["trajectory_id"] for row in history["events"] if row["event"] == "selected")
    rows = [
        [str(name), str(born.get(name, NO_VALUE)), str(replays[name]), excerpt(text, RESPONSE_SHOWN)]
        for name, text in history["responses"].items()
    ]
    yield listing("Responses", ["trajectory", "born", "replays", "text"], rows, words=True)


def _what_if_table(label: str, kind: str, outcome: Numbers) -> Table:
    """The run's numbers and those of the other policy."""
    own, other = outcome["names"]
    if kind == "sampler":
        title, drawn, expected = "questions drawn, had the sampler been", outcome["drawn"], outcome["expected"]
        rows = [[str(k), f"{drawn.get(k, 0):,}", f"{expected.get(k, 0):,.1f}"] for k in sorted({*drawn, *expected})]
        rows.append(["mean pass rate", *(average(outcome[name]) for name in ("pass_rate", "expected_pass_rate"))])
    else:
        title, chosen = "trajectories replayed, had the metric been", outcome["chosen"]
        rows = [[f"mean {name}", number(chosen[name]), number(outcome["other"][name])] for name in chosen]
        rows.append(["draws, with a choice", count(outcome["draws"]), number(outcome["share_with_choice"])])
        rows.append(["the same, of draws with a choice", "", number(outcome["share_same"])])
    other += "" if outcome.get("measured", True) else ", values at birth"
    # The two may be called alike.
    return listing(f"{label}: {title} {other}", ["", f"run: {own}", other], rows)


def _successes(row: Numbers) -> str:
    if "num_members" not in row:
        return str(row.get("success_count", ""))
    return NO_VALUE if row["bucket"] is None else f"{row['bucket']}/{row['num_members']}"


def _words(row: Numbers) -> str:
    """Question and answer of a heading row, else a response, of a unit's row with what it was worth."""
    if "question" not in row:
        known = "reward" in row
        worth = f"{row['trajectory_id']}: r {row['reward']:g}, A {significant(row['advantage'])}: " if known else ""
        return worth + excerpt(row["text"] or NO_VALUE, RESPONSE_SHOWN)
    question = row["question"]
    return f"{excerpt(question['text'])} → {question['answer']}" if question["text"] else ""


def _marked(key: str, chosen: str) -> Cell:
    return lambda row: f"{'> ' if row.get(chosen) else ''}{'–' if row[key] is None else row[key]}" if key in row else ""


COLUMNS = declared(
    "columns",
    {
        "unit": _marked("unit_id", "accepted"),
        "question": of("question_id", lambda name: name[:8]),
        "succ.": _successes,
        "trajectory": _marked("trajectory_id", "chosen"),
        "text": _words,
    },
)
"""Columns of tables of buckets, questions, units, rows and events, by heading."""


def columns(headings: str) -> Columns:
    """Cells under some headings: as in COLUMNS, under any other the value of that name."""
    return {heading: COLUMNS.get(heading, of(heading)) for heading in headings.split()}


PROMISE = columns("succ. promised drawn")
OFFER: Columns = {**columns("succ. questions drawn"), "bucket's prob.": COLUMNS["prob."]}
REPLAYED = columns("question replays stored now text")
DRAWN = columns("question succ. prob. trajectory age tokens entropy nll text")
UNIT = columns("unit question succ. age priority prob. drift headr. weight tokens text")
EVENT = columns("step event trajectory bucket prob. age tokens entropy nll")
