"""Runs as tasks of submitit on Slurm: one array job of arms x seeds, or one run over several hosts.

A task is the study's worker as a process, saved and requeued when its time is over, submitted again when it was killed.
"""

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from exgrpo_cli.base.errors import InputError, RunError, first_line
from exgrpo_cli.base.reporter import Reporter
from exgrpo_cli.config.layers import JOB, read_config
from exgrpo_cli.config.sections.run import SlurmSettings
from exgrpo_cli.config.settings import Config, read_section
from exgrpo_cli.studies.schedule import make_writable, run_all, worker_command
from exgrpo_cli.studies.study import Arm, Study, StudyRun
from exgrpo_cli.studies.worker import RunTask, last_line

if TYPE_CHECKING:
    from submitit import Job

JOBS_FOLDER = "jobs"
"""Folder of a study for scripts, logs and results of its tasks."""
QUERY_SECONDS = 30.0
"""Between two queries to Slurm about all tasks."""
MOST_REQUEUES = 1000
"""A run may need as many stretches of `slurm.hours`."""


@dataclass(kw_only=True, slots=True)
class Slurm:
    """Launcher of runs as tasks of Slurm; a job is submitit's."""

    study: Study
    settings: SlurmSettings
    at_once: int
    """Slurm gets all that are ready."""
    most_kills: int = 3
    _queried: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, study: Study, settings: SlurmSettings) -> "Slurm":
        """Raises InputError for several runs of several hosts, and for a cluster or a folder that cannot be used."""
        if settings.nodes > 1 and len(study.runs) > 1:
            raise InputError(
                f"slurm.nodes = {settings.nodes}: each run of a study has one host; `exgrpo train --launcher slurm` "
                "spreads one run over several."
            )
        make_writable(study.folder)
        require_slurm()
        return cls(study=study, settings=settings, at_once=len(study.runs))

    def start(self, runs: Sequence[StudyRun]) -> "list[Job[Any]]":
        """Submit a task for each run. Raises InputError where Slurm refuses them."""
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        hosts = self.settings.nodes
        tasks = [RunTask(command=worker_command(run), log=run.log.resolve(), num_hosts=hosts) for run in runs]
        executor = make_executor(self.study, self.settings)
        try:
            with executor.batch():
                return [executor.submit(task) for task in tasks]
        except (FailedJobError, FailedSubmissionError) as error:
            # sbatch names the value that is wrong before the kind of mistake.
            said = [
                line.split("error:")[-1].strip().rstrip(".") for line in str(error).splitlines() if "error:" in line
            ]
            reason = "; ".join(dict.fromkeys(said)) or first_line(error).rstrip(".")
            raise InputError(f"sbatch refused {self.study.name}: {reason}. See [slurm] of --config.") from error

    def has_ended(self, job: "Job[Any]") -> bool:
        """Whether the task is over; now and then Slurm is queried about all of them."""
        if time.monotonic() - self._queried > QUERY_SECONDS:
            job.watcher.update()
            self._queried = time.monotonic()
        return bool(job.done())

    def failure(self, run: StudyRun, job: "Job[Any]") -> str | None:
        """Last line of the run where it failed by itself; empty where its task was killed, None where it finished."""
        from submitit.core.utils import FailedJobError

        if run.state == "finished":
            return None
        return last_line(run.log) if isinstance(job.exception(), FailedJobError) else ""

    def stop(self, started: "Sequence[tuple[StudyRun, Job[Any]]]") -> None:
        """Have every task save and end, and wait until no run is written any more."""
        for _, job in started:
            job.cancel(check=False)
        for run, _ in started:
            if run.folder.is_dir():
                with FileLock(run.folder / ".lock"):
                    pass


def launch_run(study: Study, settings: SlurmSettings, *, reporter: Reporter) -> None:
    """Train the one run of `study` on `settings.nodes` hosts.

    Raises InputError, RunError and Interrupted as `run_study` does.
    """
    (run,) = study.runs
    again = f"exgrpo train --resume --output {run.folder} --launcher slurm goes on"
    for _, reason in run_all(study, [run], Slurm.of(study, settings), reporter, again):
        raise RunError(f"{reason} ({run.log})")


def study_of_one(config: Config, folder: Path) -> Study:
    """A run by itself, as launchers take it: its settings, log and jobs lie beside its folder."""
    arm = Arm(name=folder.name, method=config.run.method)
    run = StudyRun(arm=arm, seed=config.run.seed, folder=folder, config=config)
    return Study(name=folder.name, folder=folder.parent, arms=(arm,), runs=(run,))


def script(study: Study, settings: SlurmSettings) -> str:
    """Script of the array job, which `--dry-run` shows."""
    require_slurm()
    executor = make_executor(study, settings)
    executor.parameters["map_count"] = len(study.unfinished)
    return str(executor._make_submission_file_text(executor._submitit_command_str, "dry-run"))


def make_executor(study: Study, settings: SlurmSettings) -> Any:
    """submitit's executor for the study's tasks; settings that are empty or 0 are left to the cluster."""
    import submitit

    named = {
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
    executor = submitit.SlurmExecutor(study.folder.resolve() / JOBS_FOLDER, max_num_timeout=MOST_REQUEUES)
    executor.update_parameters(
        job_name=study.name,
        time=round(60 * settings.hours),
        signal_delay_s=round(60 * settings.save_minutes),
        nodes=settings.nodes,
        ntasks_per_node=1,
        **{key: value for key, value in named.items() if value},
    )
    return executor


def require_slurm() -> None:
    """Raise InputError naming what is missing: submitit, or Slurm's own programs."""
    if find_spec("submitit") is None:
        raise InputError("--launcher slurm needs the submitit package: pip install 'exgrpo[slurm]'.")
    for name in ("sbatch", "srun", "sacct"):
        if shutil.which(name) is None:
            raise InputError(f"--launcher slurm finds no {name} on the path: run it where jobs are submitted.")


def slurm_settings(config_file: Path | None) -> SlurmSettings:
    """The `[slurm]` table of a configuration file; the defaults without one."""
    tables = [(str(config_file), read_config(config_file).get(JOB, {}))] if config_file else []
    return read_section(JOB, (SlurmSettings,), tables)
