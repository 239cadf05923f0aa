"""On PYTHONPATH: a system without /proc, CPU affinity, waitid and limits on memory, as a Mac is."""

import os
import resource
import sys
import traceback


def hide(event: str, arguments: tuple[object, ...]) -> None:
    """No file of /proc or /sys can be opened, but by psutil, which on a Mac asks the system otherwise."""
    if event != "open" or not str(arguments[0]).startswith(("/proc", "/sys")):
        return
    if not any("psutil" in frame.filename for frame in traceback.extract_stack(limit=12)):
        raise FileNotFoundError(2, "No such file or directory", arguments[0])


def refuse(kind: int, limits: tuple[int, int]) -> None:
    """What a Mac answers to a limit on the address space."""
    raise ValueError("current limit exceeds maximum limit")


sys.addaudithook(hide)
resource.setrlimit = refuse
del os.sched_getaffinity, os.waitid
