"""The reference stepper: AdamW, every rank with all weights and state.

Under several ranks each computes the gradient of its share of the rows, and all step with the same sum. A float32 model
is trained as it is. A bfloat16 weight has 8 bits of mantissa: an update of 1e-6 relative would vanish in it, and so
would the gradient of the hundredth micro-batch; the optimizer therefore steps float32 masters, and each weight's
gradient is moved into its master's as soon as autograd has finished it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from exgrpo_cli.algo.cpu import use_fast_matmuls
from exgrpo_cli.base.errors import InputError, RunError
from exgrpo_cli.config.sections.run import OptimSettings
from exgrpo_cli.engines import causal_lm, lora
from exgrpo_cli.engines.policy import packing, policy
from exgrpo_cli.ranks import Ranks

WEIGHTS_FILE = "weights.safetensors"
OPTIMIZER_FILE = "optimizer.pt"


def torch_policy(model: PreTrainedModel, *, optim: OptimSettings, **settings: Any) -> policy.Policy:
    """The policy of `model`, stepped by AdamW; settings, and what is raised, as of `Policy`.

    Raises InputError for rounded matmuls of a model that is not float32 on a CPU.
    """
    if optim.matmul_dtype == "bfloat16" and (model.device.type, model.dtype) != ("cpu", torch.float32):
        raise InputError(
            f"optim.matmul_dtype = bfloat16 is for float32 weights on a CPU, these are {str(model.dtype)[6:]} on "
            f"{model.device.type}: leave it out, or set backbone.dtype = bfloat16."
        )
    use_fast_matmuls(model, optim.matmul_dtype)
    return policy.Policy(model, AdamWStepper, optim=optim, **settings)


@dataclass(eq=False)
class AdamWStepper:
    """Implements `policy.Stepper`."""

    parts: causal_lm.CausalLM
    temperature: float
    optim: OptimSettings
    checkpointing: bool
    ranks: Ranks
    is_sharded = lockstep = False

    def __post_init__(self) -> None:
        self.layout: dict[str, int] = {}
        self._model = self.parts.model
        trained = {name: weight for name, weight in self._model.named_parameters() if weight.requires_grad}
        self._masters = {name: _master_of(weight) for name, weight in trained.items()}
        """Tensors that the optimizer steps, by the names of the model's parameters, in their order."""
        self._copies = [(trained[name], own) for name, own in self._masters.items() if own is not trained[name]]
        """Parameters with a master beside them."""
        self._optimizer = build_adamw(self._masters.values(), self.optim)
        self._hosts: list[Tensor] = []
        """Room in main memory for what is offloaded, kept: pinning it takes longer than copying."""
        self._num_offloaded = 0

    def forward(self, batch: packing.PackedBatch) -> packing.Scored:
        """See `policy.Stepper`."""
        return packing.packed_scores(self.parts, batch, self.temperature)

    def backward(self, loss: Float[Tensor, ""]) -> None:
        """See `policy.Stepper`."""
        loss.backward()

    def begin(self) -> None:
        """See `policy.Stepper`."""
        self._bring_back()
        self._optimizer.zero_grad(set_to_none=True)
        # transformers checkpoints a layer in training mode only; dropout is 0, so nothing else changes with it.
        self._model.train(self.checkpointing)

    def step(self, learning_rate: float) -> tuple[float, str]:
        """See `policy.Stepper`."""
        self._model.eval()
        tensors = list(self._masters.values())
        for tensor in tensors:
            # A mini-batch of zero advantages alone still moves weights by Adam's momentum, forward pass or not.
            tensor.grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        self.ranks.sum([tensor.grad for tensor in tensors if tensor.grad is not None])
        grad_norm = float(torch.nn.utils.clip_grad_norm_(tensors, self.optim.grad_clip))
        skipped = skip_reason(grad_norm, self.optim)
        if not skipped:
            self._optimizer.param_groups[0]["lr"] = learning_rate
            self._optimizer.step()
            self._publish()
        self._optimizer.zero_grad(set_to_none=True)
        return grad_norm, skipped

    @torch.no_grad()
    def offload(self) -> None:
        """Move optimizer state and masters to main memory, where `optim.offload_during_rollouts` says so.

        Only updates need them; their bits stay the same.
        """
        if not self.optim.offload_during_rollouts:
            return
        for tensor in self._update_state()[self._num_offloaded :]:
            if self._num_offloaded == len(self._hosts):
                room = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
                self._hosts.append(room)
            tensor.data = self._hosts[self._num_offloaded].copy_(tensor.data)
            self._num_offloaded += 1

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Policy.named_weights`."""
        return lora.merged_weights(self._model)

    def save(self, folder: Path) -> None:
        """Write weights and optimizer state into `folder`, which is created; rank 0 writes.

        What is stored of a trainable weight is its master, from which the model's own is rounded again when loaded;
        tied weights are stored once.
        """
        if self.ranks.is_main:
            folder.mkdir(parents=True, exist_ok=True)
            tensors = {name: tensor.detach().contiguous() for name, tensor in self._stored().items()}
            save_file(tensors, folder / WEIGHTS_FILE)
            torch.save(self._optimizer.state_dict(), folder / OPTIMIZER_FILE)

    @torch.no_grad()
    def load(self, folder: Path, saved: dict[str, Any]) -> None:
        """Raises RunError when `folder` was written for another model, InputError naming a file that is damaged."""
        self._bring_back()
        own = self._stored()
        with policy.reading_file(folder / WEIGHTS_FILE):
            stored = load_file(folder / WEIGHTS_FILE)
        theirs, ours = ({name: _kind(tensor) for name, tensor in each.items()} for each in (stored, own))
        differing = sorted(name for name in theirs | ours if theirs.get(name) != ours.get(name))
        if differing:
            there, here = (kinds.get(differing[0], "missing") for kinds in (theirs, ours))
            raise RunError(
                f"{folder / WEIGHTS_FILE} belongs to another model: {differing[0]!r} is {there} there and {here} here, "
                f"and {len(differing) - 1} other weights differ; resume with the backbone and the precision of the run."
            )
        for name, tensor in own.items():
            tensor.copy_(stored[name])
        self._publish()
        with policy.reading_file(folder / OPTIMIZER_FILE):
            self._optimizer.load_state_dict(torch.load(folder / OPTIMIZER_FILE, map_location="cpu", weights_only=True))

    @torch.no_grad()
    def _publish(self) -> None:
        """Round the masters into the model."""
        for parameter, master in self._copies:
            parameter.copy_(master)

    @torch.no_grad()
    def _bring_back(self) -> None:
        """Move what is offloaded to the model's device."""
        for tensor, host in zip(self._update_state()[: self._num_offloaded], self._hosts, strict=False):
            tensor.data = torch.empty_like(host, device=self._model.device).copy_(host, non_blocking=True)
        self._num_offloaded = 0

    def _update_state(self) -> list[Tensor]:
        """Masters of narrower weights, then Adam's moments once the first update has made them: later ones behind."""
        state = self._optimizer.state
        stepped = [master for master in self._masters.values() if master in state]
        moments = [each for master in stepped for each in state[master].values() if torch.is_tensor(each) and each.ndim]
        return [*(master for _, master in self._copies), *moments]

    def _stored(self) -> dict[str, Tensor]:
        """Masters of trainable weights, frozen weights and buffers; tied ones under their first name. Of an adapted
        model the adapter's alone."""
        if lora.adapter_weights(self._model):
            return self._masters
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        buffers = {name: buffer for name, buffer in self._model.state_dict().items() if name not in parameters}
        return {**dict(self._model.named_parameters()), **self._masters, **buffers}


def _master_of(parameter: nn.Parameter) -> Tensor:
    """The parameter itself, or of a narrow one a float32 copy, into which its gradient is moved."""
    if torch.finfo(parameter.dtype).bits >= 32:
        return parameter
    master = parameter.detach().to(torch.float32).clone().requires_grad_()

    def move(parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if master.grad is None:
            master.grad = gradient.to(master.dtype)
        else:
            master.grad.add_(gradient)
        parameter.grad = None

    parameter.register_post_accumulate_grad_hook(move)
    return master


def build_adamw(parameters: Iterable[Tensor], settings: OptimSettings) -> torch.optim.Optimizer:
    """AdamW over float32 (or wider) parameters: fused, which is also the fastest on a CPU; or that of bitsandbytes
    (arXiv 2110.02861), which keeps the moments of tensors of 4,096 elements or more in a byte each."""
    options: dict[str, Any] = {"betas": (settings.beta1, settings.beta2), "eps": settings.epsilon}
    options |= {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
    if settings.moments == "float32":
        return torch.optim.AdamW(parameters, fused=True, **options)
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(parameters, **options)  # type: ignore[no-any-return]


def skip_reason(grad_norm: float, settings: OptimSettings) -> str:
    """Why an update of this gradient norm must not be applied; empty when it may be."""
    if not grad_norm < float("inf"):
        return "non-finite gradient"
    if grad_norm > settings.skip_norm:
        return f"gradient norm above {settings.skip_norm:g}"
    return ""


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
