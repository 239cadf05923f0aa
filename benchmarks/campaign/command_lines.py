"""Command lines drawn from the program's own options and settings, with values that nobody should give.

    python benchmarks/campaign/command_lines.py --count 350 --seed 1

Options come from the commands themselves and keys of `--set` and `--config` from the sections, so that what is added
is drawn too. Each line runs in a folder with a run, a question file, a results folder and oddities. Its class:

done     exit code 0
refused  exit code 2, and a line
late     exit code 1, and a line: for bad input it should have been 2 (read by hand)
stopped  still at work after its time
ugly     a traceback, "unexpected", a signal, no line at all
changed  a file that was there before is another one, or gone
"""

import hashlib
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main
from processes import Finding, campaign, exgrpo, fresh_copy, parser_of, trials_of
from results import SMALL

from exgrpo_cli.commands import app
from exgrpo_cli.config.settings import Config, flat

BAD = ("ugly", "changed", "late")
# fmt: off
NUMBERS = (
    "-1", "0", "1", "2", "nan", "inf", "-inf", "1e308", "1e-320", "1" + "0" * 30, "9" * 5000, "", " ", "0x10",
    "1_0", "½", "1.5", "true", "-", "--", "1e400", "٣",
)
TEXTS = (
    "", " ", "x", "-x", "--", "a/b", "-owner/name", "a/b/c/d", "../..", "é" * 200, "\u001b[2J", "a\nb", "tiny",
    "exgrpo", "python:os:system", "python:", "python:x", "hf://", "hf://a/b", "gym:", "gym:nothing", "a" * 300,
    "ratio", "👍",
)
PATHS = (
    "run", "run@", "run@best", "run@step-9", "q.parquet", "res", "empty", "text.txt", "nested.toml", "bom.toml",
    "wrong.toml", "digits.toml", "none", "", ".", "/", "/dev/null", "/dev/full", "a" * 300, "none/none", "loop",
    "fifo", "bad.jsonl", "small.toml", "run/config.toml", "run/data", "zip.parquet", "model", "method.toml",
)
URLS = (
    "http://", "http://[::1", "http://127.0.0.1:abc", "http://exa mple", "ftp://127.0.0.1/x", "127.0.0.1",
    "file:///", "http://127.0.0.1:1", "http://a:b@127.0.0.1:1/v1?key=x", "http://" + "a" * 300, "",
    "http://127.0.0.1:99999/v1",
)
VALUES = (
    "-1", "0", "1e308", "nan", "inf", "'x'", "\"\"", "[]", "{}", "true", "[1, 2]", "x", "1979-05-27",
    "10000000000000", "0.5", "1", "'python:os:system'", "[[[]]]", "1\nrun.seed=2", "9" * 5000, "'\\u001b[2J'",
    "",
)
# fmt: on
NEEDED = {
    "folder": ["run"],
    "runs": ["run"],
    "model": ["--model", "run"],
    "question": ["2 + 2 = ?"],
    "to": ["--to", "a/b"],
    "benchmarks": ["arithmetic"],
}
"""What a line that is right says of these."""


def build(folder: Path) -> None:
    """What the lines are about."""
    (folder / "small.toml").write_text(SMALL)
    cache = str(folder / "cache")
    done = exgrpo(["train", "--config", "small.toml", "--output", "run"], folder, seconds=1800, EXGRPO_CACHE=cache)
    assert done.code == 0, done.err
    done = exgrpo(["prepare", "arithmetic", "--output", "q.parquet"], folder)
    assert done.code == 0, done.err
    arguments = ["evaluate", "arithmetic", "--data", "run/data/heldout.parquet", "--model", "run", "--output", "res"]
    done = exgrpo(arguments, folder)
    assert done.code == 0, done.err
    (folder / "empty").mkdir()
    (folder / "text.txt").write_text("text")
    (folder / "nested.toml").write_text("a = " + "[" * 5000)
    (folder / "digits.toml").write_text("[run]\nsteps = " + "9" * 5000)
    (folder / "bom.toml").write_bytes(b"\xef\xbb\xbf[run]\nsteps = 3\n")
    (folder / "wrong.toml").write_text("slurm = 3\nrun = 4\n")
    (folder / "method.toml").write_text("[replay]\nratio = 'much'\n")
    (folder / "bad.jsonl").write_text('{"question": 1}\nnothing\n')
    (folder / "zip.parquet").write_bytes(b"PAR1" + os.urandom(400) + b"PAR1")
    os.mkfifo(folder / "fifo")
    (folder / "loop").symlink_to("loop")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"model_type": "llama", "hidden_size": -5}')


def drawn(rng: random.Random) -> list[str]:
    """A command with up to three options, and up to two of the keys that it lets one set."""
    commands = typer.main.get_command(app).commands
    name = rng.choice(sorted(commands))
    parameters = {own.name: own for own in commands[name].params if own.name not in ("help", "debug", "quiet")}
    line = [name]
    given = rng.sample(sorted(parameters), min(len(parameters), rng.randint(1, 3)))
    for parameter in parameters:
        if parameter in given:
            line += _given(parameters[parameter], rng)
        elif parameter in NEEDED and rng.random() < 0.9:
            # What is wrong behind a missing argument is not reached without it.
            argument = parameters[parameter].param_type_name == "argument"
            line += NEEDED[parameter][-1:] if argument else NEEDED[parameter]
    if "assignments" in parameters or "set" in parameters:
        for _ in range(rng.randint(0, 2)):
            line += ["--set", _assignment(rng)]
    if "dry_run" in parameters and "--dry-run" not in line:
        line.append("--dry-run")
    return line


def _given(parameter: Any, rng: random.Random) -> list[str]:
    if parameter.param_type_name == "argument":
        return [rng.choice((*PATHS, *TEXTS, *PATHS))]
    option = rng.choice(parameter.opts)
    if parameter.is_flag:
        return [option]
    if option == "--set":
        return [option, _assignment(rng)]
    kind = str(parameter.bare_type).lower()
    if "int" in kind or "float" in kind:
        return [option, rng.choice(NUMBERS)]
    if parameter.name == "endpoint":
        return [option, rng.choice(URLS)]
    if parameter.name in ("data", "config", "output", "model", "backbone", "replay_from", "results", "heldout"):
        return [option, rng.choice(PATHS)]
    return [option, rng.choice((*TEXTS, *NUMBERS, *PATHS))]


def _assignment(rng: random.Random) -> str:
    key = rng.choice(sorted(flat(Config())))
    return rng.choice((f"{key}={rng.choice(VALUES)}",) * 9 + (f"{key}", f"{key[:-1]}=1", f"=1{key}", f"{key}.x=1"))


def _state(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink() and path.suffix != ".lock" and "cache" not in path.parts:
            yield str(path.relative_to(folder)), hashlib.sha256(path.read_bytes()).hexdigest()


def trial(whole: Path, work: Path, number: int, seed: int, before: dict[str, str]) -> Finding:
    """Run one line in a copy of the folder, and class what came."""
    rng = random.Random(f"{seed} {number}")
    line = drawn(rng)
    outcome = exgrpo(line, work, seconds=40, EXGRPO_CACHE=str(work / "cache"))
    said = [own for own in outcome.err.splitlines() if own.startswith("exgrpo: ")][-1:]
    after = dict(_state(work))
    changed = [name for name in before if after.get(name) != before[name]]
    verdict = {0: "done", 2: "refused", 1: "late", -99: "stopped", 130: "stopped"}.get(outcome.code, "ugly")
    if verdict != "stopped" and outcome.ugly:
        verdict, said = "ugly", [outcome.err[-300:]]
    if changed:
        verdict, said = "changed", changed
    if after != before:
        fresh_copy_with_oddities(whole, work)
    shown = " ".join(own if len(own) < 60 else f"{own[:20]}...({len(own)})" for own in map(repr, line))
    return Finding(number, shown, verdict, outcome.code, str(said)[:400])


def fresh_copy_with_oddities(whole: Path, work: Path) -> None:
    """A copy; what is no file or folder is made anew."""
    (whole / "fifo").unlink(missing_ok=True)
    fresh_copy(whole, work)
    os.mkfifo(work / "fifo")


def main() -> None:
    options = parser_of(__doc__, 350, "lines").parse_args()
    with tempfile.TemporaryDirectory(prefix="exgrpo-lines-") as name:
        whole, work = options.folder or Path(name, "whole"), Path(name, "work")
        if not whole.is_dir():
            whole.mkdir()
            build(whole)
        fresh_copy_with_oddities(whole, work)
        before = dict(_state(work))
        defects = campaign(
            "command lines",
            options,
            trials_of(options),
            lambda number: trial(whole, work, number, options.seed, before),
            BAD,
        )
    raise SystemExit(bool(defects))


if __name__ == "__main__":
    main()
