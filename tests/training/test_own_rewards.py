"""Rewards of one's own: part of a point trains, what is correct fills the store, parts are told everywhere."""

import json
from pathlib import Path

import numpy as np
import pytest
from run_leaves import metrics

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.reporter import SilentReporter
from exgrpo_cli.commands import run
from exgrpo_cli.config.layers import build_config
from exgrpo_cli.ledger.reader import LedgerReader
from exgrpo_cli.training.run import train

GRADERS = """
from hashlib import sha256
from exgrpo_cli.base.types import Score

def chance(text):
    return sha256(text.encode()).digest()[0] / 255

def shared(gold, text):
    return Score(0.2 + 0.8 * chance(text), correct=chance(gold + text) < 0.5, parts={"letters": len(text)})

def brief(gold, text):
    return 1 / (1 + len(text))

def broken(gold, text):
    return 2
"""
FEW = ("data.heldout=none", "run.steps=4", "run.samples_per_step=8", "replay.start_threshold=0")


@pytest.fixture(autouse=True)
def graders(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (workdir / "my_rewards.py").write_text(GRADERS)
    monkeypatch.syspath_prepend(str(workdir))


def test_rewards_train_what_is_correct_is_stored_and_parts_are_told(small_config, tmp_path: Path) -> None:
    settings = ("grading.grader=python:my_rewards:shared", 'grading.rewards={"python:my_rewards:brief" = 0.5}')
    train(small_config(*FEW, *settings), tmp_path / "run", reporter=SilentReporter())
    samples = [
        json.loads(line) for file in (tmp_path / "run" / "samples").iterdir() for line in file.read_text().splitlines()
    ]
    assert len({row["reward"] for row in samples}) > 2
    for row in samples:
        parts = row["parts"]
        if row["verdict"] == "no answer":
            assert row["reward"] == 0 and parts == {"shared": 0, "brief": 0}
            continue
        assert list(parts) == ["shared", "shared.letters", "brief"]
        assert row["reward"] == pytest.approx(parts["shared"] + 0.5 * parts["brief"])
        assert 0.2 <= parts["shared"] <= 1 and parts["brief"] == pytest.approx(1 / (1 + parts["shared.letters"]))
    lines = metrics(tmp_path / "run")
    for line in lines:
        expected = line["reward/part/shared"] + 0.5 * line["reward/part/brief"]
        assert line["reward/mean"] == pytest.approx(expected) and line["verdict/correct"] > 0
    ledger = LedgerReader(tmp_path / "run" / "replay")
    stored = ledger.trajectories().to_pandas()
    # A partial reward is no success: what is not correct is never stored, whatever it earned.
    assert len(stored) and stored.correct.all() and (stored.reward < 1.5).all()
    assert np.allclose(stored.reward, [own["shared"] + 0.5 * own["brief"] for own in stored.parts.map(json.loads)])
    assert ledger.visits().to_pandas().num_fresh_successes.sum() == sum(line["verdict/correct"] for line in lines)
    assert run(["report", str(tmp_path / "run"), "--output", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "reward and its parts" in page and "shared.letters" in page


def test_a_baseline_of_history_counts_rewards_as_shares_of_successes(small_config, tmp_path: Path) -> None:
    settings = ("grading.grader=python:my_rewards:shared", "replay.enabled=false", "objective.baseline=history")
    train(small_config("data.heldout=none", "run.steps=1", *settings), tmp_path / "run", reporter=SilentReporter())
    visits = LedgerReader(tmp_path / "run" / "replay").visits().to_pandas()
    assert np.allclose(visits.alpha + visits.beta, visits.alpha.iloc[0] + visits.beta.iloc[0])
    # Each of K rewards is 0.2 at least.
    assert (visits.alpha > 1 + 0.2 * visits.num_members * 0.99).all() and (visits.alpha % 1 > 0).any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["grading.grader=python:my_rewards:broken"], "my_rewards:broken' returned 2 for the answer"),
        (['grading.rewards={"python:my_rewards:broken" = 1}'], "my_rewards:broken' returned 2 for the answer"),
        (['grading.rewards={"python:my_rewards:none" = 1}'], "my_rewards has no function none"),
    ],
)  # fmt: skip
def test_what_cannot_be_a_reward_is_named_in_one_line(tmp_path: Path, capsys, settings, message: str) -> None:
    given = [part for each in ("data.heldout=none", "run.steps=1", *settings) for part in ("--set", each)]
    assert run(["train", "--quiet", "--output", str(tmp_path / "run"), *given]) in (1, 2)
    assert message in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_file_may_not_name_graders_among_the_rewards(tmp_path: Path) -> None:
    (tmp_path / "theirs.toml").write_text('[grading.rewards]\n"python:my_rewards:brief" = 0.5\n')
    with pytest.raises(InputError, match=r"grading.rewards = .* would run code of .*If you trust it, add --allow-code"):
        build_config(config_file=tmp_path / "theirs.toml")
    config = build_config(assignments=['grading.rewards={"python:my_rewards:brief" = 0.5}'])
    assert config.grading.rewards == {"python:my_rewards:brief": 0.5}
