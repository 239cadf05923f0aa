"""Options of the commands, and the two ways a command speaks: data to stdout, talk to stderr."""

import inspect
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from exgrpo_cli.base.data import tables
from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.output import data_stream, printable, say, wrapped

if TYPE_CHECKING:
    from exgrpo_cli.presets import PresetKind

R = TypeVar("R")


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
    """Make each parameter of a command an option, worded as options.toml has it; a dataclass is one for every field."""
    words = tables(__file__, "options.toml")
    groups: dict[str, Any] = {}
    given: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    for name, kind in get_type_hints(command).items():
        if is_dataclass(kind):
            groups[name] = kind
            given |= get_type_hints(kind)
            defaults |= {field.name: field.default for field in fields(kind)}
        elif name != "return":
            given[name], defaults[name] = kind, inspect.signature(command).parameters[name].default

    @wraps(command)
    def call(**values: Any) -> None:
        made = {
            name: kind(**{each.name: values.pop(each.name) for each in fields(kind)}) for name, kind in groups.items()
        }
        command(**values, **made)

    call.__annotations__ = {
        name: Annotated[kind, _option(name, words["shared"].get(name, {}) | words[command.__name__].get(name, {}))]
        for name, kind in given.items()
    }
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=annotation)
        for name, annotation in call.__annotations__.items()
    ]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


def _option(parameter: str, words: dict[str, Any]) -> Any:
    own = dict(words)
    name, is_argument = own.pop("name", f"--{parameter.replace('_', '-')}"), own.pop("argument", False)
    kinds, others = own.pop("presets", ()), own.pop("others", ())
    if kinds:
        own["autocompletion"] = _presets_of(kinds, others)
    return typer.Argument(**own) if is_argument else typer.Option(name, **own)


def shared_options(options: Any, request: Any) -> dict[str, Any]:
    """Values given of the options that a request of the core has under the same names."""
    shared = {field.name for field in fields(options)} & {field.name for field in fields(request)}
    return {name: getattr(options, name) for name in shared if getattr(options, name) is not None}


def request_of(kind: Callable[..., R], options: Any, settings: dict[str, Any], **own: Any) -> R:
    """The options as the core takes them: those of the same name, a layer of {"section.key": value}, and its own."""
    own = {"config_file": options.config, "options": option_layer(settings)} | own
    return kind(**shared_options(options, kind) | own)


def refuse_others(options: Any, kept: Collection[str], why: str) -> None:
    """Raise InputError for the first option that was given and is none of those `kept`."""
    for field in fields(options):
        if field.name not in kept and getattr(options, field.name) not in (field.default, []):
            raise InputError(f"--{field.name.replace('_', '-')} {why}: leave it out.")


def option_layer(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Turn {"section.key": value} into a layer of settings; None is an option that was not given.

    A question file goes by its absolute path, so that the configuration means the same from any folder.
    """
    layer: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        if value is not None:
            section, key = name.split(".")
            is_file = section == "data" and str(value) not in ("", ".") and Path(value).exists()
            layer.setdefault(section, {})[key] = str(Path(value).absolute()) if is_file else value
    return layer


def run_folder(name: str | None) -> Path | None:
    """The run that an option names: a folder, or `hf://OWNER/NAME` fetched from the hub."""
    if name is None:
        return None
    from exgrpo_cli.publishing.hub import local_run

    return local_run(name)


def print_json(value: Any) -> None:
    """Write one JSON object to stdout."""
    write_data(json.dumps(value, indent=2, allow_nan=False))


def write_data(text: str, *, end: str = "\n") -> None:
    """Write text to stdout."""
    typer.echo(printable(text) + end, file=data_stream(), nl=False)


def write_text(text: str) -> None:
    """Write text for people to stdout, wrapped between words on a terminal."""
    write_data(wrapped(text, data_stream()))


def talk(text: str, *, quiet: bool = False) -> None:
    """Write one line for people to stderr."""
    if not quiet:
        say(text)
