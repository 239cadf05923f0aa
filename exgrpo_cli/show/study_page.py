"""The page of a study: arms against their baselines, at equal steps and equal tokens, with each arm's ledger."""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from exgrpo_cli.base.errors import DamageWarning, InputError
from exgrpo_cli.runs.folder import RunFolder
from exgrpo_cli.runs.manifest import CHECKSUMS_FILE, find_changes
from exgrpo_cli.runs.result import RunResult
from exgrpo_cli.show import statistics, tables
from exgrpo_cli.show.page import (
    NOT_SHOWN,
    REPORT_FILE,
    Block,
    Page,
    Paragraph,
    as_far_as_possible,
    figure_block,
    warning,
    write_page,
)
from exgrpo_cli.show.record import LEDGER_FOLDER, read_config, read_run
from exgrpo_cli.show.run_page import differing_settings, is_run, run_page, settings_block
from exgrpo_cli.studies.claims import claim_outcomes
from exgrpo_cli.studies.output import (
    TITLE,
    claim_rows,
    endpoint_rows,
    rich_table,
    score_rows,
    spending_rows,
    study_figures,
)
from exgrpo_cli.studies.report import compare_runs
from exgrpo_cli.studies.study import BASELINE, PLAN_FILE, Arm, Study, StudyRun, differing_keys, kept_results, read_plan

CAPTIONS = {
    "ablation": "Held-out pass@1 after training: mean over seeds with its 95 % interval; circles are seeds.",
    "differences": "The same seed with and without: an interval that leaves out 0 speaks for a difference.",
    "curves": "Held-out pass@1 over the steps; bands are 95 % intervals over seeds.",
    "curves-tokens": "The same against tokens generated: arms of equal steps differ in what they cost.",
    "memorising": "pass@1 of training and held-out questions before and after training, means over seeds; over each "
    "panel the distinct questions rolled out.",
    "claims": "The contrasts of each claim with their 95 % intervals; the bar is what an effect must exceed.",
}


def write_report(folder: Path, path: Path | None = None) -> Path:
    """Write the page of a run or a study to `path` (FOLDER/report.html) and return where it is.

    Warns of files that are not as the runs wrote them, and of sections not shown whole. Raises InputError for a folder
    that is neither, RunError where the page cannot be written.
    """
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder. Name the --output folder of a run or of a study.")
    if is_run(folder):
        page, runs = run_page(folder), [folder]
    elif is_study(folder):
        page, runs = study_page(folder), sorted(file.parent for file in folder.glob(f"*/seed-*/{CHECKSUMS_FILE}"))
    else:
        raise InputError(f"{folder} is neither a run (no config.toml) nor a study (no ARM/seed-N/config.toml).")
    path = path or folder / REPORT_FILE
    write_page(page, path)
    gaps = [change for run in runs for change in find_changes(run)]
    gaps += [
        f"{title} not shown: {block.text.removeprefix(NOT_SHOWN)}"
        for title, blocks in page.sections.items()
        for block in blocks
        if isinstance(block, Paragraph) and NOT_SHOWN in block.text
    ]
    for gap in gaps:
        warnings.warn(gap, DamageWarning, stacklevel=2)
    return path


def is_study(path: Path) -> bool:
    """Whether the folder holds runs as ARM/seed-N, or the plan of a study whose results came from elsewhere."""
    return (path / PLAN_FILE).is_file() or any(path.glob("*/seed-*/config.toml"))


def study_page(folder: Path) -> Page:
    """The page of a study folder, finished, running or with broken runs."""
    study, broken = read_study(folder)
    elsewhere = carried(study)
    finished = sum(run.state == "finished" for run in study.runs) + len(elsewhere)
    known = {(run.arm.name, run.seed) for run in study.runs} | elsewhere.keys()
    total = len(known) + len(broken) + len(not_begun(study))
    sections = {
        **({"Claims": _claims(study)} if study.claims else {}),
        "Result": _result(study),
        "Runs": _runs(study, broken),
        "Ledgers": _ledgers(study),
        "Arms": _arms(study),
    }
    return Page(
        title=f"Study {study.name}",
        subtitle=f"{len(study.arms)} arms, {len(study.seeds)} seeds, against "
        f"{', '.join(study.baselines) or 'no baseline'}: {finished} of {total} runs finished"
        f"{f', {len(elsewhere)} of them elsewhere' if elsewhere else ''}.",
        sections={title: list(as_far_as_possible(blocks)) for title, blocks in sections.items()},
        footer="Made by exgrpo report from the runs in this folder. Intervals of scores are Student's t over seeds, "
        "those of differences a bootstrap over seeds and questions.",
    )


def read_study(folder: Path) -> tuple[Study, list[tuple[Path, str]]]:
    """The study that the folder's runs make up, and the runs whose configuration cannot be read, with the reason.

    Arms are those that `study.json` tells; without it an arm is named by its folder, and the baseline is the on-policy
    one, where there is one.
    """
    runs, broken = [], []
    plan = read_plan(folder)
    by_folder = {arm.folder_name: arm for arm in plan.arms}
    for path in sorted(folder.glob("*/seed-*")):
        if not path.is_dir():
            continue
        try:
            config = read_config(path)
            seed = int(path.name.removeprefix("seed-"))
        except (InputError, ValueError) as error:
            broken.append((path, str(error)))
            continue
        arm = by_folder.get(path.parent.name) or Arm(name=path.parent.name, method=config.run.method)
        runs.append(StudyRun(arm=arm, seed=seed, folder=path, config=config))
    if not plan.arms and any(run.arm.name == BASELINE.name for run in runs):
        runs = [replace(run, arm=replace(run.arm, baseline=BASELINE.name)) for run in runs]
    arms = plan.arms or tuple(dict.fromkeys(run.arm for run in runs))
    others = kept_results(folder, plan.arms)
    study = Study(
        name=folder.resolve().name,
        folder=folder,
        arms=tuple(sorted(arms, key=lambda arm: arm.name != arm.baseline)),
        runs=tuple(runs),
        equal=plan.equal,
        claims=plan.claims,
        others=others,
        planned=frozenset((arm, seed) for arm, seeds in plan.seeds.items() for seed in seeds),
    )
    return study, broken


def carried(study: Study) -> dict[tuple[str, int], RunResult]:
    """Results by arm and seed of runs that have not finished here: they were made on another machine, or are gone."""
    here = {(run.arm.name, run.seed) for run in study.runs if run.state == "finished"}
    return {key: result for key, result in study.others.items() if key not in here}


def not_begun(study: Study) -> list[tuple[str, int]]:
    """Arm and seed of the runs that were asked for, have no folder yet, and were not made elsewhere."""
    folders = {arm.name: study.folder / arm.folder_name for arm in study.arms}
    return sorted(
        (arm, seed) for arm, seed in study.planned - study.others.keys() if not (folders[arm] / f"seed-{seed}").is_dir()
    )


def _claims(study: Study) -> Iterator[Block]:
    outcomes = claim_outcomes(study)
    yield rich_table(claim_rows(outcomes), "what the finished runs say")
    yield Paragraph("The effect is that of the contrast furthest from holding. How claims are stated: docs/claims.md.")


def _result(study: Study) -> Iterator[Block]:
    report = compare_runs(study)
    if not report.arms:
        yield Paragraph("No run has finished yet.")
        return
    yield from map(warning, report.warnings)
    yield rich_table(score_rows(report), TITLE)
    yield rich_table(endpoint_rows(report), "other endpoints, difference from the baseline in brackets")
    budgets = "budgets as the claims state" if study.claims else f"equal in {report.equal}"
    yield rich_table(spending_rows(report), f"spent, means over seeds; {budgets}")
    for name, figure in study_figures(study, report).items():
        yield figure_block(name, figure, CAPTIONS.get(name, ""))


def _runs(study: Study, broken: list[tuple[Path, str]]) -> Iterator[Block]:
    rows = [[run.arm.name, str(run.seed), run.state, str(run.config.run.steps)] for run in study.runs]
    for (arm, seed), result in sorted(carried(study).items()):
        rows.append([arm, str(seed), "finished elsewhere", str(result.totals.steps)])
    rows += [[arm, str(seed), "not begun", ""] for arm, seed in not_begun(study)]
    yield tables.listing("", ["arm", "seed", "state", "steps"], rows)
    for path, reason in broken:
        yield warning(f"{NOT_SHOWN}{path.parent.name}/{path.name} cannot be read: {reason}")
    if study.runs:
        yield Paragraph("Each run has a page of its own: exgrpo report STUDY/ARM/seed-N.")


def _ledgers(study: Study) -> Iterator[Block]:
    reports = {}
    keeping = [run for run in study.runs if run.config.replay.keeps_buffer and (run.folder / LEDGER_FOLDER).is_dir()]
    for run in filter(_has_stepped, keeping):
        try:
            reports[f"{run.arm.name}/{run.seed}"] = told = statistics.summarise(read_run(run.folder))
            if told["incomplete"]:
                yield warning(f"{NOT_SHOWN}of {run.arm.name}, seed {run.seed}, the rest: {told['incomplete']}")
        except InputError as error:
            yield warning(f"{NOT_SHOWN}{run.arm.name}, seed {run.seed}: {error}")
    if reports:
        yield tables.overview(reports)
    else:
        yield Paragraph("Nothing to show of a ledger yet." if keeping else "No arm keeps a ledger.")


def _has_stepped(run: StudyRun) -> bool:
    """Whether the run has made a step, even if its journal has gone since: before one there is nothing to miss."""
    folder = RunFolder(run.folder)
    return folder.metrics.is_file() or folder.summary.is_file() or any(folder.checkpoints.glob("step-*"))


def _arms(study: Study) -> Iterator[Block]:
    for arm in study.arms:
        configs = [run.config for run in study.runs if run.arm == arm]
        if not configs:
            settings = [*([f"regime {arm.regime}"] if arm.regime else []), *arm.assignments]
            yield Paragraph(", ".join([f"{arm.name}: method {arm.method}", *settings]) + ".")
            continue
        by_seed = set().union(*(differing_keys(configs[0], config) for config in configs[1:]))
        listed = {row[0]: row for config in configs for row in differing_settings(config) if row[0] != "run.seed"}
        rows = [[name, "by seed", *row[2:]] if name in by_seed else row for name, row in listed.items()]
        yield settings_block(rows, f"{arm.name}'s method {arm.method}")
    if study.runs:
        yield Paragraph(f"exgrpo train --config {study.name}/ARM/seed-N/config.toml --output again", "code")
