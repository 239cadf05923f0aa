"""Servers that are broken or mean harm, drawn at random: what `evaluate --endpoint` makes of them.

    python benchmarks/campaign/servers.py --count 54 --seed 1

A trial draws what a server answers, to which of the three requests, and how it is sent, and evaluates two questions on
it with a key in the environment. A second server notes whatever reaches it. Its class:

harmless   exit code 0
named      another exit code, and a line
leaked     the key in what was said or stored, or anything at the second server
unbounded  over its seconds, or over a gibibyte of memory more than at the start
ugly       a traceback, "unexpected", a signal, no line at all
"""

import json
import os
import random
import resource
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from processes import Finding, Outcome, campaign, end, parser_of, start, trials_of

BAD = ("leaked", "unbounded", "ugly")
KEY = "sk-campaign-0123456789abcdefKEY"
SECONDS = 100.0
"""Longest time of a trial: six attempts with their pauses, each of `--timeout` seconds at most."""
REQUESTS = ("/v1/models", "/version", "/v1/chat/completions")
Send = Callable[[bytes], None]
COMPLETION = {
    "choices": [{"finish_reason": "stop", "message": {"content": "\\boxed{4}"}}],
    "usage": {"completion_tokens": 5},
}
RIGHT = {"/v1/models": {"data": [{"id": "m"}]}, "/version": {"version": "1"}, "/v1/chat/completions": COMPLETION}
VALUES: tuple[Any, ...] = (
    None,
    "x",
    -1,
    1e308,
    10**30,
    2**31,
    [],
    {},
    True,
    "\x1b[2J\x07",
    "a" * 100_000,
    KEY,
    "\ud800",
)


def _places(value: Any, so_far: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if not isinstance(value, dict | list):
        return []
    keys = list(value) if isinstance(value, dict) else range(len(value))
    return [own for key in keys for own in ((*so_far, key), *_places(value[key], (*so_far, key)))]


def changed(value: Any, rng: random.Random) -> Any:
    """The JSON value with another one at a random place."""
    value = json.loads(json.dumps(value))
    *outer, last = rng.choice(_places(value))
    holder = value
    for key in outer:
        holder = holder[key]
    holder[last] = rng.choice(VALUES)
    return value


def whole(status: int, body: bytes, headers: str = "") -> bytes:
    """A reply as it goes over the wire."""
    return f"HTTP/1.1 {status} x\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


def drawn(path: str, rng: random.Random, elsewhere: int) -> tuple[str, Callable[[Send], None]]:
    """What a server does at a request: in words, and as a function that sends it."""
    right = json.dumps(RIGHT[path]).encode()
    status = rng.choice((100, 199, 204, 206, 300, 400, 401, 404, 408, 418, 429, 500, 503, 599, 999))
    where = rng.choice(
        (f"http://127.0.0.1:{elsewhere}", f"http://localhost:{elsewhere}", f"ftp://127.0.0.1:{elsewhere}")
    )
    where = rng.choice(
        (where, where, "file:///etc/hostname", "gopher://127.0.0.1:1/x", "//127.0.0.1:9/", "http://[::1")
    )
    moved = rng.choice((301, 302, 303, 307, 308))
    endless = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    value, pause = changed(RIGHT[path], rng), rng.choice(("1", "-5", "nan", "x"))
    said = json.dumps({"error": {"message": f"Bearer {KEY} \x1b]0;x\x07"}}).encode()

    def forever(first: bytes, piece: bytes, pause: float) -> Callable[[Send], None]:
        def send(write: Send) -> None:
            write(first)
            while True:
                write(piece)
                time.sleep(pause)

        return send

    kinds: dict[str, Callable[[Send], None]] = {
        f"status {moved} to {where}": lambda write: write(whole(moved, b"", f"Location: {where}{path}\r\n")),
        f"status {status} with the key": lambda write: write(whole(status, said)),
        f"JSON {json.dumps(value)[:60]}": lambda write: write(whole(200, json.dumps(value).encode())),
        "an endless body": forever(endless, b"10000\r\n" + b"a" * 65536 + b"\r\n", 0),
        "a body that drips": forever(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b" ", 0.3),
        "endless headers": forever(b"HTTP/1.1 200 OK\r\n", b"X-A: " + b"b" * 2000 + b"\r\n", 0),
        "headers that drip": forever(b"HTTP/1.1 200 OK\r\n", b"X", 0.3),
        "a length of 10^15": lambda write: write(
            whole(200, right).replace(b"Content-Length: ", b"Content-Length: 9" + b"0" * 14)
        ),
        "nested JSON": lambda write: write(whole(200, b"[" * 200_000)),
        "nothing": lambda write: None,
        "bytes": lambda write: write(rng.randbytes(300)),
        "half a reply": lambda write: write(whole(200, right)[: rng.randrange(10, 60)]),
        "UTF-16": lambda write: write(whole(200, json.dumps(RIGHT[path]).encode("utf-16"))),
        "gzip that is none": lambda write: write(whole(200, right, "Content-Encoding: gzip\r\n")),
        f"a pause of {pause}": lambda write: write(whole(429, b"", f"Retry-After: {pause}\r\n")),
        "digits": lambda write: write(whole(200, b'{"data": ' + b"9" * 5000 + b"}")),
    }
    name = rng.choice(sorted(kinds))
    return name, kinds[name]


class Server:
    """Answers on a port of its own, one connection a thread; notes the requests."""

    def __init__(self, at: str, act: Callable[[Send], None]) -> None:
        self._at, self._act = at, act
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self._socket.getsockname()[1]
        self.requests: list[bytes] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        try:
            with connection:
                request = b""
                while b"\r\n\r\n" not in request and (piece := connection.recv(65536)):
                    request += piece
                self.requests.append(request)
                path = request.split(b" ")[1].decode() if request.count(b" ") > 1 else ""
                if path == self._at:
                    self._act(connection.sendall)
                else:
                    known = path in RIGHT
                    connection.sendall(whole(200 if known else 404, json.dumps(RIGHT.get(path, {})).encode()))
        except OSError:
            pass  # The client has left.

    def close(self) -> None:
        self._socket.close()


def trial(root: Path, number: int, seed: int) -> Finding:
    """Evaluate on a drawn server, and class what came."""
    rng = random.Random(f"{seed} {number}")
    elsewhere = Server("", lambda write: None)
    at = rng.choice(REQUESTS)
    what, act = drawn(at, rng, elsewhere.port)
    server = Server(at, act)
    folder = root / str(number)
    folder.mkdir()
    out, err = folder / "out", folder / "err"
    line = ["evaluate", "--data", str(root / "two.jsonl"), "--endpoint", f"http://127.0.0.1:{server.port}"]
    line += ["--model", "m", "--output", "res", "--samples", "1", "--max-tokens", "64", "--timeout", "2"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    begin = time.monotonic()
    code = end(start(line, folder, out, err, OPENAI_API_KEY=KEY), SECONDS)
    outcome = Outcome(code, out.read_text(errors="replace"), err.read_text(errors="replace"), time.monotonic() - begin)
    grown = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss - before
    server.close()
    elsewhere.close()
    stored = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    said = [own for own in outcome.err.splitlines() if own.startswith("exgrpo: ")][-1:]
    if elsewhere.requests or any(KEY.encode() in text for text in stored):
        verdict = "leaked"
    elif code == -99 or grown > 1 << 20:
        verdict, said = "unbounded", [f"{outcome.seconds:.0f} s, {grown >> 10} MiB more; {said}"]
    elif outcome.ugly:
        verdict, said = "ugly", [outcome.err[-300:]]
    else:
        verdict = "named" if code else "harmless"
    return Finding(number, f"{at}: {what}", verdict, code, f"{outcome.seconds:.0f} s {said}"[:300])


def main() -> None:
    options = parser_of(__doc__, 54, "servers").parse_args()
    with tempfile.TemporaryDirectory(prefix="exgrpo-servers-") as name:
        root = Path(name)
        os.environ["EXGRPO_CACHE"] = str(root / "cache")
        rows = ({"question": f"{number} + 2 = ?", "answer": str(number + 2)} for number in (2, 3))
        (root / "two.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        defects = campaign(
            "servers", options, trials_of(options), lambda number: trial(root, number, options.seed), BAD
        )
    raise SystemExit(bool(defects))


if __name__ == "__main__":
    main()
