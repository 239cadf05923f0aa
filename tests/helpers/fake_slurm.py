"""sbatch, srun, sacct, scancel and scontrol as far as submitit uses them: tasks are real processes of this machine.

`install(folder)` writes the programs. A task is killed and requeued as Slurm does it: its script is run again, with the
same environment, when its processes have ended.
"""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

PROGRAMS = ("sbatch", "srun", "sacct", "scancel", "scontrol")


def install(folder: Path) -> None:
    """Write the programs into `folder`, which also holds their state."""
    folder.mkdir()
    for name in PROGRAMS:
        path = folder / name
        path.write_text(f'#!/bin/sh\nexec {sys.executable} -S {__file__} {folder} {name} "$@"\n')
        path.chmod(0o755)


def sbatch(state: Path, script: str) -> None:
    text = Path(script).read_text()
    partition = re.search(r"--partition=(\S+)", text)
    if partition and partition[1] == "nowhere":
        sys.exit("sbatch: error: invalid partition specified: nowhere\nsbatch: error: Batch job submission failed: x")
    job = 100 + len(list(state.glob("job-*.sh")))
    kept = state / f"job-{job}.sh"
    kept.write_text(text)
    array = re.search(r"--array=0-(\d+)", text)
    for index in range(int(array[1]) + 1) if array else [None]:
        subprocess.Popen(
            [sys.executable, "-S", __file__, str(state), "task", str(job), "" if index is None else str(index)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    print(f"Submitted batch job {job}")


def task(state: Path, job: str, index: str) -> None:
    """The life of one task: as Slurm's daemon on the node."""
    name = f"{job}_{index}" if index else job
    environment = {**os.environ, "SLURM_JOB_ID": job, "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1"}
    environment |= {"SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": "localhost"}
    environment["SLURMD_NODENAME"] = "localhost"
    nodes = re.search(r"--nodes=(\d+)", (state / f"job-{job}.sh").read_text())
    if nodes and int(nodes[1]) > 1:
        # All of them are this machine.
        hosts = ",".join(["localhost"] * int(nodes[1]))
        environment |= {"SLURM_NTASKS": nodes[1], "SLURM_JOB_NUM_NODES": nodes[1], "SLURM_JOB_NODELIST": hosts}
    if index:
        environment |= {"SLURM_ARRAY_JOB_ID": job, "SLURM_ARRAY_TASK_ID": index}
    requeued = state / f"requeued-{name}"
    while True:
        process = subprocess.Popen(["bash", str(state / f"job-{job}.sh")], env=environment, start_new_session=True)
        note(state / f"task-{name}.json", process.pid, "RUNNING")
        code = process.wait()
        # What the step left behind on other hosts ends with it.
        with suppress(OSError):
            os.killpg(int((state / f"step-{name}").read_text()), signal.SIGKILL)
        if not requeued.exists():
            break
        requeued.unlink()
        with (state / "requeues").open("a") as log:
            log.write(f"{name}\n")
    ended = "COMPLETED" if code == 0 else "CANCELLED" if (state / f"cancelled-{name}").exists() else "FAILED"
    note(state / f"task-{name}.json", process.pid, ended)


def note(file: Path, pid: int, state: str) -> None:
    """Write at once: sacct must not read half of it."""
    file.with_suffix(".new").write_text(json.dumps({"pid": pid, "state": state}))
    file.with_suffix(".new").replace(file)


def srun(state: Path, *arguments: str) -> None:
    rest, output = list(arguments), ""
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        if option in ("--output", "--error"):
            output = rest.pop(0)
    job = os.environ.get("SLURM_ARRAY_JOB_ID")
    name = f"{job}_{os.environ['SLURM_ARRAY_TASK_ID']}" if job else os.environ["SLURM_JOB_ID"]
    os.setpgrp()
    (state / f"step-{name}").write_text(str(os.getpid()))
    others = []
    for number in range(int(os.environ["SLURM_NTASKS"]) - 1, 0, -1):
        others.append(os.fork())
        if not others[-1]:
            os.environ |= {"SLURM_NODEID": str(number), "SLURM_PROCID": str(number)}
            break
    number = os.environ["SLURM_PROCID"]
    log = os.open(re.sub(r"%A_%a|%j", name, output).replace("%t", number), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.execvp(rest[0], rest)


def sacct(state: Path, *arguments: str) -> None:
    print("JobID|State|NodeList")
    for path in sorted(state.glob("task-*.json")):
        print(f"{path.stem.removeprefix('task-')}|{json.loads(path.read_text())['state']}|localhost")


def scancel(state: Path, name: str, *arguments: str) -> None:
    """All of a job's tasks, or one; a signal alone with --signal."""
    number = signal.SIGTERM
    if "--signal" in arguments:
        text = arguments[arguments.index("--signal") + 1]
        number = signal.Signals[text if text.startswith("SIG") else f"SIG{text}"]
    for path in state.glob(f"task-{name}*.json"):
        found = json.loads(path.read_text())
        if found["state"] == "RUNNING":
            step = state / path.stem.replace("task-", "step-")
            if "--signal" not in arguments:
                (state / step.name.replace("step-", "cancelled-")).touch()
            # A signal goes to the processes of the step, not to the script.
            os.killpg(int(step.read_text()), number)


def scontrol(state: Path, action: str, name: str) -> None:
    assert action == "requeue"
    (state / f"requeued-{name}").touch()


if __name__ == "__main__":
    functions = {"sbatch": sbatch, "srun": srun, "sacct": sacct, "scancel": scancel, "scontrol": scontrol, "task": task}
    functions[sys.argv[2]](Path(sys.argv[1]), *sys.argv[3:])
