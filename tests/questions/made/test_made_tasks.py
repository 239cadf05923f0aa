"""Every made task: disjoint pools and levels; of countdown and sums modulo m golds, traces and the way into a run."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from question_sources import question as asked_of

from exgrpo_cli.base import data, errors, reporter
from exgrpo_cli.config import layers, names
from exgrpo_cli.config.sections.data import ArithmeticSettings, CountdownSettings, ModularSettings, WordProblemSettings
from exgrpo_cli.grading.verifiers import grade_countdown, read_metadata, sum_asked, valid_trace
from exgrpo_cli.models.tiny import RECIPES, draw_example
from exgrpo_cli.questions.made import countdown, make_split, pools, sums
from exgrpo_cli.training.questions import load_questions

CASES = data.tables(__file__, "cases.toml")
SIZES = {"num_train": 60, "num_heldout": 20}
SMALL = {
    "arithmetic": ArithmeticSettings(**SIZES, levels=(1, 2, 3)),
    "countdown": CountdownSettings(**SIZES),
    "modular": ModularSettings(**SIZES),
    "word-problems": WordProblemSettings(**SIZES),
}
SOUND = sums.TraceMix(guessed=0.0, slipped=0.0, malformed=0.0, checked=0.0)


def split_of(source, settings=None):
    return make_split(source, SimpleNamespace(**{names.section_of_made(source): settings or SMALL[source]}))


def prompts(*parts):
    return {question.prompt[-1].content for part in parts for question in part}


def started(source):
    """What the warm start shows, of a task that it has a recipe for."""
    rng, recipe = np.random.default_rng(0), RECIPES.get(source)
    return {draw_example(recipe, level, rng)[0] for level in recipe.levels for _ in range(60)} if recipe else set()


@pytest.mark.parametrize("source", SMALL)
def test_questions_differ_share_their_levels_and_stay_in_their_pools(source):
    split, levels = split_of(source), SMALL[source].levels
    assert len(prompts(split.train)) == len({question.id for question in split.train}) == 60
    assert len(prompts(split.heldout)) == 20
    counts = {level: sum(question.level == str(level) for question in split.train) for level in levels}
    assert counts == dict.fromkeys(levels, 60 // len(levels))
    # The same seed makes the same questions, another seed others, and a size moves its own set alone.
    fewer, other = (split_of(source, replace(SMALL[source], **changed)) for changed in ({"num_train": 12}, {"seed": 7}))
    assert split_of(source) == split and fewer.heldout == split.heldout and other.train != split.train
    # No seed brings a question into another pool.
    train, heldout, warm = prompts(split.train, other.train), prompts(split.heldout, other.heldout), started(source)
    assert not train & heldout and not train & warm and not heldout & warm


def test_golds_are_right_by_a_plain_reference():
    for question in split_of("countdown").train:
        numbers, target = re.fullmatch(r"([\d,]+)=(\d+)\?", question.prompt[0].content).groups()
        # The program's own expressions, checked against the pattern, are safe to evaluate in a test.
        assert re.fullmatch(r"[\d+*()-]+", question.answer) and eval(question.answer) == int(target)
        assert sorted(re.findall(r"\d+", question.answer)) == sorted(numbers.split(","))
    for question in split_of("modular").train:
        terms, modulus = re.fullmatch(r"\(([\d+]+)\)%(\d+)=\?", question.prompt[0].content).groups()
        assert int(question.answer) == sum(map(int, terms.split("+"))) % int(modulus) and modulus == "5"


def test_an_attempt_is_written_line_by_line_and_as_one_expression():
    # 8+4 = 12, times 3 = 36, less 2 = 34; the sum needs brackets once it is multiplied.
    attempt = countdown.Attempt(numbers=(8, 4, 3, 2), signs=("+", "*", "-"), values=(12, 36, 34))
    assert attempt.lines() == ["8+4=12", "12*3=36", "36-2=34"]
    assert (attempt.expression(), attempt.result) == ("(8+4)*3-2", 34)
    assert countdown.Attempt(numbers=(8, 3, 4), signs=("*", "*"), values=(24, 96)).expression() == "8*3*4"


def test_a_search_misses_before_it_meets_the_target():
    rng = np.random.default_rng(3)
    solution = countdown.draw_solved(4, pools.Pool.WARM_START, rng)
    for _ in range(20):
        *missed, found = countdown.write_search(solution, 2, rng).split("\nno\n")
        assert found.splitlines() == solution.lines() and len(missed) <= 2
        assert all(not text.endswith(f"={solution.result}") for text in missed)


# The last one is too long.
@pytest.mark.parametrize(
    ("answer", "verdict"), [*CASES["countdown"].items(), ("(" * 99 + "8*3+4-2" + ")" * 99, "wrong")]
)
def test_countdown_answers(answer, verdict):
    # 8/(3-8/3) = 24 by way of 1/3, which no double is.
    exact = {"numbers": [3, 3, 8, 8], "target": 24}
    known = exact if answer == "8/(3-8/3)" else {"numbers": [2, 3, 4, 8], "target": 26}
    assert grade_countdown(known, answer) == verdict


SUM = ("(7+5+8)%5=?", '{"trace": "sum", "terms": [7, 5, 8], "modulus": 5}')
RUNNING = ("9+2-4+7-3=?",)


@pytest.mark.parametrize(("question", "table"), [(SUM, "modular"), (RUNNING, "running")])
def test_the_working_of_a_sum(question, table):
    """Lines of a table are written apart by spaces, behind an arrow the answer."""
    for working, valid in CASES[table].items():
        lines, _, answer = working.rpartition("-> ")
        response = lines.replace(" ", "\n").replace("_", " ") + f"</think>\n\\boxed{{{answer}}}"
        assert valid_trace(asked(*question), response) is valid, working


def test_traces_that_cannot_be_checked_are_neither():
    assert valid_trace(asked("7+5=?", '{"verifier": "countdown"}'), "") is None
    assert valid_trace(replace(asked(*RUNNING), source="my own"), "9+2=11") is None
    assert valid_trace(asked("How much is 7+5?"), "7+5=12") is None


def asked(text, metadata=None):
    return asked_of(text, answer="0", source="arithmetic", metadata=metadata)


def test_sound_traces_of_the_warm_start_are_valid_and_faults_are_not():
    rng = np.random.default_rng(0)
    for question in split_of("modular").train:
        terms = tuple(read_metadata(question.metadata)["terms"])
        assert valid_trace(question, sums.write_trace(terms, SOUND, rng, 5))
        guessed = sums.write_trace(terms, sums.TraceMix(guessed=1.0, slipped=0.0, malformed=0.0), rng, 5)
        assert guessed.endswith(f"\\boxed{{{question.answer}}}") and not valid_trace(question, guessed)
    for question in split_of("arithmetic").train:
        terms = sum_asked(question).terms
        assert valid_trace(question, sums.write_trace(terms, replace(SOUND, checked=0.5, double=0.3, swapped=0.3), rng))
        slipped = sums.write_trace(terms, sums.TraceMix(guessed=0.0, slipped=1.0, malformed=0.0), rng)
        assert not valid_trace(question, slipped)


@pytest.mark.parametrize("source", ["countdown", "modular"])
def test_start_and_held_out_questions_follow_the_source(source):
    sizes = [f"{source}.num_train=16", f"{source}.num_heldout=8"]
    config = layers.build_config(assignments=[f"data.train={source}", *sizes])
    assert (config.data.heldout, config.data.heldout_name, config.tiny.task) == ("auto", source, source)
    questions = load_questions(config, reporter.SilentReporter())
    assert (len(questions.train), len(questions.heldout)) == (16, 8)
    assert all(json.loads(question.metadata) for question in questions.train)
    # Whoever wants another start says so.
    assert layers.build_config(assignments=[f"data.train={source}", "tiny.task=arithmetic"]).tiny.task == "arithmetic"


def test_what_cannot_be_made_is_refused_in_one_line():
    config = layers.build_config(assignments=["modular.num_train=900", "modular.levels=[2]"])
    with pytest.raises(errors.InputError, match=r"Sums of level 2 run out at \d+ of the 900 asked for: ask"):
        make_split("modular", config)


@pytest.mark.parametrize("num_heldout", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_numbers_to_20_give_eight_studies_held_out_questions_that_no_other_has_had(num_heldout: int) -> None:
    """So many of three numbers each, none of them published: the claims have numbers to 9 and seeds 0 to 5."""

    def asked(**settings: object) -> tuple[set[str], set[str]]:
        split = split_of("countdown", CountdownSettings(**settings))
        return prompts(split.train), prompts(split.heldout)

    studies = [
        asked(seed=seed, largest=20, levels=(3,), num_train=40, num_heldout=num_heldout) for seed in range(6, 14)
    ]
    assert [len(heldout) for _, heldout in studies] == [num_heldout] * 8
    new = set.union(*(heldout for _, heldout in studies))
    assert len(new) == 8 * num_heldout and not new & set.union(*(train for train, _ in studies))
    assert not new & set.union(*(part for seed in range(6) for part in asked(seed=seed)))
    numbers = [list(map(int, text.partition("=")[0].split(","))) for text in new]
    assert all(9 < max(each) <= 20 and min(each) >= 1 for each in numbers)
