"""A page in headless Chromium: what it asks for, what its console says, how wide it is, and what it looks like.

Spoken to through pipes (`--remote-debugging-pipe`): messages are JSON, each ended by a zero byte.
"""

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import pytest


@dataclass(kw_only=True)
class Seen:
    """What a browser saw of one page at one width."""

    requests: list[str] = field(default_factory=list)
    """Addresses asked for, the page itself first; not what the page has in it (`data:`)."""
    errors: list[str] = field(default_factory=list)
    """Errors and warnings of the console, of scripts, and of the page's own policy."""
    content_width: int = 0
    """CSS pixels that the page takes; more than the screen is a page that has to be pushed sideways."""
    text: str = ""
    """What a reader can read."""
    picture: bytes = b""
    """The whole page as PNG."""


class Browser:
    """A running Chromium with one tab."""

    def __init__(self, commands: BinaryIO, answers: BinaryIO) -> None:
        self._to, self._from = commands, answers
        self._number, self._events, self._rest = 0, list[dict[str, Any]](), b""
        self._session: dict[str, str] = {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._session = {"sessionId": session}
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer to one command; events that come before it are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params, **self._session}
        self._to.write(json.dumps(message).encode() + b"\0")
        self._to.flush()
        while (answer := self._message()).get("id") != self._number:
            self._events.append(answer)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            piece = os.read(self._from.fileno(), 2**20)
            assert piece, "the browser has ended"
            self._rest += piece
        text, _, self._rest = self._rest.partition(b"\0")
        return json.loads(text)

    def look(self, page: Path, *, width: int, height: int) -> Seen:
        """Open the file on a screen of `width` x `height` CSS pixels; narrow ones are phones."""
        self._events.clear()
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **screen)
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._events.append(self._message())
        seen = Seen(content_width=self._value("document.documentElement.scrollWidth"))
        seen.text = self._value("document.body.innerText")
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        seen.picture = base64.b64decode(shot["data"])
        for event in self._events:
            match event:
                case {"method": "Network.requestWillBeSent", "params": {"request": {"url": url}}} if url[:5] != "data:":
                    seen.requests.append(url)
                case {"method": "Log.entryAdded", "params": {"entry": {"level": "error" | "warning", "text": text}}}:
                    seen.errors.append(text)
                case {"method": "Runtime.exceptionThrown" | "Runtime.consoleAPICalled", "params": params}:
                    seen.errors.append(json.dumps(params))
        return seen

    def count(self, selector: str) -> int:
        """Elements of the open page that a CSS selector finds."""
        return int(self._value(f"document.querySelectorAll({selector!r}).length"))

    def _value(self, expression: str) -> Any:
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"]["value"]


@contextmanager
def headless_browser(folder: Path) -> Iterator[Browser]:
    """Chromium with a profile of its own in `folder`; the test is skipped where there is none."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        # No failure: a Debian package of hundreds of MB that no environment of the project holds, for tests that are
        # run by hand where somebody has it.
        pytest.skip("no chromium on the path (Debian: apt-get install chromium)")
    to_browser, from_browser = os.pipe(), os.pipe()
    # Chromium reads from descriptor 3 and writes to 4.
    start = f'exec "$@" 3<&{to_browser[0]} 4>&{from_browser[1]}'
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={folder}"]
    process = subprocess.Popen(
        ["bash", "-c", start, "bash", program, *options],
        pass_fds=(to_browser[0], from_browser[1]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser[0])
    os.close(from_browser[1])
    try:
        with os.fdopen(to_browser[1], "wb") as commands, os.fdopen(from_browser[0], "rb") as answers:
            yield Browser(commands, answers)
    finally:
        process.terminate()
        process.wait(30)
