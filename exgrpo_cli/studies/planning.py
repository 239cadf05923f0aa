"""A study on paper: every run resolved, with the result that is known of it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.config.layers import build_config, read_config, read_method
from exgrpo_cli.config.names import BUILT_IN, GYM, check_functions, section_of_made
from exgrpo_cli.config.settings import Config, Layer, resolve
from exgrpo_cli.runs.result import RunResult, config_hash, find_results
from exgrpo_cli.studies.arms import Arm
from exgrpo_cli.studies.study import RESULTS_FOLDER, Study, StudyRun, budgeted, differing_keys

SEED_PLACE = "{seed}"
"""In a setting of a study, the seed of each run: `tiny.seed={seed}` gives every seed a warm start of its own."""
BUDGET = frozenset({"run.budget", "run.budget_amount"})
"""Settings that `--equal` gives a run by its seed."""


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
        options = {**self.options, "run": {**self.options.get("run", {}), "seed": seed}}
        if (
            self.replay_from is not None
            and read_method(arm.method, allow_code=True).settings.get("replay", {}).get("store") == "none"
        ):
            options["replay"] = {"warm_start": str(self.replay_from.resolve())}
        config = build_config(
            backbone=self.backbone,
            method=arm.method,
            regime=arm.regime,
            config_file=self.config_file,
            options=options,
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

    Runs whose result lies in one of the folders `results`, or in the study's own `results/`, count as finished. Raises
    InputError for no seeds, a bad setting, a folder that holds the run of another configuration, or a damaged result.
    """
    of_arm = seeds if isinstance(seeds, Mapping) else dict.fromkeys((arm.name for arm in arms), seeds)
    for each in of_arm.values():
        if not each or len(set(each)) != len(each):
            raise InputError(f"seeds {list(each)} must be at least one, each once.")
    folder, base = root / name, base or StudyBase()
    runs = [
        StudyRun(arm=arm, seed=seed, folder=folder / arm.folder_name / f"seed-{seed}", config=base.config(arm, seed))
        for seed in sorted({seed for each in of_arm.values() for seed in each})
        for arm in arms
        if seed in of_arm[arm.name]
    ]
    own_results = folder / RESULTS_FOLDER
    found = [
        each for place in (*([own_results] if own_results.is_dir() else []), *results) for each in find_results(place)
    ]
    study = Study(name=name, folder=folder, arms=tuple(arms), runs=with_results(runs, found, equal), equal=equal)
    _require_same_settings(study, base)
    return study


def with_results(runs: Sequence[StudyRun], found: Sequence[RunResult], equal: str) -> tuple[StudyRun, ...]:
    """The runs, each with the result found of it: a run is the hash of its settings, with the kind of budget that it
    will have, and its seed.

    Arms that differ in nothing that a hash tells, precision say, have none: of them run folders count.
    """
    by_key = {(result.config_hash, result.seed): result for result in found}
    keys = []
    for run in runs:
        by_steps = equal == "steps" or run.arm.name == run.arm.baseline
        keys.append((config_hash((run if by_steps else run.given(budget=equal, budget_amount=1.0)).config), run.seed))
    times = Counter(keys)
    matched = []
    for key, run in zip(keys, runs, strict=True):
        result = by_key.get(key) if times[key] == 1 else None
        if result is not None and equal == "steps" and result.budget_amount != run.config.run.budget_amount:
            result = None
        matched.append(replace(run, result=result))
    return tuple(matched)


def _require_same_settings(study: Study, base: StudyBase) -> None:
    """Raise InputError where the folder holds runs of other settings, of seeds that are planned now or before.

    Of an arm's earlier seeds one is looked at, whatever its budget is.
    """
    for run in study.runs:
        _require_same(budgeted(study, run), frozenset())
    planned = {run.folder for run in study.runs}
    for arm in study.arms:
        for path in sorted((study.folder / arm.folder_name).glob("seed-*/config.toml")):
            number = path.parent.name.removeprefix("seed-")
            if path.parent not in planned and number.isdecimal():
                config = base.config(arm, int(number))
                _require_same(StudyRun(arm=arm, seed=int(number), folder=path.parent, config=config), BUDGET)
                break


def _require_same(run: StudyRun, aside: frozenset[str]) -> None:
    """Compare with the settings that the run was asked to have, `aside` and its threads, which the study gives, left
    out; where that file is gone, with those that it has."""
    path = run.folder / "config.toml"
    if not path.is_file():
        return
    asked = run.asked_file.is_file()
    path = run.asked_file if asked else path
    stored = resolve([(str(path), read_config(path))])
    if not asked and config_hash(stored) == config_hash(run.config):
        return
    if changed := differing_keys(stored, run.config) - aside - {"run.threads"}:
        raise InputError(
            f"{run.folder} holds a run with another {', '.join(sorted(changed))}: choose another --name, or remove it."
        )
