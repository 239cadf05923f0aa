"""`rollout.logprobs = "sampler"`: what the sampler computed stands for the scoring pass, and is held against it."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_leaves import killed, metrics, train_and_die

from exgrpo_cli.base import errors, reporter
from exgrpo_cli.config.settings import Config, to_toml
from exgrpo_cli.engines.hf.generator import HFGenerator
from exgrpo_cli.machine import settle, survey
from exgrpo_cli.studies.worker import asked_config
from exgrpo_cli.training import run as training
from exgrpo_cli.training.run import train
from exgrpo_cli.training.step.rollouts import CHECKED_ONE_IN, drawn_to_check

SHORT = ("run.steps=2", "data.heldout=none", "replay.start_threshold=0", "rollout.questions_per_step=4")


def test_the_samplers_scores_are_those_of_a_pass(small_config: Callable[..., Config], tmp_path: Path) -> None:
    """In float32 both are the same numbers but for rounding, which moves what follows as little."""
    lines = []
    for source in ("trainer", "sampler"):
        config = small_config(*SHORT, f"rollout.logprobs={source}")
        train(config, tmp_path / source, reporter=reporter.SilentReporter())
        lines.append(metrics(tmp_path / source))
    (passed, _), (own, later) = lines
    assert own["tokens/generated"] == passed["tokens/generated"] and own["verdict/correct"] == passed["verdict/correct"]
    for name in ("policy/entropy", "optim/grad_norm", "ratio/mean"):
        if name in passed:
            assert own[name] == pytest.approx(passed[name], rel=1e-3)
    # The first update computes those of fresh rows, which tells the gap; nothing is replayed yet.
    assert passed["tokens/scored"] >= passed["tokens/generated"] and own["tokens/scored"] == 0
    assert own["policy/logprob_gap_max"] < 1e-3 and own["policy/entropy_gap_max"] < 1e-3
    assert later["step"] == 2


@pytest.mark.parametrize(("name", "what"), [("engine_logprobs", "log-probs"), ("engine_entropies", "entropies")])
@pytest.mark.parametrize(("method", "step"), [("exgrpo", 1), ("exgrpo", 2), ("latest", 2)])
def test_a_sampler_that_computes_otherwise_is_found(
    name, what, method, step, small_config, tmp_path, monkeypatch
) -> None:
    """Its numbers are not believed unseen: the first update's lie beside them, or of `latest`, which begins a mixed
    step with stored rows, those of a pass over some."""
    generate, calls = HFGenerator.generate, itertools.count(1)

    def shifted(*arguments: Any) -> Any:
        groups, by = generate(*arguments), 0.01 * (next(calls) >= step)
        return [[replace(each, **{name: getattr(each, name) - by}) for each in group] for group in groups]

    monkeypatch.setattr(HFGenerator, "generate", shifted)
    with pytest.raises(errors.RunError, match=rf"{what} differ from the trainer's by 0\.01 a token, bound 0\.001"):
        train(small_config(*SHORT, method=method), tmp_path / "run", reporter=reporter.SilentReporter())
    reached = metrics(tmp_path / "run") if step > 1 else []
    assert len(reached) == step - 1 and all(line["policy/logprob_gap_max"] < 1e-3 for line in reached)


@pytest.mark.parametrize("count", [1, 7, 16, 100, 256])
def test_any_rollout_may_be_checked(count: int) -> None:
    """Of whatever group, member and rank: no position is left out for good."""
    drawn = [drawn_to_check(count, np.random.default_rng((0, step))) for step in range(300)]
    assert {len(set(each)) for each in drawn} == {math.ceil(count / CHECKED_ONE_IN)}
    assert {index for each in drawn for index in each} == set(range(count))


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_run_goes_on_with_the_log_probs_it_began_with(small_config: Callable[..., Config], tmp_path: Path) -> None:
    """Its ledger says whose they are. A study asks for "auto" again, maybe on another machine or of another version."""
    path, config = tmp_path / "run", small_config(*SHORT, "rollout.logprobs=trainer", "run.save_every=1")
    train_and_die(killed(training, "run_step", when=lambda parts, state, step, clock: step == 2), path, config)
    settings = tmp_path / "asked.toml"
    settings.write_text(to_toml(replace(config, rollout=replace(config.rollout, logprobs="auto"))))
    train(asked_config(settings, path, resume=True), path, resume=True, reporter=reporter.SilentReporter())
    first, second = metrics(path)
    assert (first["step"], second["step"]) == (1, 2)
    assert all(line["tokens/scored"] >= line["tokens/generated"] for line in (first, second))


@pytest.mark.parametrize(
    ("settings", "source"),
    [
        ((), "sampler"), (("backbone.dtype=bfloat16",), "trainer"), (("optim.engine=deepspeed",), "trainer"),
        (("rollout.engine=vllm",), "trainer"), (("rollout.logprobs=engine",), "engine"),
    ],
)  # fmt: skip
def test_the_sampler_stands_for_the_trainer_where_both_compute_alike(settings, source, small_config) -> None:
    """The same weights in float32; `config.toml` names the choice."""
    assert settle.settle(small_config(*settings), survey.survey_machine())[0].rollout.logprobs == source
