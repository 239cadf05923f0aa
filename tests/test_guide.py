"""The guide: everything on its pages is typed in order, shortened where it must be."""

import json
import re
import shlex
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path

import pytest
from conftest import SMALL_RUN
from made_results import write_claim_results
from question_sources import write

from exgrpo_cli.commands import run

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "guide"
Shorten = Callable[[list[str]], list[str]]

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]


def play(page: str, shorten: Shorten) -> list[str]:
    """Do what the page does, block by block, in the working folder; returns the commands as they stand on it."""
    typed = []
    for language, text in re.findall(r"```(\w+)\n(.*?)```", (GUIDE / page).read_text(), flags=re.DOTALL):
        if language == "toml":
            [name] = re.findall(r"\A# (\S+\.toml)$", text, flags=re.MULTILINE)
            Path(name).write_text(text)
        elif language == "python" and (named := re.match(r"# (\S+\.py)\n", text)):
            Path(named[1]).write_text(text)
        elif language == "python":
            exec(text, {})
        elif language == "sh":
            for line in text.splitlines():
                program, *arguments = shlex.split(line)
                assert program == "exgrpo", line
                assert run(shorten(arguments)) == 0, line
                typed.append(line)
    return typed


def test_your_data_and_your_model(tmp_path: Path) -> None:
    """Questions in GSM8K's layout; the toy and its four steps are short as they stand."""
    asked = "A box holds {} eggs. How many are in 7 boxes?"
    rows = [{"question": asked.format(n), "answer": f"7 * {n}\n#### {7 * n}"} for n in range(30)]
    write(tmp_path / "mine.jsonl", *rows)
    with chdir(tmp_path):
        typed = play("your-data.md", lambda arguments: arguments)
        typed += play("your-model.md", lambda arguments: arguments)
    assert len(typed) == 11
    summary = json.loads((tmp_path / "runs/first/summary.json").read_text())
    assert (summary["steps"], summary["heldout"]["set"]) == (6, "mine-heldout")
    assert (tmp_path / "results/after/results.json").is_file()


def small(backbone: Path) -> list[str]:
    """Settings of seconds for what trains the built-in backbone."""
    settings = (*SMALL_RUN, f"backbone.source={backbone}", "rollout.max_response_tokens=64", "grading.grader=math")
    return [part for setting in settings for part in ("--set", setting)]


def test_reading_a_run(small_backbone: Path, tmp_path: Path) -> None:
    def shorten(arguments: list[str]) -> list[str]:
        if arguments[0] == "train":
            return [*arguments, *small(small_backbone)]
        return [{"40": "4"}.get(each, each) for each in arguments]

    with chdir(tmp_path):
        play("reading-a-run.md", shorten)
    healthy, sick = (json.loads((tmp_path / f"runs/{name}/summary.json").read_text()) for name in ("healthy", "sick"))
    assert healthy["steps"] == sick["steps"] == 6
    assert (tmp_path / "runs/sick/report.html").is_file()


def test_your_reward(small_backbone: Path, tmp_path: Path) -> None:
    def shorten(arguments: list[str]) -> list[str]:
        # The page's own setting stands last, which counts.
        return ["train", *small(small_backbone), *arguments[1:]] if arguments[0] == "train" else arguments

    with chdir(tmp_path):
        play("your-reward.md", shorten)
    line = json.loads((tmp_path / "runs/brief/metrics.jsonl").read_text().splitlines()[-1])
    assert line["reward/mean"] == pytest.approx(line["reward/part/math"] + 0.2 * line["reward/part/brief"])
    assert 'grader = "python:my_reward:rising"' in (tmp_path / "runs/rising/config.toml").read_text()
    found = json.loads((tmp_path / "results/rising/results.json").read_text())
    assert list(found["second_graders"]) == ["oat", "python:my_reward:rising"]


@pytest.mark.slow
def test_the_tutorial(small_backbone: Path, tmp_path: Path) -> None:
    """All its commands, with a model of seconds; the claim is judged as it stands there, from what is published."""
    (tmp_path / "docs").symlink_to(ROOT / "docs")

    def shorten(arguments: list[str]) -> list[str]:
        if arguments[0] == "train" or "--methods" in arguments:
            return [*arguments, *small(small_backbone)]
        return [{"40": "4"}.get(each, each) for each in arguments]

    with chdir(tmp_path):
        typed = play("../tutorial.md", shorten)
    assert len(typed) == 9
    study, claim = (json.loads((tmp_path / f"studies/{name}/results.json").read_text()) for name in ("first", "claim"))
    assert [len(arm["seeds"]) for arm in study["arms"].values()] == [3, 3]
    [judged] = claim["claims"].values()
    assert judged["verdict"] != "not run" and judged["seeds"] == judged["seeds_needed"]
    # What the page says of it.
    page = (ROOT / "docs/tutorial.md").read_text()
    difference = claim["arms"]["strong: exgrpo"]["difference"]
    assert all(f"{difference[name]:.3f}" in page for name in ("mean", "low", "high"))


def test_a_study_of_your_own(small_backbone: Path, tmp_path: Path) -> None:
    """The pilot is run, two seeds of seconds; the study's eighteen runs are made up: it is judged, not trained."""

    def shorten(arguments: list[str]) -> list[str]:
        if arguments[0] != "ablate":
            return arguments
        if "--claim" not in arguments:
            return [{"100,101,102": "100,101"}.get(each, each) for each in arguments] + small(small_backbone)
        if "--dry-run" in arguments:
            return arguments
        carried = write_claim_results(tmp_path / "carried", "forgetting.toml", method="young")
        return [*arguments, "--results", str(carried)]

    with chdir(tmp_path):
        play("a-study-of-your-own.md", shorten)
    found = json.loads((tmp_path / "studies/forgetting/results.json").read_text())
    assert found["claims"]["forgetting"]["verdict"] == "supported"
    assert found["claims"]["forgetting"]["seeds_needed"] == 9
    # The claim travels with the study: the page needs no file that the author had.
    (tmp_path / "forgetting.toml").unlink()
    assert run(["report", str(tmp_path / "studies/forgetting")]) == 0
    assert "forgets after 20 steps" in (tmp_path / "studies/forgetting/report.html").read_text()
