"""The `choice` grader: which option of a multiple-choice question an answer names, by letter or by its text."""

import re

from exgrpo_cli.grading.graders.extract import last_boxed
from exgrpo_cli.types import Verdict

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

_FONT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_MARKUP = re.compile(r"[*$`_]|\\[()\[\]]|\\(?=[ ,;!])")
# The letter alone, in brackets, or before its option's text: "C", "(C)", "Option C", "C.", "C) Paris", "C: Paris".
_LETTER = re.compile(r"(?i:(?:option|choice)\s+)?[(\[]?([A-Za-z])(?:[)\]]|[.:](?=\s|$)|$)[.:)]?\s*(.*)", re.DOTALL)
_ANNOUNCED = re.compile(
    r"\b(?:answer|correct (?:option|choice))\b(?:\s+is\b)?\s*[:：=-]?\s*(?:\b(?:option|choice|letter)\b\s*)?",
    re.IGNORECASE,
)
_NAMED_FIRST = re.compile(r"[(\[]?([A-Z])(?![A-Za-z0-9'’])")


def grade_choice(gold: str, text: str, *, options: tuple[str, ...] | None, max_answer_chars: int) -> Verdict:
    """Compare the option that `text` names with the gold, which is a letter or the text of an option.

    The answer is looked for in this order: the box; the last line that says "answer" ("ANSWER: C", "the answer is
    (C)"), and there after the last "answer" that names an option; the whole text, where it is nothing but a letter or
    an option. Two options named at once are no answer.
    """
    gold_letter = named_letter(gold, options)
    if gold_letter is None:
        return Verdict.UNPARSABLE_GOLD
    answer_letter = answered_letter(text, options, max_answer_chars)
    if answer_letter is None:
        return Verdict.NO_ANSWER
    return Verdict.CORRECT if answer_letter == gold_letter else Verdict.WRONG


def named_letter(text: str, options: tuple[str, ...] | None) -> str | None:
    """Upper-case letter of the option that `text` is: a letter, an option's text, or both; None for anything else."""
    plain = _without_markup(text)
    by_text = _letter_of_option(plain, options)
    if by_text is not None:
        return by_text
    match = _LETTER.fullmatch(plain)
    if match is None:
        return None
    letter, rest = match.group(1).upper(), match.group(2)
    if LETTERS.index(letter) >= len(options or LETTERS):
        return None
    if rest and options is not None and _letter_of_option(rest, options) != letter:
        return None
    return letter


def answered_letter(text: str, options: tuple[str, ...] | None, max_answer_chars: int) -> str | None:
    """Letter of the option that a graded text settles on; None where it names none, or several."""
    boxed = last_boxed(text)
    if boxed is not None:
        return named_letter(boxed, options) if len(boxed) <= max_answer_chars else None
    plain = _without_markup(text)
    line_end = None
    for announced in reversed(list(_ANNOUNCED.finditer(plain))):
        end = plain.find("\n", announced.end(), announced.end() + max_answer_chars + 1)
        if end < 0:
            end = len(plain)
        rest = plain[announced.end() : end] if end - announced.end() <= max_answer_chars else ""
        if not rest.strip(" .:!"):
            continue
        if line_end not in (None, end):
            return None
        line_end = end
        letter = named_letter(rest.strip(" .:"), options) or _first_letter(rest, options)
        if letter is not None:
            return letter
    return named_letter(text, options) if line_end is None and len(text) <= max_answer_chars else None


def _first_letter(line: str, options: tuple[str, ...] | None) -> str | None:
    """The capital a line begins with, as in "C because ..."; not the article of "A good guess", nor "B or C"."""
    match = _NAMED_FIRST.match(line)
    if match is None:
        return None
    rest = line[match.end() :].lstrip(" )].,:")
    if re.match(r"(?:and|or|/|&)?\s*[(\[]?[A-Z]\b(?![A-Za-z'’])", rest):
        return None
    letter = match.group(1)
    is_article = letter in "AI" and re.match(r" [a-z]", line[match.end() :]) is not None
    return None if is_article or LETTERS.index(letter) >= len(options or LETTERS) else letter


def _letter_of_option(text: str, options: tuple[str, ...] | None) -> str | None:
    """Letter of the one option whose text this is, whatever its case and white space."""
    wanted = _evened(text)
    matches = [letter for letter, option in zip(LETTERS, options or (), strict=False) if _evened(option) == wanted]
    return matches[0] if len(matches) == 1 else None


def _evened(text: str) -> str:
    return " ".join(_without_markup(text).casefold().rstrip(". ").split())


def _without_markup(text: str) -> str:
    return _MARKUP.sub("", _FONT.sub(r"\1", text)).strip()
