"""Options of the commands, and the two ways a command speaks: data to stdout, talk to stderr."""

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import wraps
from pathlib import Path
from types import GenericAlias
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import typer

from exgrpo_cli.base import data, errors, output
from exgrpo_cli.config.requests import RunRequest, StudyRequest

if TYPE_CHECKING:
    from exgrpo_cli.presets import PresetKind

Request = TypeVar("Request", RunRequest, StudyRequest)
_KINDS = {"str": str, "int": int, "float": float, "strs": list[str], "floats": list[float]}
_NOT_OF_TYPER = ("name", "argument", "presets", "others", "sets", "type", "choices", "file", "alone", "beside")
"""Words of options.toml that are ours."""


def template(name: str) -> str:
    """The text of a file in presets/templates/."""
    from importlib.resources import files

    return (files("exgrpo_cli.presets") / "templates" / f"{name}.txt").read_text(encoding="utf-8")


def _presets_of(kinds: Sequence["PresetKind"], others: Sequence[str]) -> Callable[[str], list[str]]:
    """For the shell's completion: names of presets, and `others`, that go on with the last word of a comma list."""

    def complete(incomplete: str) -> list[str]:
        from exgrpo_cli.presets import preset_names

        before, comma, begun = incomplete.rpartition(",")
        known = [*others, *(name for kind in kinds for name in preset_names(kind))]
        return [f"{before}{comma}{name}" for name in known if name.startswith(begun)]

    return complete


@dataclass(frozen=True, kw_only=True)
class Speech:
    """Options of a command's output."""

    quiet: bool = False
    json: bool = False
    debug: bool = False

    def flags(self) -> list[str]:
        """The same, for another process."""
        return [f"--{field.name}" for field in fields(self) if getattr(self, field.name)]


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Make each parameter of a command an option, and of a dataclass each field, as options.toml has them.

    What is not given is left to the defaults of the command and of its dataclasses.
    """
    shared, own = (data.tables(__file__, "options.toml")[name] for name in ("shared", command.__name__))
    groups: dict[str, Any] = {name: kind for name, kind in get_type_hints(command).items() if is_dataclass(kind)}
    kinds: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    for taken in (command, *groups.values()):
        kinds |= get_type_hints(taken)
        defaults |= {name: each.default for name, each in inspect.signature(taken).parameters.items()}
    words = {name: own.get(name) or shared[name] for name in own.get("options", defaults)}

    @wraps(command)
    def call(**values: Any) -> None:
        given = {name: value for name, value in values.items() if value is not None and value != []}
        _refuse_others([name for name, value in given.items() if value != defaults.get(name)], words)
        for name in [name for name in given if "sets" in words[name]]:
            value, place = given.pop(name), given
            *path, key = words[name]["sets"].split(".")
            for part in path:
                place = place.setdefault(part, {})
            place[key] = lasting(value) if words[name].get("file") else value
        for name, kind in groups.items():
            given[name] = kind(**{each.name: given.pop(each.name) for each in fields(kind) if each.name in given})
        command(**given)

    call.__annotations__ = {
        name: Annotated[_kind(kinds.get(name), each), _option(name, each)] for name, each in words.items()
    }
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(name), annotation=annotation)
        for name, annotation in call.__annotations__.items()
    ]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


def _kind(kind: Any, words: dict[str, Any]) -> Any:
    """Type of an option as Typer takes it; of one that stands for a setting it is told beside its words."""
    if "sets" in words:
        kind = Literal.__getitem__(tuple(words["choices"])) if "choices" in words else _KINDS[words["type"]]
        return kind | None
    return GenericAlias(list, get_args(kind)) | None if get_origin(kind) is Sequence else kind


def _option(parameter: str, words: dict[str, Any]) -> Any:
    own = {name: value for name, value in words.items() if name not in _NOT_OF_TYPER}
    if kinds := words.get("presets"):
        own["autocompletion"] = _presets_of(kinds, words.get("others", ()))
    return typer.Argument(**own) if words.get("argument") else typer.Option(_flag(parameter, words), **own)


def _flag(parameter: str, words: dict[str, Any]) -> str:
    return words.get("name", f"--{parameter.replace('_', '-')}")


def _refuse_others(given: Sequence[str], words: dict[str, Any]) -> None:
    """Raise InputError for the first option given that one which stands `alone` does not go with."""
    for name in given:
        for other in given:
            if "alone" in words[name] and other not in (name, *words[name]["beside"]):
                raise errors.InputError(f"{_flag(other, words[other])} {words[name]['alone']}: leave it out.")


def lasting(name: str) -> str:
    """A question file by its absolute path, so that a configuration means the same from any folder; else the name."""
    return str(Path(name).absolute()) if name not in ("", ".") and Path(name).exists() else name


def with_run(request: Request) -> Request:
    """The request with the folder of the run that it replays from: one on the hub (`hf://OWNER/NAME`) is fetched."""
    if request.replay_from is None:
        return request
    from exgrpo_cli.publishing.hub import local_run

    return replace(request, replay_from=str(local_run(request.replay_from)))


def print_json(value: Any) -> None:
    """Write one JSON object to stdout."""
    write_data(json.dumps(value, indent=2, allow_nan=False))


def write_data(text: str, *, end: str = "\n") -> None:
    """Write text to stdout."""
    typer.echo(output.printable(text) + end, file=output.data_stream(), nl=False)


def write_text(text: str) -> None:
    """Write text for people to stdout, wrapped between words on a terminal."""
    write_data(output.wrapped(text, output.data_stream()))


def talk(text: str, *, quiet: bool = False) -> None:
    """Write one line for people to stderr."""
    if not quiet:
        output.say(text)
