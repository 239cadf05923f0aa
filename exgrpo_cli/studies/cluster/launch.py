"""Runs by submitit: a study's as one array job, or one run over several hosts; watched to their end.

Tasks that were killed are submitted again.
"""

import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from exgrpo_cli.base.console.reporter import Reporter
from exgrpo_cli.base.console.signals import Stopper
from exgrpo_cli.base.errors import InputError, Interrupted, RunError, first_line
from exgrpo_cli.base.files import write_text
from exgrpo_cli.config.sections.run import SlurmSettings
from exgrpo_cli.config.settings import Config, read_section, to_toml
from exgrpo_cli.studies.arms import Arm
from exgrpo_cli.studies.cluster.shared import require_shared
from exgrpo_cli.studies.cluster.task import RunTask
from exgrpo_cli.studies.duration import progress
from exgrpo_cli.studies.run_log import RunLog, last_line, log_path
from exgrpo_cli.studies.schedule import (
    clear_torn,
    jobs_of,
    make_writable,
    with_threads,
    write_beginning,
)
from exgrpo_cli.studies.study import Study, StudyRun, budgeted, is_ready

if TYPE_CHECKING:
    from submitit import Job

LAUNCHERS = ("local", "slurm")
WORKER = (sys.executable, "-m", "exgrpo_cli.studies.worker")
JOBS_FOLDER = "jobs"
"""Of the study: scripts, logs and results of its tasks."""
POLL_SECONDS = 0.5
ASK_SECONDS = 30.0
"""Between two questions to Slurm about all tasks."""
MOST_KILLS = 3
"""Of one run, after which it counts as failed."""
MOST_REQUEUES = 1000
"""A run may need as many stretches of `slurm.hours`."""
LOCAL_MINUTES = 60 * 24 * 365


@dataclass(kw_only=True)
class Launch:
    """Runs under way."""

    study: Study
    launcher: str
    settings: SlurmSettings
    at_once: int
    """Tasks at a time on this machine; Slurm gets all that are ready."""
    reporter: Reporter
    running: "dict[str, tuple[StudyRun, Job[Any]]]" = field(default_factory=dict)
    """Label to run and its job."""
    logs: dict[str, RunLog] = field(default_factory=dict)
    """Of each run under way or ended, by its label."""
    kills: Counter[str] = field(default_factory=Counter)
    failed: dict[str, str] = field(default_factory=dict)
    """Label of a run to why it failed."""

    def submit(self, runs: Sequence[StudyRun]) -> None:
        """Start tasks for these runs. Raises InputError where Slurm refuses them."""
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        executor = make_executor(self.study, self.launcher, self.settings)
        ready = [budgeted(self.study, run) for run in runs]
        if self.launcher == "local":
            ready = [with_threads(run, self.at_once) for run in ready]
        tasks = [make_task(run, num_hosts=self.settings.nodes) for run in ready]
        logs = {label(run): RunLog(run.folder) for run in ready}
        try:
            with executor.batch():
                jobs = [executor.submit(task) for task in tasks]
        except (FailedJobError, FailedSubmissionError) as error:
            raise InputError(
                f"sbatch refused {self.study.name}: {sbatch_says(error)}. See [slurm] of --config."
            ) from error
        self.logs |= logs
        for run, job in zip(runs, jobs, strict=True):
            self.running[label(run)] = (run, job)
            self.reporter.note(f"{label(run)}: job {job.job_id}")

    def take_ended(self) -> list[StudyRun]:
        """Tell how far the runs are, and forget the ended ones; returns those whose task was killed.

        Warns (DamageWarning) of what a run has found damaged and passed over.
        """
        again = []
        for name, (run, job) in list(self.running.items()):
            is_over = job.done()
            self.logs[name].tell_damage(name)
            if not is_over:
                self.reporter.progress(*progress(run), name)
                continue
            del self.running[name]
            reason = "" if run.state == "finished" else self._why_unfinished(run, job)
            if run.state == "finished":
                whole = progress(run)[1]
                self.reporter.progress(whole, whole, name)
            elif not reason and self.kills[name] < MOST_KILLS:
                self.kills[name] += 1
                self.reporter.note(f"{name}: its task was killed; submitted again")
                again.append(run)
            else:
                self.failed[name] = reason or f"killed {self.kills[name] + 1} times"
                self.reporter.note(f"{name} failed: {self.failed[name]}")
        return again

    def _why_unfinished(self, run: StudyRun, job: "Job[Any]") -> str:
        """What the run said last where it failed by itself; empty where its task was killed."""
        from submitit.core.utils import FailedJobError

        return last_line(log_path(run.folder)) if isinstance(job.exception(), FailedJobError) else ""

    def cancel(self) -> None:
        """Have every task save and end, and wait until no run is written any more."""
        for _, job in self.running.values():
            job.cancel(check=False)
        for run, _ in self.running.values():
            if run.folder.is_dir():
                with FileLock(run.folder / ".lock"):
                    pass


def label(run: StudyRun) -> str:
    """Arm and seed, as progress and errors name the run."""
    return f"{run.arm.name}, seed {run.seed}"


def launch_study(study: Study, launcher: str, settings: SlurmSettings, *, jobs: int, reporter: Reporter) -> None:
    """Run what is not finished by tasks of `launcher`, as `run_study` does by processes of its own.

    Raises InputError for a cluster or a folder that cannot be used, RunError where runs failed, after the others have
    ended, and Interrupted after a stop signal, with the tasks ended.
    """
    if settings.nodes > 1:
        raise InputError(
            f"slurm.nodes = {settings.nodes}: each run of a study has one host; `exgrpo train --launcher slurm` "
            "spreads one run over several."
        )
    launch = prepare_launch(study, launcher, settings, at_once=jobs_of(study, jobs), reporter=reporter)
    write_beginning(study)
    waiting = [run for run in study.runs if run.state != "finished"]
    reporter.note(f"{len(study.runs)} runs, {len(study.runs) - len(waiting)} finished already")
    run_tasks(launch, waiting, f"the same command goes on with the study in {study.folder}")
    if launch.failed:
        name, reason = next(iter(launch.failed.items()))
        raise RunError(
            f"{len(launch.failed)} of {len(study.runs)} runs failed, first {name}: {reason}; the same command tries "
            "them again."
        )


def launch_run(study: Study, launcher: str, settings: SlurmSettings, *, reporter: Reporter) -> None:
    """Train the one run of `study` on `settings.nodes` hosts of Slurm, or on this one.

    Raises as `launch_study`.
    """
    (run,) = study.runs
    launch = prepare_launch(study, launcher, settings, at_once=1, reporter=reporter)
    again = f"exgrpo train --resume --output {run.folder} --launcher {launcher} goes on"
    run_tasks(launch, [run], again)
    for reason in launch.failed.values():
        raise RunError(f"{reason} ({log_path(run.folder)})")


def study_of_one(config: Config, folder: Path) -> Study:
    """A run by itself, as launchers take it: its settings, log and jobs lie beside its folder."""
    arm = Arm(name=folder.name, method=config.run.method)
    run = StudyRun(arm=arm, seed=config.run.seed, folder=folder, config=config)
    return Study(name=folder.name, folder=folder.parent, arms=(arm,), seeds=(run.seed,), runs=(run,))


def prepare_launch(study: Study, launcher: str, settings: SlurmSettings, *, at_once: int, reporter: Reporter) -> Launch:
    """A launch with nothing under way yet. Raises InputError for a cluster or a folder that cannot be used."""
    if launcher == "local" and settings.nodes > 1:
        raise InputError(f"slurm.nodes = {settings.nodes}, and --launcher local has this host alone: use slurm.")
    make_writable(study.folder)
    require_launcher(launcher)
    if launcher == "slurm":
        require_shared(study.folder, shared=settings.shared)
    return Launch(study=study, launcher=launcher, settings=settings, at_once=at_once, reporter=reporter)


def run_tasks(launch: Launch, waiting: list[StudyRun], how_to_go_on: str) -> None:
    """Submit and watch until all have ended. Raises Interrupted after a stop signal, with the tasks ended."""
    with Stopper() as stopper:
        try:
            with stopper.immediate():
                watch(launch, waiting)
        except KeyboardInterrupt:
            launch.cancel()
            raise Interrupted(f"stopped, states saved; {how_to_go_on}") from None
        except BaseException:
            launch.cancel()
            raise


def watch(launch: Launch, waiting: list[StudyRun]) -> None:
    """Submit what is ready, and what was killed again, until all have ended."""
    asked = time.monotonic()
    while waiting or launch.running:
        ready = [run for run in waiting if is_ready(launch.study, run)]
        if launch.launcher == "local":
            ready = ready[: launch.at_once - len(launch.running)]
        if ready:
            waiting = [run for run in waiting if run not in ready]
            launch.submit(ready)
        if not launch.running:
            launch.reporter.note(f"{len(waiting)} runs wait for a baseline that failed")
            return
        time.sleep(POLL_SECONDS)
        if launch.launcher == "slurm" and time.monotonic() - asked > ASK_SECONDS:
            next(iter(launch.running.values()))[1].watcher.update()
            asked = time.monotonic()
        waiting += launch.take_ended()


def make_task(run: StudyRun, num_hosts: int) -> RunTask:
    """The task of a run, its settings written beside its folder."""
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    if run.state == "new" and run.folder.exists():
        clear_torn(run.folder)
    settings = run.asked_file.resolve()
    write_text(settings, to_toml(run.config))
    return RunTask(
        command=(*WORKER, str(settings), str(run.folder.resolve())),
        seen=settings,
        log=log_path(run.folder).resolve(),
        num_hosts=num_hosts,
    )


def require_launcher(launcher: str) -> None:
    """Raise InputError naming what is missing: submitit, or Slurm's own programs."""
    from importlib.util import find_spec

    if find_spec("submitit") is None:
        raise InputError(f"--launcher {launcher} needs the submitit package: pip install 'exgrpo[slurm]'.")
    missing = [name for name in ("sbatch", "srun", "sacct") if launcher == "slurm" and shutil.which(name) is None]
    if missing:
        raise InputError(
            f"--launcher slurm finds no {missing[0]} on the path: run it where jobs are submitted, or use "
            "--launcher local."
        )


def make_executor(study: Study, launcher: str, settings: SlurmSettings) -> Any:
    """submitit's executor for the study's tasks."""
    import submitit

    folder = study.folder.resolve() / JOBS_FOLDER
    if launcher == "local":
        local = submitit.LocalExecutor(folder, max_num_timeout=MOST_REQUEUES)
        local.update_parameters(timeout_min=LOCAL_MINUTES, tasks_per_node=1)
        return local
    executor = submitit.SlurmExecutor(folder, max_num_timeout=MOST_REQUEUES)
    executor.update_parameters(**slurm_parameters(study.name, settings))
    return executor


def slurm_parameters(name: str, settings: SlurmSettings) -> dict[str, Any]:
    """The settings under submitit's names; what is empty or 0 is left out."""
    asked = {
        "partition": settings.partition,
        "account": settings.account,
        "qos": settings.qos,
        "constraint": settings.constraint,
        "gpus_per_node": settings.gpus,
        "cpus_per_task": settings.cpus,
        "mem": f"{settings.memory_gb:g}GB" if settings.memory_gb else "",
        "array_parallelism": settings.parallel,
        "setup": list(settings.setup),
    }
    return {
        "job_name": name,
        "time": round(60 * settings.hours),
        "signal_delay_s": round(60 * settings.save_minutes),
        "nodes": settings.nodes,
        "ntasks_per_node": 1,
        **{key: value for key, value in asked.items() if value},
    }


def scripts(study: Study, launcher: str, settings: SlurmSettings) -> str:
    """What `--dry-run` shows: the script of the array job, or the command of each task."""
    runs = [run for run in study.runs if run.state != "finished"]
    if launcher == "local":
        lines = [f"{' '.join(WORKER)} {run.folder.with_name(run.folder.name)}.toml {run.folder}" for run in runs]
        return "\n".join(lines) + "\n"
    require_launcher(launcher)
    executor = make_executor(study, launcher, settings)
    executor.parameters["map_count"] = len(runs)
    return str(executor._make_submission_file_text(executor._submitit_command_str, "dry-run"))


def sbatch_says(error: Exception) -> str:
    """What sbatch says of why: it names the value that is wrong before the kind of mistake."""
    said = [line.split("error:")[-1].strip().rstrip(".") for line in str(error).splitlines() if "error:" in line]
    return "; ".join(dict.fromkeys(said)) or first_line(error).rstrip(".")


def slurm_settings(config_file: Path | None) -> SlurmSettings:
    """The `[slurm]` table of a configuration file; the defaults without one."""
    from exgrpo_cli.config.layers import JOB, read_config

    tables = [(str(config_file), read_config(config_file).get(JOB, {}))] if config_file else []
    return read_section(JOB, (SlurmSettings,), tables)
