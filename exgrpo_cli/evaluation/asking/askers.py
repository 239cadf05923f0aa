"""Who is asked: a model loaded here behind an engine, or a server. Prompts, answer format and stamp go with it."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, runtime_checkable

import torch

from exgrpo_cli.base.errors import InputError, nearest
from exgrpo_cli.base.types import AnswerFormat, Message, Question
from exgrpo_cli.engines.protocols import Generator
from exgrpo_cli.evaluation.asking.endpoint import Endpoint, EndpointSource, Prompt
from exgrpo_cli.evaluation.asking.local_engines import check_engine, engine_version, open_engine
from exgrpo_cli.evaluation.asking.models import ModelChoice
from exgrpo_cli.evaluation.asking.responses import GeneratorSource, ResponseSource
from exgrpo_cli.evaluation.benchmarks.presets import Benchmark
from exgrpo_cli.evaluation.results.stamp import model_hash
from exgrpo_cli.runs.checksums import require_model


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A benchmark's questions as this model is asked them."""

    prompt_texts: tuple[str, ...]
    """Exact text of each prompt, or its messages as JSON where a server applies the template."""
    template: str
    answer_format: AnswerFormat
    max_tokens: int
    """Response limit in tokens, EOS included: the protocol's, or what the model's window leaves of the preset's."""
    source: Callable[[], ResponseSource]
    """Opens whoever answers: loading a model waits until a question is left to ask."""


@runtime_checkable
class Asker(Protocol):
    """A model, ready to be asked benchmarks one after another."""

    def prepare(self, benchmark: Benchmark, questions: Sequence[Question], *, fits_window: bool) -> Prepared:
        """The benchmark as this model is asked it; `fits_window` lets its window shorten the response limit."""
        ...

    def stamp(self) -> dict[str, dict[str, Any]]:
        """The sections `model` and `engine` of the protocol stamp."""
        ...

    def batch_questions(self, samples: int) -> int:
        """Questions of one fixed batch under `--deterministic`."""
        ...

    def close(self) -> None:
        """Free engines and connections."""


class LocalAsker:
    """A model in this process; loaded when the first answer is wanted."""

    def __init__(
        self,
        choice: ModelChoice,
        *,
        engine: str,
        device: str,
        threads: int,
        deterministic: bool,
        tensor_parallel: int = 1,
    ) -> None:
        from exgrpo_cli.models.load import load_tokenizer, locate

        if device == "cuda" and not torch.cuda.is_available():
            raise InputError("--device cuda, but no GPU is visible: use --device cpu, or check CUDA_VISIBLE_DEVICES.")
        self._device = torch.device(device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
        check_engine(engine, self._device, deterministic=deterministic, tensor_parallel=tensor_parallel)
        # A run's own number of threads adds up in the order of its validation.
        torch.set_num_threads(choice.config.run.threads if choice.run is not None else threads)
        self._choice = choice
        self._engine = engine
        self._tensor_parallel = tensor_parallel
        self._deterministic = deterministic
        config = choice.config
        self._folder = locate(config.backbone, config.tiny)
        require_model(self._folder)
        self._tokenizer = load_tokenizer(config.backbone, config.tiny)
        self._max_tokens = 0
        """Longest prompt and response of all benchmarks prepared so far."""
        self._generator: Generator | None = None
        self._decode: Callable[[Any], str] | None = None

    def prepare(self, benchmark: Benchmark, questions: Sequence[Question], *, fits_window: bool) -> Prepared:
        """See `Asker.prepare`."""
        from exgrpo_cli.questions.prompts import answer_format, choose_template, encode, render

        wanted = benchmark.protocol.template
        name = self._choice.config.data.template if wanted == "auto" else wanted
        template = choose_template(name, self._tokenizer, requires_box=_requires_box(benchmark))
        prompt_ids = {question.id: encode(template, question, self._tokenizer) for question in questions}
        longest = max(questions, key=lambda question: len(prompt_ids[question.id]))
        room = self._room(longest.id, len(prompt_ids[longest.id]), benchmark, fits_window=fits_window)
        self._max_tokens = max(self._max_tokens, len(prompt_ids[longest.id]) + room)

        def source() -> ResponseSource:
            generator, decode = self._load()
            return GeneratorSource(generator=generator, decode=decode, prompt_ids=prompt_ids)

        return Prepared(
            prompt_texts=tuple(render(template, question, self._tokenizer) for question in questions),
            template=template.name,
            answer_format=answer_format(template, require_eos=benchmark.protocol.require_eos),
            max_tokens=room,
            source=source,
        )

    def stamp(self) -> dict[str, dict[str, Any]]:
        """See `Asker.stamp`."""
        engine: dict[str, Any] = {
            "name": self._engine,
            "version": engine_version(self._engine),
            "device": self._device.type,
            "dtype": self._dtype,
            "deterministic": self._deterministic,
        }
        if self._deterministic:
            # The order of additions, and so the last bits, follow the batch and the threads.
            engine |= {"max_rows": self._max_rows, "threads": torch.get_num_threads()}
        if self._tensor_parallel > 1:
            engine["tensor_parallel"] = self._tensor_parallel
        model = {"name": self._choice.name, "path": str(self._folder), "hash": model_hash(self._folder)}
        return {"model": model, "engine": engine}

    def batch_questions(self, samples: int) -> int:
        """See `Asker.batch_questions`."""
        return max(1, self._max_rows // samples)

    def close(self) -> None:
        """See `Asker.close`."""
        if self._generator is not None:
            self._generator.close()
            if self._deterministic:
                torch.use_deterministic_algorithms(False)

    @property
    def _max_rows(self) -> int:
        return self._choice.config.rollout.max_rows

    @property
    def _dtype(self) -> Literal["float32", "bfloat16"]:
        of_run = self._choice.config.backbone.dtype
        if self._choice.run is not None and of_run != "auto":
            return of_run
        return "bfloat16" if self._device.type == "cuda" else "float32"

    def _room(self, question_id: str, prompt_tokens: int, benchmark: Benchmark, *, fits_window: bool) -> int:
        """New tokens that each question may have; the same for all, so that a limit is part of the protocol."""
        config = json.loads((self._folder / "config.json").read_text(encoding="utf-8"))
        window = self._choice.config.backbone.max_position_embeddings or config.get("max_position_embeddings")
        if window is None or prompt_tokens + benchmark.protocol.max_tokens <= window:
            return benchmark.protocol.max_tokens
        room = window - prompt_tokens
        if fits_window and room > 0:
            return room
        advice = f"use --max-tokens {room}" if room > 0 else "use a model with a larger window"
        raise InputError(
            f"{benchmark.name}: question {question_id} has a prompt of {prompt_tokens} tokens, and with "
            f"{benchmark.protocol.max_tokens} new tokens it exceeds the model's window of {window}: {advice}."
        )

    def _load(self) -> tuple[Generator, Callable[[Any], str]]:
        if self._generator is None or self._decode is None:
            if self._deterministic:
                # cuBLAS reads this when it is first used.
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
                torch.use_deterministic_algorithms(True)
            settings = replace(self._choice.config.backbone, dtype=self._dtype)
            self._generator, self._decode = open_engine(
                self._engine,
                self._folder,
                self._device,
                settings,
                self._choice.config.rollout,
                max_tokens=self._max_tokens,
                tensor_parallel=self._tensor_parallel,
            )
        return self._generator, self._decode


class EndpointAsker:
    """A server that speaks the OpenAI protocol."""

    def __init__(self, endpoint: Endpoint) -> None:
        endpoint.check()
        self._endpoint = endpoint

    def prepare(self, benchmark: Benchmark, questions: Sequence[Question], *, fits_window: bool) -> Prepared:
        """Only the server knows its window: it refuses what exceeds it."""
        from exgrpo_cli.questions.prompts import TEMPLATES

        template = "chat" if benchmark.protocol.template == "auto" else benchmark.protocol.template
        prompts = {question.id: endpoint_prompt(template, question) for question in questions}
        requires_box = _requires_box(benchmark)
        answer_format = AnswerFormat(
            # Nobody here opens `<think>`: what the server answers is graded from a `</think>` on where it has one.
            opens_think=False,
            requires_box=TEMPLATES[template].requires_box if requires_box is None else requires_box,
            require_eos=benchmark.protocol.require_eos,
        )
        return Prepared(
            prompt_texts=tuple(_prompt_text(prompts[question.id]) for question in questions),
            template=template,
            answer_format=answer_format,
            max_tokens=benchmark.protocol.max_tokens,
            source=lambda: EndpointSource(endpoint=self._endpoint, prompts=prompts),
        )

    def stamp(self) -> dict[str, dict[str, Any]]:
        """See `Asker.stamp`."""
        return {
            "model": {"name": self._endpoint.model, "path": self._endpoint.url, "hash": "unknown to the client"},
            "engine": {"name": "endpoint", "version": self._endpoint.server_version(), "deterministic": False},
        }

    def batch_questions(self, samples: int) -> int:
        """See `Asker.batch_questions`."""
        raise InputError("--deterministic needs a model loaded here: a server batches as it likes.")

    def close(self) -> None:
        """See `Asker.close`."""


def endpoint_prompt(name: str, question: Question) -> Prompt:
    """What a server is sent: messages for its own chat template, or the text of a plain-text template.

    `thought-solution` is its system message; opening `<think>` is up to the server's chat template. Raises InputError
    for an unknown template.
    """
    from exgrpo_cli.questions.prompts import TEMPLATES, THOUGHT_SOLUTION_SYSTEM

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
    if isinstance(prompt, str):
        return prompt
    return json.dumps([{"role": turn.role, "content": turn.content} for turn in prompt], ensure_ascii=False)


def _requires_box(benchmark: Benchmark) -> bool | None:
    return {"auto": None, "always": True, "never": False}[benchmark.protocol.require_box]
