"""A study: its arms, its runs with their states and results, their budgets, and what it keeps in its folder.

An arm is a method with a few settings of its own, in a regime; the on-policy arm is the baseline.
"""

import os
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from exgrpo_cli.base.errors import DamageWarning, InputError
from exgrpo_cli.base.files import read_json, require_place, require_shape, values_digest, write_json
from exgrpo_cli.config.layers import DEFAULT_METHOD
from exgrpo_cli.config.sections.run import Budget
from exgrpo_cli.config.settings import Config, Layer, flat
from exgrpo_cli.runs.folder import require_own
from exgrpo_cli.runs.result import RESULT_FILE, SUFFIX, RunResult, has_ended, read_result, write_result
from exgrpo_cli.show.record import read_config

EQUAL: tuple[str, ...] = get_args(Budget)
"""Budgets in which the arms of a study may be equal."""
PLAN_FILE = "study.json"
"""In the study's folder: its arms, which cannot all be told from the names of folders, and their seeds."""
RESULTS_FOLDER = "results"
"""Folder of a study with a copy of each finished run's result, all that another machine needs of it."""
JOBS_FOLDER = "jobs"
"""Folder of a study for scripts, logs and results of the tasks of Slurm, of each submission in a folder of its own."""

Results = Mapping[int, RunResult]
"""Results of one arm by seed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One row of a study."""

    name: str
    method: str = DEFAULT_METHOD
    """Method preset, or a method's file."""
    assignments: tuple[str, ...] = ()
    """`section.key=value` texts that set the arm apart."""
    regime: str | None = None
    """Regime preset; None leaves the backbone's own task, start and lengths."""
    baseline: str = ""
    """Name of the arm that this one is compared with, its own where it is one."""
    of_file: bool = False
    """Whether a claim's file says the assignments, not the user or a shipped claim."""

    @property
    def identity(self) -> tuple[str, tuple[str, ...], str | None]:
        """Identity of the arm, whatever it is called."""
        return self.method, self.assignments, self.regime

    @property
    def folder_name(self) -> str:
        """The arm's name as a folder name: `ent:min` is `ent-min`."""
        return re.sub(r"[^A-Za-z0-9._=-]+|^\.+$", "-", self.name)


BASELINE = Arm(name="on-policy", method="grpo")


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyRun:
    """One arm with one seed."""

    arm: Arm
    seed: int
    folder: Path
    config: Config

    result: RunResult | None = None
    """Found beside the run folders: made by an earlier call, or on another machine."""

    @property
    def label(self) -> str:
        """Arm and seed, as progress and errors name the run."""
        return f"{self.arm.name}, seed {self.seed}"

    @property
    def asked_file(self) -> Path:
        """Settings that the run was asked to have, before it pinned what its machine decides."""
        return self.folder.with_name(f"{self.folder.name}.toml")

    @property
    def log(self) -> Path:
        """The file with all that the run wrote to its terminal."""
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def state(self) -> str:
        """ "finished", "unfinished" or "new", from what is on disk."""
        if self.result is not None or has_ended(self.folder, self.config.run.steps):
            return "finished"
        return "unfinished" if (self.folder / "config.toml").is_file() else "new"

    def read_result(self) -> RunResult | None:
        """Result of the finished run; None before it has finished."""
        path = self.folder / RESULT_FILE
        if self.result is not None:
            return self.result
        return read_result(path) if path.is_file() and self.state == "finished" else None

    def given(self, **settings: Any) -> "StudyRun":
        """The run with settings of `[run]` that the study decides: its budget, its part of the cores."""
        return replace(self, config=replace(self.config, run=replace(self.config.run, **settings)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """Arms x seeds."""

    name: str
    folder: Path
    arms: tuple[Arm, ...]
    runs: tuple[StudyRun, ...]
    equal: str = "steps"
    """Budget of all arms of a seed: `steps`, or the baseline's `generated` or `trained` tokens or `seconds`."""
    claims: Mapping[str, Layer] = field(default_factory=dict)
    """The claims that the runs are of, by name, as their files state them."""
    run_seconds: Mapping[str, float] = field(default_factory=dict)
    """Time of a run by arm, where it is known before one has been measured here."""
    others: Mapping[tuple[str, int], RunResult] = field(default_factory=dict)
    """Results by arm and seed of runs that are not among `runs`."""
    planned: frozenset[tuple[str, int]] = frozenset()
    """Arm and seed of all runs that the folder was last asked for, where it is read and not planned."""

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds of any run, in order."""
        return tuple(sorted({run.seed for run in self.runs} | {seed for _, seed in self.others}))

    @property
    def baselines(self) -> tuple[str, ...]:
        """Names of the arms that others are compared with."""
        return tuple(dict.fromkeys(arm.baseline for arm in self.arms if arm.baseline))

    @property
    def unfinished(self) -> list[StudyRun]:
        """Runs that are still to be done."""
        return [run for run in self.runs if run.state != "finished"]

    def results(self) -> dict[str, dict[int, RunResult]]:
        """Results of the finished runs, by arm and seed; arms without one are left out."""
        mine = {(run.arm.name, run.seed): run.read_result() for run in self.runs}
        found: dict[str, dict[int, RunResult]] = {}
        for (arm, seed), result in [*self.others.items(), *mine.items()]:
            if result is not None:
                found.setdefault(arm, {})[seed] = result
        return found

    def describe(self) -> dict[str, Any]:
        """The plan as JSON: what `--dry-run` prints."""
        runs = [
            dict(arm=run.arm.name, seed=run.seed, folder=str(run.folder), steps=run.config.run.steps, state=run.state)
            for run in self.runs
        ]
        return {
            "name": self.name,
            "folder": str(self.folder),
            "baseline": ", ".join(self.baselines),
            "equal": self.equal,
            "runs": runs,
        }

    def require_own_places(self) -> None:
        """Raise InputError where what the study writes to is a link out of its folder, or a log no file."""
        places = [self.folder / name for name in (RESULTS_FOLDER, JOBS_FOLDER)]
        for run in self.runs:
            places += [run.folder.parent, run.folder, run.log]
        require_own(self.folder, places)
        for run in self.runs:
            require_place(run.log)

    def write_beginning(self) -> None:
        """Keep arms, seeds and results of other machines, which a study that is killed would forget.

        Raises RunError where the disk refuses, InputError for a damaged result of a finished run.
        """
        seeds = {arm.name: tuple(run.seed for run in self.runs if run.arm == arm) for arm in self.arms}
        plan = asdict(StudyPlan(equal=self.equal, claims=self.claims, arms=self.arms, seeds=seeds))
        write_json(self.folder / PLAN_FILE, plan | {"checksum": values_digest(plan)})
        self.keep_results()

    def keep_results(self) -> None:
        """Copy the finished runs' results into `results/`: another machine, or a later study, counts them as runs."""
        results = self.results()
        for arm in self.arms:
            for seed, result in results.get(arm.name, {}).items():
                path = self.folder / RESULTS_FOLDER / f"{arm.folder_name}-{seed}{SUFFIX}"
                if not path.is_file():
                    write_result(path, result)


def budgeted(study: Study, run: StudyRun) -> StudyRun | None:
    """The run with the budget that the baseline spent with the same seed; None before that run has finished.

    Itself for a baseline and with equal steps. Raises InputError where the baseline's run has lost its result.
    """
    if study.equal == "steps" or run.arm.name == run.arm.baseline:
        return run
    source = next(other for other in study.runs if other.arm.name == run.arm.baseline and other.seed == run.seed)
    if source.state != "finished":
        return None
    result = source.read_result()
    if result is None:
        raise InputError(f"{source.folder} has no {RESULT_FILE}: remove the folder to run it again.")
    spent = getattr(result.totals, "training_seconds" if study.equal == "seconds" else study.equal)
    return run.given(budget=study.equal, budget_amount=float(spent))


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyPlan:
    """Plan of a study's runs in `study.json`."""

    equal: str = "steps"
    claims: Mapping[str, Layer] = field(default_factory=dict)
    arms: tuple[Arm, ...] = ()
    seeds: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """By arm, those that were asked for."""


def read_plan(folder: Path) -> StudyPlan:
    """The plan as it was kept; no arms where no study was begun there. Raises InputError for a damaged file."""
    path = folder / PLAN_FILE
    if not os.path.lexists(path):
        return StudyPlan()
    try:
        plan = read_json(path)
        if plan.pop("checksum", None) != values_digest(plan):
            raise InputError(f"{path} is damaged (other values than were written): restore it from a copy.")
        return require_shape(plan, StudyPlan, str(path))
    except InputError as error:
        raise InputError(f"{error} Without a copy remove it: the same `exgrpo ablate` writes it again.") from error


def kept_results(folder: Path, arms: Iterable[Arm]) -> dict[tuple[str, int], RunResult]:
    """The results that a study has kept, by arm and seed. Raises InputError for a damaged one."""
    by_folder, found = {arm.folder_name: arm.name for arm in arms}, {}
    for path in (folder / RESULTS_FOLDER).glob(f"*{SUFFIX}"):
        name, _, seed = path.name.removesuffix(SUFFIX).rpartition("-")
        if name in by_folder and seed.isdecimal():
            found[by_folder[name], int(seed)] = read_result(path)
    return found


def read_study(folder: Path) -> tuple[Study, list[tuple[Path, str]]]:
    """The study that the folder's runs make up, and the runs whose configuration cannot be read, with the reason.

    Arms are those that `study.json` tells; without it an arm is named by its folder, and the baseline is the on-policy
    one, where there is one.
    """
    runs, broken = [], []
    plan = read_plan(folder)
    if not plan.arms and (folder / RESULTS_FOLDER).is_dir():
        warnings.warn(
            f"{folder / PLAN_FILE} is missing: arms are called after their folders, and results of other machines are "
            "left out. The same `exgrpo ablate` writes it again.",
            DamageWarning,
            stacklevel=2,
        )
    by_folder = {arm.folder_name: arm for arm in plan.arms}
    for path in sorted(folder.glob("*/seed-*/")):
        try:
            config, seed = read_config(path), int(path.name.removeprefix("seed-"))
            if config.run.seed != seed:
                raise InputError(f"{path} holds a run with seed {config.run.seed}: it is left out.")
            if plan.arms and path.parent.name not in by_folder:
                raise InputError(f"{path.parent.name} is no arm of {PLAN_FILE}: it is left out.")
        except (InputError, ValueError) as error:
            broken.append((path, str(error)))
        else:
            arm = by_folder.get(path.parent.name) or Arm(name=path.parent.name, method=config.run.method)
            runs.append(StudyRun(arm=arm, seed=seed, folder=path, config=config))
    if not plan.arms and any(run.arm.name == BASELINE.name for run in runs):
        runs = [replace(run, arm=replace(run.arm, baseline=BASELINE.name)) for run in runs]
    arms = plan.arms or tuple(dict.fromkeys(run.arm for run in runs))
    study = Study(
        name=folder.resolve().name,
        folder=folder,
        arms=tuple(sorted(arms, key=lambda arm: arm.name != arm.baseline)),
        runs=tuple(runs),
        equal=plan.equal,
        claims=plan.claims,
        others=kept_results(folder, plan.arms),
        planned=frozenset((arm, seed) for arm, seeds in plan.seeds.items() for seed in seeds),
    )
    return study, broken


def carried(study: Study) -> dict[tuple[str, int], RunResult]:
    """Results by arm and seed of runs that have not finished here: they were made on another machine, or are gone."""
    here = {(run.arm.name, run.seed) for run in study.runs if run.state == "finished"}
    return {key: result for key, result in study.others.items() if key not in here}


def differing_keys(first: Config, second: Config) -> set[str]:
    """Settings whose values differ, as section.key."""
    one, other = flat(first), flat(second)
    return {key for key in one.keys() | other.keys() if one.get(key) != other.get(key)}


def split_list(option: str, text: str) -> list[str]:
    """The names of a comma list. Raises InputError naming `option` where there are none."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise InputError(f"{option} {text!r} names nothing.")
    return names
