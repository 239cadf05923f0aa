"""`exgrpo ablate`: arms x seeds, compared."""

from typing import TYPE_CHECKING, Literal

from exgrpo_cli.commands import cli
from exgrpo_cli.commands.report import write_page
from exgrpo_cli.config.requests import StudyRequest

if TYPE_CHECKING:
    from exgrpo_cli.studies.report import Numbers
    from exgrpo_cli.studies.study import Study


@cli.with_options
def ablate(
    request: StudyRequest,
    speech: cli.Speech,
    jobs: int = 0,
    launcher: Literal["local", "slurm"] | None = None,
    dry_run: bool = False,
) -> None:
    """Compare arms over several seeds with the same question order, each against on-policy training.

    Axes are crossed. Without one: --metric ent, the entropy of stored answers. Finished runs are not run again; an
    interrupted study goes on with the same command, also from the results of other machines.

    \b
    Examples:
      exgrpo ablate --metric ent
      exgrpo ablate --sampler normal,uniform --seeds 5
      exgrpo ablate --regimes strong,hard-tail,sparse --methods grpo,exgrpo
      exgrpo ablate --claim quick --dry-run
      exgrpo ablate --methods exgrpo,latest --launcher slurm --config cluster.toml
      exgrpo ablate --vary replay.ratio=0.25,0.5,0.75 --steps 100 --dry-run
    """
    from exgrpo_cli.studies.planning import held_out_before, plan_request
    from exgrpo_cli.studies.schedule import compare, jobs_of, script, slurm_settings, time_to_go

    study = plan_request(cli.with_run(request))
    to_go = "\n".join([time_to_go(study, jobs_of(study, jobs)), *held_out_before(study)])
    slurm = slurm_settings(request.config_file, allow_code=request.allow_code) if launcher == "slurm" else None
    if dry_run:
        cli.print_json(study.describe()) if speech.json else _print_runs(study, to_go)
        if slurm is not None:
            cli.talk(script(study, slurm))
        return
    cli.talk(f"exgrpo: {len(study.runs)} runs in {study.folder}\n{to_go}", quiet=speech.quiet)
    report = compare(study, jobs=jobs, quiet=speech.quiet, slurm=slurm)
    write_page(study.folder, quiet=speech.quiet)
    cli.print_json(report) if speech.json else _print_report(study, report)


def _print_runs(study: "Study", to_go: str) -> None:
    from exgrpo_cli.base.versions import now
    from exgrpo_cli.studies.claims import claim_of

    plan = study.describe()
    against = f", against {plan['baseline']}" if plan["baseline"] else ""
    cli.talk(f"study {plan['name']} in {plan['folder']}{against}:\n{to_go}")
    hashes = dict(each.rsplit(" ", 1) for run in study.unfinished for each in run.config.run.claims)
    for name, stated in study.claims.items():
        cli.talk(str(claim_of(name, stated)))
        if name in hashes and "fixed" not in stated:
            cli.talk(f"Before its first run put into its file:\n[fixed]\nat = {now()!r}\nhash = {hashes[name]!r}")
    for run in plan["runs"]:
        cli.write_data(f"{run['arm']}\tseed {run['seed']}\t{run['steps']} steps\t{run['state']}\t{run['folder']}")


def _print_report(study: "Study", report: "Numbers") -> None:
    from exgrpo_cli.base.reporter import print_table
    from exgrpo_cli.show.headline import study_headline
    from exgrpo_cli.show.record import LEDGER_FOLDER
    from exgrpo_cli.studies.endpoints import SEEDS_FOR_A_VERDICT
    from exgrpo_cli.studies.output import report_tables

    for warning in report["warnings"]:
        cli.talk(f"warning: {warning}")
    for table in report_tables(study, report):
        print_table(table)
    cli.write_text(study_headline(report, seeds_needed=SEEDS_FOR_A_VERDICT))
    more = f"{study.folder / 'report.html'} (open it in a browser) has all endpoints, figures and what each arm spent"
    stored = [run.folder for run in study.runs if (run.folder / LEDGER_FOLDER).is_dir()]
    cli.write_text(f"{more}; the buffer of one run: exgrpo replay-stats {stored[-1]}" if stored else more)
