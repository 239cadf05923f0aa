"""The page of one run: what it was, how it went, what it replayed, how to repeat it; also if unfinished or broken."""

import warnings
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from exgrpo_cli.base.errors import DamageWarning, InputError
from exgrpo_cli.base.files import NUMBER, Shape, read_json, require_shape
from exgrpo_cli.config.layers import build_config
from exgrpo_cli.config.settings import PINNED, Config, resolve
from exgrpo_cli.endpoints.heldout import new_fall, read_validations
from exgrpo_cli.runs.folder import RunFolder, RunMetrics, read_json_lines, read_metrics
from exgrpo_cli.runs.manifest import find_changes
from exgrpo_cli.runs.result import read_summary, remarks
from exgrpo_cli.show import statistics, tables
from exgrpo_cli.show.details import step_replay
from exgrpo_cli.show.figures import training
from exgrpo_cli.show.page import (
    Block,
    Page,
    Paragraph,
    Response,
    Section,
    TableBlock,
    figure_block,
    section,
    table_block,
    warning,
)
from exgrpo_cli.show.record import RunRecord, keeps_experience, read_config, read_run
from exgrpo_cli.show.tables import drawn_by
from exgrpo_cli.training.step.guards import Guards

SAMPLE: Shape = {
    "prompt": str,
    "answer": str,
    "text": str,
    "reward": NUMBER,
    "verdict": str,
    "num_tokens": int,
    "experiential": bool,
}
"""Keys of a row of samples/ that are shown."""
RESPONSES_SHOWN = 3
"""Right ones, wrong ones, and replayed ones, each."""
SAMPLE_FILES = 20
"""Files of the newest steps, in which responses are looked for."""
LATEST = ("batch/pass_at_1", "replay/pass_at_1", "policy/entropy", "replay/questions", "replay/retired", "time/step")
"""Metrics of the last step that stand for a result until there is one."""
NO_TEXT = "(no tokenizer yet to decode it with)"


def is_run(path: Path) -> bool:
    """Whether the folder is one that a run has begun to write."""
    return (path / "config.toml").is_file() or (path / "metrics.jsonl").is_file()


def run_page(run: Path) -> Page:
    """The page of a run folder, each section as far as its files allow."""
    folder, name = RunFolder(run), run.resolve().name
    record = cache(lambda: read_run(run))
    sections = {
        "Result": lambda: _result(folder),
        "Warnings": lambda: _warnings(folder),
        "Learning": lambda: _learning(run),
        "Verdicts and responses": lambda: _responses(folder),
    }
    try:
        replays = read_config(run).replay.enabled
    except InputError as error:
        broken = [Section(title="Replay", blocks=[warning(f"Not shown: {error}")])]
    else:
        broken = []
        if replays:
            sections |= {"Replay": lambda: _replay(record()), "Replayed trajectories": lambda: _replayed(record())}
    last = {"How to repeat it": lambda: _repeat(run), "Versions": lambda: _versions(run)}
    return Page(
        title=f"Run {name}",
        subtitle=_subtitle(folder),
        sections=[*_made(sections), *broken, *_made(last)],
        footer=f"Made by exgrpo report from {name}/: everything on this page is in that folder.",
    )


def _made(sections: dict[str, Any]) -> list[Section]:
    return [section(title, make) for title, make in sections.items()]


def _subtitle(folder: RunFolder) -> str:
    state = _state(folder)
    try:
        config = read_config(folder.path)
    except InputError:
        return state
    chosen = f"replay {drawn_by(config.replay)}" if config.replay.enabled else "no replay"
    asked = f"questions {Path(config.data.train).name}, seed {config.run.seed}"
    return f"{config.run.method} on {config.backbone.name}, {asked}, {chosen}. {state}"


def _state(folder: RunFolder) -> str:
    try:
        steps = read_metrics(folder.path).steps
        last = int(steps[-1]) if len(steps) else 0
    except InputError:
        return "No step is on record."
    if not folder.summary.is_file():
        return f"Not finished: {last} steps on record."
    try:
        return f"Finished after {last} steps: {read_summary(folder.summary)['finished']}."
    except InputError:
        return f"{last} steps on record."


def _result(folder: RunFolder) -> Iterator[Block]:
    if not folder.summary.is_file():
        yield Paragraph("The run has not finished: its final figures are not known yet.")
        metrics = read_metrics(folder.path)
        if len(metrics.steps):
            rows = [[name, f"{metrics.series(name)[-1]:.4g}"] for name in LATEST if metrics.has(name)]
            yield TableBlock(header=["metric", f"step {metrics.steps[-1]}"], rows=rows)
        return
    summary = read_summary(folder.summary)
    heldout, tokens, replay = summary["heldout"], summary["tokens"], summary["replay"]
    scores = []
    for when in ("before", "after"):
        if score := heldout[when]:
            interval = f"{score['low']:.3f} to {score['high']:.3f}"
            asked = [str(score["questions"]), str(score["samples"])]
            beside = remarks(score).removeprefix("; ") or "-"
            scores.append([f"{when} training", f"{score['pass_at_1']:.3f}", interval, *asked, beside])
    if scores:
        header = ["", "pass@1", "95 % interval", "questions", "samples each", "beside it"]
        yield TableBlock(header=header, rows=scores, caption=f"Held-out questions: {heldout['set']}")
    else:
        yield Paragraph("No held-out questions: the run was not validated.")
    seconds = dict(sorted(summary["wall_seconds"].items(), key=lambda phase: -phase[1]))
    total = seconds.pop("total")
    costs = {
        "steps": f"{summary['steps']:,}",
        "wall clock": f"{total:,.0f} s",
        "tokens generated": f"{tokens['generated']:,}",
        "tokens trained on": f"{tokens['trained']:,}",
        "peak memory": f"{summary['peak_memory_bytes'] / 2**30:.2f} GiB",
        "trajectories replayed": f"{replay['used']:,}",
        "questions in the buffer, retired": f"{replay['questions']:,}, {replay['retired']:,}",
    }
    yield TableBlock(header=["", ""], rows=list(costs.items()), caption="Cost and replay")
    times = [[name, f"{value:,.1f}", f"{value / max(total, 1e-9):.0%}"] for name, value in seconds.items()]
    yield TableBlock(header=["phase", "seconds", "share"], rows=times, caption="Where the time went")


def _warnings(folder: RunFolder) -> Iterator[Block]:
    none = True
    for text in _remarks(folder):
        none = False
        yield warning(text)
    if none:
        yield Paragraph("None.")


def _remarks(folder: RunFolder) -> Iterator[str]:
    """Changed files, fired guards, falls of the held-out score, a damaged ledger, skipped updates."""
    yield from (f"{change}: restore it from a copy." for change in find_changes(folder.path))
    guards = Guards()
    for line in folder.metrics_lines():
        yield from guards.check(line, ())
    validations = read_validations(folder.path)
    yield from filter(None, (new_fall(validations[:number]) for number in range(2, len(validations) + 1)))
    if keeps_experience(folder.path) and (incomplete := read_run(folder.path).incomplete):
        warnings.warn(f"{folder.path}: {incomplete}", DamageWarning, stacklevel=2)
        yield incomplete
    skipped = read_metrics(folder.path).series("optim/updates_skipped")
    if total := int(skipped[skipped > 0].sum()):
        yield f"{total} updates were skipped; metrics.jsonl says why."


def _learning(run: Path) -> Iterator[Block]:
    for name, figure in training.training_figures(run):
        yield figure_block(name, figure, training.CAPTIONS[name])


def _responses(folder: RunFolder) -> Iterator[Block]:
    if rows := _verdicts(read_metrics(folder.path)):
        header = ["verdict", "all steps", "first tenth", "last tenth"]
        yield TableBlock(header=header, rows=rows, caption="Shares of all graded rollouts")
    shown = {True: 0, False: 0}
    for path in sorted(folder.samples.glob("step-*.jsonl"), reverse=True)[:SAMPLE_FILES]:
        for row in read_json_lines(path):
            require_shape(row, SAMPLE, str(path))
            good = row["reward"] > 0
            shown[good] += 1
            if shown[good] <= RESPONSES_SHOWN:
                replayed = ", replayed question" if row["experiential"] else ""
                facts = f"{row['verdict']}, {row['num_tokens']} tokens, {path.stem}{replayed}"
                asked = {"question": row["prompt"], "answer": row["answer"], "text": row["text"]}
                yield Response(facts=facts, good=good, **asked)


def _verdicts(metrics: RunMetrics) -> list[list[str]]:
    """Share of each verdict over all steps, the first tenth of them and the last."""
    names, tenth = metrics.names("verdict/"), max(1, len(metrics.steps) // 10)
    counts = np.array([metrics.series(name) for name in names]).reshape(len(names), len(metrics.steps))
    rows = [[name.removeprefix("verdict/").replace("_", " ")] for name in names]
    for stretch in (slice(None), slice(None, tenth), slice(-tenth, None)):
        sums = counts[:, stretch].sum(axis=1)
        for row, num in zip(rows, sums, strict=True):
            row.append(f"{num / sums.sum():.1%}" if sums.sum() else tables.NO_VALUE)
    return rows


def _replay(record: RunRecord) -> Iterator[Block]:
    report = statistics.report_record(record)
    yield table_block(tables.overview([report]))
    yield table_block(tables.entropies(report))
    for name, figure in statistics.replay_figures(report):
        yield figure_block(name, figure, statistics.CAPTIONS[name])


def _replayed(record: RunRecord) -> Iterator[Block]:
    chosen = np.concatenate([record.scores.step[record.scores.chosen], record.units.step[record.units.accepted]])
    if not len(chosen):
        yield Paragraph("Nothing has been replayed yet.")
        return
    step = int(chosen.max())
    yield Paragraph(f"Of step {step}, the last that replayed. exgrpo replay-stats RUN --step N shows any other.")
    replayed = step_replay(record, step)
    for unit in [unit for unit in replayed["units"] if unit["accepted"]][:RESPONSES_SHOWN]:
        row = unit["rows"][0]
        facts = (
            "age {age} steps, reward {reward:g}, advantage {advantage:.3f}, priority {priority:.3g}, first of {num} "
        )
        facts += "rows of a unit, {success_count} right when sampled"
        yield _response(unit, row, facts.format(num=len(unit["rows"]), **unit | row), good=row["reward"] > 0)
    for drawn in replayed["questions"][:RESPONSES_SHOWN]:
        for row in [one for one in drawn["candidates"] if one["chosen"]][:1]:
            facts = f"age {row['age']} steps, entropy {row['entropy']:.3f} nats, one of {len(drawn['candidates'])} "
            place = "{bucket} of {num_members} right at the last visit".format(**drawn)
            facts += "candidates" if drawn["bucket"] is None else f"candidates, {place}"
            yield _response(drawn, row, facts, good=True)


def _response(drawn: dict[str, Any], row: dict[str, Any], facts: str, *, good: bool) -> Response:
    """A replayed row of a drawn question or unit."""
    question = drawn["question"]
    asked = {"question": question.text or drawn["question_id"], "answer": question.answer}
    return Response(text=row["text"] or NO_TEXT, facts=facts, good=good, **asked)


def _repeat(run: Path) -> Iterator[Block]:
    config, name = read_config(run), run.resolve().name
    yield Paragraph(f"exgrpo train --config {name}/config.toml --output {name}-again", "code")
    changed, preset = differing_settings(config), f"backbone {config.backbone.name} with method {config.run.method}"
    if changed:
        yield Paragraph(f"Settings that differ from those of {preset}:")
        yield TableBlock(header=["setting", "here", "preset"], rows=changed, text_columns=3)
    else:
        yield Paragraph(f"All settings are those of {preset}.")


def differing_settings(config: Config) -> list[list[str]]:
    """Settings that the presets of the run's backbone and method do not give: name, value here, value there.

    Left out are those that every run settles when it starts.
    """
    try:
        usual = build_config(backbone=config.backbone.name, method=config.run.method)
    except InputError:
        usual = resolve([])
    if config.rollout.logprobs == config.usual_logprobs:
        config = replace(config, rollout=replace(config.rollout, logprobs="auto"))
    ours, theirs = asdict(config), asdict(usual)
    return [
        [f"{part}.{key}", str(value), str(theirs[part][key])]
        for part, values in ours.items()
        for key, value in values.items()
        if value != theirs[part][key] and f"{part}.{key}" not in PINNED
    ]


def _versions(run: Path) -> Iterator[Block]:
    environment = read_json(run / "environment.json", {"packages?": dict})
    others = {name: value for name, value in environment.items() if name != "packages" and value}
    rows = [[name, str(value)] for name, value in (environment.get("packages", {}) | others).items()]
    yield TableBlock(header=["", ""], rows=rows, text_columns=2)
