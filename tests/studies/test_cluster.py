"""Studies through submitit: its own Slurm executor against programs that run tasks as processes."""

import json
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import fake_slurm
import pytest
from submitit.slurm.slurm import SlurmExecutor, SlurmInfoWatcher, SlurmJob
from two_ranks import free_port

from exgrpo_cli.base import files, reporter
from exgrpo_cli.base.errors import InputError, RunError
from exgrpo_cli.commands import run as exgrpo
from exgrpo_cli.config import requests, settings
from exgrpo_cli.config.sections.run import SlurmSettings
from exgrpo_cli.studies import planning, schedule
from exgrpo_cli.studies.study import Study

WORKER = """
import json, os, signal, sys, time
from pathlib import Path
folder, steps = Path(sys.argv[2]), 6
folder.mkdir(exist_ok=True)
(folder / "config.toml").touch()
with (folder / "starts").open("a") as log:
    log.write(f"{os.getpid()}\\n")
if (folder.parent / "wrong").exists():
    sys.exit("the third question has no answer")
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
journal = folder / "metrics.jsonl"
done = len(journal.read_text().splitlines()) if journal.exists() else 0
for step in range(done + 1, steps + 1):
    time.sleep(0.1)
    with journal.open("a") as file:
        file.write(json.dumps({"step": step, "time/step": 0.1}) + "\\n")
    if step == 3 and (folder.parent / "hold").exists():
        while not stopped:
            time.sleep(0.05)
    if stopped or (step == 3 and (folder.parent / "saves-in-time").exists()):
        sys.exit(130)
(folder / "summary.json").write_text(json.dumps({"steps": steps, "finished": "steps reached"}))
"""
"""A run of six steps that takes stop signals and goes on where it was, without a model."""


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    """Two arms, two seeds, of runs that take a second."""
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    monkeypatch.setattr(schedule, "WORKER", (sys.executable, "-S", str(worker)))
    monkeypatch.setattr(schedule, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(schedule, "QUERY_SECONDS", 0.5)
    request = requests.StudyRequest(metric="ent,random", seeds="2", output=tmp_path / "studies" / "mine")
    return planning.plan_request(replace(request, options={"run": {"steps": 6}}))


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Slurm's programs on the path; their state is in the folder."""
    fake_slurm.install(tmp_path / "slurm")
    # What it remembers of a task is by its number, and the next test's have the same.
    monkeypatch.setattr(SlurmJob, "watcher", SlurmInfoWatcher(delay_s=600))
    monkeypatch.setenv("PATH", f"{tmp_path / 'slurm'}:{os.environ['PATH']}")
    return tmp_path / "slurm"


SETTINGS = SlurmSettings(partition="gpu", hours=1.0)


def launched(study: Study, settings: SlurmSettings = SETTINGS) -> None:
    schedule.run_study(study, schedule.Slurm.of(study, settings), reporter.SilentReporter())


def starts(study: Study) -> dict[str, int]:
    """How often each run's process was started."""
    return {run.label: len((run.folder / "starts").read_text().split()) for run in study.runs}


def in_background(action: Callable[[], None]) -> None:
    """Do something while the study runs in the main thread, which alone takes signals."""
    if os.fork() == 0:
        try:
            action()
        finally:
            os._exit(0)


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait, a minute at most."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def wait_for(path: Path, content: str = "") -> None:
    wait_until(lambda: path.exists() and content in path.read_text())


def launch_and_signal(study: Study, settings: SlurmSettings, signal_running: Callable[[], None]) -> None:
    """The first arm's runs wait at step 3 until their tasks are signalled; they are started once more and go on."""
    arm = study.runs[0].folder.parent
    arm.mkdir(parents=True, exist_ok=True)
    (arm / "hold").touch()
    held = [run for run in study.runs if run.folder.parent == arm]

    def act() -> None:
        for run in held:
            wait_for(run.folder / "metrics.jsonl", '"step": 3')
        (arm / "hold").unlink()
        signal_running()

    in_background(act)
    launched(study, settings)
    for run in study.runs:
        assert run.state == "finished"
        assert [line["step"] for line in files.read_json_lines(run.folder / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert all(starts(study)[run.label] == 2 for run in held)


def test_one_array_job_runs_what_is_not_finished(study: Study, cluster: Path) -> None:
    launched(study)
    assert all(run.state == "finished" for run in study.runs) and set(starts(study).values()) == {1}
    [script] = cluster.glob("job-*.sh")
    text = script.read_text()
    assert f"#SBATCH --array=0-{len(study.runs) - 1}%{len(study.runs)}\n" in text
    assert "#SBATCH --partition=gpu\n" in text and "#SBATCH --time=60\n" in text
    # Finished runs are not submitted.
    (study.runs[0].folder / "summary.json").unlink()
    launched(study)
    assert sum(starts(study).values()) == len(study.runs) + 1


@pytest.mark.engines
def test_a_task_whose_time_is_over_is_requeued_and_resumes(study: Study, cluster: Path) -> None:
    def signal_running() -> None:
        for path in cluster.glob("task-*.json"):
            if json.loads(path.read_text())["state"] == "RUNNING":
                os.spawnlp(os.P_WAIT, "scancel", "scancel", path.stem.removeprefix("task-"), "--signal", "USR2")

    launch_and_signal(study, SETTINGS, signal_running)
    assert (cluster / "requeues").is_file()


@pytest.mark.engines
def test_a_run_that_has_saved_before_its_job_ends_is_requeued_at_once(study: Study, cluster: Path) -> None:
    arm = study.runs[0].folder.parent
    arm.mkdir(parents=True)
    (arm / "saves-in-time").touch()
    launched(study)
    assert len((cluster / "requeues").read_text().split()) == 2
    assert all(run.state == "finished" for run in study.runs) and sorted(starts(study).values()) == [1, 1, 1, 1, 2, 2]


@pytest.mark.engines
def test_a_killed_task_is_submitted_again(study: Study, cluster: Path) -> None:
    def kill() -> None:
        for started in study.runs[0].folder.parent.glob("seed-*/starts"):
            os.kill(int(started.read_text()), signal.SIGKILL)

    launch_and_signal(study, SETTINGS, kill)


def test_a_run_that_fails_is_told_by_what_it_said(study: Study, cluster: Path) -> None:
    run = study.runs[0]
    run.folder.parent.mkdir(parents=True)
    (run.folder.parent / "wrong").touch()
    with pytest.raises(
        RunError, match=r"2 of \d+ runs failed, first .* the third question has no answer \(see .*log\)"
    ):
        launched(study)
    others = [each for each in study.runs if each.arm != run.arm]
    assert others and all(each.state == "finished" for each in others)


class Planted:
    """A pickle that makes a folder when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return os.mkdir, (self.marker,)


def test_nothing_in_a_foreign_study_or_the_working_folder_runs(
    study: Study, cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where the program looks after its tasks, nor on the nodes."""
    study = replace(study, runs=study.runs[:2])
    marker, jobs, work = tmp_path / "was-here", study.folder / "jobs", tmp_path / "work"
    jobs.mkdir(parents=True)
    for task in [f"{job}{task}" for job in range(100, 103) for task in ("", "_0", "_1")]:
        for end in ("_0_result", "_submitted"):
            (jobs / f"{task}{end}.pkl").write_bytes(pickle.dumps(Planted(marker)))
    work.mkdir()
    for name in ("submitit", "cloudpickle", "numpy", "exgrpo_cli"):
        (work / f"{name}.py").write_text(f"import os\nos.mkdir({str(marker)!r})\n")
    monkeypatch.chdir(work)
    launched(study)
    assert not marker.exists()
    assert all(run.state == "finished" for run in study.runs) and set(starts(study).values()) == {1}


@pytest.mark.parametrize("place", ["jobs", "results", "{arm}", "{arm}/seed-0", "{arm}/seed-0.log"])
def test_a_study_writes_nothing_through_links_out_of_its_folder(study: Study, tmp_path: Path, place: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("mine")
    target = elsewhere / "mine" if place.endswith(".log") else elsewhere
    path = study.folder / place.format(arm=study.arms[0].folder_name)
    path.parent.mkdir(parents=True)
    path.symlink_to(target)
    with pytest.raises(InputError, match=rf"{path.name} is a link to a place elsewhere, and a run writes nothing"):
        schedule.run_study(study, schedule.Processes(at_once=2), reporter.SilentReporter())
    assert [entry.name for entry in elsewhere.iterdir()] == ["mine"] and (elsewhere / "mine").read_text() == "mine"


@pytest.mark.engines
def test_a_study_removes_no_folder_that_its_runs_did_not_make(study: Study) -> None:
    run = study.runs[0]
    run.folder.mkdir(parents=True)
    (run.folder / "thesis.tex").write_text("mine")
    with suppress(RunError):
        schedule.run_study(study, schedule.Processes(at_once=2), reporter.SilentReporter())
    assert (run.folder / "thesis.tex").read_text() == "mine"


def test_a_refused_partition_and_a_cluster_that_is_not_there_are_one_line(
    study: Study, cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = SlurmSettings(partition="nowhere")
    with pytest.raises(InputError, match=r"sbatch refused \S+: .*See \[slurm\] of --config"):
        launched(study, refused)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(InputError, match="finds no sbatch on the path"):
        launched(study)
    monkeypatch.setattr(schedule, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"needs the submitit package: pip install .*\[slurm\]'"):
        launched(study)


def test_the_table_of_a_configuration_file_is_read_and_checked(
    workdir: Path, cluster: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = workdir / "cluster.toml"
    file.write_text(
        '[run]\nsteps = 7\n[slurm]\npartition = "gpu"\ngpus = 4\ncpus = 16\nhours = 2.5\nsetup = ["module load cuda"]\n'
    )
    command = ["ablate", "--seeds", "2", "--config", str(file), "--launcher", "slurm", "--dry-run", "--allow-code"]
    assert exgrpo(command) == 0
    said = capsys.readouterr()
    assert said.out.count("7 steps") == 8
    for line in ("--gpus-per-node=4", "--time=150", "--partition=gpu", "--array=0-7%8"):
        assert f"#SBATCH {line}\n" in said.err
    assert "# setup\nmodule load cuda\n" in said.err
    # srun does not hand the job's cores on by itself everywhere.
    assert "#SBATCH --cpus-per-task=16\n" in said.err and re.search(r"^srun .*--cpus-per-task=16 ", said.err, re.M)
    with monkeypatch.context() as patched:
        patched.delattr(SlurmExecutor, "_make_submission_file_text")
        assert exgrpo(command) == 0
        assert "does not show its script, which is made of:\n" in (said := capsys.readouterr().err)
        assert "# time = 150\n" in said and "# gpus_per_node = 4\n" in said
    for text, wrong in (
        ('partitoin = "gpu"', "unknown key slurm.partitoin. Did you mean 'slurm.partition'?"),
        ('gpus = "4"', "slurm.gpus = '4' must be a whole number, not str."),
        ('setup = "module"', "slurm.setup = 'module' must be a list."),
        ("hours = 0.05", "slurm.hours = 0.05 is out of range: use more than slurm.save_minutes"),
    ):
        file.write_text(f"[slurm]\n{text}\n")
        assert exgrpo(command) == 2
        assert wrong in capsys.readouterr().err


@pytest.fixture
def two_hosts(small_config: Callable[..., settings.Config], tmp_path: Path) -> Path:
    """A run of four steps, and a cluster that gives it two hosts, which are this one."""
    path = tmp_path / "cluster.toml"
    config = small_config("run.steps=4", "run.save_every=2", "replay.start_threshold=0")
    path.write_text(settings.to_toml(config) + "\n[slurm]\nnodes = 2\nhours = 1\nsave_minutes = 1\n")
    return path


@pytest.mark.engines
@pytest.mark.timeout(900)
def test_one_run_on_two_hosts_is_requeued_and_resumes(two_hosts: Path, cluster: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "both"

    def time_out() -> None:
        wait_for(run / "metrics.jsonl", '"step": 2')
        os.spawnlp(os.P_WAIT, "scancel", "scancel", "100", "--signal", "USR2")

    in_background(time_out)
    command = ["train", "--config", str(two_hosts), "--output", str(run), "--launcher", "slurm", "--quiet"]
    assert exgrpo(command) == 0
    assert (cluster / "requeues").read_text() == "100\n"
    assert [line["step"] for line in files.read_json_lines(run / "metrics.jsonl")] == [1, 2, 3, 4]
    assert "--nodes=2\n" in (cluster / "job-100.sh").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--launcher", "slurm", "--check"], "--check is for this host: leave it out"),
        (["--launcher", "slurm", "--nproc", "2"], "--nproc is for this host"),
    ],
)
def test_what_a_launcher_does_not_do_is_refused(
    options: list[str], message: str, two_hosts: Path, cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "--config", str(two_hosts), "--output", str(tmp_path / "runs" / "one"), "--quiet"]
    assert exgrpo([*command, *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs" / "one").exists()


PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
SEARCHED = f"{os.environ['PATH']}:/usr/sbin"
SLURM_CONFIG = Path(fake_slurm.__file__).with_name("slurm.conf").read_text()
"""No accounting, which would need a database: submitit then knows a task's end by what it leaves behind."""


@pytest.fixture
def one_node(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmSettings]:
    """What the node of a real Slurm has: munged, slurmctld and slurmd of this test alone, with all their files in one
    folder.
    """
    # A controller and a node need root and those packages; CI runs the same launcher on fake programs.
    if missing := [name for name in PROGRAMS if shutil.which(name, path=SEARCHED) is None]:
        pytest.skip(f"no {', '.join(missing)}: apt-get install slurm-wlm munge")
    if os.geteuid() != 0:
        pytest.skip("slurmd wants to be root")
    monkeypatch.setenv("PATH", SEARCHED)
    # Not below pytest's own folder, which others must not enter: munge refuses such a place for its socket.
    folder = Path(f"/tmp/exgrpo-slurm-{os.getpid()}")
    folder.mkdir(mode=0o755)
    for name in ("spool", "state"):
        (folder / name).mkdir()
    config = folder / "slurm.conf"
    ports = [free_port(), free_port()]
    config.write_text(SLURM_CONFIG.format(host=socket.gethostname(), ports=ports, cpus=os.cpu_count(), folder=folder))
    monkeypatch.setenv("SLURM_CONF", str(config))
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    files = {"key-file": key, "socket": folder / "munge.socket", "pid-file": folder / "munged.pid"}
    files |= {"log-file": folder / "munge.log", "seed-file": folder / "munge.seed"}
    subprocess.run(["munged", "--force", *(f"--{name}={path}" for name, path in files.items())], check=True)
    for name in ("slurmctld", "slurmd"):
        subprocess.run([name, "-L", str(folder / f"{name}.log")], check=True)
    try:
        wait_until(lambda: "idle" in subprocess.run(["sinfo"], capture_output=True, text=True, check=False).stdout)
        yield SlurmSettings(partition="main", hours=1.0)
    finally:
        # Steps outlive their slurmd: none must be left when it is stopped.
        subprocess.run(["scancel", "--user", "root"], check=False)
        wait_until(lambda: not subprocess.run(["squeue", "-h"], capture_output=True, check=False).stdout)
        for name in ("slurmd", "slurmctld", "munged"):
            pid = folder / f"{name}.pid"
            if pid.is_file():
                os.kill(int(pid.read_text()), signal.SIGTERM)
                wait_until(lambda pid=pid: not pid.is_file() or not Path(f"/proc/{pid.read_text().strip()}").exists())
        shutil.rmtree(folder)


@pytest.mark.slow
def test_a_real_slurm_runs_an_array_and_requeues_a_task_whose_time_is_over(
    study: Study, one_node: SlurmSettings
) -> None:
    """The signal that Slurm sends before the end of a task's time; `scontrol requeue` is submitit's."""
    with pytest.raises(InputError, match=r"sbatch refused \S+: .*invalid partition specified: gpu"):
        launched(study)

    def signal_running() -> None:
        jobs = subprocess.run(["squeue", "-h", "-t", "R", "-o", "%A"], capture_output=True, text=True, check=True)
        for job in jobs.stdout.split():
            subprocess.run(["scancel", "--signal=USR2", job], check=False)

    launch_and_signal(study, one_node, signal_running)
