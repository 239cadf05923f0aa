"""`rollout.logprobs = "sampler"`: what the sampler computed stands for the scoring pass."""

from collections.abc import Callable
from pathlib import Path

import pytest

from exgrpo_cli.config.settings import Config
from exgrpo_cli.console.reporter import SilentReporter
from exgrpo_cli.errors import InputError
from exgrpo_cli.files import read_json_lines
from exgrpo_cli.training.run import train


def test_the_samplers_scores_are_those_of_a_pass(small_config: Callable[..., Config], tmp_path: Path) -> None:
    """In float32 both are the same numbers but for rounding, which moves what follows as little."""
    lines = []
    for source in ("trainer", "sampler"):
        short = ("run.steps=2", "data.heldout=none", "replay.start_threshold=0", "rollout.questions_per_step=4")
        config = small_config(*short, f"rollout.logprobs={source}")
        train(config, tmp_path / source, reporter=SilentReporter())
        lines.append(read_json_lines(tmp_path / source / "metrics.jsonl"))
    (passed, _), (own, later) = map(list, lines)
    assert own["tokens/generated"] == passed["tokens/generated"] and own["verdict/correct"] == passed["verdict/correct"]
    for name in ("policy/entropy", "optim/grad_norm", "ratio/mean"):
        if name in passed:
            assert own[name] == pytest.approx(passed[name], rel=1e-3)
    # No fresh token is scored, so there is no gap to tell; replayed ones are, under the policy of their step.
    assert "policy/logprob_gap_mean" in passed and "policy/logprob_gap_mean" not in own
    assert passed["tokens/scored"] >= passed["tokens/generated"] and own["tokens/scored"] == 0
    assert later["step"] == 2


def test_only_an_engine_that_tells_entropies_can_stand_for_the_trainer(small_config: Callable[..., Config]) -> None:
    with pytest.raises(InputError, match=r"rollout.logprobs = 'sampler' is out of range: use 'trainer' or"):
        small_config("rollout.logprobs=sampler", "rollout.engine=vllm")
