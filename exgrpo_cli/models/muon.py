"""Muon: momentum whose matrix updates are orthogonalised, in float32.

torch.optim.Muon does the same in bfloat16, which CPUs without bfloat16 instructions emulate about twenty times more
slowly, and which rounds differently from one kind of CPU to another.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

# Quintic Newton-Schulz coefficients of Keller Jordan's Muon: steep at zero, singular values end within about 0.5..1.5.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5


def orthogonalise(matrix: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
    """Bring all singular values near 1, keeping the singular vectors."""
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if tall else matrix
    # The Frobenius norm bounds the spectral norm, as the iteration needs; the clamp keeps a zero gradient zero.
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.T if tall else x


class Muon:
    """Nesterov momentum, orthogonalised; for two-dimensional weights only."""

    def __init__(self, matrices: Sequence[torch.nn.Parameter], *, momentum: float = 0.95) -> None:
        self.matrices = list(matrices)
        self.momentum = momentum
        self._velocities = [torch.zeros_like(matrix) for matrix in self.matrices]

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """One step along the orthogonalised gradients; raises ValueError where a matrix has no gradient."""
        for matrix, velocity in zip(self.matrices, self._velocities, strict=True):
            if matrix.grad is None:
                raise ValueError("Muon.step before backward: a matrix has no gradient.")
            velocity.lerp_(matrix.grad, 1 - self.momentum)
            update = orthogonalise(matrix.grad.lerp(velocity, self.momentum))
            # A tall matrix has fewer directions than rows: the factor keeps the change per output the same.
            scale = max(1.0, matrix.size(0) / matrix.size(1)) ** 0.5
            matrix.add_(update, alpha=-learning_rate * scale)
