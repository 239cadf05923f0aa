"""Runs of a few steps through the real loop, checked from what they leave on disk."""

import json
import shutil
import signal
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from run_leaves import assert_same_weights, metrics, timeless

from exgrpo_cli.base.console.reporter import SilentReporter, make_reporter
from exgrpo_cli.base.errors import InputError, RunError
from exgrpo_cli.config.settings import Config, resolve
from exgrpo_cli.ledger.reader import LedgerReader
from exgrpo_cli.training.run import train
from exgrpo_cli.training.start import is_finished, resumed_config
from exgrpo_cli.training.state import RunState


@pytest.fixture(scope="module")
def finished_run(small_backbone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight steps of ExGRPO, two updates each, mixed from step 2."""
    from exgrpo_cli.config.layers import build_config

    run = tmp_path_factory.mktemp("runs") / "finished"
    config = build_config(
        assignments=[
            "arithmetic.levels=[2]",
            "arithmetic.num_train=60",
            "arithmetic.num_heldout=20",
            "rollout.questions_per_step=8",
            "replay.start_threshold=0.05",
            "run.steps=8",
            "run.save_every=4",
            "run.keep_checkpoints=0",
            "run.threads=1",
            "validation.samples=2",
            f"backbone.source={small_backbone}",
        ]
    )
    train(config, run, reporter=SilentReporter())
    return run


def test_the_run_folder_holds_what_the_interface_promises(finished_run: Path) -> None:
    expected = {"config.toml", "data", "metrics.jsonl", "replay", "checkpoints", "samples", "plots", "model"}
    assert expected | {"summary.json", "environment.json"} <= {path.name for path in finished_run.iterdir()}
    assert (finished_run / "checkpoints" / "latest").read_text().strip() == "step-000008"
    assert {path.name for path in (finished_run / "checkpoints").glob("step-*")} == {"step-000004", "step-000008"}
    summary = json.loads((finished_run / "summary.json").read_text())
    assert summary["steps"] == 8
    assert summary["mixed_from_step"] == 2
    for when in ("before", "after"):
        score = summary["heldout"][when]
        assert score["low"] <= score["pass_at_1"] <= score["high"]
        curve = [score["pass_at_k"][str(k)]["value"] for k in (1, 2)]
        assert curve[0] == pytest.approx(score["pass_at_1"]) and curve[0] <= curve[1]
        assert score["questions"] == 20
    assert summary["tokens"]["generated"] == sum(line["tokens/generated"] for line in metrics(finished_run))
    assert {path.suffix for path in (finished_run / "plots").iterdir()} == {".png", ".svg"}


def test_a_short_run_gives_half_its_steps_to_the_warm_up(finished_run: Path) -> None:
    """tiny warms up for 10 steps, which 8 steps cannot: 4 are left, and the configuration says so."""
    assert tomllib.loads((finished_run / "config.toml").read_text())["optim"]["warmup_steps"] == 4


def test_every_step_makes_two_updates_and_mixed_steps_replay(finished_run: Path) -> None:
    lines = metrics(finished_run)
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert all(line["optim/updates_applied"] + line["optim/updates_skipped"] == 2 for line in lines)
    # The first batch exceeds the threshold of 0.05, so step 2 is mixed, but only step 3 has anything to replay.
    assert lines[0]["batch/pass_at_1"] > 0.05
    assert [line["phase"] for line in lines] == ["on-policy"] + ["mixed"] * 7
    assert lines[1]["replay/used"] == 0
    assert all(line["replay/used"] == min(4, lines[i]["replay/questions"]) for i, line in enumerate(lines[2:], 1))


@pytest.mark.parametrize(
    ("exceeded_at", "threshold", "first"),
    [(3, 0.35, 4), (8, 0.35, None), (-1, 0.35, None), (-1, 0.0, 1)],
)
def test_the_first_mixed_step_is_one_that_was_trained(exceeded_at: int, threshold: float, first: int | None) -> None:
    """Of 8 steps; the batch of the last one may exceed the threshold, and with threshold 0 none has to."""
    assert RunState(step=8, start_exceeded_at=exceeded_at).first_mixed_step(threshold) == first


@pytest.mark.slow
def test_validation_between_the_steps_changes_nothing_and_the_last_is_not_made_twice(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = build_run_config(finished_run)
    assert first.validation.every == 25  # beyond its eight steps
    often = replace(first, validation=replace(first.validation, every=4))
    train(often, tmp_path / "run", reporter=make_reporter(quiet=False))
    told = capsys.readouterr().err
    assert [f"after step {step}" in told for step in (4, 8)] == [True, True]
    assert "after 8 steps" not in told
    assert_same_weights(finished_run, tmp_path / "run")
    lines = timeless(metrics(tmp_path / "run"))
    assert ["val/arithmetic" in line for line in lines] == [step % 4 == 0 for step in range(1, 9)]
    unvalidated = [{key: value for key, value in line.items() if not key.startswith("val/")} for line in lines]
    assert unvalidated == timeless(metrics(finished_run))
    scores = [json.loads((run / "summary.json").read_text())["heldout"] for run in (finished_run, tmp_path / "run")]
    assert scores[0] == scores[1]


def build_run_config(run: Path) -> Config:
    """The configuration that a run folder holds."""
    return resolve([("config.toml", tomllib.loads((run / "config.toml").read_text()))])


def test_what_was_replayed_is_what_was_selected(finished_run: Path) -> None:
    """From the ledger alone: the chosen trajectory of every draw has the lowest entropy of its candidates."""
    ledger = LedgerReader(finished_run / "replay")
    scores = ledger.scores().to_pandas()
    events = ledger.events().to_pandas()
    selected = events[events.event == "selected"]
    assert len(selected) == sum(line["replay/used"] for line in metrics(finished_run)) > 10
    chosen = scores[scores.chosen]
    assert sorted(zip(chosen.step, chosen.trajectory_id, strict=True)) == sorted(
        zip(selected.step, selected.trajectory_id, strict=True)
    )
    contested = 0
    for _, group in scores.groupby(["step", "question_id"]):
        lowest = group.sort_values(["entropy", "trajectory_id"]).iloc[0]
        assert lowest.chosen
        assert group.chosen.sum() == 1
        contested += len(group) > 1
    assert contested > 5, "no draw had a choice: the test shows nothing"


@pytest.mark.engines
def test_retired_questions_are_never_visited_again(small_config, tmp_path: Path) -> None:
    """With a bound that retires easily (K = 2), no question is rolled out after the step that retired it."""
    run = tmp_path / "run"
    train(small_config("rollout.group_size=2", "run.steps=12"), run, reporter=SilentReporter())
    events = LedgerReader(run / "replay").events().to_pandas()
    retired = dict(events[events.event == "retired"][["question_id", "step"]].to_numpy())
    assert retired
    for question_id, step in retired.items():
        assert events[(events.question_id == question_id) & (events.step > step)].empty


def test_all_questions_retired_ends_the_run_normally(small_config, tmp_path: Path) -> None:
    """A grader that accepts every answer soon retires all 20 questions; batches shrink as they run out."""
    summary = train(
        small_config("arithmetic.num_train=20", "run.steps=50", "grading.grader=python:accept_all:grade"),
        tmp_path / "run",
        reporter=SilentReporter(),
    )
    assert summary["finished"] == "all questions retired"
    assert 3 <= summary["steps"] < 50
    assert summary["replay"]["retired"] == 20
    lines = metrics(tmp_path / "run")
    assert lines[-1]["replay/retired"] == 20
    assert lines[-1].get("batch/questions", 0) < lines[0]["batch/questions"] == 8


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
    train(small_config(never, "run.steps=4"), tmp_path / "exgrpo", reporter=SilentReporter())
    train(
        small_config("replay.retirement=true", "run.steps=4", method="grpo"),
        tmp_path / "grpo",
        reporter=SilentReporter(),
    )
    ours, theirs = timeless(metrics(tmp_path / "exgrpo")), timeless(metrics(tmp_path / "grpo"))
    assert [{k: v for k, v in line.items() if k != "replay/used"} for line in ours] == theirs
    assert_same_weights(tmp_path / "exgrpo", tmp_path / "grpo")


@pytest.mark.engines
def test_replay_changes_the_run_from_the_delayed_start_on(small_config, finished_run: Path, tmp_path: Path) -> None:
    summary = train(small_config("run.steps=8", method="grpo"), tmp_path / "grpo", reporter=SilentReporter())
    assert summary["mixed_from_step"] is None
    ours, theirs = timeless(metrics(finished_run)), timeless(metrics(tmp_path / "grpo"))
    shared = theirs[0].keys() & ours[0].keys()
    assert {k: ours[0][k] for k in shared} == {k: theirs[0][k] for k in shared}
    assert ours[2]["tokens/generated"] != theirs[2]["tokens/generated"]


KILLED_WHILE_DRAWING = """
import os, signal, sys
from exgrpo_cli.commands import main
from exgrpo_cli.show import statistics

whole = statistics.save

def killed(figure, folder, name):
    if name == "diagnostics":
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(figure, folder, name)

statistics.save = killed
main(["train", "--resume", "--quiet", "--output", sys.argv[1]])
"""


@pytest.mark.engines
def test_a_run_that_is_killed_while_its_plots_are_drawn_is_not_finished(finished_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").unlink()
    shutil.rmtree(run / "plots")
    killed = subprocess.run([sys.executable, "-c", KILLED_WHILE_DRAWING, str(run)], capture_output=True)
    assert killed.returncode == -signal.SIGKILL
    assert [path.name for path in sorted((run / "plots").iterdir())] == [
        "learning-tokens.png",
        "learning-tokens.svg",
        "learning.png",
        "learning.svg",
    ]
    assert not is_finished(run)

    shutil.rmtree(run / "plots")
    (run / "plots").write_text("")  # stands for a full disk
    with pytest.raises(RunError, match=r"plots/learning.png cannot be written: File exists"):
        train(resumed_config(run), run, resume=True, reporter=SilentReporter())
    assert not is_finished(run)

    (run / "plots").unlink()
    again = train(resumed_config(run), run, resume=True, reporter=SilentReporter())
    assert again["heldout"] == summary["heldout"]
    assert is_finished(run)
    for name in sorted(path.name for path in (finished_run / "plots").iterdir()):
        assert (run / "plots" / name).is_file(), name
        if name.startswith("learning"):
            assert (run / "plots" / name).read_bytes() == (finished_run / "plots" / name).read_bytes()
    assert_same_weights(run, finished_run)


def test_a_finished_run_is_not_trained_again(small_config, finished_run: Path) -> None:
    with pytest.raises(InputError, match=r"has finished its 8 steps: raise --steps"):
        train(small_config("run.steps=8"), finished_run, resume=True, reporter=SilentReporter())


def test_a_run_folder_is_never_overwritten(small_config, finished_run: Path) -> None:
    before = sorted(finished_run.iterdir())
    with pytest.raises(InputError, match=r"exists: choose another --output"):
        train(small_config(), finished_run, reporter=SilentReporter())
    assert sorted(finished_run.iterdir()) == before


@pytest.mark.slow
def test_too_many_skipped_updates_stop_the_run(small_config, tmp_path: Path) -> None:
    """A bound no gradient meets: steps 1 and 2 skip two updates each, the fifth skip in step 3 ends the run."""
    with pytest.raises(RunError, match=r"5 consecutive updates were skipped .*gradient norm above"):
        train(small_config("optim.skip_norm=1e-9"), tmp_path / "run", reporter=SilentReporter())
    lines = metrics(tmp_path / "run")
    assert [line["optim/updates_skipped"] for line in lines] == [2, 2]
    assert {line["optim/skip_reason"] for line in lines} == {"gradient norm above 1e-09"}


@pytest.mark.engines
def test_config_toml_repeats_the_run(small_config, finished_run: Path, tmp_path: Path) -> None:
    from exgrpo_cli.config.settings import resolve

    config = resolve([("file", tomllib.loads((finished_run / "config.toml").read_text()))])
    train(config, tmp_path / "again", reporter=SilentReporter())
    assert timeless(metrics(tmp_path / "again")) == timeless(metrics(finished_run))
    assert_same_weights(tmp_path / "again", finished_run)


def test_the_exported_model_answers_as_in_its_card(finished_run: Path) -> None:
    """Run the card's own lines."""
    card = (finished_run / "model" / "README.md").read_text()
    code = card.split("```python\n")[1].split("```")[0]
    done = subprocess.run([sys.executable, "-c", code], cwd=finished_run, capture_output=True, text=True, check=True)
    assert "<think>" not in done.stdout.split("</think>")[-1]
    assert done.stdout.strip()
