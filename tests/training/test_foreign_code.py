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
def foreign(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Somebody's run, with their module beside it in the working folder."""
    monkeypatch.setenv("EXGRPO_CACHE", str(workdir / "cache"))
    # Each test has a module of this name in a folder of its own.
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "evil", raising=False)
    (workdir / "evil.py").write_text(EVIL)
    folder = workdir / "theirs"
    folder.mkdir()
    (folder / "config.toml").write_text(to_toml(build_config(assignments=["grading.grader=python:evil:score"])))
    return folder


@pytest.mark.parametrize(
    "command",
    [
        ["train", "--resume", "--output", "theirs"], ["train", "--config", "theirs/config.toml"],
        ["ablate", "--config", "theirs/config.toml"], ["prepare", "--config", "theirs/config.toml"],
    ],
)  # fmt: skip
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


def test_an_own_run_goes_on_as_long_as_its_functions_are_the_same(foreign, tmp_path, capsys) -> None:
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


SLURM_PROGRAMS = ("sbatch", "srun", "sacct")
CALLED = "python:evil:score"
CLAIM = Path(__file__).with_name("claim.toml").read_text()


def claim(all_arms: str = "", arm: str = "", method: str = "exgrpo") -> str:
    return CLAIM.format(all_arms=all_arms, arm=arm, method=method)


STEPS = 'settings = ["replay.start_threshold=0"]'
# Name of the file, its content, the command; `{key}` is each key that takes a function.
FOREIGN = {
    "a file of settings": ("c.toml", "[{section}]\n{name} = '{called}'\n", ["train", "--config", "c.toml"]),
    "a method's file": ("m.toml", "[{section}]\n{name} = '{called}'\n", ["train", "--method", "m.toml"]),
    "what its paper changed": (
        *("m.toml", "[replay]\nratio = 0.5\n[published.{section}]\n{name} = '{called}'\n"),
        ["train", "--method", "m.toml", "--as-published"],
    ),
    "a method of a study": ("m.toml", "[{section}]\n{name} = '{called}'\n", ["ablate", "--methods", "grpo,m.toml"]),
    "a claim's settings": (
        *("s.toml", claim('settings = ["{section}.{name}={called}"]', STEPS)),
        ["ablate", "--claim", "s.toml"],
    ),
    "a claim's arm": (
        *("s.toml", claim(arm='settings = ["{section}.{name}={called}"]')),
        ["ablate", "--claim", "s.toml"],
    ),
    "settings of a preparation": ("c.toml", "[{section}]\n{name} = '{called}'\n", ["prepare", "--config", "c.toml"]),
}


@pytest.mark.parametrize("key", ["grading.grader", "replay.metric", "replay.sampler", "replay.priority"])
@pytest.mark.parametrize("route", FOREIGN)
def test_whoever_wrote_a_function_into_a_file_does_not_run_it(foreign, tmp_path, capsys, route, key) -> None:
    name, text, command = FOREIGN[route]
    section, _, last = key.partition(".")
    text = text.format(section=section, name=last, called=CALLED) if "{section}" in text else text
    if last == "priority":
        composition = 'composition = "append"\n' if "\npriority" in text else ""
        text = text.replace("\npriority", f"\n{composition}priority")
        text = text.replace(f'"{key}={CALLED}"', f'"replay.composition=append", "{key}={CALLED}"')
    (tmp_path / name).write_text(text)
    assert run([*command, "--dry-run", "--output", "out"]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"{key} = '{CALLED}' would run code of {tmp_path / 'evil.py'}" in line and "--allow-code" in line
    assert not (tmp_path / "was-here").exists()


def test_a_shipped_claim_and_what_is_typed_need_no_leave(foreign, tmp_path) -> None:
    assert run(["ablate", "--claim", "quick", "--dry-run", "--output", "out"]) == 0
    assert run(["ablate", "--metric", CALLED, "--seeds", "1", "--dry-run", "--output", "out"]) == 0
    assert (tmp_path / "was-here").exists()


@pytest.mark.parametrize(
    ("slurm", "said"),
    [
        ('setup = ["touch was-here"]', "slurm.setup = ['touch was-here'] would run it as shell commands"),
        (r'setup = ["module load x\ntouch was-here"]', "--allow-code"),
        *[
            (rf'{name} = "x{text}touch was-here #"', f"slurm.{name}")
            for name in ("partition", "account", "qos", "constraint")
            for text in (r"\n", r"\r", r"\u2028", "'\\n", " ", "`", "$(")
        ],
    ],
)
def test_a_job_script_has_no_line_of_a_file(foreign, tmp_path, capsys, monkeypatch, slurm, said) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in SLURM_PROGRAMS:
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    (tmp_path / "s.toml").write_text(f"[slurm]\n{slurm}\n")
    for command in (["train"], ["ablate", "--metric", "ent"]):
        assert run([*command, "--launcher", "slurm", "--config", "s.toml", "--dry-run", "--output", "o"]) == 2
        shown = capsys.readouterr()
        assert said in shown.err and "was-here" not in shown.out


def test_setup_of_a_job_is_let_through_where_it_is_allowed(foreign, tmp_path, capsys, monkeypatch) -> None:
    test_a_job_script_has_no_line_of_a_file(foreign, tmp_path, capsys, monkeypatch, 'setup = ["x"]', "--allow-code")
    command = ["train", "--launcher", "slurm", "--config", "s.toml", "--dry-run", "--output", "o", "--allow-code"]
    assert run(command) == 0
    assert "\nx\n" in capsys.readouterr().out
