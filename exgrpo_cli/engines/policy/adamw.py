"""The reference stepper: AdamW, every rank with all weights and state.

Under several ranks each computes the gradient of its share of the rows, and all step with the same sum. A float32 model
is trained as it is. A bfloat16 weight has 8 bits of mantissa: an update of 1e-6 relative would vanish in it, and so
would the gradient of the hundredth micro-batch; the optimizer therefore steps float32 masters, and each weight's
gradient is moved into its master's as soon as autograd has finished it.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from exgrpo_cli.algo.cpu import use_fast_matmuls
from exgrpo_cli.base.errors import RunError
from exgrpo_cli.config.sections.objective import ObjectiveSettings
from exgrpo_cli.config.sections.run import OptimSettings
from exgrpo_cli.engines.causal_lm import split_causal_lm
from exgrpo_cli.engines.policy.micro_batches import MicroBatches, frozen_copy
from exgrpo_cli.engines.policy.packing import packed_scores, prove_packing
from exgrpo_cli.engines.policy.policy import SteppedPolicy
from exgrpo_cli.engines.policy.storage import OffloadedTensors, reading_file
from exgrpo_cli.ranks import ALONE, Ranks

WEIGHTS_FILE = "weights.safetensors"
OPTIMIZER_FILE = "optimizer.pt"


def torch_policy(
    model: PreTrainedModel,
    *,
    temperature: float,
    objective: ObjectiveSettings,
    optim: OptimSettings,
    gradient_checkpointing: bool = False,
    ranks: Ranks = ALONE,
) -> SteppedPolicy:
    """The policy of `model`, stepped by AdamW.

    With a KL coefficient above 0 the reference is a frozen copy of `model` as given here: build the policy from the
    initial weights, then `load` a checkpoint. Raises InputError where the model is unsuitable (`split_causal_lm`,
    `prove_packing`).
    """
    use_fast_matmuls(model)
    parts = split_causal_lm(model)
    prove_packing(parts)
    rows = MicroBatches(
        parts=parts,
        reference=frozen_copy(model) if objective.kl_coefficient else None,
        objective=objective,
        temperature=temperature,
        token_budget=optim.microbatch_tokens,
        forward=lambda batch: packed_scores(parts, batch, temperature),
        backward=torch.Tensor.backward,
        ranks=ranks,
        lockstep=False,
    )
    model.eval()
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return SteppedPolicy(model, AdamWStepper(model, optim, gradient_checkpointing, ranks), rows, optim, ranks)


class AdamWStepper:
    """Implements `policy.Stepper`."""

    is_sharded = False

    def __init__(self, model: PreTrainedModel, optim: OptimSettings, checkpointing: bool, ranks: Ranks) -> None:
        self.layout: dict[str, int] = {}
        self._model = model
        self._optim = optim
        self._checkpointing = checkpointing
        self._ranks = ranks
        self._masters = MasterWeights(model)
        self._optimizer = build_adamw(self._masters.tensors(), optim)
        self._offloaded = OffloadedTensors(self._update_state, model.device)

    def begin(self) -> None:
        """See `policy.Stepper`."""
        self._offloaded.load()
        self._optimizer.zero_grad(set_to_none=True)
        # transformers checkpoints a layer in training mode only; dropout is 0, so nothing else changes with it.
        self._model.train(self._checkpointing)

    def step(self, learning_rate: float) -> tuple[float, str]:
        """See `policy.Stepper`."""
        self._model.eval()
        tensors = self._masters.tensors()
        for tensor in tensors:
            # A mini-batch of zero advantages alone still moves weights by Adam's momentum, forward pass or not.
            tensor.grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        self._ranks.sum([tensor.grad for tensor in tensors if tensor.grad is not None])
        grad_norm = float(torch.nn.utils.clip_grad_norm_(tensors, self._optim.grad_clip))
        skipped = skip_reason(grad_norm, self._optim)
        if not skipped:
            self._optimizer.param_groups[0]["lr"] = learning_rate
            self._optimizer.step()
            self._masters.publish()
        self._optimizer.zero_grad(set_to_none=True)
        return grad_norm, skipped

    def rest(self) -> None:
        """Offload optimizer state and masters, where `optim.offload_during_rollouts` says so."""
        if self._optim.offload_during_rollouts:
            self._offloaded.offload()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `protocols.Policy.named_weights`."""
        yield from self._model.state_dict().items()

    def save(self, folder: Path) -> None:
        """Write weights and optimizer state into `folder`, which is created; rank 0 writes.

        What is stored of a trainable weight is its master, from which the model's own is rounded again when loaded;
        tied weights are stored once.
        """
        if self._ranks.is_main:
            folder.mkdir(parents=True, exist_ok=True)
            tensors = {name: tensor.detach().contiguous() for name, tensor in self._stored().items()}
            save_file(tensors, folder / WEIGHTS_FILE)
            torch.save(self._optimizer.state_dict(), folder / OPTIMIZER_FILE)

    @torch.no_grad()
    def load(self, folder: Path, saved: dict[str, Any]) -> None:
        """Raises RunError when `folder` was written for another model, InputError naming a file that is damaged."""
        self._offloaded.load()
        own = self._stored()
        with reading_file(folder / WEIGHTS_FILE):
            stored = load_file(folder / WEIGHTS_FILE)
        if stored.keys() != own.keys():
            differing = sorted(stored.keys() ^ own.keys())
            raise RunError(
                f"{folder / WEIGHTS_FILE} belongs to another model: {differing[0]!r} and {len(differing) - 1} other "
                f"weights are on one side only; resume with the backbone of the run."
            )
        for name, tensor in own.items():
            if stored[name].shape != tensor.shape or stored[name].dtype != tensor.dtype:
                raise RunError(
                    f"{folder / WEIGHTS_FILE} belongs to another model: {name!r} is {_kind(stored[name])} there and "
                    f"{_kind(tensor)} here; resume with the backbone and the precision of the run."
                )
            tensor.copy_(stored[name])
        self._masters.publish()
        with reading_file(folder / OPTIMIZER_FILE):
            self._optimizer.load_state_dict(torch.load(folder / OPTIMIZER_FILE, map_location="cpu", weights_only=True))

    def _update_state(self) -> list[Tensor]:
        """Masters of narrower weights, then Adam's moments once the first update has made them."""
        state = self._optimizer.state
        moments = [state[tensor][name] for tensor in self._masters.tensors() if tensor in state for name in _MOMENTS]
        return [*self._masters.copies(), *moments]

    def _stored(self) -> dict[str, Tensor]:
        """Masters of trainable weights, then frozen weights and buffers; tied ones under their first name."""
        stored = dict(self._masters.named_tensors())
        trainable = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        stored |= {name: weight for name, weight in self._model.named_parameters() if name not in stored}
        stored |= {name: buffer for name, buffer in self._model.state_dict().items() if name not in trainable}
        return stored


_MOMENTS = ("exp_avg", "exp_avg_sq")


class MasterWeights:
    """The tensors the optimizer steps, one for each trainable parameter of `model`, in its order.

    A float32 or float64 weight is its own master.
    """

    def __init__(self, model: nn.Module) -> None:
        self._pairs: list[tuple[str, nn.Parameter, Tensor]] = []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            if torch.finfo(parameter.dtype).bits >= 32:
                self._pairs.append((name, parameter, parameter))
                continue
            master = parameter.detach().to(torch.float32).clone().requires_grad_()
            parameter.register_post_accumulate_grad_hook(_adder_to(master))
            self._pairs.append((name, parameter, master))

    def tensors(self) -> list[Tensor]:
        """The tensors to step: float32 copies of a bfloat16 model's weights, else the weights themselves."""
        return [master for _, _, master in self._pairs]

    def copies(self) -> list[Tensor]:
        """The float32 copies alone, which no forward pass reads."""
        return [master for _, parameter, master in self._pairs if parameter is not master]

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names of the model's parameters, each with its master."""
        return ((name, master) for name, _, master in self._pairs)

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the model."""
        for _, parameter, master in self._pairs:
            if parameter is not master:
                parameter.copy_(master)


def _adder_to(master: Tensor) -> Callable[[Tensor], None]:
    def move(parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if master.grad is None:
            master.grad = gradient.to(master.dtype)
        else:
            master.grad.add_(gradient)
        parameter.grad = None

    return move


def build_adamw(parameters: Iterable[Tensor], settings: OptimSettings) -> torch.optim.AdamW:
    """AdamW over float32 (or wider) parameters; fused, which is also the fastest on a CPU."""
    return torch.optim.AdamW(
        parameters,
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
        fused=True,
    )


def skip_reason(grad_norm: float, settings: OptimSettings) -> str:
    """Why an update of this gradient norm must not be applied; empty when it may be."""
    if not grad_norm < float("inf"):
        return "non-finite gradient"
    if grad_norm > settings.skip_norm:
        return f"gradient norm above {settings.skip_norm:g}"
    return ""


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
