"""The sentence that a page begins with: of a run what it was and what came of it, of a study which arm is ahead."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from exgrpo_cli.base.statistics import compare_paired
from exgrpo_cli.runs.folder import read_metrics
from exgrpo_cli.runs.result import RESULT_FILE, read_result
from exgrpo_cli.show.figures.run import heldout_scores, learning_title
from exgrpo_cli.show.record import read_config

FEW = 3
"""Fewer claims than this are told by their titles."""


def run_headline(run: Path) -> str:
    """Method, backbone, questions, steps, and held-out pass@1 before and after with the interval of its change.

    As far as the run has come; of a run without held-out questions how fresh ones went. Raises InputError for settings
    or journals that cannot be read.
    """
    config, metrics = read_config(run), read_metrics(run)
    asked = f"{config.run.method} with backbone {config.backbone.name} on {Path(config.data.train).stem} questions"
    said, path = learning_title(metrics, heldout_scores(run, metrics)), run / RESULT_FILE
    if not path.is_file():
        return f"{asked}: {said} so far."
    result = read_result(path)
    if not len(result.after):
        return f"{asked}: {said}; no held-out questions were asked."
    found = compare_paired(result.before / result.samples, result.after / result.samples, np.random.default_rng(0))
    within = f"95\u00a0% interval of the change [{found.low:+.3f}, {found.high:+.3f}], {found.questions:,} questions"
    return f"{asked}: {said} ({within}{'; it may be chance' * (found.low <= 0 <= found.high)})."


def study_headline(report: Mapping[str, Any], *, seeds_needed: int) -> str:
    """The arm that is ahead of its baseline, by how much, and whether that is decided; of claims the verdicts.

    No chance is a difference whose 95 % interval leaves out 0, with a p-value (Holm) below 0.05, over `seeds_needed`
    seeds and more.
    """
    if claims := report.get("claims"):
        if len(claims) < FEW:
            return "; ".join(f"{found['title']}: {found['verdict']}" for found in claims.values()) + "."
        verdicts = [found["verdict"] for found in claims.values()]
        counts = ", ".join(f"{verdicts.count(each)} {each}" for each in dict.fromkeys(verdicts))
        return f"Of {len(verdicts)} claims: {counts}."
    compared = {name: arm for name, arm in report["arms"].items() if arm["difference"]}
    if not compared:
        return "No arm has a finished run to set against its baseline yet."
    name, arm = max(compared.items(), key=lambda each: each[1]["difference"]["mean"])
    effect = arm["difference"]
    sign = -1 if effect["mean"] < 0 else 1
    low, high = sorted(sign * effect[end] for end in ("low", "high"))
    ahead, other = (name, arm["baseline"])[::sign]
    among = f", the best of {len(compared)} arms," if len(compared) > 1 and sign > 0 else ""
    seeds = f"{effect['seeds']} seed{'s' * (effect['seeds'] != 1)}"
    within = f"95\u00a0% interval [{low:+.3f}, {high:+.3f}], {seeds}" if effect["seeds"] > 1 else seeds
    by = f"{ahead}{among} is ahead of {other} by {abs(effect['mean']):.3f} in held-out pass@1 after training ({within})"
    if effect["seeds"] < seeds_needed:
        return f"{by}. No verdict: that takes a claim made beforehand, and {seeds_needed} seeds."
    if low > 0 and (arm["p_holm"] is None or arm["p_holm"] < 0.05):
        return f"{by}. The interval leaves out 0; a verdict takes a claim made beforehand."
    return f"{by}. The difference may be chance."
