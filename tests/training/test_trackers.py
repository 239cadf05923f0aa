"""Trackers beside the journal; those that are installed are asked to write and are read back."""

import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.config.layers import build_config
from exgrpo_cli.machine.settle import require_runnable, settle
from exgrpo_cli.machine.survey import survey_machine
from exgrpo_cli.training.trackers import numbers, open_trackers


def line(step: int, reward: float) -> dict[str, float | int | str]:
    return {"step": step, "phase": "mixed", "reward/mean": reward, "replay/used": 2 * step}


def track(name: str, folder: Path, first: int, last: int, scale: float) -> None:
    """Steps first .. last of a run that goes on after step first - 1; the reward of step s is scale * s."""
    with ExitStack() as stack:
        (log,) = open_trackers((name,), build_config(), folder, stack, step=first - 1)
        for step in range(first, last + 1):
            log(line(step, scale * step))


def test_numbers_alone_are_tracked_and_nothing_by_default(tmp_path: Path) -> None:
    assert numbers(line(3, 0.5)) == {"reward/mean": 0.5, "replay/used": 6}
    assert open_trackers((), build_config(), tmp_path, ExitStack(), step=0) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_package_that_is_missing_is_named_with_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    _, plan = settle(build_config(assignments=[f'run.log=["{name}"]']), survey_machine())
    with pytest.raises(InputError, match=rf"cannot run tiny: {name} is not installed \(pip install .*\[trackers\]'\)"):
        require_runnable(plan)


@pytest.mark.engines
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_shows_a_resumed_run_as_one(tmp_path: Path) -> None:
    """Steps 1-4 are logged, the run is resumed after step 2: steps 3 and 4 of the first part no longer count."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    track("tensorboard", tmp_path, 1, 4, 1.0)
    track("tensorboard", tmp_path, 3, 5, 10.0)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["replay/used", "reward/mean"]
    found = {event.step: event.value for event in events.Scalars("reward/mean")}
    assert found == {1: 1.0, 2: 2.0, 3: 30.0, 4: 40.0, 5: 50.0}


@pytest.mark.engines
def test_trackio_keeps_one_run_through_a_resume(tmp_path: Path) -> None:
    """In a process of its own, since trackio looks for its folder when it is imported."""
    run, home = tmp_path / "exgrpo-tiny", tmp_path / "home"
    run.mkdir()
    code = (
        "import json, sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from test_trackers import track\n"
        "folder = Path(sys.argv[2])\n"
        "track('trackio', folder, 1, 3, 1.0)\n"
        "track('trackio', folder, 3, 4, 10.0)\n"
        "from trackio.sqlite_storage import SQLiteStorage\n"
        "[name] = SQLiteStorage.get_runs('exgrpo')\n"
        "print(json.dumps({'name': name, 'logs': SQLiteStorage.get_logs('exgrpo', name)}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent), str(run)],
        env={**os.environ, "TRACKIO_DIR": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("{")]
    found = json.loads(line)
    assert found["name"] == f"exgrpo-tiny-{(run / 'trackio/run-id').read_text()[:8]}"
    rewards = [(line["step"], line["reward/mean"]) for line in found["logs"]]
    assert rewards == [(1, 1.0), (2, 2.0), (3, 3.0), (3, 30.0), (4, 40.0)]


def offline_history(run: Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Run record and values of each line that W&B kept in the run folder, as the end of a process leaves it."""
    import wandb

    wandb.teardown()  # its service is still writing when a run has finished
    for path in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        about = None
        for record in offline_records(path.read_bytes()):
            if record.WhichOneof("record_type") == "run":
                about = record.run
            if record.WhichOneof("record_type") == "history":
                items = {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item}
                yield about, items


def offline_records(data: bytes) -> Iterator[Any]:
    """Records of a small .wandb file: 7 bytes, then for each a checksum (4), its length (2), its type (1, whole)."""
    from wandb.proto.wandb_internal_pb2 import Record

    assert len(data) < 2**15, "larger files are cut into blocks"
    at = 7
    while at < len(data):
        length, kind = struct.unpack_from("<HB", data, at + 4)
        assert kind == 1
        record = Record()
        record.ParseFromString(data[at + 7 : at + 7 + length])
        yield record
        at += 7 + length


@pytest.mark.engines
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wandb_offline_keeps_one_run_through_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `wandb sync` would send."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = tmp_path / "exgrpo-tiny"
    run.mkdir()
    track("wandb", run, 1, 3, 1.0)
    time.sleep(1.0)  # wandb names what it keeps offline by the second in which it starts
    track("wandb", run, 3, 4, 10.0)
    history = list(offline_history(run))
    rows = [(items["step"], items["reward/mean"]) for _, items in history]
    ids = {(about.run_id, about.display_name) for about, _ in history}
    assert rows == [(1, 1.0), (2, 2.0), (3, 3.0), (3, 30.0), (4, 40.0)]
    assert ids == {((run / "wandb" / "run-id").read_text().strip(), "exgrpo-tiny")}


@pytest.mark.engines
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wandb_without_a_login_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    # wandb reads its environment once per process, and another test may have had it do so.
    wandb.teardown()
    with pytest.raises(InputError, match=r"--log wandb cannot start: .*Run `wandb login`, or set WANDB_MODE=offline"):
        track("wandb", tmp_path, 1, 1, 1.0)
