"""A small OpenAI-compatible server on this machine: real HTTP, every reply made by the test."""

import json
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, Any] | tuple[int, Any, Mapping[str, str]]
"""Status, body (bytes as they are, a function that writes to the connection itself, else JSON), headers."""
Answer = Callable[[str, dict[str, Any], int], Reply]
"""(path, body, times the same body was seen before) to the reply; of a GET the body is empty."""


def about(path: str, body: dict[str, Any], before: int) -> Reply:
    return 200, {"data": [{"id": "recorded"}], "version": "9.9"}


class Server:
    """Serves the model `recorded`, and remembers every body and every `Authorization`; a context manager."""

    def __init__(self, answer: Answer, about: Answer = about) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.keys.append(self.headers["Authorization"])
                self.reply(*about(self.path, {}, len(outer.keys) - 1))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    before = outer.bodies.count(body)
                    outer.bodies.append(body)
                self.reply(*answer(self.path, body, before))

            def reply(self, status: int, value: Any, headers: Mapping[str, str] | None = None) -> None:
                try:
                    if callable(value):
                        return value(self.wfile.write)
                    data = value if isinstance(value, bytes) else json.dumps(value).encode()
                    self.send_response(status)
                    for name, text in {"Content-Length": str(len(data)), **(headers or {})}.items():
                        self.send_header(name, text)
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:
                    pass  # The client's patience ended first.

            def log_message(self, *args: object) -> None: ...

        outer = self
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def completion(text: str | None, *, tokens: int = 7, reason: str = "stop") -> Reply:
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": reason}
    return 200, {"choices": [choice], "usage": {"completion_tokens": tokens}}
