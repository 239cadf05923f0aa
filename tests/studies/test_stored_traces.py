"""Endpoints read from a ledger: valid traces of sums modulo m against guesses, and which questions were replayed."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small_ledger import IDENTITY
from store_calls import candidates_of, draw, record, replay

from exgrpo_cli.base.files import write_json_lines, write_text
from exgrpo_cli.base.types import Question
from exgrpo_cli.config.layers import build_config
from exgrpo_cli.config.sections.data import ModularSettings
from exgrpo_cli.config.settings import to_toml
from exgrpo_cli.models.tiny import make_tokenizer
from exgrpo_cli.questions.made.sums import make_modular
from exgrpo_cli.questions.question_file import write_questions
from exgrpo_cli.replay.replace import Replace
from exgrpo_cli.replay.store import FreshRow, Store, Visit
from exgrpo_cli.studies.measure import replayed_questions, valid_traces

QUESTIONS = make_modular(ModularSettings(num_train=6, num_heldout=2, levels=(2,))).train
SURE, UNSURE = 0.1, 0.9
"""Entropies."""


def worked_out(question: Question) -> str:
    """Left to right: (7+5+8)%5=? as 7+5=2, 2+8=0."""
    first, *terms, modulus = map(int, re.findall(r"\d+", question.prompt[-1].content))
    lines, value = [], first
    for term in terms:
        lines.append(f"{value}+{term}={(value + term) % modulus}")
        value = (value + term) % modulus
    return "\n".join(lines) + f"\n</think>\n\\boxed{{{value}}}"


def guessed(question: Question) -> str:
    return f"</think>\n\\boxed{{{question.answer}}}"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each question was answered twice: worked out and surely, and guessed; the last guess was sure too."""
    folder = tmp_path_factory.mktemp("run")
    tokenizer = make_tokenizer(max_tokens=128)
    tokenizer.save_pretrained(folder / "model")
    (folder / "data").mkdir()
    write_questions(folder / "data" / "train.parquet", QUESTIONS, {})
    write_text(folder / "config.toml", to_toml(build_config(options={"data": {"train": "modular"}})))
    write_json_lines(folder / "metrics.jsonl", [{"step": 1, "phase": "mixed"}])
    ids = [question.id for question in QUESTIONS]
    buffer = Store(folder / "replay", identity=IDENTITY, rules=Replace(), question_ids=ids)
    for question in QUESTIONS:
        answers = {worked_out(question): SURE, guessed(question): SURE if question is QUESTIONS[-1] else UNSURE}
        rows = []
        for text, entropy in answers.items():
            tokens = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
            logprobs = np.full(len(tokens), -0.5, dtype=np.float32)
            rows.append(FreshRow(token_ids=tokens, behaviour_logprobs=logprobs, entropy=entropy, nll=0.5))
        visit = Visit(
            question_id=question.id, step=1, weight_version=1, success_count=2, num_fresh_successes=2,
            num_replayed=0, verifier_failed=False, rows=rows,
        )  # fmt: skip
        record(buffer, visit)
    buffer.flush(1)
    replay(buffer, 2, candidates_of(buffer, draw(buffer, 1, 2, np.random.default_rng(0))[0]), 0)
    buffer.flush(2)
    return folder


def test_lucky_guesses_are_told_from_working_that_holds(run: Path) -> None:
    """Six valid ones, all sure; six guesses, five unsure, one a tie: AUC (5 + 0.5) / 6. Thirds are four each."""
    found = valid_traces(run)
    assert found is not None and found.trajectories == 12 and found.valid == 0.5
    assert found.auc == pytest.approx(5.5 / 6)
    assert found.low_entropy == 1.0 and found.high_entropy == 0.0
    assert len(replayed_questions(run)) == 1 and replayed_questions(run) <= {question.id for question in QUESTIONS}
    assert replayed_questions(run / "data") == frozenset()


def test_a_task_that_cannot_tell_has_none(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    plain = [replace(question, source="s") for question in QUESTIONS]
    write_questions(tmp_path / "data" / "train.parquet", plain, {})
    assert valid_traces(tmp_path) is None
