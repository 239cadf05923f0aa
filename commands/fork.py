"""`exgrpo fork`: what one memory did."""

from pathlib import Path

from exgrpo_cli.commands.cli import Speech, print_json, with_options, write_text


@with_options
def fork(
    out: Speech,
    run: Path,
    step: list[int],
    steps: int = 1,
    rows: int = 0,
    seed: int = 0,
    jobs: int = 1,
    to: str = "",
    instead: bool = False,
) -> None:
    """Make a step again without each stored row or group that it replayed, one at a time, and tell what it did.

    The effect of each is on the held-out questions: on the log-probs of their gold answers, and on pass@1. Nothing is
    written into the run's folder; the same command goes on where it was stopped.

    \b
    Examples:
      exgrpo fork runs/exgrpo-tiny --step 50
      exgrpo fork runs/exgrpo-tiny --step 25 --step 50 --rows 10 --jobs 2 --json
      exgrpo fork runs/exgrpo-tiny --step 50 --instead
    """
    from exgrpo_cli.base.reporter import make_reporter, print_table
    from exgrpo_cli.show.tables import significant, table_of
    from exgrpo_cli.training import fork as forking
    from exgrpo_cli.training.start import resumed_config

    run, config, output = run.resolve(), resumed_config(run), Path(to or f"forks/{run.resolve().name}")
    with make_reporter(quiet=out.quiet) as reporter:
        report = forking.fork(run, config, sorted({*step}), steps, rows, seed, jobs, output, reporter, instead=instead)
    if out.json:
        print_json(report)
    else:
        ranked = {f"rank of {name}": known for name, known in report["rank_correlation"].items() if known}
        told = ({name: report[name] for name in forking.EFFECTS} | ranked).items()
        numbers = {end: lambda row, end=end: significant(row[1][end]) for end in ("mean", "low", "high")}
        title = f"{report['units']} units {'for another row' if instead else 'left out'}"
        print_table(table_of(title, {"": lambda row: row[0], **numbers}, list(told)))
        write_text(f"{report['table']} has them one by one")
