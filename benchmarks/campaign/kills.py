"""Kills at random moments of every long command: what goes on afterwards comes to the bits of the undisturbed one.

    python benchmarks/campaign/kills.py --count 100 --seed 1

A trial starts a command, ends it with SIGKILL, SIGINT or SIGTERM after a random share of the time it takes (after
SIGINT sometimes a second one), as often as it draws, and then lets it go on to its end. Its class:

identical  the result of the undisturbed command, and nothing left behind
early      the command had ended before it was killed, with the result of the undisturbed one
lost       another result, a page that is missing, or a partial file that stays
ugly       a traceback, "unexpected", a signal that was not sent, no line at all
"""

import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from processes import Finding, Outcome, campaign, end, exgrpo, parser_of, start, trials_of
from results import SMALL, after_resume, digest, results_left

BAD = ("lost", "ugly")
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, kw_only=True)
class Work:
    """A long command, how it goes on, and what it comes to."""

    name: str
    share: float
    command: tuple[str, ...]
    go_on: tuple[str, ...]
    """Where the first has left something to go on with."""
    goes_on_with: str
    """A path that is there then."""
    result: Callable[[Path, Outcome], Any]


def with_page(folder: Path, outcome: Outcome) -> Any:
    return [after_resume(folder, outcome), (folder / "run" / "report.html").is_file()]


STUDY = ("ablate", "--methods", "grpo,exgrpo", "--seeds", "1", "--config", "small.toml", "--output", "study", "--json")
EVALUATION = (
    *("evaluate", "arithmetic", "--data", "heldout.parquet"),
    *("--model", "cache-model", "--output", "res", "--json"),
)
TRAIN = ("train", "--config", "small.toml", "--output", "run", "--set", "run.plots=true")
WORKS = (
    Work(
        name="train",
        share=0.5,
        command=TRAIN,
        go_on=("train", "--resume", "--output", "run"),
        goes_on_with="run/config.toml",
        result=with_page,
    ),
    Work(
        name="prepare",
        share=0.1,
        command=("prepare", "arithmetic", "--output", "q.parquet"),
        go_on=("prepare", "arithmetic", "--output", "q.parquet"),
        goes_on_with="nothing",
        result=lambda folder, outcome: digest(folder / "q.parquet"),
    ),
    Work(name="evaluate", share=0.15, command=EVALUATION, go_on=EVALUATION, goes_on_with="res", result=results_left),
    Work(
        name="report",
        share=0.1,
        command=("report", "cache-model", "--output", "page.html"),
        go_on=("report", "cache-model", "--output", "page.html"),
        goes_on_with="nothing",
        result=lambda folder, outcome: digest(folder / "page.html"),
    ),
    Work(
        name="study",
        share=0.15,
        command=STUDY,
        go_on=STUDY,
        goes_on_with="study",
        result=lambda folder, outcome: [
            json.loads(path.read_text())["heldout"] for path in sorted(folder.glob("study/*/seed-*/summary.json"))
        ],
    ),
)


def trial(work: Work, number: int, seed: int, right: Any, seconds: float, root: Path) -> Finding:
    """Kill, go on, and class what came."""
    rng = random.Random(f"{seed} {work.name} {number}")
    folder = root / f"{work.name}-{number}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for given in ("small.toml", "heldout.parquet", "cache-model", "cache"):
        (folder / given).symlink_to(root / given)
    kills, lines, early = [], [], False
    for _ in range(rng.choice((1, 1, 2, 3))):
        what, after = rng.choice(SIGNALS), rng.uniform(0, 1.05) * seconds
        out, err = folder / "out", folder / "err"
        child = start(_command(work, folder), folder, out, err, EXGRPO_CACHE=str(root / "cache"))
        code = _end_after(child, after, what, again=what == signal.SIGINT and rng.random() < 0.3)
        outcome = Outcome(code, out.read_text(errors="replace"), err.read_text(errors="replace"), after)
        kills.append(f"{what.name} after {after:.1f} s ({code})")
        lines += outcome.err.splitlines()[-1:]
        early = code == 0
        if outcome.ugly and code not in (-what, 0):
            return Finding(number, f"{work.name}: {', '.join(kills)}", "ugly", code, outcome.err[-300:])
        if early:
            break
    if not early:
        outcome = exgrpo(_command(work, folder), folder, seconds=900, EXGRPO_CACHE=str(root / "cache"))
    result = work.result(folder, outcome)
    left = [str(path) for place in (folder, root / "cache") for path in place.rglob("*partial*")]
    what = f"{work.name}: {', '.join(kills)}"
    if outcome.ugly or outcome.code:
        return Finding(number, what, "ugly", outcome.code, f"{lines} {outcome.err[-300:]}")
    if result != right or left:
        return Finding(number, what, "lost", outcome.code, f"{lines} left {left}, same {result == right}")
    return Finding(number, what, "early" if early and len(kills) == 1 else "identical", 0, "")


def _command(work: Work, folder: Path) -> list[str]:
    return list(work.go_on if (folder / work.goes_on_with).exists() else work.command)


def _end_after(child: int, seconds: float, what: signal.Signals, *, again: bool) -> int:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, what)
    if again:
        time.sleep(0.1)
        with suppress(ProcessLookupError):
            os.kill(child, what)
    return end(child, 600)


def _build(root: Path) -> None:
    """A finished run and its cache, which every trial is given."""
    (root / "small.toml").write_text(SMALL)
    command = ["train", "--config", "small.toml", "--output", "warm", "--set", "run.plots=true"]
    warm = exgrpo(command, root, seconds=1800, EXGRPO_CACHE=str(root / "cache"))
    assert warm.code == 0, warm.err
    (root / "cache-model").symlink_to("warm")
    (root / "heldout.parquet").symlink_to("warm/data/heldout.parquet")


def main() -> None:
    parser = parser_of(__doc__, 100, "trials")
    parser.add_argument("--only", choices=[work.name for work in WORKS])
    parser.add_argument("--first", type=int, default=0, help="number of the first trial, for instalments")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="exgrpo-kills-") as name:
        root = options.folder or Path(name)
        root.mkdir(exist_ok=True)
        if not (root / "warm" / "summary.json").is_file():
            _build(root)
        defects = 0
        for work in WORKS:
            if options.only not in (None, work.name):
                continue
            whole = root / f"whole-{work.name}"
            shutil.rmtree(whole, ignore_errors=True)
            whole.mkdir()
            for given in ("small.toml", "heldout.parquet", "cache-model"):
                (whole / given).symlink_to(root / given)
            outcome = exgrpo(list(work.command), whole, seconds=1800, EXGRPO_CACHE=str(root / "cache"))
            assert outcome.code == 0, outcome.err
            right = work.result(whole, outcome)
            count = options.count if options.only else max(1, round(options.count * work.share))
            defects += campaign(
                work.name,
                options,
                trials_of(options, count, options.first),
                lambda number, own=work, known=right, took=outcome.seconds: trial(
                    own, number, options.seed, known, took, root
                ),
                BAD,
            )
    raise SystemExit(bool(defects))


if __name__ == "__main__":
    main()
