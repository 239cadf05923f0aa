"""How a held-out score of `summary.json` reads, wherever it is shown."""

from collections.abc import Mapping
from typing import Any

LEAST_CONSTANT = 0.02
"""pass@1 of a constant answer above which it is told, where a score is no better."""


def remarks(score: Mapping[str, Any]) -> str:
    """What a reader of a score must know, each behind `; `: steps, what a constant answer gets, and other graders.

    Empty for scores of older versions, which have none of it.
    """
    return "".join(f"; {remark}" for remark in (*_working(score), *_constant(score), *_beside(score)))


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
