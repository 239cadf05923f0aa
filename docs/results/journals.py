"""What the result files leave out of a study's runs, step by step, as CSV: `journals.py STUDY > STUDY.csv`.

A row a step of each run that ended (STUDY/ARM/seed-N/metrics.jsonl), four digits; empty where a step has none.
"""

import csv
import sys
from pathlib import Path

from exgrpo_cli.runs.folder import read_metrics

COLUMNS = (
    "step", "batch/pass_at_1", "policy/entropy", "length/mean", "length/clipped", "optim/grad_norm", "replay/used",
    "replay/age_mean", "replay/entropy_selected", "replay/ess", "policy/ratio_replay", "tokens/generated",
    "tokens/trained", "time/rollout", "time/update",
)  # fmt: skip


def main(study: Path) -> None:
    """Print the table."""
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(("arm", "seed", *COLUMNS))
    for run in sorted(result.parent for result in study.glob("*/seed-*/result.json")):
        for line in read_metrics(run).rows:
            values = (line.get(column, "") for column in COLUMNS)
            told = [f"{value:.4g}" if isinstance(value, float) else value for value in values]
            table.writerow((run.parent.name, run.name.removeprefix("seed-"), *told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
