"""Running a study: each run is a process of its own, so that one that fails or is killed costs no other.

Finished runs are not run again, unfinished ones go on from their newest checkpoint.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from exgrpo_cli.base.console.reporter import Reporter, make_reporter
from exgrpo_cli.base.console.signals import Stopper
from exgrpo_cli.base.errors import InputError, Interrupted, RunError
from exgrpo_cli.base.files import write_text
from exgrpo_cli.config.sections.run import SlurmSettings
from exgrpo_cli.config.settings import to_toml
from exgrpo_cli.machine.settle import require_runnable, settle
from exgrpo_cli.machine.survey import survey_machine, visible_gpus
from exgrpo_cli.runs.folder import RunFolder
from exgrpo_cli.studies.duration import estimate, progress, time_to_go
from exgrpo_cli.studies.results.report import StudyReport
from exgrpo_cli.studies.results.writing import keep_results, report_study
from exgrpo_cli.studies.run_log import RunLog, last_line
from exgrpo_cli.studies.study import Study, StudyRun, budgeted, is_ready
from exgrpo_cli.studies.study_files import write_plan

POLL_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """A run under way."""

    run: StudyRun
    process: subprocess.Popen[bytes]
    log: RunLog

    @property
    def label(self) -> str:
        """Arm and seed, as progress and errors name the run."""
        return f"{self.run.arm.name}, seed {self.run.seed}"


def compare(
    study: Study, *, jobs: int, quiet: bool, launcher: str | None = None, slurm: SlurmSettings | None = None
) -> StudyReport:
    """Run what is not finished and compare the arms: as processes of this one, or by a launcher's tasks.

    Raises as `run_study` and `launch_study`, and InputError for a machine too small where the runs are to be on it.
    """
    from exgrpo_cli.studies.cluster.launch import launch_study

    if launcher != "slurm":
        require_runnable(settle(study.runs[0].config, survey_machine())[1])
    reporter = make_reporter(quiet=quiet)
    try:
        if launcher is None:
            run_study(study, jobs=jobs, reporter=reporter)
        else:
            launch_study(study, launcher, slurm or SlurmSettings(), jobs=jobs, reporter=reporter)
    finally:
        reporter.close()
    return report_study(study)


def run_study(study: Study, *, jobs: int, reporter: Reporter) -> None:
    """Run what is not finished, `jobs` at a time (0: as many as the cores carry).

    Raises RunError after the others have ended when runs failed, Interrupted after a stop signal with all states saved.
    """
    make_writable(study.folder)
    write_beginning(study)
    # The baseline first: its runs set the budgets of the others.
    unfinished = [run for run in study.runs if run.state != "finished"]
    waiting = sorted(unfinished, key=lambda run: study.equal != "steps" and run.arm.name != run.arm.baseline)
    reporter.note(f"{len(study.runs)} runs, {len(study.runs) - len(waiting)} finished already")
    jobs, told = jobs_of(study, jobs), False
    started: list[Started] = []
    failed: list[Started] = []
    with Stopper() as stopper:
        try:
            while waiting or started:
                ready = [run for run in waiting if is_ready(study, run)][: jobs - len(started)]
                for run in ready:
                    waiting.remove(run)
                    started.append(start(with_threads(budgeted(study, run), jobs), reporter))
                if not started:
                    reporter.note(f"{len(waiting)} runs wait for a baseline that failed")
                    break
                # Cut short in here alone: a run that was started and not yet listed would go on by itself.
                with stopper.immediate():
                    time.sleep(POLL_SECONDS)
                failed += collect_ended(started, reporter)
                if not told and (told := estimate(study, jobs) is not None):
                    reporter.note(time_to_go(study, jobs))
        except KeyboardInterrupt:
            stop(started)
            raise Interrupted(
                f"stopped, states saved; the same command goes on with the study in {study.folder}"
            ) from None
        finally:
            stop(started)
    if failed:
        raise RunError(
            f"{len(failed)} of {len(study.runs)} runs failed, first {failed[0].label}: "
            f"{failure_reason(failed[0])} (see {failed[0].log.path}); the same command tries them again."
        )


def collect_ended(started: list[Started], reporter: Reporter) -> list[Started]:
    """Report how far each run is, take the ended ones out of `started`, and return those that failed.

    Warns (DamageWarning) of what a run has found damaged and passed over.
    """
    failed = []
    ended = [job for job in started if job.process.poll() is not None]
    for job in started:
        job.log.tell_damage(job.label)
    for job in ended:
        started.remove(job)
        if job.process.returncode:
            failed.append(job)
            reporter.note(f"{job.label} failed: {failure_reason(job)}")
        else:
            whole = progress(job.run)[1]
            reporter.progress(whole, whole, job.label)
    for job in started:
        reporter.progress(*progress(job.run), job.label)
    return failed


def failure_reason(failed: Started) -> str:
    """What killed the run, or else the last line of its log: one that was killed had no time to say so."""
    code = failed.process.returncode
    return f"ended by a signal ({signal.strsignal(-code)})" if code < 0 else last_line(failed.log.path)


def make_writable(folder: Path) -> None:
    """Make the study's folder; raises InputError where it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(f"{folder} cannot be written ({error.strerror}): choose another --output.") from error


def write_beginning(study: Study) -> None:
    """Keep the study's arms and seeds, and results of other machines, which a study that is killed would forget.

    Raises RunError where the disk refuses, InputError for a damaged result of a finished run.
    """
    seeds = {arm.name: [run.seed for run in study.runs if run.arm == arm] for arm in study.arms}
    write_plan(study.folder, study.arms, equal=study.equal, claims=study.claims, seeds=seeds)
    keep_results(study)


def jobs_of(study: Study, jobs: int) -> int:
    """Runs at a time: `jobs`, or where that is 0 as many as fill the cores, with one thread each unless settings say
    more; one on a GPU, with several ranks, and where seconds are counted."""
    run = study.runs[0].config.run
    if study.equal == "seconds":
        return 1
    on_gpu = run.device == "cuda" or (run.device == "auto" and bool(visible_gpus()))
    if jobs or on_gpu or run.nproc != 1:
        return jobs or 1
    waiting = sum(each.state != "finished" for each in study.runs)
    return max(1, min(waiting, len(os.sched_getaffinity(0)) // max(1, run.threads)))


def with_threads(run: StudyRun, jobs: int) -> StudyRun:
    """The run with its part of the cores, where its settings leave the threads open."""
    settings = run.config.run
    if settings.threads > 0 or jobs == 1:
        return run
    threads = max(1, len(os.sched_getaffinity(0)) // jobs)
    return replace(run, config=replace(run.config, run=replace(settings, threads=threads)))


def start(run: StudyRun, reporter: Reporter) -> Started:
    """Start one run in a process group of its own, its talk in `seed-<n>.log`, its settings in `seed-<n>.toml`."""
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    if run.state == "new" and run.folder.exists():
        clear_torn(run.folder)
    settings = run.asked_file
    write_text(settings, to_toml(run.config))
    log = RunLog(run.folder)
    with log.path.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "exgrpo_cli.studies.worker", str(settings), str(run.folder), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    job = Started(run=run, process=process, log=log)
    reporter.progress(0, run.config.run.steps, job.label)
    return job


def clear_torn(folder: Path) -> None:
    """Remove what a run left that was killed while it was set up: without a configuration nothing can go on with it.

    Raises InputError where another process is setting it up.
    """
    with RunFolder(folder).locked():
        shutil.rmtree(folder)


def stop(started: list[Started]) -> None:
    """Ask every run to save and stop, and wait for it."""
    for job in started:
        if job.process.poll() is None:
            job.process.send_signal(signal.SIGTERM)
    for job in started:
        job.process.wait()
