"""The fresh stream: each pass visits every unretired question once, nothing twice in a step, and it resumes exactly."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exgrpo_cli.base import data, errors
from exgrpo_cli.questions.stream import QuestionStream

STEPS = data.tables(__file__, "cases.toml")["steps"]
IDS = [f"q{number}" for number in range(10)]


def stream(ids=IDS, seed=0):
    return QuestionStream(ids, np.random.default_rng(seed))


def take(one, num, retired=(), experiential=()):
    return one.take(num, retired=frozenset(retired), experiential=frozenset(experiential))


def test_a_pass_is_the_seeded_permutation():
    expected = [IDS[index] for index in np.random.default_rng(7).permutation(10)]
    one = stream(seed=7)
    assert take(one, 4) + take(one, 4) + take(one, 2) == expected and Counter(take(one, 10)) == Counter(IDS)


def test_a_batch_across_two_passes_has_no_question_twice_and_the_repeated_ones_lead_the_next_step():
    # Ten questions, four a step: step 3 takes the last two of pass 1 and two of pass 2. A question of the first two met
    # again in pass 2 waits, so after 5 steps = 20 draws every question has been drawn exactly twice.
    for seed in range(20):
        one = stream(seed=seed)
        steps = [take(one, 4) for _ in range(5)]
        assert all(len(set(step)) == 4 for step in steps)
        assert Counter(question for step in steps for question in step) == dict.fromkeys(IDS, 2)


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS.keys())
def test_questions_wait_and_retire_by_their_places_in_the_pass(steps):
    """Steps of (number, retired, experiential, drawn), each by its place in the pass."""
    order, one = take(stream(seed=1), 10), stream(seed=1)
    for num, retired, experiential, drawn in steps:
        found = take(one, num, [order[place] for place in retired], [order[place] for place in experiential])
        assert found == [order[place] for place in drawn]


def test_with_few_left_the_batch_shrinks_and_with_none_it_is_empty():
    one = stream()
    retired = set(IDS[:7])
    for _ in range(5):
        assert sorted(take(one, 8, retired)) == IDS[7:]
    assert take(one, 8, retired, experiential=IDS[7:]) == [] and sorted(take(one, 8, retired)) == IDS[7:]
    assert take(one, 8, set(IDS)) == take(one, 8, set(IDS)) == []
    # What returns after all were retired flows again.
    one.readmit(["q4", "q2"])
    assert sorted(take(one, 3, set(IDS) - {"q2", "q4"})) == ["q2", "q4"]


def test_readmitted_questions_return_in_the_current_pass_at_a_random_place():
    # Ten draws exhaust a pass; q0 and q1 retire, the next pass of eight begins with two draws, then q0 returns: it must
    # come within the seven draws left (six of the pass and itself), and over many seeds at every one of their places.
    places = Counter()
    for seed in range(400):
        one = stream(seed=seed)
        take(one, 10)
        take(one, 2, {"q0", "q1"})
        one.readmit(["q0"])
        rest = take(one, 7, {"q1"})
        places[rest.index("q0")] += 1
        assert len(set(rest)) == 7
    # 400 draws over 7 places: 57.1 expected, standard deviation 7.0; 29 is 4 deviations below.
    assert len(places) == 7 and min(places.values()) >= 29


def test_readmitting_a_question_still_ahead_does_not_draw_it_twice_in_a_pass():
    order = take(stream(seed=2), 10)
    one = stream(seed=2)
    take(one, 2)
    one.readmit([order[5]])
    assert take(one, 8) == order[2:]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 30), st.integers(1, 12), st.integers(0, 25))
def test_a_resumed_stream_goes_on_bit_for_bit(seed, num_questions, num, cut):
    ids = [f"q{number}" for number in range(num_questions)]

    def drive(one, steps, choose):
        drawn = []
        for _ in range(steps):
            experiential = set(choose.choice(ids, size=2).tolist())
            retired = set(choose.choice(ids, size=3).tolist())
            drawn.append(take(one, num, retired, experiential))
            one.readmit(sorted(retired))
            assert not retired & set(drawn[-1]) and not experiential & set(drawn[-1])
            assert len(set(drawn[-1])) == len(drawn[-1]) <= num
        return drawn

    whole = drive(stream(ids, seed), 26, np.random.default_rng(seed))
    choose = np.random.default_rng(seed)
    first = stream(ids, seed)
    head = drive(first, cut, choose)
    saved = json.loads(json.dumps(first.state()))
    second = stream(ids, seed + 1)
    second.restore(saved)
    assert head + drive(second, 26 - cut, choose) == whole


def test_the_state_of_another_question_set_is_refused():
    with pytest.raises(errors.InputError, match="another question set than these 9 questions"):
        stream(IDS[:9]).restore(stream().state())


class Counting:
    """A container that counts how often it is asked."""

    def __init__(self, members):
        self.members, self.asked = frozenset(members), 0

    def __contains__(self, question):
        self.asked += 1
        return question in self.members


def test_a_take_costs_what_it_draws_not_what_is_stored():
    ids = [f"q{number}" for number in range(20_000)]
    one = stream(ids)
    retired, experiential = Counting([]), Counting([])
    for _ in range(100):
        one.take(32, retired=retired, experiential=experiential)
    assert retired.asked == experiential.asked == 3200
    # With ten of 20,000 left: one walk over the rest of the pass, then about two questions asked about per draw.
    retired = Counting(ids[10:])
    one.take(10, retired=retired, experiential=experiential)
    retired.asked = 0
    for _ in range(50):
        assert len(one.take(32, retired=retired, experiential=experiential)) == 10
    assert retired.asked <= 50 * 10 * 3
