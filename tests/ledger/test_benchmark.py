"""The benchmark of the buffer runs alone and prints one object."""

import json
from pathlib import Path

import pytest
from processes import python

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "replay.py"


@pytest.mark.engines
def test_small_ledgers_are_built_and_measured() -> None:
    done = python("-W", "error", BENCHMARK, "--sizes", "1500,3000", "--tokens", "20", "--json", check=True)
    shown = json.loads(done.stdout)
    assert [line["trajectories"] for line in shown["ledgers"]] == [1500, 3000]
    # 64 questions hold at least one candidate each.
    assert all(line["fetched"] >= 64 and line["draw_ms"] > 0 < line["flush_ms"] for line in shown["ledgers"])
    assert all(line["draw_64_cpu_ms"] > 0 < line["draw_512_cpu_ms"] for line in shown["units"])
