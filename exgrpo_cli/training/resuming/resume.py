"""Which run goes on, and with which configuration: its own, with more steps where asked.

Runs that were started here with functions of the user go on without a question about their code.
"""

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.config.layers import build_config, read_config
from exgrpo_cli.config.names import named_functions
from exgrpo_cli.config.sections.run import BUDGET_STEPS
from exgrpo_cli.config.settings import RESUMABLE, Config, to_toml
from exgrpo_cli.models.cache import cache_root
from exgrpo_cli.runs.result import has_ended

# Outside the run folder: whoever sends a folder cannot send this along.
OWN_RUNS = "own-runs.jsonl"


def resumed_config(run_folder: Path, *, allow_code: bool = False, **asked: Any) -> Config:
    """The run's own configuration; what is `asked` of `build_config` may repeat it, raise `run.steps`, and change how
    many ranks there are and how long they wait for one another. More ranks share the threads of fewer.

    A run's config.toml holds the horizon its schedule began with, so more steps do not stretch a decay unless
    `optim.horizon` is set as well. Raises InputError when `run_folder` holds no run, and naming any other setting that
    would change; and for functions of the user in the configuration of a run that was not started here, unless
    `allow_code` is on.
    """
    file = run_folder / "config.toml"
    if not file.is_file():
        raise InputError(f"{run_folder} is not a run folder: it has no config.toml; start without --resume.")
    own = build_config(config_file=file, allow_code=True)
    allow_code = allow_code or is_own_run(run_folder, named_functions(own))
    wanted = build_config(config_file=file, allow_code=allow_code, **asked)
    before, after = (tomllib.loads(to_toml(config)) for config in (own, wanted))
    for section, values in after.items():
        for key, value in values.items():
            if value != before[section][key] and f"{section}.{key}" not in RESUMABLE:
                raise InputError(
                    f"--resume keeps the run's own {section}.{key} = {before[section][key]!r}, not {value!r}: "
                    "only --steps may be raised, and --nproc changed. Leave it out, or start a new run."
                )
    if wanted.run.steps < own.run.steps:
        raise InputError(
            f"--steps {wanted.run.steps} is below the run's own {own.run.steps}: a resumed run may only be lengthened."
        )
    if wanted.run.nproc > own.run.nproc > 0:
        threads = max(1, own.run.threads * own.run.nproc // wanted.run.nproc)
        wanted = replace(wanted, run=replace(wanted.run, threads=threads))
    return wanted


def newest_unfinished(runs: Path) -> Path | None:
    """The run folder under `runs` that was written to last among those that have not reached their last step."""
    folders = [file.parent for file in runs.glob("*/config.toml") if not is_finished(file.parent)]
    return max(folders, key=_last_written, default=None)


def is_finished(run_folder: Path) -> bool:
    """Whether the run ended normally: its summary is there, and its configuration asks for no further step."""
    run = read_config(run_folder / "config.toml").get("run", {})
    factor = 1 if run.get("budget", "steps") == "steps" else BUDGET_STEPS
    return has_ended(run_folder, factor * run.get("steps", 0))


def _last_written(run_folder: Path) -> float:
    journal = run_folder / "metrics.jsonl"
    return (journal if journal.is_file() else run_folder / "config.toml").stat().st_mtime


def remember_run(folder: Path, config: Config) -> None:
    """Note that this user started the run in `folder`, where its configuration names functions of the user."""
    if functions := named_functions(config):
        cache_root().mkdir(parents=True, exist_ok=True)
        with (cache_root() / OWN_RUNS).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"folder": str(folder.resolve()), "functions": functions}) + "\n")


def is_own_run(folder: Path, functions: dict[str, str]) -> bool:
    """Whether this user started the run in `folder` with exactly these functions."""
    file = cache_root() / OWN_RUNS
    wanted = {"folder": str(folder.resolve()), "functions": functions}
    return file.is_file() and any(json.loads(line) == wanted for line in file.read_text(encoding="utf-8").splitlines())
