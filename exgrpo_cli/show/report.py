"""Pages of a run and of a study, also of unfinished or broken ones.

A run's page tells what it was, how it went, what it replayed, how to repeat it; a study's sets arms against their
baselines, at equal steps and equal tokens.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import starmap
from pathlib import Path
from shlex import quote

import numpy as np

from exgrpo_cli.base import errors, types
from exgrpo_cli.base.files import NUMBER, Shape, read_json, read_json_lines, require_shape
from exgrpo_cli.config.layers import build_config
from exgrpo_cli.config.settings import PINNED, Config, flat, resolve
from exgrpo_cli.runs.folder import CHECKSUMS_FILE, REPORT_FILE, RunFolder, read_metrics
from exgrpo_cli.runs.result import read_summary, remarks
from exgrpo_cli.runs.validations import read_validations
from exgrpo_cli.show import page, queries, statistics, tables
from exgrpo_cli.show.figures import run as figures
from exgrpo_cli.show.figures.style import WORDS
from exgrpo_cli.show.headline import run_headline, study_headline
from exgrpo_cli.show.record import RunRecord, changes, keeps_experience, read_config, read_run
from exgrpo_cli.studies import claims, endpoints, measure, output
from exgrpo_cli.studies.report import Numbers, compare_runs
from exgrpo_cli.studies.study import PLAN_FILE, Study, carried, differing_keys, read_study
from exgrpo_cli.training.step.guards import Guards

TEXTS: Shape = dict.fromkeys(("prompt", "answer", "text", "verdict"), str)
SAMPLE: Shape = TEXTS | {"reward": NUMBER, "num_tokens": int, "experiential": bool}
"""Keys of a row of samples/ that are shown."""
RESPONSES_SHOWN = 3
"""Right ones and wrong ones, each."""
ABREAST = 4
"""Arms beside each other in a table that fits a screen."""
SAMPLE_FILES = 20
"""Files of the newest steps, in which responses are looked for."""


def write_report(folder: Path, path: Path | None = None) -> Path:
    """Write the page of a run or a study to `path` (FOLDER/report.html) and return where it is.

    Warns of files that are not as the runs wrote them, and of sections not shown whole. Raises InputError for a folder
    that is neither, RunError where the page cannot be written.
    """
    if is_run(folder):
        whole, runs = run_page(folder, linked=path is None), [folder]
    elif os.path.lexists(folder / PLAN_FILE) or any(folder.glob("*/seed-*/config.toml")):
        whole = study_page(folder, linked=path is None)
        runs = sorted(file.parent for file in folder.glob(f"*/seed-*/{CHECKSUMS_FILE}"))
    else:
        raise errors.InputError(f"{folder} is neither a run (no config.toml) nor a study (no ARM/seed-N/config.toml).")
    path = path or folder / REPORT_FILE
    page.write_page(whole, path)
    gaps = [change for run in runs for change in changes(run)]
    gaps += [
        f"{title} not shown: {block.text.removeprefix(page.NOT_SHOWN)}"
        for title, blocks in whole.sections.items()
        for block in blocks
        if isinstance(block, page.Paragraph) and page.NOT_SHOWN in block.text
    ]
    for gap in gaps:
        warnings.warn(gap, errors.DamageWarning, stacklevel=2)
    return path


def is_run(path: Path) -> bool:
    """Whether the folder is one that a run has begun to write."""
    return (path / "config.toml").is_file() or (path / "metrics.jsonl").is_file()


def run_page(run: Path, *, linked: bool = False) -> page.Page:
    """The page of a run folder, each section as far as its files allow; `linked` to its files where it lies there."""
    folder, name = RunFolder(run), run.resolve().name
    # Of a run that has a ledger; read once, by the part that comes first.
    record = cache(lambda: read_run(run))
    files = page.Links({file: words for file, words in WORDS["files"].items() if (run / file).exists()}, linked)
    sections: dict[str, Sequence[Iterator[page.Block]]] = {
        "Result": (starmap(page.figure_block, figures.training_figures(run, ("learning",))), _result(folder)),
        "Warnings": (map(page.warning, map(_sentence, _remarks(folder, record))),),
        "Training": (starmap(page.figure_block, figures.training_figures(run, figures.TRAINING[1:])),),
        "Replay": (_replay(run, record),),
        "Verdicts and responses": (_responses(folder),),
        "How to repeat it": (_repeat(run),),
        "Files": (iter([files]),),
        "Versions": (_versions(run),),
    }
    try:
        config = read_config(run)
        drawn = ", ".join(f"{kind} {rule}" for kind, rule in queries.draw_names(config.replay).items())
        subtitle = f"Seed {config.run.seed}, {f'replay by {drawn}' if config.replay.enabled else 'no replay'}."
        headline = run_headline(run)
    except (errors.ExgrpoError, OSError) as error:
        headline, subtitle = f"Run {name} cannot be read whole.", f"{page.NOT_SHOWN}{error}"
    footer = f"Made by exgrpo report from {name}/: everything on this page is in that folder."
    return page.Page(f"Run {name}", headline, subtitle, page.gather(sections), footer)


SCORE = tables.declared("score", {"95 % interval": lambda score: f"{score['low']:.3f} to {score['high']:.3f}"})
COSTS = tables.declared("costs", {"peak memory": tables.of("peak_memory_bytes", lambda num: f"{num / 2**30:.2f} GiB")})


def _result(folder: RunFolder) -> Iterator[page.Block]:
    if not folder.summary.is_file():
        steps = max(read_metrics(folder.path).steps, default=0)
        yield page.Paragraph(f"Not finished: {steps} steps on record. The final figures are not known yet.")
        return
    summary = read_summary(folder.summary)
    heldout = summary["heldout"]
    scores = {f"{name} training": heldout[name] for name in ("before", "after") if heldout[name]}
    if scores:
        yield tables.facts_table(f"Held-out questions ({heldout['set']})", SCORE, scores)
    yield tables.facts_table(f"Cost and replay (ended: {summary['finished']})", COSTS, {"whole run": summary})
    for when, score in scores.items():
        if also := remarks(score).removeprefix("; "):
            yield page.Paragraph(f"{when.capitalize()}: {also}.")
    seconds = dict(sorted(summary["wall_seconds"].items(), key=lambda phase: -phase[1]))
    total = max(seconds["total"], 1e-9)
    times = [[name, f"{value:,.1f}", f"{value / total:.2f}"] for name, value in seconds.items()]
    yield tables.listing("Where the time went", ["phase", "seconds", "share"], times)


def _remarks(folder: RunFolder, record: Callable[[], RunRecord]) -> Iterator[str]:
    """Changed files, fired guards, falls of the held-out score, a damaged ledger, skipped updates."""
    yield from (f"{change}: restore it from a copy." for change in changes(folder.path))
    guards = Guards()
    for line in folder.metrics_lines():
        yield from guards.check(line)
    validations = read_validations(folder.path)
    yield from filter(None, (measure.new_fall(validations[:number]) for number in range(2, len(validations) + 1)))
    if keeps_experience(folder.path) and (incomplete := record().incomplete):
        warnings.warn(f"{folder.path}: {incomplete}", errors.DamageWarning, stacklevel=2)
        yield incomplete
    skipped = read_metrics(folder.path).series("optim/updates_skipped")
    if total := int(skipped[skipped > 0].sum()):
        yield f"{total} updates were skipped; metrics.jsonl says why."


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def _responses(folder: RunFolder) -> Iterator[page.Block]:
    metrics = read_metrics(folder.path)
    names, tenth = metrics.names("verdict/"), max(1, len(metrics.steps) // 10)
    shares = [[name.removeprefix("verdict/").replace("_", " ")] for name in names]
    for stretch in (slice(None), slice(None, tenth), slice(-tenth, None)):
        sums = np.array([metrics.series(name)[stretch].sum() for name in names])
        for cells, share in zip(shares, sums / max(sums.sum(), 1), strict=True):
            cells.append(f"{share:.3f}")
    if shares:
        header = ["verdict", "all steps", "first tenth", "last tenth"]
        yield tables.listing("Shares of all graded rollouts", header, shares)
    shown = {True: 0, False: 0}
    for path in sorted(folder.samples.glob("step-*.jsonl"), reverse=True)[:SAMPLE_FILES]:
        for row in read_json_lines(path):
            require_shape(row, SAMPLE, str(path))
            good = row["verdict"] == types.Verdict.CORRECT
            shown[good] += 1
            if shown[good] <= RESPONSES_SHOWN:
                replayed = ", replayed question" if row["experiential"] else ""
                parts = "".join(f", {name} {value:g}" for name, value in row.get("parts", {}).items())
                worth = f", reward {row['reward']:g}{parts}" if parts or row["reward"] not in (0, 1) else ""
                facts = f"{row['verdict']}{worth}, {row['num_tokens']} tokens, {path.stem}{replayed}"
                yield page.Response(row["prompt"], row["answer"], row["text"], facts, good)


def _replay(run: Path, record: Callable[[], RunRecord]) -> Iterator[page.Block]:
    if read_config(run).replay.enabled:
        told = statistics.summarise(record())
        yield page.Paragraph(WORDS["sections"]["Replay"])
        yield tables.overview({run.resolve().name: told})
        yield from starmap(page.figure_block, statistics.replay_figures(told))
        if told["entropy"]["by_bucket"]:
            yield tables.entropies(told)
        yield page.Paragraph("exgrpo replay-stats RUN --step N shows what a step replayed, with the responses.")


def _repeat(run: Path) -> Iterator[page.Block]:
    config, again = read_config(run), quote(f"runs/{run.resolve().name}-again")
    yield page.Paragraph(f"exgrpo train --config {_place(run)}/config.toml --output {again}", "code")
    yield settings_block(differing_settings(config), f"backbone {config.backbone.name} with method {config.run.method}")


def _place(folder: Path) -> str:
    """Path of a folder from the working folder, for a shell; of one elsewhere its name, since others may read it."""
    place = os.path.relpath(folder)
    return quote(folder.resolve().name if place.startswith("..") else place)


def settings_block(changed: Sequence[Sequence[str]], preset: str) -> page.Block:
    """Settings that differ from those of a preset, of which `preset` are the words."""
    if not changed:
        return page.Paragraph(f"All settings are those of {preset}.")
    caption = f"Settings that differ from those of {preset}"
    return tables.listing(caption, ["setting", "here", "preset"], changed, words=True)


def differing_settings(config: Config) -> list[list[str]]:
    """Settings that the presets of the run's backbone and method do not give: name, value here, value there.

    Left out are those that every run settles when it starts.
    """
    try:
        usual = build_config(backbone=config.backbone.name, method=config.run.method)
    except errors.InputError:
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


def _versions(run: Path) -> Iterator[page.Block]:
    environment = read_json(run / "environment.json", {"packages": dict})
    versions = {**environment.pop("packages"), **environment}
    rows = [[name, str(value)] for name, value in versions.items() if value]
    yield tables.listing("", ["package", "version"], rows, words=True)


def study_page(folder: Path, *, linked: bool = False) -> page.Page:
    """The page of a study folder, finished, running or with broken runs; `linked` to its runs where it lies there."""
    study, broken = read_study(folder)
    states, elsewhere = _run_states(study), carried(study)
    finished = sum(state.startswith("finished") for state, _ in states.values())
    report = compare_runs(study)
    sections = {
        **({"Claims": (_claims(study),)} if study.claims else {}),
        "Result": (_comparison(study, report),),
        "Runs": (_runs(study, broken, linked),),
        "Arms": (_arms(study),),
    }
    return page.Page(
        title=f"Study {study.name}",
        headline=study_headline(report, seeds_needed=endpoints.SEEDS_FOR_A_VERDICT),
        subtitle=f"{len(study.arms)} arms, {len(study.seeds)} seed{'s' * (len(study.seeds) != 1)}, against "
        f"{', '.join(study.baselines) or 'no baseline'}: {finished} of {len(states) + len(broken)} runs finished"
        f"{f', {len(elsewhere)} of them elsewhere' if elsewhere else ''}.",
        sections=page.gather(sections),
        footer="Made by exgrpo report from the runs in this folder. Intervals of scores are Student's t over seeds, "
        "those of differences are over seeds and questions.",
    )


def _run_states(study: Study) -> dict[tuple[str, int], tuple[str, str]]:
    """State and steps by arm and seed of the runs here, of those made elsewhere, and of those without a folder yet."""
    runs = {(run.arm.name, run.seed): run for run in study.runs}
    taken = {key: done.totals.steps for key, run in runs.items() if (done := run.read_result())}
    states = {key: (run.state, str(taken.get(key, run.config.run.steps))) for key, run in runs.items()}
    states |= {key: ("finished elsewhere", str(result.totals.steps)) for key, result in sorted(carried(study).items())}
    folders = {arm.name: study.folder / arm.folder_name for arm in study.arms}
    missing = sorted(study.planned - states.keys())
    return states | {key: ("not begun", "") for key in missing if not (folders[key[0]] / f"seed-{key[1]}").is_dir()}


def _claims(study: Study) -> Iterator[page.Block]:
    yield output.rich_table(output.claim_rows(claims.claim_outcomes(study).values()), "What the finished runs say")
    yield page.Paragraph(output.READ_CLAIMS)


def _comparison(study: Study, report: Numbers) -> Iterator[page.Block]:
    if not report["arms"]:
        yield page.Paragraph("No run has finished yet.")
        return
    blocks = {name: page.figure_block(name, figure) for name, figure in output.study_figures(study, report).items()}
    yield from (blocks.pop(name) for name in ("curves", "differences") if name in blocks)
    yield from map(page.warning, map(_sentence, report["warnings"]))
    yield from _abreast(output.score_rows(report), f"Arms: {output.TITLE}")
    yield page.Paragraph(WORDS["sections"]["Arms"])
    yield page.Paragraph(output.chance_remark(report))
    yield from _abreast(output.endpoint_rows(report), "Other endpoints, difference from the baseline in brackets")
    yield from _abreast(output.spending_rows(report), f"Spent, means over seeds; {output.budgets(study)}")
    yield from blocks.values()


def _abreast(rows: output.Rows, title: str) -> Iterator[page.Block]:
    """Tables of a few arms beside each other, so that they fit a screen."""
    turned = [row for row in zip(*rows, strict=True) if any(row[1:])]
    for first in range(1, len(rows), ABREAST):
        yield output.rich_table([[row[0], *row[first : first + ABREAST]] for row in turned], title)


def _runs(study: Study, broken: list[tuple[Path, str]], linked: bool) -> Iterator[page.Block]:
    rows = [[arm, str(seed), *state] for (arm, seed), state in _run_states(study).items()]
    yield tables.listing("", ["arm", "seed", "state", "steps"], rows)
    for path, reason in broken:
        yield page.warning(f"{page.NOT_SHOWN}{path.parent.name}/{path.name}: {reason}")
    if elsewhere := carried(study):
        lacking = f"settings and buffers of {len(elsewhere)} of {len(rows)} runs"
        yield page.warning(f"{page.NOT_SHOWN}{lacking}, of which the results alone are here (--results)")
    folders = [run.folder.relative_to(study.folder) for run in study.runs]
    yield page.Links({f"{folder}/": "the run" for folder in folders}, linked)
    if study.runs:
        buffers = "Buffers: exgrpo replay-stats STUDY/ARM/seed-*"
        yield page.Paragraph(f"A run's own page: exgrpo report STUDY/ARM/seed-N. {buffers}")


def _arms(study: Study) -> Iterator[page.Block]:
    for arm in study.arms:
        configs = [run.config for run in study.runs if run.arm == arm]
        if not configs:
            settings = [*([f"regime {arm.regime}"] if arm.regime else []), *arm.assignments]
            yield page.Paragraph(", ".join([f"{arm.name}: method {arm.method}", *settings]) + ".")
            continue
        by_seed = set().union(*(differing_keys(configs[0], config) for config in configs[1:]))
        listed = {row[0]: row for config in configs for row in differing_settings(config) if row[0] != "run.seed"}
        rows = [[name, "by seed", *row[2:]] if name in by_seed else row for name, row in listed.items()]
        yield settings_block(rows, f"{arm.name}'s method {arm.method}")
    if study.runs:
        settings_file = f"{_place(study.folder)}/ARM/seed-N/config.toml"
        yield page.Paragraph(f"exgrpo train --config {settings_file} --output again", "code")
