"""`exgrpo sample`: a question to a model, its answers back."""

import json
from pathlib import Path

import pytest

from exgrpo_cli.commands import run
from exgrpo_cli.config.layers import run_label


def test_a_model_is_asked_and_answers(small_backbone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = "--samples 2 --max-tokens 20 --seed 3"
    arguments = ["sample", str(small_backbone), "Compute (3 + 4).", *asked.split()]
    assert run([*arguments, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert "Compute (3 + 4)." in shown["prompt"]
    assert [0 < response["num_tokens"] <= 20 for response in shown["responses"]] == [True, True]
    assert run([*arguments, "--quiet"]) == 0
    assert capsys.readouterr().out == "".join(response["text"] + "\n" for response in shown["responses"])


def test_an_empty_question_and_an_unknown_model_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sample", "tiny", " "]) == 2
    assert "the question is empty" in capsys.readouterr().err
    assert run(["sample", "nowhere", "1 + 1?"]) == 2
    assert "'nowhere' is neither a run folder" in capsys.readouterr().err


def test_a_run_of_a_study_is_called_by_study_arm_and_seed(tmp_path: Path) -> None:
    run_folder = tmp_path / "studies" / "ent" / "ent-min" / "seed-0"
    run_folder.mkdir(parents=True)
    assert run_label(run_folder) == "seed-0"
    run_folder.with_name("seed-0.toml").touch()
    assert run_label(run_folder) == "ent/ent-min/seed-0"
