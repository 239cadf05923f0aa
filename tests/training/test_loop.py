"""Runs of a few steps through the real loop, checked from what they leave on disk."""

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from processes import python
from run_leaves import assert_same_run, assert_same_weights, killed, metrics, timeless, train_and_die

from exgrpo_cli.base import errors, reporter
from exgrpo_cli.engines.generators import ASLEEP
from exgrpo_cli.engines.hf.generator import HFGenerator
from exgrpo_cli.engines.policy.policy import Policy
from exgrpo_cli.ledger.reader import LedgerReader
from exgrpo_cli.show import statistics
from exgrpo_cli.training.run import train
from exgrpo_cli.training.start import is_finished, resumed_config


@pytest.fixture(scope="module")
def finished_run(small_config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight steps of ExGRPO, two updates each, mixed from step 2."""
    run = tmp_path_factory.mktemp("runs") / "finished"
    config = small_config("run.steps=8", "run.save_every=4", "run.keep_checkpoints=0", "run.plots=true")
    train(config, run, reporter=reporter.SilentReporter())
    return run


def test_the_run_folder_holds_what_the_interface_promises(finished_run: Path) -> None:
    expected = {"config.toml", "data", "metrics.jsonl", "replay", "checkpoints", "samples", "plots", "model"}
    assert expected | {"summary.json", "environment.json"} <= {path.name for path in finished_run.iterdir()}
    assert (finished_run / "checkpoints" / "latest").read_text().strip() == "step-000008"
    assert {path.name for path in (finished_run / "checkpoints").glob("step-*")} == {"step-000004", "step-000008"}
    summary = json.loads((finished_run / "summary.json").read_text())
    assert summary["steps"] == 8
    for when in ("before", "after"):
        score = summary["heldout"][when]
        assert score["low"] <= score["pass_at_1"] <= score["high"]
        curve = [score["pass_at_k"][str(k)]["value"] for k in (1, 2)]
        assert curve[0] == pytest.approx(score["pass_at_1"]) and curve[0] <= curve[1]
        assert score["questions"] == 20
    assert summary["tokens"]["generated"] == sum(line["tokens/generated"] for line in metrics(finished_run))
    assert {path.suffix for path in (finished_run / "plots").iterdir()} == {".png", ".svg"}
    # tiny warms up for 10 steps, which 8 steps cannot: 4 are left, and the configuration says so.
    assert resumed_config(finished_run).optim.warmup_steps == 4


def test_every_step_makes_two_updates_and_mixed_steps_replay(finished_run: Path) -> None:
    lines = metrics(finished_run)
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert all(line["optim/updates_applied"] + line["optim/updates_skipped"] == 2 for line in lines)
    # The first batch exceeds the threshold of 0.05, so step 2 is mixed, but only step 3 has anything to replay.
    assert lines[0]["batch/pass_at_1"] > 0.05
    assert [line["phase"] for line in lines] == ["on-policy"] + ["mixed"] * 7
    assert lines[1]["replay/used"] == 0
    assert all(line["replay/used"] == min(4, lines[i]["replay/questions"]) for i, line in enumerate(lines[2:], 1))


@pytest.mark.slow
def test_validation_between_the_steps_changes_nothing_and_the_last_is_not_made_twice(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = resumed_config(finished_run)
    assert first.validation.every == 25  # beyond its eight steps
    often = replace(first, validation=replace(first.validation, every=4))
    train(often, tmp_path / "run", reporter=reporter.make_reporter(quiet=False))
    told = capsys.readouterr().err
    assert [f"after step {step}" in told for step in (4, 8)] == [True, True] and "after 8 steps" not in told
    assert_same_weights(finished_run, tmp_path / "run")
    lines = timeless(metrics(tmp_path / "run"))
    assert ["val/arithmetic" in line for line in lines] == [step % 4 == 0 for step in range(1, 9)]
    unvalidated = [{key: value for key, value in line.items() if not key.startswith("val/")} for line in lines]
    assert unvalidated == timeless(metrics(finished_run))
    scores = [json.loads((run / "summary.json").read_text())["heldout"] for run in (finished_run, tmp_path / "run")]
    assert scores[0] == scores[1]


def test_nothing_is_scored_while_the_rollout_engine_is_awake(
    small_config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that gives its weights back, as vllm does: all steps are mixed, the second ends with a validation."""
    config = small_config("run.steps=4", "replay.start_threshold=0", "validation.every=2")
    train(config, tmp_path / "plain", reporter=reporter.SilentReporter())
    awake: list[bool] = [False]
    scored: list[bool] = []

    def sleep(generator: HFGenerator) -> None:
        generator.weight_version, awake[0] = ASLEEP, False

    def sync(generator: HFGenerator, *sent: object, real=HFGenerator.sync) -> None:
        real(generator, *sent)
        awake[0] = True

    def score(policy: Policy, rows: list, real=Policy.score) -> object:
        scored.extend([awake[0]] * len(rows))
        return real(policy, rows)

    monkeypatch.setattr(HFGenerator, "sleep", sleep)
    monkeypatch.setattr(HFGenerator, "sync", sync)
    monkeypatch.setattr(Policy, "score", score)
    train(config, tmp_path / "run", reporter=reporter.SilentReporter())
    assert scored and not any(scored)
    assert_same_run(tmp_path / "plain", tmp_path / "run")


def test_all_questions_retired_ends_the_run_normally(small_config, tmp_path: Path) -> None:
    """A grader that accepts every answer soon retires all 20 questions; batches shrink as they run out."""
    config = small_config("arithmetic.num_train=20", "run.steps=50", "grading.grader=python:accept_all:grade")
    summary = train(config, tmp_path / "run", reporter=reporter.SilentReporter())
    assert 3 <= summary["steps"] < 50
    assert (summary["finished"], summary["replay"]["retired"]) == ("all questions retired", 20)
    lines = metrics(tmp_path / "run")
    events = LedgerReader(tmp_path / "run" / "replay").events().to_pandas()
    for question_id, step in events[events.event == "retired"][["question_id", "step"]].to_numpy():
        assert events[(events.question_id == question_id) & (events.step > step)].empty, "never visited again"
    assert lines[-1]["replay/retired"] == 20
    assert lines[-1].get("batch/questions", 0) < lines[0]["batch/questions"] == 8


def test_answers_are_graded_while_others_are_sampled(small_config, tmp_path: Path, monkeypatch) -> None:
    """The first step's sampler does not end before a grader has seen two of its answers; results are the same."""
    seen = tmp_path / "seen"
    code = f"def grade(gold, text):\n    open({str(seen)!r}, 'a').write('x')\n    return text == gold\n"
    (tmp_path / "graders" / "notes_it.py").write_text(code)
    config = small_config("run.steps=2", "grading.grader=python:notes_it:grade", "replay.start_threshold=0")
    train(config, tmp_path / "plain", reporter=reporter.SilentReporter())
    waited = []

    def generate(generator: HFGenerator, *asked: Any, real=HFGenerator.generate, **more: Any):
        seen.unlink(missing_ok=True)
        groups = real(generator, *asked, **more)
        deadline = time.monotonic() + 60
        # The held-out questions come first, and a last time with known answers.
        while len(waited) == 1 and not (seen.exists() and seen.stat().st_size > 1) and time.monotonic() < deadline:
            time.sleep(0.01)
        waited.append(time.monotonic() < deadline)
        return groups

    monkeypatch.setattr(HFGenerator, "generate", generate)
    train(config, tmp_path / "run", reporter=reporter.SilentReporter())
    assert waited == [True] * 4
    assert_same_run(tmp_path / "plain", tmp_path / "run")


@pytest.fixture(autouse=True)
def accept_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grader of the user's own, importable by name here and in the worker processes."""
    folder = tmp_path / "graders"
    folder.mkdir()
    (folder / "accept_all.py").write_text("def grade(gold, text):\n    return True\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.mark.engines
def test_grpo_and_exgrpo_are_bit_for_bit_the_same_until_the_delayed_start(small_config, tmp_path: Path) -> None:
    """With retirement set alike and a threshold no batch reaches, every figure and weight agrees."""
    never = "replay.start_threshold=1.0"
    train(small_config(never, "run.steps=4"), tmp_path / "exgrpo", reporter=reporter.SilentReporter())
    plain = small_config("replay.retirement=true", "run.steps=4", method="grpo")
    train(plain, tmp_path / "grpo", reporter=reporter.SilentReporter())
    ours, theirs = timeless(metrics(tmp_path / "exgrpo")), timeless(metrics(tmp_path / "grpo"))
    assert [{k: v for k, v in line.items() if k != "replay/used"} for line in ours] == theirs
    assert_same_weights(tmp_path / "exgrpo", tmp_path / "grpo")


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.engines
def test_a_run_that_is_killed_while_its_plots_are_drawn_is_not_finished(finished_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").unlink()
    shutil.rmtree(run / "plots")
    train_and_die(killed(statistics, "save", when=lambda figure, folder, name: name == "diagnostics"), run)
    drawn = {path.stem for path in (run / "plots").iterdir()}
    assert "learning" in drawn and "diagnostics" not in drawn
    assert not is_finished(run)

    again = train(resumed_config(run), run, resume=True, reporter=reporter.SilentReporter())
    assert again["heldout"] == summary["heldout"]
    assert is_finished(run)
    plots = [{path.name for path in (each / "plots").iterdir()} for each in (run, finished_run)]
    assert plots[0] == plots[1]
    assert_same_weights(run, finished_run)


def test_a_run_folder_is_never_overwritten(small_config, finished_run: Path) -> None:
    before = sorted(finished_run.iterdir())
    with pytest.raises(errors.InputError, match=r"exists: choose another --output"):
        train(small_config(), finished_run, reporter=reporter.SilentReporter())
    assert sorted(finished_run.iterdir()) == before


@pytest.mark.engines
def test_config_toml_repeats_the_run(small_config, finished_run: Path, tmp_path: Path) -> None:
    train(resumed_config(finished_run), tmp_path / "again", reporter=reporter.SilentReporter())
    assert_same_run(tmp_path / "again", finished_run)


def test_the_exported_model_answers_as_in_its_card(finished_run: Path) -> None:
    """Run the card's own lines."""
    code = (finished_run / "model" / "README.md").read_text().split("```python\n")[1].split("```")[0]
    done = python("-c", code, check=True, cwd=finished_run)
    # It draws, and an answer may be empty.
    assert done.stdout and "<think>" not in done.stdout.split("</think>")[-1]
