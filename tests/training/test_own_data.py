"""A user's own questions: validated on their own held-out part, read in any layout, refused before anything starts."""

from collections.abc import Callable
from pathlib import Path

import pytest
from question_sources import question, write
from run_leaves import metrics

from exgrpo_cli.base import reporter, types
from exgrpo_cli.base.errors import InputError
from exgrpo_cli.commands import run
from exgrpo_cli.config.layers import build_config
from exgrpo_cli.grading import GradingItem, GradingPool
from exgrpo_cli.questions.prepare import split_questions
from exgrpo_cli.questions.question_file import read_metadata, read_questions
from exgrpo_cli.training.questions import load_questions, store_questions
from exgrpo_cli.training.run import train


@pytest.fixture
def raw(workdir: Path) -> Path:
    """40 own questions as JSON lines, in the working folder."""
    rows = [{"question": f"How much is {number} + {number}?", "answer": str(2 * number)} for number in range(40)]
    return write(workdir / "mine.jsonl", *rows)


def of(data: Path | str, heldout: str | None = None) -> dict[str, dict[str, str]]:
    return {"data": {"train": str(data)} | ({} if heldout is None else {"heldout": heldout})}


def test_a_split_does_not_look_at_order_or_answers_and_keeps_one_question_on_one_side() -> None:
    questions = [question(f"q {number}", answer="1") for number in range(50)]
    train, heldout = split_questions(questions, 0.2)
    assert (len(train), len(heldout)) == (40, 10)
    assert {q.id for q in split_questions(questions[::-1], 0.2)[1]} == {q.id for q in heldout}
    assert {q.id for q in split_questions(questions, 0.2, seed=1)[1]} != {q.id for q in heldout}
    twice = [*questions, *(question(f"q  {number}", answer="2") for number in range(50))]
    left, right = ({q.prompt[0].content.split()[1] for q in side} for side in split_questions(twice, 0.2))
    assert not left & right
    assert len(split_questions(questions, 0.5, most=3)[1]) == 3
    with pytest.raises(InputError, match=r"1 questions cannot be split .* use more questions, or --heldout none"):
        split_questions(questions[:1], 0.5)


def test_own_data_are_validated_on_their_own_tenth_and_never_on_arithmetic(raw: Path) -> None:
    config = build_config(options=of(raw))
    questions = load_questions(config, reporter.SilentReporter())
    assert (len(questions.train), len(questions.heldout)) == (36, 4)
    assert {"How much is"} == {q.prompt[0].content[:11] for q in questions.heldout}
    assert config.data.heldout_name == "mine-heldout"
    # Who names a published backbone and own questions does not get that backbone's benchmark.
    assert build_config(backbone="qwen-math-1.5b", options=of(raw)).data.heldout == "auto"
    assert build_config(backbone="qwen-math-1.5b").data.heldout_name == "math500"
    assert build_config().data.heldout_name == "arithmetic"


@pytest.mark.parametrize(("heldout", "sizes", "name"), [("0.25", (30, 10), "mine-heldout"), ("none", (40, 0), "none")])
def test_a_share_or_none_is_held_out(raw: Path, heldout: str, sizes: tuple[int, int], name: str) -> None:
    config = build_config(options=of(raw, heldout))
    questions = load_questions(config, reporter.SilentReporter())
    assert (len(questions.train), len(questions.heldout)) == sizes
    assert config.data.heldout_name == name


def test_a_named_set_is_held_out_and_must_differ(raw: Path) -> None:
    assert len(load_questions(build_config(options=of(raw, "arithmetic")), reporter.SilentReporter()).heldout) == 600
    with pytest.raises(InputError, match=r"40 questions, .* held-out questions must not be trained on"):
        load_questions(build_config(options=of(raw, str(raw))), reporter.SilentReporter())


def test_prepare_keeps_its_split_in_the_files(raw: Path) -> None:
    assert run(["prepare", "mine.jsonl", "--split", "0.2", "--quiet"]) == 0
    file, beside = (raw.parent / "data" / name for name in ("mine.parquet", "mine-heldout.parquet"))
    assert (read_metadata(file)["heldout"], read_metadata(beside)["heldout_of"]) == (beside.name, file.name)
    questions = load_questions(build_config(options=of(file)), reporter.SilentReporter())
    assert (questions.train, questions.heldout) == (read_questions(file).questions, read_questions(beside).questions)
    assert (len(questions.train), len(questions.heldout)) == (32, 8)
    beside.unlink()
    with pytest.raises(InputError, match=r"mine-heldout.parquet is missing: `prepare --split` put"):
        load_questions(build_config(options=of(file)), reporter.SilentReporter())


def test_what_was_split_off_is_stored_apart(raw: Path, tmp_path: Path) -> None:
    config = build_config(options=of(raw))
    questions = load_questions(config, reporter.SilentReporter())
    store_questions(tmp_path, config, questions)
    assert read_questions(tmp_path / "train.parquet").questions == questions.train
    assert read_questions(tmp_path / "heldout.parquet").questions == questions.heldout


def test_an_option_may_be_named_by_its_text(small_config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 to 20 are the options, turned by one more place each question; the gold is 10, which a small backbone says."""
    rows = []
    for turn in range(48):
        options = [str((place + turn) % 20 + 1) for place in range(20)]
        asked = f"{turn // 8 + 1}+{turn % 8 + 1}=?"
        rows.append({"question": asked, "choices": options, "answer": options.index("10")})
    write(tmp_path / "choices.json", *rows)
    graded: list[tuple[GradingItem, types.Verdict]] = []
    really_judge = GradingPool.judge

    def judge(pool: GradingPool, item: GradingItem) -> Callable[[], types.Grade]:
        grade = really_judge(pool, item)()
        graded.append((item, grade.verdict))
        return lambda: grade

    monkeypatch.setattr(GradingPool, "judge", judge)
    settings = (f"data.train={tmp_path / 'choices.json'}", "data.heldout=none", "grading.grader=choice", "run.steps=3")
    train(small_config(*settings), tmp_path / "run", reporter=reporter.SilentReporter())
    right = [item for item, verdict in graded if verdict is types.Verdict.CORRECT]
    assert len({item.gold for item, _ in graded}) > 10 and all(len(item.options) == 20 for item, _ in graded)
    assert any("\\boxed{10}" in item.response for item in right)
    assert sum(line["reward/mean"] for line in metrics(tmp_path / "run")) > 0
