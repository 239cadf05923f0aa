"""What runs leave behind, compared; what they say; and runs that are killed on the way."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from exgrpo_cli.base.reporter import SilentReporter
from exgrpo_cli.ledger.reader import LedgerReader
from exgrpo_cli.training import run as training
from exgrpo_cli.training.start import resumed_config


class Listener(SilentReporter):
    """Keeps what a run says."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def metrics(run: Path) -> list[dict]:
    """Lines of its journal."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def wait_for_step(run: Path, step: int, process: subprocess.Popen) -> None:
    """Until the journal of a run under way has this many lines."""
    path = run / "metrics.jsonl"
    while process.poll() is None:
        if path.exists() and path.read_text().count("\n") >= step:
            return
        time.sleep(0.02)
    pytest.fail(f"the run ended before step {step}: {process.communicate()}")


def kill_when_saved(run: Path, process: subprocess.Popen) -> None:
    """SIGKILL as soon as the run's first checkpoint lies there."""
    kill_once((run / "checkpoints" / "latest").exists, process)


def kill_once(holds: Callable[[], bool], process: subprocess.Popen, pause: float = 0.02) -> None:
    """SIGKILL as soon as what is waited for holds, while the process is still at work."""
    deadline = time.monotonic() + 600
    while not holds():
        assert process.poll() is None and time.monotonic() < deadline, "it ended before it could be killed"
        time.sleep(pause)
    process.kill()
    process.wait()


def timeless(lines: list[dict]) -> list[dict]:
    """Lines of a journal without what a clock says."""
    return [{key: value for key, value in line.items() if not key.startswith("time/")} for line in lines]


def weights(run: Path) -> dict[str, np.ndarray]:
    """Of its exported model."""
    return load_file(run / "model" / "model.safetensors")


def assert_same_weights(first: Path, second: Path) -> None:
    """Bit for bit."""
    ours, theirs = weights(first), weights(second)
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


def assert_same_run(first: Path, second: Path) -> None:
    """Journals (times aside), every table of the ledger and the weights, bit for bit."""
    assert timeless(metrics(first)) == timeless(metrics(second))
    ours, theirs = LedgerReader(first / "replay"), LedgerReader(second / "replay")
    for table in ("trajectories", "scores", "draws", "visits", "replays", "events"):
        # As text: NaN equals itself there.
        assert str(ours.table(table).to_pydict()) == str(theirs.table(table).to_pydict()), table
    assert_same_weights(first, second)


def killed(owner: Any, name: str, *, when: Callable[..., bool] = lambda *given: True) -> Callable[[], None]:
    """Replace a function, in a process that is about to die, by one that kills it at a call of the arguments asked."""

    def install() -> None:
        original = getattr(owner, name)

        def die(*arguments: Any, **options: Any) -> Any:
            if when(*arguments):
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)

        setattr(owner, name, die)

    return install


def train_and_die(install: Callable[[], None], path: Path, config: Any = None) -> None:
    """Train until SIGKILL in a fork that `install` has prepared, which costs no imports; without `config` resume."""
    child = os.fork()
    if child == 0:
        try:
            install()
            training.train(config or resumed_config(path), path, resume=config is None, reporter=SilentReporter())
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
