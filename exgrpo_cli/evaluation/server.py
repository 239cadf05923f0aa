"""A server that speaks the OpenAI protocol, as a source of responses.

Each response is a request of its own with its own seed, so an interrupted evaluation samples what is left with the
seeds it would have had. What may pass (a refused connection, a time-out, an overloaded or restarting server, an answer
that is no completion) is tried again with growing pauses, and the user is told; what will not (a wrong model name)
ends the work at once.
"""

import json
import queue
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from http.client import HTTPException
from typing import Any, TypeVar

from exgrpo_cli.base.errors import InputError, RunError, nearest
from exgrpo_cli.base.types import AnswerFormat, Message, Question, SamplingParams, StopReason
from exgrpo_cli.evaluation.benchmarks import Protocol
from exgrpo_cli.evaluation.sampling import OnResponse, Prepared, QuestionRecord, Response
from exgrpo_cli.questions.prompts import TEMPLATES, THOUGHT_SOLUTION_SYSTEM

Prompt = str | tuple[Message, ...]
"""Messages for the server's chat template, or the text of the prompt as it is."""

# Time-out, conflict, too early, too many requests: the same request may succeed later.
_PASSING_CLIENT_ERRORS = (408, 409, 425, 429)
_LONGEST_PAUSE_SECONDS = 60.0
# Whatever ended a response but the limit ended it for good: a filter that cut it off would do so again.
_STOP_REASONS = dict.fromkeys(("stop", "content_filter", "tool_calls", "function_call"), StopReason.EOS)
_STOP_REASONS["length"] = StopReason.LENGTH
_NOTE_EVERY_SECONDS = 30.0
"""Many requests fail together when a server does: one line tells of all."""

T = TypeVar("T")


def throttled(note: Callable[[str], None]) -> Callable[[str], None]:
    """`note`, called from any thread, but for lines that come shortly after another one."""
    lock, last = threading.Lock(), -_NOTE_EVERY_SECONDS

    def tell(text: str) -> None:
        nonlocal last
        with lock:
            if time.monotonic() - last >= _NOTE_EVERY_SECONDS:
                last = time.monotonic()
                note(text)

    return tell


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
    backoff_seconds: float = 2.0
    """Pause after the first failure; doubled after each further one, at most a minute."""
    note: Callable[[str], None] = field(default=lambda text: None, repr=False, compare=False)
    """Gets one line for an attempt that failed and is made again."""

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
            # Less patience for an address where nobody has answered yet: a mistyped port is refused for ever.
            asking = replace(self, attempts=min(3, self.attempts), timeout_seconds=30.0)
            listed = asking._ask("/models", None, lambda reply: [str(entry["id"]) for entry in reply["data"]])
        except RunError as error:
            raise InputError(str(error)) from error
        if self.model not in listed:
            raise InputError(f"{self.base} serves {', '.join(listed) or 'no model'}, not {self.model!r}: see --model.")

    def prepare(self, name: str, protocol: Protocol, records: tuple[QuestionRecord, ...]) -> Prepared:
        """See `LocalModel.prepare`; only the server knows its window: it refuses what exceeds it."""
        template, requires_box = "chat" if protocol.template == "auto" else protocol.template, protocol.requires_box
        prompts = {record.question.id: endpoint_prompt(template, record.question) for record in records}
        return Prepared(
            records=tuple(replace(record, prompt_text=_prompt_text(prompts[record.question.id])) for record in records),
            template=template,
            answer_format=AnswerFormat(
                # Nobody here opens `<think>`: what the server answers is graded from a `</think>` on where it has one.
                opens_think=False,
                requires_box=TEMPLATES[template].requires_box if requires_box is None else requires_box,
                require_eos=protocol.require_eos,
            ),
            max_tokens=protocol.max_tokens,
            open=lambda: lambda requests, params, on_response: self.respond_all(prompts, requests, params, on_response),
        )

    def stamp(self) -> dict[str, dict[str, Any]]:
        """See `LocalModel.stamp`; the version is what the server says at `/version`, as vLLM does."""
        try:
            version = str(self._reply(self.base.removesuffix("/v1") + "/version", None, 30.0)["version"])
        except (OSError, ValueError, KeyError, TypeError, HTTPException):
            version = "unknown"
        return {
            "model": {"name": self.model, "path": self.url, "hash": "unknown to the client"},
            "engine": {"name": "endpoint", "version": version},
        }

    def close(self) -> None:
        """Nothing is held."""

    def respond_all(
        self,
        prompts: Mapping[str, Prompt],
        requests: Sequence[tuple[str, tuple[int, ...]]],
        params: SamplingParams,
        on_response: OnResponse,
    ) -> None:
        """Ask for all responses, `parallel` at a time. Raises the first RunError and drops the rest."""
        wanted = deque(
            (index, member, prompts[question_id], seed)
            for index, (question_id, seeds) in enumerate(requests)
            for member, seed in enumerate(seeds)
        )
        total = len(wanted)
        arrived: queue.SimpleQueue[tuple[int, int, Response | RunError | None]] = queue.SimpleQueue()

        def work() -> None:
            with suppress(IndexError):
                while True:
                    index, member, prompt, seed = wanted.popleft()
                    outcome: Response | RunError | None = None
                    try:
                        outcome = self.respond(prompt, seed, params)
                    except RunError as error:
                        wanted.clear()
                        outcome = error
                    finally:
                        # Whatever happened: the other side waits for one outcome per request.
                        arrived.put((index, member, outcome))

        # Daemon threads: a Ctrl-C must not wait for a server that takes minutes to answer.
        for _ in range(min(self.parallel, total)):
            threading.Thread(target=work, daemon=True).start()
        try:
            for _ in range(total):
                index, member, outcome = arrived.get()
                if isinstance(outcome, RunError):
                    raise outcome
                if outcome is None:
                    raise RunError(f"a request to {self.base} ended in an unforeseen error, shown above.")
                on_response(index, member, outcome)
        finally:
            wanted.clear()

    def respond(self, prompt: Prompt, seed: int, params: SamplingParams) -> Response:
        """One response. Raises RunError when the attempts are used up, or the server refuses the request."""
        body: dict[str, Any] = {"model": self.model, "seed": seed, "max_tokens": params.max_new_tokens}
        body |= {"temperature": params.temperature, "top_p": params.top_p}
        if isinstance(prompt, str):
            path, body["prompt"] = "/completions", prompt
        else:
            path, body["messages"] = "/chat/completions", [asdict(message) for message in prompt]
        return self._ask(path, body, _response)

    def _ask(self, path: str, body: Mapping[str, Any] | None, read: Callable[[Any], T]) -> T:
        """The reply as `read` makes it, asked for until one can be read; raises RunError at once for a refusal."""
        url, said = self.base + path, ""
        failure: Exception | None = None
        for number in range(1, self.attempts + 1):
            pause = self.backoff_seconds * 2 ** (number - 1)
            try:
                reply = self._reply(url, body, self.timeout_seconds)
                return read(reply)
            except urllib.error.HTTPError as error:
                said, failure = f"status {error.code} {error.read(300).decode('utf-8', 'replace').strip()}", error
                if error.code not in _PASSING_CLIENT_ERRORS and error.code < 500:
                    raise RunError(f"{url} refused the request with {said}") from error
                with suppress(ValueError):
                    # A date, the header's other form, is not waited for.
                    pause = max(pause, float(error.headers.get("Retry-After") or 0))
            except (OSError, HTTPException) as error:
                reason = getattr(error, "reason", None) or error
                said, failure = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__, error
            except ValueError as error:
                said, failure = f"an answer that is not JSON ({error})", error
            except (KeyError, IndexError, TypeError) as error:
                said, failure = f"an unusable answer, {error!r} ({str(reply)[:200]})", error
            if number < self.attempts:
                wait = min(pause, _LONGEST_PAUSE_SECONDS)
                self.note(f"{self.base}: {said}; attempt {number + 1} of {self.attempts} in {wait:.0f} s")
                time.sleep(wait)
        raise RunError(
            f"{self.base} failed {self.attempts} times, last with: {said}. Is the server up, and --endpoint its "
            "address? Finished questions are kept: run the same command again once it answers."
        ) from failure

    def _reply(self, url: str, body: Mapping[str, Any] | None, timeout: float) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
        if self.api_key:
            # Not sent on to where a server redirects.
            request.add_unredirected_header("Authorization", f"Bearer {self.api_key}")
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            return json.load(reply)


def endpoint_prompt(name: str, question: Question) -> Prompt:
    """Messages for a server's own chat template, or the text of a plain-text template.

    `thought-solution` is its system message; opening `<think>` is up to the server's chat template. Raises InputError
    for an unknown template.
    """
    if name not in TEMPLATES:
        raise InputError(f"Prompt template {name!r} is not known.{nearest(name, ['auto', *TEMPLATES])}")
    template = TEMPLATES[name]
    if template.question_form is not None:
        return template.question_form.replace("{question}", question.prompt[-1].content)
    if template.system is not None:
        turns = (message for message in question.prompt if message.role != "system")
        return (Message(role="system", content=template.system), *turns)
    return tuple(message for message in question.prompt if message.content != THOUGHT_SOLUTION_SYSTEM)


def _prompt_text(prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else json.dumps([asdict(turn) for turn in prompt], ensure_ascii=False)


def _response(reply: Any) -> Response:
    choice = reply["choices"][0]
    # A thinking model cut off before its answer has no content.
    text = (choice["message"]["content"] if "message" in choice else choice["text"]) or ""
    num_tokens, reason = reply["usage"]["completion_tokens"], _STOP_REASONS[choice["finish_reason"]]
    if type(num_tokens) is not int or num_tokens < 0 or not isinstance(text, str):
        raise TypeError("tokens that are no number, or a text that is none")
    # JSON may hold half a surrogate pair, a file may not.
    whole = text.encode("utf-8", "replace").decode("utf-8")
    return Response(text=whole, num_tokens=num_tokens, stop_reason=reason, logprob=None)
