"""Verdicts that the parent decides itself, and tasks, which have to go to a worker.

Without an answer there is nothing to parse; equal texts, plain numbers, letters and exact texts are compared by code
that is linear in their length, of which there is a limit. Everything else that reads what a model wrote, from its
notation on, is done by a worker: it has a deadline and a cap on memory.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.types import AnswerFormat, Grade, Verdict
from exgrpo_cli.config.names import GYM, PREFIX
from exgrpo_cli.grading import choice, extract, verifiers
from exgrpo_cli.grading.plain import plain_number, same_plain_number, verdict_of

TaskKind = Literal["grade", "grade a text", "grade like Oat", "audit", "gym"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GradingItem:
    """One response to be graded."""

    gold: str
    response: str
    """Decoded response, the thinking included, without the EOS."""
    finished: bool
    """Whether it ended with EOS."""
    answer_format: AnswerFormat
    options: tuple[str, ...] | None = None
    """Texts of the options of a multiple-choice question, A first, where known."""
    metadata: str | None = None
    """The question's."""


class Task(NamedTuple):
    """One answer to be graded against one gold in a worker; a plain tuple, because equal tasks are graded once."""

    gold: str
    answer: str
    kind: TaskKind = "grade"
    """The answer of "grade" is the content of a box, or what a user's function gets. An audit checks whether the gold
    verifies against itself, or whether only a part of it would be read; there is no answer."""
    metadata: str | None = None
    """The question's, for its own verifier or a grader that asks for them."""
    response: str = ""
    """All of it, thinking included, for a user's function that asks for it."""
    patience: int = 1
    """Times the deadline that it gets: above 1 for what is tried again, alone."""

    @property
    def judged(self) -> str:
        """The text that a time-out or a crash is held against: the answer, or the gold where that is audited."""
        return self.gold if self.kind.startswith("audit") else self.answer


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """Way of one grader with a graded text, and with a gold that is audited: a verdict, or a task for a worker."""

    grader: str
    """A built-in one or `python:module:function`."""
    max_answer_chars: int
    """A longer one is no answer; of a text without a box this much of its end is read. A user's function gets all."""

    def grade(self, item: GradingItem, text: str) -> Verdict | Task:
        """The verdict on the graded text of a response; raises InputError where a question's verifier is unknown.

        `choice` goes by options, `exact` by texts, `oat` by the last box alone. `math` goes by options where a question
        has them (math-verify would compare letters, never a letter and a text) and by a verifier where it brings one.
        """
        match self.grader:
            case "choice":
                end = text[-extract.MOST_CHARS :]
                return choice.grade_choice(item.gold, end, options=item.options, max_answer_chars=self.max_answer_chars)
            case "exact":
                return self._exact(item.gold, text)
            case "oat":
                answer = extract.last_box(text) or ""
                if not self._is_answer(answer):
                    return Verdict.NO_ANSWER
                return _compared(extract.boxed_or_all(item.gold).strip(), answer, "grade like Oat")
            case "math" if item.options is not None:
                return replace(self, grader="choice").grade(item, text)
            case "math":
                return self._math(item, text)
        return Task(gold=item.gold, answer=text, metadata=item.metadata, response=item.response)

    def audit(self, gold: str, metadata: str | None) -> Verdict | Task:
        """Whether a gold can serve, by the metadata of its question; raises InputError like `grade`.

        A user's function gets the gold as its own answer.
        """
        match self.grader:
            case "choice":
                return Verdict.UNPARSABLE_GOLD if _NUMBERED.named(gold) is None else Verdict.CORRECT
            case "exact":
                return self._exact(gold, gold) if gold.strip() else Verdict.UNPARSABLE_GOLD
            case "oat":
                return Verdict.CORRECT if gold.strip() else Verdict.UNPARSABLE_GOLD
            case "math" if verifiers.verifier_of(metadata) is not None:
                return _by_own_verifier(gold, gold, metadata)
            case "math":
                content = extract.boxed_or_all(gold)
                return Task(gold=content, answer="", kind="audit") if plain_number(content) is None else Verdict.CORRECT
        return Task(gold=gold, answer="", kind="audit", metadata=metadata)

    def _exact(self, gold: str, text: str) -> Verdict:
        """Equality, character by character, white space evened out: of the boxed content or of all of it."""
        answer = " ".join(extract.boxed_or_all(text).split())
        return verdict_of(answer == " ".join(gold.split())) if self._is_answer(answer) else Verdict.NO_ANSWER

    def _math(self, item: GradingItem, text: str) -> Verdict | Task:
        """math-verify in a worker. Of a box the content alone is parsed: a long explanation costs nothing.

        Without a box the answer is at the end of the text, of which no word or number is cut.
        """
        boxed = extract.last_boxed(text)
        has_own = verifiers.verifier_of(item.metadata) is not None
        if boxed is None and not has_own and len(text) > self.max_answer_chars:
            text = re.sub(r"\A\S*\s*", "", text[-self.max_answer_chars - 1 :])
        answer = text if boxed is None else boxed
        if not self._is_answer(answer):
            return Verdict.NO_ANSWER
        if has_own:
            return _by_own_verifier(item.gold, answer, item.metadata)
        if boxed is None:
            return Task(gold=item.gold, answer=text, kind="grade a text")
        return _compared(extract.boxed_or_all(item.gold), boxed, "grade")

    def _is_answer(self, answer: str) -> bool:
        return 0 < len(answer) <= self.max_answer_chars


_NUMBERED = choice.Options(texts=None, is_numbered=True)


def route_item(route: Route, item: GradingItem) -> Verdict | Task:
    """The verdict on a response, or the task that will give it; raises InputError as `Route.grade` does."""
    answer_format = item.answer_format
    if item.options is not None and answer_format.requires_box and choice.ends_in_demanded_form(item.response):
        # The question asks for this line, whatever the template asks for.
        answer_format = replace(answer_format, requires_box=False)
    text = extract.answer_text(item.response, finished=item.finished, answer_format=answer_format)
    return Verdict.NO_ANSWER if text is None else route.grade(item, text)


def _compared(gold: str, answer: str, kind: TaskKind) -> Verdict | Task:
    """The verdict on equal texts and plain numbers, a task for all others."""
    is_same = True if gold == answer else same_plain_number(gold, answer)
    return Task(gold=gold, answer=answer, kind=kind) if is_same is None else verdict_of(is_same)


def _by_own_verifier(gold: str, answer: str, metadata: str | None) -> Verdict | Task:
    """The verdict of the verifier that a question brings; reasoning-gym's scorers run in a worker."""
    name = verifiers.verifier_of(metadata) or ""
    if name == verifiers.COUNTDOWN:
        return verifiers.grade_countdown(verifiers.read_metadata(metadata), answer)
    if name.startswith(GYM):
        verifiers.require_task(name.removeprefix(GYM))
        if not isinstance(verifiers.read_metadata(metadata).get("entry"), dict):
            raise InputError(f"a question of {name!r} needs the task's own table in metadata.entry.")
        # The first task of a worker imports reasoning-gym, which takes seconds.
        return Task(gold=gold, answer=answer, kind="gym", metadata=metadata, patience=4)
    known = f"use {verifiers.COUNTDOWN!r} or 'gym:TASK'"
    raise InputError(f"a question's metadata name the verifier {name!r}, which is not known: {known}.")


def task_runner(grader: str, success_at: float) -> tuple[Callable[[Task], Grade], str]:
    """The function that workers run, with everything it needs imported, and what it does without, in words or "". A
    user's grader audits a gold as its answer.

    Raises:
        InputError: a user's grader that cannot be loaded.
    """
    if grader.startswith(PREFIX):
        own = verifiers.load_own(grader, success_at)
        return lambda task: own(task.gold, task.judged, task.metadata, task.response or task.judged), ""
    from exgrpo_cli.grading import mathematics, oat

    lost = mathematics.prepare()
    runners: dict[str, Callable[[Task], Verdict]] = {
        "grade": lambda task: mathematics.grade_box(task.gold, task.answer),
        "grade a text": lambda task: mathematics.grade_text(task.gold, task.answer),
        "grade like Oat": lambda task: oat.grade(task.gold, task.answer),
        "audit": lambda task: mathematics.audit(task.gold),
    }

    def run(task: Task) -> Grade:
        if task.kind == "gym":
            return verifiers.grade_gym(task.metadata, task.answer, success_at)
        return Grade.of(runners[task.kind](task))

    return run, lost
