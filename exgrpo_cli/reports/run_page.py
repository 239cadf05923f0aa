"""The page of one run: what it was, how it went, what it replayed, how to repeat it; also if unfinished or broken."""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from exgrpo_cli.base.errors import DamageWarning, InputError
from exgrpo_cli.base.shapes import NUMBER, Shape, read_json, require_shape
from exgrpo_cli.config.layers import build_config
from exgrpo_cli.config.settings import PINNED, Config, resolve
from exgrpo_cli.endpoints.heldout import new_fall, read_validations
from exgrpo_cli.plots.gallery import replay_figures, training_figures
from exgrpo_cli.replay_stats.output import summary_tables
from exgrpo_cli.replay_stats.output.report import RunReport
from exgrpo_cli.replay_stats.record import RunRecord, keeps_experience, read_config, read_run
from exgrpo_cli.replay_stats.step import step_replay
from exgrpo_cli.replay_stats.summary import summarise_record
from exgrpo_cli.reports.page import (
    Block,
    Code,
    Page,
    Paragraph,
    Response,
    Section,
    TableBlock,
    figure_block,
    section,
    table_of,
)
from exgrpo_cli.runs.checksums import find_changes
from exgrpo_cli.runs.folder import RunFolder, read_json_lines
from exgrpo_cli.runs.metrics import RunMetrics, read_metrics
from exgrpo_cli.runs.summary import read_summary, remarks
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
"""What a row of samples/ holds of what is shown."""
RESPONSES_SHOWN = 3
"""Right ones, wrong ones, and replayed ones, each."""
SAMPLE_FILES = 20
"""Of the newest steps, in which responses are looked for."""
CAPTIONS = {
    "learning": "Success on fresh, replayed and held-out questions. Held-out is what counts: fresh and replayed "
    "questions are drawn by the method itself.",
    "learning-tokens": "Held-out success against the tokens generated until then.",
    "memorising": "Memorised or learnt: success before and after training on questions that were replayed, only rolled "
    "out, or never seen.",
    "diagnostics": "A healthy run: entropy falls slowly, ratios stay near 1, few updates are skipped, and the gap "
    "between trainer and engine stays as small as it was.",
    "replay-buckets": "Questions in the buffer by their latest success count; on the right, what was drawn of each.",
    "replay-flow": "What a replay visit does: rows where questions came from, columns where they were afterwards.",
    "replay-questions": "All training questions by what has become of them.",
    "replay-entropy": "Entropy of what was replayed against what could have been: where the lines meet, selection has "
    "no choice.",
    "replay-age-reuse": "How old replayed trajectories were, and how often each was replayed.",
    "replay-entropy-by-bucket": "Entropy at birth by difficulty. Compare within stretches of steps: it falls in time.",
    "replay-units": "Units drawn by priority, and those replayed: the others have drifted beyond the bound.",
    "replay-draws": "Questions drawn against what the sampler promised; a small p-value means that they disagree.",
}


def run_page(run: Path) -> Page:
    """The page of a run folder, each section as far as its files allow."""
    folder = RunFolder(run)
    return Page(
        title=f"Run {run.resolve().name}",
        subtitle=_subtitle(folder),
        sections=[
            section("Result", lambda: _result(folder)),
            section("Warnings", lambda: _warnings(folder)),
            section("Learning", lambda: _learning(run)),
            section("Verdicts and responses", lambda: _responses(folder)),
            *_replay_sections(run),
            section("How to repeat it", lambda: _repeat(run)),
            section("Versions", lambda: _versions(run)),
        ],
        footer=_footer(run),
    )


def _footer(run: Path) -> str:
    return f"Made by exgrpo report from {run.resolve().name}/: everything on this page is in that folder."


def _subtitle(folder: RunFolder) -> str:
    state = _state(folder)
    try:
        config = read_config(folder.path)
    except InputError:
        return state
    replay = config.replay
    chosen = f"replay {replay.sampler}, {replay.metric}:{replay.direction}" if replay.enabled else "no replay"
    return (
        f"{config.run.method} on {config.backbone.name}, questions {Path(config.data.train).name}, seed "
        f"{config.run.seed}, {chosen}. {state}"
    )


def _state(folder: RunFolder) -> str:
    try:
        metrics = read_metrics(folder.path)
    except InputError:
        return "No step is on record."
    last = int(metrics.steps[-1]) if len(metrics.steps) else 0
    if not folder.summary.is_file():
        return f"Not finished: {last} steps on record."
    try:
        return f"Finished after {last} steps: {read_summary(folder.summary)['finished']}."
    except InputError:
        return f"{last} steps on record."


def _result(folder: RunFolder) -> Iterator[Block]:
    if not folder.summary.is_file():
        yield Paragraph(text="The run has not finished: its final figures are not known yet.")
        yield from _latest(read_metrics(folder.path))
        return
    summary = read_summary(folder.summary)
    heldout = summary["heldout"]
    scores = [
        [
            f"{when} training",
            f"{score['pass_at_1']:.3f}",
            _interval(score),
            str(score["questions"]),
            str(score["samples"]),
            remarks(score).removeprefix("; ") or "-",
        ]
        for when in ("before", "after")
        if (score := heldout[when])
    ]
    if scores:
        header = ["", "pass@1", "95 % interval", "questions", "samples each", "beside it"]
        yield TableBlock(header=header, rows=scores, caption=f"Held-out questions: {heldout['set']}")
    else:
        yield Paragraph(text="No held-out questions: the run was not validated.")
    tokens, replay, seconds = summary["tokens"], summary["replay"], summary["wall_seconds"]
    rows = [
        ["steps", f"{summary['steps']:,}"],
        ["wall clock", f"{seconds['total']:,.0f} s"],
        ["tokens generated", f"{tokens['generated']:,}"],
        ["tokens trained on", f"{tokens['trained']:,}"],
        ["peak memory", f"{summary['peak_memory_bytes'] / 2**30:.2f} GiB"],
        ["trajectories replayed", f"{replay['used']:,}"],
        ["questions in the buffer, retired", f"{replay['questions']:,}, {replay['retired']:,}"],
    ]
    yield TableBlock(header=["", ""], rows=rows, caption="Cost and replay")
    phases = sorted(((name, value) for name, value in seconds.items() if name != "total"), key=lambda pair: -pair[1])
    total = max(seconds["total"], 1e-9)
    times = [[name, f"{value:,.1f}", f"{value / total:.0%}"] for name, value in phases]
    yield TableBlock(header=["phase", "seconds", "share"], rows=times, caption="Where the time went")


def _latest(metrics: RunMetrics) -> Iterator[Block]:
    names = ("batch/pass_at_1", "replay/pass_at_1", "policy/entropy", "replay/questions", "replay/retired", "time/step")
    if len(metrics.steps):
        rows = [[name, f"{metrics.series(name)[-1]:.4g}"] for name in names if metrics.has(name)]
        yield TableBlock(header=["metric", f"step {metrics.steps[-1]}"], rows=rows)


def _interval(score: Mapping[str, float]) -> str:
    return f"{score['low']:.3f} to {score['high']:.3f}"


def _warnings(folder: RunFolder) -> Iterator[Block]:
    guards, changes = Guards(), find_changes(folder.path)
    said = len(changes)
    for text in changes:
        yield Paragraph(text=f"{text}: restore it from a copy.", warning=True)
    for line in folder.metrics_lines():
        for text in guards.check(line, ()):
            said += 1
            yield Paragraph(text=text, warning=True)
    validations = read_validations(folder.path)
    for number in range(2, len(validations) + 1):
        if fall := new_fall(validations[:number]):
            said += 1
            yield Paragraph(text=fall, warning=True)
    if keeps_experience(folder.path):
        incomplete = read_run(folder.path).incomplete
        if incomplete:
            said += 1
            warnings.warn(f"{folder.path}: {incomplete}", DamageWarning, stacklevel=2)
            yield Paragraph(text=incomplete, warning=True)
    skipped = read_metrics(folder.path).series("optim/updates_skipped")
    total = int(skipped[skipped > 0].sum())
    if total:
        said += 1
        yield Paragraph(text=f"{total} updates were skipped; metrics.jsonl says why.", warning=True)
    if not said:
        yield Paragraph(text="None.")


def _learning(run: Path) -> Iterator[Block]:
    for name, figure in training_figures(run):
        yield figure_block(name, figure, CAPTIONS.get(name, ""))


def _responses(folder: RunFolder) -> Iterator[Block]:
    metrics = read_metrics(folder.path)
    names = metrics.names("verdict/")
    if names:
        tenth = max(1, len(metrics.steps) // 10)
        stretches = (slice(None), slice(None, tenth), slice(-tenth, None))
        rows = [
            [name.removeprefix("verdict/").replace("_", " "), *_shares(metrics, name, names, stretches)]
            for name in names
        ]
        header = ["verdict", "all steps", "first tenth", "last tenth"]
        yield TableBlock(header=header, rows=rows, caption="Shares of all graded rollouts")
    files = sorted(folder.samples.glob("step-*.jsonl"), reverse=True)[:SAMPLE_FILES]
    shown = {True: 0, False: 0}
    for path in files:
        for row in read_json_lines(path):
            require_shape(row, SAMPLE, str(path))
            good = row["reward"] > 0
            if shown[good] < RESPONSES_SHOWN:
                shown[good] += 1
                yield Response(
                    question=row["prompt"],
                    answer=row["answer"],
                    text=row["text"],
                    facts=f"{row['verdict']}, {row['num_tokens']} tokens, {path.stem}"
                    f"{', replayed question' if row['experiential'] else ''}",
                    good=good,
                )


def _shares(metrics: RunMetrics, name: str, names: list[str], stretches: tuple[slice, ...]) -> list[str]:
    shares = []
    for stretch in stretches:
        total = sum(float(metrics.series(other)[stretch].sum()) for other in names)
        shares.append(f"{metrics.series(name)[stretch].sum() / total:.1%}" if total else "–")
    return shares


def _replay_sections(run: Path) -> list[Section]:
    """The buffer, and what was replayed last; nothing for a run that does not replay."""
    try:
        if not read_config(run).replay.enabled:
            return []
    except InputError as error:
        return [Section(title="Replay", blocks=[Paragraph(text=f"Not shown: {error}", warning=True)])]
    return [section("Replay", lambda: _replay(run)), section("Replayed trajectories", lambda: _replayed(run))]


def _replay(run: Path) -> Iterator[Block]:
    summary = summarise_record(read_run(run))
    yield table_of(summary_tables.overview([RunReport(label=run.resolve().name, summary=summary)]))
    yield table_of(summary_tables.difficulty_windows(summary))
    for name, figure in replay_figures(summary):
        yield figure_block(name, figure, CAPTIONS.get(name, ""))


def _replayed(run: Path) -> Iterator[Block]:
    record = read_run(run)
    step = _last_replay(record)
    if step is None:
        yield Paragraph(text="Nothing has been replayed yet.")
        return
    yield Paragraph(text=f"Of step {step}, the last that replayed. exgrpo replay-stats RUN --step N shows any other.")
    replayed = step_replay(record, step)
    for unit in [unit for unit in replayed.units if unit.accepted][:RESPONSES_SHOWN]:
        row = unit.rows[0]
        yield Response(
            question=unit.question.text or unit.question_id,
            answer=unit.question.answer,
            text=row.text or "(no tokenizer yet to decode it with)",
            facts=f"age {unit.age} steps, reward {row.reward:g}, advantage {row.advantage:.3f}, priority "
            f"{unit.priority:.3g}, first of {len(unit.rows)} rows of a unit, {unit.success_count} right when sampled",
            good=row.reward > 0,
        )
    for drawn in replayed.questions[:RESPONSES_SHOWN]:
        chosen = next((one for one in drawn.candidates if one.chosen), None)
        if chosen is not None:
            successes = (
                "" if drawn.bucket is None else f", {drawn.bucket} of {drawn.num_members} right at the last visit"
            )
            yield Response(
                question=drawn.question.text or drawn.question_id,
                answer=drawn.question.answer,
                text=chosen.text or "(no tokenizer yet to decode it with)",
                facts=f"age {chosen.age} steps, entropy {chosen.entropy:.3f} nats, one of {len(drawn.candidates)} "
                f"candidates{successes}",
                good=True,
            )


def _last_replay(record: RunRecord) -> int | None:
    chosen = np.concatenate([record.scores.step[record.scores.chosen], record.units.step[record.units.accepted]])
    return int(chosen.max()) if len(chosen) else None


def _repeat(run: Path) -> Iterator[Block]:
    config = read_config(run)
    name = run.resolve().name
    yield Code(text=f"exgrpo train --config {name}/config.toml --output {name}-again")
    changed = differing_settings(config)
    yield Paragraph(
        text=f"Settings that differ from those of backbone {config.backbone.name} with method {config.run.method}:"
        if changed
        else f"All settings are those of backbone {config.backbone.name} with method {config.run.method}."
    )
    if changed:
        yield TableBlock(header=["setting", "here", "preset"], rows=changed, text_columns=3)


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
    packages = environment.get("packages", {})
    rows = [[name, str(value)] for name, value in packages.items()]
    rows += [[name, str(value)] for name, value in environment.items() if name != "packages" and value]
    yield TableBlock(header=["", ""], rows=rows, text_columns=2)


def is_run(path: Path) -> bool:
    """Whether the folder is one that a run has begun to write."""
    return (path / "config.toml").is_file() or (path / "metrics.jsonl").is_file()
