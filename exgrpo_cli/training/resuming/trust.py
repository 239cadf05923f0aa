"""Which runs were started here with functions of the user: those go on without being asked about their code again."""

import json
from pathlib import Path

from exgrpo_cli.config.names import named_functions
from exgrpo_cli.config.settings import Config
from exgrpo_cli.models.cache import cache_root

# Outside the run folder: whoever sends a folder cannot send this along.
FILE = "own-runs.jsonl"


def remember_run(folder: Path, config: Config) -> None:
    """Note that this user started the run in `folder`, where its configuration names functions of the user."""
    if functions := named_functions(config):
        cache_root().mkdir(parents=True, exist_ok=True)
        with (cache_root() / FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"folder": str(folder.resolve()), "functions": functions}) + "\n")


def is_own_run(folder: Path, functions: dict[str, str]) -> bool:
    """Whether this user started the run in `folder` with exactly these functions."""
    file = cache_root() / FILE
    wanted = {"folder": str(folder.resolve()), "functions": functions}
    return file.is_file() and any(json.loads(line) == wanted for line in file.read_text(encoding="utf-8").splitlines())
