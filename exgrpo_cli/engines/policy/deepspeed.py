"""The sharded stepper: optimizer state, gradients and (stage 3) weights split over the ranks by DeepSpeed's ZeRO.

Body and tiled head are one module, whose forward pass gives log-probs and entropies. Under stage 3 DeepSpeed gathers a
module's weights around its own forward and backward pass; the head's weight, which the tiles read outside the head, is
made known to it as an external parameter of the tiled head.

Every rank runs as many forward and backward passes as the busiest one, empty ones at the end, because each of them is a
collective. DeepSpeed averages gradients over ranks, so a rank's loss is multiplied by their number.

The gradient is bounded and clipped where DeepSpeed steps AdamW: it knows no bound of its own beyond which a step is
skipped, and a finite norm above it would have to be reported as invalid through names that are not public.

Axes: packed = inputs of a micro-batch, tokens = response tokens of a micro-batch.
"""

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from exgrpo_cli.algo.logprobs import token_logprobs
from exgrpo_cli.base import errors, versions
from exgrpo_cli.config.sections.run import BUCKET_ELEMENTS, OptimSettings
from exgrpo_cli.engines import causal_lm, lora
from exgrpo_cli.engines.policy import adamw, packing, policy
from exgrpo_cli.ranks import Ranks

TAG = "state"
SHARED_MEMORY_EXTENSION = "deepspeed_shm_comm"


def require_deepspeed(device: torch.device) -> Any:
    """The deepspeed module, told which device it is for; raises InputError naming the extra where it is missing."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    try:
        with without_prints():
            import deepspeed
    except ImportError as error:
        raise errors.InputError(
            f"optim.engine = 'deepspeed' needs DeepSpeed ({error}): {versions.install_command('deepspeed')}, or use "
            "--engine torch."
        ) from error
    deepspeed.utils.logger.setLevel(logging.ERROR)
    # Never build shared memory beside gloo: minutes of compiling, and a build cut short blocks others.
    getattr(deepspeed.ops, "__compatible_ops__", {})[SHARED_MEMORY_EXTENSION] = False
    return deepspeed


def deepspeed_policy(model: PreTrainedModel, **settings: Any) -> policy.Policy:
    """The policy of `model`, sharded; under stage 3 its weights are empty afterwards outside a forward pass.

    bfloat16 models keep float32 master weights in the shards; float32 ones are trained as they are. With a KL
    coefficient above 0 every rank holds a whole frozen copy. Settings as of `Policy`; raises InputError where
    DeepSpeed is missing or the model is unsuitable.
    """
    return policy.Policy(model, ZeroStepper, **settings)


class ZeroStepper:
    """Implements `policy.Stepper`."""

    lockstep = True

    def __init__(
        self, parts: causal_lm.CausalLM, temperature: float, optim: OptimSettings, checkpointing: bool, ranks: Ranks
    ) -> None:
        self.is_sharded = optim.zero_stage == 3
        self.layout = {"num_ranks": ranks.world_size, "zero_stage": optim.zero_stage}
        self._deepspeed = require_deepspeed(parts.device)
        self._model = parts.model
        self._optim = optim
        self._checkpointing = checkpointing
        self._ranks = ranks
        self._is_whole = all(weight.requires_grad for weight in parts.model.parameters())
        os.environ.setdefault("LOCAL_RANK", "0")
        if not dist.is_initialized():
            # DeepSpeed wants a process group also where there is one process.
            backend = "nccl" if parts.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        scorer = _Scorer(parts, temperature)
        self._trained = [weight for weight in parts.model.parameters() if weight.requires_grad]
        self._adamw = adamw.build_adamw(self._trained, optim)
        self._step_adamw, self._adamw.step = self._adamw.step, self._bounded_step  # type: ignore[assignment]
        with without_prints():
            self.engine, *_ = self._deepspeed.initialize(
                model=scorer, optimizer=self._adamw, config=_deepspeed_config(parts, optim), dist_init_required=False
            )
        if self.is_sharded:
            self._deepspeed.zero.register_external_parameter(scorer.head, parts.head.weight)
        self.forward = self.engine
        self.engine.eval()

    def backward(self, loss: Float[Tensor, ""]) -> None:
        """See `policy.Stepper`; DeepSpeed averages over ranks what they share."""
        self.engine.backward(loss * self._ranks.world_size, scale_wrt_gas=False)

    def begin(self) -> None:
        """See `policy.Stepper`."""
        self.engine.train(self._checkpointing)

    def step(self, learning_rate: float) -> tuple[float, str]:
        """See `policy.Stepper`."""
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate
        # Stage 3 reduces in the backward pass and steps group by group; the others reduce, then step all at once.
        local = self._deepspeed.utils.safe_get_local_grad
        self._norm = self._norm_of(map(local, self._trained)) if self.is_sharded else float("inf")
        self.engine.step()
        self.engine.eval()
        # A step that DeepSpeed skipped for a reason of its own must not pass for an applied one.
        unasked = "" if self.engine.was_step_applied() else "skipped by DeepSpeed"
        return self._norm, adamw.skip_reason(self._norm, self._optim) or unasked

    def _norm_of(self, shards: Iterable[Tensor]) -> float:
        """Norm of the gradient of which every rank holds `shards`."""
        square = torch.stack([shard.norm().to(self.engine.device) for shard in shards]).double().square().sum()
        self._ranks.sum([square])
        return float(square.sqrt())

    def _bounded_step(self, closure: Any = None) -> None:
        """AdamW's step on what this rank holds, clipped; none where the norm is beyond its bound."""
        held = [weight for group in self._adamw.param_groups for weight in group["params"]]
        if not self.is_sharded:
            self._norm = self._norm_of(weight.grad for weight in held)
        if not adamw.skip_reason(self._norm, self._optim):
            torch.nn.utils.clip_grads_with_norm_(held, self._optim.grad_clip, torch.tensor(self._norm))
            self._step_adamw()

    def offload(self) -> None:
        """Nothing: DeepSpeed keeps its state where `optim.offload` says."""

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Policy.named_weights`; under stage 3 all ranks must iterate, each weight being gathered."""
        if not self.is_sharded:
            yield from lora.merged_weights(self._model)
            return
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        for name, buffer in self._model.state_dict().items():
            held = parameters.get(name)
            with self._deepspeed.zero.GatheredParameters([] if held is None else [held]):
                yield name, buffer if held is None else held.data

    def save(self, folder: Path) -> None:
        """Every rank writes its shards, so all hosts must see `folder`; frozen weights are left out."""
        with without_prints():
            self.engine.save_checkpoint(str(folder), tag=TAG, exclude_frozen_parameters=True)

    def load(self, folder: Path, saved: dict[str, Any]) -> None:
        """Raises InputError when the shards were written by another number of ranks or at another stage."""
        for key, what in (("num_ranks", "ranks"), ("zero_stage", "as ZeRO stage")):
            if saved[key] != self.layout[key]:
                raise errors.InputError(
                    f"{folder} was written with {saved[key]} {what}, this run has {self.layout[key]}: ZeRO shards fit "
                    "the same number alone. Resume as it was started, or start a new run with --backbone "
                    f"{folder.parent / 'model'} and --replay-from this one."
                )
        with without_prints():
            self.engine.load_checkpoint(str(folder), tag=TAG, load_module_strict=self._is_whole)


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

    def __init__(self, parts: causal_lm.CausalLM, temperature: float) -> None:
        super().__init__()
        self.model = parts.model
        self.head = _TiledHead(parts.head, temperature)
        self._parts = (parts,)

    def forward(self, batch: packing.PackedBatch) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
        return self.head(packing.response_hidden(self._parts[0].body, batch), batch.targets)


def without_prints() -> redirect_stdout[StringIO]:
    """Standard output is data; DeepSpeed prints there which compilers it misses, and what it does for stage 1 of a
    bfloat16 model."""
    return redirect_stdout(StringIO())


def _deepspeed_config(parts: causal_lm.CausalLM, optim: OptimSettings) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": optim.zero_stage, "overlap_comm": False, "reduce_bucket_size": BUCKET_ELEMENTS}
    if optim.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": parts.device.type == "cuda"}
    return {
        # Rows are counted by us: the objective's denominators, not DeepSpeed's batch size, scale the loss.
        "train_micro_batch_size_per_gpu": 1,
        "managed_gradient_accumulation": False,
        # By us: its own default clips to 1.
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # An invalid norm must skip the step in bfloat16 as well.
        "bf16": {"enabled": parts.head.weight.dtype == torch.bfloat16, "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        # In bfloat16 a sum over ranks would lose what is below 2^-9 of it.
        "communication_data_type": "fp32",
        "steps_per_print": 2**31,
    }
