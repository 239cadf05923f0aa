"""How long what is left of a study takes, from the step times that its runs have measured."""

import numpy as np

from exgrpo_cli.base.console.reporter import spent
from exgrpo_cli.base.files import last_json_line
from exgrpo_cli.runs.metrics import METRICS_FILE
from exgrpo_cli.studies.study import Study, StudyRun


def time_to_go(study: Study, jobs: int) -> str:
    """How many runs are left and how long they take, for people."""
    unfinished = sum(run.state != "finished" for run in study.runs)
    seconds = estimate(study, jobs)
    takes = "how long shows once one has made a step" if seconds is None else f"about {duration(seconds)}"
    return f"{unfinished} of {len(study.runs)} runs to go, {jobs} at a time: {takes}"


def estimate(study: Study, jobs: int) -> float | None:
    """Seconds of the unfinished runs, `jobs` at a time; None while no run has been measured.

    A run takes as long as those of its arm took, else those of its regime, else as the study says, else as any took.
    """
    measured = [(run, seconds) for run in study.runs if (seconds := whole_seconds(run)) is not None]
    total = 0.0
    for run in study.runs:
        if run.state == "finished":
            continue
        own = [seconds for other, seconds in measured if other.arm == run.arm]
        alike = [seconds for other, seconds in measured if other.arm.regime == run.arm.regime]
        assumed = [study.run_seconds[run.arm.name]] if run.arm.name in study.run_seconds else []
        known = own or alike or assumed or [seconds for _, seconds in measured]
        if not known:
            return None
        total += float(np.mean(known)) * (1 - done_share(run))
    return total / jobs


def whole_seconds(run: StudyRun) -> float | None:
    """Seconds that a run took, or will take by its newest step; None where it has made no step."""
    result = run.read_result()
    if result is not None:
        return result.totals.seconds
    line = last_json_line(run.folder / METRICS_FILE)
    return None if line is None else float(line["time/step"]) * line["step"] / done_share(run)


def done_share(run: StudyRun) -> float:
    """Share of its budget that an unfinished run has spent."""
    done, whole = progress(run)
    return min(1.0, done / whole)


def progress(run: StudyRun) -> tuple[int, int]:
    """What a run has spent of its budget, and the whole of it: steps, tokens or seconds."""
    line, settings = last_json_line(run.folder / METRICS_FILE), run.config.run
    if settings.budget == "steps":
        # The baseline of its seed may have given it another budget when it started: steps tell nearly as much.
        return int(line["step"]) if line else 0, settings.steps
    return spent(line) if line else 0, settings.whole_budget


def duration(seconds: float) -> str:
    """Hours and minutes for people: 45 s, 12 min, 3 h 05 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
