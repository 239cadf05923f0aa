"""Record the screen of `exgrpo train` at one of its steps as docs/images/terminal.svg: python docs/terminal.py.

The run is a real one, in a pseudo-terminal and a folder that goes afterwards; minutes on two cores.
"""

import argparse
import fcntl
import io
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path
from tempfile import TemporaryDirectory

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

IMAGE = Path(__file__).parent / "images" / "terminal.svg"
CONTROL = re.compile(r"(\x1b\[[0-9;?]*[A-Za-z]|\n|\r)")


class Screen:
    """Rows of a terminal as the live view writes them: it goes up, erases whole rows and writes them anew."""

    def __init__(self) -> None:
        self.rows, self.row = [""], 0

    def write(self, text: str) -> None:
        """Take in what a program has written."""
        for part in CONTROL.split(text):
            if part == "\n":
                self.row += 1
                self.rows += [""] * (self.row == len(self.rows))
            elif part == "\x1b[2K":
                self.rows[self.row] = ""
            elif re.fullmatch(r"\x1b\[\d*A", part):
                self.row -= int(part[2:-1] or 1)
            elif not CONTROL.fullmatch(part) or part.endswith("m"):
                self.rows[self.row] += part


def record(steps: int, at: int, width: int, seed: int) -> Screen:
    """The screen of a run of so many steps when step `at` is done."""
    screen, left = Screen(), ""
    with TemporaryDirectory() as folder:
        main, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 60, width, 0, 0))
        command = [sys.executable, "-m", "exgrpo_cli", "train", "--steps", str(steps), "--seed", str(seed)]
        command += ["--output", "runs/first"]
        environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
        environment.pop("NO_COLOR", None)
        run = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
        )
        os.close(terminal)
        try:
            # A row of the view holds how many steps are done; the view is whole again when the next bar begins.
            while not any(
                "training steps" in row and f"{at} of {steps} " in re.sub(CONTROL, "", row) for row in screen.rows[:-1]
            ):
                text = left + os.read(main, 65536).decode(errors="ignore")
                # A control code may be cut in two.
                text, left = (
                    (text[: text.rindex("\x1b")], text[text.rindex("\x1b") :]) if "\x1b" in text[-12:] else (text, "")
                )
                screen.write(text)
        finally:
            run.send_signal(signal.SIGKILL)
            run.wait()
            os.close(main)
    return screen


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("steps", 150), ("at", 60), ("width", 80), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    wanted = parser.parse_args()
    screen = record(**vars(wanted))
    console = Console(
        record=True, width=wanted.width, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(Text("$ exgrpo train", "bold"))
    for row in "\n".join(screen.rows).rstrip().split("\n"):
        console.print(Text.from_ansi(row))
    # No font from the network: whoever looks at it has one of fixed width.
    svg = re.sub(r"@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    IMAGE.write_text(console.export_svg(title="exgrpo train", code_format=svg, unique_id="terminal"), encoding="utf-8")
    sys.stdout.write(f"{IMAGE}\n")


if __name__ == "__main__":
    main()
