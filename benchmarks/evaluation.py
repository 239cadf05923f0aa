"""How full evaluation keeps the engine, and how fast stored samples are graded again.

    python benchmarks/evaluation.py [--repeats 5] [--json]

Refill: a tiny random model answers questions whose lengths are geometric (most are short, some run to the limit) with
64 and with 512 rows; finished rows are replaced by waiting ones. The reference is a batch of the same rows that all run
to the same length, so nothing ever has to be replaced: about twice the mean of the others, so that a token has about as
many before it (`context`). Tokens per second of CPU time over the stretch in which responses wait, and over the load
with its end, when rows run dry; the target is 80 % of the reference while responses wait. The two are measured in turn,
each skewed load between two references, so that a machine that gets slower or faster moves both; medians.

Rescore: 6,000 stored samples, half plain numbers and half LaTeX, every fourth one wrong, are graded and scored again
without a model. Wall seconds; the target is 60 s on 2 cores.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from exgrpo_cli.base.types import Message, Question, Rollout, RolloutRequest, SamplingParams, StopReason, Verdict
from exgrpo_cli.evaluation.results import ResultsFolder
from exgrpo_cli.evaluation.sampling import QuestionRecord, Sample
from exgrpo_cli.evaluation.service import rescore_folders

ROWS = (64, 512)
"""Few, and as many as an evaluation has unless it is told otherwise."""
RESPONSES = 12
"""Responses of a load, per row."""
REFERENCE_TOKENS = 128
LONGEST = 450
QUESTIONS, SAMPLES = 500, 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="measurements of the refill; medians count (default 5)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    arguments = parser.parse_args()
    refills = [measure_refill(rows, arguments.repeats) for rows in ROWS]
    again = measure_rescore()
    if arguments.json:
        print(json.dumps({"refill": refills, "rescore": again}))
        return
    for refill in refills:
        print_refill(refill)
    print(f"{'re-scored samples':34}{again['samples']:>10,}")
    print(f"{'seconds (target 60)':34}{again['seconds']:>10.1f}")


def print_refill(refill: dict[str, Any]) -> None:
    context, lengths, shares = refill["context"], refill["lengths"], sorted(refill["shares"])
    print(f"{refill['rows']} rows")
    print(f"{'  uninterrupted batch':34}{refill['reference_tokens_per_second']:>10,.0f} tokens/s")
    print(f"{'  length-skewed, rows replaced':34}{refill['skewed_tokens_per_second']:>10,.0f} tokens/s")
    print(f"{'  share (target 0.80)':34}{refill['share']:>10.2f}  from {shares[0]:.2f} to {shares[-1]:.2f}")
    print(f"{'  share, end of the load included':34}{refill['share_with_end']:>10.2f}")
    before = f"uninterrupted {context['reference']:.0f}, rows replaced {context['skewed']:.0f}"
    print(f"{'  tokens before a token':34}{before}")
    spread = f"mean {lengths['mean']:.0f}, median {lengths['median']:.0f}, longest {lengths['max']}"
    print(f"{'  response lengths':34}{spread}")


def measure_refill(rows: int, repeats: int) -> dict[str, Any]:
    import torch

    from exgrpo_cli.config.sections.run import TinySettings
    from exgrpo_cli.engines.hf.generator import HFGenerator
    from exgrpo_cli.models.tiny import make_model, make_tokenizer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = make_model(TinySettings(), make_tokenizer(max_tokens=512)).eval()
    vocabulary = model.config.vocab_size
    # A random model's tokens are close to uniform: with this many of them ending a response, lengths are geometric with
    # a mean of about REFERENCE_TOKENS; an id outside the vocabulary never ends one.
    ends = list(range(vocabulary - vocabulary // REFERENCE_TOKENS, vocabulary))
    skewed = HFGenerator(model, max_rows=rows, eos_ids=ends)
    uninterrupted = HFGenerator(model, max_rows=rows, eos_ids=[vocabulary])
    prompt = np.arange(20, 28, dtype=np.int32)  # as short beside the responses as a question is beside its reasoning

    def requests(count: int) -> list[RolloutRequest]:
        return [RolloutRequest(question_id=f"q{n}", prompt_ids=prompt + n % 100, seeds=(n,)) for n in range(count)]

    def finishes(generator: HFGenerator, count: int, longest: int) -> tuple[list[float], list[int]]:
        """CPU seconds at which responses ended, and their lengths, in the order in which they ended."""
        params = SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=longest)
        times, lengths = [], []

        def note(index: int, rollout: Rollout) -> None:
            times.append(time.process_time() - started)
            lengths.append(len(rollout.token_ids))

        started = time.process_time()
        generator.generate(requests(count), params, on_finished=note)
        return times, lengths

    def reference() -> float:
        times, lengths = finishes(uninterrupted, rows, 2 * REFERENCE_TOKENS)
        return sum(lengths) / times[-1]

    finishes(uninterrupted, rows, 8)
    references, achieved, whole, lengths = [reference()], [], [], [0]
    for _ in range(repeats):
        times, lengths = finishes(skewed, RESPONSES * rows, LONGEST)
        references.append(reference())
        whole.append(sum(lengths) / times[-1])
        # While responses wait, and after the first rows, which started together, have ended: the rows under way at both
        # ends of the stretch are alike, and their unfinished tokens cancel.
        first, last = 4 * rows, len(lengths) - rows
        achieved.append(sum(lengths[first:last]) / (times[last - 1] - times[first - 1]))
    beside = (np.array(references[:-1]) + references[1:]) / 2
    shares = np.array(achieved) / beside
    return {
        "rows": rows,
        "responses": len(lengths),
        "lengths": {"mean": float(np.mean(lengths)), "median": float(np.median(lengths)), "max": max(lengths)},
        "context": {
            "reference": len(prompt) + mean_position([2 * REFERENCE_TOKENS]),
            "skewed": len(prompt) + mean_position(lengths),
        },
        "reference_tokens_per_second": float(np.median(references)),
        "skewed_tokens_per_second": float(np.median(achieved)),
        "share": float(np.median(shares)),
        "shares": shares.tolist(),
        "share_with_end": float(np.median(np.array(whole) / beside)),
    }


def mean_position(lengths: list[int]) -> float:
    """Response tokens before a response token, on average over the tokens of responses of these lengths."""
    tokens = np.array(lengths)
    return float((tokens * (tokens - 1) / 2).sum() / tokens.sum())


def measure_rescore() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = store_samples(Path(temporary) / "made")
        started = time.perf_counter()
        report = rescore_folders([folder], (), folder)
        seconds = time.perf_counter() - started
    return {"samples": QUESTIONS * SAMPLES, "seconds": seconds, "avg_at_k": report.results["made"]["avg_at_k"]}


def store_samples(path: Path) -> Path:
    """A results folder as an evaluation leaves it, with verdicts still to be found."""
    records = [made_record(number) for number in range(QUESTIONS)]
    stamp = {
        "benchmark": {"name": "made"},
        "model": {"name": "none"},
        "prompt": {"opens_think": True, "requires_box": True, "require_eos": True},
        "sampling": {"samples": SAMPLES},
        "grader": {"name": "math", "version": ""},
    }
    with ResultsFolder.create(path, stamp, records) as folder:
        folder.append(records)
    return path


def made_record(number: int) -> QuestionRecord:
    gold = str(number) if number % 2 else f"\\frac{{{number + 1}}}{{7}}"
    right = (gold, f"{number}.0" if number % 2 else f"\\dfrac{{{2 * number + 2}}}{{14}}", f"x = {gold}")
    wrong = str(number + 1) if number % 2 else f"\\frac{{{number + 2}}}{{7}} + \\sqrt{{{number}}}"
    question = Question(
        id=f"q{number}", prompt=(Message(role="user", content=f"Question {number}"),), answer=gold, source="made"
    )
    answers = [wrong if member % 4 == 3 else right[member % 3] for member in range(SAMPLES)]
    samples = tuple(
        Sample(
            member=member,
            seed=member,
            text=f"{'Let us think. ' * 200}</think> The answer is \\boxed{{{answer}}}.",
            num_tokens=700,
            stop_reason=StopReason.EOS,
            logprob=-300.0,
            verdict=Verdict.NO_ANSWER,
        )
        for member, answer in enumerate(answers)
    )
    return QuestionRecord(question=question, samples=samples)


if __name__ == "__main__":
    main()
