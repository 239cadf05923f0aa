"""Damages drawn at random, over every kind of file that the program leaves and reads again.

    python benchmarks/campaign/damages.py --count 700 --seed 1        # all targets, their share of the count
    python benchmarks/campaign/damages.py --only resume --count 50

A trial copies a whole folder, damages one thing in it, and runs the command that reads it. Its class:

healed   exit code 0 and the result of the undamaged folder
told     exit code 0, another result, and a line that names what is damaged
other    the same of a file that its user writes, in which another value is another wish (read by hand)
named    another exit code, and a line that names what is damaged
vague    another exit code, and a line that does not name it (read by hand)
ugly     a traceback, "unexpected", a signal, no line at all
silent   exit code 0, another result, and not a word
lost     what was not damaged is not as it was, after a command that only reads or refuses
"""

import argparse
import copy
import hashlib
import json
import math
import os
import random
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from processes import Finding, Outcome, apart, end, exgrpo, start, tell

SMALL = """
run = {steps = 4, save_every = 1, keep_checkpoints = 3, plots = false}
rollout = {questions_per_step = 6}
replay = {start_threshold = 0}
arithmetic = {num_heldout = 12, num_train = 60}
validation = {every = 2}
"""
BAD = ("ugly", "silent", "vague", "lost")
JSON_VALUES = (
    None,
    "x",
    -1,
    1e308,
    math.nan,
    math.inf,
    10**30,
    [],
    {},
    True,
    "\x1b[2J",
    "../../x",
    [[[[[]]]]],
    "9" * 5000,
)
TOML_VALUES = (
    "-1",
    "1e308",
    "nan",
    "inf",
    "9" * 5000,
    "[" * 2000,
    "{}",
    "[]",
    "true",
    '"x"',
    '"\\u001b[2J"',
    "0x10",
    "1979-05-27",
)
VERSIONS = re.compile("format|version")
TEXT = (".jsonl", ".json", ".toml", ".jinja", ".md", ".txt")
PRESETS = Path(__file__).parents[2] / "presets"
Result = Callable[[Path, Outcome], Any]


# What is compared.


def without_times(value: Any) -> Any:
    """Plain data without what a clock, a path or the machine's memory says."""
    if isinstance(value, dict):
        gone = re.compile("^time/|seconds|memory|^started$|^ended$|path|^machine|folder|checksum|version|git")
        return {key: without_times(own) for key, own in value.items() if not gone.search(str(key))}
    return [without_times(own) for own in value] if isinstance(value, list) else value


def json_lines(path: Path) -> list[Any]:
    """Of a file, times left out."""
    return [without_times(json.loads(line)) for line in path.read_text().splitlines()]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "gone"


def run_result(run: Path) -> dict[str, Any]:
    """All that a finished run leaves: journals, samples, the ledger's tables, questions, weights."""
    from exgrpo_cli.ledger.reader import LedgerReader

    reader = LedgerReader(run / "replay")
    tables = ("trajectories", "scores", "draws", "visits", "replays", "events")
    return {
        "metrics": json_lines(run / "metrics.jsonl"),
        "validations": json_lines(run / "validations.jsonl"),
        "summary": without_times(json.loads((run / "summary.json").read_text())),
        "samples": {path.name: json_lines(path) for path in sorted((run / "samples").iterdir())},
        "weights": digest(run / "model" / "model.safetensors"),
        "questions": [digest(run / "data" / name) for name in ("train.parquet", "heldout.parquet")],
        "ledger": {name: hashlib.sha256(str(reader.table(name).to_pydict()).encode()).hexdigest() for name in tables},
    }


def after_resume(folder: Path, outcome: Outcome) -> Any:
    return apart(run_result, folder / "run") if outcome.code == 0 else None


def printed(folder: Path, outcome: Outcome) -> Any:
    return outcome.out


def printed_json(folder: Path, outcome: Outcome) -> Any:
    """What a command printed as JSON, or its text where it is none."""
    try:
        return without_times(json.loads(outcome.out))
    except ValueError:
        return outcome.out


def results_left(folder: Path, outcome: Outcome) -> Any:
    """The figures that an evaluation printed, and its verdicts on disk."""
    lines = [line for path in sorted(folder.glob("res/*/records.jsonl")) for line in json_lines(path)]
    return [printed_json(folder, outcome), sorted(json.dumps(line, sort_keys=True) for line in lines)]


# What is damaged, and read.


@dataclass(frozen=True, kw_only=True)
class Target:
    """A folder, what is damaged in it, the command that reads it, and the result that is compared."""

    name: str
    share: float
    """Of all trials."""
    under: str
    """Where damages fall, a folder or a file below the working folder."""
    command: tuple[str, ...]
    result: Result
    beside: tuple[str, ...] = ()
    """All else that it reads of the working folder."""
    spared: tuple[str, ...] = ()
    """Folders below it that the command does not read."""
    reads: bool = True
    """Whether the command leaves all that is there as it is."""
    authored: bool = False
    """Whether its user writes it."""
    cache: str = "cache"


SAME_EVALUATION = (
    "evaluate",
    "arithmetic",
    "--data",
    "heldout.parquet",
    "--model",
    "whole",
    "--output",
    "res",
    "--json",
)
TINY = (
    *("train", "--config", "small.toml", "--steps", "1", "--set", "tiny.warm_start_steps=20", "--heldout", "none"),
    *("--output", "new", "--json"),
)
OWN = {
    "config": ("train", "--config", "own-config.toml", "--dry-run"),
    "method": ("train", "--method", "own-method.toml", "--dry-run"),
    "claim": ("ablate", "--claim", "own-claim.toml", "--dry-run", "--json"),
}
"""Files that a user writes, and what reads them."""
FIGURES = tuple(f"{name}.{suffix}" for name in ("accuracy", "pass-at-k") for suffix in ("pdf", "png", "svg"))
PICTURES = tuple(f"{name}.{suffix}" for name in ("ablation", "curves", "curves-tokens") for suffix in ("png", "svg"))
STUDY = ("ablate", "--methods", "grpo", "--seeds", "1", "--config", "small.toml", "--steps", "2", "--output", "study")
TARGETS = (
    Target(
        name="resume",
        beside=("cache",),
        share=0.28,
        under="run",
        command=("train", "--resume", "--output", "run"),
        result=after_resume,
        reads=False,
    ),
    Target(
        name="replay-stats",
        share=0.34,
        under="done",
        command=("replay-stats", "done", "--json"),
        result=printed_json,
        spared=("model", "plots", "checkpoints", "samples"),
    ),
    Target(
        name="report",
        share=0.05,
        under="done",
        command=("report", "done", "--output", "page.html"),
        result=lambda folder, outcome: (folder / "page.html").is_file(),
        spared=("model", "plots", "checkpoints"),
    ),
    Target(
        name="evaluate",
        beside=("whole", "heldout.parquet"),
        share=0.06,
        under="res",
        command=SAME_EVALUATION,
        result=results_left,
        reads=False,
    ),
    Target(
        name="rescore",
        share=0.06,
        under="res",
        command=("evaluate", "--rescore", "--output", "res", "--json"),
        result=printed_json,
        reads=False,
        spared=FIGURES,
    ),
    Target(
        name="compare",
        beside=("res2",),
        share=0.06,
        under="res",
        command=("evaluate", "--compare", "res", "res2", "--json"),
        result=printed_json,
        spared=FIGURES,
    ),
    Target(
        name="questions",
        beside=("small.toml",),
        share=0.08,
        under="questions.parquet",
        command=("train", "--data", "questions.parquet", "--heldout", "none", "--config", "small.toml", "--dry-run"),
        result=printed,
    ),
    Target(
        name="tiny",
        beside=("small.toml",),
        share=0.04,
        under="small-cache",
        command=TINY,
        result=printed_json,
        reads=False,
        cache="small-cache",
    ),
    Target(
        name="study",
        beside=("small.toml", "cache"),
        share=0.06,
        under="study",
        command=(*STUDY, "--json"),
        result=printed_json,
        reads=False,
    ),
    Target(
        name="study-page",
        share=0.03,
        under="study",
        command=("report", "study", "--output", "page.html"),
        result=lambda folder, outcome: digest(folder / "page.html"),
        spared=PICTURES,
    ),
    Target(
        name="study-publish",
        share=0.02,
        under="study",
        command=("publish", "study", "--to", "me/study", "--dry-run", "--json"),
        result=printed_json,
        spared=PICTURES,
    ),
    Target(
        name="publish",
        share=0.05,
        under="done",
        command=("publish", "done", "--to", "me/done", "--dry-run", "--json"),
        result=printed_json,
    ),
    Target(name="model", share=0.03, under="done/model", command=("sample", "done", "1+2=?"), result=printed),
    *(
        Target(name=name, share=0.02, under=f"own-{name}.toml", command=command, result=printed, authored=True)
        for name, command in OWN.items()
    ),
)


def build(folder: Path) -> None:
    """All whole folders once: two runs, one unfinished, two evaluations, questions, a study, caches, settings."""
    (folder / "small.toml").write_text(SMALL)
    train = ["train", "--config", "small.toml", "--quiet"]
    _done(folder, [*train, "--output", "done"])
    _done(folder, ["prepare", "arithmetic", "--output", "questions.parquet"])
    shutil.copy(folder / "done" / "data" / "heldout.parquet", folder / "heldout.parquet")
    shutil.copytree(folder / "done", folder / "whole")
    log = folder / "log"
    child = start([*train, "--output", "run"], folder, log, log, EXGRPO_CACHE=str(folder / "cache"))
    while not (folder / "run" / "metrics.jsonl").is_file() or len(json_lines(folder / "run" / "metrics.jsonl")) < 3:
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    end(child, 60)
    for name, model in (("res", "whole"), ("res2", "whole@step-000002")):
        _done(
            folder,
            ["evaluate", "arithmetic", "--data", "heldout.parquet", "--model", model, "--output", name, "--json"],
        )
    _done(folder, [*STUDY, "--quiet"])
    _done(folder, list(TINY), cache="small-cache")
    shutil.rmtree(folder / "new")
    shutil.copy(folder / "done" / "config.toml", folder / "own-config.toml")
    shutil.copy(PRESETS / "methods" / "headroom-drift.toml", folder / "own-method.toml")
    shutil.copy(PRESETS / "claims" / "delayed-start.toml", folder / "own-claim.toml")


def _done(folder: Path, arguments: list[str], cache: str = "cache") -> None:
    outcome = exgrpo(arguments, folder, seconds=900, EXGRPO_CACHE=str(folder / cache))
    assert outcome.code == 0, (arguments, outcome.err)


# Damages.


def damage(root: Path, rng: random.Random, spared: tuple[str, ...] = ()) -> tuple[str, list[str]]:
    """Do one thing to what is below `root`; returns it in words, and the names that a message may call it by."""
    files = [path for path in sorted(root.rglob("*")) if path.is_file()] if root.is_dir() else [root]
    files = [path for path in files if path == root or path.relative_to(root).parts[0] not in spared]
    # Kinds of file weigh alike, however many there are of each.
    kinds = sorted({re.sub(r"\d+", "#", str(path.relative_to(root.parent))) for path in files})
    kind = rng.choice(kinds)
    path = rng.choice([own for own in files if re.sub(r"\d+", "#", str(own.relative_to(root.parent))) == kind])
    if root.is_dir() and rng.random() < 0.12:
        path = rng.choice([path.parent, *[own for own in path.parents if root in own.parents]])
        return _damage_folder(path, root, rng), _names(path, root)
    twins = [own for own in files if own.suffix == path.suffix and own != path]
    if twins and rng.random() < 0.06:
        return _exchange(path, rng.choice(twins), root), _names(path, root)
    done = _damage_file(path, rng)
    return f"{path.relative_to(root.parent)}: {done}", _names(path, root)


def _exchange(path: Path, other: Path, root: Path) -> str:
    """Let a file have the content of another one of its suffix."""
    shutil.copyfile(other, path)
    return f"{path.relative_to(root.parent)}: the content of {other.relative_to(root.parent)}"


def _names(path: Path, root: Path) -> list[str]:
    """The file, and the folders it lies in below the root; of a numbered part its table."""
    inside = [path.name, *[own.name for own in path.parents if root in own.parents]]
    # A claim is called by its file's name without the ending.
    return inside if path != root else [root.name, *([root.stem] if root.suffix == ".toml" else [])]


def _damage_folder(path: Path, root: Path, rng: random.Random) -> str:
    where = path.relative_to(root.parent)
    match rng.choice(("removed", "emptied", "a file", "a link", "copied under the next number")):
        case "removed":
            shutil.rmtree(path)
            return f"{where}/ removed"
        case "emptied":
            shutil.rmtree(path)
            path.mkdir()
            return f"{where}/ emptied"
        case "a file":
            shutil.rmtree(path)
            path.write_text("x")
            return f"{where}/ is a file"
        case "a link":
            path.rename(root.parent / "elsewhere")
            path.symlink_to(root.parent / "elsewhere")
            return f"{where}/ is a link to another folder"
    name = re.sub(r"\d+", lambda own: f"{int(own[0]) + 1:0{len(own[0])}}", path.name)
    copy_of = path.with_name(name if name != path.name else f"{path.name} (copy)")
    if not copy_of.exists():
        shutil.copytree(path, copy_of, symlinks=True)
    return f"{where}/ copied as {copy_of.name}"


def _damage_file(path: Path, rng: random.Random) -> str:
    choices = ["bytes", "bytes", "whole"]
    if path.suffix in (".jsonl", ".json", ".toml"):
        choices += ["lines", "lines"]
    if path.suffix in TEXT:
        choices += ["encoding"]
    if path.suffix in (".jsonl", ".json", ".toml"):
        choices += ["values", "values", "values"]
    if path.suffix in (".parquet", ".arrow"):
        choices += ["rows", "rows"]
    values = _settings if path.suffix == ".toml" else _values
    functions = {"bytes": _bytes, "whole": _whole, "lines": _lines, "values": values, "encoding": _encoding}
    own = rng.choice(choices)
    return apart(_rows, path, rng.random()) if own == "rows" else functions[own](path, rng)


def _bytes(path: Path, rng: random.Random) -> str:
    data = bytearray(path.read_bytes())
    if not data:
        path.write_bytes(b"\x00")
        return "a byte"
    begin = rng.randrange(len(data))
    match rng.choice(("bit", "bits", "zeros", "garbage", "truncated", "torn end")):
        case "bit":
            data[begin] ^= 1 << rng.randrange(8)
            done = f"a bit at {begin} of {len(data)}"
        case "bits":
            for _ in range(16):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            done = "16 bits"
        case "zeros":
            size = min(len(data) - begin, rng.choice((1, 16, 512)))
            data[begin : begin + size] = bytes(size)
            done = f"{size} zeros at {begin} of {len(data)}"
        case "garbage":
            size = min(len(data) - begin, rng.choice((4, 64)))
            data[begin : begin + size] = rng.randbytes(size)
            done = f"{size} random bytes at {begin} of {len(data)}"
        case "truncated":
            del data[begin:]
            done = f"{begin} of {len(data)} bytes"
        case _:
            del data[-rng.randint(1, min(20, len(data))) :]
            done = "the last bytes gone"
    path.write_bytes(bytes(data))
    return done


def _whole(path: Path, rng: random.Random) -> str:
    done = rng.choice(
        (
            *("gone", "empty", "random bytes", "a folder", "random bytes behind it", "brackets"),
            *("a link to /dev/null", "a link to itself", "unreadable", "a pipe"),
        )
    )
    before = path.read_bytes()
    path.unlink()
    match done:
        case "empty":
            path.touch()
        case "random bytes":
            path.write_bytes(rng.randbytes(300))
        case "a folder":
            path.mkdir()
        case "random bytes behind it":
            path.write_bytes(before + rng.randbytes(40))
        case "brackets":
            path.write_text("[" * 100_000)
        case "a link to /dev/null":
            path.symlink_to("/dev/null")
        case "a link to itself":
            path.symlink_to(path.name)
        case "unreadable":
            path.write_bytes(before)
            path.chmod(0)
        case "a pipe":
            os.mkfifo(path)
    return done


def _encoding(path: Path, rng: random.Random) -> str:
    """The text in another encoding, or with other ends of lines."""
    before = path.read_bytes()
    text = before.decode(errors="replace")
    match done := rng.choice(
        ("UTF-16", "UTF-8 with a mark", "Latin-1", "CRLF", "CR", "no last end of line", "blank lines")
    ):
        case "UTF-16":
            after = text.encode("utf-16")
        case "UTF-8 with a mark":
            after = b"\xef\xbb\xbf" + before
        case "Latin-1":
            after = text.replace("e", "\xe9", 1).encode("latin-1", errors="replace")
        case "CRLF":
            after = before.replace(b"\n", b"\r\n")
        case "CR":
            after = before.replace(b"\n", b"\r")
        case "no last end of line":
            after = before.rstrip(b"\n")
        case _:
            after = before.replace(b"\n", b"\n\n")
    path.write_bytes(after)
    return done


def _lines(path: Path, rng: random.Random) -> str:
    lines = path.read_bytes().splitlines(keepends=True)
    if not lines:
        return _bytes(path, rng)
    at, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    match done := rng.choice(("lost", "doubled", "exchanged", "last doubled")):
        case "lost":
            del lines[at]
        case "doubled":
            lines.insert(at, lines[at])
        case "exchanged":
            lines[at], lines[other] = lines[other], lines[at]
        case _:
            lines.append(lines[-1])
    path.write_bytes(b"".join(lines))
    return f"line {at + 1} of {len(lines)} {done}"


def _places(value: Any, so_far: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if so_far:
        yield so_far
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from _places(value[key], (*so_far, key))


def _values(path: Path, rng: random.Random) -> str:
    """Another value, or none, at a random place of JSON, or of one line of JSON lines."""
    text = path.read_text()
    lines = text.splitlines() if path.suffix == ".jsonl" else [text]
    at = rng.randrange(len(lines)) if lines else 0
    try:
        value = json.loads(lines[at])
        places = list(_places(value))
        versions = [own for own in places if VERSIONS.search(str(own[-1]))]
        place = rng.choice(versions if versions and rng.random() < 0.2 else places)
    except (ValueError, IndexError):
        return _bytes(path, rng)
    changed = copy.deepcopy(value)
    holder = changed
    for key in place[:-1]:
        holder = holder[key]
    before = json.dumps(holder[place[-1]])[:40]
    if rng.random() < 0.2:
        del holder[place[-1]]
        done = f"{'/'.join(map(str, place))} ({before}) gone"
    else:
        number = VERSIONS.search(str(place[-1])) and isinstance(holder[place[-1]], int)
        holder[place[-1]] = rng.choice((0, 1, 3, 99)) if number else rng.choice(JSON_VALUES)
        done = f"{'/'.join(map(str, place))} ({before}) = {json.dumps(holder[place[-1]])[:40]}"
    lines[at] = json.dumps(changed)
    path.write_text("\n".join(lines) + ("\n" if path.suffix == ".jsonl" else ""))
    return f"line {at + 1}: {done}"


def _settings(path: Path, rng: random.Random) -> str:
    """Another value, or another key, in a line of TOML."""
    lines = path.read_text().splitlines()
    own = [number for number, line in enumerate(lines) if " = " in line]
    if not own:
        return _bytes(path, rng)
    at = rng.choice(own)
    key, _, before = lines[at].partition(" = ")
    if rng.random() < 0.2:
        lines[at] = f"{key}x = {before}"
    else:
        lines[at] = f"{key} = {rng.choice(TOML_VALUES)}"
    path.write_text("\n".join(lines) + "\n")
    return f"line {at + 1}: {key} ({before[:40]}): {lines[at][:60]}"


def _rows(path: Path, seed: float) -> str:
    """Other rows under the same metadata."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = random.Random(seed)
    is_arrow = path.suffix == ".arrow"
    table = pa.ipc.open_file(path.read_bytes()).read_all() if is_arrow else pq.read_table(path)
    if not len(table):
        path.unlink()
        return "gone"
    order = np.arange(len(table))
    kinds = ("reversed", "one lost", "one doubled", "a column reversed", "a column gone", "a value", "no rows")
    match done := rng.choice(kinds):
        case "reversed":
            table = table.take(order[::-1])
        case "one lost":
            table = table.take(np.delete(order, rng.randrange(len(table))))
        case "one doubled":
            table = table.take(np.append(order, rng.randrange(len(table))))
        case "a column reversed" | "a column gone":
            at = rng.randrange(table.num_columns)
            done = f"{done} ({table.column_names[at]})"
            field, column = table.schema.field(at), table.column(at).take(pa.array(order[::-1]))
            table = table.set_column(at, field, column) if "reversed" in done else table.remove_column(at)
        case "a value":
            numbers = [own for own in table.schema if pa.types.is_floating(own.type) or pa.types.is_integer(own.type)]
            if not numbers:
                return _bytes(path, rng)
            field = rng.choice(numbers)
            odd = (
                rng.choice((math.nan, math.inf, 1e300))
                if pa.types.is_floating(field.type)
                else rng.choice((-1, 2**31 - 1))
            )
            values, row = table.column(field.name).to_pylist(), rng.randrange(len(table))
            values[row], done = odd, f"{field.name} of row {row} ({values[row]}) = {odd}"
            table = table.set_column(table.schema.get_field_index(field.name), field, pa.array(values, field.type))
        case _:
            table = table.slice(0, 0)
    if is_arrow:
        with pa.ipc.new_file(str(path), table.schema) as sink:
            sink.write_table(table)
    else:
        pq.write_table(table, path)
    return f"rows: {done}"


# Trials.


def prepare(target: Target, whole: Path, work: Path) -> None:
    """Copy what the target's command reads, and no more: copies take time."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    for name in (Path(target.under).parts[0], *target.beside):
        own = whole / name
        shutil.copytree(own, work / name, symlinks=True) if own.is_dir() else shutil.copy(own, work)


def contents(folder: Path) -> dict[str, str]:
    """Digests of all files at or below a folder, locks and figures apart; of a link what it leads to."""
    found = {}
    for path in [folder, *folder.rglob("*")]:
        if path.is_symlink():
            found[str(path)] = str(path.readlink())
        elif path.is_file() and "lock" not in path.name and path.suffix not in (".png", ".svg", ".pdf"):
            found[str(path)] = digest(path)
    return found


def draws_in(number: int) -> bool:
    """Whether a trial draws its figures, which takes most of the time: one in twenty does."""
    return number % 20 == 0


def right(target: Target, whole: Path, work: Path, draws: bool) -> Any:
    """The result of the folder as it is."""
    prepare(target, whole, work)
    outcome = exgrpo(list(target.command), work, draws=draws, EXGRPO_CACHE=str(work / target.cache))
    assert outcome.code == 0, (target.name, outcome.err)
    return target.result(work, outcome)


def trial(target: Target, whole: Path, work: Path, number: int, seed: int, wanted: Any) -> Finding:
    """Damage a fresh copy, run the command, and class what came."""
    rng = random.Random(f"{seed} {target.name} {number}")
    prepare(target, whole, work)
    what, names = damage(work / target.under, rng, target.spared)
    folder = work / Path(target.under).parts[0]
    before = {name: content for name, content in contents(folder).items() if Path(name).name != names[0]}
    outcome = exgrpo(list(target.command), work, draws=draws_in(number), EXGRPO_CACHE=str(work / target.cache))
    result = target.result(work, outcome)
    after = contents(folder) if target.reads or outcome.code == 2 else before
    named = any(name in outcome.err for name in names)
    if ugly := outcome.ugly:
        verdict, line = "ugly", f"[{ugly}] {outcome.err.strip()[-300:]}"
    else:
        if outcome.code:
            verdict = "named" if named else "vague"
        elif result == wanted:
            verdict = "healed"
        else:
            verdict = "told" if named else "other" if target.authored else "silent"
        line = next((line for line in reversed(outcome.err.splitlines()) if line.startswith("exgrpo: ")), "")[:300]
    if changed := [name for name, content in before.items() if after.get(name) != content]:
        verdict, line = "lost", f"{changed[0]} is not as it was. {line}"
    return Finding(number, f"{target.name}: {what}", verdict, outcome.code, line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=700, help="trials")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=[target.name for target in TARGETS], help="all trials on this target")
    parser.add_argument("--trial", type=int, help="this one alone, told in full")
    parser.add_argument("--all", action="store_true", help="tell every trial, not only defects")
    parser.add_argument("--folder", type=Path, help="the whole folders, built there once and kept")
    parser.add_argument("--json", action="store_true", help="one JSON object for each target")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="exgrpo-damages-") as name:
        whole, work = options.folder or Path(name, "whole"), Path(name, "work")
        if not whole.is_dir():
            whole.mkdir(parents=True)
            build(whole)
        defects = 0
        for target in TARGETS:
            if options.only not in (None, target.name):
                continue
            count = options.count if options.only else max(1, round(options.count * target.share))
            numbers = [options.trial] if options.trial is not None else range(count)
            rights = {draws: right(target, whole, work, draws) for draws in sorted(set(map(draws_in, numbers)))}
            findings = []
            for number in numbers:
                findings.append(trial(target, whole, work, number, options.seed, rights[draws_in(number)]))
                if options.all or options.trial is not None:
                    print(findings[-1], flush=True)
            defects += tell(target.name, findings, as_json=options.json, bad=BAD)
    raise SystemExit(bool(defects))


if __name__ == "__main__":
    main()
