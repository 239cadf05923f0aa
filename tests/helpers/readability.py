"""Measures of how a page reads: `python tests/helpers/readability.py README.md docs/tutorial.md`."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

FENCED = re.compile(r"^```.*?^```$", flags=re.DOTALL | re.MULTILINE)
NAMES = re.compile(r"arXiv\S* ?\d+\.\d+|\b(?:Python|torch|version) \d[\d.]*")
"""Digits that are a name: of a paper, of a version."""
NUMBER = re.compile(r"(?<![\w@./-])\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Measures:
    """Lengths of a page in Markdown and of its prose, which is what is no code, table or picture."""

    lines: int
    words: int
    early_numbers: int
    """Numbers of the prose of its first 40 lines, names aside."""
    early_decimals: int
    """Decimals among the first 300 words of its prose, names aside."""
    long_sentence: int
    """Words of the sentence than which one in ten is longer: the 90th percentile."""


def prose(text: str) -> str:
    """The page with code blocks, tables and pictures gone, a link's text in its place and inline code as one word."""
    text = re.sub(r"`[^`\n]*`", "code", FENCED.sub("\n", text))
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)|<[^>]+>", "", text)
    text = re.sub(r"\[([^\]]*)\](?:\([^)]*\)|\{[^}]*\})", r"\1", text)
    return "\n".join("" if line.startswith("|") else line for line in text.splitlines())


def sentences(text: str) -> list[str]:
    """Sentences of the prose; a heading, a paragraph and an item of a list each end one."""
    parts = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.|#+) )", prose(text))
    spoken = (re.sub(r"^\s*(?:[-*]|\d+\.|>) ", "", part) for part in parts if not part.lstrip().startswith("#"))
    found = [each for part in spoken for each in re.split(r"(?<=[.!?])[*_)\"]*\s+", " ".join(part.split()))]
    return [each for each in found if re.search(r"\w", each)]


def measures(text: str) -> Measures:
    """Measures of a page in Markdown."""
    words = NAMES.sub("name", prose(text)).split()
    early = NAMES.sub("name", prose("\n".join(text.splitlines()[:40])))
    lengths = sorted(len(each.split()) for each in sentences(text))
    return Measures(
        lines=len(text.splitlines()),
        words=len(words),
        early_numbers=len(NUMBER.findall(early)),
        early_decimals=len(re.findall(r"\d\.\d", " ".join(words[:300]))),
        long_sentence=lengths[-1 - len(lengths) // 10],
    )


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(name, measures(Path(name).read_text()))
