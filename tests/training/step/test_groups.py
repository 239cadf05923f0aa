"""Groups: advantages over all members, rows, what a batch's metrics count; what other graders say of a validation."""

import math
from dataclasses import replace

import numpy as np
import pytest

from exgrpo_cli.algo.advantages import centred_advantages
from exgrpo_cli.base import types
from exgrpo_cli.config.sections.objective import ObjectiveSettings
from exgrpo_cli.config.sections.run import GradingSettings
from exgrpo_cli.engines.policy.policy import UpdateReport
from exgrpo_cli.evaluation.sampling import Evaluation, QuestionRecord, Sample
from exgrpo_cli.grading import GradingPool
from exgrpo_cli.replay import by_question, place
from exgrpo_cli.replay.place import whole_share
from exgrpo_cli.runs.result import remarks
from exgrpo_cli.training import metrics, validation
from exgrpo_cli.training.loop import advantage_of
from exgrpo_cli.training.state import RunState
from exgrpo_cli.training.step.groups import Group, UnderWay

QUESTION = types.Question(id="q", prompt=(types.Message(role="user", content="1+1=?"),), answer="2", source="test")


def member(
    verdict: types.Verdict, tokens: int = 3, stop: types.StopReason = types.StopReason.EOS, engine: float = -0.5
) -> types.GradedRollout:
    rollout = types.Rollout(
        question_id="q",
        member=0,
        token_ids=np.arange(tokens, dtype=np.int32),
        engine_logprobs=np.full(tokens, engine, dtype=np.float32),
        stop_reason=stop,
        weight_version=0,
    )
    return types.GradedRollout(rollout=rollout, text="", grade=types.Grade.of(verdict))


def scores(tokens: int = 3, logprob: float = -0.5) -> types.TokenScores:
    return types.TokenScores(
        logprobs=np.full(tokens, logprob, dtype=np.float32), entropies=np.full(tokens, 0.25, dtype=np.float32)
    )


def trajectory(logprob: float = -1.0, tokens: int = 2) -> types.Trajectory:
    return types.Trajectory(
        trajectory_id=7,
        question_id="q",
        token_ids=np.arange(tokens, dtype=np.int32),
        behaviour_logprobs=np.full(tokens, logprob, dtype=np.float32),
        step_born=3,
        weight_version=2,
    )


def group(*verdicts: types.Verdict, replayed: bool = False) -> Group:
    return Group(
        question=QUESTION,
        prompt_ids=np.array([5, 6], dtype=np.int32),
        fresh=tuple(member(verdict) for verdict in verdicts),
        scores=tuple(scores() for _ in verdicts),
        replayed=stored_rows(1) if replayed else (),
    )


def stored_rows(*rewards: float) -> tuple[place.Replayed, ...]:
    rows = [replace(trajectory(), reward=reward, correct=reward > 0) for reward in rewards]
    return tuple(place.Replayed(trajectory=row, behaviour_logprobs=row.behaviour_logprobs) for row in rows)


C, W = types.Verdict.CORRECT, types.Verdict.WRONG


@pytest.mark.parametrize(
    ("fresh", "stored", "how", "advantages", "k"),
    [
        # K = 4, k = 1, two successes beside: rewards 1, 0, 0, 0, 1, 1 of mean 1/2; the joined ones do not count in k.
        ((C, W, W, W), (1, 1), {"joined": True}, [0.5, -0.5, -0.5, -0.5, 0.5, 0.5], 1),
        # Advantages of their own: 3 of 8 stored rows right, 1 - 3/8 = .625 three times, -.375 five times; all right: 0.
        (
            (C, W), (1, 1, 1, 0, 0, 0, 0, 0), {"joined": True, "own_advantages": True},
            [0.5, -0.5, *[0.625] * 3, *[-0.375] * 5], 1,
        ),
        ((C, W), (1,) * 8, {"joined": True, "own_advantages": True}, [0.5, -0.5, *[0.0] * 8], 1),
        # K = 4, two stored successes stand in for rollouts: k counts them, the mean 3/4 is over all four.
        ((C, W), (1, 1), {}, [0.25, -0.75, 0.25, 0.25], 3),
        # Rewards 1, 0, 0 and the replayed 1: mean 1/2; without it the mean would be 1/3.
        ((C, W, types.Verdict.NO_ANSWER), (1,), {}, [0.5, -0.5, -0.5, 0.5], 2),
    ],
)  # fmt: skip
def test_stored_rows_beside_rollouts_or_in_their_place(fresh, stored, how, advantages, k) -> None:
    found = replace(group(*fresh), replayed=stored_rows(*stored), **how)
    rows = found.rows(centred_advantages)
    assert [row.advantage for row in rows] == advantages
    assert [row.replayed for row in rows] == [False] * len(fresh) + [True] * len(stored)
    assert found.success_count == k and found.is_mixed and found.is_experiential != found.joined


def test_an_all_wrong_group_trains_by_its_own_confidences() -> None:
    """c = (.8, .4): r~ = -1/2 and -1/6, of mean -1/3."""
    own = replace(group(W, W), scores=(scores(2, math.log(0.8)), scores(3, math.log(0.4))))
    settings = ObjectiveSettings(baseline="confidence", advantage="normalised", all_wrong_weight=0.5)
    rows = own.rows(advantage_of(own, settings, RunState()))
    np.testing.assert_allclose([row.advantage for row in rows], [-1 / 12, 1 / 12], rtol=1e-6)


def test_the_replayed_row_keeps_its_own_behaviour_log_probs() -> None:
    """Were they taken from this step's scores (-0.5), the ratio would be 1 and hide the off-policyness."""
    row = group(types.Verdict.CORRECT, replayed=True).rows(centred_advantages)[-1]
    np.testing.assert_array_equal(row.behaviour_logprobs, np.array([-1.0, -1.0], dtype=np.float32))
    np.testing.assert_array_equal(row.sequence.response_ids, [0, 1])
    np.testing.assert_array_equal(row.sequence.prompt_ids, [5, 6])


def test_a_timeout_is_a_failure_of_the_verifier_and_no_answer_is_not() -> None:
    assert group(types.Verdict.CORRECT, types.Verdict.TIMEOUT).verifier_failed
    assert group(types.Verdict.CORRECT, types.Verdict.CRASHED).verifier_failed
    assert not group(types.Verdict.WRONG, types.Verdict.NO_ANSWER, types.Verdict.UNPARSABLE_GOLD).verifier_failed


def test_batch_metrics_leave_experiential_groups_to_replay_keys() -> None:
    """Fresh: 1 of 2 and 2 of 2 correct, pass@1 3/4; experiential: 0 of 2 fresh members."""
    groups = [group(C, W), group(C, C), group(W, W, replayed=True)]
    expected = {"batch/pass_at_1": 0.75, "reward/mean": 0.75, "batch/solve_all": 0.5, "batch/solve_none": 0.0}
    expected |= {"replay/pass_at_1": 0.0, "tokens/generated": 6 * 3, "verdict/wrong": 3, "verdict/no_answer": 0}
    assert expected.items() <= metrics.batch_metrics(groups).items()


def test_the_start_threshold_sees_all_rollouts_of_the_batch() -> None:
    assert metrics.pass_at_1([group(C, W), group(W, W)]) == 0.25 and math.isnan(metrics.pass_at_1([]))


def test_log_prob_gap_is_absolute() -> None:
    """Trainer -0.5; engine -0.4 for one rollout and -0.7 for the other: gaps 0.1 and 0.2 over 3 tokens each."""
    rollouts = [member(types.Verdict.WRONG, engine=engine).rollout for engine in (-0.4, -0.7)]
    gap = metrics.score_gaps(rollouts, [scores(), scores()])
    assert "policy/entropy_gap_mean" not in gap
    both = zip(rollouts, (0.5, 0.25), strict=True)
    told = [replace(each, engine_entropies=np.full(3, entropy, np.float32)) for each, entropy in both]
    entropies = metrics.score_gaps(told, [scores(), scores()])
    assert entropies["policy/entropy_gap_mean"] == 0.125 and entropies["policy/entropy_gap_max"] == 0.25
    assert gap["policy/logprob_gap_mean"] == pytest.approx(0.15, abs=1e-6)
    assert gap["policy/logprob_gap_max"] == pytest.approx(0.2, abs=1e-6)


def test_the_engines_log_probs_weigh_fresh_tokens_up_to_the_cap() -> None:
    """Trainer -0.5; engine -0.5 - ln 1.5 and -0.5 - ln 4: pi_old / pi_engine is 1.5 and 4, the cap 2 cuts the latter.

    Rewards 1 and 0 are advantages 0.5 and -0.5, so tokens get 0.75 and -1. The replayed row keeps its own ratio.
    """
    fresh = member(C, engine=-0.5 - math.log(1.5)), member(W, engine=-0.5 - math.log(4))
    pair = replace(group(C, W), fresh=fresh, tis_cap=2.0)
    rows = pair.rows(centred_advantages)
    np.testing.assert_allclose(rows[0].token_advantages, [0.75] * 3, rtol=1e-6)
    np.testing.assert_allclose(rows[1].token_advantages, [-1.0] * 3, rtol=1e-6)
    # The clipped ratio stays pi_theta / pi_old; what the ledger stores is who sampled.
    np.testing.assert_array_equal(rows[0].behaviour_logprobs, scores().logprobs)
    np.testing.assert_array_equal(pair.behaviour_logprobs()[0], pair.fresh[0].rollout.engine_logprobs)
    values = metrics.truncation([pair])
    assert values["policy/tis_weight"] == pytest.approx(1.75, rel=1e-6) and values["policy/tis_truncated"] == 0.5
    # Recomputed log-probs need no weights.
    own = replace(pair, tis_cap=None)
    assert [row.importance_weights for row in own.rows(centred_advantages)] == [None, None]
    assert metrics.truncation([own]) == {}
    np.testing.assert_array_equal(own.behaviour_logprobs()[0], own.scores[0].logprobs)


def test_update_metrics_average_means_and_take_maxima_of_maxima() -> None:
    def report(ratio: float, largest: float, *, applied: bool = True) -> UpdateReport:
        return UpdateReport(
            applied=applied,
            skip_reason="" if applied else "non-finite gradient",
            grad_norm=1.0 if applied else math.inf,
            loss=0.5,
            num_tokens=10,
            metrics={"policy/ratio_fresh": ratio, "policy/ratio_fresh_max": largest},
        )

    values = metrics.update_metrics([report(1.0, 1.5), report(2.0, 3.0, applied=False)])
    expected = {"policy/ratio_fresh": 1.5, "policy/ratio_fresh_max": 3.0, "tokens/trained": 20}
    assert (expected | {"optim/updates_applied": 1, "optim/updates_skipped": 1}).items() <= values.items()
    line = metrics.journal_line(1, "mixed", values)
    assert "optim/grad_norm" not in line, "JSON has no infinity: the key is absent"
    assert list(line)[:2] == ["step", "phase"]


@pytest.mark.parametrize(
    ("past", "now", "share"),
    [
        # log w of two tokens 0 and log 3: w = 1, 3; (1 + 3)^2 / (2 * (1 + 9)) = 0.8.
        (-1.0, (-1.0, -1.0 + math.log(3)), 0.8),
        # One token 200 nats likelier than it was: all the weight is on it, so 1 of 2 tokens counts.
        (-200.0, (0.0, -200.0), 0.5),
    ],
)
def test_effective_sample_share_by_hand(past: float, now: tuple[float, float], share: float) -> None:
    found = types.TokenScores(logprobs=np.array(now, dtype=np.float32), entropies=np.zeros(2, dtype=np.float32))
    assert by_question.effective_sample_share([trajectory(logprob=past)], [found]) == pytest.approx(share, abs=1e-6)


@pytest.mark.parametrize(("ratio", "questions", "expected"), [(0.5, 32, 16), (0.5, 5, 2), (0.29, 100, 29), (0.0, 8, 0)])
def test_experiential_questions_are_the_floor_of_rho_times_b(ratio: float, questions: int, expected: int) -> None:
    """0.29 * 100 is 28.999999999999996 in binary: the floor of the product as written is 29."""
    assert whole_share(ratio, questions) == expected


FORMAT = types.AnswerFormat(opens_think=False, requires_box=False, require_eos=False)


def answered(question: str, source: str, responses: dict[str, types.Verdict]) -> Evaluation:
    """An evaluation of one question whose answer is 7, by these responses and verdicts."""
    asked = replace(QUESTION, prompt=(types.Message(role="user", content=question),), answer="7", source=source)
    samples = tuple(
        Sample(
            member=i, seed=i, text=text, num_tokens=3, stop_reason=types.StopReason.EOS, logprob=None, verdict=verdict
        )
        for i, (text, verdict) in enumerate(responses.items())
    )
    return Evaluation(records=(QuestionRecord(question=asked, samples=samples),))


def test_oat_stands_beside_math_verify_and_beside_no_other():
    # Oat's grader wants a box.
    evaluation = answered("3 + 4", "here", {r"\boxed{7}": C, "The answer is 7.": C, r"\boxed{8}": W, r"\boxed{9}": W})
    with GradingPool(GradingSettings(workers=1)) as pool:
        found = validation.beside(evaluation, "math", FORMAT, pool)
        assert validation.beside(evaluation, "exact", FORMAT, pool) == {}
    assert (found["oat"]["pass_at_1"], found["oat"]["disagreements"]) == (0.25, 1)
    score = validation.score_json(evaluation, found)
    assert score["pass_at_1"] == 0.5
    # One question that is answered rightly in two samples of four.
    at_four = score["pass_at_k"]["4"]
    assert at_four["value"] == 1.0
    constant = "not significantly above 1.000, what answering 7 throughout gets"
    told = f"; pass@4 1.000 [{at_four['low']:.3f}, 1.000]; {constant}"
    assert remarks(score) == f"{told}; by the second grader oat 0.250 (differs on 1 answers)"
    assert remarks(validation.score_json(evaluation, {})) == told


def test_answers_that_are_right_in_every_step_are_counted():
    texts = {f"{steps}</think>\n\\boxed{{7}}": C for steps in ("3+4=7\n", "", "3+4=8\n")} | {"3+4=7\n</think>\n8": W}
    evaluation = answered("3+4=?", "arithmetic", texts)
    assert validation.valid_counts(evaluation).tolist() == [1]
    score = validation.score_json(evaluation, {})
    assert (score["pass_at_1"], score["valid_pass_at_1"]) == (0.75, 0.25)
    valid = "; 0.250 right in every step of the working, not in the answer alone"
    assert f"{valid}; not significantly above 1.000" in remarks(score)
    evaluation = answered("3+4=?", "mine", texts)
    assert validation.valid_counts(evaluation) is None and "valid_pass_at_1" not in validation.score_json(
        evaluation, {}
    )


def test_what_carries_over_is_counted() -> None:
    """Four rollouts under way, one of them unfinished; two trained, of one and two versions: 1/4 and 1.5.

    12 tokens in 3 slots take the 6 steps of the longest row: 18 places, of which 6 wait. Few slots are all busy: none.
    """
    ended, spans = member(types.Verdict.CORRECT), member(types.Verdict.WRONG)
    spans = replace(spans, rollout=replace(spans.rollout, weight_version=3, earlier=((2, 1),)))
    trained = replace(group(types.Verdict.CORRECT, types.Verdict.WRONG), fresh=(ended, spans))
    left = [
        member(types.Verdict.WRONG, stop=stop).rollout for stop in (types.StopReason.UNFINISHED, types.StopReason.EOS)
    ]
    found = metrics.carrying([trained], [UnderWay(question_id="p", rollouts=left)], [4, 2, 6], 8)
    assert found.pop("rollout/waiting") == pytest.approx(1 / 3)
    assert found == {
        "tokens/generated": 12, "rollout/carried": 0.25, "rollout/versions": 1.5, "rollout/versions_max": 2,
    }  # fmt: skip
    assert metrics.carrying([trained], [], [4, 2, 6], 2)["rollout/waiting"] == pytest.approx(0)
