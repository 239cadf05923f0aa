"""Trying a model: a few responses to one question, as an evaluation would ask it."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.types import Message, Question, SamplingParams
from exgrpo_cli.evaluation.asking.askers import LocalAsker
from exgrpo_cli.evaluation.asking.models import choose_model
from exgrpo_cli.evaluation.asking.responses import Response, ResponseRequest
from exgrpo_cli.evaluation.benchmarks.presets import Benchmark, own_benchmark
from exgrpo_cli.evaluation.runner import sample_seeds


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """What a model answered."""

    model: str
    prompt: str
    """The exact text it saw."""
    responses: tuple[Response, ...]

    def to_json(self) -> dict[str, Any]:
        """Model, prompt and responses as JSON."""
        return {"model": self.model, "prompt": self.prompt, "responses": [asdict(each) for each in self.responses]}


def sample(
    model: str,
    question: str,
    *,
    samples: int,
    temperature: float,
    max_tokens: int | None,
    seed: int,
    engine: str,
    device: str,
    threads: int,
) -> Sampled:
    """Ask `question` of a run, a checkpoint (`RUN@best`), a model folder, a preset or a hub id.

    `max_tokens` None: the response limit that a run was trained with, else 512. Raises InputError for a question
    without text and for what is not there.
    """
    if not question.strip():
        raise InputError("the question is empty: write it in quotes after the model.")
    choice = choose_model(model)
    limit = max_tokens or (choice.config.rollout.max_response_tokens if choice.run is not None else 512)
    asked = Question(
        id="question", prompt=(Message(role="user", content=question),), answer="", source="command line", level=None
    )
    asker = LocalAsker(choice, engine=engine, device=device, threads=threads, deterministic=False)
    try:
        prepared = asker.prepare(_protocol(temperature, limit), [asked], fits_window=True)
        responses: dict[int, Response] = {}

        def keep(request: int, member: int, response: Response) -> None:
            responses[member] = response

        params = SamplingParams(temperature=temperature, top_p=1.0, max_new_tokens=prepared.max_tokens)
        requests = [ResponseRequest(question_id=asked.id, seeds=sample_seeds(seed, asked.id, samples))]
        prepared.source().respond(requests, params, keep)
    finally:
        asker.close()
    ordered = tuple(responses[member] for member in sorted(responses))
    return Sampled(model=choice.name, prompt=prepared.prompt_texts[0], responses=ordered)


def _protocol(temperature: float, max_tokens: int) -> Benchmark:
    own = own_benchmark("question")
    return replace(own, protocol=replace(own.protocol, temperature=temperature, max_tokens=max_tokens))
