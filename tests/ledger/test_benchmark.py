"""The benchmark of the buffer runs alone and prints one object."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "replay.py"


@pytest.mark.engines
def test_small_ledgers_are_built_and_measured() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(BENCHMARK), "--sizes", "1500,3000", "--tokens", "20", "--json"],
        check=True,
        capture_output=True,
        text=True,
    )
    shown = json.loads(done.stdout)
    small, large = shown["ledgers"]
    assert {line["rows"] for line in shown["units"]} == {1500, 3000}
    assert all(line["draw_64_cpu_ms"] > 0 < line["draw_512_cpu_ms"] for line in shown["units"])
    assert (small["trajectories"], large["trajectories"]) == (1500, 3000)
    for result in (small, large):
        assert result["rss_anon_mib"] > result["rss_anon_before_mib"] > 0
        # 64 questions hold at least one candidate each.
        assert result["fetched"] >= 64
        assert 0 < result["flush_ms"] <= result["append_ms"]
        assert min(result[f"{name}_ms"] for name in ("open", "draw", "fetch", "fetch_cold")) > 0
