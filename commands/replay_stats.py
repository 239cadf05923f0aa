"""`exgrpo replay-stats`: contents of the experience buffer of a run, and draws from it."""

from pathlib import Path

from exgrpo_cli.commands.cli import Speech, print_json, talk, with_options


@with_options
def replay_stats(
    runs: list[str],
    step: int | None = None,
    question: str = "",
    what_if: str = "",
    output: Path | None = None,
    plots: bool | None = None,
    *,
    speech: Speech,
) -> None:
    """Show what the experience buffer of one or several runs holds and what was replayed from it.

    Needs neither a GPU nor a model. Several runs are set side by side.

    \b
    Examples:
      exgrpo replay-stats runs/exgrpo-tiny
      exgrpo replay-stats runs/exgrpo-tiny --step 80
      exgrpo replay-stats hf://someone/their-run
      exgrpo replay-stats runs/exgrpo-tiny --what-if sampler=linear,metric=ppl
    """
    from exgrpo_cli.base.reporter import print_table
    from exgrpo_cli.publishing.hub import local_run
    from exgrpo_cli.show import statistics

    reports = statistics.report_runs([local_run(run) for run in runs], step=step, question_id=question, other=what_if)
    if plots is None:
        plots = output is not None or not (step is not None or question)
    folders = statistics.plot_folders(reports, output) if plots else []
    if speech.json:
        print_json(statistics.report_json(reports))
    else:
        for table in statistics.report_tables(reports):
            print_table(table)
    if plots:
        statistics.save_reports(reports, folders)
        talk(f"plots: {', '.join(map(str, folders))}", quiet=speech.quiet)
