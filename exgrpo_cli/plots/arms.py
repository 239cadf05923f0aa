"""Arms of a study in a figure: a panel for each regime, and a look that sets each arm of a panel apart."""

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Protocol, TypeVar

from exgrpo_cli.plots.style import BLACK, CYCLE, LINESTYLES, MARKERS

LABEL_COLUMNS = 44
"""Characters of an arm's name to a line."""
PALETTE = tuple(colour for colour in CYCLE if colour != BLACK)


class NamedArm(Protocol):
    """What is drawn of an arm."""

    @property
    def name(self) -> str:
        """The arm's name in its study."""

    @property
    def regime(self) -> str:
        """The arm's regime where the study has several, else empty."""


ArmT = TypeVar("ArmT", bound=NamedArm)


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """How an arm is drawn."""

    colour: str
    linestyle: str = "-"
    marker: str = MARKERS[0]


def by_regime(arms: Sequence[ArmT]) -> dict[str, list[ArmT]]:
    """The arms of each regime; regimes in the order in which they first come up."""
    panels: dict[str, list[ArmT]] = {}
    for arm in arms:
        panels.setdefault(arm.regime, []).append(arm)
    return panels


def label_of(arm: NamedArm) -> str:
    """The arm's name as its panel shows it, wrapped: the regime is the panel's title."""
    return "\n".join(wrap(arm.name.removeprefix(f"{arm.regime}: "), LABEL_COLUMNS))


def looks_of(names: Sequence[str], baselines: Sequence[str]) -> dict[str, Look]:
    """A look for each arm of a panel, no two alike: baselines are black, the others take the colours in turn.

    After a round of colours, and after each baseline, line and marker change; both come round together after 28.
    """
    own = [name for name in names if name in baselines]
    others = [name for name in names if name not in baselines]
    looks = {name: _look(BLACK, number) for number, name in enumerate(own)}
    for number, name in enumerate(others):
        looks[name] = _look(PALETTE[number % len(PALETTE)], number // len(PALETTE))
    return looks


def _look(colour: str, number: int) -> Look:
    marker = MARKERS[number % len(MARKERS)]
    return Look(colour=colour, linestyle=LINESTYLES[number % len(LINESTYLES)], marker=marker)
