"""`exgrpo doctor`: what this machine can run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.commands.cli import print_json, talk, template, with_options
from exgrpo_cli.commands.train import train

if TYPE_CHECKING:
    from rich.table import Table

GIB = 2**30


@with_options
def doctor(smoke: bool = False, backbone: str | None = None, json: bool = False, debug: bool = False) -> None:
    """Say what this machine can run: packages, devices, engines, memory against each backbone.

    torch is imported; other packages are where something speaks against their versions or files, else only their
    compiled parts are loaded. `--smoke` and `exgrpo train --check` run them.

    Ends with 1 when the default `exgrpo train` would not work, or --smoke finds a problem.

    \b
    Examples:
      exgrpo doctor
      exgrpo doctor --json
      exgrpo doctor --smoke --backbone qwen-math-1.5b
    """
    from exgrpo_cli.base.reporter import make_reporter
    from exgrpo_cli.machine.doctor import examine

    if backbone is not None and not smoke:
        raise InputError(f"--backbone {backbone} says what --smoke runs: add --smoke, or leave --backbone out.")
    if smoke:
        from exgrpo_cli.config.layers import build_config
        from exgrpo_cli.models.folders import require_model_folder

        build_config(backbone=backbone)
        if backbone is not None and Path(backbone).is_dir():
            require_model_folder(Path(backbone))
    talk("exgrpo: trying what is installed, which takes a while")
    with make_reporter(quiet=False) as reporter:
        reporter.phase("trying each package in a process of its own")
        report = examine(Path.cwd())
    if json and (report["problems"] or not smoke):
        print_json(report)
    elif not json:
        _print_report(report)
    if smoke and not report["problems"]:
        # The check of a configuration is one thing, whoever asks for it.
        train(backbone=backbone, check=True, json=json, debug=debug)
    raise typer.Exit(1 if report["problems"] else 0)


def _print_report(report: Mapping[str, Any]) -> None:
    from exgrpo_cli.base.reporter import stdout_console

    console, machine = stdout_console(), report["machine"]
    cards = (f"{gpu['name']} ({gpu['memory_bytes'] / GIB:.0f} GiB)" for gpu in machine["gpus"])
    memory = f"{machine['memory_bytes'] / GIB:.0f} GiB of memory"
    console.print(f"machine: {machine['cores']} cores, {memory}, GPUs: {', '.join(cards) or 'none visible'}\n")
    packages = [(each["name"], each["version"] or "-", each["problem"] or each["trial"]) for each in report["packages"]]
    console.print(_table("package", packages))
    engines = [(each["name"], "yes" if each["usable"] else "no", each["reason"]) for each in report["engines"]]
    console.print(_table("engine", engines))
    backbones = []
    for each in report["backbones"]:
        where = f"on each of {each['gpus']} GPUs" if each["gpus"] else "on the CPU"
        would_do = "" if each["fits"] else f"; {each['gpus_of_80_gb']} x 80 GB would do"
        needs = f"{each['peak_bytes'] / GIB:.1f} GiB {where}{would_do}"
        backbones.append((each["name"], "fits" if each["fits"] else "too large", needs))
    console.print(_table("backbone", backbones))
    planned = [(each["name"], *map(_on_card, each["cards"].values())) for each in report["backbones"]]
    if planned:
        names = [f"{name.replace('x', ' x ')} GB" for name in report["backbones"][0]["cards"]]
        console.print(_table("planned for", planned, names))
    for kind in ("conflict", "problem"):
        for text in report[f"{kind}s"]:
            console.print(f"{kind}: {text}", soft_wrap=True)
    verdict = "would not work: see the problems above" if report["problems"] else "should work here: try --smoke"
    console.print(f"exgrpo train with its defaults {verdict}.", soft_wrap=True)
    if not report["problems"]:
        console.print("\n" + template("greeting").split("\n\n")[1], soft_wrap=True)


def _on_card(settings: str | None) -> str:
    return "no" if settings is None else f"with {settings}" if settings else "fits"


def _table(name: str, rows: Sequence[tuple[str, ...]], others: Sequence[str] = ("", "")) -> "Table":
    from rich.table import Column, Table

    columns = [Column(name, no_wrap=True), *(Column(other, overflow="fold") for other in others)]
    table = Table(*columns, box=None, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*row)
    return table
