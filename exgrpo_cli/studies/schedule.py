"""Running a study: each run is a process of its own, so that one that fails or is killed costs no other.

Finished runs are not run again, unfinished ones go on from their newest checkpoint. One loop starts what is ready and
watches it to its end; a launcher says how: as processes of this one, or as tasks of submitit on Slurm (one array job
of arms x seeds, or one run over several hosts), saved and requeued when their time is over, submitted again when they
were killed.
"""

import itertools
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
from filelock import FileLock

from exgrpo_cli.base import files, output, versions
from exgrpo_cli.base.errors import DamageWarning, InputError, Interrupted, RunError, first_line
from exgrpo_cli.base.reporter import Reporter, make_reporter, spent
from exgrpo_cli.config.layers import JOB, read_config
from exgrpo_cli.config.sections.run import SlurmSettings
from exgrpo_cli.config.settings import Author, Config, Written, read_section, to_toml
from exgrpo_cli.machine.settle import require_runnable, settle
from exgrpo_cli.machine.survey import survey_machine, visible_gpus
from exgrpo_cli.runs.folder import METRICS_FILE
from exgrpo_cli.studies import report, worker
from exgrpo_cli.studies.output import duration, report_study
from exgrpo_cli.studies.study import JOBS_FOLDER, Arm, Study, StudyRun, budgeted

# -P: whatever lies in the working folder is no module of the program's.
PYTHON = (sys.executable, "-P")
WORKER = (*PYTHON, "-m", "exgrpo_cli.studies.worker")
Process = subprocess.Popen[bytes] | worker.Fork
POLL_SECONDS = 0.5
QUERY_SECONDS = 30.0
"""Between two queries to Slurm about all tasks."""
MOST_REQUEUES = 1000
"""A run may need as many stretches of `slurm.hours`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Processes:
    """Launcher of runs as processes of this one; a job is such a process."""

    at_once: int
    """Runs under way at a time."""
    most_kills: int = 0
    """Kills of one run after which it counts as failed."""

    def start(self, runs: Sequence[StudyRun]) -> list[Process]:
        """Start runs whose budgets are known, each in a process group of its own, its output in `seed-<n>.log`.

        Each has its part of the cores, where its settings leave the threads open. On a CPU they are forks of one
        process that has made a run's imports.
        """
        part = max(1, versions.usable_cores() // self.at_once)
        runs = [run if run.config.run.threads or self.at_once == 1 else run.given(threads=part) for run in runs]
        return [self._start(run, worker_command(run)) for run in runs]

    def _start(self, run: StudyRun, command: list[str]) -> Process:
        settings = run.config.run
        if settings.nproc <= 1 and not (settings.wants_gpus and visible_gpus()):
            return worker.fork_process(Path(command[-2]), Path(command[-1]), run.log.resolve())
        return worker.start_process([*command, str(os.getpid())], run.log)

    def has_ended(self, job: Process) -> bool:
        """Whether the job is over."""
        return job.poll() is not None

    def failure(self, run: StudyRun, job: Process) -> str | None:
        """Reason why an ended run has not finished; empty where it was killed and may go on, None where it has.

        The signal that killed it, which had no time to say so, or else the last line of its log.
        """
        code = job.poll() or 0
        if code < 0:
            return f"ended by a signal ({signal.strsignal(-code)})"
        return worker.last_line(run.log) if code else None

    def stop(self, started: Sequence[tuple[StudyRun, Process]]) -> None:
        """Have every run save and end, and wait until none is written any more."""
        for _, job in started:
            job.terminate()
        for _, job in started:
            job.wait()


@dataclass(kw_only=True, slots=True)
class Slurm:
    """Launcher of runs as tasks of Slurm; a job is submitit's `Job`."""

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
            instead = "`exgrpo train --launcher slurm` spreads one run over several"
            raise InputError(f"slurm.nodes = {settings.nodes}: each run of a study has one host; {instead}.")
        files.require_writable(study.folder / JOBS_FOLDER)
        require_slurm()
        return cls(study=study, settings=settings, at_once=len(study.runs))

    def start(self, runs: Sequence[StudyRun]) -> list[Any]:
        """Submit a task for each run. Raises InputError where Slurm refuses them."""
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        hosts = self.settings.nodes
        tasks = [worker.RunTask(command=worker_command(run), log=run.log.resolve(), num_hosts=hosts) for run in runs]
        jobs = self.study.folder.resolve() / JOBS_FOLDER
        jobs.mkdir(parents=True, exist_ok=True)
        # submitit unpickles what lies in its folder by the number of a job: nothing does that was there before.
        own = Path(mkdtemp(prefix=f"{datetime.now():%Y%m%d-%H%M%S}-", dir=jobs))
        executor = make_executor(self.study, self.settings, own)
        try:
            with executor.batch():
                return [executor.submit(task) for task in tasks]
        except (FailedJobError, FailedSubmissionError) as error:
            # sbatch names the value that is wrong before the kind of mistake.
            said = re.findall(r"error: *(.*?)\.?$", str(error), re.MULTILINE)
            reason = "; ".join(dict.fromkeys(said)) or first_line(error).rstrip(".")
            raise InputError(f"sbatch refused {self.study.name}: {reason}. See [slurm] of --config.") from error

    def has_ended(self, job: Any) -> bool:
        """Whether the task is over; now and then Slurm is queried about all of them."""
        if time.monotonic() - self._queried > QUERY_SECONDS:
            job.watcher.update()
            self._queried = time.monotonic()
        return bool(job.done())

    def failure(self, run: StudyRun, job: Any) -> str | None:
        """Last line of the run where it failed by itself; empty where its task was killed, None where it finished."""
        from submitit.core.utils import FailedJobError

        if run.state == "finished":
            return None
        return worker.last_line(run.log) if isinstance(job.exception(), FailedJobError) else ""

    def stop(self, started: Sequence[tuple[StudyRun, Any]]) -> None:
        """Have every task save and end, and wait until no run is written any more."""
        for _, job in started:
            job.cancel(check=False)
        for run, _ in started:
            if run.folder.is_dir():
                with FileLock(run.folder / ".lock"):
                    pass


def make_executor(study: Study, settings: SlurmSettings, jobs: Path) -> Any:
    """submitit's executor for the study's tasks, with its files in `jobs`; settings that are empty or 0 are left to the
    cluster.

    Raises InputError for a folder whose name would be more than a line of the script.
    """
    import submitit

    if not str(study.folder.resolve()).isprintable():
        raise InputError(f"{str(study.folder)!r} has control characters in its name: choose another for a Slurm job.")
    named = {name: getattr(settings, name) for name in ("partition", "account", "qos", "constraint")}
    named |= {
        "gpus_per_node": settings.gpus,
        "cpus_per_task": settings.cpus,
        "mem": f"{settings.memory_gb:g}GB" if settings.memory_gb else "",
        "array_parallelism": settings.parallel,
        "setup": list(settings.setup),
    }
    executor = submitit.SlurmExecutor(jobs, max_num_timeout=MOST_REQUEUES, python=shlex.join(PYTHON))
    executor.update_parameters(
        job_name=study.name,
        time=round(60 * settings.hours),
        signal_delay_s=round(60 * settings.save_minutes),
        nodes=settings.nodes,
        ntasks_per_node=1,
        # Of Slurm 22.05 to 23.02 srun does not take them over from the job.
        srun_args=[f"--cpus-per-task={settings.cpus}"] if settings.cpus else [],
        **{key: value for key, value in named.items() if value},
    )
    return executor


def script(study: Study, settings: SlurmSettings) -> str:
    """Script of the array job, which `--dry-run` shows; of a submitit that does not show it, what it is made of."""
    require_slurm()
    executor = make_executor(study, settings, study.folder.resolve() / JOBS_FOLDER)
    executor.parameters["map_count"] = len(study.unfinished)
    try:
        return str(executor._make_submission_file_text(executor._submitit_command_str, "dry-run"))
    # Neither is a public name: the first where one is gone, the second where a launcher of submitit's has no such text.
    except (AttributeError, NotImplementedError):
        given = "".join(f"# {name} = {value!r}\n" for name, value in executor.parameters.items())
        return f"# This submitit does not show its script, which is made of:\n{given}"


def slurm_settings(config_file: Path | None, *, allow_code: bool = False) -> SlurmSettings:
    """The `[slurm]` table of a configuration file; the defaults without one.

    Raises InputError for a bad value, and for shell commands (`setup`) unless `allow_code`.
    """
    table = read_config(config_file).get(JOB, {}) if config_file else {}
    return read_section(JOB, (SlurmSettings,), [Written(str(config_file), table, Author.of_file(allow_code))])


def require_slurm() -> None:
    """Raise InputError naming what is missing: submitit, or Slurm's own programs."""
    if find_spec("submitit") is None:
        raise InputError(f"--launcher slurm needs the submitit package: {versions.install_command('slurm')}.")
    for name in ("sbatch", "srun", "sacct"):
        if shutil.which(name) is None:
            raise InputError(f"--launcher slurm finds no {name} on the path: run it where jobs are submitted.")


def compare(study: Study, *, jobs: int, quiet: bool, slurm: SlurmSettings | None = None) -> report.Numbers:
    """Run what is not finished and compare the arms: `jobs` runs at a time on this machine, or as tasks of Slurm.

    Raises as `run_study`, and InputError for a machine too small where the runs are to be on it.
    """
    if slurm is None:
        require_runnable(settle(study.runs[0].config, survey_machine())[1])
    launcher = Processes(at_once=jobs_of(study, jobs)) if slurm is None else Slurm.of(study, slurm)
    with make_reporter(quiet=quiet) as reporter:
        run_study(study, launcher, reporter)
    return report_study(study)


def launch_run(study: Study, settings: SlurmSettings, *, reporter: Reporter) -> None:
    """Train the one run of `study` on `settings.nodes` hosts.

    Raises InputError, RunError and Interrupted as `run_study` does.
    """
    (run,) = study.runs
    study.require_own_places()
    again = f"exgrpo train --resume --output {run.folder} --launcher slurm goes on"
    for _, reason in run_all(study, [run], Slurm.of(study, settings), reporter, again):
        raise RunError(f"{reason} ({run.log})")


def study_of_one(config: Config, folder: Path) -> Study:
    """A run by itself, as launchers take it: its settings, log and jobs lie beside its folder."""
    arm = Arm(name=folder.name, method=config.run.method)
    run = StudyRun(arm=arm, seed=config.run.seed, folder=folder, config=config)
    return Study(name=folder.name, folder=folder.parent, arms=(arm,), runs=(run,))


def run_study(study: Study, launcher: Processes | Slurm, reporter: Reporter) -> None:
    """Run what is not finished and keep the results.

    Raises InputError for a folder or a cluster that cannot be used, RunError where runs failed, after the others have
    ended, and Interrupted after a stop signal with all states saved.
    """
    study.require_own_places()
    study.write_beginning()
    # The baseline first: its runs set the budgets of the others.
    waiting = sorted(study.unfinished, key=lambda run: study.equal != "steps" and run.arm.name != run.arm.baseline)
    reporter.note(f"{len(study.runs)} runs, {len(study.runs) - len(waiting)} finished already")
    failed = run_all(study, waiting, launcher, reporter, f"the same command goes on with the study in {study.folder}")
    for run, reason in failed[:1]:
        many = f"{len(failed)} of {len(study.runs)} runs failed"
        raise RunError(f"{many}, first {run.label}: {reason} (see {run.log}); the same command tries them again.")


def run_all(
    study: Study, waiting: Sequence[StudyRun], launcher: Processes | Slurm, reporter: Reporter, how_to_go_on: str
) -> list[tuple[StudyRun, str]]:
    """Start each run once its budget is known, watch all to their end; returns those that failed, with the reason.

    Warns (DamageWarning) of damage that a run has found and passed over. Raises Interrupted after a stop signal.
    """
    waiting = list(waiting)
    shares = {run.label: done_share(run) for run in waiting}
    started: dict[str, tuple[StudyRun, Any, int]] = {}
    kills: Counter[str] = Counter()
    failed: list[tuple[StudyRun, str]] = []
    with output.Stopper() as stopper:
        try:
            while waiting or started:
                shares |= {label: done_share(run) for label, (run, *_) in started.items()}
                left = [*(run.label for run in waiting), *started, *(run.label for run, _ in failed)]
                done = 100 - math.ceil(100 * sum(1 - shares[label] for label in left) / len(study.runs))
                if len(study.runs) > 1:
                    reporter.progress(min(done, 99), 100, "the study, in per cent")
                given = (each for run in waiting if (each := budgeted(study, run)) is not None)
                ready = list(itertools.islice(given, launcher.at_once - len(started)))
                begun = {run.label for run in ready}
                waiting = [run for run in waiting if run.label not in begun]
                # What stands in a log before is an earlier process's.
                ends = [run.log.stat().st_size if run.log.is_file() else 0 for run in ready]
                jobs = launcher.start(ready) if ready else []
                for run, job, end in zip(ready, jobs, ends, strict=True):
                    started[run.label] = run, job, end
                    show_progress(reporter, run)
                if not started:
                    reporter.note(f"{len(waiting)} runs wait for a baseline that failed")
                    break
                # Cut short in here alone: a run that was started and not yet listed would go on by itself.
                with stopper.immediate():
                    time.sleep(POLL_SECONDS)
                for label, (run, job, end) in list(started.items()):
                    if not launcher.has_ended(job):
                        show_progress(reporter, run)
                        # What it does between two steps: its log tells that, its journal does not.
                        reporter.phase(f"{label}: {worker.last_line(run.log)}")
                        continue
                    del started[label]
                    pass_on_damage(run, end)
                    reason = launcher.failure(run, job)
                    if reason is None:
                        show_progress(reporter, run, ended=True)
                        reporter.note(f"{label}: done")
                    elif not reason and kills[label] < launcher.most_kills:
                        kills[label] += 1
                        reporter.note(f"{label}: its task was killed; submitted again")
                        waiting.append(run)
                    else:
                        failed.append((run, reason or f"killed {kills[label] + 1} times"))
                        reporter.note(f"{label} failed: {failed[-1][1]}")
        except KeyboardInterrupt:
            raise Interrupted(f"stopped, states saved; {how_to_go_on}") from None
        finally:
            launcher.stop([(run, job) for run, job, _ in started.values()])
    return failed


def show_progress(reporter: Reporter, run: StudyRun, *, ended: bool = False) -> None:
    """Show how much of its budget a run has spent; one that is still validating has not ended."""
    done, whole = progress(run)
    unit = {"steps": "steps", "seconds": "seconds"}.get(run.config.run.budget, "tokens")
    reporter.progress(whole if ended else min(done, whole - 1), whole, f"{run.label}, {unit}")


def pass_on_damage(run: StudyRun, start: int) -> None:
    """Warn (DamageWarning) of damage that the run has found and passed over, by its log from byte `start` on."""
    lines = run.log.read_bytes()[start:].decode(errors="replace").splitlines() if run.log.is_file() else []
    for line in lines:
        if line.startswith(worker.DAMAGE):
            warnings.warn(f"{run.label}: {line.removeprefix(worker.DAMAGE)}", DamageWarning, stacklevel=2)


def worker_command(run: StudyRun) -> list[str]:
    """Command of the run's worker without its last argument, the process that it must not outlive.

    Writes its settings beside its folder.
    """
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(run.asked_file, to_toml(run.config))
    return [*WORKER, str(run.asked_file.resolve()), str(run.folder.resolve())]


def jobs_of(study: Study, jobs: int) -> int:
    """Runs at a time: `jobs`, or where that is 0 as many as fill the cores, with one thread each unless settings say
    more; one on a GPU, with several ranks, and where seconds are counted."""
    run = study.runs[0].config.run
    if study.equal == "seconds":
        return 1
    on_gpu = run.device in ("cuda", "mps") or (run.device == "auto" and bool(visible_gpus()))
    if jobs or on_gpu or run.nproc != 1:
        return jobs or 1
    return max(1, min(len(study.unfinished), versions.usable_cores() // max(1, run.threads)))


def time_to_go(study: Study, jobs: int) -> str:
    """Number of runs that are left and time that they take, for people."""
    if not study.unfinished:
        return f"nothing to go: {len(study.runs)} of {len(study.runs)} runs are finished"
    seconds = estimate(study, jobs)
    takes = "how long shows once one has made a step" if seconds is None else f"about {duration(seconds)}"
    return f"{len(study.unfinished)} of {len(study.runs)} runs to go, {jobs} at a time: {takes}"


def estimate(study: Study, jobs: int) -> float | None:
    """Seconds of the unfinished runs, `jobs` at a time; None while no run has been measured.

    A run takes as long as those of its arm took, or will take by their newest step, else as the study says, else as
    any took.
    """
    measured: dict[str, list[float]] = defaultdict(list)
    for run in study.runs:
        if (result := run.read_result()) is not None:
            measured[run.arm.name].append(result.totals.seconds)
        elif (line := files.last_json_line(run.folder / METRICS_FILE)) is not None:
            measured[run.arm.name].append(float(line["time/step"]) * line["step"] / done_share(run))
    usual = [seconds for each in measured.values() for seconds in each]
    stated = {arm: [seconds] for arm, seconds in study.run_seconds.items()}
    total = 0.0
    for run in study.unfinished:
        known = measured[run.arm.name] or stated.get(run.arm.name) or usual
        if not known:
            return None
        total += float(np.mean(known)) * (1 - done_share(run))
    return total / jobs


def done_share(run: StudyRun) -> float:
    """Share of its budget that an unfinished run has spent."""
    done, whole = progress(run)
    return min(1.0, done / whole)


def progress(run: StudyRun) -> tuple[int, int]:
    """Budget that a run has spent, and the whole of it: steps, tokens or seconds."""
    line, settings = files.last_json_line(run.folder / METRICS_FILE), run.config.run
    if line is None:
        return 0, settings.whole_budget
    # The baseline of its seed may have given it another budget when it started: steps tell nearly as much.
    return int(line["step"]) if settings.budget == "steps" else spent(line), settings.whole_budget
