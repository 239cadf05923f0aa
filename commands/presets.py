"""`exgrpo presets`: what ships, and one preset resolved."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from exgrpo_cli.commands.cli import DebugOption, JsonOption, presets_of, print_json, write_data

if TYPE_CHECKING:
    from exgrpo_cli.presets import PresetKind

GROUPS = {"baseline": "baselines", "exgrpo": "ExGRPO and its arms", "replay": "other replay methods"}
"""Values of a method's `about.group`, and their headings in the list."""
DEFAULT_GROUP = "exgrpo"


def presets(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A preset; without one, all are listed.",
            autocompletion=presets_of("backbones", "methods", "benchmarks", "regimes", "claims"),
        ),
    ] = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """List the presets, or show one resolved as TOML.

    A backbone, a method or a regime is shown with every setting that a run of it uses, as `--config` takes it.

    \b
    Examples:
      exgrpo presets
      exgrpo presets qwen-math-1.5b
    """
    from exgrpo_cli.presets import find_preset, load_preset

    if name is None:
        print_json(_listing()) if json else _print_listing(_listing())
        return
    kind = find_preset(name)
    about, settings = load_preset(kind, name).get("about", {}), _resolved(kind, name)
    if json:
        print_json({"kind": kind, "name": name, "about": about, "settings": settings})
    else:
        _print_toml(about, settings)


def _listing() -> dict[str, dict[str, str]]:
    """{kind: {name: title}}; methods in their groups: baselines, ExGRPO and its arms, other replay methods."""
    from exgrpo_cli.presets import KINDS, load_preset, preset_names

    about = {kind: {name: load_preset(kind, name).get("about", {}) for name in preset_names(kind)} for kind in KINDS}
    order = list(GROUPS)
    return {
        kind: {
            name: known.get("title", "")
            for name, known in sorted(
                presets.items(), key=lambda item: order.index(item[1].get("group", DEFAULT_GROUP))
            )
        }
        for kind, presets in about.items()
    }


def _group(name: str) -> str:
    from exgrpo_cli.presets import load_preset

    return GROUPS[load_preset("methods", name).get("about", {}).get("group", DEFAULT_GROUP)]


def _resolved(kind: "PresetKind", name: str) -> dict[str, Any]:
    """Every setting of a backbone, a method or a regime; a benchmark or a claim has its own and no others."""
    import tomllib

    from exgrpo_cli.config.layers import build_config
    from exgrpo_cli.config.settings import to_toml
    from exgrpo_cli.presets import load_preset, preset_settings

    if kind in ("benchmarks", "claims"):
        return preset_settings(kind, name)
    if kind == "backbones":
        config = build_config(backbone=name)
    elif kind == "regimes":
        config = build_config(regime=name)
    else:
        needs_run = load_preset(kind, name).get("about", {}).get("needs_run", False)
        config = build_config(method=name, options={"replay": {"warm_start": "RUN"}} if needs_run else None)
    return tomllib.loads(to_toml(config))


def _print_listing(listing: dict[str, dict[str, str]]) -> None:
    from rich.table import Table

    from exgrpo_cli.base.reporter import print_table

    table = Table(box=None, padding=(0, 2), show_header=False)
    table.add_column("name", no_wrap=True)
    table.add_column("what it is")
    shown = ""
    for kind, titles in listing.items():
        for name, title in titles.items():
            heading = f"methods: {_group(name)}" if kind == "methods" else kind
            if heading != shown:
                table.add_row(heading, "", style="bold")
                shown = heading
            table.add_row(f"  {name}", title)
    print_table(table)


def _print_toml(about: dict[str, Any], settings: dict[str, Any]) -> None:
    """The settings, with what is known about the preset as comments: still a file for `--config`."""
    import tomli_w

    known = "".join(f"# {line}\n" for line in tomli_w.dumps(about).splitlines())
    write_data(f"{known}\n{tomli_w.dumps(settings)}" if known else tomli_w.dumps(settings), end="")
