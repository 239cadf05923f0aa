"""Results that a trial compares, without what a clock or a machine says, and the settings of the small run."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from processes import Outcome, apart

SMALL = """
run = {steps = 4, save_every = 1, keep_checkpoints = 3, plots = false}
rollout = {questions_per_step = 6}
replay = {start_threshold = 0}
arithmetic = {num_heldout = 12, num_train = 60}
validation = {every = 2}
"""


def without_times(value: Any) -> Any:
    """Plain data without what a clock, a path or the machine's memory says."""
    if isinstance(value, dict):
        gone = re.compile("^time/|seconds|memory|^started$|^ended$|path|^machine|folder|checksum|version|git")
        return {key: without_times(own) for key, own in value.items() if not gone.search(str(key))}
    return [without_times(own) for own in value] if isinstance(value, list) else value


def json_lines(path: Path) -> list[Any]:
    """Of a file, times left out."""
    return [without_times(json.loads(line)) for line in path.read_text().splitlines()]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "gone"


def run_result(run: Path) -> dict[str, Any]:
    """All that a finished run leaves: journals, samples, the ledger's tables, questions, weights."""
    from exgrpo_cli.ledger.reader import LedgerReader

    reader = LedgerReader(run / "replay")
    tables = ("trajectories", "scores", "draws", "visits", "replays", "events")
    return {
        "metrics": json_lines(run / "metrics.jsonl"),
        "validations": json_lines(run / "validations.jsonl"),
        "summary": without_times(json.loads((run / "summary.json").read_text())),
        "samples": {path.name: json_lines(path) for path in sorted((run / "samples").iterdir())},
        "weights": digest(run / "model" / "model.safetensors"),
        "questions": [digest(run / "data" / name) for name in ("train.parquet", "heldout.parquet")],
        "ledger": {name: hashlib.sha256(str(reader.table(name).to_pydict()).encode()).hexdigest() for name in tables},
    }


def after_resume(folder: Path, outcome: Outcome) -> Any:
    return apart(run_result, folder / "run") if outcome.code == 0 else None


def printed(folder: Path, outcome: Outcome) -> Any:
    return outcome.out


def printed_json(folder: Path, outcome: Outcome) -> Any:
    """What a command printed as JSON, or its text where it is none."""
    try:
        return without_times(json.loads(outcome.out))
    except ValueError:
        return outcome.out


def results_left(folder: Path, outcome: Outcome) -> Any:
    """The figures that an evaluation printed, and its verdicts on disk."""
    lines = [line for path in sorted(folder.glob("res/*/records.jsonl")) for line in json_lines(path)]
    return [printed_json(folder, outcome), sorted(json.dumps(line, sort_keys=True) for line in lines)]
