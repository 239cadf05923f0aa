"""The audit of a question set: each check removes or marks questions and says how many, with examples."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.types import Question, Verdict
from exgrpo_cli.grading import GradingPool
from exgrpo_cli.questions.audit.contamination import BenchmarkIndex
from exgrpo_cli.questions.audit.duplicates import near_duplicates
from exgrpo_cli.questions.prompts import Template, Tokenizer, prompt_lengths
from exgrpo_cli.questions.question_file.identity import normalised, question_text

Progress = Callable[[int, int, str], None]
"""(done, total, what)."""

_MAX_EXAMPLES = 3
_EXAMPLE_CHARS = 160
_CHUNK = 1024
_GOLD_REASONS = {
    Verdict.UNPARSABLE_GOLD: "gold does not parse",
    Verdict.WRONG: "gold does not verify against itself",
    Verdict.NO_ANSWER: "gold does not verify against itself",
    Verdict.TIMEOUT: "gold takes the verifier past its deadline",
    Verdict.CRASHED: "gold crashes the verifier",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What one check found."""

    count: int
    examples: tuple[str, ...]
    """At most three, each on one line."""

    def to_json(self) -> dict[str, Any]:
        """As the audit report keeps it."""
        return {"count": self.count, "examples": list(self.examples)}


class Tally:
    """Counts reasons and keeps the first few examples of each."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, list[str]] = {}

    def add(self, reason: str, example: str) -> None:
        """Count `reason` once more; keep `example`, cut to a line, while there are few."""
        self._counts[reason] += 1
        examples = self._examples.setdefault(reason, [])
        if len(examples) < _MAX_EXAMPLES:
            examples.append(one_line(example))

    def findings(self) -> dict[str, Finding]:
        """Finding of each reason, in order of their first appearance."""
        return {
            reason: Finding(count=self._counts[reason], examples=tuple(examples))
            for reason, examples in self._examples.items()
        }


def one_line(text: str) -> str:
    """A text on one line, cut to the length of an example."""
    # No more than is shown is looked at: a text may have many million characters.
    text = " ".join(text[: 4 * _EXAMPLE_CHARS].split())
    return text if len(text) <= _EXAMPLE_CHARS else text[: _EXAMPLE_CHARS - 3] + "..."


def check_golds(questions: Sequence[Question], pool: GradingPool) -> None:
    """Raises InputError naming the first question whose gold answer does not verify against itself, and their number.

    A gold the verifier cannot finish is refused as well: no answer to it could ever be graded.
    """
    reasons = _gold_reasons(questions, pool)
    bad = [(question, reason) for question, reason in zip(questions, reasons, strict=True) if reason is not None]
    if bad:
        question, reason = bad[0]
        raise InputError(
            f"{len(bad)} of {len(questions)} gold answers cannot be verified, the first being {question.answer!r} of "
            f"question {question.id}: {reason}. Run `exgrpo prepare` on the file to leave them out."
        )


Reason = tuple[str, str]
"""Why a question is left out, and an example for the report."""


def _sift(
    questions: Sequence[Question],
    reasons_of: Callable[[Sequence[Question]], Iterable[Reason | None]],
    what: str,
    tally: Tally,
    progress: Progress,
) -> list[Question]:
    """Questions without a reason to leave them out; the others are counted."""
    kept = []
    for start in range(0, len(questions), _CHUNK):
        progress(start, len(questions), what)
        chunk = questions[start : start + _CHUNK]
        for question, reason in zip(chunk, reasons_of(chunk), strict=True):
            if reason is None:
                kept.append(question)
            else:
                tally.add(*reason)
    progress(len(questions), len(questions), what)
    return kept


def drop_bad_golds(
    questions: Sequence[Question], pool: GradingPool, tally: Tally, progress: Progress
) -> list[Question]:
    """Questions whose gold verifies against itself; the others are counted by what is wrong with them."""

    def reasons_of(chunk: Sequence[Question]) -> list[Reason | None]:
        found = zip(chunk, _gold_reasons(chunk, pool), strict=True)
        return [None if reason is None else (reason, f"{question.id}: {question.answer}") for question, reason in found]

    return _sift(questions, reasons_of, "verifying gold answers", tally, progress)


def _gold_reasons(questions: Sequence[Question], pool: GradingPool) -> list[str | None]:
    """What is wrong with the gold of each question; None where nothing is."""
    golds = [question.answer for question in questions]
    verdicts = pool.verify_gold(golds, [question.metadata for question in questions])
    reasons = [_GOLD_REASONS.get(verdict) for verdict in verdicts]
    unparsable = [place for place, reason in enumerate(reasons) if reason == _GOLD_REASONS[Verdict.UNPARSABLE_GOLD]]
    parts = pool.reads_in_part([golds[place] for place in unparsable])
    for place, is_part in zip(unparsable, parts, strict=True):
        if is_part:
            reasons[place] = "gold is read only in part"
    return reasons


def drop_contaminated(
    questions: Sequence[Question],
    benchmarks: Mapping[str, Sequence[str]],
    tally: Tally,
    progress: Progress,
    *,
    size: int,
    threshold: float,
) -> list[Question]:
    """Questions that share less than `threshold` of the n-grams (of `size` words) of any evaluation question."""
    index = BenchmarkIndex(benchmarks, size=size)

    def reason_of(question: Question) -> Reason | None:
        nearest = index.nearest(question_text(question))
        if nearest is None or nearest.share < threshold:
            return None
        example = f"{question.id} ({nearest.share:.0%} of the n-grams): {nearest.text}"
        return f"contaminated by {nearest.benchmark}", example

    return _sift(questions, lambda chunk: map(reason_of, chunk), "comparing with benchmarks", tally, progress)


def drop_long_prompts(
    questions: Sequence[Question],
    template: Template,
    tokenizer: Tokenizer,
    tally: Tally,
    progress: Progress,
    *,
    max_tokens: int,
) -> list[Question]:
    """Questions whose prompt has at most `max_tokens` tokens."""

    def reasons_of(chunk: Sequence[Question]) -> list[Reason | None]:
        lengths = prompt_lengths(template, chunk, tokenizer).tolist()
        return [
            (f"prompt over {max_tokens} tokens", f"{question.id} ({length} tokens): {question_text(question)}")
            if length > max_tokens
            else None
            for question, length in zip(chunk, lengths, strict=True)
        ]

    return _sift(questions, reasons_of, "counting prompt tokens", tally, progress)


def mark_near_duplicates(questions: Sequence[Question], tally: Tally, progress: Progress, *, threshold: float) -> None:
    """Count the same text with another answer, and almost the same text; all of them stay."""
    progress(0, len(questions), "looking for near duplicates")
    first_by_text: dict[str, Question] = {}
    distinct: list[Question] = []
    for question in questions:
        first = first_by_text.setdefault(normalised(question_text(question)).lower(), question)
        if first is question:
            distinct.append(question)
        else:
            answers = f"{first.answer!r} and {question.answer!r}"
            tally.add("same question, different answers", f"{first.id}, {question.id} ({answers})")
    for pair in near_duplicates([question_text(question) for question in distinct], threshold=threshold):
        first, second = distinct[pair.first], distinct[pair.second]
        example = f"{first.id}, {second.id} ({pair.similarity:.0%}): {question_text(second)}"
        tally.add("almost the same question", example)
    progress(len(questions), len(questions), "looking for near duplicates")


def total(findings: Iterable[Finding]) -> int:
    """Questions over all findings."""
    return sum(finding.count for finding in findings)
