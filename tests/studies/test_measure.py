"""Measures of a run: worked by hand on small counts, read back from files, and from a ledger of sums modulo m."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_results import result_of
from small_ledger import IDENTITY
from store_calls import candidates_of, draw, record, replay

from exgrpo_cli.base import files, types
from exgrpo_cli.base.errors import InputError
from exgrpo_cli.config.layers import build_config
from exgrpo_cli.config.sections.data import ModularSettings
from exgrpo_cli.config.settings import to_toml
from exgrpo_cli.models.tiny import make_tokenizer
from exgrpo_cli.questions.made.sums import make_modular
from exgrpo_cli.questions.question_file import write_questions
from exgrpo_cli.replay.replace import Replace
from exgrpo_cli.replay.store import FreshRow, Store, Visit
from exgrpo_cli.runs.folder import RunFolder
from exgrpo_cli.runs.result import Memorising, PassRates, config_hash, find_results, read_result, write_result
from exgrpo_cli.runs.validations import Validation, read_validations
from exgrpo_cli.show.figures.run import memorising_figure
from exgrpo_cli.studies import endpoints, measure


def validation(step: int, *correct: int, generated: int = 0) -> Validation:
    return Validation(step=step, generated=generated, samples=4, correct=np.array(correct))


def test_area_new_solutions_and_collapse_by_hand() -> None:
    start, middle, end = (
        validation(0, 0, 0, 4, 0),
        validation(5, 0, 1, 4, 1, generated=100),
        validation(9, 0, 0, 4, 0, generated=400),
    )
    # Rates 4/16, 6/16, 4/16 at 0, 100, 400 tokens: (0.3125 * 100 + 0.3125 * 300) / 400.
    assert measure.area([start, middle, end]) == pytest.approx(0.3125)
    # Of questions 0, 1 and 3, unsolved before, 1 and 3 were solved once.
    assert measure.newly_solved([start, middle, end]) == pytest.approx(2 / 3)
    assert (
        measure.newly_solved([start]) is None and measure.area([start]) is None and measure.collapsed([start]) is None
    )
    best, worst = validation(0, *[4] * 200), validation(9, *[0] * 199, 4)
    assert measure.collapsed([best, worst]) is True and measure.collapsed([worst, best]) is False
    assert measure.collapsed([best, validation(9, *[2] * 200)]) is False


def test_newly_solved_at_the_end_asks_each_run_once() -> None:
    """Of questions 0, 1 and 3, unsolved before, only 3 is solved by the last responses; question 2 was solved."""
    assert endpoints.newly_solved_at_end(result_of([0, 0, 4, 1], before=[0, 0, 4, 0])) == pytest.approx(1 / 3)
    assert endpoints.newly_solved_at_end(result_of([0, 1], before=[1, 2])) is None


def test_a_fall_is_told_when_it_is_clear_and_once() -> None:
    """Of 4 responses each: 3 right before training and at first, then 1, then none; half of them recover."""
    before, same = validation(0, *[3] * 40), validation(5, *[3] * 40)
    low, lower, risen = validation(10, *[1] * 40), validation(15, *[0] * 40), validation(20, *[3] * 40)
    told = measure.new_fall([before, same, low])
    assert told.startswith("held-out pass@1 has fallen from 0.750 before training to 0.250 after step 10; usual causes")
    assert (
        measure.new_fall([before, same, low, lower])
        == ""
        == measure.new_fall([before, same])
        == measure.new_fall([before])
    )
    assert "to 0.250 after step 10" in measure.new_fall([before, same, lower, risen, low])
    # A twentieth less is no fall, and one question that is no longer solved may be chance.
    assert measure.new_fall([validation(0, *[4] * 100), validation(5, *[4] * 95, *[0] * 5)]) == ""
    assert measure.new_fall([validation(0, 4, 0, 0, 0), validation(5, 0, 0, 0, 0)]) == ""


def test_validations_are_read_by_step_and_the_last_of_a_step_counts(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step, correct in ((0, "1 2"), (3, "0 0"), (3, "4 4"), (5, "3 3")):
        folder.append_validation(
            {"step": step, "asked": "heldout", "generated": 7, "samples": 4, "correct": correct, "ids": []}
        )
    folder.append_validation({"step": 0, "asked": "train", "generated": 0, "samples": 4, "correct": "4", "ids": ["a"]})
    found = read_validations(tmp_path)
    assert [each.step for each in found] == [0, 3, 5] and found[1].pass_at_1 == 1.0
    assert read_validations(tmp_path, "train")[0].ids == ("a",)
    folder.cut_back(3, validates_again=False)
    assert [each.step for each in read_validations(tmp_path)] == [0, 3]
    folder.append_validation({"step": 4, "asked": "heldout", "generated": 7, "samples": 4, "correct": "4 x", "ids": []})
    with pytest.raises(InputError, match=r"validations\.jsonl, line \d is damaged .*restore it from a copy"):
        read_validations(tmp_path)


def test_never_seen_questions_get_the_levels_of_the_replayed_ones() -> None:
    """Two easy and one hard held-out question; of the replayed ones three are hard and one easy."""
    weights = measure.same_level_weights(["2", "2", "9"], {"9": 3, "2": 1})
    before, after = validation(0, 4, 4, 0), validation(5, 4, 4, 2)
    # Easy 1.0, hard 0 then 0.5: 1/4 + 3/4 * 0 and 1/4 + 3/4 * 0.5.
    assert measure.pass_rates([before, after], weights) == PassRates(questions=3, before=0.25, after=0.625)
    assert measure.same_level_weights(["2", "2"], {"9": 3}).tolist() == [1.0, 1.0]
    none, last = np.array([False, False, False]), np.array([False, False, True])
    assert measure.pass_rates([before, after], none) == PassRates(questions=0, before=None, after=None)
    assert measure.pass_rates([before, after], last) == PassRates(questions=1, before=0.0, after=0.5)


def test_the_auc_counts_pairs_over_all_or_within_a_question() -> None:
    """Valid 0.1, 0.4; invalid 0.3, 0.4: pairs below 1, 1, 0 and a tie of one half: 2.5 of 4."""
    entropy, valid, one = np.array([0.1, 0.4, 0.3, 0.4]), np.array([True, True, False, False]), np.zeros(4, dtype=int)
    assert measure.auc(entropy, valid, one) == 2.5 / 4
    assert measure.auc(entropy[:2], valid[:2], one[:2]) is None
    # Responses to the second, harder question are less certain: over all entropy tells, within a question it does not.
    entropy, valid = np.array([0.1, 0.2, 0.3, 1.1, 1.2, 1.3]), np.array([True, False, True, False, True, False])
    assert measure.auc(entropy, valid, np.zeros(6, dtype=int)) == 6 / 9
    assert measure.auc(entropy, valid, np.array([4, 4, 4, 9, 9, 9])) == (1 + 1) / (2 + 2)
    assert measure.auc(entropy, valid, np.arange(6)) is None


def test_the_hash_tells_settings_apart_and_forgets_seed_and_machine() -> None:
    plain = build_config()

    def hashed(*assignments: str, **presets: str) -> str:
        return config_hash(build_config(assignments=assignments, **presets))

    same = hashed("run.seed=7", "run.threads=3", "run.plots=false")
    assert same == config_hash(plain) == hashed("backbone.dtype=bfloat16", "rollout.logprobs=trainer")
    started = replace(plain, optim=replace(plain.optim, horizon=plain.run.steps))
    assert config_hash(started) == config_hash(plain) == hashed("rollout.logprobs=sampler")
    others = [hashed(method="grpo"), hashed(regime="sparse"), hashed("optim.learning_rate=1e-4")]
    others += [hashed(f"rollout.logprobs={name}") for name in ("trainer", "engine")]
    assert len({config_hash(plain), *others}) == 6


def test_a_result_is_read_as_it_was_written_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    known = PassRates(questions=3, before=0.1, after=0.5)
    memorising = Memorising(
        trained_questions=30, replayed_questions=5, replayed=known, rolled_out=known, never_seen=known, heldout=known
    )
    result = replace(result_of([4, 0, 12], samples=16, seed=3), memorising=memorising)
    path = tmp_path / "arm-3.result.json"
    write_result(path, result)
    assert path.stat().st_size < 4096 and read_result(path).to_json() == result.to_json()
    assert [found.seed for found in find_results(tmp_path)] == [3]
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"after": "4 1 12"}))
    with pytest.raises(InputError, match=r"arm-3\.result\.json has changed since its run wrote it: restore it"):
        read_result(path)
    del values["checksum"]
    for damage in ({"format": 9}, {"totals": None}, {"after": "4 x"}, {"before": "1 2"}, {"before": None}):
        damaged = values | damage
        path.write_text(json.dumps(damaged | {"checksum": files.values_digest(damaged)}))
        with pytest.raises(InputError, match=r"arm-3\.result\.json is (not the result of a run|of another format)"):
            read_result(path)
    figure = memorising_figure({"a": [memorising], "b": []})
    assert figure is not None and len(figure.axes[0].lines) == 4
    assert memorising_figure({"b": []}) is None


QUESTIONS = make_modular(ModularSettings(num_train=6, num_heldout=2, levels=(2,))).train
SURE, UNSURE = 0.1, 0.9
"""Entropies."""


def worked_out(question: types.Question) -> str:
    """Left to right: (7+5+8)%5=? as 7+5=2, 2+8=0."""
    first, *terms, modulus = map(int, re.findall(r"\d+", question.prompt[-1].content))
    lines, value = [], first
    for term in terms:
        lines.append(f"{value}+{term}={(value + term) % modulus}")
        value = (value + term) % modulus
    return "\n".join(lines) + f"\n</think>\n\\boxed{{{value}}}"


def guessed(question: types.Question) -> str:
    return f"</think>\n\\boxed{{{question.answer}}}"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each question was answered twice: worked out and surely, and guessed; the last guess was sure too."""
    folder = tmp_path_factory.mktemp("run")
    tokenizer = make_tokenizer(max_tokens=128)
    tokenizer.save_pretrained(folder / "model")
    (folder / "data").mkdir()
    write_questions(folder / "data" / "train.parquet", QUESTIONS, {})
    files.write_text(folder / "config.toml", to_toml(build_config(options={"data": {"train": "modular"}})))
    files.write_json_lines(folder / "metrics.jsonl", [{"step": 1, "phase": "mixed"}])
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
    found = measure.valid_traces(run)
    assert found is not None and found.trajectories == 12 and found.valid == 0.5
    assert found.auc == pytest.approx(5.5 / 6)
    assert found.low_entropy == 1.0 and found.high_entropy == 0.0
    replays, successes, _ = measure.ledger_counts(run)
    assert list(replays.values()) == [1] and replays.keys() <= {question.id for question in QUESTIONS}
    assert successes == {question.id: 2 for question in QUESTIONS}
    assert measure.ledger_counts(run / "data") == ({}, {}, {})


def test_a_task_that_cannot_tell_has_none(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    plain = [replace(question, source="s") for question in QUESTIONS]
    write_questions(tmp_path / "data" / "train.parquet", plain, {})
    assert measure.valid_traces(tmp_path) is None
