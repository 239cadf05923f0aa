"""`exgrpo train`: train a backbone."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from exgrpo_cli.commands.options import (
    ConfigOption,
    DebugOption,
    DryRunOption,
    JsonOption,
    OutputOption,
    QuietOption,
    SeedOption,
    SetOption,
    option_layer,
    print_json,
    talk,
)
from exgrpo_cli.commands.report import write_page

if TYPE_CHECKING:
    from exgrpo_cli.config.settings import Config
    from exgrpo_cli.machine.run_plan import RunPlan
    from exgrpo_cli.ranks.ranks import Ranks

RUNS = Path("runs")


def train(
    backbone: Annotated[
        str | None, typer.Option(help="Preset, model folder or hub id (owner/name).", show_default="tiny")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="exgrpo, grpo, another method preset, or a TOML file.", show_default="exgrpo")
    ] = None,
    as_published: Annotated[
        bool, typer.Option("--as-published", help="With what the method's paper changed besides its replay.")
    ] = False,
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="Let a method's file run functions of yours (python:module:function).")
    ] = False,
    data: Annotated[
        str | None, typer.Option(metavar="FILE", help="Training questions.", show_default="the backbone's")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Rollout batches.", show_default="the backbone's")] = None,
    rollout: Annotated[
        Literal["hf", "vllm"] | None, typer.Option(help="Rollout engine.", show_default="the backbone's")
    ] = None,
    engine: Annotated[
        Literal["torch", "deepspeed"] | None, typer.Option(help="Training engine.", show_default="the backbone's")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Ranks on this host.", show_default="one per visible GPU")
    ] = None,
    device: Annotated[
        Literal["cpu", "cuda"] | None, typer.Option(help="Where the model lives.", show_default="a GPU if visible")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --output.")] = False,
    output: OutputOption = None,
    seed: SeedOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
    replay_from: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Fill the buffer from another run's ledger.")
    ] = None,
    with_retired: Annotated[
        bool, typer.Option("--with-retired", help="Take that run's retired questions over as well.")
    ] = False,
    log: Annotated[
        list[str] | None, typer.Option(metavar="TRACKER", help="tensorboard or wandb, besides the journal; repeatable.")
    ] = None,
    dry_run: DryRunOption = False,
    quiet: QuietOption = False,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Train a backbone with ExGRPO, or with another method.

    Without any option: the built-in tiny backbone learns arithmetic on the CPU in minutes.

    \b
    Examples:
      exgrpo train
      exgrpo train --method grpo --seed 1 --output runs/baseline
      exgrpo train --backbone qwen-math-1.5b --dry-run
      exgrpo train --resume --output runs/baseline --steps 300
    """
    options = option_layer(
        {
            "run.steps": steps,
            "run.seed": seed,
            "run.nproc": nproc,
            "run.device": device,
            "run.log": log,
            "data.train": lasting(data),
            "rollout.engine": rollout,
            "optim.engine": engine,
            **_warm_start(replay_from, with_retired),
        }
    )
    with _this_rank() as ranks:
        settings = _settings(
            resume, output, config, backbone, method, options, assignments or [], as_published, allow_code
        )
        _require_replay(settings, replay_from)
        settings = _planned(settings, ranks, dry_run=dry_run, quiet=quiet, json=json)
        if dry_run:
            return
        run_folder = output or RUNS / f"{settings.run.method}-{settings.backbone.name}-{datetime.now():%Y%m%d-%H%M%S}"
        if ranks is None and settings.run.nproc > 1:
            flags = {"--resume": resume, "--quiet": quiet, "--json": json, "--debug": debug}
            # Not typer.Exit: the ranks have said what there is to say.
            sys.exit(_start_ranks(settings, run_folder, [flag for flag, given in flags.items() if given]))
        summary = _train(settings, run_folder, resume, quiet, ranks)
        if ranks is None or ranks.is_main:
            print_json(summary) if json else _print_result(summary, run_folder)
            if settings.run.plots:
                write_page(run_folder, quiet=quiet)


def lasting(data: str | None) -> str | None:
    """A question file by its absolute path, so that the configuration means the same from any folder."""
    return str(Path(data).resolve()) if data is not None and Path(data).exists() else data


def _warm_start(replay_from: Path | None, with_retired: bool) -> dict[str, Any]:
    from exgrpo_cli.errors import InputError

    if replay_from is None:
        if with_retired:
            raise InputError("--with-retired says what to take over from --replay-from RUN: name the run.")
        return {}
    if not (replay_from / "replay").is_dir():
        raise InputError(f"--replay-from {replay_from} has no replay/ folder: name the folder of an ExGRPO run.")
    return {"replay.warm_start": str(replay_from.resolve()), "replay.warm_start_retired": with_retired}


def _require_replay(settings: "Config", replay_from: Path | None) -> None:
    from exgrpo_cli.errors import InputError

    if replay_from is not None and not settings.replay.enabled:
        raise InputError(
            f"--replay-from {replay_from} fills the experience buffer, but method {settings.run.method!r} replays "
            "nothing (replay.enabled = false): leave it out, or choose a method that replays."
        )


def _settings(
    resume: bool,
    output: Path | None,
    config: Path | None,
    backbone: str | None,
    method: str | None,
    options: dict[str, dict[str, Any]],
    assignments: list[str],
    as_published: bool,
    allow_code: bool,
) -> "Config":
    from exgrpo_cli.config.layers import build_config
    from exgrpo_cli.errors import InputError
    from exgrpo_cli.training.resume import newest_unfinished, resumed_config

    if not resume:
        return build_config(
            backbone=backbone,
            method=method,
            config_file=config,
            options=options,
            assignments=assignments,
            as_published=as_published,
            allow_code=allow_code,
        )
    if as_published:
        raise InputError("--resume goes on with the run's own configuration: leave --as-published out.")
    if output is None:
        newest = newest_unfinished(RUNS)
        hint = f"the newest unfinished one is {newest}: exgrpo train --resume --output {newest}"
        raise InputError(f"--resume needs the run as --output; {hint if newest else f'none in {RUNS}/ is unfinished'}.")
    if config is not None:
        raise InputError(f"--resume goes on with {output}'s own configuration: leave --config {config} out.")
    return resumed_config(output, backbone=backbone, method=method, options=options, assignments=assignments)


@contextmanager
def _this_rank() -> Iterator["Ranks | None"]:
    """This process as a rank, where torchrun or another launcher has started it as one."""
    if "RANK" not in os.environ:
        yield None
        return
    from exgrpo_cli.ranks.ranks import Ranks

    ranks = Ranks.of_environment()
    with ranks.together():
        yield ranks


def _planned(settings: "Config", ranks: "Ranks | None", *, dry_run: bool, quiet: bool, json: bool) -> "Config":
    """The settings with the number of ranks settled; the plan printed where asked, or where something is missing."""
    from exgrpo_cli.machine.run_plan import plan_run, require_runnable, settle_ranks
    from exgrpo_cli.machine.survey import survey_machine

    machine = survey_machine()
    settings = settle_ranks(settings, machine, 0 if ranks is None else ranks.local_world_size)
    plan = plan_run(settings, machine, num_ranks=0 if ranks is None else ranks.world_size)
    speaks = ranks is None or ranks.is_main
    if dry_run:
        if speaks:
            _print_plan(settings, plan, json)
        return settings
    if plan.missing and speaks:
        talk("\n".join(plan.lines()), quiet=quiet)
    require_runnable(plan)
    return settings


def _start_ranks(settings: "Config", run_folder: Path, flags: list[str]) -> int:
    """Run this command once per rank; returns the exit code."""
    from tempfile import TemporaryDirectory

    from exgrpo_cli.config.resolve import to_toml
    from exgrpo_cli.ranks.launching import RankLauncher, quieten_gloo
    from exgrpo_cli.training.assemble import choose_device

    if "--debug" not in flags and choose_device(settings.run.device).type == "cpu":
        quieten_gloo(os.environ)
    command = ["-m", "exgrpo_cli.commands", "train", "--output", str(run_folder), *flags]
    with TemporaryDirectory(prefix="exgrpo-") as folder:
        if "--resume" in flags:
            # All but these is the run's own.
            command += ["--steps", str(settings.run.steps), "--set", f"optim.horizon={settings.optim.horizon}"]
            command += ["--set", f"run.rank_timeout={settings.run.rank_timeout}", "--nproc", str(settings.run.nproc)]
        else:
            file = Path(folder) / "config.toml"
            file.write_text(to_toml(settings), encoding="utf-8")
            command += ["--config", str(file)]
        return RankLauncher(command, settings.run.nproc).run()


def _print_plan(settings: "Config", plan: "RunPlan", json: bool) -> None:
    """The configuration as TOML with the plan as comments, so that the output is a file for `--config`."""
    import tomllib

    from exgrpo_cli.config.resolve import to_toml

    text = to_toml(settings)
    if json:
        print_json({"config": tomllib.loads(text), "plan": plan.to_json()})
    else:
        typer.echo("\n".join(f"# {line}" for line in plan.lines()) + f"\n\n{text}", nl=False)


def _train(settings: "Config", run_folder: Path, resume: bool, quiet: bool, ranks: "Ranks | None") -> dict[str, Any]:
    from exgrpo_cli.console.reporter import make_reporter
    from exgrpo_cli.ranks.ranks import ALONE
    from exgrpo_cli.training import run

    ranks = ranks or ALONE
    reporter = make_reporter(quiet=quiet or not ranks.is_main)
    try:
        return run.train(settings, run_folder, resume=resume, reporter=reporter, ranks=ranks)
    finally:
        reporter.close()


def _print_result(summary: dict[str, Any], run_folder: Path) -> None:
    """The short table a run ends with."""
    from rich.console import Console
    from rich.table import Table

    tokens, replay = summary["tokens"], summary["replay"]
    table = Table(box=None, show_header=False, padding=(0, 2))
    for name, score in summary["heldout"].items():
        if score:
            interval = f"[{score['low']:.3f}, {score['high']:.3f}], {score['questions']} questions"
            table.add_row(f"held-out pass@1 {name}", f"{score['pass_at_1']:.3f}", interval)
    table.add_row("steps", str(summary["steps"]), f"{summary['wall_seconds']['total']:.0f} s")
    table.add_row("tokens generated", f"{tokens['generated']:,}", f"{tokens['trained']:,} trained on")
    table.add_row("peak memory", f"{summary['peak_memory_bytes'] / 2**30:.2f} GiB", "")
    buffered = f"{replay['trajectories']:,} trajectories, {replay['retired']:,} questions retired"
    table.add_row("replayed", f"{replay['used']:,}", buffered)
    console = Console(markup=False, highlight=False)
    console.print(table)
    plots = run_folder / "plots"
    made = f"plots in {plots}, " if any(plots.glob("*")) else ""
    console.print(f"{made}model in {run_folder / 'model'}", soft_wrap=True)
