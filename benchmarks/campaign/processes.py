"""Command lines in processes of their own, forked from one that has imported everything, and what became of them."""

import argparse
import ctypes
import importlib
import json
import os
import pkgutil
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "DS_ACCELERATOR": "cpu",
}
sys.path.insert(0, str(Path(__file__).parents[2]))

import matplotlib.backends.backend_pdf
import matplotlib.backends.backend_svg
import matplotlib.pyplot
import torch
import transformers.models.llama.modeling_llama  # noqa: F401

import exgrpo_cli.publishing
import exgrpo_cli.show.figures
import exgrpo_cli.training.run
from exgrpo_cli.commands import run

with suppress(ImportError):
    import deepspeed  # noqa: F401
for package in (
    exgrpo_cli.show,
    exgrpo_cli.show.figures,
    exgrpo_cli.publishing,
    exgrpo_cli.studies,
    exgrpo_cli.evaluation,
):
    for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(found.name)

torch.set_num_threads(1)
MEMORY = 8 << 30
"""Bytes of address space that a command may take."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command ended with; `code` is minus the signal that ended it, and -99 where its time was over."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def ugly(self) -> str:
        """Why a user would call it a defect; empty where there is no reason."""
        if "Traceback" in self.err or "Traceback" in self.out:
            return "traceback"
        if "unexpected " in self.err:
            return "unexpected"
        if self.code not in (0, 1, 2, 130):
            return f"ended by {self.code}"
        lines = [line for line in self.err.splitlines() if line.startswith("exgrpo: ")]
        return "no line" if self.code and not lines else ""


@dataclass(frozen=True, slots=True)
class Finding:
    """One trial: what was done, to what, and its class."""

    trial: int
    what: str
    verdict: str
    code: int
    line: str


def draw_nothing(figure: matplotlib.figure.Figure, file: Any, *, format: str, **_: Any) -> None:
    """Stand in for `Figure.savefig`, which takes more time than all else that many commands do."""
    file.write("<svg></svg>" if format == "svg" else b"drawn")


def start(
    arguments: list[str],
    folder: Path,
    out: Path,
    err: Path,
    *,
    stdin: str = "",
    draws: bool = True,
    **variables: str,
) -> int:
    """Fork a command into a session of its own, which draws its figures or makes empty ones; returns its process id."""
    child = os.fork()
    if child:
        return child
    try:
        os.setsid()
        os.chdir(folder)
        os.environ |= variables
        as_a_user()
        if not draws:
            matplotlib.figure.Figure.savefig = draw_nothing
        signal.signal(signal.SIGINT, signal.default_int_handler)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        given = out.with_suffix(".in")
        given.write_text(stdin)
        for number, path, flags in ((0, given, os.O_RDONLY), (1, out, os.O_WRONLY), (2, err, os.O_WRONLY)):
            os.dup2(os.open(path, flags | os.O_CREAT | (os.O_TRUNC if number else 0), 0o644), number)
        code = run(arguments)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    except BaseException:  # noqa: BLE001 - shown, and the process ends
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        os._exit(99)
    raise AssertionError


def as_a_user() -> None:
    """Let file permissions count in this process, also where root runs it: two capabilities go."""
    if os.geteuid():
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    for place in (0, 1):
        sets[place] &= ~0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, of the effective and the permitted ones
    assert libc.capset(header, sets) == 0


def end(child: int, seconds: float) -> int:
    """Wait for a process; kill its session after so many seconds."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -99


def exgrpo(arguments: list[str], folder: Path, *, seconds: float = 240.0, **options: Any) -> Outcome:
    """Run a command in a folder to its end."""
    with tempfile.TemporaryDirectory() as name:
        out, err = Path(name, "out"), Path(name, "err")
        begin = time.monotonic()
        code = end(start(arguments, folder, out, err, **options), seconds)
        took = time.monotonic() - begin
        return Outcome(code, out.read_text(errors="replace"), err.read_text(errors="replace"), round(took, 2))


def apart(function: Callable[..., Any], *given: Any) -> Any:
    """Call a function in a fork and return what it returned, through JSON, so that no library starts threads here."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = {"value": function(*given)}
        except BaseException as error:  # noqa: BLE001 - told to the caller, which goes on
            answer = {"error": repr(error)}
        with os.fdopen(write, "w") as pipe:
            json.dump(answer, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answer = json.load(pipe)
    os.waitpid(child, 0)
    return answer["value"] if "value" in answer else answer["error"]


def fresh_copy(source: Path, target: Path) -> Path:
    """`target` as a new copy of the folder `source`, links kept."""
    if target.is_symlink() or target.is_file():
        target.unlink()
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, symlinks=True)
    return target


def parser_of(told: str | None, count: int, what: str) -> argparse.ArgumentParser:
    """The options that every campaign has, of `count` trials of `what`; `told` is its module's text."""
    parser = argparse.ArgumentParser(description=told, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=count, help=what)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trial", type=int, help="this one alone")
    parser.add_argument("--all", action="store_true", help="tell every trial as soon as it is over, not only defects")
    parser.add_argument("--folder", type=Path, help="the whole folders, built there once and kept")
    parser.add_argument("--json", action="store_true", help="one JSON object for each kind")
    return parser


def trials_of(options: argparse.Namespace, count: int | None = None, first: int = 0) -> Iterable[int]:
    """Numbers of the trials that are asked for."""
    return [options.trial] if options.trial is not None else range(first, first + (count or options.count))


def campaign(
    name: str,
    options: argparse.Namespace,
    numbers: Iterable[int],
    trial: Callable[[int], Finding],
    bad: Iterable[str],
) -> int:
    """Run the trials and tell what they found; returns how many are defects."""
    findings = []
    for number in numbers:
        findings.append(trial(number))
        if options.all or options.trial is not None:
            print(findings[-1], flush=True)
    return tell(name, findings, as_json=options.json, bad=bad)


def tell(name: str, findings: Iterable[Finding], *, as_json: bool, bad: Iterable[str]) -> int:
    """Print the counts and every finding that is a defect; returns how many are."""
    findings = list(findings)
    counts: Mapping[str, int] = Counter(finding.verdict for finding in findings)
    defects = [finding for finding in findings if finding.verdict in bad]
    if as_json:
        print(json.dumps({"name": name, "counts": counts, "defects": [asdict(each) for each in defects]}))
    else:
        for each in defects:
            print(f"{each.verdict:8} #{each.trial} {each.what}: {each.code} {each.line}")
        print(name, len(findings), dict(counts), flush=True)
    return len(defects)
