"""`exgrpo ablate`: arms x seeds, compared."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exgrpo_cli.commands.options import (
    ConfigOption,
    DebugOption,
    DryRunOption,
    JsonOption,
    OutputOption,
    QuietOption,
    SetOption,
    option_layer,
    print_json,
    talk,
)
from exgrpo_cli.commands.report import write_page
from exgrpo_cli.commands.train import lasting

if TYPE_CHECKING:
    from exgrpo_cli.ablation.arms import Arm
    from exgrpo_cli.ablation.report import StudyReport
    from exgrpo_cli.ablation.study import Study

STUDIES = Path("studies")


def ablate(
    metric: Annotated[
        str | None,
        typer.Option(help="Trajectory metric: one is compared min, max and random; a comma list is exactly those."),
    ] = None,
    sampler: Annotated[str | None, typer.Option(help="Question samplers, comma list.")] = None,
    methods: Annotated[str | None, typer.Option(help="Method presets or their files, comma list.")] = None,
    replay_from: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Experience for the methods that store none of their own.")
    ] = None,
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="Let a method's file run functions of yours (python:module:function).")
    ] = False,
    vary: Annotated[
        list[str] | None, typer.Option(metavar="SECTION.KEY=V1,V2", help="Values of one setting; repeatable.")
    ] = None,
    equal: Annotated[
        str | None,
        typer.Option(
            metavar="steps|generated|trained|seconds",
            help="What every arm spends as the baseline does, seed by seed.",
            show_default="generated with --methods, else steps",
        ),
    ] = None,
    seeds: Annotated[str, typer.Option(metavar="N|LIST", help="How many seeds, or which: 3, or 0,1,5.")] = "3",
    name: Annotated[str | None, typer.Option(help="Name of the study.", show_default="from the arms")] = None,
    jobs: Annotated[int, typer.Option(min=0, help="Runs at a time; 0 is what the cores carry, or one on a GPU.")] = 0,
    backbone: Annotated[
        str | None, typer.Option(help="Preset, model folder or hub id (owner/name).", show_default="tiny")
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="FILE", help="Training questions.", show_default="the backbone's")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of every run.", show_default="the backbone's")] = None,
    output: OutputOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
    dry_run: DryRunOption = False,
    quiet: QuietOption = False,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Compare arms over several seeds with the same question order, each against on-policy training.

    Without an axis: --metric ent. Finished runs are not run again; an interrupted study goes on with the same command.

    \b
    Examples:
      exgrpo ablate --metric ent
      exgrpo ablate --sampler normal,uniform --seeds 5
      exgrpo ablate --vary replay.ratio=0.25,0.5,0.75 --steps 100 --dry-run
    """
    from exgrpo_cli.ablation.study import plan_study

    if not (metric or sampler or methods or vary):
        metric = "ent"
    root, study_name = _place(output, name, _name_of(metric, sampler, methods, vary or []))
    options = option_layer({"run.steps": steps, "data.train": lasting(data)})
    study = plan_study(
        name=study_name,
        root=root,
        arms=_arms(metric, sampler, methods, vary or []),
        seeds=_seeds(seeds),
        backbone=backbone,
        config_file=config,
        options=options,
        assignments=assignments or [],
        equal=_equal(equal, with_methods=methods is not None),
        replay_from=replay_from,
        allow_code=allow_code,
    )
    if dry_run:
        _print_runs(study, json)
        return
    report = _run(study, jobs, quiet)
    print_json(report.to_json()) if json else _print_report(report, study.folder)
    write_page(study.folder, quiet=quiet)


def _place(output: Path | None, name: str | None, default: str) -> tuple[Path, str]:
    """Folder of studies and name of this one."""
    from exgrpo_cli.errors import InputError

    if output is None:
        return STUDIES, name or default
    if name is not None and name != output.name:
        raise InputError(f"--output {output} names the study {output.name!r}, --name {name!r}: leave one of them out.")
    return output.parent, output.name


def _equal(text: str | None, *, with_methods: bool) -> str:
    """What arms are equal in: methods differ in what a step costs, values of one setting hardly do."""
    from exgrpo_cli.ablation.study import EQUAL
    from exgrpo_cli.errors import InputError, nearest

    chosen = text or ("generated" if with_methods else "steps")
    if chosen not in EQUAL:
        raise InputError(f"--equal {chosen!r} is not known.{nearest(chosen, EQUAL)}")
    return chosen


def _name_of(metric: str | None, sampler: str | None, methods: str | None, vary: list[str]) -> str:
    axes = {"metric": metric, "sampler": sampler, "methods": methods}
    parts = [*(f"{axis}-{text}" for axis, text in axes.items() if text), *vary]
    return re.sub(r"[^A-Za-z0-9._=-]+", "-", "-".join(parts))


def _arms(metric: str | None, sampler: str | None, methods: str | None, vary: list[str]) -> "list[Arm]":
    from exgrpo_cli.ablation.arms import method_arms, metric_arms, sampler_arms, vary_arms

    makers = ((metric_arms, metric), (sampler_arms, sampler), (method_arms, methods), *((vary_arms, v) for v in vary))
    return [arm for make, text in makers if text for arm in make(text)]


def _seeds(text: str) -> list[int]:
    from exgrpo_cli.errors import InputError

    try:
        return [int(part) for part in text.split(",") if part.strip()] if "," in text else list(range(int(text)))
    except ValueError as error:
        raise InputError(f"--seeds {text!r} is neither a number of seeds nor a list such as 0,1,5.") from error


def _run(study: "Study", jobs: int, quiet: bool) -> "StudyReport":
    from exgrpo_cli.ablation.report import report_study
    from exgrpo_cli.ablation.schedule import run_study
    from exgrpo_cli.console.reporter import make_reporter
    from exgrpo_cli.machine.run_plan import plan_run, require_runnable, settle_ranks
    from exgrpo_cli.machine.survey import survey_machine

    machine = survey_machine()
    require_runnable(plan_run(settle_ranks(study.runs[0].config, machine), machine))
    reporter = make_reporter(quiet=quiet)
    try:
        run_study(study, jobs=jobs, reporter=reporter)
    finally:
        reporter.close()
    return report_study(study)


def _print_runs(study: "Study", json: bool) -> None:
    plan = study.describe()
    if json:
        print_json(plan)
        return
    talk(f"study {plan['name']} in {plan['folder']}, against {plan['baseline']}:")
    for run in plan["runs"]:
        typer.echo(f"{run['arm']}\tseed {run['seed']}\t{run['steps']} steps\t{run['state']}\t{run['folder']}")


def _print_report(report: "StudyReport", folder: Path) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print(report.table())
    console.print(f"report, figures and runs in {folder}", soft_wrap=True, markup=False)
