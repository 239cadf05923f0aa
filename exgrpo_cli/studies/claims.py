"""Claims: what a file states (arms, endpoint, direction, smallest effect, seeds), and the verdict of its runs."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.files import values_digest
from exgrpo_cli.config import layers, sections
from exgrpo_cli.presets import load_preset, preset_names
from exgrpo_cli.runs.result import RunResult
from exgrpo_cli.studies import endpoints
from exgrpo_cli.studies.study import Arm, Results, Study, split_list

FIRST_SEED = 200
"""First seed of the runs that are reported: regimes, lengths and learning rates are searched on seeds below."""


class Contrast(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One comparison that a claim stands or falls by."""

    arm: str
    control: str = ""
    """The arm to be better than; empty compares with `reference`."""
    reference: float = 0.0
    """A fixed value instead of a control: 0.5 of an AUC."""
    endpoint: str = "pass_at_1"
    direction: Literal["greater", "no less"] = "greater"
    """`greater`: by more than the smallest effect. `no less`: a loss is smaller than that."""
    smallest_effect: float
    """Smallest effect of interest, in units of the endpoint."""
    spread: float
    """Standard deviation over seeds of the paired difference, from runs on other seeds than the claim's."""

    def __post_init__(self) -> None:
        endpoints.endpoint_named(self.endpoint)
        sections.POSITIVE.check("contrast.smallest_effect", self.smallest_effect)
        sections.POSITIVE.check("contrast.spread", self.spread)
        if self.arm == self.control:
            raise InputError(f"contrast of {self.arm!r} with itself: name another control, or a reference.")

    @property
    def seeds(self) -> int:
        """Seeds with which, in 80 of 100 studies, twice the smallest effect is told from it."""
        return endpoints.seeds_needed(spread=self.spread, distance=self.smallest_effect)

    @property
    def threshold(self) -> float:
        """The effect that must be exceeded."""
        return self.smallest_effect if self.direction == "greater" else -self.smallest_effect

    def effect(self, results: Mapping[str, Results]) -> endpoints.Effect | None:
        """The effect that the contrast is judged by; None where no run of it has finished."""
        endpoint = endpoints.endpoint_named(self.endpoint)
        if not self.control:
            return endpoints.effect_from(endpoint, results[self.arm], self.reference)
        return endpoints.paired_effect(endpoint, results[self.arm], results[self.control])

    def __str__(self) -> str:
        """The contrast in words: `pass_at_1: exgrpo minus grpo > 0.010`."""
        other = self.control or f"{self.reference:g}"
        return f"{self.endpoint}: {self.arm} minus {other} > {self.threshold:g}"


class About(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The statement: the `[about]` table of its file."""

    title: str
    source: str
    """Who says so, and where."""
    quick: bool = False
    """Whether it is part of `--claim quick`."""
    exploratory: bool = False
    """Whether results that were there before it was stated count for it, as its verdict then says."""


class Terms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Terms of its test: the `[claim]` table."""

    run_minutes: float
    """Measured time of a run on two cores: the estimate before any run of one's own has been measured."""
    regime: str = ""
    """Regime preset; empty leaves the task to `settings`."""
    backbone: str | None = None
    """Backbone preset, by default the built-in one; only a claim that names one may be put to the test on another
    (`--backbone`) or with weights from elsewhere (`backbone.source`)."""
    settings: tuple[str, ...] = ()
    """`section.key=value` of all of its arms."""
    first_seed: Annotated[int, msgspec.Meta(ge=FIRST_SEED)] = FIRST_SEED
    """First of its seeds: above those of the runs that suggested it, which cannot test it as well."""


class Fixed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a claim was fixed, and the hash that it had then: the `[fixed]` table."""

    at: Annotated[datetime, msgspec.Meta(tz=True)]
    """As `ablate --dry-run` prints it, with its zone."""
    hash: str


class ArmTerms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An arm that is no method preset by its own name: an `[arms.NAME]` table."""

    method: str = ""
    settings: tuple[str, ...] = ()


class Claim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A statement and how it is put to the test."""

    name: str
    about: About
    terms: Terms = msgspec.field(name="claim")
    contrasts: Annotated[tuple[Contrast, ...], msgspec.Meta(min_length=1)] = msgspec.field(name="contrast")
    """Comparisons, all of which must hold."""
    own_arms: Mapping[str, ArmTerms] = msgspec.field(name="arms", default_factory=dict)
    fixed: Fixed | None = None
    """None of a claim that may have been stated after its runs."""
    on: Mapping[str, Mapping[str, Any]] = msgspec.field(default_factory=dict)
    """Tables that stand in place of those of their names when it is tested on another backbone, by its preset."""
    stated: Mapping[str, Any]
    """Content of the file, which a study keeps: it is judged by what was stated when it ran."""
    of_file: bool = False
    """Whether somebody's file states it, not a shipped one."""

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds of every arm: as many as the power calculation asks for, and no verdict with fewer than eight."""
        count = max(endpoints.SEEDS_FOR_A_VERDICT, *(contrast.seeds for contrast in self.contrasts))
        return tuple(range(self.terms.first_seed, self.terms.first_seed + count))

    def __str__(self) -> str:
        """The claim in one sentence, and the reason for its number of seeds."""
        states = f"{self.name} states: {self.about.title} ({'; '.join(map(str, self.contrasts))})"
        return f"{states}. {len(self.seeds)} seeds tell twice that effect from it in 80 of 100 studies; 8 at least"

    @property
    def arms(self) -> dict[str, Arm]:
        """The arms by their names in the claim, each control before what it is compared with."""
        named = dict.fromkeys(arm for each in self.contrasts for arm in (each.control, each.arm) if arm)
        return {name: self.arm(name) for name in named}

    def digest(self, settings: Mapping[str, str]) -> str:
        """Hash of what the claim is tested by: arms with the hash of their `settings`, seeds, endpoints, thresholds."""
        judged = [{**msgspec.structs.asdict(each), "spread": None} for each in self.contrasts]
        return values_digest({"settings": dict(settings), "seeds": list(self.seeds), "contrasts": judged})

    def require_in_order(self, arm: str, result: RunResult) -> None:
        """Raise InputError where a run cannot test the claim: begun before it was fixed, or for another version of it.

        A claim that was not fixed, and one that is exploratory, counts every run; so does each a run without a start.
        """
        if self.fixed is None or self.about.exploratory or result.started is None:
            return
        early = datetime.fromisoformat(result.started) < self.fixed.at
        if early or result.claim.get(self.name, self.fixed.hash) != self.fixed.hash:
            why = f"before claim {self.name} was" if early else f"for another version of claim {self.name} than that"
            raise InputError(
                f"the result of {arm}, seed {result.seed}, was begun at {result.started}, {why} fixed at "
                f"{self.fixed.at.isoformat()}: leave it out, test the claim on other seeds (claim.first_seed), or say "
                "that it is exploratory (about.exploratory = true)."
            )

    def arm(self, name: str) -> Arm:
        """An arm of the claim: a method preset by its own name, or what `[arms]` says of it."""
        special, terms = self.own_arms.get(name, ArmTerms()), self.terms
        return Arm(
            name=f"{terms.regime}: {name}" if terms.regime else name,
            method=special.method or name,
            assignments=(*terms.settings, *special.settings),
            regime=terms.regime or None,
            of_file=self.of_file,
        )


def chosen_claims(text: str, backbone: str | None = None) -> list[Claim]:
    """The claims of `--claim`, as they are stated for a backbone: `all` or `quick` of the built-in one's, names, files.

    Raises InputError for an unknown name, two claims of one name, and a file that is no claim.
    """
    names = preset_names("claims") if text in ("all", "quick") else split_list("--claim", text)
    claims = [read_claim(name, backbone) for name in dict.fromkeys(names)]
    if twice := [name for name, times in Counter(claim.name for claim in claims).items() if times > 1]:
        raise InputError(f"--claim names two claims {twice[0]!r}: give one of the files another name.")
    if text in ("all", "quick"):
        claims = [claim for claim in claims if not claim.terms.backbone and (text == "all" or claim.about.quick)]
    if len(backbones := {claim.terms.backbone or "tiny" for claim in claims}) > 1:
        raise InputError(f"--claim names claims on {' and '.join(sorted(backbones))}: ask for those of one at a time.")
    return claims


def read_claim(name: str, backbone: str | None = None) -> Claim:
    """A shipped claim, or that of a file; tables of its `[on.BACKBONE]` stand in place of those of their names.

    Raises InputError naming the claim and the key that is wrong.
    """
    of_file, stem = name.endswith(".toml"), Path(name).stem
    if of_file and stem in preset_names("claims"):
        raise InputError(f"--claim {name}: a shipped claim is called {stem} too: give the file another name.")
    claim = claim_of(stem, layers.read_config(Path(name)) if of_file else load_preset("claims", name), of_file=of_file)
    if own := claim.on.get(backbone or ""):
        # What is stated of another backbone is fixed by itself.
        kept = {name: table for name, table in claim.stated.items() if name != "fixed"}
        return claim_of(stem, {**kept, **own}, of_file=of_file)
    return claim


def claim_of(name: str, content: Mapping[str, Any], *, of_file: bool = False) -> Claim:
    """A claim from the content of its file. Raises InputError naming the claim and the key that is wrong."""
    content = msgspec.to_builtins(content)  # a time of TOML's as a text
    try:
        return msgspec.convert({**content, "name": name, "stated": content, "of_file": of_file}, Claim)
    except msgspec.ValidationError as error:
        raise InputError(f"claim {name}: {error}") from error


def arms_of(claim: Claim, arms: Iterable[Arm]) -> dict[str, Arm]:
    """The claim's arms by their names in it, each as it is called among `arms`, a study's."""
    called = {arm.identity: arm.name for arm in arms}
    return {name: replace(arm, name=called.get(arm.identity, arm.name)) for name, arm in claim.arms.items()}


def claim_outcomes(study: Study) -> dict[str, dict[str, Any]]:
    """Outcome of the study's finished runs about each of its claims, by name."""
    results, claims = study.results(), [claim_of(name, stated) for name, stated in study.claims.items()]
    found = {claim.name: outcome(claim, claim_results(claim, study.arms, results)) for claim in claims}
    called = {claim.name: {name: arm.name for name, arm in arms_of(claim, study.arms).items()} for claim in claims}
    uses = Counter(name for names in called.values() for name in set(names.values()))
    for claim in claims:
        for contrast, told in zip(claim.contrasts, found[claim.name]["contrasts"], strict=True):
            own = [called[claim.name][name] for name in (contrast.arm, contrast.control) if name]
            told["shared_arms"] = [name for name in own if uses[name] > 1]
    return found


def claim_results(claim: Claim, arms: Sequence[Arm], results: Mapping[str, Results]) -> dict[str, Results]:
    """Results of the claim's arms by their names in it, of its own seeds; `arms` are the study's.

    Raises InputError where one was begun before the claim was fixed.
    """
    seeds = set(claim.seeds)
    counted: dict[str, Results] = {
        name: {seed: found for seed, found in results.get(arm.name, {}).items() if seed in seeds}
        for name, arm in arms_of(claim, arms).items()
    }
    for name, by_seed in counted.items():
        for result in by_seed.values():
            claim.require_in_order(name, result)
    return counted


def outcome(claim: Claim, results: Mapping[str, Results]) -> dict[str, Any]:
    """Verdict of these results, by arm and seed, about a claim, as `results.json` has it.

    `seeds` are those that all arms have; `tokens` and `seconds` the sums of the claim's runs, one after another. The
    effect of a contrast is None where no run of it has finished; `control_gains` is what training added to the endpoint
    in its control, None where that has no value before training.
    """

    def control_gains(contrast: Contrast) -> float | None:
        runs = results.get(contrast.control, {}).values()
        value = endpoints.endpoint_named(contrast.endpoint).value
        if not runs or contrast.endpoint not in ("pass_at_1", "pass_at_n"):
            return None
        return float(np.mean([np.mean(value(run)) - np.mean(value(replace(run, after=run.before))) for run in runs]))

    effects = [contrast.effect(results) for contrast in claim.contrasts]
    known = [effect for effect in effects if effect is not None]
    complete = known if len(known) == len(effects) else []
    runs = [result for by_seed in results.values() for result in by_seed.values()]
    totals = [result.totals for result in runs]
    found = endpoints.verdict(complete, [each.threshold for each in claim.contrasts], needed=len(claim.seeds))
    return {
        "title": claim.about.title,
        "source": claim.about.source,
        "regime": claim.terms.regime,
        "verdict": found.value,
        "seeds": min(len(by_seed) for by_seed in results.values()),
        "seeds_needed": len(claim.seeds),
        "fixed": claim.fixed and claim.fixed.at.isoformat(),
        "exploratory": claim.about.exploratory,
        "undated": sum(result.started is None for result in runs),
        "tokens": sum(each.generated for each in totals),
        "seconds": sum(each.seconds for each in totals),
        "contrasts": [
            {
                "contrast": str(contrast),
                "endpoint": contrast.endpoint,
                "threshold": contrast.threshold,
                "control_gains": control_gains(contrast),
                "effect": effect and asdict(effect),
            }
            for contrast, effect in zip(claim.contrasts, effects, strict=True)
        ],
    }
