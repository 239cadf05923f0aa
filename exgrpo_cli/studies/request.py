"""From what was asked for to a study: its arms, seeds, name and folder."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.config.sections import require_known
from exgrpo_cli.studies.arms import axis_arms, cross, method_name, regimes_of, split_list
from exgrpo_cli.studies.claims import chosen_claims, plan_claims
from exgrpo_cli.studies.planning import StudyBase, plan_study
from exgrpo_cli.studies.study import EQUAL, Study

STUDIES, CLAIMS = Path("studies"), "claims"


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyRequest(StudyBase):
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
    equal: str | None = None
    """What every arm spends as the baseline does; without one `generated` with methods or regimes, else `steps`."""
    results: Sequence[Path] = ()
    """Folders of results that count as finished runs."""
    output: Path | None = None
    """Folder of the study; its last part is the study's name."""

    def plan(self) -> Study:
        """Every run of the study, resolved. Raises InputError naming what is unknown or contradictory."""
        self._refuse_axes_of_claims()
        axes = self._axes()
        root, name = self._place(axes)
        if self.claim is not None:
            return plan_claims(chosen_claims(self.claim), name=name, root=root, base=self, results=self.results)
        arms = cross([axis_arms(axis, text) for axis, text in axes], regimes_of(self.regimes))
        # Methods differ in what a step costs, values of one setting hardly do.
        usual = "generated" if self.methods is not None or self.regimes is not None else "steps"
        equal = usual if self.equal is None else self.equal
        require_known("--equal", equal, EQUAL)
        seeds = parse_seeds("3" if self.seeds is None else self.seeds)
        return plan_study(
            name=name, root=root, arms=arms, seeds=seeds, base=self, equal=equal, results=self.results
        )  # fmt: skip

    def _axes(self) -> list[tuple[str, str]]:
        """Name and text of every axis that was asked for."""
        named = {"metric": self.metric, "sampler": self.sampler, "methods": self.methods}
        given = [(axis, text) for axis, text in named.items() if text is not None]
        given += [("vary", text) for text in self.vary]
        return given or [("methods", "exgrpo,grpo") if self.regimes is not None else ("metric", "ent")]

    def _place(self, axes: Sequence[tuple[str, str]]) -> tuple[Path, str]:
        """Folder of studies and name of this one; all claims share one, since they share runs."""
        if self.output is not None:
            if self.name not in (None, self.output.name):
                raise InputError(
                    f"--output {self.output} names the study {self.output.name!r}, --name {self.name!r}: "
                    "leave one of them out."
                )
            return self.output.parent, self.output.name
        if self.claim is not None:
            return STUDIES, self.name or CLAIMS
        parts = [_part_of_name(axis, text) for axis, text in axes]
        parts += [f"regimes-{self.regimes}"] if self.regimes else []
        return STUDIES, self.name or re.sub(r"[^A-Za-z0-9._=-]+", "-", "-".join(parts))

    def _refuse_axes_of_claims(self) -> None:
        """Raise InputError for an option that would change what a claim says."""
        for name in ("metric", "sampler", "methods", "regimes", "vary", "seeds", "equal", "replay_from"):
            if self.claim is not None and getattr(self, name) not in (None, (), []):
                option = f"--{name.replace('_', '-')}"
                raise InputError(f"--claim brings its own arms, regimes, seeds and budgets: leave {option} out.")


def _part_of_name(axis: str, text: str) -> str:
    """Part of an axis in the name of a study: of methods' files their names alone."""
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
