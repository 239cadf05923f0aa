"""`exgrpo publish`: a run or a study on the Hugging Face hub."""

from pathlib import Path

from exgrpo_cli.commands.cli import Speech, print_json, talk, with_options, write_data


@with_options
def publish(
    folder: Path,
    to: str,
    private: bool = False,
    results: list[Path] | None = None,
    no_ledger: bool = False,
    dry_run: bool = False,
    *,
    speech: Speech,
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
        if dry_run and speech.json:
            print_json({"repositories": plans})
        for plan in plans:
            size = f"{plan['bytes'] / 2**20:.1f} MiB"
            title = f"{plan['type']} {to}: {len(plan['files'])} files, {size}"
            if not dry_run:
                talk(f"exgrpo: {title}", quiet=speech.quiet)
            elif not speech.json:
                write_data("\n".join([title, *(f"  {size:>12,}  {name}" for name, size in plan["files"].items())]))
        if dry_run:
            return
        if speech.quiet:
            from huggingface_hub.utils import disable_progress_bars

            disable_progress_bars()
        addresses = upload(packages, to, private=private)
    print_json({"published": addresses}) if speech.json else write_data("\n".join(addresses))
