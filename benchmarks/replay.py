"""The experience buffer at scale: memory, and the time to open, draw, fetch and append, for several ledger sizes.

    python benchmarks/replay.py                          # 10^4, 10^5 and 10^6 trajectories; the last takes 9 GB of disk
    python benchmarks/replay.py --sizes 10000 --json

Each ledger is built through the buffer itself, step by step, with checkpoints on the way as of a training run. Every
size then gets a process of its own, so that its memory is its own. Times are medians in milliseconds.

The second table draws units by priority from as many rows, failures among them: memory, and the CPU time of a draw.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from exgrpo_cli.ledger.reader import LedgerReader
from exgrpo_cli.ledger.schemas import LedgerIdentity
from exgrpo_cli.replay.append import Append
from exgrpo_cli.replay.by_question import resolve_sampler
from exgrpo_cli.replay.by_unit import UnitDraw
from exgrpo_cli.replay.replace import Replace
from exgrpo_cli.replay.rows import ROW, Rows
from exgrpo_cli.replay.store import FreshRow, Store, Visit

GROUP_SIZE = 8
NUM_QUESTIONS = 46_000
PER_QUESTION = 22
"""Stored trajectories per buffered question, whatever the size: 10^6 over 46,000."""
PER_STEP = 1024
DRAWN = 64
CHECKPOINT_EVERY = 50
POOL_TOKENS = 1 << 22
MAX_TOKENS = 8192
IDENTITY = LedgerIdentity(
    tokenizer_hash="synthetic", template="none", group_size=GROUP_SIZE, questions_hash="none", logprob_source="trainer"
)
QUESTION_IDS = [f"{number:032x}" for number in range(NUM_QUESTIONS)]


class Responses:
    """Random responses cut from one pool, so that building is bound by the ledger and not by random numbers."""

    def __init__(self, mean_tokens: int, rng: np.random.Generator) -> None:
        self._mean_tokens = mean_tokens
        self._rng = rng
        self._tokens = rng.integers(0, 152_000, POOL_TOKENS, dtype=np.int32)
        self._logprobs = -rng.exponential(0.3, POOL_TOKENS).astype(np.float32)

    def sample(self, num: int) -> Iterator[FreshRow]:
        """Lengths are gamma distributed (shape 2), as far spread as those of reasoning traces."""
        lengths = np.clip(self._rng.gamma(2.0, self._mean_tokens / 2, num), 16, MAX_TOKENS).astype(int)
        begins = self._rng.integers(0, POOL_TOKENS - MAX_TOKENS, num)
        entropies = self._rng.gamma(4.0, 0.1, num)
        for begin, length, entropy in zip(begins.tolist(), lengths.tolist(), entropies.tolist(), strict=True):
            logprobs = self._logprobs[begin : begin + length]
            yield FreshRow(
                token_ids=self._tokens[begin : begin + length],
                behaviour_logprobs=logprobs,
                entropy=entropy,
                nll=float(-logprobs.mean(dtype=np.float64)),
            )


def visits(step: int, num_trajectories: int, questions: np.ndarray, responses: Responses) -> list[Visit]:
    """Visits with k = 1..7 fresh successes that add up to `num_trajectories`."""
    planned, position = [], 0
    while num_trajectories:
        k = min(1 + (step + position) % (GROUP_SIZE - 1), num_trajectories)
        planned.append(
            Visit(
                question_id=QUESTION_IDS[int(questions[position])],
                step=step,
                weight_version=step,
                success_count=k,
                num_fresh_successes=k,
                num_replayed=0,
                verifier_failed=False,
                rows=list(responses.sample(k)),
            )
        )
        num_trajectories -= k
        position += 1
    return planned


def append(buffer: Store, step: int, planned: list[Visit]) -> None:
    buffer.record_visits(planned)
    buffer.flush(step)


def build(folder: Path, size: int, mean_tokens: int) -> None:
    """A ledger of `size` trajectories over size / 22 questions."""
    rng = np.random.default_rng(size)
    responses = Responses(mean_tokens, rng)
    num_questions = min(NUM_QUESTIONS, max(PER_STEP // 3, size // PER_QUESTION))
    started = time.monotonic()
    with Store(folder, identity=IDENTITY, rules=Replace(), question_ids=QUESTION_IDS) as buffer:
        for step in range(1, -(-size // PER_STEP) + 1):
            questions = rng.choice(num_questions, PER_STEP // 3, replace=False)
            append(buffer, step, visits(step, min(PER_STEP, size - (step - 1) * PER_STEP), questions, responses))
            if step % CHECKPOINT_EVERY == 0:
                buffer.seal()
                rate = step * PER_STEP / (time.monotonic() - started)
                print(f"  {folder.name}: {step * PER_STEP:,} of {size:,}, {rate:,.0f}/s", file=sys.stderr)
        buffer.seal()


def rss_anon_mib() -> float:
    """Anonymous resident memory of this process; mapped files are not in it."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) / 1024


class Stopwatch:
    """Medians over repeated runs, in milliseconds: of wall time, and of the CPU time of this process.

    On a machine that others use the two differ; then the second says what an idle one would take.
    """

    def __init__(self) -> None:
        self._times: dict[str, list[tuple[float, float]]] = {}

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        elapsed = (1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu))
        self._times.setdefault(name, []).append(elapsed)

    def medians(self) -> dict[str, float]:
        found = {}
        for name, times in self._times.items():
            wall, cpu = zip(*times, strict=True)
            found[f"{name}_ms"], found[f"{name}_cpu_ms"] = statistics.median(wall), statistics.median(cpu)
        return found


def nbytes(*holders: object) -> int:
    """Memory of the arrays that these hold, ids apart."""
    held = [each for holder in holders for each in vars(holder).values()]
    arrays = [own for each in held for own in (each.values() if isinstance(each, dict) else [each])]
    return sum(own.nbytes for own in arrays if isinstance(own, np.ndarray) and own.dtype != object)


def drop_page_cache(folder: Path) -> None:
    for path in folder.rglob("*.arrow"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(folder: Path, mean_tokens: int) -> dict[str, float]:
    """All figures of one ledger; runs in a fresh process."""
    rng = np.random.default_rng(1)
    before = rss_anon_mib()

    def open_buffer(at_step: int) -> Store:
        return Store(folder, identity=IDENTITY, rules=Replace(), question_ids=QUESTION_IDS, at_step=at_step)

    at_step = LedgerReader(folder).last_step
    watch = Stopwatch()
    for _ in range(7):
        with watch.time("open"):
            buffer = open_buffer(at_step)
        buffer.close()
    drop_page_cache(folder)
    buffer = open_buffer(at_step)
    result: dict[str, float] = {
        "trajectories": buffer.counts.num_trajectories,
        "questions": buffer.counts.num_questions,
    }
    result["index_bytes_per_trajectory"] = nbytes(buffer.rows, buffer.questions) / buffer.counts.num_trajectories

    step, sampler = at_step + 1, resolve_sampler(buffer.rules.sampler, buffer.rules.mu, buffer.rules.sigma)
    for _ in range(200):
        with watch.time("draw"):
            buffer.draw_questions(sampler, DRAWN, step, rng)
    drawn = buffer.draw_questions(sampler, DRAWN, step, rng)
    for repeat in range(31):
        with watch.time("fetch_cold" if repeat == 0 else "fetch"):
            ids = [int(i) for each in buffer.candidates(drawn) for i in each.trajectory_ids]
            buffer.load(ids)
    result["fetched"] = len(ids)

    responses = Responses(mean_tokens, rng)
    for later in range(step, step + 30):
        planned = visits(later, PER_STEP, rng.choice(NUM_QUESTIONS, PER_STEP // 3, replace=False), responses)
        with watch.time("append"):
            buffer.record_visits(planned)
            with watch.time("flush"):
                buffer.flush(later)
    result["rss_anon_mib"] = rss_anon_mib()
    result["rss_anon_before_mib"] = before
    buffer.close()
    # Leave the ledger as it was found, so that it can be measured again.
    open_buffer(at_step).close()
    result["disk_mib"] = sum(path.stat().st_size for path in folder.rglob("part-*")) / 2**20
    return result | watch.medians()


DRAWN_BY = {
    "top": {"priority": "advantage", "draw": "top"},
    "top, fading": {"priority": "advantage", "draw": "top", "age_decay": 500.0},
    "latest": {"priority": "latest", "draw": "top"},
    "proportional": {"priority": "advantage", "exponent": 0.5},
    "fading, corrected, bounded": {"priority": "reward", "exponent": 0.6, "age_decay": 500.0, "bias_correction": 0.4},
}


def measure_units(size: int, drawn: tuple[int, ...] = (64, 512), repeats: int = 15) -> list[dict[str, float | str]]:
    """A store of `size` rows born PER_STEP a step, 40 in 100 of them right, drawn from by each priority."""
    rng = np.random.default_rng(0)
    rows = {name: np.zeros(size, dtype=kind) for name, kind in ROW.items()}
    rows["question"][:] = rng.integers(0, NUM_QUESTIONS, size)
    rows["step_born"][:] = 1 + np.arange(size) // PER_STEP
    rows["group_id"][:] = np.arange(size)
    rows["reward"][:] = rng.random(size) < 0.4
    retired = np.zeros(NUM_QUESTIONS, dtype=bool)
    retired[:100] = True
    found = []
    for name, settings in DRAWN_BY.items():
        own = dict(rows)
        by_reward, by_advantage = rows["reward"] + 1e-6, rng.random(size)
        by_name = {"reward": by_reward, "latest": rows["step_born"]}
        own["priority"] = by_name.get(settings["priority"], by_advantage).astype(float)
        stored = Rows(own, NUM_QUESTIONS)
        rules = Append(store="all", **settings)
        result: dict[str, float | str] = {"drawn by": name, "rows": size}
        result["bytes_per_row"] = nbytes(stored) / size
        for num in drawn:
            watch = Stopwatch()
            for _ in range(repeats):
                with watch.time("draw"):
                    units = stored.units(retired, groups=False)
                    UnitDraw(rules, stored, units, np.array([]), size // PER_STEP + 1, rng).choose(num)
            result[f"draw_{num}_cpu_ms"] = watch.medians()["draw_cpu_ms"]
        found.append(result)
    return found


def units_table(results: list[dict[str, float | str]]) -> str:
    keys = [key for key in results[0] if key != "drawn by"]
    lines = [f"{'drawn by':30}" + "".join(f"{key:>18}" for key in keys)]
    for result in results:
        lines.append(f"{result['drawn by']:30}" + "".join(f"{result[key]:>18,.2f}" for key in keys))
    return "\n".join(lines)


ROWS = {
    "questions": "questions in the buffer",
    "disk_mib": "ledger on disk, MiB",
    "rss_anon_mib": "anonymous memory at the end, MiB",
    "rss_anon_before_mib": "  of it before the buffer was opened",
    "index_bytes_per_trajectory": "index, bytes per trajectory",
    "open_ms": "open, ms",
    "open_cpu_ms": "  of it CPU",
    "draw_ms": f"draw {DRAWN} questions, ms",
    "draw_cpu_ms": "  of it CPU",
    "fetched": "their candidates",
    "fetch_ms": "fetch these, warm page cache, ms",
    "fetch_cpu_ms": "  of it CPU",
    "fetch_cold_ms": "fetch these, cold page cache, ms",
    "append_ms": f"append {PER_STEP} trajectories with fsync, ms",
    "append_cpu_ms": "  of it CPU",
    "flush_ms": "  of it writing and fsync",
}


def table(results: list[dict[str, float]]) -> str:
    lines = [f"{'trajectories':44}" + "".join(f"{result['trajectories']:>14,.0f}" for result in results)]
    for key, label in ROWS.items():
        lines.append(f"{label:44}" + "".join(f"{result[key]:>14,.2f}" for result in results))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="10000,100000,1000000", help="numbers of trajectories, comma separated")
    parser.add_argument("--tokens", type=int, default=1000, help="mean tokens of a trajectory")
    parser.add_argument("--folder", type=Path, help="build here, use what is there already, and keep it")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.tokens)))
        return
    root = options.folder or Path(tempfile.mkdtemp(prefix="exgrpo-replay-"))
    try:
        results, sizes = [], [int(text) for text in options.sizes.split(",")]
        for size in sizes:
            folder = root / f"replay-{size}"
            if not folder.exists():
                build(folder, size, options.tokens)
            command = [sys.executable, __file__, "--measure", str(folder), "--tokens", str(options.tokens)]
            results.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))
        units = [line for size in sizes for line in measure_units(size)]
        by_both = f"{table(results)}\n\n{units_table(units)}"
        print(json.dumps({"ledgers": results, "units": units}) if options.json else by_both)
    finally:
        if not options.folder:
            shutil.rmtree(root)


if __name__ == "__main__":
    main()
