"""`exgrpo publish`: a run or a study on the Hugging Face hub."""

from pathlib import Path
from typing import Annotated

import typer

from exgrpo_cli.commands.cli import DebugOption, JsonOption, QuietOption, option, print_json, talk, write_data


def publish(
    folder: Annotated[Path, typer.Argument(metavar="RUN|STUDY", help="Folder of a finished run, or of a study.")],
    to: Annotated[str, option("Repository on the hub; made where missing.", "--to", metavar="OWNER/NAME")],
    private: Annotated[bool, option("Make the repositories private.", "--private")] = False,
    results: Annotated[
        list[Path] | None,
        option("Results of evaluate, for the model's card; repeatable.", "--results", metavar="FOLDER"),
    ] = None,
    no_ledger: Annotated[bool, option("The model alone.", "--no-ledger")] = False,
    dry_run: Annotated[bool, option("List files and sizes, upload nothing.", "--dry-run")] = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Publish a run as a model and its ledger as a data set, or a study as tables, with cards that say what they are.

    Paths and host names are taken out; a token in anything stops it. An upload that broke off goes on with the same
    command. Others use the ledger as hf://OWNER/NAME.

    \b
    Examples:
      exgrpo publish runs/exgrpo-tiny --to me/tiny-exgrpo --dry-run
      exgrpo publish runs/exgrpo-tiny --to me/tiny-exgrpo --private
      exgrpo publish studies/metric-ent --to me/metric-ent
    """
    from exgrpo_cli.publishing.contents import packed
    from exgrpo_cli.publishing.hub import publish as upload

    with packed(folder, to, results=results or [], ledger=not no_ledger) as packages:
        plans = [package.describe(to) for package in packages]
        if dry_run and json:
            print_json({"repositories": plans})
        for plan in plans:
            size = f"{plan['bytes'] / 2**20:.1f} MiB"
            title = f"{plan['type']} {to}: {len(plan['files'])} files, {size}"
            if not dry_run:
                talk(f"exgrpo: {title}", quiet=quiet)
            elif not json:
                write_data("\n".join([title, *(f"  {size:>12,}  {name}" for name, size in plan["files"].items())]))
        if dry_run:
            return
        if quiet:
            from huggingface_hub.utils import disable_progress_bars

            disable_progress_bars()
        addresses = upload(packages, to, private=private)
    if json:
        print_json({"published": addresses})
    else:
        write_data("\n".join(addresses))
