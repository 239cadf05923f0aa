"""Tasks of reasoning-gym: which are allowed, that their golds score, what part of a point is worth, and the audit."""

import ast
import inspect
import json
import re
import textwrap
from dataclasses import replace
from types import SimpleNamespace

import pytest
from grading_pools import boxed

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.types import Verdict
from exgrpo_cli.commands import run
from exgrpo_cli.config.sections.data import GymSettings
from exgrpo_cli.grading.routes import Route, route_item
from exgrpo_cli.grading.verifiers import ALLOWED, grade_gym, require_task
from exgrpo_cli.questions.made.gym import make_gym
from exgrpo_cli.questions.question_file import read_questions, write_questions

reasoning_gym = pytest.importorskip("reasoning_gym")

RUNS_CODE = {"eval", "exec", "compile", "parse_expr", "sympify", "literal_eval", "parse_latex", "run", "__import__"}
SMALL = GymSettings(num_train=6, num_heldout=3, options='{"max_word_len": 5}')


@pytest.fixture(scope="module")
def words():
    return make_gym("gym:spell_backward", SMALL)


def test_no_allowed_scorer_names_what_runs_code_or_looks_things_up_in_its_data_set():
    """Without a question's options a scorer may use methods of its data set, none of which reads a setting."""
    factory = pytest.importorskip("reasoning_gym.factory")
    for task, reason in ALLOWED.items():
        assert reason and task in factory.DATASETS
        kind = factory.DATASETS[task][0]
        nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(kind.score_answer)))))
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        assert not (names | {node.attr for node in nodes if isinstance(node, ast.Attribute)}) & RUNS_CODE, task
        used = set(re.findall(r"self\.(\w+)", inspect.getsource(kind.score_answer)))
        if task != "word_ladder":
            assert all(callable(getattr(kind, name, None)) for name in used), task
            assert not any("self.config" in inspect.getsource(getattr(kind, name)) for name in used), task


@pytest.mark.parametrize("task", ["number_sorting", "countdown", "polynomial_multiplication", "bf", "spell_backwards"])
def test_other_tasks_are_refused_in_one_line(task):
    with pytest.raises(InputError, match=f"gym:{task} is not among the {len(ALLOWED)} tasks .*never as code") as caught:
        require_task(task)
    assert "\n" not in str(caught.value)


def test_questions_are_disjoint_and_golds_score(words):
    assert (len(words.train), len(words.heldout)) == (6, 3)
    other = make_gym("gym:spell_backward", replace(SMALL, seed=3))
    asked = [{question.prompt[0].content for question in part} for part in (words.train, other.heldout)]
    assert not asked[0] & asked[1]
    for question in words.train:
        assert question.source == "gym:spell_backward" and question.prompt[0].content.endswith("in \\boxed{}.")
        assert grade_gym(question.metadata, question.answer).verdict is Verdict.CORRECT


@pytest.mark.parametrize("length", [9, 11, 18])
def test_part_of_a_point_and_more_than_one_are_no_success(length):
    """Nine ninths of a point, added one by one, are 1.0000000000000002: so much for the gold with junk behind it."""
    gold = "abcdefghijklmnopqr"[:length]
    entry = {"answer": gold, "metadata": {}}
    metadata = json.dumps({"verifier": "gym:spell_backward", "entry": entry})
    score = reasoning_gym.create_dataset("spell_backward", size=1).score_answer
    # The scorer gives a point for each letter in its place.
    assert score(f"{gold}x", entry) > 1 > score(f"{gold[:-1]}x", entry) > 0
    for answer, verdict in ((gold, Verdict.CORRECT), (f"{gold}x", Verdict.WRONG), (f"{gold[:-1]}x", Verdict.WRONG)):
        assert grade_gym(metadata, answer).verdict is verdict


@pytest.mark.parametrize("task", ALLOWED)
def test_right_answers_of_every_task_have_exactly_the_full_score(task):
    for entry in reasoning_gym.create_dataset(task, size=5, seed=1):
        known = {"answer": entry["answer"], "metadata": entry["metadata"]}
        metadata = json.dumps({"verifier": f"gym:{task}", "entry": known}, default=str)
        assert grade_gym(metadata, entry["answer"]).verdict is Verdict.CORRECT


@pytest.mark.parametrize("length", [3, 4, 5])
def test_words_of_a_ladder_have_the_length_that_the_options_ask_for(length):
    options = json.dumps({"min_word_length": length, "max_word_length": length})
    ladders = make_gym("gym:word_ladder", GymSettings(num_train=4, num_heldout=2, options=options))
    for question in (*ladders.train, *ladders.heldout):
        assert {len(word) for word in question.answer.split(",")} == {length}
        first, *_, last = question.answer.split(",")
        assert grade_gym(question.metadata, f"{first},{'Q' * length},{last}").verdict is Verdict.WRONG


class Unscored(reasoning_gym.factory.ProceduralDataset):
    """A task whose scorer gives its own golds half a point."""

    def __getitem__(self, idx):
        return {"question": f"{idx % 4} is", "answer": "what", "metadata": {}}

    def score_answer(self, answer, entry):
        return 0.5


@pytest.mark.slow
def test_as_many_ladders_as_are_asked_for_without_options():
    """20 draws of each of 1,010 questions are 20,200, and a data set of ladders has 20,000 at most."""
    assert len(make_gym("gym:word_ladder", GymSettings(num_train=1000, num_heldout=10)).train) == 1000


def test_golds_that_do_not_score_themselves_are_counted_where_a_task_runs_out(monkeypatch):
    monkeypatch.setitem(reasoning_gym.factory.DATASETS, "unscored", (Unscored, SimpleNamespace))
    monkeypatch.setitem(ALLOWED, "unscored", "of this test")
    left_out = "0 training and 0 held-out questions, with 4 left out whose gold does not score itself: ask for fewer"
    with pytest.raises(InputError, match=rf"gym:unscored runs out at {left_out} \(gym.num_train, gym.num_heldout\)"):
        make_gym("gym:unscored", SMALL)
    with pytest.raises(InputError, match=r"gym:count_bits runs out at \d training and \d held-out questions: ask"):
        make_gym("gym:count_bits", replace(SMALL, options='{"max_n": 5}'))


def test_the_default_grader_hands_what_was_boxed_to_the_scorer(words):
    question = words.train[0]
    item = replace(boxed(question.answer, "olleh"), metadata=question.metadata)
    task = route_item(Route(grader="math", max_answer_chars=100), item)
    assert (task.kind, task.answer, task.metadata) == ("gym", "olleh", question.metadata)


@pytest.mark.slow
def test_the_audit_drops_golds_that_do_not_score_themselves(words, tmp_path, capsys):
    good, bad = words.train[0], replace(words.train[1], metadata=words.train[2].metadata)
    write_questions(tmp_path / "mine.parquet", [good, bad], {})
    output = tmp_path / "kept.parquet"
    assert run(["prepare", str(tmp_path / "mine.parquet"), "--output", str(output)]) == 0
    assert [question.metadata for question in read_questions(output).questions] == [good.metadata]
    assert "gold does not verify against itself" in capsys.readouterr().out


def test_wrong_options_and_used_up_tasks_are_named():
    for options, what in (
        ('{"colour": 1}', ".*'colour'"),
        ('{"min_word_len": 60, "max_word_len": 60}', "Cannot choose from an empty"),
    ):
        with pytest.raises(InputError, match=rf"gym.options = .* do not suit gym:spell_backward: {what}"):
            make_gym("gym:spell_backward", replace(SMALL, options=options))
