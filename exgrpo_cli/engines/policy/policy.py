"""The policy being trained: scores, counts, schedules and reports, whoever steps the weights.

Two steppers ship: AdamW on every rank (`policy.adamw`, the reference) and DeepSpeed's ZeRO (`policy.deepspeed`).
"""

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

from jaxtyping import Float
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from exgrpo_cli.algo.batching import MiniBatch
from exgrpo_cli.base.errors import InputError, first_line
from exgrpo_cli.base.types import TokenScores, TokenSequence
from exgrpo_cli.config.sections.objective import ObjectiveSettings
from exgrpo_cli.config.sections.run import OptimSettings
from exgrpo_cli.engines.causal_lm import CausalLM, split_causal_lm
from exgrpo_cli.engines.policy.micro_batches import MicroBatches
from exgrpo_cli.engines.policy.packing import PackedBatch, prove_packing
from exgrpo_cli.engines.protocols import UpdateReport
from exgrpo_cli.ranks import ALONE, Ranks

STATE_FILE = "policy.json"
_COUNTERS = ("weight_version", "num_updates", "consecutive_skips")


class Stepper(Protocol):
    """Holds weights and optimizer state, and steps them by the gradient that micro-batches have accumulated."""

    is_sharded: bool
    """Whether no rank holds the whole model."""
    lockstep: bool
    """Whether a forward pass is a collective."""
    layout: dict[str, int]
    """Conditions under which a checkpoint fits: numbers by name, stored in `policy.json`."""

    def forward(self, batch: PackedBatch) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
        """Log-probs and entropies of a micro-batch's response tokens: the one code path of scoring and training."""

    def backward(self, loss: Float[Tensor, ""]) -> None:
        """Add the gradient of a micro-batch's share of the loss to those of the weights."""

    def begin(self) -> None:
        """Make ready for the gradient of a mini-batch."""

    def step(self, learning_rate: float) -> tuple[float, str]:
        """Clip, check and apply the gradient; its norm before clipping, and why it was skipped, or ""."""

    def rest(self) -> None:
        """Give back the device memory that only updates need."""

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `protocols.Policy.named_weights`."""

    def save(self, folder: Path) -> None:
        """Write weights and optimizer state; called on every rank."""

    def load(self, folder: Path, saved: dict[str, Any]) -> None:
        """Restore what `save` wrote; `saved` is `policy.json`. Raises RunError or InputError where it does not fit."""


class SteppedPolicy:
    """Implements `protocols.Policy` by a `Stepper`; made by `torch_policy` or `deepspeed_policy`."""

    def __init__(
        self,
        model: PreTrainedModel,
        make_stepper: Callable[[CausalLM, float, OptimSettings, bool, Ranks], Stepper],
        *,
        temperature: float,
        objective: ObjectiveSettings,
        optim: OptimSettings,
        gradient_checkpointing: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:
        """With a KL coefficient above 0 the reference is a frozen copy of `model` as given here: build the policy from
        the initial weights, then `load` a checkpoint. Raises InputError where the model is unsuitable
        (`split_causal_lm`, `prove_packing`).
        """
        parts = split_causal_lm(model)
        prove_packing(parts)
        reference = None
        if objective.kl_coefficient:
            reference = split_causal_lm(copy.deepcopy(model).eval().requires_grad_(False))
        model.eval()
        if gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._stepper = stepper = make_stepper(parts, temperature, optim, gradient_checkpointing, ranks)
        self._rows = MicroBatches(
            parts=parts,
            reference=reference,
            objective=objective,
            temperature=temperature,
            token_budget=optim.microbatch_tokens,
            forward=stepper.forward,
            backward=stepper.backward,
            ranks=ranks,
            lockstep=stepper.lockstep,
        )
        self._optim = optim
        self._ranks = ranks
        self.model = model
        self.is_sharded = stepper.is_sharded
        self.weight_version = 0
        """Updates applied: versions of the weights since the run began."""
        self.num_updates = 0
        """Updates tried, applied or skipped: the position in the learning-rate schedule."""
        self.consecutive_skips = 0

    def score(self, sequences: Sequence[TokenSequence]) -> list[TokenScores]:
        """See `protocols.Policy.score`."""
        return self._rows.score(sequences)

    def update(self, batch: MiniBatch) -> UpdateReport:
        """See `protocols.Policy.update`; the learning rate follows the updates tried, or the budget spent."""
        self._stepper.begin()
        loss, num_tokens, metrics = self._rows.accumulate(batch)
        position: float = self.num_updates
        if batch.progress is not None:
            position = batch.progress * self._optim.horizon * self._optim.minibatches
        learning_rate = learning_rate_at(self._optim, position)
        grad_norm, skipped = self._stepper.step(learning_rate)
        self.num_updates += 1
        self.weight_version += not skipped
        self.consecutive_skips = self.consecutive_skips + 1 if skipped else 0
        return UpdateReport(
            applied=not skipped,
            skip_reason=skipped,
            grad_norm=grad_norm,
            loss=loss,
            num_tokens=num_tokens,
            metrics={"optim/learning_rate": learning_rate, **metrics},
        )

    def rest(self) -> None:
        """See `protocols.Policy.rest`."""
        self._stepper.rest()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `protocols.Policy.named_weights`."""
        return self._stepper.named_weights()

    def save(self, folder: Path) -> None:
        """See `protocols.Policy.save`."""
        self._stepper.save(folder)
        if self._ranks.is_main:
            counters = {name: getattr(self, name) for name in _COUNTERS}
            (folder / STATE_FILE).write_text(json.dumps(self._stepper.layout | counters) + "\n")

    def load(self, folder: Path) -> None:
        """See `protocols.Policy.load`."""
        with reading_file(folder / STATE_FILE):
            saved = dict(json.loads((folder / STATE_FILE).read_text()))
            counters = {name: int(saved[name]) for name in _COUNTERS}
        self._stepper.load(folder, saved)
        for name, value in counters.items():
            setattr(self, name, value)


def learning_rate_at(settings: OptimSettings, update: float) -> float:
    """Learning rate of update number `update`, counted from 0 over applied and skipped updates alike.

    A linear rise over the warm-up, the first update at 1 / (its updates) of the peak; then flat, or a linear fall to
    `final_fraction` of the peak at the horizon, and flat from there. `settings.horizon` must be set where it falls.
    """
    warmup = settings.warmup_steps * settings.minibatches
    if update < warmup:
        return settings.learning_rate * (update + 1) / warmup
    if settings.schedule == "constant":
        return settings.learning_rate
    span = settings.horizon * settings.minibatches - warmup
    progress = min(1.0, (update - warmup) / span)
    return settings.learning_rate * (1 - (1 - settings.final_fraction) * progress)


@contextmanager
def reading_file(path: Path) -> Iterator[None]:
    """Raises InputError naming the file where it is missing, cut short or damaged."""
    damage = OSError, SafetensorError, RuntimeError, UnpicklingError, EOFError, ValueError, KeyError, TypeError
    try:
        yield
    except damage as error:
        # What torch advises for such a file would run whatever code is in it.
        reason = "more than tensors is in it" if isinstance(error, UnpicklingError) else first_line(error)
        raise InputError(
            f"{path} cannot be read ({reason}): restore it from a copy, or remove this checkpoint to resume "
            "from the one before."
        ) from error
