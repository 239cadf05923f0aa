"""The sharded policy: optimizer state, gradients and (stage 3) weights split over the ranks by DeepSpeed's ZeRO.

Body and tiled head are one module, whose forward pass gives log-probs and entropies. Under stage 3 DeepSpeed gathers a
module's weights around its own forward and backward pass; the head's weight, which the tiles read outside the head, is
made known to it as an external parameter of the tiled head.

Every rank runs as many forward and backward passes as the busiest one, empty ones at the end, because each of them is a
collective. DeepSpeed averages gradients over ranks, so a rank's loss is multiplied by their number.

Axes: packed = inputs of a micro-batch, tokens = response tokens of a micro-batch.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from exgrpo_cli.algo.batching import MiniBatch
from exgrpo_cli.algo.logprobs import token_logprobs
from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.types import TokenScores, TokenSequence
from exgrpo_cli.config.sections.objective import ObjectiveSettings
from exgrpo_cli.config.sections.run import OptimSettings
from exgrpo_cli.engines.model.causal_lm import CausalLM, split_causal_lm
from exgrpo_cli.engines.policy.counters import UpdateCounters, read_state
from exgrpo_cli.engines.policy.deepspeed_patches import BoundedNorm, skip_shared_memory_extension, without_prints
from exgrpo_cli.engines.policy.micro_batches import MicroBatches, frozen_copy
from exgrpo_cli.engines.policy.optimizer import build_adamw
from exgrpo_cli.engines.policy.packing import PackedBatch, prove_packing, response_hidden
from exgrpo_cli.engines.protocols import UpdateReport
from exgrpo_cli.ranks.ranks import ALONE, Ranks

TAG = "state"


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
    skip_shared_memory_extension(deepspeed)
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
        optim: OptimSettings,
        gradient_checkpointing: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:
        """Shard the optimizer of `model`. Raises InputError where DeepSpeed is missing or the model is unsuitable."""
        self.model = model
        self.is_sharded = optim.zero_stage == 3
        self.counters = UpdateCounters(optim)
        parts = split_causal_lm(model)
        prove_packing(parts)
        device = parts.device
        self._deepspeed = require_deepspeed(device)
        self._optim = optim
        self._ranks = ranks
        self._checkpointing = gradient_checkpointing
        reference = frozen_copy(model) if objective.kl_coefficient else None
        if gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._names = list(model.state_dict())
        _connect_alone(device)
        scorer = _Scorer(parts, temperature)
        with without_prints():
            self._engine, *_ = self._deepspeed.initialize(
                model=scorer,
                optimizer=build_adamw([p for p in model.parameters() if p.requires_grad], optim),
                config=_deepspeed_config(parts, optim),
                dist_init_required=False,
            )
        if self.is_sharded:
            self._deepspeed.zero.register_external_parameter(scorer.head, parts.head.weight)
        self._norm = BoundedNorm(self._engine.optimizer, optim.skip_norm)
        self._micro_batches = MicroBatches(
            parts=parts,
            reference=reference,
            objective=objective,
            temperature=temperature,
            token_budget=optim.microbatch_tokens,
            forward=self._engine,
            backward=lambda loss: self._engine.backward(loss * ranks.world_size, scale_wrt_gas=False),
            device=device,
            ranks=ranks,
            lockstep=True,
        )
        self._engine.eval()

    @property
    def weight_version(self) -> int:
        """See `protocols.Policy`: updates applied so far."""
        return self.counters.weight_version

    @property
    def consecutive_skips(self) -> int:
        """Updates skipped since the last applied one."""
        return self.counters.consecutive_skips

    def score(self, sequences: Sequence[TokenSequence]) -> list[TokenScores]:
        """See `protocols.Policy.score`."""
        return self._micro_batches.score(sequences)

    def update(self, batch: MiniBatch) -> UpdateReport:
        """See `protocols.Policy.update`."""
        self.counters.progress = batch.progress
        self._engine.train(self._checkpointing)
        accumulated = self._micro_batches.accumulate(batch)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = self.counters.learning_rate
        self._engine.step()
        self._engine.eval()
        grad_norm = self._norm.latest
        skipped = self.counters.skip_reason(grad_norm)
        # DeepSpeed's word decides: a step it skipped for a reason of its own must not pass for an applied one.
        if not self._engine.was_step_applied():
            skipped = skipped or "skipped by DeepSpeed"
        return self.counters.count(accumulated, grad_norm=grad_norm, skipped=skipped)

    def rest(self) -> None:
        """Nothing: DeepSpeed keeps its state where `optim.offload` says."""

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `protocols.Policy.named_weights`; under stage 3 all ranks must iterate, each weight being gathered."""
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
        with without_prints():
            self._engine.save_checkpoint(str(folder), tag=TAG)
        if self._ranks.is_main:
            self.counters.save(folder, **self._sharding)

    def load(self, folder: Path) -> None:
        """Raises InputError when the shards were written by another number of ranks or at another stage."""
        saved, here = read_state(folder), self._sharding
        for key, what in (("num_ranks", "ranks"), ("zero_stage", "as ZeRO stage")):
            if saved[key] != here[key]:
                raise InputError(
                    f"{folder} was written with {saved[key]} {what}, this run has {here[key]}: ZeRO shards fit the "
                    "same number alone. Resume as it was started, or start a new run with --backbone "
                    f"{folder.parent / 'model'} and --replay-from this one."
                )
        with without_prints():
            self._engine.load_checkpoint(str(folder), tag=TAG)
        self.counters.load(folder)

    @property
    def _sharding(self) -> dict[str, int]:
        return {"num_ranks": self._ranks.world_size, "zero_stage": self._optim.zero_stage}


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


def _deepspeed_config(parts: CausalLM, optim: OptimSettings) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": optim.zero_stage, "overlap_comm": False}
    if optim.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": parts.device.type == "cuda"}
    return {
        # Rows are counted by us: the objective's denominators, not DeepSpeed's batch size, scale the loss.
        "train_micro_batch_size_per_gpu": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": optim.grad_clip,
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
