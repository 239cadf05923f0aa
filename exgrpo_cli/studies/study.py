"""A study on paper: which runs, where, and in what state."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast, get_args

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.config.layers import build_config, read_config, read_method
from exgrpo_cli.config.names import BUILT_IN, GYM, check_functions, section_of_made
from exgrpo_cli.config.sections.run import Budget
from exgrpo_cli.config.settings import PINNED, Config, Layer, resolve
from exgrpo_cli.runs.result import RESULT_FILE, RunResult, config_hash, read_result
from exgrpo_cli.runs.summary import has_ended
from exgrpo_cli.studies.arms import Arm
from exgrpo_cli.studies.study_files import results_folders

EQUAL: tuple[str, ...] = get_args(Budget)
"""What the arms of a study may be equal in."""
SEED_PLACE = "{seed}"
"""In a setting of a study, the seed of each run: `tiny.seed={seed}` gives every seed a warm start of its own."""
BUDGET = frozenset({"run.budget", "run.budget_amount"})
"""Settings that `--equal` gives a run by its seed."""


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
    def asked_file(self) -> Path:
        """What was asked of the run, before it pinned what its machine decides."""
        return self.folder.with_name(f"{self.folder.name}.toml")

    def read_result(self) -> RunResult | None:
        """What the run achieved; None before it has finished, and where an older version ran it."""
        path = self.folder / RESULT_FILE
        if self.result is not None:
            return self.result
        return read_result(path) if self.state == "finished" and path.is_file() else None

    @property
    def state(self) -> str:
        """ "finished", "unfinished" or "new", from what is on disk."""
        if self.result is not None:
            return "finished"
        if has_ended(self.folder, self.config.run.steps):
            return "finished"
        return "unfinished" if (self.folder / "config.toml").is_file() else "new"


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """Arms x seeds."""

    name: str
    folder: Path
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    runs: tuple[StudyRun, ...]
    equal: str = "steps"
    """What all arms of a seed spend alike: `steps`, or `generated` or `trained` tokens or `seconds` of the baseline."""

    claims: Mapping[str, Layer] = field(default_factory=dict)
    """The claims that the runs are of, by name, as their files state them."""
    run_seconds: Mapping[str, float] = field(default_factory=dict)
    """Time of a run by arm, where it is known before one has been measured here."""
    others: Mapping[tuple[str, int], RunResult] = field(default_factory=dict)
    """Results by arm and seed of runs that are not among `runs`."""
    planned: frozenset[tuple[str, int]] = frozenset()
    """Arm and seed of all runs that the folder was last asked for, where it is read and not planned."""

    @property
    def baselines(self) -> tuple[str, ...]:
        """Names of the arms that others are compared with."""
        return tuple(dict.fromkeys(arm.baseline for arm in self.arms if arm.baseline))

    def arm(self, name: str) -> Arm:
        """The arm of this name."""
        return next(arm for arm in self.arms if arm.name == name)

    def results(self) -> dict[str, dict[int, RunResult]]:
        """Results of the finished runs, by arm and seed; arms without one are left out."""
        found: dict[str, dict[int, RunResult]] = {}
        for (arm, seed), other in self.others.items():
            found.setdefault(arm, {})[seed] = other
        for run in self.runs:
            result = run.read_result()
            if result is not None:
                found.setdefault(run.arm.name, {})[run.seed] = result
        return found

    def describe(self) -> dict[str, Any]:
        """The plan as JSON: what `--dry-run` prints."""
        return {
            "name": self.name,
            "folder": str(self.folder),
            "baseline": ", ".join(self.baselines),
            "equal": self.equal,
            "runs": [
                {
                    "arm": run.arm.name,
                    "seed": run.seed,
                    "folder": str(run.folder),
                    "steps": run.config.run.steps,
                    "state": run.state,
                }
                for run in self.runs
            ],
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyBase:
    """What all runs of a study have in common, weaker than an arm's own settings."""

    backbone: str | None = None
    config_file: Path | None = None
    options: Layer = field(default_factory=dict)
    assignments: Sequence[str] = ()
    replay_from: Path | None = None
    """Run whose experience the arms replay that store none of their own."""
    allow_code: bool = False
    """Methods' files may name functions."""

    def config(self, arm: Arm, seed: int) -> Config:
        """The configuration of one run. Raises InputError for a bad setting."""
        config = build_config(
            backbone=self.backbone,
            method=arm.method,
            regime=arm.regime,
            config_file=self.config_file,
            options={
                **self.options,
                "run": {**self.options.get("run", {}), "seed": seed},
                **pool_of(arm, self.replay_from),
            },
            assignments=[_of_seed(text, seed) for text in (*self.assignments, *arm.assignments)],
            allow_code=self.allow_code,
        )
        if config.run.seed != seed:
            raise InputError("run.seed: the seeds of a study are those of --seeds or of its claims; leave it out.")
        if not config.data.has_heldout:
            raise InputError("data.heldout = 'none': a study compares held-out pass@1, so name held-out questions.")
        check_functions(config)
        return config


def _of_seed(assignment: str, seed: int) -> str:
    """The assignment with the run's seed for `{seed}`.

    Raises InputError where it says which questions there are: intervals are over questions that all seeds share.
    """
    if SEED_PLACE not in assignment:
        return assignment
    key, equals, value = assignment.partition("=")
    section = key.partition(".")[0].strip()
    if section in ("data", "validation", *map(section_of_made, (*BUILT_IN, GYM))):
        raise InputError(f"{assignment}: seeds are compared on the same held-out questions, so no {section} by seed.")
    return key + equals + value.replace(SEED_PLACE, str(seed))


def plan_study(
    *,
    name: str,
    root: Path,
    arms: Sequence[Arm],
    seeds: Sequence[int] | Mapping[str, Sequence[int]],
    base: StudyBase | None = None,
    equal: str = "steps",
    results: Sequence[Path] = (),
) -> Study:
    """Resolve every run of the study in `root/name`; `seeds` are those of all arms, or of each arm by its name.

    Runs whose result lies in one of the folders `results`, or in the study's own `results/`, count as finished, unless
    arms differ in nothing that a result names, precision say: of those, run folders count. Raises InputError
    for no seeds, a bad setting, a folder that holds the run of another configuration, or a damaged result.
    """
    of_arm = seeds if isinstance(seeds, Mapping) else dict.fromkeys((arm.name for arm in arms), seeds)
    for own in of_arm.values():
        if not own or len(set(own)) != len(own):
            raise InputError(f"seeds {list(own)} must be at least one, each once.")
    folder, base = root / name, base or StudyBase()
    known = {(found.config_hash, found.seed): found for each in results_folders(folder, results) for found in each}
    runs = [
        StudyRun(arm=arm, seed=seed, folder=folder / arm.folder_name / f"seed-{seed}", config=base.config(arm, seed))
        for seed in sorted({seed for own in of_arm.values() for seed in own})
        for arm in arms
        if seed in of_arm[arm.name]
    ]
    runs = _with_results(runs, known, equal)
    study = Study(
        name=name, folder=folder, arms=tuple(arms), seeds=tuple(sorted({run.seed for run in runs})), runs=tuple(runs),
        equal=equal,
    )  # fmt: skip
    for run in study.runs:
        check_same_run(budgeted(study, run))
    for arm in arms:
        _check_same_arm(arm, folder / arm.folder_name, of_arm[arm.name], base)
    return study


def _check_same_arm(arm: Arm, folder: Path, seeds: Sequence[int], base: StudyBase) -> None:
    """What an earlier call has run of the arm with other seeds must be of the same settings, its budget aside."""
    planned = {f"seed-{seed}" for seed in seeds}
    for path in sorted(folder.glob("seed-*/config.toml")):
        number = path.parent.name.removeprefix("seed-")
        if path.parent.name not in planned and number.isdecimal():
            config = base.config(arm, int(number))
            run = StudyRun(arm=arm, seed=int(number), folder=path.parent, config=config)
            check_same_run(run, aside=BUDGET)
            return


def _with_results(runs: Sequence[StudyRun], known: Mapping[tuple[str, int], RunResult], equal: str) -> list[StudyRun]:
    """The runs, each with the result found of it; `known` is by hash of the settings and seed."""
    keys = [(config_hash(budget_of(run.config, run.arm, equal)), run.seed) for run in runs]
    first: dict[tuple[str, int], Config] = {}
    unnamed = {
        key
        for key, run in zip(keys, runs, strict=True)
        if differing_keys(run.config, first.setdefault(key, run.config))
    }
    found = []
    for key, run in zip(keys, runs, strict=True):
        result = None if key in unnamed else known.get(key)
        if result is not None and equal == "steps" and result.budget_amount != run.config.run.budget_amount:
            result = None
        found.append(replace(run, result=result))
    return found


def budget_of(config: Config, arm: Arm, equal: str) -> Config:
    """The configuration with the kind of budget that the run will have; how much it is comes from the baseline."""
    if equal == "steps" or arm.name == arm.baseline:
        return config
    return replace(config, run=replace(config.run, budget=cast(Budget, equal), budget_amount=1.0))


def pool_of(arm: Arm, replay_from: Path | None) -> dict[str, Layer]:
    """The given run's experience, for an arm that stores nothing of its own."""
    store = read_method(arm.method, allow_code=True).settings.get("replay", {}).get("store")
    if replay_from is None or store != "none":
        return {}
    return {"replay": {"warm_start": str(replay_from.resolve())}}


def check_same_run(run: StudyRun, *, aside: frozenset[str] = frozenset()) -> None:
    """A folder from an earlier call must hold this very run, choices made at its start and `aside` left out."""
    path = run.folder / "config.toml"
    if not path.is_file():
        return
    stored = stored_config(path)
    changed = differing_keys(stored, run.config) - PINNED - aside
    if run.config.rollout.logprobs == "auto" and stored.rollout.logprobs != "engine":
        changed -= {"rollout.logprobs"}
    asked = run.asked_file
    if run.config.backbone.dtype == (stored_config(asked).backbone.dtype if asked.is_file() else "auto"):
        changed -= {"backbone.dtype"}
    if changed:
        raise InputError(
            f"{run.folder} holds a run with another {', '.join(sorted(changed))}: choose another --name, or remove it."
        )


def stored_config(path: Path) -> Config:
    """The settings of a file that holds all of them. Raises InputError naming a file that does not."""
    return resolve([(str(path), read_config(path))])


def differing_keys(first: Config, second: Config) -> set[str]:
    """Settings whose values differ, as section.key."""
    return {
        f"{section.name}.{setting.name}"
        for section in fields(Config)
        for setting in fields(getattr(first, section.name))
        if getattr(getattr(first, section.name), setting.name) != getattr(getattr(second, section.name), setting.name)
    }


def is_ready(study: Study, run: StudyRun) -> bool:
    """Whether the run's budget is known: with equal steps from the start, else once the baseline's run has finished."""
    return study.equal == "steps" or run.arm.name == run.arm.baseline or baseline_of(study, run).state == "finished"


def budgeted(study: Study, run: StudyRun) -> StudyRun:
    """The run with the budget that the baseline spent; itself for the baseline, with equal steps, or not ready."""
    if study.equal == "steps" or run.arm.name == run.arm.baseline or not is_ready(study, run):
        return run
    settings = replace(run.config.run, budget=cast(Budget, study.equal), budget_amount=spent(study, run))
    return replace(run, config=replace(run.config, run=settings))


def spent(study: Study, run: StudyRun) -> float:
    """Tokens, or seconds in the phases of its steps, of the baseline's finished run with the seed of `run`."""
    baseline = baseline_of(study, run)
    result = baseline.read_result()
    if result is None:
        raise InputError(
            f"{baseline.folder} has no {RESULT_FILE}: an earlier version ran it; remove it to run it again."
        )
    totals = {
        "generated": result.totals.generated,
        "trained": result.totals.trained,
        "seconds": result.totals.training_seconds,
    }
    return float(totals[study.equal])


def baseline_of(study: Study, run: StudyRun) -> StudyRun:
    """The baseline's run with the same seed."""
    return next(other for other in study.runs if other.arm.name == run.arm.baseline and other.seed == run.seed)
