"""The supervised start of the tiny backbone: next-token training on written traces, faults included.

Matrices are stepped by Muon, momentum whose updates are orthogonalised, in float32. torch.optim.Muon does the same in
bfloat16, which CPUs without bfloat16 instructions emulate about twenty times more slowly, and which rounds differently
from one kind of CPU to another.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

from exgrpo_cli.questions.made import countdown, sums
from exgrpo_cli.questions.made.pools import Pool
from exgrpo_cli.questions.made.sums import THINK_END, TraceMix, write_trace

Row = tuple[list[int], list[int]]
"""Token ids of a prompt and of a response."""

_IGNORED = -100
# Rows of similar length pass together: a third of a whole batch would be padding.
_ROWS_AT_ONCE = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmStartRecipe:
    """Data and method of the supervised start; the settings choose only its length, batch and seed."""

    task: str = "arithmetic"
    levels: tuple[int, ...] = (2, 3, 4, 5, 6, 7)
    """Levels of the task, drawn uniformly."""
    mix: TraceMix = field(default_factory=TraceMix)
    matrix_learning_rate: float = 0.014
    """Muon, on the matrices of the layers."""
    learning_rate: float = 3e-3
    """AdamW, on embeddings, biases and norms."""
    warmup_steps: int = 30
    final_fraction: float = 0.1
    """Learning rates end at this share of their peak, after a linear decay."""
    grad_clip: float = 1.0


RECIPES = {
    "arithmetic": WarmStartRecipe(),
    # A check undoes a line, which does not hold modulo m; lines are too short for two terms at once to save much.
    "modular": WarmStartRecipe(task="modular", levels=(2, 3, 4, 5), mix=TraceMix(checked=0.0)),
    "countdown": WarmStartRecipe(task="countdown", levels=(3, 4)),
}


def warm_start(
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    *,
    steps: int,
    batch_size: int,
    recipe: WarmStartRecipe,
    rng: np.random.Generator,
    progress: Callable[[int, int], None],
) -> None:
    """Train in place on `steps` fresh batches of traces; deterministic on one kind of machine and thread count."""
    matrices = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and "embed" not in name]
    others = [weight for name, weight in model.named_parameters() if weight.ndim != 2 or "embed" in name]
    muon = Muon(matrices)
    adam = torch.optim.AdamW(others, lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    model.train()
    for step in range(steps):
        share = _rate_share(step, steps, recipe)
        accumulate_gradient(model, draw_rows(tokenizer, batch_size, recipe, rng), tokenizer.pad_token_id)
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.grad_clip)
        muon.step(recipe.matrix_learning_rate * share)
        adam.param_groups[0]["lr"] = recipe.learning_rate * share
        adam.step()
        model.zero_grad()
        progress(step + 1, steps)
    model.eval()


def draw_rows(tokenizer: Qwen2Tokenizer, size: int, recipe: WarmStartRecipe, rng: np.random.Generator) -> list[Row]:
    """Questions of the warm-start pool with a trace each."""
    rows = []
    for _ in range(size):
        question, response = draw_example(recipe, int(rng.choice(recipe.levels)), rng)
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        response_ids = tokenizer.encode(response, add_special_tokens=False)
        rows.append((tokenizer.encode(prompt, add_special_tokens=False), [*response_ids, tokenizer.eos_token_id]))
    return rows


def draw_example(recipe: WarmStartRecipe, level: int, rng: np.random.Generator) -> tuple[str, str]:
    """A question of the recipe's task, of the warm-start pool, and a response to it."""
    return _EXAMPLES[recipe.task](level, recipe.mix, rng)


def _arithmetic_example(level: int, mix: TraceMix, rng: np.random.Generator) -> tuple[str, str]:
    terms = sums.draw_terms(level, Pool.WARM_START, rng)
    return f"{sums.expression(terms)}=?", write_trace(terms, mix, rng)


def _modular_example(level: int, mix: TraceMix, rng: np.random.Generator) -> tuple[str, str]:
    terms, modulus = sums.draw_modular_terms(level, Pool.WARM_START, rng), int(rng.choice(_MODULI))
    return sums.modular_text(terms, modulus), write_trace(terms, mix, rng, modulus)


def _countdown_example(level: int, mix: TraceMix, rng: np.random.Generator) -> tuple[str, str]:
    solution = countdown.draw_solved(level, Pool.WARM_START, rng)
    thinking = countdown.write_search(solution, _FAILED_ATTEMPTS, rng)
    question = countdown.prompt_text(solution.numbers, solution.result)
    return question, f"{thinking}\n{THINK_END}\n\\boxed{{{solution.expression()}}}"


_EXAMPLES = {"arithmetic": _arithmetic_example, "modular": _modular_example, "countdown": _countdown_example}
_MODULI = (3, 5, 7)
_FAILED_ATTEMPTS = 2
"""Most attempts of a countdown trace that miss the target before one that meets it."""


def accumulate_gradient(model: Qwen2ForCausalLM, rows: list[Row], pad_id: int) -> None:
    """Gradient of the mean cross-entropy over the learned tokens of all rows, in parts of similar length."""
    by_length = sorted(rows, key=lambda row: len(row[0]) + len(row[1]))
    num_learned = sum(len(response_ids) for _, response_ids in rows)
    for start in range(0, len(by_length), _ROWS_AT_ONCE):
        input_ids, targets = _pad(by_length[start : start + _ROWS_AT_ONCE], pad_id)
        logits = model(input_ids=input_ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets[:, 1:].flatten(), ignore_index=_IGNORED, reduction="sum"
        )
        (loss / num_learned).backward()


def _pad(rows: list[Row], pad_id: int) -> tuple[Int64[Tensor, "rows tokens"], Int64[Tensor, "rows tokens"]]:
    """Token ids and targets: the response and its EOS are learned, the prompt is not.

    The padding is on the right, where causal attention keeps it out of every learned position.
    """
    input_ids = [torch.tensor(prompt_ids + response_ids) for prompt_ids, response_ids in rows]
    targets = [torch.tensor([_IGNORED] * len(prompt_ids) + response_ids) for prompt_ids, response_ids in rows]
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(input_ids, batch_first=True, padding_value=pad_id), pad(
        targets, batch_first=True, padding_value=_IGNORED
    )


def _rate_share(step: int, steps: int, recipe: WarmStartRecipe) -> float:
    if step < recipe.warmup_steps:
        return (step + 1) / recipe.warmup_steps
    left = (steps - step) / max(1, steps - recipe.warmup_steps)
    return recipe.final_fraction + (1 - recipe.final_fraction) * left


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
