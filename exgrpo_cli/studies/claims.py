"""Claims: what a file states (regime, arms, endpoint, direction, smallest effect, seeds), its runs, and its verdict.

The runs of several claims are one study, each run once however many claims share it.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from exgrpo_cli.base.errors import InputError, nearest
from exgrpo_cli.config.layers import read_config
from exgrpo_cli.config.sections import require_known
from exgrpo_cli.config.settings import convert
from exgrpo_cli.presets import load_preset, preset_names
from exgrpo_cli.runs.result import config_hash
from exgrpo_cli.studies.arms import BASELINE, Arm, require_own_folders, split_list
from exgrpo_cli.studies.endpoints import (
    ENDPOINTS,
    MOST_SEEDS,
    SEEDS_FOR_A_VERDICT,
    Direction,
    Effect,
    Verdict,
    effect_from,
    paired_effect,
    seeds_needed,
    verdict,
)
from exgrpo_cli.studies.planning import StudyBase, plan_study
from exgrpo_cli.studies.study import Results, Study, read_plan

FIRST_SEED = 200
"""Of the runs that are reported: regimes, lengths and learning rates are searched on seeds below."""
GROUPS = ("all", "quick")


@dataclass(frozen=True, kw_only=True, slots=True)
class Contrast:
    """One comparison that a claim stands or falls by."""

    arm: str
    control: str = ""
    """The arm to be better than; empty compares with `reference`."""
    reference: float = 0.0
    """A fixed value instead of a control: 0.5 of an AUC."""
    endpoint: str = "pass_at_1"
    direction: Direction = "greater"
    """`greater`: by more than the smallest effect. `no less`: a loss is smaller than that."""
    smallest_effect: float
    """Smallest effect of interest, in units of the endpoint."""
    spread: float
    """Standard deviation over seeds of the paired difference, from runs on other seeds than the claim's."""

    def __post_init__(self) -> None:
        require_known("endpoint", self.endpoint, tuple(ENDPOINTS))
        if not (0 < self.smallest_effect < math.inf and 0 < self.spread < math.inf):
            raise InputError("smallest_effect and spread must be above 0, and finite.")
        if self.arm == self.control:
            raise InputError(f"contrast of {self.arm!r} with itself: name another control, or a reference.")
        if self.seeds >= MOST_SEEDS:
            raise InputError(
                f"spread = {self.spread} beside smallest_effect = {self.smallest_effect} would take {MOST_SEEDS} seeds "
                "or more: ask for a larger effect, or for an endpoint of less spread."
            )

    @property
    def seeds(self) -> int:
        """Seeds with which, in 80 of 100 studies, twice the smallest effect is told from it, and so is none."""
        return seeds_needed(spread=self.spread, distance=self.smallest_effect)

    @property
    def threshold(self) -> float:
        """The effect that must be exceeded."""
        return self.smallest_effect if self.direction == "greater" else -self.smallest_effect

    def effect(self, results: Mapping[str, Results]) -> Effect | None:
        """The effect that the contrast is judged by; None where no run of it has finished."""
        endpoint = ENDPOINTS[self.endpoint]
        if not self.control:
            return effect_from(endpoint, results[self.arm], self.reference)
        return paired_effect(endpoint, results[self.arm], results[self.control])

    def __str__(self) -> str:
        """The contrast in words: `pass_at_1: exgrpo minus grpo > 0.010`."""
        other = self.control or f"{self.reference:g}"
        return f"{self.endpoint}: {self.arm} minus {other} > {self.threshold:g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A statement and how it is put to the test."""

    name: str
    title: str
    source: str
    """Who says so, and where."""
    quick: bool
    """Whether it is part of `--claim quick`."""
    regime: str
    """Regime preset; empty leaves the task to `settings`."""
    settings: tuple[str, ...]
    """`section.key=value` of all of its arms."""
    run_minutes: float
    """Measured time of a run on two cores: the estimate before any run of one's own has been measured."""
    arms: Mapping[str, Arm]
    contrasts: tuple[Contrast, ...]
    first_seed: int
    """First of its seeds: above those of the runs that suggested it, which cannot test it as well."""
    stated: Mapping[str, Any]
    """Content of the file, which a study keeps: it is judged by what was stated when it ran."""

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds of every arm: as many as the power calculation asks for, and no verdict with fewer than eight."""
        count = max(SEEDS_FOR_A_VERDICT, *(contrast.seeds for contrast in self.contrasts))
        return tuple(range(self.first_seed, self.first_seed + count))


def chosen_claims(text: str) -> list[Claim]:
    """The claims of `--claim`: `all`, `quick`, or names and files. Raises InputError for an unknown name."""
    names = preset_names("claims") if text in GROUPS else split_list("--claim", text)
    claims = [read_claim(name) for name in dict.fromkeys(names)]
    if twice := [name for name, times in Counter(claim.name for claim in claims).items() if times > 1]:
        raise InputError(f"--claim names two claims {twice[0]!r}: give one of the files another name.")
    return [claim for claim in claims if claim.quick] if text == "quick" else claims


def read_claim(name: str) -> Claim:
    """A shipped claim, or that of a file. Raises InputError naming the claim and the key that is wrong."""
    known = preset_names("claims")
    if not name.endswith(".toml"):
        if name in GROUPS:
            raise InputError(f"--claim {name} stands alone: leave the other claims out, or name each.")
        if name not in known:
            raise InputError(f"--claim: no claim {name!r}.{nearest(name, (*GROUPS, *known))}")
        return claim_of(name, load_preset("claims", name))
    own = Path(name).stem
    if own in known:
        raise InputError(f"--claim {name}: a shipped claim is called {own} too: give the file another name.")
    return claim_of(own, read_config(Path(name)))


def claim_of(name: str, content: Mapping[str, Any]) -> Claim:
    """A claim from the content of its file. Raises InputError naming the claim and the key that is wrong."""
    try:
        about, stated = content["about"], content["claim"]
        settings = convert(stated.get("settings", []), tuple[str, ...], "settings")
        contrasts = tuple(Contrast(**each) for each in content["contrast"])
        named = dict.fromkeys(arm for each in contrasts for arm in (each.control, each.arm) if arm)
        regime = stated.get("regime", "")
        if regime:
            load_preset("regimes", regime)
        first_seed = convert(stated.get("first_seed", FIRST_SEED), int, "first_seed")
        if first_seed < FIRST_SEED:
            raise InputError(f"first_seed = {first_seed} must be {FIRST_SEED} or more: those below are for searching.")
        return Claim(
            name=name,
            title=about["title"],
            source=about["source"],
            quick=about.get("quick", False),
            regime=regime,
            settings=settings,
            run_minutes=float(stated["run_minutes"]),
            arms={arm: claim_arm(arm, content.get("arms", {}).get(arm, {}), regime, settings) for arm in named},
            contrasts=contrasts,
            first_seed=first_seed,
            stated=content,
        )
    except KeyError as error:
        raise InputError(f"claim {name} has no {error.args[0]}.") from error
    except (TypeError, InputError) as error:
        raise InputError(f"claim {name}: {error}") from error


def claim_arm(name: str, stated: Mapping[str, Any], regime: str, settings: tuple[str, ...]) -> Arm:
    """An arm of a claim: a method preset by its own name, or what `[arms]` says of it."""
    method = stated.get("method", name)
    if not method.endswith(".toml") and method not in preset_names("methods"):
        raise InputError(f"arm {name!r}: no method preset {method!r}.{nearest(method, preset_names('methods'))}")
    own = convert(stated.get("settings", []), tuple[str, ...], f"arms.{name}.settings")
    return Arm(
        name=f"{regime}: {name}" if regime else name,
        method=method,
        assignments=(*settings, *own),
        regime=regime or None,
    )


def plan_claims(
    claims: Sequence[Claim], *, name: str, root: Path, base: StudyBase | None = None, results: Sequence[Path] = ()
) -> Study:
    """The study in `root/name` of all arms of the claims, each with the seeds of all claims that it is in.

    Raises InputError as `plan_study` does, where `base` has settings that would change what a claim says, and where the
    study was begun with a claim that has changed since.
    """
    base = base or StudyBase()
    plain = StudyBase(allow_code=base.allow_code)
    told_apart = _named_apart(claims, root / name)
    arms: dict[str, Arm] = {}
    on_policy: dict[str, Arm] = {}
    seeds: dict[str, list[int]] = {}
    run_seconds: dict[str, float] = {}
    for claim in claims:
        for arm in arms_of(claim, told_apart).values():
            _require_settings(claim, arm, base, plain)
            arms[arm.name] = arm
            on_policy.setdefault(arm.name, claim_arm(BASELINE.method, {}, claim.regime, claim.settings))
            seeds[arm.name] = sorted({*seeds.get(arm.name, ()), *claim.seeds})
            run_seconds.setdefault(arm.name, 60 * claim.run_minutes)
    # The on-policy arm of the same settings; where no claim has one, an arm is compared with what its claim names.
    named = {_settings(arm): arm.name for arm in arms.values()}
    every = [replace(arm, baseline=named.get(_settings(on_policy[arm.name]), "")) for arm in arms.values()]
    require_own_folders(every)
    study = plan_study(name=name, root=root, arms=every, seeds=seeds, base=base, results=results)
    return replace(study, claims={claim.name: claim.stated for claim in claims}, run_seconds=run_seconds)


def arms_of(claim: Claim, arms: Iterable[Arm]) -> dict[str, Arm]:
    """The claim's arms by their names in it, each as it is called among `arms`, a study's."""
    called = {_settings(arm): arm.name for arm in arms}
    return {name: replace(arm, name=called.get(_settings(arm), arm.name)) for name, arm in claim.arms.items()}


def _require_settings(claim: Claim, arm: Arm, base: StudyBase, plain: StudyBase) -> None:
    """Raise InputError where an arm has a bad setting, or `base` has some that change what the claim says."""
    try:
        stated = plain.config(arm, FIRST_SEED)
    except InputError as error:
        raise InputError(f"claim {claim.name}, arm {arm.name!r}: {error}") from error
    if config_hash(base.config(arm, FIRST_SEED)) != config_hash(stated):
        raise InputError(
            "--claim brings its own settings: leave --set and other options out that change more than what the "
            "machine does (run.threads, run.plots and the like)."
        )


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
    """Identity of an arm, whatever it is called."""
    return arm.method, arm.assignments, arm.regime


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Verdict of the runs about one claim."""

    claim: Claim
    verdict: Verdict
    effects: tuple[Effect | None, ...]
    """Of each contrast, in its order; None where no run of it has finished."""
    seeds: int
    """Seeds that all of the claim's arms have."""
    generated: int
    """Tokens generated by the claim's runs."""
    seconds: float
    """Time of the claim's runs, one after another."""

    @property
    def weakest(self) -> tuple[Contrast, Effect | None]:
        """The contrast that is furthest from holding, in units of its smallest effect; the first where none has run."""
        found = [(c, e) for c, e in zip(self.claim.contrasts, self.effects, strict=True) if e is not None]
        return min(
            found,
            key=lambda pair: (pair[1].mean - pair[0].threshold) / pair[0].smallest_effect,
            default=(self.claim.contrasts[0], None),
        )

    def to_json(self) -> dict[str, Any]:
        """The outcome as `claims.json` has it."""
        return {
            "title": self.claim.title,
            "source": self.claim.source,
            "regime": self.claim.regime,
            "verdict": self.verdict.value,
            "seeds": self.seeds,
            "seeds_needed": len(self.claim.seeds),
            "tokens": self.generated,
            "seconds": self.seconds,
            "contrasts": [
                {
                    "contrast": str(contrast),
                    "endpoint": contrast.endpoint,
                    "threshold": contrast.threshold,
                    "effect": effect and {"mean": effect.mean, "low": effect.low, "high": effect.high},
                }
                for contrast, effect in zip(self.claim.contrasts, self.effects, strict=True)
            ],
        }


def claim_outcomes(study: Study) -> list[Outcome]:
    """Verdict of the study's finished runs about each of its claims."""
    results, claims = study.results(), [claim_of(name, stated) for name, stated in study.claims.items()]
    return [outcome(claim, claim_results(claim, study.arms, results)) for claim in claims]


def claim_results(claim: Claim, arms: Sequence[Arm], results: Mapping[str, Results]) -> dict[str, Results]:
    """Results of the claim's arms by their names in it, of its own seeds; `arms` are the study's."""
    return {
        name: {seed: found for seed, found in results.get(arm.name, {}).items() if seed in claim.seeds}
        for name, arm in arms_of(claim, arms).items()
    }


def outcome(claim: Claim, results: Mapping[str, Results]) -> Outcome:
    """Verdict of these results, by arm and seed, about a claim."""
    effects = tuple(contrast.effect(results) for contrast in claim.contrasts)
    known = [effect for effect in effects if effect is not None]
    complete = known if len(known) == len(effects) else []
    runs = [result for own in results.values() for result in own.values()]
    return Outcome(
        claim=claim,
        verdict=verdict(complete, [each.threshold for each in claim.contrasts], needed=len(claim.seeds)),
        effects=effects,
        seeds=min(len(own) for own in results.values()),
        generated=sum(result.totals.generated for result in runs),
        seconds=sum(result.totals.seconds for result in runs),
    )
