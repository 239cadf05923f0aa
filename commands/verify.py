"""`exgrpo verify`: steps of a run made again, and compared."""

from pathlib import Path

import typer

from exgrpo_cli.commands import cli

SHOWN = 20
"""Differences that are told one by one."""


@cli.with_options
def verify(
    run: Path, steps: int = 2, seed: int = 0, keep: bool = False, allow_code: bool = False, *, speech: cli.Speech
) -> None:
    """Make some steps of a run again from its checkpoints and compare all that its folder says of them.

    Ends with 1 where anything differs. Nothing is written into the folder; with --keep the verdict is, which its
    publication and its study then carry. On a machine of another kind than the run's only a tolerance can be held.

    \b
    Examples:
      exgrpo verify runs/exgrpo-tiny
      exgrpo verify runs/exgrpo-tiny --steps 5 --seed 1 --json --keep
    """
    from exgrpo_cli.base.errors import shown
    from exgrpo_cli.base.files import file_digest, write_json
    from exgrpo_cli.base.reporter import make_reporter
    from exgrpo_cli.config.settings import Author
    from exgrpo_cli.runs.result import VERDICT_FILE
    from exgrpo_cli.training.start import resumed_config
    from exgrpo_cli.training.verify import verify as verified

    config = resumed_config(run, files=Author.of_file(allow_code))
    with make_reporter(quiet=speech.quiet) as reporter:
        report = verified(run, config, steps=steps, seed=seed, reporter=reporter)
    found = report["differences"]
    if keep:
        journal = {"journal": file_digest(run / "metrics.jsonl"), "differences": len(found)}
        write_json(run / VERDICT_FILE, {key: report[key] for key in ("steps", "exact", "made_again")} | journal)
    if report["unlike"]:
        kind = f"another kind of machine ({'; '.join(report['unlike'])})"
        cli.talk(f"{kind}: the journal's numbers alone are compared, to within {report['tolerance']:.0%}")
    if speech.json:
        cli.print_json(report | {"differences": [{key: str(value) for key, value in each.items()} for each in found]})
    else:
        for each in found[:SHOWN]:
            place = f"step {each['step']}" if "step" in each else "", each.get("row"), each.get("key")
            line = ", ".join([each["what"], *filter(None, place)])
            if "key" in each:
                line += f": recorded {shown(each['recorded'])}, recomputed {shown(each['recomputed'])}"
            cli.write_text(line)
        verdict = f"{len(found)} differences" if found else "no difference"
        made = ", ".join(map(str, report["steps"]))
        cli.write_text(f"{verdict}: steps {made} of {run}, for which {report['made_again']} were made again")
    if found:
        raise typer.Exit(1)
