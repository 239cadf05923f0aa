"""The start of a run: its configuration and folder, new or resumed, and the processes of this host.

A resumed run has its own configuration, with more steps where asked. Runs that were started here with functions of the
user go on without a question about their code.
"""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from exgrpo_cli.base import cache, errors, output, reporter
from exgrpo_cli.base.files import values_digest
from exgrpo_cli.config import requests, sections, settings
from exgrpo_cli.config.layers import build_config, read_config
from exgrpo_cli.config.names import check_functions, named_functions, origin
from exgrpo_cli.config.sections.run import BUDGET_STEPS
from exgrpo_cli.runs.folder import REPORT_FILE, complete_steps
from exgrpo_cli.runs.result import has_ended

RUNS = Path("runs")
OWN_RUNS = "own-runs"
"""Folder of the cache, outside the run's: whoever sends a run cannot send this along."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStart:
    """A run about to begin, or to go on."""

    config: settings.Config
    folder: Path
    resume: bool

    def line(self) -> str:
        """The line that comes before anything slow."""
        config = self.config
        if not self.resume:
            what = f"training {config.backbone.name} by {config.run.method} in {self.folder}"
        elif saved := complete_steps(self.folder / "checkpoints"):
            what = f"going on with {self.folder} after step {saved[-1]}"
        else:
            what = f"beginning {self.folder} anew: it has no checkpoint"
        code = [f"; {name} = {value} from {origin(name, value)}" for name, value in named_functions(config).items()]
        return f"exgrpo: {what}, {config.run.steps} steps{''.join(code)}"

    @property
    def lacks_page(self) -> bool:
        """Whether this is a run that has come to its end but for its page, before which it was stopped."""
        own = self.config.run
        is_due = self.resume and own.plots and not (self.folder / REPORT_FILE).exists()
        return is_due and has_ended(self.folder, own.last_step)


def plan_start(request: requests.RunRequest) -> RunStart:
    """The configuration and the folder of the run.

    Raises InputError for anything unknown or contradictory, a folder that is taken, and for nothing to resume.
    """
    folder = request.output
    names = ("backbone", "method", "regime", "assignments")
    asked = {name: getattr(request, name) for name in names} | {"options": options_with_buffer(request)}
    files = settings.Author.of_file(request.allow_code)
    if request.resume:
        folder = folder or newest_unfinished(RUNS)
        if folder is None:
            raise errors.InputError(f"--resume found no unfinished run in {RUNS}/: name one with --output.")
        given = f"--config {request.config_file}" if request.config_file else "--as-published" * request.as_published
        if given:
            raise errors.InputError(f"--resume goes on with {folder}'s own configuration: leave {given} out.")
        config = resumed_config(folder, files=files, **asked)
    else:
        config = build_config(config_file=request.config_file, as_published=request.as_published, files=files, **asked)
        folder = folder or RUNS / f"{config.run.method}-{config.backbone.name}-{datetime.now():%Y%m%d-%H%M%S}"
    if request.replay_from is not None and not config.replay.enabled:
        raise errors.InputError(
            f"--replay-from {request.replay_from} fills the experience buffer, but method {config.run.method!r} "
            "replays nothing (replay.enabled = false): leave it out, or choose a method that replays."
        )
    return RunStart(config=config, folder=folder, resume=request.resume)


def options_with_buffer(request: requests.RunRequest) -> settings.Layer:
    """Settings of the options, with where the buffer's first experience comes from.

    Raises InputError where there is none.
    """
    if request.replay_from is None:
        if request.with_retired:
            raise errors.InputError("--with-retired says what to take over from --replay-from RUN: name the run.")
        return request.options
    if not Path(request.replay_from, "replay").is_dir():
        raise errors.InputError(
            f"--replay-from {request.replay_from} has no replay/ folder: name the folder of an ExGRPO run."
        )
    warm = {"warm_start": str(Path(request.replay_from).resolve()), "warm_start_retired": request.with_retired}
    return {**request.options, "replay": {**request.options.get("replay", {}), **warm}}


def check_start(start: RunStart) -> tuple[str, ...]:
    """Notes of a resume on checkpoints that it passes over; nothing is started.

    Raises InputError for what the run itself would refuse.
    """
    from exgrpo_cli.questions.prompts import TEMPLATES, encode_within
    from exgrpo_cli.runs.folder import RunFolder
    from exgrpo_cli.training.questions import check_questions, stored_questions

    config = start.config
    check_functions(config)
    sections.require_known("data.template", config.data.template, ("auto", *TEMPLATES))
    if start.resume:
        from exgrpo_cli.training.checkpoint import find_resume_point

        folder = RunFolder.existing(start.folder)
        folder.require_own_folders()
        notes = find_resume_point(folder, config).notes
        stored_questions(folder.data)
        return tuple(notes)
    RunFolder.check_new(start.folder)
    questions = check_questions(config, reporter.SilentReporter())
    model = Path(config.backbone.source).expanduser()
    if config.backbone.source != "tiny" and model.is_dir():
        from exgrpo_cli.models.load import read_tokenizer
        from exgrpo_cli.training.setup import choose_run_template

        template = choose_run_template(config, tokenizer := read_tokenizer(model))
        if questions is not None:
            everything = (*questions.train, *questions.heldout)
            encode_within(template, everything, tokenizer, max_tokens=config.data.max_prompt_tokens)
    return ()


def resumed_config(run_folder: Path, *, files: settings.Author = settings.Author.FILE, **asked: Any) -> settings.Config:
    """The run's own configuration; what is `asked` of `build_config` may repeat it, raise `run.steps`, and change how
    many ranks there are, how long they wait for one another and how long a phase may last. More ranks share the threads
    of fewer.

    A run's config.toml holds the horizon its schedule began with, so more steps do not stretch a decay unless
    `optim.horizon` is set as well. Raises InputError when `run_folder` holds no run, and naming any other setting that
    would change; and for functions of the user in the configuration of a run that was not started here, unless
    `files` says who answers for it.
    """
    file = run_folder / "config.toml"
    if not file.is_file():
        advice = "name the --output folder of a run, or begin one without --resume"
        raise errors.InputError(f"{run_folder} is not a run folder: it has no config.toml; {advice}.")
    own = build_config(config_file=file, files=settings.Author.READ)
    # This user started it, with exactly these functions.
    if _note_of(run_folder, named_functions(own)).exists():
        files = settings.Author.USER
    wanted = build_config(config_file=file, files=files, **asked)
    before, after = (tomllib.loads(settings.to_toml(config)) for config in (own, wanted))
    for section, values in after.items():
        for key, value in values.items():
            if value != before[section][key] and f"{section}.{key}" not in settings.RESUMABLE:
                raise errors.InputError(
                    f"--resume keeps the run's own {section}.{key} = {before[section][key]!r}, not {value!r}: "
                    "only --steps may be raised, and --nproc, run.rank_timeout, run.phase_timeout and "
                    "rollout.max_logprob_gap changed. Leave it out, or start a new run."
                )
    if wanted.run.steps < own.run.steps:
        raise errors.InputError(
            f"--steps {wanted.run.steps} is below the run's own {own.run.steps}: a resumed run may only be lengthened."
        )
    if wanted.run.nproc > own.run.nproc > 0:
        threads = max(1, own.run.threads * own.run.nproc // wanted.run.nproc)
        wanted = replace(wanted, run=replace(wanted.run, threads=threads))
    return wanted


def newest_unfinished(runs: Path) -> Path | None:
    """The run folder under `runs` that was written to last among those that have not reached their last step."""

    def last_written(run_folder: Path) -> float:
        journal = run_folder / "metrics.jsonl"
        return (journal if journal.is_file() else run_folder / "config.toml").stat().st_mtime

    folders = [file.parent for file in runs.glob("*/config.toml") if not is_finished(file.parent)]
    return max(folders, key=last_written, default=None)


def is_finished(run_folder: Path) -> bool:
    """Whether the run ended normally: its summary is there, and its configuration asks for no further step."""
    run = read_config(run_folder / "config.toml").get("run", {})
    factor = 1 if run.get("budget", "steps") == "steps" else BUDGET_STEPS
    return has_ended(run_folder, factor * run.get("steps", 0))


def remember_run(folder: Path, config: settings.Config) -> None:
    """Note that this user started the run in `folder`, where its configuration names functions of the user."""
    if functions := named_functions(config):
        note = _note_of(folder, functions)
        note.parent.mkdir(parents=True, exist_ok=True)
        note.touch()


def _note_of(folder: Path, functions: dict[str, str]) -> Path:
    return cache.cache_root() / OWN_RUNS / values_digest({"folder": str(folder.resolve()), "functions": functions})


def train_in_ranks(start: RunStart, config: settings.Config, flags: Sequence[str]) -> int:
    """Run `exgrpo train` once per rank of this host, with the settled `config` and the `flags` that are given to each;
    returns the exit code."""
    from exgrpo_cli.ranks import run_ranks

    command = ["-m", "exgrpo_cli", "train", "--output", str(start.folder), *flags]
    # This process was allowed to, and the file that follows is its own.
    command += ["--allow-code"] if named_functions(config) else []
    with TemporaryDirectory(prefix="exgrpo-") as folder:
        if start.resume:
            # All but these is the run's own.
            command += ["--resume", "--steps", str(config.run.steps), "--set", f"optim.horizon={config.optim.horizon}"]
            for name in ("rank_timeout", "phase_timeout"):
                command += ["--set", f"run.{name}={getattr(config.run, name)}"]
            command += ["--nproc", str(config.run.nproc)]
        else:
            file = Path(folder) / "config.toml"
            file.write_text(settings.to_toml(config), encoding="utf-8")
            command += ["--config", str(file)]
        output.give_stdout_to_children()
        return run_ranks(command, config.run.nproc, on_gpu=config.run.wants_gpus or "--debug" in flags)
