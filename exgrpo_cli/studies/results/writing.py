"""A study's result on disk: `results.json`, `report.md`, `table.tex`, the figures, and a copy of each run's result."""

from typing import Any

from exgrpo_cli.base.files import write_json, write_text
from exgrpo_cli.runs.result import write_result
from exgrpo_cli.show.figures.style import save
from exgrpo_cli.studies.claims.outcome import claim_outcomes, claim_rows
from exgrpo_cli.studies.results.figures import study_figures
from exgrpo_cli.studies.results.report import StudyReport, compare_runs
from exgrpo_cli.studies.results.tables import TITLE, endpoint_rows, latex, markdown, score_rows, spending_rows
from exgrpo_cli.studies.study import Study
from exgrpo_cli.studies.study_files import result_path


def report_study(study: Study) -> StudyReport:
    """Compare the finished runs and write the comparison into the study's folder."""
    keep_results(study)
    report = compare_runs(study)
    write_json(study.folder / "results.json", study_json(study, report))
    parts = [
        *([f"# {study.name}: claims", markdown(claim_rows(claim_outcomes(study)))] if study.claims else []),
        f"# {study.name}: {TITLE}",
        *(f"**{warning}**" for warning in report.warnings),
        markdown(score_rows(report)),
        markdown(endpoint_rows(report)),
        "Budgets are those that the claims state." if study.claims else f"Equal in {study.equal}.",
        markdown(spending_rows(report)),
    ]
    write_text(study.folder / "report.md", "\n\n".join(part.strip() for part in parts) + "\n")
    write_text(study.folder / "table.tex", latex(score_rows(report)))
    for name, figure in study_figures(study, report).items():
        save(figure, study.folder, name)
    return report


def study_json(study: Study, report: StudyReport) -> dict[str, Any]:
    """The comparison as `results.json` has it and `--json` prints it."""
    outcomes = {found.claim.name: found.to_json() for found in claim_outcomes(study)}
    return {**report.to_json(), **({"claims": outcomes} if outcomes else {})}


def keep_results(study: Study) -> None:
    """Copy the finished runs' results into `results/`: what another machine, or a later study, counts as these runs."""
    arms = {arm.name: arm for arm in study.arms}
    for name, results in study.results().items():
        for seed, result in results.items():
            path = result_path(study.folder, arms[name], seed)
            if not path.is_file():
                write_result(path, result)
