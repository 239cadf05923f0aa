"""A claim as its file states it: regime, arms, endpoint, direction, smallest effect of interest, seeds."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exgrpo_cli.base.errors import InputError, nearest
from exgrpo_cli.config.layers import read_config
from exgrpo_cli.config.sections import require_known
from exgrpo_cli.config.settings import convert
from exgrpo_cli.presets import load_preset, preset_names
from exgrpo_cli.studies.arms import Arm, split_list
from exgrpo_cli.studies.results.endpoints import ENDPOINTS
from exgrpo_cli.studies.results.inference import (
    MOST_SEEDS,
    SEEDS_FOR_A_VERDICT,
    Direction,
    seeds_needed,
    threshold_of,
)

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
        return threshold_of(self.smallest_effect, self.direction)


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
    """Measured time of a run on two cores: what is said before any run of one's own has been measured."""
    arms: Mapping[str, Arm]
    contrasts: tuple[Contrast, ...]
    first_seed: int
    """First of its seeds: above those of the runs that suggested it, which cannot test it as well."""
    stated: Mapping[str, Any]
    """Content of the file, which a study keeps: it is judged by what was stated when it ran."""

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds of every arm: what the power calculation asks for, and no verdict with fewer than eight."""
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
        settings = tuple(convert(stated.get("settings", []), tuple[str, ...], "settings"))
        contrasts = tuple(Contrast(**each) for each in content["contrast"])
        named = dict.fromkeys(arm for each in contrasts for arm in (each.control, each.arm) if arm)
        regime = stated.get("regime", "")
        if regime:
            load_preset("regimes", regime)
        first_seed = convert(stated.get("first_seed", FIRST_SEED), int, "first_seed")
        if first_seed < FIRST_SEED:
            raise InputError(f"first_seed = {first_seed} must be {FIRST_SEED} or more: those below are for searching.")
        arms = {arm: claim_arm(arm, content.get("arms", {}).get(arm, {}), regime, settings) for arm in named}
        return Claim(
            name=name,
            title=about["title"],
            source=about["source"],
            quick=about.get("quick", False),
            regime=regime,
            settings=settings,
            run_minutes=float(stated["run_minutes"]),
            arms=arms,
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
        name=in_regime(name, regime),
        method=method,
        assignments=(*settings, *own),
        regime=regime or None,
    )


def in_regime(arm: str, regime: str) -> str:
    """An arm's name in a study of several regimes."""
    return f"{regime}: {arm}" if regime else arm
