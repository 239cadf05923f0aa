"""Fingerprints of short runs: whether a change of the code changed what a run computes.

    python benchmarks/fingerprints.py --output before.json     # before the change
    python benchmarks/fingerprints.py --compare before.json    # after it: exit 1 and the names of what differs

Each method trains with replay from step 1 on one thread. Hashed are the journal without times, every table of the
experience ledger row by row, and the weights; equal hashes mean the same run bit for bit. Not a measure of speed.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

METHODS = {
    "exgrpo": (),
    "grpo": (),
    "headroom-drift": (),
    "repo": ("replay.min_stored=8",),
    "adv-per": ("replay.warmup_steps=0",),
    "trl-refill": (),
    "rlep": (),
}
"""By preset: what is set besides, so that it replays within the steps of a fingerprint."""
SHAPES = {
    "full": ("run.steps=30",),
    "quick": ("run.steps=10", "rollout.questions_per_step=8", "arithmetic.num_train=60", "arithmetic.levels=[2]"),
}
ALWAYS = (
    "replay.start_threshold=0",
    "run.threads=1",
    "run.plots=false",
    "run.save_every=7",
    "validation.samples=1",
    "arithmetic.num_heldout=20",
)
TABLES = ("trajectories", "bodies", "scores", "draws", "visits", "replays", "events")


def main() -> int:
    """Train, hash, and compare or write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("methods", nargs="*", default=list(METHODS), metavar="METHOD")
    parser.add_argument("--quick", action="store_true", help="ten small steps instead of thirty")
    parser.add_argument("--output", type=Path, help="write the hashes here")
    parser.add_argument("--compare", type=Path, help="hashes to compare with")
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder")
    parser.add_argument("--json", action="store_true", help="print the hashes as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = fingerprints(options.methods, "quick" if options.quick else "full", options.keep or Path(scratch))
    if options.output:
        options.output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if options.json or not options.compare:
        print(json.dumps(found, indent=2))
    if not options.compare:
        return 0
    before = json.loads(options.compare.read_text(encoding="utf-8"))
    changed = [
        f"{method}: {name}"
        for method, hashes in found.items()
        for name, value in hashes.items()
        if before[method].get(name) != value
    ]
    print("\n".join(changed) or f"{len(found)} methods: the same to the bit")
    return int(bool(changed))


def fingerprints(methods: list[str], shape: str, folder: Path) -> dict[str, dict[str, str]]:
    """Hashes by method; `rlep` replays what an `exgrpo` run stored."""
    found = {}
    for method in methods:
        run = folder / method
        assignments = [*ALWAYS, *SHAPES[shape], *METHODS[method]]
        if method == "rlep":
            source = folder / "exgrpo"
            if not source.exists():
                train("exgrpo", source, [*ALWAYS, *SHAPES[shape]])
            assignments.append(f"replay.warm_start={source}")
        train(method, run, assignments)
        found[method] = hashes_of(run)
        print(method, file=sys.stderr, flush=True)
    return found


def train(method: str, run: Path, assignments: list[str]) -> None:
    """One run as a user starts it."""
    settings = [part for assignment in assignments for part in ("--set", assignment)]
    command = [sys.executable, "-m", "exgrpo_cli", "train", "--method", method, "--output", str(run), "--quiet"]
    subprocess.run([*command, *settings], check=True, stdout=subprocess.DEVNULL)


def hashes_of(run: Path) -> dict[str, str]:
    """Hashes of what a run left behind, by name."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    timeless = [{key: value for key, value in line.items() if not key.startswith("time/")} for line in lines]
    found = {"metrics": digest(timeless)}
    for table in TABLES:
        rows = rows_of(run / "replay" / table)
        if rows:
            found[table] = digest(rows)
    found["weights"] = hashlib.sha256((run / "model" / "model.safetensors").read_bytes()).hexdigest()[:16]
    return found


def rows_of(folder: Path) -> list[dict]:
    """Rows of one table of a ledger, in the order in which they were written."""
    rows: list[dict] = []
    for part in sorted(folder.glob("*")):
        if part.suffix == ".parquet":
            rows += pq.read_table(part).to_pylist()
        elif part.suffix in (".arrow", ".feather"):
            with pa.memory_map(str(part)) as source:
                rows += pa.ipc.open_file(source).read_all().to_pylist()
    return rows


def digest(value: object) -> str:
    """Short hash of a JSON value, in which floats keep all their digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
