"""`exgrpo presets`: what ships, and one preset resolved."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from exgrpo_cli.commands.cli import print_json, with_options, write_data

if TYPE_CHECKING:
    from exgrpo_cli.presets import PresetKind

GROUPS = {
    "baseline": "methods: baselines",
    "exgrpo": "methods: ExGRPO and its arms",
    "replay": "methods: other replay methods",
}
"""Values of a method's `about.group`, and their headings in the list."""
DEFAULT_GROUP = "exgrpo"


@with_options
def presets(name: str | None = None, json: bool = False, debug: bool = False) -> None:
    """List the presets, or show one resolved as TOML.

    A backbone, a method or a regime is shown with every setting that a run of it uses, as `--config` takes it.

    \b
    Examples:
      exgrpo presets
      exgrpo presets qwen-math-1.5b
    """
    import tomli_w

    from exgrpo_cli.presets import KINDS, find_preset, load_preset, preset_names

    if name is None:
        known = {kind: {own: load_preset(kind, own).get("about", {}) for own in preset_names(kind)} for kind in KINDS}
        titles = {kind: {each: about.get("title", "") for each, about in own.items()} for kind, own in known.items()}
        print_json(titles) if json else _print_listing(known)
        return
    kind = find_preset(name)
    about, settings = load_preset(kind, name).get("about", {}), _resolved(kind, name)
    if json:
        print_json({"kind": kind, "name": name, "about": about, "settings": settings})
        return
    # What is known about the preset goes into comments: still a file for `--config`.
    comments = "".join(f"# {line}\n" for line in tomli_w.dumps(about).splitlines())
    write_data(f"{comments}\n{tomli_w.dumps(settings)}" if comments else tomli_w.dumps(settings), end="")


def _resolved(kind: "PresetKind", name: str) -> dict[str, Any]:
    """Every setting of a backbone, a method or a regime; a benchmark or a claim has its own and no others."""
    from exgrpo_cli.config.layers import build_config
    from exgrpo_cli.presets import load_preset, preset_settings

    if kind in ("benchmarks", "claims"):
        return preset_settings(kind, name)
    needs_run = load_preset(kind, name).get("about", {}).get("needs_run", False)
    options = {"replay": {"warm_start": "RUN"}} if needs_run else None
    named: dict[str, Any] = {kind.removesuffix("s"): name}
    return asdict(build_config(**named, options=options))


def _print_listing(known: dict["PresetKind", dict[str, dict[str, Any]]]) -> None:
    """A table of names and titles, methods in their groups: baselines, ExGRPO and its arms, other replay methods."""
    from rich.table import Column, Table

    from exgrpo_cli.base.reporter import print_table

    table = Table(Column("name", no_wrap=True), "what it is", box=None, padding=(0, 2), show_header=False)
    for kind, presets in known.items():
        for group, heading in GROUPS.items() if kind == "methods" else [(DEFAULT_GROUP, kind)]:
            table.add_row(heading, "", style="bold")
            for name, about in presets.items():
                if kind != "methods" or about.get("group", DEFAULT_GROUP) == group:
                    table.add_row(f"  {name}", about.get("title", ""))
    print_table(table)
