"""Multiple-choice questions through the real loop: options come from the question file, an option's text names it."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from run_leaves import metrics

from exgrpo_cli.base.reporter import SilentReporter
from exgrpo_cli.base.types import Verdict
from exgrpo_cli.grading import GradingItem, GradingPool
from exgrpo_cli.questions.prepare import PrepareOptions, prepare
from exgrpo_cli.questions.question_file import read_questions
from exgrpo_cli.training.run import train

LETTERS = "ABCDEFGHIJKLMNOPQRST"
# A response that ends its thinking once and then boxes one number.
ONE_NUMBER = re.compile(r"[^<]*</think>[^<\\]*\\boxed\{([0-9]+)\}\s*")


def question_file(folder: Path, name: str, sums: list[str]) -> Path:
    """Every question has the numbers 1 to 20 as options, turned by one more place each; the gold is the option 10.

    The small backbone has seen sums but no options, and likes to say 10: what it says need not be right here.
    """
    rows = []
    for turn, text in enumerate(sums):
        options = [str((place + turn) % 20 + 1) for place in range(20)]
        rows.append({"question": f"{text}=?", "choices": options, "answer": options.index("10")})
    source = folder / f"{name}.json"
    source.write_text(json.dumps(rows))
    output = folder / f"{name}.parquet"
    (report,) = prepare(str(source), output, PrepareOptions(), lambda done, total, what: None)
    assert (report.layout, len(report.questions)) == ("multiple choice", len(sums))
    return output


def test_an_option_may_be_named_by_its_text(small_config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sums = [f"{first}+{second}" for first in range(1, 10) for second in range(1, 9)]
    train_file = question_file(tmp_path, "train", sums[:48])
    config = small_config(
        f"data.train={train_file}",
        f"data.heldout={question_file(tmp_path, 'heldout', sums[48:])}",
        "grading.grader=choice",
        "run.steps=3",
    )
    graded: list[tuple[GradingItem, Verdict]] = []
    really_grade = GradingPool.grade

    def grade(pool: GradingPool, items: Sequence[GradingItem]) -> list[Verdict]:
        verdicts = really_grade(pool, items)
        graded.extend(zip(items, verdicts, strict=True))
        return verdicts

    monkeypatch.setattr(GradingPool, "grade", grade)
    summary = train(config, tmp_path / "run", reporter=SilentReporter())
    golds = {question.answer for question in read_questions(train_file).questions}
    assert golds == set(LETTERS)
    assert len(graded) > 100
    boxed = [(match[1], verdict) for item, verdict in graded if (match := ONE_NUMBER.fullmatch(item.response))]
    # 1 to 20 are options and so right or wrong; another number names none.
    for number, verdict in boxed:
        expected = Verdict.CORRECT if number == "10" else Verdict.WRONG
        assert verdict is (expected if number in map(str, range(1, 21)) else Verdict.NO_ANSWER), number
    assert {verdict for _, verdict in boxed} >= {Verdict.CORRECT, Verdict.WRONG}
    assert sum(line["reward/mean"] for line in metrics(tmp_path / "run")) > 0
    assert summary["heldout"]["after"]["questions"] == len(sums) - 48
