"""What `exgrpo prepare` costs on a data set of the size of OpenR1-Math-46k: 46,000 questions with reasoning traces.

    python benchmarks/prepare.py [--questions 46000] [--json]

Writes a Parquet file of questions of about 250 characters, half of whose answers are not plain numbers, with two traces
of about 10,000 characters each; then runs the command as a user would, every audit included, in a process of its own.
Wall and CPU seconds of that process with its graders, and their peak memory together, sampled; the targets are 3
minutes and 1 GB on 2 cores.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

ROWS_PER_GROUP = 1000
TRACE_CHARS = 10_000
TEXT = (
    "circle triangle point line angle integer real positive sum product of the with such that find all value values "
    "maximum minimum number numbers sequence function polynomial root roots let be and if then between least greatest "
    "prime divisor even odd tangent radius chord area perimeter parallel probability choose cards balls boxes paths"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=46_000)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    arguments = parser.parse_args()
    figures = measure(arguments.questions)
    if arguments.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:16}{value:>16,.1f}")


def measure(num_questions: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        source = folder / "openr1.parquet"
        write_source(source, num_questions)
        before = os.times()
        started = time.monotonic()
        command = [sys.executable, "-m", "exgrpo_cli", "prepare", str(source), "--json"]
        process = subprocess.Popen([*command, "--output", str(folder / "out.parquet")], stdout=subprocess.PIPE)
        peaks = [0]
        watch = threading.Thread(target=watch_memory, args=(process.pid, peaks), daemon=True)
        watch.start()
        process.communicate()
        if process.returncode:
            raise SystemExit(f"exgrpo prepare ended with exit code {process.returncode}")
        wall = time.monotonic() - started
        after = os.times()
        return {
            "source_mb": source.stat().st_size / 2**20,
            "wall_seconds": wall,
            "cpu_seconds": after.children_user + after.children_system - before.children_user - before.children_system,
            "peak_mb": peaks[0] / 2**20,
        }


def watch_memory(pid: int, peaks: list[int]) -> None:
    """Keep the largest sum over the process and its children in `peaks`; pages they share count once each."""
    while True:
        try:
            parent = psutil.Process(pid)
            family = [parent, *parent.children(recursive=True)]
            peaks[0] = max(peaks[0], sum(process.memory_full_info().pss for process in family))
        except psutil.Error:
            if not psutil.pid_exists(pid):
                return
        time.sleep(0.2)


def write_source(path: Path, num_questions: int) -> None:
    rng = np.random.default_rng(0)
    schema = pa.schema([("problem", pa.string()), ("answer", pa.string()), ("generations", pa.list_(pa.string()))])
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, num_questions, ROWS_PER_GROUP):
            rows = [make_row(number, rng) for number in range(start, min(num_questions, start + ROWS_PER_GROUP))]
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))


def make_row(number: int, rng: np.random.Generator) -> dict[str, Any]:
    words = " ".join(rng.choice(TEXT.split(), 40))
    a, b = (int(value) for value in rng.integers(2, 500, 2))
    answers = [str(a * b), str(a), str(-b), f"{a}.{b}", rf"\frac{{{a}}}{{{b}}}", rf"{a}\sqrt{{{b}}}", f"({a}, {b})"]
    answers += [rf"\frac{{{a} - 2\sqrt{{{b}}}}}{{7}}", rf"\{{{a}, {b}, {a + b}\}}", rf"{a}x^2 + {b}x - {number}"]
    trace = (words + " ") * (TRACE_CHARS // len(words))
    return {
        "problem": f"Problem {number}: {words}, $x^2 - {a}x + {b} = 0$?",
        "answer": answers[number % len(answers)],
        "generations": [trace + rf"\boxed{{{a}}}", trace[::-1]],
    }


if __name__ == "__main__":
    main()
