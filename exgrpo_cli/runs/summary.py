"""How a held-out score of `summary.json` reads, wherever it is shown."""

from collections.abc import Mapping
from typing import Any


def told_beside(score: Mapping[str, Any]) -> str:
    """What other graders say of a score: `; oat agrees` or `; by oat 0.412 (differs on 3)`. Empty without any."""
    return "".join(
        f"; by {name} {found['pass_at_1']:.3f} (differs on {found['disagreements']})"
        if found["disagreements"]
        else f"; {name} agrees"
        for name, found in score.get("second_graders", {}).items()
    )
