"""The page of one run: what it was, how it went, what it replayed, how to repeat it; also if unfinished or broken."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from exgrpo_cli.base.errors import DamageWarning, InputError
from exgrpo_cli.base.files import NUMBER, Shape, read_json, require_shape
from exgrpo_cli.config.layers import build_config
from exgrpo_cli.config.settings import PINNED, Config, flat, resolve
from exgrpo_cli.runs.folder import RunFolder, RunMetrics, read_json_lines, read_metrics
from exgrpo_cli.runs.manifest import find_changes
from exgrpo_cli.runs.result import read_summary, remarks
from exgrpo_cli.show import statistics, tables
from exgrpo_cli.show.figures import training
from exgrpo_cli.show.page import Block, Page, Paragraph, Response, as_far_as_possible, figure_block, warning
from exgrpo_cli.show.queries import draw_names
from exgrpo_cli.show.record import keeps_experience, read_config, read_run
from exgrpo_cli.studies.measure import new_fall, read_validations
from exgrpo_cli.training.step.guards import Guards

WORDS: Shape = dict.fromkeys(("prompt", "answer", "text", "verdict"), str)
SAMPLE: Shape = WORDS | {"reward": NUMBER, "num_tokens": int, "experiential": bool}
"""Keys of a row of samples/ that are shown."""
RESPONSES_SHOWN = 3
"""Right ones and wrong ones, each."""
SAMPLE_FILES = 20
"""Files of the newest steps, in which responses are looked for."""


def is_run(path: Path) -> bool:
    """Whether the folder is one that a run has begun to write."""
    return (path / "config.toml").is_file() or (path / "metrics.jsonl").is_file()


def run_page(run: Path) -> Page:
    """The page of a run folder, each section as far as its files allow."""
    folder, name = RunFolder(run), run.resolve().name
    sections = {
        "Result": _result(folder),
        "Warnings": _warnings(folder),
        "Learning": _learning(run),
        "Verdicts and responses": _responses(folder),
        "Replay": _replay(run),
        "How to repeat it": _repeat(run),
        "Versions": _versions(run),
    }
    try:
        config = read_config(run)
        drawn = ", ".join(draw_names(config.replay).values())
        chosen = f"replay {drawn}" if config.replay.enabled else "no replay"
        asked = f"questions {Path(config.data.train).name}, seed {config.run.seed}, {chosen}"
        subtitle = f"{config.run.method} on {config.backbone.name}, {asked}."
    except InputError:
        subtitle = "Its settings cannot be read."
    shown = {title: list(as_far_as_possible(blocks)) for title, blocks in sections.items()}
    return Page(
        title=f"Run {name}",
        subtitle=subtitle,
        sections={title: blocks for title, blocks in shown.items() if blocks},
        footer=f"Made by exgrpo report from {name}/: everything on this page is in that folder.",
    )


SCORE: tables.Columns = {
    "": tables.of("when"),
    "pass@1": tables.of("pass_at_1", tables.number),
    "95 % interval": lambda score: f"{score['low']:.3f} to {score['high']:.3f}",
    "questions": tables.of("questions", tables.count),
    "samples each": tables.of("samples"),
    "beside it": lambda score: remarks(score).removeprefix("; ") or "-",
}
COSTS: tables.Columns = {
    "steps": tables.of("steps", tables.count),
    "tokens generated": tables.of("tokens.generated", tables.count),
    "tokens trained on": tables.of("tokens.trained", tables.count),
    "peak memory": tables.of("peak_memory_bytes", lambda num: f"{num / 2**30:.2f} GiB"),
    "trajectories replayed": tables.of("replay.used", tables.count),
    "questions in the buffer": tables.of("replay.questions", tables.count),
    "questions retired": tables.of("replay.retired", tables.count),
}


def _result(folder: RunFolder) -> Iterator[Block]:
    if not folder.summary.is_file():
        steps = max(read_metrics(folder.path).steps, default=0)
        yield Paragraph(f"Not finished: {steps} steps on record. The final figures are not known yet.")
        return
    summary = read_summary(folder.summary)
    yield Paragraph(f"Finished after {summary['steps']} steps: {summary['finished']}.")
    heldout = summary["heldout"]
    scores = [{"when": f"{name} training", **heldout[name]} for name in ("before", "after") if heldout[name]]
    if scores:
        yield tables.table_of(f"Held-out questions: {heldout['set']}", SCORE, scores, words=True)
    else:
        yield Paragraph("No held-out questions: the run was not validated.")
    yield tables.facts_table("Cost and replay", COSTS, {"whole run": summary})
    seconds = dict(sorted(summary["wall_seconds"].items(), key=lambda phase: -phase[1]))
    total = max(seconds["total"], 1e-9)
    times = [[name, f"{value:,.1f}", f"{value / total:.0%}"] for name, value in seconds.items()]
    yield tables.listing("Where the time went", ["phase", "seconds", "share"], times)


def _warnings(folder: RunFolder) -> Iterator[Block]:
    yield from map(warning, found) if (found := list(_remarks(folder))) else [Paragraph("None.")]


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
        yield tables.listing("Shares of all graded rollouts", header, rows)
    shown = {True: 0, False: 0}
    for path in sorted(folder.samples.glob("step-*.jsonl"), reverse=True)[:SAMPLE_FILES]:
        for row in read_json_lines(path):
            require_shape(row, SAMPLE, str(path))
            good = row["reward"] > 0
            shown[good] += 1
            if shown[good] <= RESPONSES_SHOWN:
                replayed = ", replayed question" if row["experiential"] else ""
                facts = f"{row['verdict']}, {row['num_tokens']} tokens, {path.stem}{replayed}"
                yield Response(row["prompt"], row["answer"], row["text"], facts, good)


def _verdicts(metrics: RunMetrics) -> list[list[str]]:
    """Share of each verdict over all steps, the first tenth of them and the last."""
    names, tenth = metrics.names("verdict/"), max(1, len(metrics.steps) // 10)
    rows = [[name.removeprefix("verdict/").replace("_", " ")] for name in names]
    for stretch in (slice(None), slice(None, tenth), slice(-tenth, None)):
        sums = np.array([metrics.series(name)[stretch].sum() for name in names])
        for row, share in zip(rows, sums / max(sums.sum(), 1), strict=True):
            row.append(f"{share:.1%}")
    return rows


def _replay(run: Path) -> Iterator[Block]:
    if read_config(run).replay.enabled:
        told = statistics.summarise(read_run(run))
        yield tables.overview({run.resolve().name: told})
        yield tables.entropies(told)
        for name, figure in statistics.replay_figures(told):
            yield figure_block(name, figure, statistics.CAPTIONS[name])
        yield Paragraph("exgrpo replay-stats RUN --step N shows what a step replayed, with the responses.")


def _repeat(run: Path) -> Iterator[Block]:
    config, name = read_config(run), run.resolve().name
    yield Paragraph(f"exgrpo train --config {name}/config.toml --output {name}-again", "code")
    preset = f"backbone {config.backbone.name} with method {config.run.method}"
    yield settings_block(differing_settings(config), preset)


def settings_block(changed: Sequence[Sequence[str]], preset: str) -> Block:
    """Settings that differ from those of a preset, of which `preset` are the words."""
    if not changed:
        return Paragraph(f"All settings are those of {preset}.")
    caption = f"Settings that differ from those of {preset}"
    return tables.listing(caption, ["setting", "here", "preset"], changed, words=True)


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
    # A method of another composition has other keys of replay.
    theirs = flat(usual)
    return [
        [name, str(value), str(theirs.get(name, tables.NO_VALUE))]
        for name, value in flat(config).items()
        if value != theirs.get(name) and name not in PINNED
    ]


def _versions(run: Path) -> Iterator[Block]:
    environment = read_json(run / "environment.json", {"packages?": dict})
    versions = {**environment.pop("packages", {}), **environment}
    rows = [[name, str(value)] for name, value in versions.items() if value]
    yield tables.listing("", ["package", "version"], rows, words=True)
