"""Functions of the user named in a file run with --allow-code alone; runs started here go on without it."""

import sys
from pathlib import Path

import pytest
import torch

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.commands import run
from exgrpo_cli.config.layers import build_config
from exgrpo_cli.config.settings import to_toml
from exgrpo_cli.engines.policy.policy import reading_file
from exgrpo_cli.training.start import remember_run

EVIL = 'from pathlib import Path\n\nPath("was-here").touch()\n\n\ndef score(*given):\n    return given\n'


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Somebody's run, with their module beside it in the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("EXGRPO_CACHE", str(tmp_path / "cache"))
    # Each test has a module of this name in a folder of its own.
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "evil", raising=False)
    (tmp_path / "evil.py").write_text(EVIL)
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "config.toml").write_text(to_toml(build_config(assignments=["grading.grader=python:evil:score"])))
    return folder


@pytest.mark.parametrize(
    "command",
    [
        ["train", "--resume", "--output", "theirs"],
        ["train", "--config", "theirs/config.toml"],
        ["ablate", "--config", "theirs/config.toml"],
        ["prepare", "--config", "theirs/config.toml"],
    ],
)
def test_code_of_a_file_is_refused_unseen(foreign, tmp_path, command, capsys) -> None:
    if command[0] == "ablate":
        text = (foreign / "config.toml").read_text().replace('method = "exgrpo"\n', "")
        (foreign / "config.toml").write_text(text)
    assert run(command) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    for said in ("grading.grader = 'python:evil:score' would run code of", str(tmp_path / "evil.py"), "--allow-code"):
        assert said in line
    assert not (tmp_path / "was-here").exists()


def test_code_runs_where_it_is_allowed_or_typed(foreign: Path, tmp_path: Path) -> None:
    assert run(["train", "--config", "theirs/config.toml", "--allow-code", "--dry-run"]) == 0
    assert (tmp_path / "was-here").exists()
    typed = ["--set", "grading.grader=python:evil:score"]
    assert run(["train", "--config", "theirs/config.toml", *typed, "--dry-run"]) == 0


def test_an_own_run_goes_on_as_long_as_its_functions_are_the_same(foreign, capsys) -> None:
    remember_run(foreign, build_config(assignments=["grading.grader=python:evil:score"]))
    assert run(["train", "--resume", "--output", "theirs", "--dry-run"]) == 2
    # The code is let through; what stops this one is that the folder holds no questions.
    assert "theirs/data/manifest.json is missing" in capsys.readouterr().err
    text = (foreign / "config.toml").read_text()
    (foreign / "config.toml").write_text(text.replace("python:evil:score", "python:evil:other"))
    assert run(["train", "--resume", "--output", "theirs", "--dry-run"]) == 2
    assert "would run code of" in capsys.readouterr().err


def test_nobody_is_told_to_load_code_from_a_checkpoint(tmp_path: Path) -> None:
    """torch's own message advises `weights_only=False`, which would run whatever is in the file."""
    file = tmp_path / "optimizer.pt"
    torch.save({"state": run}, file)
    with pytest.raises(InputError) as refused, reading_file(file):
        torch.load(file, weights_only=True)
    assert str(refused.value).startswith(f"{file} cannot be read (more than tensors is in it): restore it")
    assert "weights_only" not in str(refused.value)
