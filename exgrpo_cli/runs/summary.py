"""`summary.json` read back: whether and why a run has finished, and remarks on its held-out scores."""

import warnings
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from exgrpo_cli.base.errors import DamageWarning, InputError
from exgrpo_cli.base.shapes import NUMBER, Shape, read_json, require_shape

SUMMARY: Shape = {
    "steps": int,
    "finished": str,
    "method": str,
    "backbone": str,
    "seed": int,
    "heldout": {"set": str, "before": dict, "after": dict},
    "tokens": {"generated": int, "trained": int},
    "wall_seconds": {"total": NUMBER},
    "peak_memory_bytes": int,
    "replay": {"questions": int, "trajectories": int, "retired": int, "used": int},
}
SCORE: Shape = {
    "pass_at_1": NUMBER,
    "low": NUMBER,
    "high": NUMBER,
    "questions": int,
    "samples": int,
    "valid_pass_at_1?": NUMBER,
    "constant_answer?": {"answer": str, "pass_at_1": NUMBER},
    "second_graders?": dict,
    "pass_at_k?": dict,
}
AT_K: Shape = {"value": NUMBER, "low": NUMBER, "high": NUMBER}
SECOND: Shape = {"pass_at_1": NUMBER, "disagreements": int}
LEAST_CONSTANT = 0.02
"""pass@1 from which a constant answer is reported, where a score is no better."""


class Ending(StrEnum):
    """Reasons for which training ends by itself."""

    UNDER_WAY = ""
    """It has not ended."""
    STEPS_REACHED = "steps reached"
    """All of `run.steps`; more of them may be asked for."""
    BUDGET_SPENT = "budget spent"
    """The tokens or seconds of `run.budget_amount`."""
    ALL_RETIRED = "all questions retired"
    """No question is left to train on; no further step is possible."""

    @property
    def is_final(self) -> bool:
        """Whether a resumed run has nothing left to do, however many steps it is given."""
        return self in (Ending.ALL_RETIRED, Ending.BUDGET_SPENT)


def has_ended(run: Path, last_step: int) -> bool:
    """Whether a run has its summary and nothing left to do up to `last_step`.

    A damaged summary is none, of which a warning tells: a resumed run writes it again.
    """
    path = run / "summary.json"
    if not path.is_file():
        return False
    try:
        summary = read_json(path, {"steps": int, "finished?": str})
    except InputError as error:
        warnings.warn(f"{error} The run counts as unfinished.", DamageWarning, stacklevel=2)
        return False
    ended_early = summary.get("finished") in [ending for ending in Ending if ending.is_final]
    return ended_early or bool(summary["steps"] >= last_step)


def read_summary(path: Path) -> dict[str, Any]:
    """The final figures in a `summary.json`. Raises InputError where it is missing or damaged."""
    summary: dict[str, Any] = read_json(path, SUMMARY)
    for score in (summary["heldout"]["before"], summary["heldout"]["after"]):
        if score:
            require_shape(score, SCORE, str(path))
        for second in score.get("second_graders", {}).values():
            require_shape(second, SECOND, str(path))
        for at_k in score.get("pass_at_k", {}).values():
            require_shape(at_k, AT_K, str(path))
    for seconds in summary["wall_seconds"].values():
        require_shape(seconds, NUMBER, str(path))
    return summary


def remarks(score: Mapping[str, Any]) -> str:
    """Behind `; ` each, what a reader of a score must know: coverage, right steps, a constant answer, other graders."""
    found = []
    if (k := max(map(int, score.get("pass_at_k", {})), default=1)) > 1:
        at_k = score["pass_at_k"][str(k)]
        found.append(f"pass@{k} {at_k['value']:.3f} [{at_k['low']:.3f}, {at_k['high']:.3f}]")
    if "valid_pass_at_1" in score:
        found.append(f"{score['valid_pass_at_1']:.3f} right in every step")
    constant = score.get("constant_answer", {"pass_at_1": 0.0})
    if constant["pass_at_1"] >= max(LEAST_CONSTANT, score["low"]):
        found.append(f"not above {constant['pass_at_1']:.3f}, what answering {constant['answer']} throughout gets")
    for name, second in score.get("second_graders", {}).items():
        differs = f"by {name} {second['pass_at_1']:.3f} (differs on {second['disagreements']})"
        found.append(differs if second["disagreements"] else f"{name} agrees")
    return "".join(f"; {remark}" for remark in found)
