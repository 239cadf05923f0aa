"""A rollout engine that missed a sync stops the run: by the version of the weights, and by its log-probs."""

from pathlib import Path

import pytest

from exgrpo_cli.base.console.reporter import SilentReporter
from exgrpo_cli.base.errors import RunError
from exgrpo_cli.engines.hf.generator import HFGenerator
from exgrpo_cli.training.run import train
from exgrpo_cli.training.step import rollouts
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
    require_small_gap({"policy/logprob_gap_mean": fine}, dtype, num_checked=16)
    for gap in (too_large, float("nan")):
        with pytest.raises(RunError, match=f"log-probs differ from the trainer's by {gap:.3g} a token, bound"):
            require_small_gap({"policy/logprob_gap_mean": gap}, dtype, num_checked=16)


def test_rollouts_whose_gap_nobody_measured_do_not_pass() -> None:
    """A step whose rows are all replayed has none to measure; any other has."""
    require_small_gap({}, "float32", num_checked=0)
    for metrics in ({}, {"policy/entropy_gap_mean": 0.0}):
        with pytest.raises(AssertionError, match="16 rollouts were scored twice, and no gap was measured"):
            require_small_gap(metrics, "float32", num_checked=16)


def test_a_step_that_measures_no_gap_ends_the_run(
    small_config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollouts, "score_gaps", lambda checked, scores: {})
    with pytest.raises(AssertionError, match="no gap was measured"):
        train(small_config('data.heldout=""'), tmp_path / "run", reporter=SilentReporter())
