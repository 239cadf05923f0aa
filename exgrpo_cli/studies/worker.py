"""One run as a process: `python -m exgrpo_cli.studies.worker SETTINGS.toml FOLDER PARENT_PID [HOSTS AT ID NAME]`.

With `run.nproc` above 1, and as one of several hosts, it starts the ranks, each of which is this module again.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

from rich.console import Console

from exgrpo_cli.base.console.output import tell_warnings
from exgrpo_cli.base.errors import ExgrpoError
from exgrpo_cli.config.layers import read_config
from exgrpo_cli.config.settings import Config, resolve
from exgrpo_cli.machine.settle import settle
from exgrpo_cli.machine.survey import survey_machine
from exgrpo_cli.ranks import Ranks, Rendezvous, quieten_gloo, run_ranks, started_as_rank

MODULE = "exgrpo_cli.studies.worker"
NEW, RESUME = "new", "resume"
DAMAGE = "damaged: "
"""Beginnings of lines of a run's log that the study's terminal shows too."""


def main(
    settings: Path, folder: Path, parent: int, *, rendezvous: Rendezvous | None = None, resume: bool = False
) -> int:
    """Train, or go on training, and return the exit code; the error is the log's last line.

    `resume` is for a rank, which is told; whoever starts the ranks looks.
    """
    try:
        if started_as_rank():
            return train_as_rank(settings, folder, resume=resume)
        threading.Thread(target=stop_with, args=(parent,), daemon=True).start()
        resume = (folder / "config.toml").is_file()
        config, _ = settle(asked_config(settings, folder, resume=resume), survey_machine())
        if config.run.nproc > 1 or rendezvous is not None:
            if config.run.device == "cpu":
                quieten_gloo(os.environ)
            # Said once: on another host the folder of a new run may be there before its ranks look.
            again = RESUME if resume else NEW
            arguments = ["-m", MODULE, str(settings), str(folder), str(os.getpid()), again]
            return run_ranks(arguments, config.run.nproc, rendezvous)
        return train_as_rank(settings, folder, resume=resume)
    except ExgrpoError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code


def asked_config(settings: Path, folder: Path, *, resume: bool) -> Config:
    """The settings of the file; a run that goes on keeps the log-probs that it began with, on whatever machine."""
    layers = [(str(settings), read_config(settings))]
    if resume:
        begun = read_config(folder / "config.toml").get("rollout", {})
        layers.append((str(folder), {"rollout": {"logprobs": begun.get("logprobs", "auto")}}))
    return resolve(layers)


def train_as_rank(settings: Path, folder: Path, *, resume: bool) -> int:
    """Train as the rank that the environment names, or as the only one."""
    from exgrpo_cli.base.console.reporter import PlainReporter
    from exgrpo_cli.training.run import train

    ranks = Ranks.of_environment()
    with ranks.together():
        reporter = PlainReporter(Console(stderr=True, width=160))
        config = asked_config(settings, folder, resume=resume)
        train(config, folder, resume=resume, reporter=reporter, ranks=ranks)
    return 0


def stop_with(parent: int) -> None:
    """Stop, state saved, when the process that started the study is gone: a killed study leaves no run behind."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)


def warn_in_log() -> None:
    """Let this process, whose stderr is a log, write each of the toolkit's warnings as one line there."""

    def write(line: str, is_damage: bool) -> None:
        sys.stderr.write(f"{DAMAGE if is_damage else ''}{line}\n")

    tell_warnings(write, others=True)


if __name__ == "__main__":
    warn_in_log()
    settings, folder, parent, *rest = sys.argv[1:]
    hosts = None
    if len(rest) > 1:
        hosts = Rendezvous(num_hosts=int(rest[0]), endpoint=rest[1], run_id=rest[2], own_name=rest[3])
    sys.exit(main(Path(settings), Path(folder), int(parent), rendezvous=hosts, resume=rest == [RESUME]))
