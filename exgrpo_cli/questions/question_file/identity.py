"""What makes two questions the same: their id, their content and the hash of a whole question set."""

import hashlib
import json
import unicodedata
from collections.abc import Sequence

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.types import Message, Question


def question_id(prompt: Sequence[Message], answer: str) -> str:
    """Hash of the last user message (NFKC, runs of white space as one blank) and the stripped answer.

    Raises InputError for a prompt without a user message.
    """
    asked = [message.content for message in prompt if message.role == "user"]
    if not asked:
        roles = [message.role for message in prompt]
        raise InputError(f"A prompt with the roles {roles} has no user message: a question needs one.")
    return hashlib.sha256(f"{normalised(asked[-1])}\x1f{answer.strip()}".encode()).hexdigest()[:16]


def question_text(question: Question) -> str:
    """The last user message."""
    return next(message.content for message in reversed(question.prompt) if message.role == "user")


def normalised(text: str) -> str:
    """NFKC, with every run of white space as one blank."""
    return " ".join(unicodedata.normalize("NFKC", text).split())


def same_content(one: Question, other: Question) -> bool:
    """Whether two questions of one id ask the same: every message, the answer and the metadata, white space aside."""

    def content(question: Question) -> list[tuple[str, str]]:
        turns = [(message.role, normalised(message.content)) for message in question.prompt]
        return [*turns, ("answer", question.answer.strip()), ("metadata", question.metadata or "")]

    return content(one) == content(other)


def content_hash(questions: Sequence[Question]) -> str:
    """sha256 over the rows (id, messages, answer, source, level, metadata if any), one JSON line each, in order."""
    digest = hashlib.sha256()
    for question in questions:
        turns = [[message.role, message.content] for message in question.prompt]
        row: list[object] = [question.id, turns, question.answer, question.source, question.level]
        row += [] if question.metadata is None else [question.metadata]
        digest.update(json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass"))
        digest.update(b"\n")
    return digest.hexdigest()
