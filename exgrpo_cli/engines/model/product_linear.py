"""Linear layers of a loaded model that multiply by `algo.products`, swapped in place.

A patch of torch's modules: a layer's class is exchanged, so that parameters, names, hooks and the state dict stay as
they are. Holds for torch 2.9 to 2.14 and transformers 5.16 to 5.20, whose Qwen2 and Llama are made of plain
`torch.nn.Linear`.
"""

from jaxtyping import Float
from torch import Tensor, nn

from exgrpo_cli.algo import products


class ProductLinear(nn.Linear):
    """A linear layer that multiplies by `algo.products`; parameters, names and results are those of nn.Linear."""

    def forward(self, inputs: Float[Tensor, "*batch ins"]) -> Float[Tensor, "*batch outs"]:
        """(..., in_features) to (..., out_features), as `nn.Linear`."""
        return products.linear(inputs, self.weight, self.bias)


def use_products(model: nn.Module) -> None:
    """Let the plain linear layers of `model` multiply by `algo.products`, in place; subclasses keep their own way.

    Nothing changes where products are torch's own anyhow.
    """
    if not products.ONEDNN:
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = ProductLinear
