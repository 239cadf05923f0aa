"""The tiny backbone: a Qwen2-architecture model of about half a million parameters, warm-started on this machine.

Its tokenizer has one token a byte, and one for each piece of markup. It is a Qwen2 tokenizer without merges, because
loading a folder with a Qwen2 model always makes a Qwen2 tokenizer of what is in it. `<think>`, `</think>` and
`\\boxed{` are ordinary tokens: decoding without special tokens keeps them.

The warm start is next-token training on written traces, faults included.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from tokenizers import AddedToken, pre_tokenizers
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from transformers.utils import logging

from exgrpo_cli.base import cache, data
from exgrpo_cli.config.sections.run import TinySettings
from exgrpo_cli.models import export, load
from exgrpo_cli.questions.made import countdown, pools, sums

MAX_TOKENS = 8192
"""Context window: its own task needs a hundred tokens, the benchmarks of the field need thousands."""
# Part of the cache key: raise it when a change of code makes another model of the same settings.
_FORMAT = 3

PAD, EOS = "<|pad|>", "<|endoftext|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
MARKUP = ("<think>", "</think>", "\\boxed{")

CHAT_TEMPLATE = data.tables(__file__, "tiny.toml")["chat_template"]

Row = tuple[list[int], list[int]]
"""Token ids of a prompt and of a response."""

_IGNORED = -100
# Rows of similar length pass together: a third of a whole batch would be padding.
_ROWS_AT_ONCE = 8
_MODULI = (3, 5, 7)
_FAILED_ATTEMPTS = 2
"""Most attempts of a countdown trace that miss the target before one that meets it."""
_MOMENTUM = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmStartRecipe:
    """Data and method of the supervised start; the settings choose only its length, batch and seed."""

    task: str = "arithmetic"
    levels: tuple[int, ...] = (2, 3, 4, 5, 6, 7)
    """Levels of the task, drawn uniformly."""
    largest: int = 9
    """Largest number of a countdown question."""
    mix: sums.TraceMix = field(default_factory=sums.TraceMix)
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
    "modular": WarmStartRecipe(task="modular", levels=(2, 3, 4, 5), mix=sums.TraceMix(checked=0.0)),
    "countdown": WarmStartRecipe(task="countdown", levels=(3, 4)),
    "countdown-20": WarmStartRecipe(task="countdown", levels=(3, 4), largest=20),
}


def build_tiny(*, settings: TinySettings, cache_dir: Path | None = None, progress: load.Progress | None = None) -> Path:
    """The Hugging Face folder of the warm-started model: built once per settings, then taken from the cache.

    The first build trains for less than a minute on one thread; `progress` hears of it step by step, and of a damaged
    copy that is being rebuilt. `cache_dir` overrides the user's cache folder.
    """
    recipe = RECIPES[settings.task]
    key = {"format": _FORMAT, "settings": asdict(settings), "recipe": asdict(recipe), "template": CHAT_TEMPLATE}
    report = progress or (lambda done, total, what: None)
    return cache.cached_folder(
        name="tiny",
        key=key,
        build=lambda folder: _build(folder, settings, recipe, report),
        notice=lambda text: report(0, settings.warm_start_steps, text),
        cache_dir=cache_dir,
    )


def make_tokenizer(*, max_tokens: int) -> Qwen2Tokenizer:
    """Build it; `max_tokens` is the context window that it reports."""
    special = [PAD, EOS, SYSTEM, USER, ASSISTANT]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate([*special, *MARKUP, *alphabet])},
        merges=[],
        pad_token=PAD,
        eos_token=EOS,
        extra_special_tokens=[SYSTEM, USER, ASSISTANT],
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=max_tokens,
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP])
    return tokenizer


def make_config(settings: TinySettings, tokenizer: Qwen2Tokenizer) -> Qwen2Config:
    """The model's configuration: in float32, with tied embeddings."""
    return Qwen2Config(
        vocab_size=len(tokenizer),
        **settings.shape,
        max_position_embeddings=MAX_TOKENS,
        # The default base of 10,000 spends most of a 32-dimensional head on wavelengths longer than any response.
        rope_parameters={"rope_type": "default", "rope_theta": 300.0},
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype="float32",
    )


def make_model(settings: TinySettings, tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    """Randomly initialised from settings.seed."""
    config = make_config(settings, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = Qwen2ForCausalLM(config)
    model.generation_config = export.sampling_defaults(tokenizer.eos_token_id, tokenizer.pad_token_id)
    return model


def _build(folder: Path, settings: TinySettings, recipe: WarmStartRecipe, report: load.Progress) -> None:
    tokenizer = make_tokenizer(max_tokens=MAX_TOKENS)
    model = make_model(settings, tokenizer)
    threads = torch.get_num_threads()
    # One thread, whatever the caller uses: the sums, and so the model, do not then depend on the number of cores.
    torch.set_num_threads(1)
    try:
        warm_start(model, tokenizer, settings, recipe, report)
    finally:
        torch.set_num_threads(threads)
    # The toolkit shows one progress of its own.
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def warm_start(
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    settings: TinySettings,
    recipe: WarmStartRecipe,
    progress: Callable[[int, int, str], None],
) -> None:
    """Train in place on fresh batches of traces; deterministic on one kind of machine and thread count."""
    rng, steps = np.random.default_rng(settings.seed), settings.warm_start_steps
    matrices = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and "embed" not in name]
    others = [weight for name, weight in model.named_parameters() if weight.ndim != 2 or "embed" in name]
    velocities = [torch.zeros_like(matrix) for matrix in matrices]
    adam = torch.optim.AdamW(others, lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    model.train()
    for step in range(steps):
        if step < recipe.warmup_steps:
            share = (step + 1) / recipe.warmup_steps
        else:
            left = (steps - step) / max(1, steps - recipe.warmup_steps)
            share = recipe.final_fraction + (1 - recipe.final_fraction) * left
        accumulate_gradient(model, draw_rows(tokenizer, settings.warm_start_batch, recipe, rng), tokenizer.pad_token_id)
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.grad_clip)
        muon_step(matrices, velocities, recipe.matrix_learning_rate * share)
        adam.param_groups[0]["lr"] = recipe.learning_rate * share
        adam.step()
        model.zero_grad()
        progress(step + 1, steps, "warm start of the tiny backbone")
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
    if recipe.task == "countdown":
        solution = countdown.draw_solved(level, pools.Pool.WARM_START, rng, recipe.largest)
        thinking = countdown.write_search(solution, _FAILED_ATTEMPTS, rng)
        question = countdown.prompt_text(solution.numbers, solution.result)
        return question, f"{thinking}\n{sums.THINK_END}\n\\boxed{{{solution.expression()}}}"
    if recipe.task == "modular":
        terms, modulus = sums.draw_modular_terms(level, pools.Pool.WARM_START, rng), int(rng.choice(_MODULI))
        return sums.modular_text(terms, modulus), sums.write_trace(terms, recipe.mix, rng, modulus)
    terms = sums.draw_terms(level, pools.Pool.WARM_START, rng)
    return f"{sums.expression(terms)}=?", sums.write_trace(terms, recipe.mix, rng)


def accumulate_gradient(model: Qwen2ForCausalLM, rows: list[Row], pad_id: int) -> None:
    """Gradient of the mean cross-entropy over the learned tokens of all rows, in parts of similar length."""
    by_length = sorted(rows, key=lambda row: len(row[0]) + len(row[1]))
    pad = torch.nn.utils.rnn.pad_sequence
    num_learned = sum(len(response_ids) for _, response_ids in rows)
    for start in range(0, len(by_length), _ROWS_AT_ONCE):
        part = by_length[start : start + _ROWS_AT_ONCE]
        # The padding is on the right, where causal attention keeps it out of every learned position.
        input_ids = pad([torch.tensor(prompt + response) for prompt, response in part], True, pad_id)
        # The response and its EOS are learned, the prompt is not.
        targets = pad([torch.tensor([_IGNORED] * len(prompt) + response) for prompt, response in part], True, _IGNORED)
        logits = model(input_ids=input_ids).logits[:, :-1]
        scores, wanted = logits.flatten(0, 1), targets[:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(scores, wanted, ignore_index=_IGNORED, reduction="sum")
        (loss / num_learned).backward()


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


@torch.no_grad()
def muon_step(matrices: Sequence[torch.nn.Parameter], velocities: Sequence[Tensor], learning_rate: float) -> None:
    """One step of Nesterov momentum along the orthogonalised gradients, in float32; `velocities` go along.

    torch.optim.Muon does the same in bfloat16, which CPUs without bfloat16 instructions emulate about twenty times
    more slowly, and which rounds differently from one kind of CPU to another.
    """
    for matrix, velocity in zip(matrices, velocities, strict=True):
        assert matrix.grad is not None
        velocity.lerp_(matrix.grad, 1 - _MOMENTUM)
        update = orthogonalise(matrix.grad.lerp(velocity, _MOMENTUM))
        # A tall matrix has fewer directions than rows: the factor keeps the change per output the same.
        scale = max(1.0, matrix.size(0) / matrix.size(1)) ** 0.5
        matrix.add_(update, alpha=-learning_rate * scale)
