"""The text side of engines: questions in, responses as text out, one seed per response.

An evaluation needs text, whoever sampled it: a Generator in this process, behind `GeneratorSource`, or a server.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

from exgrpo_cli.base.types import Rollout, RolloutRequest, SamplingParams, StopReason
from exgrpo_cli.engines.protocols import Generator


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """One sampled response as text."""

    text: str
    """Without the EOS."""
    num_tokens: int
    stop_reason: StopReason
    logprob: float | None
    """Sum over its tokens in nats; None where the engine does not tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseRequest:
    """One question and the seeds of the responses wanted for it; the source knows the prompt."""

    question_id: str
    seeds: tuple[int, ...]


OnResponse = Callable[[int, int, Response], None]
"""(index of the request, index of the seed, response), called from the thread that asked."""


@runtime_checkable
class ResponseSource(Protocol):
    """Anything that answers questions in text."""

    def respond(self, requests: Sequence[ResponseRequest], params: SamplingParams, on_response: OnResponse) -> None:
        """Sample one response per seed and hand each over as it ends, in any order."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratorSource:
    """A Generator with the prompts already encoded, as a source of text."""

    generator: Generator
    decode: Callable[[Int32[np.ndarray, " tokens"]], str]
    """Response token ids to text without the EOS."""
    prompt_ids: dict[str, Int32[np.ndarray, " prompt_tokens"]]
    """Encoded prompt by question id."""

    def respond(self, requests: Sequence[ResponseRequest], params: SamplingParams, on_response: OnResponse) -> None:
        """See `ResponseSource.respond`; responses come as the generator ends them."""

        def hand_over(index: int, rollout: Rollout) -> None:
            response = Response(
                text=self.decode(rollout.token_ids),
                num_tokens=len(rollout.token_ids),
                stop_reason=rollout.stop_reason,
                logprob=float(rollout.engine_logprobs.sum(dtype=np.float64)),
            )
            on_response(index, rollout.member, response)

        rollouts = [
            RolloutRequest(question_id=r.question_id, prompt_ids=self.prompt_ids[r.question_id], seeds=r.seeds)
            for r in requests
        ]
        self.generator.generate(rollouts, params, on_finished=hand_over)
