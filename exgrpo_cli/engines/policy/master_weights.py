"""Wide copies of a narrow model's weights, and wide sums of its gradients.

A bfloat16 weight has 8 bits of mantissa: an update of 1e-6 relative would vanish in it, and so would the gradient of
the hundredth micro-batch. The optimizer therefore steps float32 masters, and each weight's gradient is moved into its
master's as soon as autograd has finished it. A float32 or float64 weight is its own master.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn


class MasterWeights:
    """The tensors the optimizer steps, one for each trainable parameter of `model`, in its order."""

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
        """What the optimizer steps: float32 copies of a bfloat16 model's weights, else the weights themselves."""
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
