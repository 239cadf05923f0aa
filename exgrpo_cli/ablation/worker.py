"""One run of a study, as a process: `python -m exgrpo_cli.ablation.worker SETTINGS.toml FOLDER PARENT_PID`."""

import os
import signal
import sys
import threading
import time
import tomllib
from pathlib import Path

from rich.console import Console

from exgrpo_cli.config import resolve
from exgrpo_cli.errors import ExgrpoError


def main(settings: Path, folder: Path, parent: int) -> int:
    """Train, or go on training, and return the exit code; the error is the log's last line."""
    from exgrpo_cli.training.launch import train
    from exgrpo_cli.training.reporter import PlainReporter

    threading.Thread(target=stop_with, args=(parent,), daemon=True).start()
    config = resolve([(str(settings), tomllib.loads(settings.read_text()))])
    try:
        train(
            config,
            folder,
            resume=(folder / "config.toml").is_file(),
            reporter=PlainReporter(Console(stderr=True, width=160)),
        )
    except ExgrpoError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


def stop_with(parent: int) -> None:
    """Stop, state saved, when the process that started the study is gone: a killed study leaves no run behind."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
