"""Protocols of engines: a Generator samples rollouts, a Policy scores and updates.

The plain pair (`hf`, `torch`) is the reference that every other pair is tested against. Under several ranks every rank
makes the same calls with the same arguments and gets the same whole result: an engine shards and gathers inside, so the
loop never sees a rank.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor

from exgrpo_cli.algo.batching import MiniBatch
from exgrpo_cli.base.types import Rollout, RolloutRequest, SamplingParams, TokenScores, TokenSequence

Score = Callable[[Sequence[TokenSequence]], list[TokenScores]]
"""Log-probs and entropies of response tokens under a policy's current weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateReport:
    """Report of one optimizer update."""

    applied: bool
    skip_reason: str
    """Empty when applied; else "non-finite gradient" or "gradient norm above <bound>"."""
    grad_norm: float
    loss: float
    num_tokens: int
    """Response tokens trained on, over all ranks."""
    metrics: dict[str, float]
    """Flat keys of the step's journal: "policy/entropy", "policy/ratio_fresh", ... (absent where meaningless)."""


@runtime_checkable
class Generator(Protocol):
    """Prompts in, rollouts out."""

    @property
    def weight_version(self) -> int:
        """Version of the weights the next rollout will be sampled with."""

    def generate(
        self,
        requests: Sequence[RolloutRequest],
        params: SamplingParams,
        on_finished: Callable[[int, Rollout], None] | None = None,
    ) -> list[list[Rollout]]:
        """Sample len(request.seeds) rollouts for each request, in the order of requests and seeds.

        `on_finished(index_of_request, rollout)` is called as each one ends, so that grading can overlap.
        """

    def sleep(self) -> None:
        """Give back the device memory that only sampling needs, until the next `sync`; nothing where none is held."""

    def sync(self, weights: Iterator[tuple[str, Tensor]], weight_version: int, score: Score | None = None) -> None:
        """Take over new weights and prove that they arrived; raises RunError where they did not.

        `score` is the sender's own `Policy.score`: an engine that computes by kernels of its own compares log-probs
        with it, beside checksums.
        """

    def close(self) -> None:
        """Free what the engine holds; nothing may be asked of it afterwards."""


@runtime_checkable
class Policy(Protocol):
    """The model being trained."""

    @property
    def weight_version(self) -> int:
        """Number of weight changes since the run began."""

    @property
    def consecutive_skips(self) -> int:
        """Updates skipped since the last applied one; part of what `save` writes."""

    @property
    def is_sharded(self) -> bool:
        """Whether no rank holds the whole model: its weights can then only be read through `named_weights`."""

    def score(self, sequences: Sequence[TokenSequence]) -> list[TokenScores]:
        """Log-probs and entropies of the response tokens under the current weights, at the rollout temperature."""

    def update(self, batch: MiniBatch) -> UpdateReport:
        """One optimizer update: gradient accumulated over token-budget micro-batches, clipped, checked, applied."""

    def rest(self) -> None:
        """Give back the device memory that only updates need, until the next one; nothing where none is asked for."""

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the state dict, tied ones under each of their names, one at a time.

        All ranks read it to its end together; a tensor holds until the next one is asked for.
        """

    def save(self, folder: Path) -> None:
        """Write weights and optimizer state so that `load` restores them bit for bit."""

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote, in place; raises RunError or InputError where it fits another model."""
