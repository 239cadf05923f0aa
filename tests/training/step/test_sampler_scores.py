"""`rollout.logprobs = "sampler"`: what the sampler computed stands for the scoring pass, which checks some of it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from exgrpo_cli.config.settings import Config
from exgrpo_cli.console.reporter import SilentReporter
from exgrpo_cli.engines.hf.generator import HFGenerator
from exgrpo_cli.errors import InputError, RunError
from exgrpo_cli.files import read_json_lines
from exgrpo_cli.ranks.ranks import ALONE
from exgrpo_cli.training.run import train
from exgrpo_cli.training.starting.opening import pin_choices
from exgrpo_cli.training.step.rollouts import CHECKED_ONE_IN

SHORT = ("run.steps=2", "data.heldout=none", "replay.start_threshold=0", "rollout.questions_per_step=4")


def test_the_samplers_scores_are_those_of_a_pass(small_config: Callable[..., Config], tmp_path: Path) -> None:
    """In float32 both are the same numbers but for rounding, which moves what follows as little."""
    lines = []
    for source in ("trainer", "sampler"):
        config = small_config(*SHORT, f"rollout.logprobs={source}")
        train(config, tmp_path / source, reporter=SilentReporter())
        lines.append(read_json_lines(tmp_path / source / "metrics.jsonl"))
    (passed, _), (own, later) = map(list, lines)
    assert own["tokens/generated"] == passed["tokens/generated"] and own["verdict/correct"] == passed["verdict/correct"]
    for name in ("policy/entropy", "optim/grad_norm", "ratio/mean"):
        if name in passed:
            assert own[name] == pytest.approx(passed[name], rel=1e-3)
    # One fresh rollout in 16 is scored, to tell the gap; replayed ones are, under the policy of their step.
    rollouts = config.rollout.questions_per_step * config.rollout.group_size
    most = config.rollout.max_response_tokens * -(-rollouts // CHECKED_ONE_IN)
    assert passed["tokens/scored"] >= passed["tokens/generated"] and 0 < own["tokens/scored"] <= most
    assert own["policy/logprob_gap_max"] < 1e-3
    assert later["step"] == 2


def test_a_sampler_that_computes_otherwise_is_found(
    small_config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its numbers are not believed unseen: those of the checked rollouts lie beside the trainer's."""
    generate = HFGenerator.generate

    def shifted(*arguments: Any) -> Any:
        return [
            [replace(rollout, engine_logprobs=rollout.engine_logprobs - 0.01) for rollout in group]
            for group in generate(*arguments)
        ]

    monkeypatch.setattr(HFGenerator, "generate", shifted)
    with pytest.raises(RunError, match=r"log-probs differ from the trainer's by 0\.01 a token, bound 0\.001"):
        train(small_config(*SHORT), tmp_path / "run", reporter=SilentReporter())


@pytest.mark.parametrize(
    ("settings", "source"),
    [
        ((), "sampler"),
        (("backbone.dtype=bfloat16",), "trainer"),
        (("optim.engine=deepspeed",), "trainer"),
        (("rollout.engine=vllm",), "trainer"),
        (("rollout.logprobs=trainer",), "trainer"),
        (("rollout.logprobs=engine",), "engine"),
    ],
)
def test_the_sampler_stands_for_the_trainer_where_both_compute_alike(
    settings: tuple[str, ...], source: str, small_config: Callable[..., Config]
) -> None:
    """The same weights in float32; `config.toml` names the choice."""
    assert pin_choices(small_config(*settings), ALONE).rollout.logprobs == source


def test_only_an_engine_that_tells_entropies_can_stand_for_the_trainer(small_config: Callable[..., Config]) -> None:
    with pytest.raises(InputError, match=r"rollout.logprobs = 'sampler' is out of range: use 'trainer' or"):
        small_config("rollout.logprobs=sampler", "rollout.engine=vllm")
