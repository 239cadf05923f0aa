"""Validations: the held-out questions, asked before, during and after training by the same seeds every time."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from exgrpo_cli.base import versions
from exgrpo_cli.base.reporter import answer_rows
from exgrpo_cli.base.types import AnswerFormat, Question, SamplingParams, Verdict
from exgrpo_cli.engines.generators import local_generator
from exgrpo_cli.engines.lora import fingerprint
from exgrpo_cli.evaluation import local, sampling
from exgrpo_cli.grading import GradingPool
from exgrpo_cli.grading.verifiers import sum_asked, valid_trace
from exgrpo_cli.questions.choices import options_of
from exgrpo_cli.runs import result, validations
from exgrpo_cli.runs.folder import HELDOUT, TRAINED, at_temperature
from exgrpo_cli.studies.measure import new_fall
from exgrpo_cli.training.state import ActiveRun, Parts


def beside(
    evaluation: sampling.Evaluation, own: str, answer_format: AnswerFormat, pool: GradingPool
) -> dict[str, dict[str, float]]:
    """pass@1 by each grader that always stands beside the run's `own`, with `low`, `high` and `disagreements`."""
    found = {}
    for grader in sampling.graders_beside(own, (record.question for record in evaluation.records)):
        verdicts = sampling.regrade(evaluation, answer_format, pool, grader=grader)
        score = evaluation.with_verdicts(verdicts).score()
        both = zip(evaluation.all_samples, verdicts, strict=True)
        apart = sum(sample.verdict.reward != verdict.reward for sample, verdict in both)
        found[grader] = {"pass_at_1": score.value, "low": score.low, "high": score.high, "disagreements": apart}
    return found


def valid_counts(evaluation: sampling.Evaluation) -> Int64[np.ndarray, " questions"] | None:
    """Samples of each question that are right in every step; None where the task cannot tell."""
    if sum_asked(evaluation.records[0].question) is None:
        return None
    return np.array(
        [
            sum(s.verdict is Verdict.CORRECT and bool(valid_trace(record.question, s.text)) for s in record.samples)
            for record in evaluation.records
        ],
        dtype=np.int64,
    )


def score_json(evaluation: sampling.Evaluation, second_graders: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """pass@1 of a validation with its 95 % interval, what `beside` found, and what a constant answer would get.

    Returns {`pass_at_1`, `low`, `high`, `pass_at_k`, `second_graders`, `constant_answer`, `questions`, `samples`,
    `mean_tokens`, `clipped`}; `pass_at_k` is {k: {`value`, `low`, `high`}} for k = 1, 2, 4, ... up to the samples of a
    question. Where steps can be checked, `valid_pass_at_1` is the share right in every step.
    """
    score, valid = evaluation.score(), valid_counts(evaluation)
    # The most frequent gold: whoever answers it throughout gets this pass@1.
    ((answer, count),) = Counter(record.question.answer for record in evaluation.records).most_common(1)
    return {
        "pass_at_1": score.value,
        "low": score.low,
        "high": score.high,
        "pass_at_k": evaluation.pass_at_k(),
        "second_graders": second_graders,
        "constant_answer": {"answer": answer, "pass_at_1": count / len(evaluation.records)},
        "questions": len(evaluation.records),
        "samples": evaluation.samples,
        "mean_tokens": evaluation.mean_tokens,
        "clipped": evaluation.share_clipped,
        **({} if valid is None else {"valid_pass_at_1": float(valid.mean()) / evaluation.samples}),
    }


def score_text(score: Mapping[str, Any]) -> str:
    """pass@1 of a validation with its interval, and what a reader of it must know."""
    interval = f"{score['pass_at_1']:.3f} [{score['low']:.3f}, {score['high']:.3f}]"
    return f"{interval} over {score['questions']} questions{result.remarks(score)}"


def ask_heldout(run: ActiveRun, when: str) -> dict[str, Any]:
    """Score the current weights on the held-out questions, tell it and keep the counts; returns the score."""
    parts = run.parts
    evaluation = ask(run, run.parts.heldout, f"held-out, {when}", HELDOUT)
    with run.timed("validation"):
        # One rank is enough for what is only told.
        main, own = parts.ranks.is_main, parts.config.grading.grader
        seconds = beside(evaluation, own, parts.answer_format, parts.pool) if main else {}
    score = score_json(evaluation, seconds)
    tell_heldout(run, evaluation.records[0], score, when)
    if main and (fall := new_fall(validations.read_validations(run.folder.path))):
        run.reporter.note(fall)
    return score


def tell_heldout(run: ActiveRun, record: sampling.QuestionRecord, score: Mapping[str, Any], when: str) -> None:
    """Show a held-out score, and the first answer to the first of the questions: the same one each time."""
    config, before = run.parts.config, run.state.heldout_before
    how = result.how_asked(score, config.data.heldout_name, config.validation.temperature)
    run.reporter.note(f"held-out (never trained on) {when}: {how}")
    run.reporter.heldout = f"{score['pass_at_1']:.3f} {when}"
    if before:
        run.reporter.heldout += f" ({before['pass_at_1']:.3f} before training)"
    question, answer = record.question, record.samples[0]
    shown = answer_rows(question.prompt[-1].content, question.answer, answer.text, answer.verdict.value)
    run.reporter.rows({**result.measures(score), **shown})


def ask(
    run: ActiveRun, questions: Sequence[Question], what: str, asked: str, temperature: float | None = None
) -> sampling.Evaluation:
    """Ask the current weights (`answered`) and keep how often each question was answered correctly."""
    with run.timed("validation"):
        parts = run.parts
        starts = None if run.state.step else run.starts
        evaluation = answered(parts, questions, lambda total: run.reporter.sampling(total, what), temperature, starts)
        if parts.ranks.is_main:
            valid = valid_counts(evaluation)
            run.folder.append_validation(
                {
                    "step": run.state.step,
                    "asked": asked,
                    "generated": run.state.tokens_generated,
                    "trained": run.state.tokens_trained,
                    "samples": evaluation.samples,
                    "correct": " ".join(map(str, evaluation.correct)),
                    **({} if valid is None else {"valid": " ".join(map(str, valid))}),
                    "ids": [question.id for question in questions] if asked == TRAINED else [],
                }
            )
    return evaluation


def answered(
    parts: Parts,
    questions: Sequence[Question],
    tell: Callable[[int], Callable[[int], None]] = lambda total: lambda done: None,
    temperature: float | None = None,
    starts: Path | None = None,
) -> sampling.Evaluation:
    """Answers of the current weights, at the validations' temperature unless one is given; each rank samples its share,
    whose size `tell` hears. On a CPU they are sampled once for all runs that have the folder `starts` in common."""
    settings, together = parts.config.validation, parts.config.rollout.tensor_parallel
    parts.wake()
    own = parts.ranks.scatter(questions, together=together)
    respond = local.from_generator(local_generator(parts.generator), parts.backbone.decode, parts.prompts)
    exact = parts.backbone.model.device.type == "cpu" and parts.config.rollout.engine == "hf"
    if starts and exact and parts.ranks.world_size == 1:
        respond = local.asked_once(respond, starts, sampled_by(parts, own))
    evaluation = sampling.sample_and_grade(
        [sampling.QuestionRecord(question=question, options=options_of(question)) for question in own],
        respond,
        pool=parts.pool,
        answer_format=parts.answer_format,
        params=SamplingParams(
            temperature=temperature or settings.temperature,
            top_p=settings.top_p,
            max_new_tokens=parts.config.rollout.max_response_tokens,
        ),
        samples=settings.samples,
        seed=settings.seed,
        on_sampled=tell(len(own) * settings.samples),
    )
    return sampling.Evaluation(records=tuple(parts.ranks.gather_in_order(evaluation.records, together=together)))


def sampled_by(parts: Parts, questions: Sequence[Question]) -> dict[str, Any]:
    """All that decides what questions are answered with, besides seeds and parameters of sampling."""
    config, prompts = parts.config, [parts.prompts[question.id].tolist() for question in questions]
    settings = [str(config.backbone), config.rollout.max_rows, config.run.threads, config.optim.matmul_dtype]
    machine = [versions.code_version(), versions.processor(), versions.describe_machine()]
    return {"weights": fingerprint(parts.backbone.model), "prompts": prompts, "made by": [settings, machine]}


def ask_hotter(run: ActiveRun, when: str) -> None:
    """Ask the held-out questions at the other temperatures that the settings want."""
    for each in run.parts.config.validation.temperatures:
        score = ask(run, run.parts.heldout, f"held-out, {when}, T = {each:g}", at_temperature(each), each).score()
        run.reporter.note(
            f"held-out {when} at T = {each:g}: pass@1 {score.value:.3f} [{score.low:.3f}, {score.high:.3f}]"
        )


def ask_trained(run: ActiveRun, when: str) -> None:
    """Ask some training questions, the same ones at every call, where the settings want it."""
    settings = run.parts.config.validation
    if settings.train_questions == 0:
        return
    heldout = {question.id for question in run.parts.heldout}
    ids = [each for each in run.parts.questions if each not in heldout]
    chosen = np.random.default_rng(settings.seed).permutation(len(ids))[: settings.train_questions]
    ask(run, [run.parts.questions[ids[index]] for index in sorted(chosen)], f"training questions, {when}", TRAINED)


def validation_metrics(run: ActiveRun) -> dict[str, float | int]:
    """`val/<benchmark>` of the current weights; remembers the best step."""
    state, name = run.state, f"val/{run.parts.config.data.heldout_name}"
    score = run.validated[state.step] = ask_heldout(run, f"after step {state.step}")
    if score["pass_at_1"] > state.best_score:
        state.best_score, state.best_step = score["pass_at_1"], state.step
    values = {name: score["pass_at_1"], f"{name}/low": score["low"], f"{name}/high": score["high"]}
    for at_k, at in ((f"{name}/pass_at_{k}", at) for k, at in score["pass_at_k"].items() if k != "1"):
        values |= {at_k: at["value"], f"{at_k}/low": at["low"], f"{at_k}/high": at["high"]}
    if "valid_pass_at_1" in score:
        values[f"{name}/valid"] = score["valid_pass_at_1"]
    return values | {f"{name}/{grader}": found["pass_at_1"] for grader, found in score["second_graders"].items()}
