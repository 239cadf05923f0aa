"""Word problems: true answers, disjoint pools, levels."""

import re

import numpy as np

from exgrpo_cli.config.sections.data import WordProblemSettings
from exgrpo_cli.questions.made.pools import Pool
from exgrpo_cli.questions.made.word_problems import expression, make_word_problems, pool_of, tell, values_of


def test_every_problem_is_english_with_one_number_per_operation_and_a_box():
    for question in make_word_problems(WordProblemSettings(num_train=200, num_heldout=80)).train:
        story, _, request = question.prompt[0].content.rpartition("? ")
        assert "\\boxed{}" in request and not re.search(r"[{}]", story)
        # "one of 3 equal parts" repeats its number; otherwise there is one for the start and one for each operation.
        numbers = re.sub(r"With (\d+) people at work it takes one of \1", r"With \1 people at work it takes one", story)
        assert len(re.findall(r"\d+", numbers)) == int(question.level) + 1
        assert question.answer.isdigit() and 1 <= int(question.answer) <= 120


def test_the_answer_is_the_chain_worked_out_from_left_to_right():
    assert values_of((("", 7), ("+", 3), ("*", 2), ("/", 4), ("-", 2))) == [7, 10, 20, 5, 3]
    assert expression((("", 7), ("+", 3), ("*", 2))) == "7+3*2"


def test_one_chain_is_told_in_many_ways():
    chain = (("", 12), ("-", 4), ("*", 3))
    told = {tell(chain, np.random.default_rng(seed)) for seed in range(60)}
    assert len(told) > 50 and all({"12", "4", "3"} <= set(re.findall(r"\d+", text)) for text in told)


def test_worked_examples_are_earlier_turns_of_chains_that_nobody_is_asked():
    split = make_word_problems(WordProblemSettings(num_train=20, num_heldout=8, levels=(1, 2), examples=3))
    train, heldout = split.train, split.heldout
    turns = train[0].prompt[:-1]
    assert [turn.role for turn in turns] == ["user", "assistant"] * 3
    assert all(question.prompt[:-1] == turns for question in (*train, *heldout))
    # Levels in turn, and the box holds what the last operation gives.
    for turn, level in zip(turns[1::2], (1, 2, 1), strict=True):
        steps = re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", turn.content)
        assert len(steps) == level and turn.content.endswith(f"\\boxed{{{steps[-1][3]}}}.")
        chain = (("", int(steps[0][0])), *((sign, int(operand)) for _, sign, operand, _ in steps))
        assert pool_of(chain) is Pool.WARM_START and values_of(chain)[-1] == int(steps[-1][3])
