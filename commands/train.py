"""`exgrpo train`: train a backbone."""

import os
import shlex
import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Literal

import typer

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.commands import cli
from exgrpo_cli.commands.report import write_page
from exgrpo_cli.config.requests import RunRequest

if TYPE_CHECKING:
    from exgrpo_cli.base.reporter import Reporter
    from exgrpo_cli.machine.settle import Plan
    from exgrpo_cli.ranks import Ranks
    from exgrpo_cli.training.start import RunStart


@cli.with_options
def train(
    request: RunRequest,
    speech: cli.Speech,
    time_limit: str | None = None,
    dry_run: bool = False,
    check: bool = False,
    launcher: Literal["local", "slurm"] | None = None,
    gpu: str | None = None,
) -> None:
    """Train a model (the backbone) with ExGRPO, or with another method.

    Without any option: the built-in tiny model learns arithmetic on the CPU in minutes.

    \b
    Examples:
      exgrpo train
      exgrpo train --method grpo --seed 1 --output runs/baseline
      exgrpo train --regime hard-tail
      exgrpo train --backbone qwen-math-1.5b --dry-run
      exgrpo train --backbone qwen-math-7b --dry-run --gpu 8x80
      exgrpo train --backbone qwen-math-1.5b --check
      exgrpo train --data mine.jsonl --heldout 0.1
      exgrpo train --resume --output runs/baseline --steps 300
      exgrpo train --backbone qwen-math-7b --launcher slurm --config cluster.toml
    """
    from exgrpo_cli.base.reporter import make_reporter
    from exgrpo_cli.machine.survey import cards_of
    from exgrpo_cli.runs.folder import RunFolder
    from exgrpo_cli.runs.result import read_summary
    from exgrpo_cli.runs.watchdog import TimeLimit
    from exgrpo_cli.training import start as core

    if check and dry_run:
        raise InputError("--check measures two steps, --dry-run starts nothing: leave one of them out.")
    if gpu is not None and (not dry_run or launcher == "slurm"):
        raise InputError(f"--gpu {gpu} is for the plan of this host: add --dry-run, and leave --launcher slurm out.")
    cards = () if gpu is None else cards_of(gpu)
    until = None if time_limit is None else TimeLimit.parse(time_limit)
    start = core.plan_start(cli.with_run(request))
    if not start.resume and "RANK" not in os.environ:
        # Before the headline; of several ranks the first one makes the folder.
        RunFolder.check_new(start.folder)
    if launcher == "slurm":
        nproc = request.options.get("run", {}).get("nproc")
        for name, given in (("--check", check), ("--time-limit", time_limit), ("--nproc", nproc)):
            if given:
                raise InputError(f"{name} is for this host: leave it out; [slurm] of --config says what it asks for.")
        _launch(start, request, speech, dry_run=dry_run)
        return
    # Rank 0 of those that a launcher has started, or the only process.
    speaks = os.environ.get("RANK", "0") == "0"
    if start.lacks_page and not (dry_run or check):
        if speaks:
            cli.talk(f"exgrpo: {start.folder} has finished its steps, its page is written", quiet=speech.quiet)
            _end(start, read_summary(start.folder / "summary.json"), speech)
        return
    cli.talk(start.line(), quiet=speech.quiet or dry_run or check or not speaks)
    silent = speech.quiet or dry_run or not speaks
    with make_reporter(quiet=silent) as reporter, (ranks := _load(reporter)).together():
        from exgrpo_cli.machine.settle import require_runnable, settle
        from exgrpo_cli.machine.survey import survey_machine

        machine = survey_machine(look_for_gpus=not cards)
        machine = replace(machine, gpus=cards or machine.gpus)
        config, plan = settle(start.config, machine, ranks, fetch=not dry_run)
        if dry_run or check:
            # Questions are not what a check measures, but one that is well says that the run can start.
            for note in core.check_start(start):
                cli.talk(note, quiet=not speaks)
        if dry_run:
            _print_plan(start, plan, speech.json, speaks=speaks)
            return
        if plan.missing:
            cli.talk("\n".join(plan.lines()), quiet=speech.quiet or not speaks)
        require_runnable(plan)
        if config.run.nproc > 1 and not ranks.launched:
            reporter.close()
            # Not typer.Exit: the ranks have said what there is to say.
            others = [] if time_limit is None else ["--time-limit", time_limit]
            others += ["--check"] if check else []
            sys.exit(core.train_in_ranks(start, config, [*speech.flags(), *others]))
        if check:
            from exgrpo_cli.training.check import check_run, report_lines

            report = check_run(plan, reporter=reporter, ranks=ranks)
            reporter.close()
            if speaks:
                cli.print_json(report) if speech.json else cli.write_data("\n".join(report_lines(report)))
            if not report["well"]:
                raise typer.Exit(1)
            return
        from exgrpo_cli.training.run import train as train_run

        summary = train_run(
            config, start.folder, resume=start.resume, reporter=reporter, ranks=ranks, time_limit=until, plan=plan
        )
        reporter.close()
        if speaks:
            _end(start, summary, speech)


def _load(reporter: "Reporter") -> "Ranks":
    """The ranks of this run, once what takes its time to import is there."""
    reporter.phase("loading libraries")
    from exgrpo_cli.ranks import Ranks

    return Ranks.of_environment()


def _launch(start: "RunStart", request: RunRequest, speech: cli.Speech, *, dry_run: bool) -> None:
    from exgrpo_cli.base.files import read_json
    from exgrpo_cli.base.reporter import make_reporter
    from exgrpo_cli.studies.schedule import launch_run, script, slurm_settings, study_of_one
    from exgrpo_cli.training.start import check_start

    check_start(start)
    study = study_of_one(start.config, start.folder)
    settings = slurm_settings(request.config_file, allow_code=request.allow_code)
    if dry_run:
        cli.write_data(script(study, settings), end="")
        return
    cli.talk(start.line(), quiet=speech.quiet)
    with make_reporter(quiet=speech.quiet) as reporter:
        launch_run(study, settings, reporter=reporter)
    _end(start, read_json(start.folder / "summary.json", {"steps": int}), speech)


def _print_plan(start: "RunStart", plan: "Plan", json: bool, *, speaks: bool) -> None:
    """The configuration as TOML with the plan as comments, so that the output is a file for `--config`.

    It leaves open what a run settles by its machine.
    """
    from exgrpo_cli.config.settings import to_toml

    if speaks and json:
        cli.print_json({"config": asdict(start.config), "plan": plan.to_json()})
    elif speaks:
        cli.write_data("\n".join(f"# {line}" for line in plan.lines()) + f"\n\n{to_toml(start.config)}", end="")


def _end(start: "RunStart", summary: dict[str, Any], speech: cli.Speech) -> None:
    if start.config.run.plots:
        write_page(start.folder, quiet=speech.quiet)
    if speech.json:
        cli.print_json(summary)
        return
    _print_result(summary, start)
    cli.talk("\n".join(["", "Go on with:", *_next_commands(start)]), quiet=speech.quiet)


def _print_result(summary: dict[str, Any], start: "RunStart") -> None:
    """The end of a run for people: what was learnt, what it took, and where it lies."""
    from exgrpo_cli.runs.result import how_asked, learnt, measures

    tokens, replay, heldout, folder = summary["tokens"], summary["replay"], summary["heldout"], start.folder
    scores = {when: measures(heldout[when]) for when in ("before", "after") if heldout[when]}
    if scores:
        how = how_asked(heldout["after"] or heldout["before"], heldout["set"], start.config.validation.temperature)
        cli.write_text(f"{learnt(heldout)}; {how}\n")
        table = [("", *(f"{when} training" for when in scores))]
        for name in {**scores.get("before", {}), **scores.get("after", {})}:
            table.append((name, *(found.get(name, ("",))[0] for found in scores.values())))
        cli.write_data("\n".join("  ".join(f"{cell:<20}" for cell in row).rstrip() for row in table))
    spent = f"{tokens['generated']:,} tokens generated, {tokens['trained']:,} trained on"
    memory = f"{summary['peak_memory_bytes'] / 2**30:.2f} GiB of memory at most"
    cli.write_text(f"\n{summary['steps']} steps in {summary['wall_seconds']['total']:.0f} s: {spent}, {memory}")
    if replay["used"] or replay["trajectories"]:
        stored = f"{replay['trajectories']:,} rollouts are stored now, {replay['retired']:,} questions are retired"
        cli.write_text(f"{replay['used']:,} draws from the buffer; {stored}")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    there = [name for name in ("report.html", "model", "plots", "checkpoints") if (folder / name).exists()]
    page = "; open its page report.html in a browser" if "report.html" in there else ""
    large = f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"
    cli.write_text(f"It all lies in {folder} ({large}): {', '.join(there)}{page}")


def _next_commands(start: "RunStart") -> list[str]:
    """Three lines to go on with: ask the model, look at what was replayed, and compare with another method."""
    from exgrpo_cli.base.files import read_json_lines
    from exgrpo_cli.presets import load_preset, preset_names

    config, run, steps = start.config, shlex.quote(str(start.folder)), start.config.run.steps
    last = max(start.folder.glob("samples/*.jsonl"), default=None)
    asked = min((" ".join(line["prompt"].split()) for line in read_json_lines(last)), key=len) if last else "1+1=?"
    look = f"look into its buffer  exgrpo replay-stats {run}"
    more = f"train on              exgrpo train --resume --output {run} --steps {2 * steps}"
    known = config.backbone.name in preset_names("backbones") and config.run.method in preset_names("methods")
    if known and load_preset("backbones", config.backbone.name)["data"]["train"] == config.data.train:
        methods = ",".join(dict.fromkeys(("grpo", config.run.method, "exgrpo")))
        arms = f"--methods {methods} --backbone {config.backbone.name} --steps {steps}"
        more = f"compare methods       exgrpo ablate {arms}"
    return [f"  ask the model         exgrpo sample {run} {shlex.quote(asked)}", f"  {look}", f"  {more}"]
