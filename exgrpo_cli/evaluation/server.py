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
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from exgrpo_cli.base import errors, types
from exgrpo_cli.evaluation import benchmarks, exchange
from exgrpo_cli.evaluation.exchange import MayPass
from exgrpo_cli.evaluation.sampling import OnResponse, Prepared, QuestionRecord, Response
from exgrpo_cli.questions.prompts import Template, answer_format, choose_template, messages_for, render

Prompt = str | tuple[types.Message, ...]
"""Messages for the server's chat template, or the text of the prompt as it is."""

# Time-out, conflict, too early, too many requests: the same request may succeed later.
_PASSING_CLIENT_ERRORS = (408, 409, 425, 429)
_LONGEST_PAUSE_SECONDS = 60.0
_NOTE_EVERY_SECONDS = 30.0
"""Many requests fail together when a server does: one line tells of all."""

_FIRST_SECONDS = 15.0
"""Longest wait for what a server says of itself."""
_BYTES, _BYTES_PER_TOKEN = 4 << 20, 100
"""Bound on an answer: of any, and for each token asked for, which as JSON has some 6 bytes, and 20 in some scripts."""
_SECRET = 8
"""Characters from which on a key is left out of an answer too; a shorter one is a placeholder and may be a word."""
_PARSING = threading.Lock()
"""One answer at a time is taken apart: as objects it has many times its size."""

T = TypeVar("T")


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    # Whatever ended a response but the limit ended it for good: a filter that cut it off would do so again.
    finish_reason: Literal["stop", "content_filter", "tool_calls", "function_call", "length"]
    message: _Message | None = None
    text: str | None = None

    def __post_init__(self) -> None:
        if self.message is None and self.text is None:
            raise ValueError("neither a message nor a text")


class _Usage(msgspec.Struct):
    # Written as 32 bits.
    completion_tokens: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class _Completion(msgspec.Struct):
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]
    usage: _Usage


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


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
    """Longest wait for one whole response."""
    attempts: int = 6
    backoff_seconds: float = 2.0
    """Pause after the first failure; doubled after each further one, at most a minute."""
    note: Callable[[str], None] = field(default=lambda text: None, repr=False, compare=False)
    """Gets one line for an attempt that failed and is made again."""

    def __post_init__(self) -> None:
        """Raises InputError for what is no address, or holds more than one, and for a key that cannot be sent."""
        object.__setattr__(self, "url", exchange.checked_address(self.url))
        object.__setattr__(self, "api_key", exchange.checked_key(self.api_key))

    @property
    def base(self) -> str:
        """Address that requests go to, without the path of one."""
        return self.url if self.url.endswith("/v1") else f"{self.url}/v1"

    @property
    def shown(self) -> str:
        """`base` as messages have it."""
        return exchange.shown_address(self.base)

    def check(self) -> None:
        """Raises InputError where nobody answers, or the server does not have the model."""
        try:
            # Less patience for an address where nobody has answered yet: a mistyped port is refused for ever.
            seconds = min(_FIRST_SECONDS, self.timeout_seconds)
            asking = replace(self, attempts=min(3, self.attempts), timeout_seconds=seconds)
            listed = [model.id for model in asking._ask("/models", None, _Models).data]
        except errors.RunError as error:
            raise errors.InputError(str(error)) from error
        if self.model not in listed:
            names = [self._said(name) for name in listed[:8]]
            known = ", ".join(names) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")
            raise errors.InputError(f"{self.shown} serves {known or 'no model'}, not {self.model!r}: see --model.")

    def prepare(self, name: str, protocol: benchmarks.Protocol, records: tuple[QuestionRecord, ...]) -> Prepared:
        """See `LocalModel.prepare`; only the server knows its window: it refuses what exceeds it."""
        template = choose_template(protocol.template, None, require_box=protocol.require_box)
        prompts = {record.question.id: endpoint_prompt(template, record.question) for record in records}
        return Prepared(
            records=tuple(replace(record, prompt_text=_prompt_text(prompts[record.question.id])) for record in records),
            template=template.name,
            # Nobody here opens `<think>`: what the server answers is graded from a `</think>` on where it has one.
            answer_format=answer_format(replace(template, opens_think=False), require_eos=protocol.require_eos),
            max_tokens=protocol.max_tokens,
            open=lambda: lambda requests, params, on_response: self.respond_all(prompts, requests, params, on_response),
        )

    def stamp(self) -> dict[str, dict[str, Any]]:
        """See `LocalModel.stamp`."""
        return {
            "model": {"name": self.model, "path": exchange.shown_address(self.url), "hash": "unknown to the client"},
            "engine": {"name": "endpoint", "version": "unknown to the client"},
        }

    def close(self) -> None:
        """Nothing is held."""

    def respond_all(
        self,
        prompts: Mapping[str, Prompt],
        requests: Sequence[tuple[str, tuple[int, ...]]],
        params: types.SamplingParams,
        on_response: OnResponse,
    ) -> None:
        """Ask for all responses, `parallel` at a time. Raises the first RunError and drops the rest."""
        wanted = deque(
            (index, member, prompts[question_id], seed)
            for index, (question_id, seeds) in enumerate(requests)
            for member, seed in enumerate(seeds)
        )
        total = len(wanted)
        arrived: queue.SimpleQueue[tuple[int, int, Response | errors.RunError | None]] = queue.SimpleQueue()

        def work() -> None:
            with suppress(IndexError):
                while True:
                    index, member, prompt, seed = wanted.popleft()
                    outcome: Response | errors.RunError | None = None
                    try:
                        outcome = self.respond(prompt, seed, params)
                    except errors.RunError as error:
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
                if isinstance(outcome, errors.RunError):
                    raise outcome
                if outcome is None:
                    raise errors.RunError(f"a request to {self.shown} ended in an unforeseen error, shown above.")
                on_response(index, member, outcome)
        finally:
            wanted.clear()

    def respond(self, prompt: Prompt, seed: int, params: types.SamplingParams) -> Response:
        """One response. Raises RunError when the attempts are used up, or the server refuses the request."""
        body: dict[str, Any] = {"model": self.model, "seed": seed, "max_tokens": params.max_new_tokens}
        body |= {"temperature": params.temperature, "top_p": params.top_p}
        if isinstance(prompt, str):
            path, body["prompt"] = "/completions", prompt
        else:
            path, body["messages"] = "/chat/completions", [asdict(message) for message in prompt]
        reply = self._ask(path, body, _Completion)
        choice = reply.choices[0]
        # A thinking model cut off before its answer has no content.
        text = (choice.text if choice.message is None else choice.message.content) or ""
        if self.api_key and len(self.api_key) >= _SECRET:
            text = text.replace(self.api_key, "***")
        return Response(
            # JSON may hold half a surrogate pair, a file may not.
            text=text.encode("utf-8", "replace").decode("utf-8"),
            num_tokens=reply.usage.completion_tokens,
            stop_reason=types.StopReason.LENGTH if choice.finish_reason == "length" else types.StopReason.EOS,
            logprob=None,
        )

    def _ask(self, path: str, body: Mapping[str, Any] | None, kind: type[T]) -> T:
        """The reply, asked for until one can be read; raises RunError at once for a refusal."""
        failure = MayPass("")
        for number in range(1, self.attempts + 1):
            try:
                return self._reply(self.base + path, body, kind)
            except MayPass as error:
                failure = error
            if number < self.attempts:
                wait = min(max(self.backoff_seconds * 2 ** (number - 1), failure.pause), _LONGEST_PAUSE_SECONDS)
                self.note(f"{self.shown}: {failure}; attempt {number + 1} of {self.attempts} in {wait:.0f} s")
                time.sleep(wait)
        remedy = "Finished questions are kept: run the same command again once it answers"
        failed = f"{self.shown} failed {self.attempts} times, last with: {failure}"
        raise errors.RunError(f"{failed}. Is the server up, and --endpoint its address? {remedy}.") from failure

    def _reply(self, url: str, body: Mapping[str, Any] | None, kind: type[T]) -> T:
        """One attempt. Raises RunError for a refusal, MayPass for what may be gone the next time."""
        data = None if body is None else json.dumps(body).encode()
        max_bytes = _BYTES + _BYTES_PER_TOKEN * (body or {}).get("max_tokens", 0)
        status, headers, content = exchange.ask(
            url, data, key=self.api_key, seconds=self.timeout_seconds, max_bytes=max_bytes
        )
        if not 200 <= status < 300:
            said = f"status {status} {self._said(content)}".strip()
            if status not in _PASSING_CLIENT_ERRORS and status < 500:
                raise errors.RunError(f"{exchange.shown_address(url)} refused the request with {said}")
            failure = MayPass(said)
            with suppress(ValueError):
                # A date, the header's other form, is not waited for.
                failure.pause = float(headers.get("Retry-After") or 0)
            raise failure
        try:
            with _PARSING:
                return msgspec.convert(json.loads(content), kind)
        except msgspec.ValidationError as error:
            raise MayPass(f"an unusable answer ({self._said(error)}): {self._said(content)}") from None
        except (ValueError, RecursionError) as error:
            raise MayPass(f"an answer that is not JSON ({self._said(error)})") from None

    def _said(self, words: object) -> str:
        """A server's text, or bytes, or an error that quotes it, as it may be shown."""
        return exchange.said(words.decode("utf-8", "replace") if isinstance(words, bytes) else str(words), self.api_key)


def endpoint_prompt(template: Template, question: types.Question) -> Prompt:
    """Messages for a server's own chat template, or the text of a plain-text template.

    `thought-solution` is its system message; opening `<think>` is up to the server's chat template.
    """
    if template.question_form is not None:
        return render(template, question, None)
    system = () if template.system is None else (types.Message(role="system", content=template.system),)
    return (*system, *messages_for(template, question))


def _prompt_text(prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else json.dumps([asdict(turn) for turn in prompt], ensure_ascii=False)
