"""`exgrpo new`: a commented file to begin a study, a method or a grader with."""

import keyword
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.commands.cli import talk, template, with_options, write_data

_FILES = {"study": "study.toml", "method": "method.toml", "grader": "grader.py"}


@with_options
def new(kind: Literal["study", "method", "grader"], name: str, quiet: bool = False, debug: bool = False) -> None:
    """Write a commented file that works as it is, to begin a study, a method or a grader with.

    \b
    Examples:
      exgrpo new method forgetful
      exgrpo new study my-idea
      exgrpo new grader my_reward
    """
    from exgrpo_cli.presets import preset_names

    path = Path(name + Path(_FILES[kind]).suffix)
    module = name.isidentifier() and not keyword.iskeyword(name) and find_spec(name) is None
    is_name = re.fullmatch(r"[A-Za-z][\w-]{0,99}", name, re.A)
    refused = {
        "is no name: take letters, digits, _ and -, a letter first": not is_name,
        f"is there already as {path}: take another name, or move that away": path.exists(),
        "cannot be imported as a module of yours: take another, such as my_reward": kind == "grader" and not module,
        "is a preset's name: take another, such as my-method": kind == "method" and name in preset_names("methods"),
    }
    for reason, holds in refused.items():
        if holds:
            raise InputError(f"new {kind} {name!r} {reason}.")
    text = template(_FILES[kind]).replace("NAME", name)
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
    write_data(str(path))
    lines = [line.lstrip("# ") for line in text.splitlines() if name in line]
    commands = [f"  {line}" for line in lines if line.startswith("exgrpo ")]
    talk("\n".join(["It works as it is, and its comments say what to change. Try:", *commands]), quiet=quiet)
