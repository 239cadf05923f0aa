"""A limit on the time of one process: the run saves and stops while there is still time for it."""

import re
import time
from dataclasses import dataclass, field

from exgrpo_cli.base.errors import InputError

_DURATION = re.compile(r"(?:(?P<days>\d+)d)?(?:(?P<hours>\d+)h)?(?:(?P<minutes>\d+)m)?(?:(?P<seconds>\d+)s)?")
_UNITS = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}


@dataclass(kw_only=True, slots=True)
class TimeLimit:
    """How long this process may work, counted from when the limit was made; a resumed run counts anew."""

    seconds: float
    """Infinite where there is no limit."""
    started: float = field(default_factory=time.perf_counter)
    _longest_step: float = 0.0
    _longest_save: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "TimeLimit":
        """The limit written as days, hours, minutes and seconds: "3h50m", "45m", "1d12h", "90s".

        Raises InputError for anything else, and for no time at all.
        """
        parts = _DURATION.fullmatch(text.strip())
        seconds = sum(int(parts[unit] or 0) * size for unit, size in _UNITS.items()) if parts else 0
        if seconds == 0:
            raise InputError(f"--time-limit {text!r} is no length of time: write it like 3h50m, 45m or 90s.")
        return cls(seconds=seconds)

    def count_step(self, seconds: float) -> None:
        """A step took so long; the next one may take as long as the longest."""
        self._longest_step = max(self._longest_step, seconds)

    def count_save(self, seconds: float) -> None:
        """A checkpoint took so long."""
        self._longest_save = max(self._longest_save, seconds)

    @property
    def is_near(self) -> bool:
        """Whether another step and a checkpoint might not fit any more."""
        spent = time.perf_counter() - self.started
        return spent + self._longest_step + 2 * self._longest_save >= self.seconds
