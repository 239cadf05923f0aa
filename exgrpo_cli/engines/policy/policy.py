"""The policy being trained: scores and accumulated gradients of any number of rows, counts, schedule and reports.

Rows go through the model micro-batch by micro-batch. Under several ranks each takes its share of them, and the results
are put together again. Two steppers move the weights: AdamW on every rank (`policy.adamw`, the reference) and
DeepSpeed's ZeRO (`policy.deepspeed`).

Axes: tokens = response tokens of a micro-batch, one row after the other.
"""

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Float
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from exgrpo_cli.algo import batching, objective
from exgrpo_cli.base.errors import InputError, RunError, first_line
from exgrpo_cli.base.types import Rollout, TokenScores, TokenSequence
from exgrpo_cli.config.sections.objective import ObjectiveSettings
from exgrpo_cli.config.sections.run import LoraSettings, OptimSettings
from exgrpo_cli.engines.causal_lm import CausalLM, split_causal_lm, to_device, use_attention
from exgrpo_cli.engines.lora import adapt, adapter_off, fingerprint, unmerged_weights
from exgrpo_cli.engines.policy import packing
from exgrpo_cli.engines.policy.attention import PACKED_CAUSAL
from exgrpo_cli.ranks import ALONE, Ranks

STATE_FILE = "policy.json"
_COUNTERS = ("weight_version", "num_updates", "consecutive_skips")


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
    scores: Sequence[tuple[Rollout, TokenScores]] = ()
    """Rollouts by these weights whose rows have a gradient, each with its scores; none where not asked for."""


class Stepper(Protocol):
    """Holds weights and optimizer state, and steps them by the gradient that micro-batches have accumulated."""

    is_sharded: bool
    """Whether no rank holds the whole model."""
    lockstep: bool
    """Whether a pass is a collective, as under ZeRO-3: every rank then runs as many as the busiest, the added ones with
    gradient zero."""
    layout: dict[str, int]
    """Conditions under which a checkpoint fits: numbers by name, stored in `policy.json`."""

    def forward(self, batch: packing.PackedBatch) -> packing.Scored:
        """Log-probs and entropies of a micro-batch's response tokens: the one code path of scoring and training."""

    def backward(self, loss: Float[Tensor, ""]) -> None:
        """Add the gradient of a micro-batch's share of the loss to those of the weights."""

    def begin(self) -> None:
        """Make ready for the gradient of a mini-batch."""

    def step(self, learning_rate: float) -> tuple[float, str]:
        """Clip, check and apply the gradient; its norm before clipping, and why it was skipped, or ""."""

    def offload(self) -> None:
        """Give back the device memory that only updates need."""

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Policy.named_weights`."""

    def save(self, folder: Path) -> None:
        """Write weights and optimizer state; called on every rank."""

    def load(self, folder: Path, saved: dict[str, Any]) -> None:
        """Restore what `save` wrote; `saved` is `policy.json`. Raises RunError or InputError where it does not fit."""


class Policy:
    """The model being trained, stepped by a `Stepper`; made by `torch_policy` or `deepspeed_policy`.

    Under several ranks every rank makes the same calls with the same arguments and gets the same whole result.
    """

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
        lora: LoraSettings = LoraSettings(),
        seed: int = 0,
    ) -> None:
        """With a KL coefficient above 0 the reference is a frozen copy of `model` as given here, or the model with its
        adapter off: build the policy from the initial weights, then `load` a checkpoint. `seed` begins an adapter.
        Raises InputError where the model is unsuitable (`split_causal_lm`, `prove_packing`, `adapt`).
        """
        self._parts = split_causal_lm(model)
        self._way = packing.proved_way(self._parts)
        packing.prove_packing(self._parts, self._way)
        self._reference: CausalLM | None = None
        """The frozen model of the KL penalty."""
        self.base = 0
        """Fingerprint of the frozen weights below an adapter; 0 without one."""
        if lora.rank > 0:
            self.base = fingerprint(model)
            adapt(model, lora, seed)
        self._unmerged = lora.sync == "adapter"
        self._rate_factor = lora.learning_rate_factor if self.base else 1.0
        if objective.kl_coefficient:
            frozen = None if self.base else copy.deepcopy(model).eval().requires_grad_(False)
            self._reference = split_causal_lm(frozen) if frozen else self._parts
        model.eval()
        if gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._stepper = make_stepper(self._parts, temperature, optim, gradient_checkpointing, ranks)
        self._temperature = temperature
        self._objective = objective
        self._optim = optim
        self._ranks = ranks
        self.model = model
        self.is_sharded = self._stepper.is_sharded
        """Whether no rank holds the whole model: its weights can then only be read through `named_weights`."""
        self.weight_version = 0
        """Updates applied: versions of the weights since the run began."""
        self.num_updates = 0
        """Updates tried, applied or skipped: the position in the learning-rate schedule."""
        self.consecutive_skips = 0
        """Updates skipped since the last applied one."""

    @torch.no_grad()
    def score(self, sequences: Sequence[TokenSequence]) -> list[TokenScores]:
        """Log-probs and entropies of the response tokens under the current weights, at the rollout temperature."""
        share = batching.rank_shares(sequences, self._ranks.world_size)[self._ranks.rank]
        own: dict[int, TokenScores] = {}
        for batch in self._passes([sequences[index] for index in share]):
            rows = [sequences[share[index]] for index in batch] or [sequences[0]]
            scores = by_row(rows, *self._stepper.forward(self._pack(rows)))
            own |= {share[index]: score for index, score in zip(batch, scores, strict=False)}
        whole = {index: score for part in self._ranks.gather(own) for index, score in part.items()}
        return [whole[index] for index in range(len(sequences))]

    def update(self, batch: batching.MiniBatch) -> UpdateReport:
        """One optimizer update: gradient accumulated over token-budget micro-batches, clipped, checked, applied.

        The learning rate follows the updates tried, or the budget spent. M2PO's mask takes a pass of its own over the
        replayed rows, so that each token's depends on all of them, whatever micro-batch or rank they go to.
        """
        if self._objective.surrogate == "m2po":
            scores = self.score([row.sequence for row in batch.rows if row.replayed])
            most = self._objective.second_moment
            batch = objective.second_moment_masked(batch, [each.logprobs for each in scores], most)
        self._stepper.begin()
        loss, num_tokens, metrics, found = self._accumulate(batch)
        position: float = self.num_updates
        if batch.progress is not None:
            position = batch.progress * self._optim.horizon * self._optim.minibatches
        learning_rate = self._rate_factor * learning_rate_at(self._optim, position)
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
            scores=found,
        )

    def offload(self) -> None:
        """Give back the device memory that only updates need, until the next one; nothing where none is asked for."""
        self._stepper.offload()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the state dict, tied ones under each of their names, one at a time.

        All ranks read it to its end together; a tensor holds until the next one is asked for.
        """
        return self._stepper.named_weights()

    def sampled_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Weights as a generator takes them: `named_weights`, or with `lora.sync = "adapter"` `unmerged_weights`."""
        return unmerged_weights(self.model) if self._unmerged else self.named_weights()

    def save(self, folder: Path) -> None:
        """Write weights and optimizer state so that `load` restores them bit for bit."""
        self._stepper.save(folder)
        if self._ranks.is_main:
            counters = {name: getattr(self, name) for name in _COUNTERS}
            (folder / STATE_FILE).write_text(json.dumps(self._stepper.layout | counters | {"base": self.base}) + "\n")

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote, in place; raises RunError or InputError where it fits another model."""
        with reading_file(folder / STATE_FILE):
            saved = dict(json.loads((folder / STATE_FILE).read_text()))
            counters = {name: int(saved[name]) for name in _COUNTERS}
        if saved.get("base", 0) != self.base:
            raise RunError(f"{folder} belongs to an adapter of another model: resume with the backbone of the run.")
        self._stepper.load(folder, saved)
        for name, value in counters.items():
            setattr(self, name, value)

    def _accumulate(
        self, batch: batching.MiniBatch
    ) -> tuple[float, int, dict[str, float], list[tuple[Rollout, TokenScores]]]:
        """Add up the gradient of this rank's share of `batch`.

        Returns the loss, the number of response tokens with a gradient, diagnostics, and the scores of rollouts, all
        over all ranks.
        """
        rows = rows_with_gradient(batch, self._objective)
        share = batching.rank_shares([row.sequence for row in rows], self._ranks.world_size)[self._ranks.rank]
        own = [rows[index] for index in share]
        totals = objective.denominators(self._objective, batch)
        loss, sums = torch.zeros((), device=self._parts.device), None
        scores: dict[int, TokenScores] = {}
        # In lockstep with no gradient in any row, one empty pass makes zeros: Adam's momentum still moves the weights.
        for micro in self._passes([row.sequence for row in own], at_least=1):
            if micro:
                part, part_sums, scored = self._loss([own[index] for index in micro], totals, clip=batch.clip)
                if batch.with_scores:
                    found = by_row([own[index].sequence for index in micro], *scored)
                    scores |= {share[index]: each for index, each in zip(micro, found, strict=True)}
                sums = part_sums if sums is None else sums + part_sums
                loss = loss + part.detach()
            else:
                # Beside another rank's pass: every weight takes part, with gradient zero.
                shortest = min((row.sequence for row in batch.rows), key=lambda sequence: len(sequence.response_ids))
                part = self._stepper.forward(self._pack([shortest]))[0].sum() * 0.0
            # Gradient checkpointing runs the layers once more in here, with whatever attention is set.
            with use_attention(self._parts.body, PACKED_CAUSAL):
                self._stepper.backward(part)
        told = self._ranks.gather((float(loss), None if sums is None else sums.on_host(), scores))
        losses, parts, of_rows = zip(*told, strict=True)
        known = [part for part in parts if part is not None]
        metrics = reduce(add, known).metrics() if known else {}
        replayed = [row.importance_weights for row in rows if row.replayed and row.importance_weights is not None]
        if self._objective.surrogate == "m2po" and replayed:
            metrics["policy/clip_fraction_replay"] = float((np.concatenate(replayed) == 0).mean())
        pairs = [(rows[index].rollout, score) for part in of_rows for index, score in sorted(part.items())]
        # One that has carried over may have ended under earlier weights.
        current = [(own, score) for own, score in pairs if own and own.weight_version == self.weight_version]
        return reduce(add, losses), sum(row.num_tokens for row in rows), metrics, current

    def _passes(self, own: Sequence[TokenSequence], at_least: int = 0) -> list[list[int]]:
        """The micro-batches of this rank's rows; in lockstep with empty ones behind, as many on every rank."""
        batches = batching.packed_batches(own, self._optim.microbatch_tokens)
        if not self._stepper.lockstep:
            return batches
        busiest = max([at_least, *self._ranks.gather(len(batches))])
        return batches + [[] for _ in range(busiest - len(batches))]

    def _pack(self, rows: Sequence[TokenSequence]) -> packing.PackedBatch:
        return packing.pack(rows, self._parts.device, way=self._way)

    def _loss(
        self, rows: Sequence[batching.TrainingRow], totals: objective.Denominators, *, clip: bool
    ) -> tuple[Float[Tensor, ""], objective.ObjectiveSums, packing.Scored]:
        """A micro-batch's part of the loss of its mini-batch, and of the diagnostics; and its scores."""
        packed = self._pack([row.sequence for row in rows])
        logprobs, entropies = self._stepper.forward(packed)
        reference = None
        if self._reference is not None:
            with torch.no_grad(), adapter_off(self.model) if self.base else nullcontext():
                reference, _ = packing.packed_scores(self._reference, packed, self._temperature)
        device, dtype = logprobs.device, logprobs.dtype
        replayed = np.repeat([row.replayed for row in rows], [row.num_tokens for row in rows])
        targets = objective.TokenTargets(
            advantages=to_device(np.concatenate([row.token_advantages for row in rows]), device, dtype),
            behaviour_logprobs=to_device(np.concatenate([row.behaviour_logprobs for row in rows]), device, dtype),
            replayed=to_device(replayed, device),
        )
        loss = objective.micro_batch_loss(
            logprobs, entropies, reference, targets, clip=clip, settings=self._objective, denominators=totals
        )
        sums = objective.objective_sums(logprobs, entropies, reference, targets, clip=clip, settings=self._objective)
        return loss, sums, (logprobs.detach(), entropies.detach())


def by_row(rows: Sequence[TokenSequence], *scored: Float[Tensor, " tokens"]) -> list[TokenScores]:
    """Log-probs and entropies of the response tokens of all `rows`, row by row, on the host."""
    # Both in one copy: each copy to the host waits for the device.
    both = torch.stack([each.float() for each in scored]).cpu().numpy()
    parts = np.split(both, np.cumsum([len(row.response_ids) for row in rows])[:-1], axis=1)
    return [TokenScores(logprobs=part[0].copy(), entropies=part[1].copy()) for part in parts]


def rows_with_gradient(batch: batching.MiniBatch, objective: ObjectiveSettings) -> list[batching.TrainingRow]:
    """All rows, or only those of non-zero advantage where no other term of the loss reads the rest."""
    if objective.entropy_coefficient or objective.kl_coefficient:
        return list(batch.rows)
    imitated = objective.surrogate == "likelihood"
    return [row for row in batch.rows if row.advantage != 0 or (row.replayed and imitated)]


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
