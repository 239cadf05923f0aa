"""The `choice` grader: which option of a multiple-choice question an answer names, by letter or by its text."""

import re
import unicodedata
from functools import lru_cache
from typing import NamedTuple

from exgrpo_cli.base.types import Verdict
from exgrpo_cli.grading.extract import last_boxed
from exgrpo_cli.grading.plain import patterns, tables, verdict_of

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

_LONGEST_LINE = 200
_LONGEST_STATEMENT = 2000

_RE = patterns("choice")
_SIGNS = str.maketrans(tables()["signs"])


def grade_choice(gold: str, text: str, *, options: tuple[str, ...] | None, max_answer_chars: int) -> Verdict:
    """Compare the option that `text` names with the gold, which is a letter or the text of an option.

    The answer is looked for in this order: the box; the last line that says "answer" ("ANSWER: C", "the answer is
    (C)"), and there after the last "answer" that names an option; the whole text, where it is nothing but a label or
    an option; the last line that says "C is correct" or "option C". Two options named at once are no answer.

    Where the gold is a digit the options are numbered: 2 and B are the second of them. Else a digit names no option.
    """
    read = Options(texts=options, is_numbered=gold.strip().strip("()").isdigit())
    gold_letter = read.named(gold)
    if gold_letter is None:
        return Verdict.UNPARSABLE_GOLD
    answer_letter = read.answered(text, max_answer_chars)
    return Verdict.NO_ANSWER if answer_letter is None else verdict_of(answer_letter == gold_letter)


def ends_in_demanded_form(text: str) -> bool:
    """Whether the last line is "ANSWER: C": what prompts of multiple-choice sets demand, in place of a box."""
    return _RE.demanded_line.fullmatch(_without_markup(text.rstrip().rpartition("\n")[2][-_LONGEST_LINE:])) is not None


class Options(NamedTuple):
    """The options of a question, and how texts name one of them by its upper-case letter."""

    texts: tuple[str, ...] | None
    """A first, where known."""
    is_numbered: bool
    """Whether a digit names an option too."""

    def named(self, text: str) -> str | None:
        """Letter of the option that `text` is: a label, an option's text, or both; None for anything else."""
        plain = _without_markup(text)
        match = _RE.letter.fullmatch(plain)
        letter = self._letter(match[1]) if match else None
        if letter and match and not match[2] and (self.is_numbered or match[1].isupper()):
            # Of options that are letters or numbers themselves the label is meant.
            return letter
        by_text = self._letter_of_text(plain)
        if by_text is not None:
            return by_text
        if letter is None or match is None:
            return self._named_with_text(plain)
        return None if match[2] and self.texts is not None and self._letter_of_text(match[2]) != letter else letter

    def answered(self, text: str, max_answer_chars: int) -> str | None:
        """Letter of the option that a graded text ends up naming; None where it names none, or several."""
        boxed = last_boxed(text)
        if boxed is not None:
            return self.named(boxed) if len(boxed) <= max_answer_chars else None
        plain = _without_markup(text)
        line_end = None
        for announced in reversed(list(_RE.announced.finditer(plain))):
            end = plain.find("\n", announced.end(), announced.end() + max_answer_chars + 1)
            end = len(plain) if end < 0 else end
            rest = plain[announced.end() : end] if end - announced.end() <= max_answer_chars else ""
            if not rest.strip(" .:!>}"):
                continue
            if line_end not in (None, end):
                break
            line_end = end
            letter = self.named(rest.strip(" .:")) or self._first(rest)
            if letter is not None:
                return letter
        whole = self.named(text) if line_end is None and len(text) <= max_answer_chars else None
        return whole or self._stated(plain)

    def _named_with_text(self, plain: str) -> str | None:
        match = _RE.with_text.fullmatch(plain.strip("()[]."))
        if match is None or self.texts is None:
            return None
        letter = self._letter(match[1] or match[4])
        return letter if letter == self._letter_of_text(match["behind"] or match["before"]) else None

    def _stated(self, plain: str) -> str | None:
        """The one option that the last line with "C is correct" or "option C" names, if no clause denies it."""
        for line in reversed(plain[-_LONGEST_STATEMENT:].splitlines()):
            named = {
                self._letter(found[1] or found[2] or found[3])
                for found in _RE.stated.finditer(line)
                if not _RE.denies.search(_RE.clause_end.split(line[: found.start()])[-1])
            }
            if named:
                return named.pop() if len(named) == 1 else None
        return None

    def _first(self, line: str) -> str | None:
        """The label a line begins with, as in "C because ..."; not the article of "A good guess", nor "B or C"."""
        match = _RE.named_first.match(line)
        if match is None:
            return None
        rest = line[match.end() :]
        # "A is correct" names an option all the same.
        is_article = match[2] in ("A", "I") and re.match(r" (?!is (?:the )?(?:correct|right|best)\b)[a-z]", rest)
        if is_article or _RE.another.match(rest.lstrip(" )].,:")):
            return None
        return self._letter(match[1] or match[2])

    def _letter(self, label: str) -> str | None:
        """Letter of the option with this label; None where there are not so many, or a digit labels none."""
        if label.isdigit() and not self.is_numbered:
            return None
        place = int(label) - 1 if label.isdigit() else LETTERS.index(label.upper())
        return LETTERS[place] if place < len(self.texts or LETTERS) else None

    def _letter_of_text(self, text: str) -> str | None:
        """Letter of the one option whose text this is, whatever its case, white space and, where needed, notation."""
        for evened in (_evened, _without_notation):
            wanted = evened(text)
            letters = [letter for letter, own in zip(LETTERS, self.texts or (), strict=False) if evened(own) == wanted]
            if wanted and len(letters) == 1:
                return letters[0]
        return None


def _evened(text: str) -> str:
    return " ".join(_without_markup(text).casefold().rstrip(". ").split())


@lru_cache(maxsize=4096)
def _without_notation(text: str) -> str:
    """The same without what tells `$\\mathrm{CO}_{2}$` from CO2; empty where that is all."""
    return _RE.loose.sub("", unicodedata.normalize("NFKC", _evened(text.translate(_SIGNS))))


def _without_markup(text: str) -> str:
    return _RE.markup.sub("", _RE.font.sub(r"\1", text)).strip()
