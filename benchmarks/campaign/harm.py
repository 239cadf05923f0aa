"""One thing done at random to a file or a folder: bytes, lines, values, rows, encodings, places."""

import copy
import json
import math
import os
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from processes import apart

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
