"""The sharded stepper: optimizer state, gradients and (stage 3) weights split over the ranks by DeepSpeed's ZeRO.

Body and tiled head are one module, whose forward pass gives log-probs and entropies. Under stage 3 DeepSpeed gathers a
module's weights around its own forward and backward pass; the head's weight, which the tiles read outside the head, is
made known to it as an external parameter of the tiled head.

Every rank runs as many forward and backward passes as the busiest one, empty ones at the end, because each of them is a
collective. DeepSpeed averages gradients over ranks, so a rank's loss is multiplied by their number.

Holds for DeepSpeed 0.19: its gradient norm is read and bounded through names that are not public, and one extension is
never built; `tests/engines/test_sharded_policy.py` fails when a name is gone, and training goes on without the bound.

Axes: packed = inputs of a micro-batch, tokens = response tokens of a micro-batch.
"""

import logging
import os
import warnings
from collections.abc import Iterator
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
from exgrpo_cli.base.errors import InputError, ToolkitWarning
from exgrpo_cli.base.versions import install_command
from exgrpo_cli.config.sections.run import BUCKET_ELEMENTS, OptimSettings
from exgrpo_cli.engines.causal_lm import CausalLM
from exgrpo_cli.engines.lora import merged_weights
from exgrpo_cli.engines.policy.adamw import build_adamw, skip_reason
from exgrpo_cli.engines.policy.packing import PackedBatch, response_hidden
from exgrpo_cli.engines.policy.policy import Policy
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
        raise InputError(
            f"optim.engine = 'deepspeed' needs DeepSpeed ({error}): {install_command('deepspeed')}, or use "
            "--engine torch."
        ) from error
    deepspeed.utils.logger.setLevel(logging.ERROR)
    # Never build shared memory beside gloo: minutes of compiling, and a build cut short blocks others.
    getattr(deepspeed.ops, "__compatible_ops__", {})[SHARED_MEMORY_EXTENSION] = False
    return deepspeed


def deepspeed_policy(model: PreTrainedModel, **settings: Any) -> Policy:
    """The policy of `model`, sharded; under stage 3 its weights are empty afterwards outside a forward pass.

    bfloat16 models keep float32 master weights in the shards; float32 ones are trained as they are. With a KL
    coefficient above 0 every rank holds a whole frozen copy. Settings as of `Policy`; raises InputError where
    DeepSpeed is missing or the model is unsuitable.
    """
    return Policy(model, ZeroStepper, **settings)


class ZeroStepper:
    """Implements `policy.Stepper`."""

    lockstep = True

    def __init__(
        self, parts: CausalLM, temperature: float, optim: OptimSettings, checkpointing: bool, ranks: Ranks
    ) -> None:
        self.is_sharded = optim.zero_stage == 3
        self.layout = {"num_ranks": ranks.world_size, "zero_stage": optim.zero_stage}
        self._deepspeed = require_deepspeed(parts.device)
        self._model = parts.model
        self._optim = optim
        self._checkpointing = checkpointing
        self._num_ranks = ranks.world_size
        self._is_whole = all(weight.requires_grad for weight in parts.model.parameters())
        os.environ.setdefault("LOCAL_RANK", "0")
        if not dist.is_initialized():
            # DeepSpeed wants a process group also where there is one process.
            backend = "nccl" if parts.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        scorer = _Scorer(parts, temperature)
        with without_prints():
            self.engine, *_ = self._deepspeed.initialize(
                model=scorer,
                optimizer=build_adamw([p for p in parts.model.parameters() if p.requires_grad], optim),
                config=_deepspeed_config(parts, optim),
                dist_init_required=False,
            )
        if self.is_sharded:
            self._deepspeed.zero.register_external_parameter(scorer.head, parts.head.weight)
        self._norm = BoundedNorm(self.engine.optimizer, optim.skip_norm)
        self.forward = self.engine
        self.engine.eval()

    def backward(self, loss: Float[Tensor, ""]) -> None:
        """See `policy.Stepper`; DeepSpeed averages over ranks what they share."""
        self.engine.backward(loss * self._num_ranks, scale_wrt_gas=False)

    def begin(self) -> None:
        """See `policy.Stepper`."""
        self.engine.train(self._checkpointing)

    def step(self, learning_rate: float) -> tuple[float, str]:
        """See `policy.Stepper`."""
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate
        self.engine.step()
        self.engine.eval()
        norm = self._norm.latest if self._norm.is_watched else float(self.engine.get_global_grad_norm())
        skipped, applied = skip_reason(norm, self._optim), self.engine.was_step_applied()
        # DeepSpeed's word decides: a step it skipped for a reason of its own must not pass for an applied one.
        if not applied:
            skipped = skipped or "skipped by DeepSpeed"
        return norm, "" if applied and not self._norm.is_watched else skipped

    def offload(self) -> None:
        """Nothing: DeepSpeed keeps its state where `optim.offload` says."""

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Policy.named_weights`; under stage 3 all ranks must iterate, each weight being gathered."""
        if not self.is_sharded:
            yield from merged_weights(self._model)
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
                raise InputError(
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

    def __init__(self, parts: CausalLM, temperature: float) -> None:
        super().__init__()
        self.model = parts.model
        self.head = _TiledHead(parts.head, temperature)
        self._parts = (parts,)

    def forward(self, batch: PackedBatch) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
        return self.head(response_hidden(self._parts[0].body, batch), batch.targets)


class BoundedNorm:
    """DeepSpeed's gradient norm, remembered, and reported as invalid beyond a bound.

    DeepSpeed skips a step whose norm is invalid, and cleans up behind it; it knows no bound of its own.
    """

    def __init__(self, optimizer: Any, bound: float) -> None:
        """Watch `optimizer`, one of DeepSpeed's; a norm above `bound` skips its step."""
        self.latest = 0.0
        """Norm of the latest step, before clipping; infinite where it was invalid."""
        self.is_watched = True
        """Whether the optimizer has a method to watch; where it has none, no step is skipped for its norm."""
        self._bound = bound
        # Stages 1 and 2 compute the norm over all groups at once, stage 3 group by group. For stage 1 of a bfloat16
        # model an optimizer of its own asks for gradients and takes their norm: that of one number is the number.
        if hasattr(optimizer, "scaled_global_norm"):
            whole = optimizer.scaled_global_norm
            optimizer.scaled_global_norm = lambda *args, **kwargs: self._checked([whole(*args, **kwargs)])[0]
        elif hasattr(optimizer, "_get_norm_groups"):
            groups = optimizer._get_norm_groups
            optimizer._get_norm_groups = lambda: self._checked(groups())
        elif hasattr(optimizer, "get_grads_for_norm"):
            gradients = optimizer.get_grads_for_norm
            optimizer.get_grads_for_norm = lambda for_clipping=False: (
                gradients(for_clipping=True)
                if for_clipping
                else (self._checked([torch.stack([one.norm() for one in gradients()[0]]).norm()]), {})
            )
        else:
            self.is_watched = False
            lost = "this DeepSpeed has another way to its norm: optim.skip_norm skips no step"
            warnings.warn(f"{lost}; all are clipped to optim.grad_clip.", ToolkitWarning, stacklevel=2)

    def _checked(self, norms: list[Any]) -> list[Any]:
        stacked = torch.stack([torch.as_tensor(norm, dtype=torch.float32) for norm in norms])
        invalid = bool((~torch.isfinite(stacked) | (stacked < 0)).any())
        self.latest = float("inf") if invalid else float(stacked.norm())
        return [torch.full_like(stacked[0], float("inf"))] if self.latest > self._bound else norms


def without_prints() -> redirect_stdout[StringIO]:
    """Standard output is data; DeepSpeed prints there which compilers it misses, and what it does for stage 1 of a
    bfloat16 model."""
    return redirect_stdout(StringIO())


def _deepspeed_config(parts: CausalLM, optim: OptimSettings) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": optim.zero_stage, "overlap_comm": False, "reduce_bucket_size": BUCKET_ELEMENTS}
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
        # In bfloat16 a sum over ranks would lose what is below 2^-9 of it.
        "communication_data_type": "fp32",
        "steps_per_print": 2**31,
    }
