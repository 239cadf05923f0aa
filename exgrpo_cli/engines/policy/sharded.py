"""The sharded policy: optimizer state, gradients and (stage 3) weights split over the ranks by DeepSpeed's ZeRO.

Body and tiled head are one module, whose forward pass gives log-probs and entropies. Under stage 3 DeepSpeed gathers a
module's weights around its own forward and backward pass; the head's weight, which the tiles read outside the head, is
made known to it as an external parameter of the tiled head.

Every rank runs as many forward and backward passes as the busiest one, empty ones at the end, because each of them is a
collective. DeepSpeed averages gradients over ranks, so a rank's loss is multiplied by their number.

Axes: packed = inputs of a micro-batch, tokens = response tokens of a micro-batch.
"""

import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from exgrpo_cli.algo.batching import MiniBatch, TrainingRow, packed_batches, rank_shares
from exgrpo_cli.algo.diagnostics import ObjectiveSums
from exgrpo_cli.algo.logprobs import token_logprobs
from exgrpo_cli.algo.objective import Denominators
from exgrpo_cli.config.sections.objective import ObjectiveSettings
from exgrpo_cli.engines.model.attention import PACKED_CAUSAL, use_attention
from exgrpo_cli.engines.model.causal_lm import CausalLM, split_causal_lm
from exgrpo_cli.engines.policy.optimizer import OptimizerSettings, build_adamw, learning_rate_at, skip_reason
from exgrpo_cli.engines.policy.packing import PackedBatch, pack, prove_packing, response_hidden
from exgrpo_cli.engines.policy.training_steps import (
    batch_denominators,
    frozen_copy,
    gather_scores,
    gather_sums,
    loss_and_sums,
    rows_with_gradient,
    split_scores,
)
from exgrpo_cli.engines.protocols import UpdateReport
from exgrpo_cli.errors import InputError
from exgrpo_cli.ranks.ranks import ALONE, Ranks
from exgrpo_cli.types import TokenScores, TokenSequence

TAG = "state"
STATE_FILE = "policy.json"


def require_deepspeed(device: torch.device) -> Any:
    """The deepspeed module, told which device it is for; raises InputError naming the extra where it is missing."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    try:
        import deepspeed
    except ImportError as error:
        raise InputError(
            f"optim.engine = 'deepspeed' needs DeepSpeed ({error}): pip install 'exgrpo[deepspeed]', or use "
            "--engine torch."
        ) from error
    deepspeed.utils.logger.setLevel(logging.ERROR)
    # Shared memory beside gloo: minutes of compiling at first use, and a build cut short blocks all later ones.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


class DeepSpeedPolicy:
    """Implements `protocols.Policy`.

    Takes `model` over: under stage 3 its weights are empty afterwards outside a forward pass. bfloat16 models keep
    float32 master weights in the shards; float32 ones are trained as they are. With a KL coefficient above 0 every rank
    holds a whole frozen copy.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        temperature: float,
        objective: ObjectiveSettings,
        optimizer: OptimizerSettings,
        zero_stage: int,
        offload: bool = False,
        micro_batch_tokens: int = 16_384,
        gradient_checkpointing: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:
        """Shard the optimizer of `model`. Raises InputError where DeepSpeed is missing or the model is unsuitable."""
        self.model = model
        self.is_sharded = zero_stage == 3
        self.weight_version = 0
        self.num_updates = 0
        self.consecutive_skips = 0
        self._parts = split_causal_lm(model)
        prove_packing(self._parts)
        self._device = self._parts.device
        self._deepspeed = require_deepspeed(self._device)
        self._temperature = temperature
        self._objective = objective
        self._settings = optimizer
        self._zero_stage = zero_stage
        self._micro_batch_tokens = micro_batch_tokens
        self._ranks = ranks
        self._reference = frozen_copy(model) if objective.kl_coefficient else None
        self._checkpointing = gradient_checkpointing
        if gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._names = list(model.state_dict())
        _connect_alone(self._device)
        scorer = _Scorer(self._parts, temperature)
        with _no_data():
            self._engine, *_ = self._deepspeed.initialize(
                model=scorer,
                optimizer=build_adamw([p for p in model.parameters() if p.requires_grad], optimizer),
                config=_deepspeed_config(zero_stage, offload, self._parts, optimizer),
                dist_init_required=False,
            )
        if zero_stage == 3:
            self._deepspeed.zero.register_external_parameter(scorer.head, self._parts.head.weight)
        self._norm = _BoundedNorm(self._engine.optimizer, optimizer.skip_grad_norm)
        self._engine.eval()

    @torch.no_grad()
    def score(self, sequences: Sequence[TokenSequence]) -> list[TokenScores]:
        shares = rank_shares(sequences, self._ranks.world_size)
        own = [sequences[index] for index in shares[self._ranks.rank]]
        scores: dict[int, TokenScores] = {}
        for batch in self._padded(packed_batches(own, self._micro_batch_tokens)):
            rows = [own[index] for index in batch] or [sequences[0]]
            logprobs, entropies = self._evaluate(rows)
            if batch:
                counts = [len(row.response_ids) for row in rows]
                scores.update(zip(batch, split_scores(logprobs, entropies, counts), strict=True))
        return gather_scores(self._ranks, shares, [scores[index] for index in range(len(own))])

    def update(self, batch: MiniBatch) -> UpdateReport:
        rows = rows_with_gradient(batch, self._objective)
        # With no gradient in any row Adam's momentum still moves the weights: one empty pass makes its zeros.
        shares = rank_shares([row.sequence for row in rows], self._ranks.world_size)
        own = [rows[index] for index in shares[self._ranks.rank]]
        self._engine.train(self._checkpointing)
        loss, sums = self._accumulate(own, batch, batch_denominators(batch, self._objective))
        learning_rate = learning_rate_at(self._settings, self.num_updates)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        self._engine.step()
        self._engine.eval()
        loss, sums = gather_sums(self._ranks, loss, sums)
        return self._report(loss, sums, learning_rate, num_tokens=sum(row.num_tokens for row in rows))

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        if not self.is_sharded:
            yield from self.model.state_dict().items()
            return
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        buffers = dict(self.model.named_buffers())
        for name in self._names:
            if name not in parameters:
                yield name, buffers[name]
                continue
            with self._deepspeed.zero.GatheredParameters([parameters[name]]):
                yield name, parameters[name].data

    def save(self, folder: Path) -> None:
        """Every rank writes its shards, so all hosts must see `folder`."""
        with _no_data():
            self._engine.save_checkpoint(str(folder), tag=TAG)
        if self._ranks.is_main:
            (folder / STATE_FILE).write_text(json.dumps(self._state()) + "\n")

    def load(self, folder: Path) -> None:
        """Raises InputError when the shards were written by another number of ranks or at another stage."""
        saved = json.loads((folder / STATE_FILE).read_text())
        for key, what in (("num_ranks", "ranks"), ("zero_stage", "as ZeRO stage")):
            if saved[key] != self._state()[key]:
                raise InputError(
                    f"{folder} was written with {saved[key]} {what}, this run has {self._state()[key]}: ZeRO shards "
                    "fit the same number alone. Resume as it was started, or start a new run with --backbone "
                    f"{folder.parent / 'model'} and --replay-from this one."
                )
        with _no_data():
            self._engine.load_checkpoint(str(folder), tag=TAG)
        self.weight_version = saved["weight_version"]
        self.num_updates = saved["num_updates"]
        self.consecutive_skips = saved["consecutive_skips"]

    def _state(self) -> dict[str, int]:
        return {
            "num_ranks": self._ranks.world_size,
            "zero_stage": self._zero_stage,
            "weight_version": self.weight_version,
            "num_updates": self.num_updates,
            "consecutive_skips": self.consecutive_skips,
        }

    def _padded(self, batches: list[list[int]], at_least: int = 0) -> list[list[int]]:
        """`batches` with empty ones behind, as many on every rank."""
        busiest = max([at_least, *self._ranks.gather(len(batches))])
        return batches + [[] for _ in range(busiest - len(batches))]

    def _evaluate(self, rows: Sequence[TokenSequence]) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
        return self._engine(pack(rows, self._device))

    def _accumulate(
        self, own: list[TrainingRow], batch: MiniBatch, totals: Denominators
    ) -> tuple[float, ObjectiveSums | None]:
        loss, sums = torch.zeros((), device=self._device), None
        micros = packed_batches([row.sequence for row in own], self._micro_batch_tokens)
        for micro in self._padded(micros, at_least=1):
            rows = [own[index] for index in micro]
            logprobs, entropies = self._evaluate([row.sequence for row in rows] or [_shortest(batch)])
            if rows:
                part, part_sums = self._loss(rows, logprobs, entropies, clip=batch.clip, totals=totals)
                sums = part_sums if sums is None else sums + part_sums
                loss = loss + part.detach()
            else:
                # A pass of another rank: every weight takes part, with gradient zero.
                part = logprobs.sum() * 0.0
            with use_attention(self._parts, PACKED_CAUSAL):
                self._engine.backward(part * self._ranks.world_size, scale_wrt_gas=False)
        return float(loss), sums

    def _loss(
        self,
        rows: list[TrainingRow],
        logprobs: Float[Tensor, " tokens"],
        entropies: Float[Tensor, " tokens"],
        *,
        clip: bool,
        totals: Denominators,
    ) -> tuple[Float[Tensor, ""], ObjectiveSums]:
        reference_logprobs = None
        if self._reference is not None:
            packed = pack([row.sequence for row in rows], self._device)
            with torch.no_grad():
                hidden = response_hidden(self._reference, packed)
                reference_logprobs, _ = token_logprobs(
                    hidden, self._reference.head.weight, packed.targets, temperature=self._temperature
                )
        return loss_and_sums(
            rows, logprobs, entropies, reference_logprobs, clip=clip, objective=self._objective, totals=totals
        )

    def _report(
        self, loss: float, sums: ObjectiveSums | None, learning_rate: float, *, num_tokens: int
    ) -> UpdateReport:
        grad_norm = self._norm.latest
        reason = skip_reason(grad_norm, self._settings)
        # DeepSpeed's word decides: a step it skipped for a reason of its own must not pass for an applied one.
        if not self._engine.was_step_applied():
            reason = reason or "skipped by DeepSpeed"
        self.num_updates += 1
        if reason:
            self.consecutive_skips += 1
        else:
            self.consecutive_skips = 0
            self.weight_version += 1
        return UpdateReport(
            applied=not reason,
            skip_reason=reason,
            grad_norm=grad_norm,
            loss=loss,
            num_tokens=num_tokens,
            metrics={"optim/learning_rate": learning_rate, **(sums.metrics() if sums else {})},
        )


class _TiledHead(nn.Module):
    """Log-probs and entropies from hidden states; reads the weight of a head it does not own."""

    def __init__(self, head: nn.Linear, temperature: float) -> None:
        super().__init__()
        # In a tuple, so that the head is no child of this module as well.
        self._head = (head,)
        self._temperature = temperature

    def forward(
        self, hidden: Float[Tensor, "tokens hidden"], targets: Int[Tensor, " tokens"]
    ) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
        return token_logprobs(hidden, self._head[0].weight, targets, temperature=self._temperature)


class _Scorer(nn.Module):
    """A packed micro-batch to the log-probs and entropies of its response tokens."""

    def __init__(self, parts: CausalLM, temperature: float) -> None:
        super().__init__()
        self.model = parts.model
        self.head = _TiledHead(parts.head, temperature)
        self._parts = (parts,)

    def forward(self, batch: PackedBatch) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
        return self.head(response_hidden(self._parts[0], batch), batch.targets)


class _BoundedNorm:
    """DeepSpeed's gradient norm, remembered, and reported as invalid beyond a bound.

    DeepSpeed skips a step whose norm is invalid, and cleans up behind it; it knows no bound of its own.
    """

    def __init__(self, optimizer: Any, bound: float) -> None:
        self.latest = 0.0
        self._bound = bound
        # Stages 1 and 2 compute the norm over all groups at once, stage 3 group by group. For stage 1 of a bfloat16
        # model an optimizer of its own asks for gradients and takes their norm: that of one number is the number.
        if hasattr(optimizer, "scaled_global_norm"):
            whole = optimizer.scaled_global_norm
            optimizer.scaled_global_norm = lambda *args, **kwargs: self._checked([whole(*args, **kwargs)])[0]
        elif hasattr(optimizer, "_get_norm_groups"):
            groups = optimizer._get_norm_groups
            optimizer._get_norm_groups = lambda: self._checked(groups())
        else:
            gradients = optimizer.get_grads_for_norm
            optimizer.get_grads_for_norm = lambda for_clipping=False: (
                gradients(for_clipping=True) if for_clipping else (self._checked([_norm(gradients()[0])]), {})
            )

    def _checked(self, norms: list[Any]) -> list[Any]:
        stacked = torch.stack([torch.as_tensor(norm, dtype=torch.float32) for norm in norms])
        invalid = bool((~torch.isfinite(stacked) | (stacked < 0)).any())
        self.latest = float("inf") if invalid else float(stacked.norm())
        return [torch.full_like(stacked[0], float("inf"))] if self.latest > self._bound else norms


def _no_data() -> redirect_stdout[StringIO]:
    """Standard output is data; DeepSpeed prints what it does there for stage 1 of a bfloat16 model."""
    return redirect_stdout(StringIO())


def _norm(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack([tensor.norm() for tensor in tensors]).norm()


def _deepspeed_config(zero_stage: int, offload: bool, parts: CausalLM, optimizer: OptimizerSettings) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": zero_stage, "overlap_comm": False}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": parts.device.type == "cuda"}
    return {
        # Rows are counted by us: the objective's denominators, not DeepSpeed's batch size, scale the loss.
        "train_micro_batch_size_per_gpu": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": optimizer.max_grad_norm,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # An invalid norm must skip the step in bfloat16 as well.
        "bf16": {"enabled": parts.head.weight.dtype == torch.bfloat16, "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": 2**31,
    }


def _connect_alone(device: torch.device) -> None:
    """DeepSpeed wants a process group also where there is one process."""
    os.environ.setdefault("LOCAL_RANK", "0")
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _shortest(batch: MiniBatch) -> TokenSequence:
    return min((row.sequence for row in batch.rows), key=lambda sequence: len(sequence.response_ids))
