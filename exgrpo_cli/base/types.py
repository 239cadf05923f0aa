"""The data that flows between packages: questions, rollouts, groups and trajectories.

Everything here is frozen, so that what was sampled is what is graded, stored and trained on. Token arrays hold one
response without its prompt and without padding. Log-probs are always of softmax(logits / T), T the rollout temperature.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np
from jaxtyping import Float32, Int32


class StopReason(StrEnum):
    """Why a rollout ended."""

    EOS = "eos"
    LENGTH = "length"
    UNFINISHED = "unfinished"
    """It has not: a later step goes on with it (`rollout.carry_over`)."""


class Verdict(StrEnum):
    """Verdict of the verifier on one answer. Only CORRECT earns reward 1."""

    CORRECT = "correct"
    WRONG = "wrong"
    NO_ANSWER = "no answer"
    UNPARSABLE_GOLD = "unparsable gold"
    TIMEOUT = "timeout"
    CRASHED = "crashed"

    @property
    def reward(self) -> float:
        """1 for a correct answer, else 0."""
        return 1.0 if self is Verdict.CORRECT else 0.0

    @property
    def is_verifier_failure(self) -> bool:
        """Whether the verifier, not the answer, failed: such a verdict neither retires a question nor moves it."""
        return self in (Verdict.TIMEOUT, Verdict.CRASHED)


@dataclass(frozen=True, slots=True)
class Score:
    """Outcome of a grader of the user's own that says more than a bool, a number or a verdict."""

    reward: float
    """In [0, 1]; what training raises."""
    correct: bool | None = None
    """Whether it counts as a success; None leaves that to `grading.success_at`."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Finite numbers by name, to be looked at: metrics, a column of the ledger, lines of the report."""


@dataclass(frozen=True, slots=True)
class Grade:
    """Outcome of grading one answer."""

    verdict: Verdict
    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    """As the graders name them; most have none."""

    @classmethod
    def of(cls, verdict: Verdict) -> "Grade":
        """The grade of an answer that is right or wrong, with nothing in between."""
        return cls(verdict, verdict.reward)


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One turn of a prompt."""

    role: str
    """"system", "user" or "assistant"."""
    content: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One prompt and its gold answer."""

    id: str
    """Hash of the normalised last user message and the answer; unique in a question file."""
    prompt: tuple[Message, ...]
    """Messages of the source, without the answer; templates are applied when training or evaluating."""
    answer: str
    """Gold."""
    source: str
    """Data set it came from."""
    level: str | None = None
    """Difficulty, where known."""
    metadata: str | None = None
    """A JSON table for the question's own verifier or the check of its traces; most questions need none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerFormat:
    """Rules for finding the answer in a response; given by the prompt template and the run's settings."""

    opens_think: bool
    """The prompt ends with an opened `<think>`: a response without `</think>` has no answer, and only the text after
    the first `</think>`, up to the next one or the end, is graded."""
    requires_box: bool
    """The template asks for `\\boxed{}`: a response without one has no answer."""
    require_eos: bool
    """A response cut off at the length limit has no answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Parameters of sampling."""

    temperature: float
    top_p: float
    max_new_tokens: int
    """Response limit in tokens, EOS included."""
    entropies: bool = False
    """Whether rollouts bring the entropies of their tokens' distributions, which the hf engine alone can tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutRequest:
    """One prompt and the seeds of the rollouts wanted for it (K for a fresh question, K-1 for an experiential one)."""

    question_id: str
    prompt_ids: Int32[np.ndarray, " prompt_tokens"]
    seeds: tuple[int, ...]
    """One non-negative 63-bit seed per rollout: rollout i depends on the weights, the prompt and seeds[i] alone."""
    expected_tokens: float = 1.0
    """Length of a rollout as far as it can be told; it changes on which rank one is sampled, nothing else."""
    drawn: int = 0
    """Last tokens of the prompt that are the response's own: they count towards its limit, a rollout brings the rest,
    and its random numbers go on behind theirs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """One response sampled from the policy."""

    question_id: str
    member: int
    """Index into the request's seeds."""
    token_ids: Int32[np.ndarray, " tokens"]
    """Response tokens, the EOS included when one was produced; no EOS is ever appended."""
    engine_logprobs: Float32[np.ndarray, " tokens"]
    """Log-probs of the tokens as the rollout engine computed them."""
    stop_reason: StopReason
    weight_version: int
    """Weight version of the generator that sampled it."""
    engine_entropies: Float32[np.ndarray, " tokens"] | None = None
    """In nats; None where they were not asked for."""
    earlier: tuple[tuple[int, int], ...] = ()
    """(weight version, tokens) of those that were sampled before the ones of `weight_version`, in order."""

    @property
    def is_unfinished(self) -> bool:
        """Whether a later step goes on with it."""
        return self.stop_reason is StopReason.UNFINISHED

    @property
    def num_earlier(self) -> int:
        """Tokens that were sampled before those of `weight_version`."""
        return sum(tokens for _, tokens in self.earlier)

    def then(self, more: "Rollout") -> "Rollout":
        """The rollout with the tokens that `more` goes on with, whose end is its own."""
        if not len(more.token_ids):
            return self
        entropies, others = self.engine_entropies, more.engine_entropies
        own = len(self.token_ids) - self.num_earlier
        return replace(
            more,
            member=self.member,
            token_ids=np.concatenate([self.token_ids, more.token_ids]),
            engine_logprobs=np.concatenate([self.engine_logprobs, more.engine_logprobs]),
            engine_entropies=None if entropies is None or others is None else np.concatenate([entropies, others]),
            earlier=(*self.earlier, (self.weight_version, own)) if own else self.earlier,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GradedRollout:
    """A rollout with its text and its grade."""

    rollout: Rollout
    text: str
    """Decoded response, without the EOS."""
    grade: Grade

    @property
    def verdict(self) -> Verdict:
        """Verdict of its grade."""
        return self.grade.verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """A rollout kept in the experience buffer: exactly the tokens and log-probs it was born with."""

    trajectory_id: int
    question_id: str
    token_ids: Int32[np.ndarray, " tokens"]
    behaviour_logprobs: Float32[np.ndarray, " tokens"]
    """Log-probs under the policy that sampled it: the very array that served as pi_old when it was fresh."""
    step_born: int
    weight_version: int
    reward: float = 1.0
    correct: bool = True
    advantage: float = math.nan
    """Advantage of birth, as its step trained on it; NaN where it was not recorded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSequence:
    """A prompt with one response: the unit that policies score and train on."""

    prompt_ids: Int32[np.ndarray, " prompt_tokens"]
    response_ids: Int32[np.ndarray, " tokens"]


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Per response token: log-prob of the token and entropy of the full-vocabulary distribution, both at T."""

    logprobs: Float32[np.ndarray, " tokens"]
    entropies: Float32[np.ndarray, " tokens"]

    def then(self, whole: "TokenScores") -> "TokenScores":
        """The scores, and behind them those that the `whole` response has of the other tokens."""
        pairs = (self.logprobs, whole.logprobs), (self.entropies, whole.entropies)
        return TokenScores(*(np.concatenate([own, every[len(own) :]]) for own, every in pairs))

    @property
    def mean_entropy(self) -> float:
        """Mean over valid tokens, in nats, accumulated in float64: H(o; pi) of the paper's trajectory selection."""
        return float(self.entropies.mean(dtype=np.float64))

    @property
    def mean_nll(self) -> float:
        """Mean negative log-likelihood over valid tokens, in nats, accumulated in float64."""
        return float(-self.logprobs.mean(dtype=np.float64))


def rollout_seed(seed: int, question_id: str, visit: int, member: int) -> int:
    """A 63-bit seed for one rollout: member `member` of the group sampled at visit `visit` of a question.

    A hash of the four values, so a rollout keeps its seed when other questions are added, dropped or finished first.
    """
    key = f"{seed}\x1f{question_id}\x1f{visit}\x1f{member}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8, person=b"exgrpo-rollout").digest(), "big") >> 1
