"""Results folders with damage drawn at random: the scores of the whole one, or one line that names the file."""

import json
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from odd_values import changed
from stored_results import with_successes

from exgrpo_cli.base.errors import DamageWarning, InputError
from exgrpo_cli.commands import run
from exgrpo_cli.evaluation import comparison, results

FILES = ("protocol.json", "questions.jsonl", "records.jsonl", "results.json")
TRIALS = 150


def other_value(lines: list[str], at: int, rng: random.Random) -> list[str]:
    if lines[0] == "{\n":
        return [json.dumps(changed(json.loads("".join(lines)), rng)) + "\n"]
    return [*lines[:at], json.dumps(changed(json.loads(lines[at]), rng)) + "\n", *lines[at + 1 :]]


def damage(path: Path, rng: random.Random) -> str:
    """Do one thing to a file, and say which."""
    data, lines = bytearray(path.read_bytes()), path.read_text().splitlines(keepends=True)
    at, other, begin = rng.randrange(len(lines)), rng.randrange(len(lines)), rng.randrange(len(data))
    kinds: dict[str, Callable[[], Any]] = {
        "bit": lambda: data.__setitem__(begin, data[begin] ^ 1 << rng.randrange(8)),
        "cut": lambda: data.__delitem__(slice(begin, None)),
        "zeros": lambda: data.__setitem__(slice(begin, begin + 16), bytes(16)),
        "lost": lambda: lines.pop(at),
        "doubled": lambda: lines.insert(at, lines[at]),
        "exchanged": lambda: lines.__setitem__(slice(None), [*lines[:at], lines[other], *lines[at + 1 :]]),
        "brackets": lambda: lines.__setitem__(slice(None), ["[" * 100_000 + "\n"]),
        "empty": lines.clear,
        "value": lambda: lines.__setitem__(slice(None), other_value(lines, at, rng)),
    }
    kind = rng.choice([*kinds, "value", "value"])
    kinds[kind]()
    path.write_bytes(data if kind in ("bit", "cut", "zeros") else "".join(lines).encode())
    return kind


def shown(folders: list[Path]) -> Any:
    return json.loads(json.dumps(comparison.compare(folders).to_json()))


def test_no_damage_changes_a_comparison_without_a_word(tmp_path):
    paths = [
        with_successes(tmp_path / name, counts, model__hash=name, model__name=name)
        for name, counts in (("a", [0, 2, 4]), ("b", [1, 4, 4]))
    ]
    whole, rng, told = shown(paths), random.Random(20), 0
    shutil.copytree(paths[1], tmp_path / "kept")
    for trial in range(TRIALS):
        name = rng.choice(FILES)
        kind = damage(paths[1] / name, rng) if trial % 10 else "another's"
        if kind == "another's":
            shutil.copy(paths[1] / rng.choice([own for own in FILES if own != name]), paths[1] / name)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", DamageWarning)
            try:
                assert shown(paths) == whole or warned, (trial, name, kind)
            except InputError as error:
                assert name in str(error), (trial, name, kind, str(error))
                told += 1
        shutil.copy(tmp_path / "kept" / name, paths[1] / name)
    assert told > TRIALS / 2
    assert shown(paths) == whole


def test_a_results_file_that_is_gone_is_told_of(tmp_path, capsys):
    paths = [with_successes(tmp_path / name, [1, 2, 3], model__hash=name) for name in ("a", "b")]
    (paths[1] / "results.json").unlink()
    assert run(["evaluate", "--quiet", "--compare", *map(str, paths)]) == 0
    told = f"{paths[1]}/results.json is missing, and with it the scores of second graders, which are left out"
    assert told in capsys.readouterr().err


def test_damaged_questions_do_not_cost_records(tmp_path, capsys):
    """Whoever follows the advice keeps every record."""
    path, other = (with_successes(tmp_path / name, [1, 2, 3], model__hash=name) for name in ("a", "b"))
    questions, records = path / "questions.jsonl", (path / "records.jsonl").read_bytes()
    lines = questions.read_text().splitlines(keepends=True)
    for text in ("", "".join(lines[:-1]), "".join(lines).replace('"4"', '"5"', 1), "".join(reversed(lines))):
        questions.write_text(text)
        for options in (["--rescore", "--output", str(path)], ["--compare", str(path), str(other)]):
            assert run(["evaluate", *options]) == 2
            line = capsys.readouterr().err
            assert f"{questions} is damaged (its checksum differs): restore it from a copy" in line
            assert "remove the line" not in line
    assert (path / "records.jsonl").read_bytes() == records


def test_a_record_that_is_there_twice_counts_once(tmp_path):
    path = with_successes(tmp_path / "a", [1, 2, 3])
    records = path / "records.jsonl"
    whole = records.read_text()
    records.write_text(whole + whole.splitlines(keepends=True)[1])
    with results.ResultsFolder.open(path) as folder:
        assert len(folder.records()) == 3
    assert records.read_text() == whole


def test_a_gold_that_changed_under_stored_verdicts_is_refused(tmp_path):
    path = with_successes(tmp_path / "a", [1, 2, 3])
    with results.ResultsFolder.open(path) as folder:
        stamp, asked = folder.stamp, folder.questions()
    questions = path / "questions.jsonl"
    questions.write_text(questions.read_text().replace('"4"', '"5"', 1))
    # Its checksum made good as well.
    results.ResultsFolder(path).write_stamp(stamp)
    with pytest.raises(InputError, match=r"questions\.jsonl is not what would be asked now \(first: question q1\)"):
        results.ResultsFolder.create(path, stamp, asked).__enter__()
