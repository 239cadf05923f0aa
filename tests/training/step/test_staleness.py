"""A rollout engine that missed a sync stops the run: by the version of the weights, and by its log-probs."""

from pathlib import Path

import pytest

from exgrpo_cli.console.reporter import SilentReporter
from exgrpo_cli.engines.hf.generator import HFGenerator
from exgrpo_cli.errors import RunError
from exgrpo_cli.training.run import train
from exgrpo_cli.training.step.staleness import require_small_gap


def test_a_sync_that_never_came_stops_the_run(small_config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hf engine shares the policy's weights, so that no log-prob shows it: the version does, after two updates."""
    monkeypatch.setattr(HFGenerator, "sync", lambda *arguments: None)
    with pytest.raises(RunError, match="sampled with version 0 of the weights, the policy has version 2: the rollout"):
        train(small_config('data.heldout=""'), tmp_path / "run", reporter=SilentReporter())
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(("dtype", "fine", "too_large"), [("float32", 9e-4, 2e-3), ("bfloat16", 0.02, 0.125)])
def test_a_gap_beyond_rounding_stops_the_run(dtype: str, fine: float, too_large: float) -> None:
    """0.125 is what a missed sync of vLLM gave one step later."""
    require_small_gap({"policy/logprob_gap_mean": fine}, dtype)
    require_small_gap({}, dtype)
    for gap in (too_large, float("nan")):
        with pytest.raises(RunError, match=f"log-probs differ from the trainer's by {gap:.3g} a token, bound"):
            require_small_gap({"policy/logprob_gap_mean": gap}, dtype)
