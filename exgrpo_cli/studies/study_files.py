"""What a study keeps in its folder beside its runs: its arms, and a copy of each finished run's result."""

import glob
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.files import write_json
from exgrpo_cli.base.manifest import values_digest
from exgrpo_cli.presets import load_preset
from exgrpo_cli.runs.result import SUFFIX, RunResult, find_results, read_result
from exgrpo_cli.studies.arms import Arm

PLAN_FILE = "study.json"
"""In the study's folder: its arms, which cannot all be told from the names of folders, and their seeds."""
RESULTS_FOLDER = "results"
"""Of a study: a copy of each finished run's result, all that another machine needs of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyPlan:
    """What a study's folder says of its runs."""

    arms: dict[str, Arm]
    """By the name of their folder."""
    equal: str
    claims: dict[str, Any]
    runs: frozenset[tuple[str, int]]
    """Arm and seed of each that was asked for; none in studies of earlier versions, which do not say."""


def results_folders(folder: Path, others: Sequence[Path]) -> Iterator[Iterator[RunResult]]:
    """The results of each folder that a study counts."""
    own = folder / RESULTS_FOLDER
    return (find_results(each) for each in [*([own] if own.is_dir() else []), *others])


def write_plan(
    folder: Path,
    arms: Iterable[Arm],
    *,
    equal: str,
    claims: Mapping[str, Any],
    seeds: Mapping[str, Sequence[int]],
) -> None:
    """Keep what the arms are, their seeds by name, and which is compared with which.

    Raises RunError where the disk refuses.
    """
    plan = {"equal": equal, "claims": dict(claims), "arms": [asdict(arm) for arm in arms], "seeds": dict(seeds)}
    write_json(folder / PLAN_FILE, plan | {"checksum": values_digest(plan)})


def read_plan(folder: Path) -> StudyPlan:
    """The plan as it was kept; no arms where no study was begun there.

    Raises InputError for a damaged file.
    """
    path = folder / PLAN_FILE
    if not path.is_file():
        return StudyPlan(arms={}, equal="steps", claims={}, runs=frozenset())
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
        # Studies of earlier versions have none.
        if plan.pop("checksum", None) not in (None, values_digest(plan)):
            raise ValueError("other values than were written")
        arms = [Arm(**{**arm, "assignments": tuple(arm["assignments"])}) for arm in plan["arms"]]
        claims = plan["claims"]
        if isinstance(claims, list):
            # Studies begun by an earlier version kept the names of shipped claims.
            claims = {name: load_preset("claims", name) for name in claims}
        return StudyPlan(
            arms={arm.folder_name: arm for arm in arms},
            equal=plan["equal"],
            claims=claims,
            runs=frozenset((arm, seed) for arm, seeds in plan.get("seeds", {}).items() for seed in seeds),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is damaged ({error!r}): remove it, `exgrpo ablate` writes it again.") from error


def result_path(folder: Path, arm: Arm, seed: int) -> Path:
    """Where a study keeps the copy of a run's result."""
    return folder / RESULTS_FOLDER / f"{arm.folder_name}-{seed}{SUFFIX}"


def kept_results(folder: Path, arms: Iterable[Arm]) -> dict[tuple[str, int], RunResult]:
    """The results that a study has kept, by arm and seed. Raises InputError for a damaged one."""
    found = {}
    for arm in arms:
        start = f"{arm.folder_name}-"
        for path in (folder / RESULTS_FOLDER).glob(f"{glob.escape(start)}*{SUFFIX}"):
            seed = path.name.removeprefix(start).removesuffix(SUFFIX)
            if seed.isdecimal():
                found[arm.name, int(seed)] = read_result(path)
    return found
