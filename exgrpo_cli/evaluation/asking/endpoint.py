"""A server that speaks the OpenAI protocol, as a source of responses.

Each response is a request of its own with its own seed, so an interrupted evaluation samples what is left with the
seeds it would have had. What may pass (a refused connection, a time-out, an overloaded or restarting server, an answer
that is no completion) is tried again with growing pauses, and the user is told; what will not (a wrong model name, a
host that does not exist) ends the work at once.
"""

import json
import queue
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any, TypeVar

from exgrpo_cli.base.errors import InputError, RunError
from exgrpo_cli.base.types import Message, SamplingParams, StopReason
from exgrpo_cli.evaluation.asking.responses import OnResponse, Response, ResponseRequest

Prompt = str | tuple[Message, ...]
"""Messages for the server's chat template, or the text of the prompt as it is."""

# Time-out, conflict, too early, too many requests: the same request may succeed later.
_PASSING_CLIENT_ERRORS = (408, 409, 425, 429)
_LONGEST_PAUSE_SECONDS = 60.0
# Whatever ended a response but the limit ended it for good: a filter that cut it off would do so again.
_STOP_REASONS = {
    "stop": StopReason.EOS,
    "content_filter": StopReason.EOS,
    "tool_calls": StopReason.EOS,
    "function_call": StopReason.EOS,
    "length": StopReason.LENGTH,
}
_REFUSED_AT_FIRST = 3
"""Attempts to connect to a server that has not answered yet: a mistyped port is refused for ever."""
_NOTE_EVERY_SECONDS = 30.0
"""Many requests fail together when a server does: one line tells of all."""

T = TypeVar("T")


class _Passing(Exception):
    """An attempt failed in a way that may pass."""

    def __init__(self, what: str, pause_seconds: float = 0.0, *, first_attempts: int | None = None) -> None:
        super().__init__(what)
        self.pause_seconds = pause_seconds
        """Pause that the server asked for."""
        self.first_attempts = first_attempts
        """Attempts worth making where the server has not answered yet; None for as many as ever."""


class SparingNote:
    """Passes a line on unless another one went out shortly before; called from any thread."""

    def __init__(self, note: Callable[[str], None], every_seconds: float = _NOTE_EVERY_SECONDS) -> None:
        self._note = note
        self._every_seconds = every_seconds
        self._lock = threading.Lock()
        self._last: float | None = None

    def __call__(self, text: str) -> None:
        with self._lock:
            now = time.monotonic()
            if self._last is not None and now - self._last < self._every_seconds:
                return
            self._last = now
            self._note(text)


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Address, model and patience."""

    url: str
    """Base address, with or without the closing `/v1`."""
    model: str
    api_key: str | None = field(default=None, repr=False)
    parallel: int = 32
    """Requests under way at once; the server does the batching."""
    timeout_seconds: float = 1200.0
    """Longest wait for one response."""
    attempts: int = 6
    backoff_seconds: float = 1.0
    """Pause after the first failure; doubled after each further one, at most a minute."""
    note: Callable[[str], None] = field(default=lambda text: None, repr=False, compare=False)
    """Told in one line of an attempt that failed and is made again."""

    @property
    def base(self) -> str:
        """Address that requests go to, without the path of one."""
        trimmed = self.url.rstrip("/")
        return trimmed if trimmed.endswith("/v1") else f"{trimmed}/v1"

    def check(self) -> None:
        """Raises InputError where nobody answers, or the server does not have the model."""
        if not self.url.startswith(("http://", "https://")):
            raise InputError(f"--endpoint {self.url!r} is no address: it begins with http:// or https://.")
        try:
            listed = self._with_patience(lambda: _model_names(self._call("/models", None, timeout=30.0)), first=True)
        except RunError as error:
            raise InputError(str(error)) from error
        if self.model not in listed:
            raise InputError(f"{self.base} serves {', '.join(listed) or 'no model'}, not {self.model!r}: see --model.")

    def server_version(self) -> str:
        """What the server says about itself, as vLLM does at `/version`; "unknown" for those that do not."""
        try:
            request = urllib.request.Request(self.base.removesuffix("/v1") + "/version", headers=self._headers())
            with urllib.request.urlopen(request, timeout=30.0) as reply:
                return str(json.load(reply)["version"])
        except (OSError, ValueError, KeyError, TypeError, HTTPException):
            return "unknown"

    def respond(self, prompt: Prompt, seed: int, params: SamplingParams) -> Response:
        """One response. Raises RunError when the attempts are used up, or the server refuses the request."""
        body: dict[str, Any] = {
            "model": self.model,
            "seed": seed,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "max_tokens": params.max_new_tokens,
        }
        if isinstance(prompt, str):
            body["prompt"] = prompt
            return self._with_patience(lambda: _response(self._call("/completions", body)))
        body["messages"] = [{"role": message.role, "content": message.content} for message in prompt]
        return self._with_patience(lambda: _response(self._call("/chat/completions", body)))

    def _with_patience(self, attempt: Callable[[], T], *, first: bool = False) -> T:
        """`attempt` until it succeeds; `first` is less patient with an address where nobody has answered yet."""
        pause = self.backoff_seconds
        for number in range(1, self.attempts + 1):
            try:
                return attempt()
            except _Passing as error:
                most = min(self.attempts, (error.first_attempts if first else None) or self.attempts)
                if number >= most:
                    raise self._given_up(number, error, first=first) from error
                wait = min(max(pause, error.pause_seconds), _LONGEST_PAUSE_SECONDS)
                self.note(f"{self.base}: {error}; attempt {number + 1} of {most} in {wait:.0f} s")
            time.sleep(wait)
            pause *= 2
        raise AssertionError("at least one attempt is made")

    def _given_up(self, attempts: int, error: _Passing, *, first: bool) -> RunError:
        if first:
            advice = "Is the server up, and --endpoint its address?"
        else:
            advice = "Finished questions are kept: run the same command again once it answers."
        times = "once" if attempts == 1 else f"{attempts} times, last"
        return RunError(f"{self.base} failed {times} with: {error}. {advice}")

    def _call(self, path: str, body: Mapping[str, Any] | None, timeout: float | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data=data, headers=self._headers())
        try:
            with urllib.request.urlopen(request, timeout=timeout or self.timeout_seconds) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            said = error.read(300).decode("utf-8", "replace").strip()
            if error.code in _PASSING_CLIENT_ERRORS or error.code >= 500:
                raise _Passing(f"status {error.code} {said}", _retry_after(error)) from error
            raise RunError(f"{self.base}{path} refused the request with status {error.code}: {said}") from error
        except (OSError, HTTPException) as error:
            raise _unreachable(error) from error
        except ValueError as error:
            raise _Passing(f"an answer that is not JSON ({error})") from error

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        return headers | {"Authorization": f"Bearer {self.api_key}"} if self.api_key else headers


@dataclass(frozen=True, kw_only=True, slots=True)
class EndpointSource:
    """An endpoint with the prompts already made, as a `ResponseSource`."""

    endpoint: Endpoint
    prompts: Mapping[str, Prompt]
    """By question id."""

    def respond(self, requests: Sequence[ResponseRequest], params: SamplingParams, on_response: OnResponse) -> None:
        """Ask for all responses, `endpoint.parallel` at a time. Raises the first RunError and drops the rest."""
        wanted: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        total = 0
        for index, request in enumerate(requests):
            for member in range(len(request.seeds)):
                wanted.put((index, member))
                total += 1
        arrived: queue.SimpleQueue[tuple[int, int, Response | RunError | None]] = queue.SimpleQueue()
        stop = threading.Event()

        def work() -> None:
            while not stop.is_set():
                try:
                    index, member = wanted.get_nowait()
                except queue.Empty:
                    return
                request = requests[index]
                outcome: Response | RunError | None = None
                try:
                    prompt = self.prompts[request.question_id]
                    outcome = self.endpoint.respond(prompt, request.seeds[member], params)
                except RunError as error:
                    stop.set()
                    outcome = error
                finally:
                    # Whatever happened: the other side waits for one outcome per request.
                    arrived.put((index, member, outcome))

        # Daemon threads: a Ctrl-C must not wait for a server that takes minutes to answer.
        for _ in range(min(self.endpoint.parallel, total)):
            threading.Thread(target=work, daemon=True).start()
        try:
            for _ in range(total):
                index, member, outcome = arrived.get()
                if isinstance(outcome, RunError):
                    raise outcome
                if outcome is None:
                    raise RunError(f"a request to {self.endpoint.base} ended in an unforeseen error, shown above.")
                on_response(index, member, outcome)
        finally:
            stop.set()


def _unreachable(error: OSError | HTTPException) -> _Passing:
    """No answer came: it may pass, but hardly for a host of no such name or a port where nobody has listened yet."""
    reason = getattr(error, "reason", None) or error
    if isinstance(reason, socket.gaierror):
        return _Passing(f"the host is not known ({reason.strerror})", first_attempts=1)
    refused = _REFUSED_AT_FIRST if isinstance(reason, ConnectionRefusedError) else None
    said = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
    return _Passing(said, first_attempts=refused)


def _retry_after(error: urllib.error.HTTPError) -> float:
    """Seconds of the `Retry-After` header; 0 without one, or where it is a date."""
    value = error.headers.get("Retry-After") or ""
    return float(value) if value.replace(".", "", 1).isdecimal() else 0.0


def _model_names(reply: Any) -> list[str]:
    try:
        return [str(entry["id"]) for entry in reply["data"]]
    except (KeyError, TypeError) as error:
        raise _Passing(f"a list of models without names ({str(reply)[:100]})") from error


def _response(reply: Any) -> Response:
    try:
        choice = reply["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        num_tokens = reply["usage"]["completion_tokens"]
        reason = _STOP_REASONS[choice["finish_reason"]]
    except (KeyError, IndexError, TypeError) as error:
        missing = f", {error} is missing or unknown" if isinstance(error, KeyError) else ""
        raise _Passing(f"an answer that is no completion{missing} ({str(reply)[:200]})") from error
    # Python counts True as a number.
    counted = isinstance(num_tokens, int) and not isinstance(num_tokens, bool) and num_tokens >= 0
    if not (text is None or isinstance(text, str)) or not counted:
        raise _Passing(f"an answer that is no completion ({str(reply)[:200]})")
    # A thinking model cut off before its answer has no content. JSON may hold half a surrogate pair, a file may not.
    whole = (text or "").encode("utf-8", "replace").decode("utf-8")
    return Response(text=whole, num_tokens=num_tokens, stop_reason=reason, logprob=None)
