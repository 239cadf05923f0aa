"""What the parent decides itself, and what has to go to a worker.

Without an answer there is nothing to parse; plain numbers, letters and exact texts are compared by code that is linear
in their length. Only math-verify and users' own functions can hang, so only they need a worker.
"""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from exgrpo_cli.config.names import GYM, PREFIX
from exgrpo_cli.errors import InputError
from exgrpo_cli.grading.graders import countdown, gym
from exgrpo_cli.grading.graders.choice import (
    answered_letter,
    ends_in_demanded_form,
    grade_choice,
    named_letter,
)
from exgrpo_cli.grading.graders.comparison import compare_texts
from exgrpo_cli.grading.graders.exact import grade_exact
from exgrpo_cli.grading.graders.plain import plain_number, same_plain_number
from exgrpo_cli.grading.metadata import read_metadata, verifier_of
from exgrpo_cli.grading.notation.extract import answer_text, last_box, last_boxed
from exgrpo_cli.grading.notation.notation import in_box, plain_notation, same_text
from exgrpo_cli.grading.workers.messages import Task
from exgrpo_cli.types import AnswerFormat, Verdict

MOST_CHARS_HERE = 1 << 16
"""Length of a response above which its answer is looked for in a worker, whatever that costs; 32,768 tokens of plain
English are twice as long, and are read in a millisecond there too."""
_OPTIONS_LETTER = re.compile(r"[A-J]")


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


def route_packed(task: Task) -> Verdict | Task:
    """What is to be done of a packed response, in the worker."""
    known = json.loads(task.metadata or "")
    grader = known.pop("grader")
    route = routes_of(grader, known.pop("max_answer_chars"))[grader]
    known["answer_format"] = AnswerFormat(**known["answer_format"])
    known["options"] = known["options"] and tuple(known["options"])
    return route_item(route, GradingItem(gold=task.gold, response=task.answer, **known))


def math_route(max_answer_chars: int) -> Route:
    """math-verify in a worker. Where there is a box its content alone is parsed: a long explanation costs nothing.

    A question whose options are known is graded by them: math-verify would compare letters, never a letter and a text.
    One that brings a verifier is graded by that.
    """
    by_options = choice_route(max_answer_chars)

    def compare(gold: str, answer: str) -> Verdict | Task:
        compared = compare_texts(gold, answer)
        if compared.is_same is not None:
            return Verdict.CORRECT if compared.is_same else Verdict.WRONG
        return Task(gold=in_box(compared.gold), answer=in_box(compared.answer))

    def grade(item: GradingItem, text: str) -> Verdict | Task:
        if item.options is not None:
            return by_options.grade(item, text)
        boxed = last_boxed(text)
        answer = text if boxed is None else boxed
        if not answer or len(answer) > max_answer_chars:
            return Verdict.NO_ANSWER
        if verifier_of(item.metadata) is not None:
            return by_own_verifier(item.gold, answer, item.metadata)
        # An answer of nothing but marks is still an answer.
        gold, answer = _gold_content(item.gold), plain_notation(answer) or answer
        if boxed is None:
            if same_text(gold, answer):
                return Verdict.CORRECT
            if _OPTIONS_LETTER.fullmatch(gold) and answered_letter(text, None, max_answer_chars) is not None:
                return by_options.grade(item, text)
            return Task(gold=in_box(gold), answer=text)
        return compare(gold, answer)

    def audit(gold: str, metadata: str | None) -> Verdict | Task:
        if verifier_of(metadata) is not None:
            return by_own_verifier(gold, gold, metadata)
        content = _gold_content(gold)
        if plain_number(content) is not None:
            return Verdict.CORRECT
        return Task(gold=in_box(content), answer="", kind="audit")

    def same(first: str, second: str, options: tuple[str, ...] | None) -> Verdict | Task:
        if options is not None:
            return by_options.same(first, second, options)
        boxes = last_boxed(first), last_boxed(second)
        if boxes[0] is not None and boxes[1] is not None:
            return compare(plain_notation(boxes[0]), plain_notation(boxes[1]))
        # What a worker calls the gold may be a whole text too: the answer is found in it as in any other.
        return Task(gold=_found_in(first), answer=_found_in(second))

    def in_part(gold: str) -> Task:
        return Task(gold=in_box(_gold_content(gold)), answer="", kind="audit for parts")

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
        boxed = last_boxed(first)
        return grade_exact(first if boxed is None else boxed, second, max_answer_chars=max_answer_chars)

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
        boxed = last_boxed(first)
        return Task(gold=first if boxed is None else boxed, answer=second)

    return Route(grade=grade, audit=audit, same=same)


def _gold_content(gold: str) -> str:
    boxed = last_boxed(gold)
    return plain_notation(gold if boxed is None else boxed)


def _found_in(text: str) -> str:
    boxed = last_boxed(text)
    return text if boxed is None else in_box(plain_notation(boxed))
