"""First module of the `exgrpo` command: stop signals end it in one line from here on, imports and exit included."""

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from exgrpo_cli.base import output, versions

_STOPPED = 130


def main() -> NoReturn:
    """Run the command line. Ends the process: with its exit code, or 130 after Ctrl-C or SIGTERM."""
    if sys.platform == "win32":
        sys.exit("exgrpo: Windows is not supported; install it in WSL, the Windows Subsystem for Linux.")
    # As Ctrl-C does it; whoever saves something on the way installs a handler of its own.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    output.reserve_stdout()
    if not versions.has_gpu_device():
        # DeepSpeed, which transformers imports, warns of what it has to find out.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # What a Mac's GPU cannot compute is computed on the CPU; torch reads it when it is imported.
    os.environ.setdefault("PYTORCH_ENABLE_MPS_FALLBACK", "1")
    try:
        from exgrpo_cli.commands import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        _end_at_once_from_here_on()
        sys.stderr.write("exgrpo: interrupted.\n")
        code = _STOPPED
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        _end_at_once_from_here_on()
    sys.exit(code)


def _end_at_once_from_here_on() -> None:
    """Nothing is left to save: an impatient second Ctrl-C ends the process, threads or not."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end_now)


def _end_now(number: int, frame: FrameType | None) -> NoReturn:
    os._exit(_STOPPED)


if __name__ == "__main__":
    main()
