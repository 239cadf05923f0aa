"""What other graders say of a validation."""

from exgrpo_cli.base.types import AnswerFormat, Message, Question, StopReason, Verdict
from exgrpo_cli.config.sections.run import GradingSettings
from exgrpo_cli.evaluation.sampling import Evaluation, QuestionRecord, Sample
from exgrpo_cli.grading import GradingPool
from exgrpo_cli.runs.result import remarks
from exgrpo_cli.training.metrics import beside, score_json, valid_counts

FORMAT = AnswerFormat(opens_think=False, requires_box=False, require_eos=False)
RESPONSES = {
    r"\boxed{7}": Verdict.CORRECT,
    "The answer is 7.": Verdict.CORRECT,  # Oat's grader wants a box.
    r"\boxed{8}": Verdict.WRONG,
    r"\boxed{9}": Verdict.WRONG,
}


def answered(question: str, source: str, responses: dict[str, Verdict]) -> Evaluation:
    """An evaluation of one question whose answer is 7, by these responses and verdicts."""
    asked = Question(id="seven", prompt=(Message(role="user", content=question),), answer="7", source=source)
    samples = tuple(
        Sample(member=i, seed=i, text=text, num_tokens=3, stop_reason=StopReason.EOS, logprob=None, verdict=verdict)
        for i, (text, verdict) in enumerate(responses.items())
    )
    return Evaluation(records=(QuestionRecord(question=asked, samples=samples),))


def test_oat_stands_beside_math_verify_and_beside_no_other():
    evaluation = answered("3 + 4", "here", RESPONSES)
    with GradingPool(GradingSettings(workers=1)) as pool:
        found = beside(evaluation, "math", FORMAT, pool)
        assert beside(evaluation, "exact", FORMAT, pool) == {}
    assert (found["oat"]["pass_at_1"], found["oat"]["disagreements"]) == (0.25, 1)
    score = score_json(evaluation, found)
    assert score["pass_at_1"] == 0.5
    # One question that is answered rightly in two samples of four.
    at_four = score["pass_at_k"]["4"]
    assert at_four["value"] == 1.0
    told = f"; pass@4 1.000 [{at_four['low']:.3f}, 1.000]; not above 1.000, what answering 7 throughout gets"
    assert remarks(score) == f"{told}; by oat 0.250 (differs on 1)"
    assert remarks(score_json(evaluation, {})) == told


def test_answers_that_are_right_in_every_step_are_counted():
    right, wrong = Verdict.CORRECT, Verdict.WRONG
    texts = {
        "3+4=7\n</think>\n\\boxed{7}": right,
        "</think>\n\\boxed{7}": right,
        "3+4=8\n</think>\n\\boxed{7}": right,
        "3+4=7\n</think>\n8": wrong,
    }
    evaluation = answered("3+4=?", "arithmetic", texts)
    assert valid_counts(evaluation).tolist() == [1]
    score = score_json(evaluation, {})
    assert (score["pass_at_1"], score["valid_pass_at_1"]) == (0.75, 0.25)
    assert "; 0.250 right in every step; not above 1.000" in remarks(score)
    evaluation = answered("3+4=?", "mine", texts)
    assert valid_counts(evaluation) is None and "valid_pass_at_1" not in score_json(evaluation, {})
