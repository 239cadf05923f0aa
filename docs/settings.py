"""The page of all settings, written from the code that declares them: `python docs/settings.py` writes settings.md."""

import ast
import inspect
import re
import typing
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from exgrpo_cli.config.names import PREFIX
from exgrpo_cli.config.sections import SET, Bound
from exgrpo_cli.config.sections.run import SlurmSettings
from exgrpo_cli.config.settings import SECTIONS

PAGE = Path(__file__).with_suffix(".md")
HEAD = """# Settings

Every setting of a run, section by section, as `--set section.key=value` and files of settings (`--config`) take it.
Defaults are the program's. A backbone, a regime or a method may have its own: `exgrpo presets NAME` shows
what comes out. Unless its line says otherwise a number is 0 or more where its default is 0, and above 0 elsewhere;
upper bounds of a million and more are left out.
What wins over what is in [the command line](cli.md#where-a-setting-comes-from), the words are in the
[glossary](glossary.md). This page is written from the code by `python docs/settings.py`.
"""
ABOUT = {"replay": "What is stored, when replay begins, what is drawn and where it goes ([methods](methods.md))."}
BOOLS = {"`true`, `false`"}
TYPES = {bool: next(iter(BOOLS)), str: "text", int: "any whole number", float: "any number"}
FROM_ZERO, ABOVE_ZERO = "0 or more", "above 0"
"""The bounds that the head of the page states for all numbers."""
SHORTER = {
    "a finite number of at least 0": FROM_ZERO,
    "a finite number above 0": ABOVE_ZERO,
    "a finite number": "any number",
    "a number ": "",
    "at least -1": "-1 or more",
}


@dataclass
class Row:
    """One setting as the page has it; of several types of a section what they have alike."""

    name: str
    text: str
    defaults: dict[str, list[str]] = field(default_factory=dict)
    """{default: the types that have it}."""
    values: dict[str, None] = field(default_factory=dict)
    needs: dict[str, None] = field(default_factory=dict)


def said_of_fields(kind: type) -> dict[str, str]:
    """{field: docstring} of a settings class and of those that it is made from; the innermost counts."""
    said: dict[str, str] = {}
    for each in reversed(kind.__mro__[:-1]):
        [declared] = ast.parse(inspect.getsource(each)).body
        assert isinstance(declared, ast.ClassDef)
        for one, after in pairwise(declared.body):
            if isinstance(one, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                said[ast.unparse(one.target)] = inspect.cleandoc(after.value.value)
    return said


def toml(value: Any) -> str:
    """A default as TOML has it."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(toml, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


def allowed(hint: Any, within: Any) -> list[str]:
    """What a setting may be: its choices, or its bound, or its type; what a text may be is in its description."""
    if typing.get_origin(hint) is Literal or isinstance(within, tuple):
        names = typing.get_args(hint) if typing.get_origin(hint) is Literal else within
        return [f"`{name}module:function`" if name == PREFIX else f"`{name}`" for name in names]
    item = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else hint
    text = within.says if isinstance(within, Bound) and hint is not str else TYPES[item]
    for long, short in SHORTER.items():
        text = text.replace(long, short)
    text = re.sub(r"^from ([01]) to [\d,]{7,}$", lambda least: (FROM_ZERO, ABOVE_ZERO)[int(least[1])], text)
    text = re.sub(r", at most [\d,]{7,}$", "", text)
    return [f"a list: {text}" if item is not hint else text]


def one_of(name: str, wanted: tuple[Any, ...]) -> str:
    """A setting with its values; that any will do where they are many, of a choice that a function may replace."""
    alone = f"`{name} = {'` or `'.join(map(toml, wanted))}`"
    return alone if len(wanted) <= 4 else f"`{name}` = any of its names"


def needed(one: Field[Any]) -> Iterator[str]:
    """What must be set for a setting, or for one of its values, to be read."""
    for value, needs in one.metadata.get("needs", {}).items():
        others = " or ".join(
            f"`{name}`" if wanted is SET else one_of(name, wanted) for name, wanted in needs.others.items()
        )
        yield f"needs {others}" if value is SET else f"`{toml(value)}` needs {others}"


def rows(kinds: tuple[type, ...]) -> dict[tuple[str, str], Row]:
    """The settings of a section by name and text, in the order in which they are declared."""
    found: dict[tuple[str, str], Row] = {}
    for kind in kinds:
        hints, said = typing.get_type_hints(kind), said_of_fields(kind)
        for one in fields(kind):
            text = " ".join(said.get(one.name, "").split())
            text = re.sub(r" \(`docs/[\w-]+\.md`\)", "", text)
            row = found.setdefault((one.name, text), Row(one.name, text))
            default = one.default if one.default is not MISSING else one.default_factory()
            row.defaults.setdefault(toml(default), []).append(kind.__name__.lower())
            row.values |= dict.fromkeys(allowed(hints[one.name], one.metadata.get("within")))
            row.needs |= dict.fromkeys(needed(one))
    return found


def values(row: Row) -> str:
    """A sentence with what a setting may be, unless its text or its default has said so."""
    names = [value for value in row.values if value.startswith("`")]
    if names:
        told = all(name.split(":")[0].strip("`") in row.text for name in names) or row.values.keys() <= BOOLS
        return "" if told else f" One of {', '.join(names)}."
    [bound] = row.values
    from_zero = row.defaults.keys() <= {"0", "0.0"} or re.search(r"\b0 ", row.text)
    unsaid = bound in ("text", FROM_ZERO if from_zero else ABOVE_ZERO)
    return "" if unsaid else f" {bound[0].upper()}{bound[1:]}."


def section(name: str, kinds: tuple[type, ...], told: dict[tuple[str, str], str]) -> str:
    """One section of the page: what it is about, and its settings, those that only some places have below their names.

    `told` grows by what is said here: {(setting, text): the section}; what an earlier one has said is named by it.
    """
    about = ABOUT.get(name) or " ".join((inspect.getdoc(kinds[0]) or "").split("\n\n")[0].split())
    lines = [f"## `[{name}]`", "", re.sub(r"; `docs/.*?`", "", about), ""]
    above: list[str] = []
    for row in rows(kinds).values():
        having = [each for some in row.defaults.values() for each in some]
        default, *others = row.defaults
        unlike = [f"{', '.join(row.defaults[each])}: `{each}`" for each in others if row.name != "composition"]
        if len(having) < len(kinds) and having != above:
            above = having
            lines += ["", f"Of `{'`, `'.join(having)}`:", ""]
        needs = "; ".join(each for each in row.needs if f"where {each.removeprefix('needs ')} is given" not in about)
        needs = f" {needs[0].upper()}{needs[1:]}." if needs else ""
        setting = f"`{row.name} = {default}`{''.join(f' ({each})' for each in unlike)}"
        text = f"{row.text}{needs}{values(row)}"
        first = told.setdefault((row.name, text), name)
        lines.append(f"- {setting}: {text if first == name or len(text) < 40 else f'as in `[{first}]`.'}")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The whole page."""
    told: dict[tuple[str, str], str] = {}
    sections = {**SECTIONS, "slurm": (SlurmSettings,)}
    return "\n".join([HEAD, *(section(name, kinds, told) for name, kinds in sections.items())])


if __name__ == "__main__":
    PAGE.write_text(page())
