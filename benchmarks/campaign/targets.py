"""Folders that are damaged, the commands that read them, and how all of them are built once."""

import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from processes import Outcome, end, exgrpo, start
from results import SMALL, after_resume, digest, json_lines, printed, printed_json, results_left

PRESETS = Path(__file__).parents[2] / "presets"
Result = Callable[[Path, Outcome], Any]


@dataclass(frozen=True, kw_only=True)
class Target:
    """A folder, what is damaged in it, the command that reads it, and the result that is compared."""

    name: str
    share: float
    """Of all trials."""
    under: str
    """Where damages fall, a folder or a file below the working folder."""
    command: tuple[str, ...]
    result: Result
    beside: tuple[str, ...] = ()
    """All else that it reads of the working folder."""
    spared: tuple[str, ...] = ()
    """Folders below it that the command does not read."""
    reads: bool = True
    """Whether the command leaves all that is there as it is."""
    authored: bool = False
    """Whether its user writes it."""
    cache: str = "cache"


SAME_EVALUATION = (
    "evaluate",
    "arithmetic",
    "--data",
    "heldout.parquet",
    "--model",
    "whole",
    "--output",
    "res",
    "--json",
)
TINY = (
    *("train", "--config", "small.toml", "--steps", "1", "--set", "tiny.warm_start_steps=20", "--heldout", "none"),
    *("--output", "new", "--json"),
)
OWN = {
    "config": ("train", "--config", "own-config.toml", "--dry-run"),
    "method": ("train", "--method", "own-method.toml", "--dry-run"),
    "claim": ("ablate", "--claim", "own-claim.toml", "--dry-run", "--json"),
}
"""Files that a user writes, and what reads them."""
FIGURES = tuple(f"{name}.{suffix}" for name in ("accuracy", "pass-at-k") for suffix in ("pdf", "png", "svg"))
PICTURES = tuple(f"{name}.{suffix}" for name in ("ablation", "curves", "curves-tokens") for suffix in ("png", "svg"))
STUDY = ("ablate", "--methods", "grpo", "--seeds", "1", "--config", "small.toml", "--steps", "2", "--output", "study")
TARGETS = (
    Target(
        name="resume",
        beside=("cache",),
        share=0.28,
        under="run",
        command=("train", "--resume", "--output", "run"),
        result=after_resume,
        reads=False,
    ),
    Target(
        name="replay-stats",
        share=0.34,
        under="done",
        command=("replay-stats", "done", "--json"),
        result=printed_json,
        spared=("model", "plots", "checkpoints", "samples"),
    ),
    Target(
        name="report",
        share=0.05,
        under="done",
        command=("report", "done", "--output", "page.html"),
        result=lambda folder, outcome: (folder / "page.html").is_file(),
        spared=("model", "plots", "checkpoints"),
    ),
    Target(
        name="evaluate",
        beside=("whole", "heldout.parquet"),
        share=0.06,
        under="res",
        command=SAME_EVALUATION,
        result=results_left,
        reads=False,
    ),
    Target(
        name="rescore",
        share=0.06,
        under="res",
        command=("evaluate", "--rescore", "--output", "res", "--json"),
        result=printed_json,
        reads=False,
        spared=FIGURES,
    ),
    Target(
        name="compare",
        beside=("res2",),
        share=0.06,
        under="res",
        command=("evaluate", "--compare", "res", "res2", "--json"),
        result=printed_json,
        spared=FIGURES,
    ),
    Target(
        name="questions",
        beside=("small.toml",),
        share=0.08,
        under="questions.parquet",
        command=("train", "--data", "questions.parquet", "--heldout", "none", "--config", "small.toml", "--dry-run"),
        result=printed,
    ),
    Target(
        name="tiny",
        beside=("small.toml",),
        share=0.04,
        under="small-cache",
        command=TINY,
        result=printed_json,
        reads=False,
        cache="small-cache",
    ),
    Target(
        name="study",
        beside=("small.toml", "cache"),
        share=0.06,
        under="study",
        command=(*STUDY, "--json"),
        result=printed_json,
        reads=False,
    ),
    Target(
        name="study-page",
        share=0.03,
        under="study",
        command=("report", "study", "--output", "page.html"),
        result=lambda folder, outcome: digest(folder / "page.html"),
        spared=PICTURES,
    ),
    Target(
        name="study-publish",
        share=0.02,
        under="study",
        command=("publish", "study", "--to", "me/study", "--dry-run", "--json"),
        result=printed_json,
        spared=PICTURES,
    ),
    Target(
        name="publish",
        share=0.05,
        under="done",
        command=("publish", "done", "--to", "me/done", "--dry-run", "--json"),
        result=printed_json,
    ),
    Target(name="model", share=0.03, under="done/model", command=("sample", "done", "1+2=?"), result=printed),
    *(
        Target(name=name, share=0.02, under=f"own-{name}.toml", command=command, result=printed, authored=True)
        for name, command in OWN.items()
    ),
)


def build(folder: Path) -> None:
    """All whole folders once: two runs, one unfinished, two evaluations, questions, a study, caches, settings."""
    (folder / "small.toml").write_text(SMALL)
    train = ["train", "--config", "small.toml", "--quiet"]
    _done(folder, [*train, "--output", "done"])
    _done(folder, ["prepare", "arithmetic", "--output", "questions.parquet"])
    shutil.copy(folder / "done" / "data" / "heldout.parquet", folder / "heldout.parquet")
    shutil.copytree(folder / "done", folder / "whole")
    log = folder / "log"
    child = start([*train, "--output", "run"], folder, log, log, EXGRPO_CACHE=str(folder / "cache"))
    while not (folder / "run" / "metrics.jsonl").is_file() or len(json_lines(folder / "run" / "metrics.jsonl")) < 3:
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    end(child, 60)
    for name, model in (("res", "whole"), ("res2", "whole@step-000002")):
        _done(
            folder,
            ["evaluate", "arithmetic", "--data", "heldout.parquet", "--model", model, "--output", name, "--json"],
        )
    _done(folder, [*STUDY, "--quiet"])
    _done(folder, list(TINY), cache="small-cache")
    shutil.rmtree(folder / "new")
    shutil.copy(folder / "done" / "config.toml", folder / "own-config.toml")
    shutil.copy(PRESETS / "methods" / "headroom-drift.toml", folder / "own-method.toml")
    shutil.copy(PRESETS / "claims" / "delayed-start.toml", folder / "own-claim.toml")


def _done(folder: Path, arguments: list[str], cache: str = "cache") -> None:
    outcome = exgrpo(arguments, folder, seconds=900, EXGRPO_CACHE=str(folder / cache))
    assert outcome.code == 0, (arguments, outcome.err)
