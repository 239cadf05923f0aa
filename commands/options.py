"""Options that several commands share, and the two ways a command speaks: data to stdout, talk to stderr."""

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from exgrpo_cli.base.console.output import data_stream

if TYPE_CHECKING:
    from exgrpo_cli.presets import PresetKind


def presets_of(*kinds: "PresetKind", others: tuple[str, ...] = ()) -> Callable[[str], list[str]]:
    """For the shell's completion: names of presets, and `others`, that go on with the last word of a comma list."""

    def complete(incomplete: str) -> list[str]:
        from exgrpo_cli.presets import preset_names

        before, comma, begun = incomplete.rpartition(",")
        known = [*others, *(name for kind in kinds for name in preset_names(kind))]
        return [f"{before}{comma}{name}" for name in known if name.startswith(begun)]

    return complete


BackboneOption = Annotated[
    str | None,
    typer.Option(
        help="Preset, model folder, GGUF file or hub id (owner/name).",
        show_default="tiny",
        autocompletion=presets_of("backbones"),
    ),
]
DataOption = Annotated[
    str | None, typer.Option(metavar="FILE", help="Training questions.", show_default="the backbone's")
]
OutputOption = Annotated[Path | None, typer.Option("--output", metavar="PATH", help="Where the results go.")]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Seed of every random stream.", show_default="0")]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="TOML file of settings, such as a run's config.toml.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any single setting; repeatable, strongest of all."),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print the configuration and the plan, then stop.")]
AllowCodeOption = Annotated[
    bool, typer.Option("--allow-code", help="Let files of settings name your own functions (python:module:function).")
]


QuietOption = Annotated[bool, typer.Option("--quiet", help="Errors and damage only.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, everything else on stderr.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@dataclass(frozen=True, kw_only=True)
class Speech:
    """How a command speaks."""

    quiet: QuietOption = False
    json: JsonOption = False
    debug: DebugOption = False

    def flags(self) -> list[str]:
        """The same, for another process."""
        return [f"--{field.name}" for field in fields(self) if getattr(self, field.name)]


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take its options in groups: a parameter that is a dataclass becomes one option per field."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    parameters = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            own = get_type_hints(groups[name], include_extras=True)
            parameters += [_keyword(field.name, own[field.name], field.default) for field in fields(groups[name])]
        else:
            parameters.append(_keyword(name, hints[name], parameter.default))

    @wraps(command)
    def call(**values: Any) -> None:
        made = {
            name: kind(**{each.name: values.pop(each.name) for each in fields(kind)}) for name, kind in groups.items()
        }
        command(**values, **made)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def shared_options(options: Any, request: Any) -> dict[str, Any]:
    """What was given of the options that a request of the core has under the same names."""
    shared = {field.name for field in fields(options)} & {field.name for field in fields(request)}
    return {name: getattr(options, name) for name in shared if getattr(options, name) is not None}


def option_layer(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Turn {"section.key": value} into a layer of settings; None is an option that was not given."""
    layer: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        if value is not None:
            section, key = name.split(".")
            layer.setdefault(section, {})[key] = value
    return layer


def whole_path(data: str | None) -> str | None:
    """A question file by its absolute path, so that the configuration means the same from any folder."""
    return str(Path(data).resolve()) if data is not None and Path(data).exists() else data


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
    typer.echo(text + end, file=data_stream(), nl=False)


def talk(text: str, *, quiet: bool = False) -> None:
    """Write one line for people to stderr."""
    if not quiet:
        typer.echo(text, err=True)
