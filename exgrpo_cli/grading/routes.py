"""What the parent decides itself, and what has to go to a worker.

Without an answer there is nothing to parse; equal texts, plain numbers, letters and exact texts are compared by code
that is linear in their length, of which there is a limit. Everything else that reads what a model wrote, from its
notation on, is done by a worker: it has a deadline and a cap on memory.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.types import AnswerFormat, Verdict
from exgrpo_cli.config.names import GYM, PREFIX
from exgrpo_cli.grading.graders import countdown, gym
from exgrpo_cli.grading.graders.choice import answered_letter, ends_in_demanded_form, grade_choice, named_letter
from exgrpo_cli.grading.graders.exact import grade_exact
from exgrpo_cli.grading.graders.plain import plain_number, same_plain_number
from exgrpo_cli.grading.metadata import read_metadata, verifier_of
from exgrpo_cli.grading.notation.extract import answer_text, boxed_or_all, last_box, last_boxed
from exgrpo_cli.grading.workers.messages import Task

MOST_CHARS_HERE = 1 << 16
"""Length of a response above which its answer is looked for in a worker, whatever that costs; 32,768 tokens of plain
English are twice as long, and are read in a millisecond there too."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """How one grader treats a graded text, and a gold that is audited: a verdict, or a task for a worker."""

    grade: Callable[[GradingItem, str], Verdict | Task]
    audit: Callable[[str, str | None], Verdict | Task]
    """Of a gold and the metadata of its question."""
    same: Callable[[str, str, tuple[str, ...] | None], Verdict | Task]
    """Whether two graded texts give the same answer, to a question with these options: CORRECT where they do."""
    in_part: Callable[[str], Verdict | Task] = lambda gold: Verdict.WRONG
    """Whether only a part of a gold would be read, which is CORRECT."""


def route_item(route: Route, item: GradingItem) -> Verdict | Task:
    """The verdict on a response, or the task that will give it."""
    answer_format = item.answer_format
    if item.options is not None and answer_format.requires_box and ends_in_demanded_form(item.response):
        # The question asks for this line, whatever the template asks for.
        answer_format = replace(answer_format, requires_box=False)
    text = answer_text(item.response, finished=item.finished, answer_format=answer_format)
    return Verdict.NO_ANSWER if text is None else route.grade(item, text)


def routes_of(grader: str, max_answer_chars: int) -> dict[str, Route]:
    """The ways that one set of workers can go: a user's function alone, or all of the built-in graders."""
    if grader.startswith(PREFIX):
        return {grader: custom_route()}
    built_in = {"math": math_route, "choice": choice_route, "exact": exact_route, "oat": oat_route}
    return {name: route(max_answer_chars) for name, route in built_in.items()}


def packed(item: GradingItem, grader: str, max_answer_chars: int) -> Task:
    """The task of a worker that is to look for the answer too."""
    known = asdict(item) | {"grader": grader, "max_answer_chars": max_answer_chars}
    gold, response = known.pop("gold"), known.pop("response")
    return Task(gold=gold, answer=response, kind="whole response", metadata=json.dumps(known))


def packed_pair(first: str, second: str, options: tuple[str, ...] | None, grader: str, max_answer_chars: int) -> Task:
    """The task of a worker that is to look for the answers of two graded texts and compare them."""
    known = {"options": options, "grader": grader, "max_answer_chars": max_answer_chars}
    return Task(gold=first, answer=second, kind="whole pair", metadata=json.dumps(known))


def route_packed(task: Task) -> Verdict | Task:
    """What is to be done of a packed response or pair, in the worker."""
    known = json.loads(task.metadata or "")
    grader = known.pop("grader")
    route = routes_of(grader, known.pop("max_answer_chars"))[grader]
    known["options"] = known["options"] and tuple(known["options"])
    if task.kind == "whole pair":
        return route.same(task.gold, task.answer, known["options"])
    known["answer_format"] = AnswerFormat(**known["answer_format"])
    return route_item(route, GradingItem(gold=task.gold, response=task.answer, **known))


def math_route(max_answer_chars: int) -> Route:
    """math-verify in a worker. Where there is a box its content alone is parsed: a long explanation costs nothing.

    A question whose options are known is graded by them: math-verify would compare letters, never a letter and a text.
    One that brings a verifier is graded by that.
    """
    by_options = choice_route(max_answer_chars)

    def grade(item: GradingItem, text: str) -> Verdict | Task:
        if item.options is not None:
            return by_options.grade(item, text)
        boxed = last_boxed(text)
        answer = text if boxed is None else boxed
        if not answer or len(answer) > max_answer_chars:
            return Verdict.NO_ANSWER
        if verifier_of(item.metadata) is not None:
            return by_own_verifier(item.gold, answer, item.metadata)
        if boxed is None:
            return Task(gold=item.gold, answer=text, kind="grade a text")
        return compare(boxed_or_all(item.gold), boxed)

    def compare(gold: str, answer: str) -> Verdict | Task:
        is_same = True if gold == answer else same_plain_number(gold, answer)
        if is_same is None:
            return Task(gold=gold, answer=answer)
        return Verdict.CORRECT if is_same else Verdict.WRONG

    def audit(gold: str, metadata: str | None) -> Verdict | Task:
        if verifier_of(metadata) is not None:
            return by_own_verifier(gold, gold, metadata)
        content = boxed_or_all(gold)
        return Task(gold=content, answer="", kind="audit") if plain_number(content) is None else Verdict.CORRECT

    def same(first: str, second: str, options: tuple[str, ...] | None) -> Verdict | Task:
        if options is not None:
            return by_options.same(first, second, options)
        boxes = last_boxed(first), last_boxed(second)
        if boxes[0] is not None and boxes[1] is not None:
            return compare(boxes[0], boxes[1])
        return Task(gold=first, answer=second, kind="compare texts")

    def in_part(gold: str) -> Task:
        return Task(gold=boxed_or_all(gold), answer="", kind="audit for parts")

    return Route(grade=grade, audit=audit, same=same, in_part=in_part)


def by_own_verifier(gold: str, answer: str, metadata: str | None) -> Verdict | Task:
    """The verdict of the verifier that a question brings; reasoning-gym's scorers run in a worker.

    Raises InputError where there is none of that name, or where it may not be used.
    """
    name = verifier_of(metadata) or ""
    if name == countdown.NAME:
        return countdown.grade_countdown(read_metadata(metadata), answer)
    if name.startswith(GYM):
        gym.require_task(name.removeprefix(GYM))
        # The first task of a worker imports reasoning-gym, which takes seconds.
        return Task(gold=gold, answer=answer, kind="gym", metadata=metadata, patience=4)
    raise InputError(
        f"a question's metadata name the verifier {name!r}, which is not known: use {countdown.NAME!r} or 'gym:TASK'."
    )


def choice_route(max_answer_chars: int) -> Route:
    """Options by letter or text; nothing to parse."""

    def grade(item: GradingItem, text: str) -> Verdict:
        return grade_choice(item.gold, text, options=item.options, max_answer_chars=max_answer_chars)

    def audit(gold: str, metadata: str | None) -> Verdict:
        return Verdict.UNPARSABLE_GOLD if named_letter(gold, None, is_numbered=True) is None else Verdict.CORRECT

    def same(first: str, second: str, options: tuple[str, ...] | None) -> Verdict:
        letters = [answered_letter(text, options, max_answer_chars, is_numbered=True) for text in (first, second)]
        is_same = letters[0] is not None and letters[0] == letters[1]
        return Verdict.CORRECT if is_same else Verdict.WRONG

    return Route(grade=grade, audit=audit, same=same)


def exact_route(max_answer_chars: int) -> Route:
    """Equality of texts; a gold will do that is neither empty nor longer than an answer may be."""

    def grade(item: GradingItem, text: str) -> Verdict:
        return grade_exact(item.gold, text, max_answer_chars=max_answer_chars)

    def audit(gold: str, metadata: str | None) -> Verdict:
        return grade_exact(gold, gold, max_answer_chars=max_answer_chars) if gold.strip() else Verdict.UNPARSABLE_GOLD

    def same(first: str, second: str, options: tuple[str, ...] | None) -> Verdict:
        return grade_exact(boxed_or_all(first), second, max_answer_chars=max_answer_chars)

    return Route(grade=grade, audit=audit, same=same)


def oat_route(max_answer_chars: int) -> Route:
    """The last box alone; without one there is no answer. Equal texts and plain numbers need no worker."""

    def content_of(text: str) -> str:
        content = last_boxed(text) if r"\boxed" in text else text
        return text.strip() if content is None else content

    def grade(item: GradingItem, text: str) -> Verdict | Task:
        answer = last_box(text)
        if not answer or len(answer) > max_answer_chars:
            return Verdict.NO_ANSWER
        return compare(content_of(item.gold), answer)

    def compare(gold: str, answer: str) -> Verdict | Task:
        is_same = True if gold == answer else same_plain_number(gold, answer)
        if is_same is None:
            return Task(gold=gold, answer=answer, kind="grade like Oat")
        return Verdict.CORRECT if is_same else Verdict.WRONG

    def audit(gold: str, metadata: str | None) -> Verdict:
        return Verdict.CORRECT if gold.strip() else Verdict.UNPARSABLE_GOLD

    def same(first: str, second: str, options: tuple[str, ...] | None) -> Verdict | Task:
        return compare(content_of(first), content_of(second))

    return Route(grade=grade, audit=audit, same=same)


def custom_route() -> Route:
    """A user's function gets the whole graded text, of any length: the deadline is its bound."""

    def grade(item: GradingItem, text: str) -> Task:
        return Task(gold=item.gold, answer=text, metadata=item.metadata)

    def audit(gold: str, metadata: str | None) -> Task:
        return Task(gold=gold, answer="", kind="audit", metadata=metadata)

    def same(first: str, second: str, options: tuple[str, ...] | None) -> Task:
        return Task(gold=boxed_or_all(first), answer=second)

    return Route(grade=grade, audit=audit, same=same)
