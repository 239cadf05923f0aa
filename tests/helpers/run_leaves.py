"""What runs leave behind, compared."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file


def metrics(run: Path) -> list[dict]:
    """Lines of its journal."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


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
