"""Multiple-choice questions through the real loop: options come from the question file, an option's text names it."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from run_leaves import metrics

from exgrpo_cli.base.reporter import SilentReporter
from exgrpo_cli.base.types import Verdict
from exgrpo_cli.grading import GradingItem, GradingPool
from exgrpo_cli.training.run import train


def test_an_option_may_be_named_by_its_text(small_config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 to 20 are the options, turned by one more place each question; the gold is 10, which a small backbone says."""
    rows = []
    for turn in range(48):
        options = [str((place + turn) % 20 + 1) for place in range(20)]
        rows.append(
            {"question": f"{turn // 8 + 1}+{turn % 8 + 1}=?", "choices": options, "answer": options.index("10")}
        )
    (tmp_path / "choices.json").write_text(json.dumps(rows))
    graded: list[tuple[GradingItem, Verdict]] = []
    really_grade = GradingPool.grade

    def grade(pool: GradingPool, items: Sequence[GradingItem]) -> list[Verdict]:
        verdicts = really_grade(pool, items)
        graded.extend(zip(items, verdicts, strict=True))
        return verdicts

    monkeypatch.setattr(GradingPool, "grade", grade)
    settings = (f"data.train={tmp_path / 'choices.json'}", "data.heldout=none", "grading.grader=choice", "run.steps=3")
    train(small_config(*settings), tmp_path / "run", reporter=SilentReporter())
    right = [item for item, verdict in graded if verdict is Verdict.CORRECT]
    assert len({item.gold for item, _ in graded}) > 10 and all(len(item.options) == 20 for item, _ in graded)
    assert any("\\boxed{10}" in item.response for item in right)
    assert sum(line["reward/mean"] for line in metrics(tmp_path / "run")) > 0
