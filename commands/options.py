"""Options that several commands share, and the two ways a command speaks: data to stdout, talk to stderr."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

OutputOption = Annotated[Path | None, typer.Option("--output", metavar="PATH", help="Where the results go.")]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Seed of every random stream.", show_default="0")]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="TOML file of settings, such as a run's config.toml.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any single setting; repeatable, strongest of all."),
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Print the resolved configuration and the plan, then stop.")
]
QuietOption = Annotated[bool, typer.Option("--quiet", help="Errors only.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, everything else on stderr.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def option_layer(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Turn {"section.key": value} into a layer of settings; None is an option that was not given."""
    layer: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        if value is not None:
            section, key = name.split(".")
            layer.setdefault(section, {})[key] = value
    return layer


def print_json(value: Any) -> None:
    """Write one JSON object to stdout."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def talk(text: str, *, quiet: bool = False) -> None:
    """Write one line for people to stderr."""
    if not quiet:
        typer.echo(text, err=True)
