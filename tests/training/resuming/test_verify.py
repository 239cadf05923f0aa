"""`exgrpo verify`: an honest run comes out the same, also a resumed one; whatever is forged in one does not."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save_file

from exgrpo_cli.base import data, errors, files, reporter
from exgrpo_cli.commands import run as exgrpo
from exgrpo_cli.ledger import reader, writer
from exgrpo_cli.publishing.contents import packed
from exgrpo_cli.runs import folder, result
from exgrpo_cli.studies import output, study
from exgrpo_cli.training import start, verify
from exgrpo_cli.training.run import train

STEPS = 3
REPEAT = verify.repeat
CASES = data.tables(__file__, "forgeries.toml")
FORGERIES = [(what, *place.split()) for what, places in CASES["values"].items() for place in places]
SETTINGS = {
    "seed = 0\nsteps": "seed = 1\nsteps",
    "threshold = 0.0": "threshold = 0.99",
    "rate = 0.0003": "rate = 0.0004",
}
"""Other steps come of them."""


@pytest.fixture(scope="module")
def honest(small_config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps with one checkpoint, of the last."""
    run = tmp_path_factory.mktemp("runs") / "honest"
    settings = ("replay.start_threshold=0", f"run.steps={STEPS}", "rollout.questions_per_step=6")
    train(small_config(*settings), run, reporter=reporter.SilentReporter())
    return run


@pytest.fixture
def once(honest: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps made again from the beginning once for all: nothing that is forged here is read for them."""
    if not (again := tmp_path_factory.getbasetemp() / "made-again").exists():
        REPEAT(honest, again, start.resumed_config(honest), 0, STEPS)
    monkeypatch.setattr(verify, "repeat", lambda run, place, *how: shutil.copytree(again, place))


def verified(run: Path, capsys: pytest.CaptureFixture[str], steps: int = STEPS) -> tuple[int, dict[str, Any]]:
    code = exgrpo(["verify", str(run), "--steps", str(steps), "--json", "--quiet"])
    return code, json.loads(capsys.readouterr().out)


def other(value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return value[:-1] + ("1" if value.endswith("0") else "0")
    return value + 1 if isinstance(value, int) else value / 2 or 0.5


def forge(run: Path, what: str, at: int, key: str) -> None:
    """Write another value as the run would have written it, checksums included."""
    path = run / what
    if what.endswith(".jsonl"):
        lines = list(files.read_json_lines(path))
        lines[at][key] = other(lines[at][key])
        files.write_json_lines(path, lines)
    elif what.endswith(".json"):
        content = json.loads(path.read_text())
        *above, last = key.split(".")
        place = functools.reduce(dict.__getitem__, above, content)
        place[last] = other(place[last])
        content |= {"checksum": files.values_digest({k: v for k, v in content.items() if k != "checksum"})}
        files.write_json(path, content)
    elif key == "weights":
        [path] = path.glob("*.safetensors")
        weights = load_file(path)
        name = min(weights)
        save_file(weights | {name: weights[name] * np.float32(1.001)}, path, metadata={"format": "pt"})
    elif key == "log_probs":
        path = reader.list_parts(path.parent, path.name)[-1]
        with pa.ipc.open_file(pa.BufferReader(path.read_bytes())) as source:
            batches, schema = [source.get_batch(number) for number in range(source.num_record_batches)], source.schema
        ids = batches[at]["trajectory_id"].to_pylist()
        *before, (tokens, log_probs) = reader.LedgerReader(run / "replay").bodies(ids)
        batches[at] = writer.bodies_batch(ids[0], [*before, (tokens, np.array(log_probs) / 2)])
        with path.open("wb") as file:
            writer.write_bodies(file, ((batch, writer.batch_checksums(batch)) for batch in batches), schema)
    else:
        path = reader.list_parts(path.parent, path.name)[-1]
        rows = pq.read_table(path)
        values = rows.to_pylist()
        values[at][key] = other(values[at][key])
        with path.open("wb") as file:
            writer.write_parquet(file, pa.Table.from_pylist(values, rows.schema), rows.schema)


def copied(honest: Path, run: Path) -> Path:
    shutil.copytree(honest, run)
    (run / "checksums.json").unlink()
    return run


@pytest.mark.parametrize(("what", "at", "key"), FORGERIES)
def test_a_forged_value_is_named(honest, once, tmp_path, capsys, what: str, at: str, key: str) -> None:
    forge(run := copied(honest, tmp_path / "run"), what, int(at), key)
    files.write_manifest(run / "checkpoints/step-000003")
    folder.note_checksums(run, at_the_end=True)
    code, report = verified(run, capsys)
    assert code == 1 and report["exact"]
    assert len(report["differences"]) == 1 + (key == "config_hash")
    found = report["differences"][-1]
    assert found["what"].startswith(what.replace("bodies", "trajectories")) and found["recorded"] != found["recomputed"]
    assert found["key"] == {"weights": "sha256", "log_probs": "body"}.get(key, key)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_forged_setting_is_noticed_by_what_comes_of_it(honest, tmp_path, capsys, setting: str) -> None:
    path = copied(honest, tmp_path / "run") / "config.toml"
    text = path.read_text()
    assert setting in text
    path.write_text(text.replace(setting, SETTINGS[setting]))
    code, report = verified(path.parent, capsys)
    found = {each["what"] for each in report["differences"]}
    assert code == 1 and found >= {"metrics.jsonl", "replay/visits", "result.json"}


def test_an_honest_run_comes_out_the_same_and_so_does_a_resumed_one(honest, small_config, tmp_path, capsys) -> None:
    before = {path: path.stat().st_mtime_ns for path in honest.rglob("*")}
    code, report = verified(honest, capsys, steps=1)
    assert (code, report["differences"], report["exact"], len(report["steps"])) == (0, [], True, 1)
    assert {path: path.stat().st_mtime_ns for path in honest.rglob("*")} == before
    config = small_config("replay.start_threshold=0", "run.steps=3", "run.keep_checkpoints=0")
    with pytest.raises(errors.Interrupted):
        train(config, run := tmp_path / "run", reporter=reporter.SilentReporter(), time_limit=verify.StepLimit(left=2))
    train(start.resumed_config(run), run, resume=True, reporter=reporter.SilentReporter())
    # Steps 1 and 2 from the beginning, 3 from the checkpoint of step 2.
    assert exgrpo(["verify", str(run), "--steps", "3", "--quiet"]) == 0
    assert capsys.readouterr().out == f"no difference: steps 1, 2, 3 of {run}, for which 3 were made again\n"


def test_on_another_kind_of_machine_a_tolerance_is_held(honest, once, tmp_path, capsys) -> None:
    """A twenty-fifth more is within it, a tenth is not; nothing but the journal is looked at."""
    run = copied(honest, tmp_path / "run")
    forge(run, "result.json", 0, "machine.processor")
    [first, *lines] = files.read_json_lines(run / "metrics.jsonl")
    for factor, code in ((1.04, 0), (1.1, 1)):
        files.write_json_lines(run / "metrics.jsonl", [first | {"length/mean": factor * first["length/mean"]}, *lines])
        assert exgrpo(["verify", str(run), "--steps", "3"]) == code
        out, err = capsys.readouterr()
        assert "another kind of machine (processor " in err and "to within 5%" in err
        assert ("metrics.jsonl, step 1, length/mean: recorded" in out) == bool(code)


@pytest.mark.parametrize(("refused", "gone"), CASES["refused"].items())
def test_what_cannot_be_made_again_is_refused_in_one_line(honest, tmp_path, capsys, refused: str, gone: str) -> None:
    run = copied(honest, tmp_path / "run")
    if "=" in gone:
        (run / "config.toml").write_text((run / "config.toml").read_text().replace(gone, "nproc = 2"))
    elif gone:
        (run / gone).rename(tmp_path / gone)
    assert exgrpo(["verify", str(run), "--steps", "3" if gone else "4"]) == 2
    err = capsys.readouterr().err
    assert refused in err and err.count("\n") == 1 + err.count("loading libraries")


def test_a_verdict_that_is_kept_goes_into_card_and_study_until_the_run_goes_on(honest, once, tmp_path, capsys) -> None:
    run = copied(honest, tmp_path / "study" / "exgrpo" / "seed-0")
    assert exgrpo(["verify", str(run), "--steps", "3", "--keep", "--quiet"]) == 0
    told = "steps 1, 2, 3 made again, to the bit: no differences"
    with packed(run, "me/run", ledger=False) as [model]:
        assert f"`exgrpo verify`: {told}.\n" in model.files["README.md"].read_text()
    output.report_study(study.read_study(tmp_path / "study")[0])
    assert f"`exgrpo verify`, exgrpo, seed 0: {told}." in (tmp_path / "study" / "report.md").read_text()
    with (run / "metrics.jsonl").open("a") as journal:
        journal.write("{}\n")
    assert result.verdict_of(run) == ""
