"""Stop signals outside a run: while modules are imported, and while the process ends."""

import signal
import subprocess
import sys

import pytest

WHILE_IMPORTING = """
import sys, time

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            print("importing", flush=True)
            time.sleep(60)

sys.meta_path.insert(0, Slow())
from exgrpo_cli.main import main
main()
"""

WHILE_ENDING = """
import sys, threading, time
from exgrpo_cli import main
import exgrpo_cli.commands

def stopped(arguments):
    threading.Thread(target=time.sleep, args=(60,)).start()
    print("ending", flush=True)
    raise KeyboardInterrupt

exgrpo_cli.commands.run = stopped
main.main()
"""


WHILE_AN_OBJECT_DIES = """
import os, signal, time, typer, weakref
import exgrpo_cli.commands

class Thing:
    pass

def die(reference):
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):
        pass

app = typer.Typer()

@app.command()
def work():
    print("working", flush=True)
    thing = Thing()
    reference = weakref.ref(thing, die)
    del thing
    time.sleep(60)

raise SystemExit(exgrpo_cli.commands.run([], app))
"""


def test_an_interruption_while_an_object_dies_is_not_lost() -> None:
    """Python drops what is raised there, with a traceback on stderr."""
    process = started(WHILE_AN_OBJECT_DIES, line=b"working\n")
    assert (process.communicate(timeout=45)[1], process.returncode) == (b"exgrpo: interrupted.\n", 130)


def started(script: str, *, line: bytes) -> subprocess.Popen[bytes]:
    # Of a suite that runs in the background of a shell Ctrl-C is ignored, and its children would inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    signal.signal(signal.SIGINT, before)
    assert process.stdout is not None and process.stdout.readline() == line
    return process


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_first_imports_is_one_line_and_a_second_one_at_the_end_ends_the_process(
    stop: signal.Signals,
) -> None:
    importing, ending = started(WHILE_IMPORTING, line=b"importing\n"), started(WHILE_ENDING, line=b"ending\n")
    assert ending.stderr is not None and ending.stderr.readline() == b"exgrpo: interrupted.\n"
    for process, talk in ((importing, b"exgrpo: interrupted.\n"), (ending, b"")):
        process.send_signal(stop)
        assert (process.communicate(timeout=60)[1], process.returncode) == (talk, 130)
