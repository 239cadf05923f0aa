"""A study on paper: which runs, where, and in what state."""

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast, get_args

from exgrpo_cli.ablation.arms import BASELINE, Arm, with_baseline
from exgrpo_cli.config.functions import check_functions
from exgrpo_cli.config.layers import build_config, read_method
from exgrpo_cli.config.resolve import Layer, resolve
from exgrpo_cli.config.sections.run import Budget
from exgrpo_cli.config.settings import Config
from exgrpo_cli.errors import InputError
from exgrpo_cli.runs.ending import Ending
from exgrpo_cli.training.metrics import PHASES

EQUAL: tuple[str, ...] = get_args(Budget)
"""What the arms of a study may be equal in."""
CHOSEN_AT_START = frozenset({"run.threads", "run.device", "run.nproc", "optim.horizon", "optim.warmup_steps"})
"""Settings that a run pins when it starts: its `config.toml` may differ in them from what was asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyRun:
    """One arm with one seed."""

    arm: Arm
    seed: int
    folder: Path
    config: Config

    @property
    def state(self) -> str:
        """ "finished", "unfinished" or "new", from what is on disk."""
        summary = self.folder / "summary.json"
        if summary.is_file():
            return "finished" if json.loads(summary.read_text())["steps"] >= self.last_step else "unfinished"
        return "unfinished" if (self.folder / "config.toml").is_file() else "new"

    @property
    def last_step(self) -> int:
        """Steps after which the run is finished: fewer than asked for when every question was retired."""
        summary = self.folder / "summary.json"
        if summary.is_file():
            figures = json.loads(summary.read_text())
            if Ending(figures["finished"]).is_final:
                return int(figures["steps"])
        return self.config.run.steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """Arms x seeds."""

    name: str
    folder: Path
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    runs: tuple[StudyRun, ...]
    baseline: str
    equal: str = "steps"
    """What all arms of a seed spend alike: `steps`, or `generated` or `trained` tokens or `seconds` of the baseline."""

    def describe(self) -> dict[str, Any]:
        """The plan as JSON: what `--dry-run` prints."""
        return {
            "name": self.name,
            "folder": str(self.folder),
            "baseline": self.baseline,
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


def plan_study(
    *,
    name: str,
    root: Path,
    arms: Sequence[Arm],
    seeds: Sequence[int],
    backbone: str | None = None,
    config_file: Path | None = None,
    options: Layer | None = None,
    assignments: Sequence[str] = (),
    equal: str = "steps",
    replay_from: Path | None = None,
    allow_code: bool = False,
) -> Study:
    """Resolve every run of the study in `root/name`.

    Arms that store nothing replay the experience of the run `replay_from`; `allow_code` lets methods' files name
    functions. The arm's own settings are stronger than `assignments`. Raises InputError for no seeds, a bad setting, or
    a folder that holds the run of another configuration.
    """
    if not seeds or len(set(seeds)) != len(seeds):
        raise InputError(f"seeds {list(seeds)} must be at least one, each once.")
    every = with_baseline(arms)
    folder = root / name
    runs = []
    for seed in seeds:
        for arm in every:
            config = build_config(
                backbone=backbone,
                method=arm.method,
                config_file=config_file,
                options={
                    **(options or {}),
                    "run": {**(options or {}).get("run", {}), "seed": seed},
                    **pool_of(arm, replay_from),
                },
                assignments=[*assignments, *arm.assignments],
                allow_code=allow_code,
            )
            if not config.data.has_heldout:
                raise InputError("data.heldout = 'none': a study compares held-out pass@1, so name held-out questions.")
            check_functions(config)
            run = StudyRun(arm=arm, seed=seed, folder=folder / arm.folder_name / f"seed-{seed}", config=config)
            runs.append(run)
    baseline = next(arm.name for arm in every if arm.method == BASELINE.method and not arm.assignments)
    study = Study(
        name=name,
        folder=folder,
        arms=tuple(every),
        seeds=tuple(seeds),
        runs=tuple(runs),
        baseline=baseline,
        equal=equal,
    )
    for run in study.runs:
        check_same_run(budgeted(study, run))
    return study


def pool_of(arm: Arm, replay_from: Path | None) -> dict[str, Layer]:
    """The given run's experience, for an arm that stores nothing of its own."""
    store = read_method(arm.method, allow_code=True).settings.get("replay", {}).get("store")
    if replay_from is None or store != "none":
        return {}
    return {"replay": {"warm_start": str(replay_from.resolve())}}


def check_same_run(run: StudyRun) -> None:
    """A folder from an earlier call must hold this very run, choices made at its start aside."""
    path = run.folder / "config.toml"
    if not path.is_file():
        return
    there = resolve([(str(path), tomllib.loads(path.read_text(encoding="utf-8")))])
    changed = differing_keys(there, run.config) - CHOSEN_AT_START
    if changed:
        raise InputError(
            f"{run.folder} holds a run with another {', '.join(sorted(changed))}: choose another --name, or remove it."
        )


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
    return study.equal == "steps" or run.arm.name == study.baseline or baseline_of(study, run).state == "finished"


def budgeted(study: Study, run: StudyRun) -> StudyRun:
    """The run with the budget that the baseline spent; itself for the baseline, with equal steps, or not ready."""
    if study.equal == "steps" or run.arm.name == study.baseline or not is_ready(study, run):
        return run
    settings = replace(run.config.run, budget=cast(Budget, study.equal), budget_amount=spent(study, run))
    return replace(run, config=replace(run.config, run=settings))


def spent(study: Study, run: StudyRun) -> float:
    """Tokens, or seconds in the phases of its steps, of the baseline's finished run with the seed of `run`."""
    figures = json.loads((baseline_of(study, run).folder / "summary.json").read_text(encoding="utf-8"))
    if study.equal == "seconds":
        return float(sum(figures["wall_seconds"].get(phase, 0.0) for phase in PHASES))
    return float(figures["tokens"][study.equal])


def baseline_of(study: Study, run: StudyRun) -> StudyRun:
    """The baseline's run with the same seed."""
    return next(other for other in study.runs if other.arm.name == study.baseline and other.seed == run.seed)
