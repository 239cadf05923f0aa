"""Life table of questions: what becomes of a solved one at its next visit, and of one that was lost, from visits alone.

A visit solves its question where one of its fresh rollouts is right. Lost: solved at a visit, not at the next one;
regained: solved at the next visit again. In on-policy training too, where nothing is stored.
"""

from typing import Any

import numpy as np
import pyarrow as pa

VISITED = ("step", "question_id", "num_fresh_successes")
"""Columns of a visit that a life table is made from."""
DELAYS = {1: "1 to 4", 5: "5 to 16", 17: "17 to 64", 65: "65 and more"}
"""Rows of the table by the first of their delays, in steps between two visits."""
OUTCOMES = ("kept", "lost", "regained", "still_lost")


def question_lives(visits: pa.Table) -> dict[str, Any]:
    """The life table of `visits`, of which the columns VISITED are there, as `replay-stats --json` has it.

    `by_delay` counts pairs of successive visits of a question by their outcome; `lost_share` is of the visits after one
    that solved the question, `regained_share` of those after one that lost it or left it lost; `solved` are questions,
    `lost_now` those of them that their last visit did not solve, `repair` is the median of steps from the visit that
    lost a question to the one that regained it. None where there is no such visit.
    """
    table = visits.sort_by([("question_id", "ascending"), ("step", "ascending")])
    step, solves = table["step"].to_numpy(), table["num_fresh_successes"].to_numpy() > 0
    _, question = np.unique(table["question_id"].to_numpy(zero_copy_only=False), return_inverse=True)
    # Visits of a question that solved it, up to each visit: the count before its first visit is taken off.
    count, same = np.cumsum(solves), question[1:] == question[:-1]
    ever = count > (count - solves)[np.searchsorted(question, question)]
    last = np.append(~same, np.ones(min(len(step), 1), dtype=bool))
    after = np.flatnonzero(same & ever[:-1]) + 1
    outcome = 2 * ~solves[after - 1] + ~solves[after]
    delay = np.searchsorted(list(DELAYS), step[after] - step[after - 1], side="right") - 1
    counts = np.zeros((len(DELAYS), len(OUTCOMES)), dtype=np.int64)
    np.add.at(counts, (delay, outcome), 1)
    repairs, fell = [], 0
    for now, what in zip(step[after].tolist(), outcome.tolist(), strict=True):
        fell = now if OUTCOMES[what] == "lost" else fell
        repairs += [now - fell] * (OUTCOMES[what] == "regained")
    kept, lost, regained, still_lost = counts.sum(axis=0).tolist()
    return {
        "solved": int((ever & last).sum()),
        "lost_now": int((ever & last & ~solves).sum()),
        "lost_share": lost / (kept + lost) if kept + lost else None,
        "regained_share": regained / (regained + still_lost) if regained + still_lost else None,
        "repair": float(np.median(repairs)) if repairs else None,
        "by_delay": [
            {"delay": name, **dict(zip(OUTCOMES, row, strict=True))}
            for name, row in zip(DELAYS.values(), counts.tolist(), strict=True)
            if any(row)
        ],
    }
