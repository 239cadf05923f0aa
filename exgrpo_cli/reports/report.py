"""`report.html`: the page of a run or of a study, written into its folder."""

import warnings
from pathlib import Path

from exgrpo_cli.base.errors import DamageWarning, InputError
from exgrpo_cli.reports.page import REPORT_FILE, write_page
from exgrpo_cli.reports.run_page import is_run, run_page
from exgrpo_cli.reports.study_page import is_study, study_page
from exgrpo_cli.runs.checksums import CHECKSUMS_FILE, find_changes


def write_report(folder: Path, path: Path | None = None) -> Path:
    """Write the page of a run or a study to `path` (FOLDER/report.html) and return where it is.

    Warns of files that are not as the runs wrote them, and of sections not shown whole. Raises InputError for a folder
    that is neither, RunError where the page cannot be written.
    """
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder. Name the --output folder of a run or of a study.")
    if is_run(folder):
        page = run_page(folder)
    elif is_study(folder):
        page = study_page(folder)
    else:
        raise InputError(f"{folder} is neither a run (no config.toml) nor a study (no ARM/seed-N/config.toml).")
    path = path or folder / REPORT_FILE
    write_page(page, path)
    runs = [folder] if is_run(folder) else sorted(file.parent for file in folder.glob(f"*/seed-*/{CHECKSUMS_FILE}"))
    for gap in [*(change for run in runs for change in find_changes(run)), *page.not_shown()]:
        warnings.warn(gap, DamageWarning, stacklevel=2)
    return path
