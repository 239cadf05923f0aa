"""A finished run whose files are damaged: its statistics are those of the whole run, or the file is named."""

import json
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from odd_values import changed
from synthetic_run import SyntheticRun, write_run

from exgrpo_cli.base import errors, files
from exgrpo_cli.commands import run as exgrpo
from exgrpo_cli.runs.folder import RunFolder, note_checksums
from exgrpo_cli.show import record, report, statistics


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    write_run(run, SyntheticRun(steps=6, num_questions=60, questions_per_step=8, mixed_from=2))
    files.write_manifest(run / "data")
    return run


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def rows(path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    pq.write_table(change(pq.read_table(path)), path)


def reverse(table: pa.Table) -> pa.Table:
    return table.take(list(range(len(table)))[::-1])


def journal(run: Path, number: int, **values: object) -> None:
    """Other values in a line of metrics.jsonl."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[number - 1] |= values
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def lose_line(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:2] + lines[3:]))


def part_of(run: Path, table: str) -> Path:
    return sorted((run / "replay" / table).iterdir())[2]


def with_metadata(run: Path, content: bytes) -> None:
    rows(part_of(run, "events"), lambda table: table.replace_schema_metadata({b"exgrpo": content}))


TOLD = {
    "no questions": (lambda run: (run / "data/train.parquet").unlink(), r"train.parquet is missing: questions tried"),
    "questions without ids": (
        lambda run: rows(run / "data/train.parquet", lambda table: table.drop_columns("id")),
        r"train.parquet has no ids",
    ),
    "questions reversed": (lambda run: rows(run / "data/train.parquet", reverse), r"train.parquet has \d+ bytes"),
    "a lost step": (lose_line, r"metrics.jsonl lacks 1 steps, step 3 first"),
    "rows of another program": (
        lambda run: rows(part_of(run, "events"), reverse),
        r"read up to step 2; events/part-0+3-0+3.parquet: another program has written its rows anew",
    ),
    "no commit records": (
        lambda run: shutil.rmtree(run / "replay/events"),
        r"read up to step 0; \d+ rows up to step 6 left out: events has no parts",
    ),
    "a commit record that is none": (lambda run: with_metadata(run, b'{"totals": []}'), r"part-0+3-0+3.parquet"),
    "a deep commit record": (lambda run: with_metadata(run, b"[" * 100_000), r"part-0+3-0+3.parquet"),
    "a commit record of the far future": (
        lambda run: with_metadata(run, b'{"totals": {"events": 9999999999999999999999}}'),
        r"part-0+3-0+3.parquet",
    ),
}
"""Damages that the other parts of a run outlive, and what is said of them."""


@pytest.mark.parametrize(("damage", "said"), TOLD.values(), ids=TOLD.keys())
def test_a_part_that_is_gone_is_said_once(run: Path, damage: Callable[[Path], object], said: str) -> None:
    damage(run)
    with pytest.warns(errors.DamageWarning, match=said) as told:
        statistics.report_json(statistics.report_runs([run]))
    assert len(told) == 1


REFUSED = {
    "ledger.json is no text": (
        lambda run: (run / "replay/ledger.json").write_bytes(b'{"format": \xff}'),
        r"ledger.json is not JSON \('utf-8'",
    ),
    "ledger.json is deep": (
        lambda run: (run / "replay/ledger.json").write_text("[" * 100_000),
        "ledger.json is not JSON .nested",
    ),
    "a step of the far future": (lambda run: journal(run, 3, step=2_000_000_000), r"metrics.jsonl has a step 2,000,"),
    "a step that no ledger could have": (lambda run: journal(run, 3, step=10**30), "line 3: step is 1000"),
    "a step before the first": (lambda run: journal(run, 3, step=-1), "metrics.jsonl, line 3: step is -1"),
    "a step that is no number": (lambda run: journal(run, 3, step=True), "metrics.jsonl, line 3: step is True"),
    "a number without bound": (
        lambda run: journal(run, 2, **{"tokens/trained": 10**400}),
        "metrics.jsonl, line 2: tokens/trained is 1000",
    ),
    "a deep line": (
        lambda run: (run / "metrics.jsonl").write_text("[" * 100_000 + "\n"),
        r"line 1 is not JSON \(nested too deeply\)",
    ),
    "metrics.jsonl is a device": (
        lambda run: ((run / "metrics.jsonl").unlink(), (run / "metrics.jsonl").symlink_to("/dev/zero")),
        "has no metrics.jsonl",
    ),
}
"""Damages without which nothing can be counted, and the refusal."""


@pytest.mark.parametrize(("damage", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_a_file_that_cannot_be_used_is_named(run: Path, damage: Callable[[Path], object], said: str) -> None:
    damage(run)
    with pytest.raises(errors.InputError, match=said) as caught:
        statistics.report_runs([run])
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("seed", range(3))
def test_damaged_bytes_are_healed_or_named(run: Path, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Twenty damages of files drawn at random, each of a whole run: the same figures, or a line that names the file."""
    note_checksums(run, at_the_end=True)
    files = [path for path in sorted(run.rglob("*")) if path.is_file() and path.parent.name != "bodies"]
    rng, line = random.Random(seed), ["replay-stats", str(run), "--json", "--no-plots"]
    assert exgrpo(line) == 0
    right, _ = capsys.readouterr()
    for _ in range(20):
        path = rng.choice(files)
        before, begin = path.read_bytes(), rng.randrange(path.stat().st_size + 1)
        garbage = rng.choice((b"", rng.randbytes(8), b"\0" * 8, b"[" * 9999, b"9" * 5000, b'"', b"-1", b"null"))
        path.write_bytes(before[:begin] + garbage + before[begin + rng.choice((0, len(garbage), len(before))) :])
        code = exgrpo(line)
        out, err = capsys.readouterr()
        assert (code, out) == (0, right) or (code in (0, 2) and path.name in err), (path, begin, garbage[:9], code, err)
        assert "unexpected" not in err
        path.write_bytes(before)


SCORE = {
    **dict.fromkeys(("pass_at_1", "low", "high", "valid_pass_at_1"), 0.25),
    "pass_at_k": {k: {"value": 0.5, "low": 0.2, "high": 0.8} for k in ("1", "2")},
    "second_graders": {"oat": {"pass_at_1": 0.25, "low": 0.1, "high": 0.4, "disagreements": 1}},
    "constant_answer": {"answer": "18", "pass_at_1": 0.2},
    "questions": 4,
    "samples": 2,
}


@pytest.mark.parametrize("seed", range(4))
def test_odd_final_figures_and_validations_are_shown_or_named(run: Path, seed: int) -> None:
    """Sixty odd values in summary.json and in validations.jsonl: shown, or it is said which of them is damaged."""
    summary = json.loads((run / "summary.json").read_text())
    summary["heldout"] |= {"before": SCORE, "after": SCORE}
    lines = [
        {
            "step": step, "asked": "heldout", "generated": 9 * step, "samples": 2, "correct": text, "valid": text,
            "ids": [],
        }
        for step, text in ((0, "2 2 1 2"), (3, "0 1 0 0"))
    ]  # fmt: skip
    rng, named = random.Random(seed), 0
    for _ in range(60):
        (run / "summary.json").write_text(json.dumps(changed(summary, rng)))
        (run / "validations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in changed(lines, rng)))
        for section, name in (
            (report._result, "summary.json"),
            (partial(report._remarks, record=lambda: record.read_run(run)), "validations.jsonl"),
        ):
            try:
                list(section(RunFolder(run)))
            except errors.InputError as error:
                assert name in str(error)
                named += 1
    assert 20 < named < 120
