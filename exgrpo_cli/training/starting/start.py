"""How a run begins: one configuration, folder and plan from what was asked for, then one process per rank."""

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from exgrpo_cli.base.console.output import give_stdout_to_children
from exgrpo_cli.base.console.reporter import Reporter, SilentReporter, make_reporter
from exgrpo_cli.base.errors import InputError, ToolkitWarning
from exgrpo_cli.config.layers import build_config
from exgrpo_cli.config.names import TINY_TASKS, check_functions, named_functions, origin
from exgrpo_cli.config.sections import require_known
from exgrpo_cli.config.sections.run import RolloutSettings
from exgrpo_cli.config.settings import Config, Layer, to_toml
from exgrpo_cli.machine.run_plan import RunPlan, plan_run, resolve_ranks
from exgrpo_cli.machine.survey import survey_machine
from exgrpo_cli.questions.prompts import TEMPLATES
from exgrpo_cli.training.resuming.resume import newest_unfinished, resumed_config
from exgrpo_cli.training.time_limit import TimeLimit

if TYPE_CHECKING:
    from exgrpo_cli.ranks.ranks import Ranks
    from exgrpo_cli.training.checking.report import CheckReport

RUNS = Path("runs")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRequest:
    """What was asked for; None leaves the choice to presets and defaults."""

    backbone: str | None = None
    method: str | None = None
    regime: str | None = None
    config_file: Path | None = None
    options: Layer = field(default_factory=dict)
    assignments: Sequence[str] = ()
    output: Path | None = None
    resume: bool = False
    replay_from: Path | None = None
    """Run whose ledger fills the buffer."""
    with_retired: bool = False
    as_published: bool = False
    """With what the method's paper changed besides its replay."""
    allow_code: bool = False
    """Whether the file may name functions of the user."""

    def options_layer(self) -> Layer:
        """The options, with where the buffer's first experience comes from. Raises InputError where there is none."""
        if self.replay_from is None:
            if self.with_retired:
                raise InputError("--with-retired says what to take over from --replay-from RUN: name the run.")
            return self.options
        if not (self.replay_from / "replay").is_dir():
            raise InputError(
                f"--replay-from {self.replay_from} has no replay/ folder: name the folder of an ExGRPO run."
            )
        warm = {"warm_start": str(self.replay_from.resolve()), "warm_start_retired": self.with_retired}
        return {**self.options, "replay": {**self.options.get("replay", {}), **warm}}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStart:
    """A run about to begin, or to go on."""

    config: Config
    folder: Path
    resume: bool

    def line(self) -> str:
        """What is said before anything slow happens."""
        config = self.config
        what = "going on with" if self.resume else f"{config.run.method} on {config.backbone.name},"
        code = [f"; {name} = {value} from {origin(name, value)}" for name, value in named_functions(config).items()]
        return f"exgrpo: {what} {self.folder}, {config.run.steps} steps{''.join(code)}"


def plan_start(request: RunRequest) -> RunStart:
    """The configuration and the folder of the run.

    Raises InputError for anything unknown or contradictory, a folder that is taken, and for nothing to resume.
    """
    folder = request.output
    names = ("backbone", "method", "regime", "assignments", "allow_code")
    asked = {name: getattr(request, name) for name in names} | {"options": request.options_layer()}
    if request.resume:
        if folder is None:
            folder = newest_unfinished(RUNS)
        if folder is None:
            raise InputError(f"--resume found no unfinished run in {RUNS}/: name one with --output.")
        if request.config_file is not None:
            raise InputError(
                f"--resume goes on with {folder}'s own configuration: leave --config {request.config_file} out."
            )
        if request.as_published:
            raise InputError("--resume goes on with the run's own configuration: leave --as-published out.")
        config = resumed_config(folder, **asked)
    else:
        config = build_config(config_file=request.config_file, as_published=request.as_published, **asked)
        folder = folder or RUNS / f"{config.run.method}-{config.backbone.name}-{datetime.now():%Y%m%d-%H%M%S}"
    if request.replay_from is not None and not config.replay.enabled:
        raise InputError(
            f"--replay-from {request.replay_from} fills the experience buffer, but method {config.run.method!r} "
            "replays nothing (replay.enabled = false): leave it out, or choose a method that replays."
        )
    warn_of_short_responses(config)
    return RunStart(config=config, folder=folder, resume=request.resume)


def warn_of_short_responses(config: Config) -> None:
    """Warn where own questions meet the response limit of the built-in tasks, which nobody chose for them."""
    limit = config.rollout.max_response_tokens
    if (
        config.data.train not in TINY_TASKS
        and config.rollout.require_eos
        and limit == RolloutSettings().max_response_tokens
    ):
        warnings.warn(
            f"rollout.max_response_tokens = {limit} is the limit of the built-in arithmetic: with rollout.require_eos "
            f"every longer response to {config.data.train} earns 0. Raise it with --set rollout.max_response_tokens=N.",
            ToolkitWarning,
            stacklevel=2,
        )


def check_start(start: RunStart) -> tuple[str, ...]:
    """What a resume would say of checkpoints that it passes over; nothing is started.

    Raises InputError for what the run itself would refuse.
    """
    from exgrpo_cli.runs.folder import RunFolder
    from exgrpo_cli.training.resuming.resume_point import find_resume_point
    from exgrpo_cli.training.starting.run_questions import check_questions, stored_questions

    config = start.config
    check_functions(config)
    require_known("data.template", config.data.template, ("auto", *TEMPLATES))
    if start.resume:
        folder = RunFolder.existing(start.folder)
        notes = find_resume_point(folder, config).notes
        stored_questions(folder.data, config)
        return tuple(notes)
    RunFolder.check_new(start.folder)
    questions = check_questions(config, SilentReporter())
    model = Path(config.backbone.source).expanduser()
    if config.backbone.source != "tiny" and model.is_dir():
        from exgrpo_cli.models.load import read_tokenizer
        from exgrpo_cli.training.starting.assemble import choose_prompts

        choose_prompts(config, questions, read_tokenizer(model))
    return ()


@contextmanager
def this_rank() -> Iterator["Ranks | None"]:
    """This process as a rank, where torchrun or another launcher has started it as one."""
    if "RANK" not in os.environ:
        yield None
        return
    from exgrpo_cli.ranks.ranks import Ranks

    ranks = Ranks.of_environment()
    with ranks.together():
        yield ranks


def plan_on_machine(config: Config, ranks: "Ranks | None") -> RunPlan:
    """The plan of `config` on this machine, its number of ranks resolved."""
    machine = survey_machine()
    resolved = resolve_ranks(config, machine, 0 if ranks is None else ranks.local_world_size)
    return plan_run(resolved, machine, num_ranks=0 if ranks is None else ranks.world_size)


def train_here(
    start: RunStart, config: Config, ranks: "Ranks | None", *, quiet: bool, time_limit: TimeLimit | None = None
) -> dict[str, Any]:
    """Train in this process; returns what `summary.json` holds."""
    from exgrpo_cli.ranks.ranks import ALONE
    from exgrpo_cli.training.run import train

    reporter: Reporter = make_reporter(quiet=quiet or not (ranks or ALONE).is_main)
    try:
        return train(
            config,
            start.folder,
            resume=start.resume,
            reporter=reporter,
            ranks=ranks or ALONE,
            time_limit=time_limit,
        )
    finally:
        reporter.close()


def check_here(config: Config, ranks: "Ranks | None", *, quiet: bool) -> "CheckReport":
    """Two measured steps of `config` in this process, as `check_run` describes them."""
    from exgrpo_cli.ranks.ranks import ALONE
    from exgrpo_cli.training.checking.check import check_run

    reporter: Reporter = make_reporter(quiet=quiet or not (ranks or ALONE).is_main)
    try:
        return check_run(config, reporter=reporter, ranks=ranks or ALONE)
    finally:
        reporter.close()


def train_in_ranks(start: RunStart, config: Config, flags: Sequence[str]) -> int:
    """Run this command once per rank of this host; returns the exit code."""
    from exgrpo_cli.ranks.launching import RankLauncher, quieten_gloo
    from exgrpo_cli.training.starting.assemble import choose_device

    if "--debug" not in flags and choose_device(config.run.device).type == "cpu":
        quieten_gloo(os.environ)
    command = ["-m", "exgrpo_cli", "train", "--output", str(start.folder), *flags]
    # This process was allowed to, and the file that follows is its own.
    command += ["--allow-code"] if named_functions(config) else []
    with TemporaryDirectory(prefix="exgrpo-") as folder:
        if start.resume:
            # All but these is the run's own.
            command += ["--resume", "--steps", str(config.run.steps), "--set", f"optim.horizon={config.optim.horizon}"]
            command += ["--set", f"run.rank_timeout={config.run.rank_timeout}", "--nproc", str(config.run.nproc)]
        else:
            file = Path(folder) / "config.toml"
            file.write_text(to_toml(config), encoding="utf-8")
            command += ["--config", str(file)]
        give_stdout_to_children()
        return RankLauncher(command, config.run.nproc).run()
