"""The runs that claims need, each run once however many claims share it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from exgrpo_cli.ablation.arms import BASELINE, Arm
from exgrpo_cli.ablation.claims.claim import FIRST_SEED, Claim, claim_arm
from exgrpo_cli.ablation.study import Study, StudyBase, plan_study
from exgrpo_cli.errors import InputError
from exgrpo_cli.runs.result import config_hash


def plan_claims(
    claims: Sequence[Claim], *, name: str, root: Path, base: StudyBase | None = None, results: Sequence[Path] = ()
) -> Study:
    """The study in `root/name` of all arms of the claims, each with the seeds of all claims that it is in.

    Raises InputError as `plan_study` does, and where `base` has settings that would change what a claim says.
    """
    base = base or StudyBase()
    arms: dict[str, Arm] = {}
    on_policy: dict[str, Arm] = {}
    seeds: dict[str, Sequence[int]] = {}
    minutes: dict[str, float] = {}
    for claim in claims:
        for arm in arms_of(claim, claims).values():
            arms[arm.name] = arm
            on_policy[arm.name] = claim_arm(BASELINE.method, {}, claim.regime, claim.settings)
            seeds[arm.name] = sorted({*seeds.get(arm.name, ()), *claim.seeds})
            minutes[arm.name] = claim.run_minutes
    # The on-policy arm of the same settings; where no claim has one, an arm is compared with what its claim names.
    named = {(arm.method, arm.assignments, arm.regime): arm.name for arm in arms.values()}
    every = [
        replace(arm, baseline=named.get((own.method, own.assignments, own.regime), ""))
        for arm, own in zip(arms.values(), on_policy.values(), strict=True)
    ]
    for arm in every:
        if config_hash(base.config(arm, FIRST_SEED)) != config_hash(StudyBase().config(arm, FIRST_SEED)):
            raise InputError(
                "--claim brings its own settings: leave --set and other options out that change more than what the "
                "machine does (run.threads, run.plots and the like)."
            )
    study = plan_study(name=name, root=root, arms=every, seeds=seeds, base=base, results=results)
    run_seconds = {name: 60 * each for name, each in minutes.items()}
    return replace(study, claims={claim.name: claim.stated for claim in claims}, run_seconds=run_seconds)


def arms_of(claim: Claim, claims: Sequence[Claim]) -> dict[str, Arm]:
    """The claim's arms by their names in it, named apart from unlike arms that another of the claims calls the same.

    Of unlike arms of one name the first claim's keeps it; another is called after the first claim that has it.
    """
    first: dict[str, Arm] = {}
    of_claim: dict[Arm, str] = {}
    for each in (*claims, claim):
        for arm in each.arms.values():
            first.setdefault(arm.name, arm)
            of_claim.setdefault(arm, each.name)
    return {
        name: arm if arm == first[arm.name] else replace(arm, name=f"{arm.name} ({of_claim[arm]})")
        for name, arm in claim.arms.items()
    }
