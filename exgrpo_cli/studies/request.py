"""From what was asked for to a study: its arms, seeds, name and folder."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.config.sections import require_known
from exgrpo_cli.config.settings import Layer
from exgrpo_cli.studies.arms import (
    Arm,
    cross,
    method_arms,
    method_name,
    metric_arms,
    regimes_of,
    sampler_arms,
    split_list,
    vary_arms,
)
from exgrpo_cli.studies.claims.claim import chosen_claims
from exgrpo_cli.studies.claims.plan import plan_claims
from exgrpo_cli.studies.study import EQUAL, Study, StudyBase, plan_study

STUDIES, CLAIMS = Path("studies"), "claims"


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyRequest:
    """What was asked for; None leaves the choice to presets and defaults.

    Without an axis: the metric `ent`, or in regimes ExGRPO and on-policy training.
    """

    claim: str | None = None
    """`all`, `quick`, or names of claims, which bring their own arms, regimes and seeds."""
    metric: str | None = None
    sampler: str | None = None
    methods: str | None = None
    regimes: str | None = None
    """Regime presets; each arm is run in each of them."""
    vary: Sequence[str] = ()
    seeds: str | None = None
    """How many, or which: "3" or "0,1,5"; three without one."""
    name: str | None = None
    replay_from: Path | None = None
    """Run whose experience the methods replay that store none of their own."""
    equal: str | None = None
    """What every arm spends as the baseline does; without one `generated` with methods, else `steps`."""
    results: Sequence[Path] = ()
    """Folders of results that count as finished runs."""
    output: Path | None = None
    """Folder of the study; its last part is the study's name."""
    backbone: str | None = None
    config_file: Path | None = None
    options: Layer = field(default_factory=dict)
    assignments: Sequence[str] = ()
    allow_code: bool = False

    def plan(self) -> Study:
        """Every run of the study, resolved. Raises InputError naming what is unknown or contradictory."""
        root, name = self._place()
        if self.claim is not None:
            claims = chosen_claims(self.claim)
            return plan_claims(claims, name=name, root=root, base=self.base(), results=self.results)
        return plan_study(
            name=name,
            root=root,
            arms=self._arms(),
            seeds=parse_seeds("3" if self.seeds is None else self.seeds),
            base=self.base(),
            equal=self._equal(),
            results=self.results,
        )

    def base(self) -> StudyBase:
        """What all runs have in common."""
        return StudyBase(
            backbone=self.backbone,
            config_file=self.config_file,
            options=self.options,
            assignments=self.assignments,
            replay_from=self.replay_from,
            allow_code=self.allow_code,
        )

    def _axes(self) -> list[tuple[str, str]]:
        axes = {"metric": self.metric, "sampler": self.sampler, "methods": self.methods}
        given = [(axis, text) for axis, text in axes.items() if text is not None] + [
            ("vary", text) for text in self.vary
        ]
        if not given:
            given = [("methods", "exgrpo,grpo")] if self.regimes is not None else [("metric", "ent")]
        return given

    def _arms(self) -> list[Arm]:
        makers = {"metric": metric_arms, "sampler": sampler_arms, "methods": method_arms, "vary": vary_arms}
        return cross([makers[axis](text) for axis, text in self._axes()], regimes_of(self.regimes))

    def _equal(self) -> str:
        """What arms are equal in: methods differ in what a step costs, values of one setting hardly do."""
        by_tokens = self.methods is not None or self.regimes is not None
        usual = "generated" if by_tokens else "steps"
        chosen = usual if self.equal is None else self.equal
        require_known("--equal", chosen, EQUAL)
        return chosen

    def _place(self) -> tuple[Path, str]:
        """Folder of studies and name of this one; all claims share one, since they share runs."""
        if self.claim is not None:
            self._refuse_axes()
        if self.output is None:
            parts = [_part_of_name(axis, text) for axis, text in self._axes()]
            parts += [f"regimes-{self.regimes}"] if self.regimes else []
            if self.claim is not None:
                return STUDIES, self.name or CLAIMS
            return STUDIES, self.name or re.sub(r"[^A-Za-z0-9._=-]+", "-", "-".join(parts))
        if self.name is not None and self.name != self.output.name:
            raise InputError(
                f"--output {self.output} names the study {self.output.name!r}, --name {self.name!r}: "
                "leave one of them out."
            )
        return self.output.parent, self.output.name

    def _refuse_axes(self) -> None:
        """Raise InputError for an option that would change what a claim says."""
        options = {
            "--metric": self.metric,
            "--sampler": self.sampler,
            "--methods": self.methods,
            "--regimes": self.regimes,
            "--vary": self.vary or None,
            "--seeds": self.seeds,
            "--equal": self.equal,
            "--replay-from": self.replay_from,
        }
        for option, value in options.items():
            if value is not None:
                raise InputError(f"--claim brings its own arms, regimes, seeds and budgets: leave {option} out.")


def _part_of_name(axis: str, text: str) -> str:
    """What an axis adds to the name of a study: of methods' files their names alone."""
    if axis == "methods":
        text = ",".join(method_name(each) for each in split_list("--methods", text))
    return text if axis == "vary" else f"{axis}-{text}"


def parse_seeds(text: str) -> list[int]:
    """`3` as 0, 1, 2; `0,1,5` as it is. Raises InputError for anything else."""
    try:
        seeds = [int(part) for part in text.split(",") if part.strip()] if "," in text else list(range(int(text)))
    except ValueError as error:
        raise InputError(f"--seeds {text!r} is neither a number of seeds nor a list such as 0,1,5.") from error
    if not seeds:
        raise InputError(f"--seeds {text!r} asks for no seed: give a number from 1 on, or a list such as 0,1,5.")
    return seeds
