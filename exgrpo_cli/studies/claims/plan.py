"""The runs that claims need, each run once however many claims share it."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.runs.result import config_hash
from exgrpo_cli.studies.arms import BASELINE, Arm, require_own_folders
from exgrpo_cli.studies.claims.claim import FIRST_SEED, Claim, claim_arm
from exgrpo_cli.studies.study import Study, StudyBase, plan_study
from exgrpo_cli.studies.study_files import read_plan


def plan_claims(
    claims: Sequence[Claim], *, name: str, root: Path, base: StudyBase | None = None, results: Sequence[Path] = ()
) -> Study:
    """The study in `root/name` of all arms of the claims, each with the seeds of all claims that it is in.

    Raises InputError as `plan_study` does, where `base` has settings that would change what a claim says, and where the
    study was begun with a claim that has changed since.
    """
    base = base or StudyBase()
    told_apart = _named_apart(claims, root / name)
    arms: dict[str, Arm] = {}
    on_policy: dict[str, Arm] = {}
    seeds: dict[str, Sequence[int]] = {}
    minutes: dict[str, float] = {}
    plain = StudyBase(allow_code=base.allow_code)
    for claim in claims:
        for arm in arms_of(claim, told_apart).values():
            _require_settings(claim, arm, plain)
            arms[arm.name] = arm
            on_policy.setdefault(arm.name, claim_arm(BASELINE.method, {}, claim.regime, claim.settings))
            seeds[arm.name] = sorted({*seeds.get(arm.name, ()), *claim.seeds})
            minutes.setdefault(arm.name, claim.run_minutes)
    # The on-policy arm of the same settings; where no claim has one, an arm is compared with what its claim names.
    named = {_settings(arm): arm.name for arm in arms.values()}
    every = [
        replace(arm, baseline=named.get(_settings(own), ""))
        for arm, own in zip(arms.values(), on_policy.values(), strict=True)
    ]
    require_own_folders(every)
    for arm in every:
        if config_hash(base.config(arm, FIRST_SEED)) != config_hash(plain.config(arm, FIRST_SEED)):
            raise InputError(
                "--claim brings its own settings: leave --set and other options out that change more than what the "
                "machine does (run.threads, run.plots and the like)."
            )
    study = plan_study(name=name, root=root, arms=every, seeds=seeds, base=base, results=results)
    run_seconds = {name: 60 * each for name, each in minutes.items()}
    return replace(study, claims={claim.name: claim.stated for claim in claims}, run_seconds=run_seconds)


def arms_of(claim: Claim, arms: Iterable[Arm]) -> dict[str, Arm]:
    """The claim's arms by their names in it, each as it is called among `arms`, a study's."""
    called = {_settings(arm): arm.name for arm in arms}
    return {name: replace(arm, name=called.get(_settings(arm), arm.name)) for name, arm in claim.arms.items()}


def _require_settings(claim: Claim, arm: Arm, base: StudyBase) -> None:
    """Raise InputError naming the claim where an arm of it has a bad setting."""
    try:
        base.config(arm, FIRST_SEED)
    except InputError as error:
        raise InputError(f"claim {claim.name}, arm {arm.name!r}: {error}") from error


def _named_apart(claims: Sequence[Claim], folder: Path) -> list[Arm]:
    """The arms of the claims, unlike ones by unlike names. A study's arms keep those that an earlier call gave them.

    Of unlike arms of one name the first keeps it; another is called after the first claim that has it.
    """
    arms = list(read_plan(folder).arms.values())
    names, told = {arm.name for arm in arms}, {_settings(arm) for arm in arms}
    for claim in claims:
        for arm in claim.arms.values():
            if _settings(arm) in told:
                continue
            name = f"{arm.name} ({claim.name})" if arm.name in names else arm.name
            if name in names:
                raise InputError(f"{folder} was begun with another claim {claim.name}: choose another --name.")
            arms.append(replace(arm, name=name))
            names.add(name)
            told.add(_settings(arm))
    return arms


def _settings(arm: Arm) -> tuple[str, tuple[str, ...], str | None]:
    """What makes an arm, whatever it is called."""
    return arm.method, arm.assignments, arm.regime
