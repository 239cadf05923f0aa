"""What a policy counts: versions, updates tried, skips in a row; and the report it makes of each update."""

import json
from pathlib import Path
from typing import Any

from exgrpo_cli.config.sections.run import OptimSettings
from exgrpo_cli.engines.policy.files import reading_file
from exgrpo_cli.engines.policy.micro_batches import Accumulated
from exgrpo_cli.engines.policy.optimizer import learning_rate_at, skip_reason
from exgrpo_cli.engines.protocols import UpdateReport

STATE_FILE = "policy.json"


class UpdateCounters:
    """The counters of a policy, as they are written to `policy.json`."""

    def __init__(self, settings: OptimSettings) -> None:
        self.weight_version = 0
        """Updates applied: versions of the weights since the run began."""
        self.num_updates = 0
        """Updates tried, applied or skipped: the position in the learning-rate schedule."""
        self.consecutive_skips = 0
        self.progress: float | None = None
        """Share of the run's budget spent, of the mini-batch at hand; None where the schedule counts updates."""
        self._settings = settings

    @property
    def learning_rate(self) -> float:
        """Of the update that comes next."""
        if self.progress is None:
            return learning_rate_at(self._settings, self.num_updates)
        return learning_rate_at(self._settings, self.progress * self._settings.horizon * self._settings.minibatches)

    def skip_reason(self, grad_norm: float) -> str:
        """Why an update of this gradient norm, before clipping, must not be applied; empty when it may be."""
        return skip_reason(grad_norm, self._settings)

    def count(self, accumulated: Accumulated, *, grad_norm: float, skipped: str) -> UpdateReport:
        """Count one update, applied where `skipped` gives no reason against it, and report it."""
        learning_rate = self.learning_rate
        self.num_updates += 1
        if skipped:
            self.consecutive_skips += 1
        else:
            self.consecutive_skips = 0
            self.weight_version += 1
        sums = accumulated.sums
        return UpdateReport(
            applied=not skipped,
            skip_reason=skipped,
            grad_norm=grad_norm,
            loss=accumulated.loss,
            num_tokens=accumulated.num_tokens,
            metrics={"optim/learning_rate": learning_rate, **(sums.metrics() if sums else {})},
        )

    def save(self, folder: Path, **others: int) -> None:
        """Write `policy.json`: the counters, and `others` that `read_state` gives back."""
        counters = {
            "weight_version": self.weight_version,
            "num_updates": self.num_updates,
            "consecutive_skips": self.consecutive_skips,
        }
        (folder / STATE_FILE).write_text(json.dumps(others | counters) + "\n")

    def load(self, folder: Path) -> None:
        """Take over what `save` wrote. Raises InputError where it cannot be read."""
        with reading_file(folder / STATE_FILE):
            saved = read_state(folder)
            self.weight_version = int(saved["weight_version"])
            self.num_updates = int(saved["num_updates"])
            self.consecutive_skips = int(saved["consecutive_skips"])


def read_state(folder: Path) -> dict[str, Any]:
    """Everything in the `policy.json` of `folder`. Raises InputError where it cannot be read."""
    with reading_file(folder / STATE_FILE):
        return dict(json.loads((folder / STATE_FILE).read_text()))
