"""Options that several commands share, and the two ways a command speaks: data to stdout, talk to stderr."""

import inspect
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_type_hints

import typer

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.output import data_stream, printable, say, wrapped

if TYPE_CHECKING:
    from exgrpo_cli.presets import PresetKind

R = TypeVar("R")


def template(name: str) -> str:
    """The text of a file in presets/templates/."""
    from importlib.resources import files

    return (files("exgrpo_cli.presets") / "templates" / f"{name}.txt").read_text(encoding="utf-8")


def presets_of(*kinds: "PresetKind", others: tuple[str, ...] = ()) -> Callable[[str], list[str]]:
    """For the shell's completion: names of presets, and `others`, that go on with the last word of a comma list."""

    def complete(incomplete: str) -> list[str]:
        from exgrpo_cli.presets import preset_names

        before, comma, begun = incomplete.rpartition(",")
        known = [*others, *(name for kind in kinds for name in preset_names(kind))]
        return [f"{before}{comma}{name}" for name in known if name.startswith(begun)]

    return complete


def option(help: str, *names: str, default: str | None = None, of: "PresetKind | None" = None, **more: Any) -> Any:
    """An option by its help, with what holds where it is not given, and the presets that complete it in a shell."""
    if default is not None:
        more["show_default"] = default
    if of is not None:
        more["autocompletion"] = presets_of(of)
    return typer.Option(*names, help=help, **more)


BackboneOption = Annotated[
    str | None,
    option("Model: a preset, a model folder, a GGUF file or a hub id (owner/name).", default="tiny", of="backbones"),
]
DataOption = Annotated[str | None, option("Training questions.", metavar="FILE", default="the backbone's")]
HeldoutOption = Annotated[
    str | None,
    option(
        "Held-out questions: a file, a benchmark, none, or a share of the training ones, such as 0.1.",
        metavar="SET",
        default="the backbone's; of your own data a tenth, at most 500",
    ),
]
OutputOption = Annotated[Path | None, option("Where the results go.", "--output", metavar="PATH")]
SeedOption = Annotated[int | None, option("Seed of every random stream.", "--seed", default="0")]
ConfigOption = Annotated[
    Path | None, option("TOML file of settings, such as a run's config.toml.", "--config", metavar="FILE")
]
SetOption = Annotated[
    list[str] | None,
    option("Any single setting; repeatable, strongest of all.", "--set", metavar="SECTION.KEY=VALUE"),
]
DryRunOption = Annotated[bool, option("Print the configuration and the plan, then stop.", "--dry-run")]
AllowCodeOption = Annotated[
    bool, option("Let files of settings name your own functions (python:module:function).", "--allow-code")
]
LauncherOption = Annotated[
    Literal["local", "slurm"] | None,
    option(
        "Where runs are started: here, or by Slurm, whose tasks the slurm table of --config describes.", default="local"
    ),
]
QuietOption = Annotated[bool, option("Errors and damage only.", "--quiet")]
JsonOption = Annotated[bool, option("One JSON object on stdout, everything else on stderr.", "--json")]
DebugOption = Annotated[bool, option("Show the traceback of an error.", "--debug")]


@dataclass(frozen=True, kw_only=True)
class Speech:
    """Options of a command's output."""

    quiet: QuietOption = False
    json: JsonOption = False
    debug: DebugOption = False

    def flags(self) -> list[str]:
        """The same, for another process."""
        return [f"--{field.name}" for field in fields(self) if getattr(self, field.name)]


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take its options in groups: a parameter that is a dataclass becomes one option per field."""
    groups: dict[str, Any] = {}
    given: dict[str, tuple[Any, Any]] = {}
    for name, kind in get_type_hints(command, include_extras=True).items():
        if is_dataclass(kind):
            groups[name], hints = kind, get_type_hints(kind, include_extras=True)
            given |= {field.name: (hints[field.name], field.default) for field in fields(kind)}
        elif name != "return":
            given[name] = kind, inspect.signature(command).parameters[name].default

    @wraps(command)
    def call(**values: Any) -> None:
        made = {
            name: kind(**{each.name: values.pop(each.name) for each in fields(kind)}) for name, kind in groups.items()
        }
        command(**values, **made)

    call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for name, (annotation, default) in given.items()
        ]
    )
    call.__annotations__ = {name: annotation for name, (annotation, _) in given.items()}
    return call


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
