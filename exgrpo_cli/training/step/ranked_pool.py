"""Every rank grades its share of the responses; all get all verdicts."""

from collections.abc import Sequence

from exgrpo_cli.grading import GradingItem, GradingPool
from exgrpo_cli.ranks.ranks import Ranks
from exgrpo_cli.types import Verdict


class RankedPool:
    """The `grade` of a GradingPool over all ranks, of which there may be one, each with workers of its own.

    A verdict that depends on the clock (a timeout) is the same on every rank, because one rank alone has waited for it.
    """

    def __init__(self, local: GradingPool, ranks: Ranks) -> None:
        self.local = local
        """This rank's own."""
        self._ranks = ranks

    def grade(self, items: Sequence[GradingItem]) -> list[Verdict]:
        """Verdicts on responses, in their order."""
        return self._ranks.whole(self.local.grade(self._ranks.share(items)))
