"""`exgrpo new` and the greeting: files that work as they are written, and commands that do."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from exgrpo_cli.commands import cli, run
from exgrpo_cli.commands.train import _next_commands
from exgrpo_cli.config.layers import build_config
from exgrpo_cli.config.settings import to_toml
from exgrpo_cli.training.start import RunStart

pytestmark = pytest.mark.usefixtures("workdir")


def dry(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert run([*shlex.split(line)[1:], "--dry-run"]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def named_commands(text: str) -> list[str]:
    """Those that a text tells of, without what they are for."""
    return [line.strip().split("  ")[0] for line in text.splitlines() if line.startswith("  exgrpo ")]


@pytest.mark.parametrize(("kind", "file"), [("method", "mine.toml"), ("study", "mine.toml"), ("grader", "mine.py")])
def test_a_template_works_as_written_and_is_never_overwritten(
    kind: str, file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["new", kind, "mine"]) == 0
    out, err = capsys.readouterr()
    text = (tmp_path / file).read_text()
    assert out == f"{file}\n" and "NAME" not in text
    commands = named_commands(err)
    assert len(commands) >= 2
    for command in commands:
        # A run to be judged is not here.
        if not command.startswith("exgrpo evaluate"):
            assert dry(command.removesuffix(" --dry-run"), capsys)
    assert run(["new", kind, "mine"]) == 2
    assert capsys.readouterr().err == (
        f"exgrpo: new {kind} 'mine' is there already as {file}: take another name, or move that away.\n"
    )
    assert (tmp_path / file).read_text() == text


def test_every_line_of_the_method_that_may_count_is_a_setting(tmp_path: Path) -> None:
    assert run(["new", "method", "mine"]) == 0
    lines = (tmp_path / "mine.toml").read_text().splitlines()
    for line in lines:
        if re.match(r"# \w+ = (?!\"python)", line):
            section = "objective" if "shaping" in line else "replay"
            (tmp_path / "one.toml").write_text(f"[{section}]\n{line.removeprefix('# ')}\n")
            assert to_toml(build_config(method="one.toml")) != to_toml(build_config(method="exgrpo"))


def test_the_grader_judges_and_questions_are_prepared_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["new", "grader", "my_own"]) == 0
    seen: dict[str, object] = {}
    exec((tmp_path / "my_own.py").read_text(), seen)
    judged = [("2", "so \\boxed{2.0}", True), ("2", "2", True), ("2", "3", False), ("Yes", "\\boxed{yes}", True)]
    assert [seen["grade"](gold, text) for gold, text, _ in judged] == [verdict for *_, verdict in judged]  # type: ignore[operator]
    rows = [{"question": f"{number}+1=?", "answer": str(number + 1)} for number in range(4)]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    capsys.readouterr()
    assert run(["prepare", "mine.jsonl", "--grader", "python:my_own:grade", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["counts"]["kept"] == 4


def test_without_arguments_three_things_to_try(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    out, err = capsys.readouterr()
    assert (out, err) == (cli.template("greeting"), "")
    train, look, compare = named_commands(out)[:3]
    assert "steps = 150" in dry(train, capsys)
    assert run(shlex.split(look)[1:]) == 2
    assert "grpo" in dry(compare, capsys)


@pytest.mark.parametrize(
    ("settings", "last"),
    [
        ({"method": "exgrpo"}, "exgrpo ablate --methods grpo,exgrpo --backbone tiny --steps 150"),
        ({"method": "dbb"}, "exgrpo ablate --methods grpo,dbb,exgrpo --backbone tiny --steps 150"),
        # What an ablation would not train on, or cannot name, is gone on with.
        ({"assignments": ["data.train=mine.parquet"]}, "exgrpo train --resume --output 'runs/my one' --steps 300"),
        ({"method": "mine.toml"}, "exgrpo train --resume --output 'runs/my one' --steps 300"),
    ],
)
def test_a_run_ends_with_three_commands_that_can_be_pasted(settings: dict[str, Any], last: str) -> None:
    Path("mine.toml").write_text("[replay]\nmax_age = 20\n")
    start = RunStart(config=build_config(**settings), folder=Path("runs/my one"), resume=False)
    (start.folder / "samples").mkdir(parents=True)
    lines = [json.dumps({"prompt": prompt}) for prompt in ("1+1+1=?", "it's\n2=?")]
    (start.folder / "samples" / "step-000001.jsonl").write_text("\n".join(lines) + "\n")
    commands = [line[24:] for line in _next_commands(start)]
    assert commands == ["exgrpo sample 'runs/my one' '1+1+1=?'", "exgrpo replay-stats 'runs/my one'", last]
