"""`summary.json` read back, and how its held-out scores read wherever they are shown."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
"""pass@1 of a constant answer above which it is told, where a score is no better."""


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
    """What a reader of a score must know, each behind `; `: coverage, steps, a constant answer, other graders.

    Empty for scores of older versions, which have none of it.
    """
    told = (*_coverage(score), *_working(score), *_constant(score), *_beside(score))
    return "".join(f"; {remark}" for remark in told)


def _coverage(score: Mapping[str, Any]) -> list[str]:
    """pass@k at the largest k above 1."""
    curve = score.get("pass_at_k", {})
    k = max(map(int, curve), default=1)
    found = curve.get(str(k))
    return [f"pass@{k} {found['value']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"] if k > 1 else []


def _working(score: Mapping[str, Any]) -> list[str]:
    return [f"{score['valid_pass_at_1']:.3f} right in every step"] if "valid_pass_at_1" in score else []


def _constant(score: Mapping[str, Any]) -> list[str]:
    constant = score.get("constant_answer", {"pass_at_1": 0.0})
    if constant["pass_at_1"] < max(LEAST_CONSTANT, score["low"]):
        return []
    return [f"not above {constant['pass_at_1']:.3f}, what answering {constant['answer']} throughout gets"]


def _beside(score: Mapping[str, Any]) -> list[str]:
    return [
        f"by {name} {found['pass_at_1']:.3f} (differs on {found['disagreements']})"
        if found["disagreements"]
        else f"{name} agrees"
        for name, found in score.get("second_graders", {}).items()
    ]
