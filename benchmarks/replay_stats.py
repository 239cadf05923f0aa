"""Time and memory of `replay-stats` and `report` on a long run: 700 steps of 128 questions, about 200,000 trajectories.

The run is simulated through the real buffer and ledger (minutes), then summarised in fresh processes.

    python benchmarks/replay_stats.py --json
    python benchmarks/replay_stats.py --steps 10000 --questions 2400 --per-step 2
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from synthetic_run import SyntheticRun, write_run

WORK = """
import json, resource, sys, time
from pathlib import Path
begin, cpu = time.perf_counter(), time.process_time()
from exgrpo_cli.show.statistics import report_json, report_runs, save_reports
reports = report_runs([Path(sys.argv[1])], other=sys.argv[2])
[told] = reports.values()
report_json(reports)
summarised, cpu_summarised = time.perf_counter(), time.process_time()
if sys.argv[3]:
    save_reports(reports, [Path(sys.argv[3])])
drawn, cpu_drawn = time.perf_counter(), time.process_time()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({
    "summary_seconds": summarised - begin, "summary_cpu_seconds": cpu_summarised - cpu,
    "plot_seconds": drawn - summarised, "plot_cpu_seconds": cpu_drawn - cpu_summarised,
    "peak_bytes": peak, "trajectories": told["stored"], "replays": told["used"],
}))
"""
PAGE = """
import json, resource, sys, time
from pathlib import Path
begin, cpu = time.perf_counter(), time.process_time()
from exgrpo_cli.commands import run
assert run(["report", sys.argv[1], "--output", sys.argv[2]]) == 0
path = Path(sys.argv[2])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({
    "page_seconds": time.perf_counter() - begin, "page_cpu_seconds": time.process_time() - cpu,
    "page_peak_bytes": peak, "page_bytes": path.stat().st_size,
}))
"""


def measure(work: str, run: Path, *arguments: str) -> dict[str, float]:
    """One summary or page in a process of its own, imports included."""
    command = [sys.executable, "-c", work, str(run), *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def median(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--questions", type=int, default=46000)
    parser.add_argument("--per-step", type=int, default=128, help="questions of a step")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--run", type=Path, help="a run folder to keep and use again; made where it is missing")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        run = options.run or Path(scratch) / "run"
        if not run.exists():
            begin = time.perf_counter()
            # What a power cut would leave of a simulated run is nobody's loss.
            os.fsync = lambda _: None
            spec = SyntheticRun(
                steps=options.steps, num_questions=options.questions, questions_per_step=options.per_step, save_every=25
            )
            write_run(run, spec)
            print(f"simulated in {time.perf_counter() - begin:.0f} s", file=sys.stderr)
        plain = median([measure(WORK, run, "", str(Path(scratch) / "plots")) for _ in range(options.repeats)])
        asked = median([measure(WORK, run, "sampler=linear,metric=ppl", "") for _ in range(options.repeats)])
        page = median([measure(PAGE, run, str(Path(scratch) / "report.html")) for _ in range(options.repeats)])
        result = {
            "ledger_files": sum(1 for path in (run / "replay").rglob("*") if path.is_file()),
            **plain,
            **page,
            "what_if_seconds": asked["summary_seconds"],
            "what_if_cpu_seconds": asked["summary_cpu_seconds"],
            "what_if_peak_bytes": asked["peak_bytes"],
        }
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        for name, value in result.items():
            print(f"{name:<22} {value:>16,.2f}")


if __name__ == "__main__":
    main()
