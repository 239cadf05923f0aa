"""Replaying by unit: rows or groups are drawn from the whole store, and scanned until enough of them are taken."""

from collections.abc import Sequence

import numpy as np

from exgrpo_cli.replay.buffer_state import BufferState
from exgrpo_cli.replay.drawing.units import DrawnUnit, ScannedUnit, UnitStore
from exgrpo_cli.replay.protocol import ReplayUnit


class UnitReplay:
    """Draws the units of a buffer, and records what became of them."""

    def __init__(self, state: BufferState, units: UnitStore) -> None:
        """`units` are those of `state`."""
        self._state = state
        self._units = units
        self._scanned: dict[int, DrawnUnit] = {}

    def scan(self, num: int, step: int, rng: np.random.Generator) -> tuple[ReplayUnit, ...]:
        """The next units in the order drawn, with their rows; those of earlier calls are left out until `end_scan`.

        Raises RunError where a priority of the user's own breaks its promises.
        """
        if not self._scanned:
            self._state.begin(step)
        drawn = self._units.draw(num, step, rng)
        self._scanned |= {unit.unit_id: unit for unit in drawn}
        members = [self._units.members(unit.unit_id) for unit in drawn]
        rows = iter(self._state.trajectories([trajectory_id for own in members for trajectory_id in own]))
        return tuple(
            ReplayUnit(drawn=unit, trajectories=tuple(next(rows) for _ in own))
            for unit, own in zip(drawn, members, strict=True)
        )

    def end_scan(self, step: int, verdicts: Sequence[ScannedUnit]) -> None:
        """Record what became of the units scanned, in their order."""
        for verdict in verdicts:
            self._state.replay_unit(step, self._scanned[verdict.unit_id], verdict)
        self._scanned = {}
        self._units.end_draw()
