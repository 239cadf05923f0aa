"""The tiny backbone: a Qwen2-architecture model of about half a million parameters, warm-started on this machine.

Its tokenizer has one token a byte, and one for each piece of markup. It is a Qwen2 tokenizer without merges, because
loading a folder with a Qwen2 model always makes a Qwen2 tokenizer of what is in it. `<think>`, `</think>` and
`\\boxed{` are ordinary tokens: decoding without special tokens keeps them.
"""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, pre_tokenizers
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from exgrpo_cli.config.sections.run import TinySettings
from exgrpo_cli.models.cache import cached_folder
from exgrpo_cli.models.export import sampling_defaults
from exgrpo_cli.models.warm_start import RECIPES, WarmStartRecipe, warm_start

MAX_TOKENS = 8192
"""Context window: its own task needs a hundred tokens, the benchmarks of the field need thousands."""
# Part of the cache key: raise it when a change of code makes another model of the same settings.
_FORMAT = 3

PAD, EOS = "<|pad|>", "<|endoftext|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
MARKUP = ("<think>", "</think>", "\\boxed{")

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role not in ['system', 'user', 'assistant'] -%}"
    "{{- raise_exception('The tiny chat template knows the roles system, user and assistant, not ' + message.role) -}}"
    "{%- endif -%}"
    "{{- '<|' + message.role + '|>' + message.content -}}"
    "{%- if message.role == 'assistant' -%}{{- eos_token -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|><think>\n' -}}{%- endif -%}"
)

Progress = Callable[[int, int, str], None]
"""Called with (done, total, what is being done)."""


def build_tiny(*, settings: TinySettings, cache_dir: Path | None = None, progress: Progress | None = None) -> Path:
    """The Hugging Face folder of the warm-started model: built once per settings, then taken from the cache.

    The first build trains for less than a minute on one thread; `progress` hears of it step by step, and of a damaged
    copy that is being rebuilt. `cache_dir` overrides the user's cache folder.
    """
    recipe = RECIPES[settings.task]
    key = {"format": _FORMAT, "settings": asdict(settings), "recipe": asdict(recipe), "template": CHAT_TEMPLATE}
    report = progress or (lambda done, total, what: None)
    return cached_folder(
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


def make_model(settings: TinySettings, tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    """Randomly initialised from settings.seed, in float32, with tied embeddings."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=settings.ffn_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_kv_heads,
        max_position_embeddings=MAX_TOKENS,
        # The default base of 10,000 spends most of a 32-dimensional head on wavelengths longer than any response.
        rope_parameters={"rope_type": "default", "rope_theta": 300.0},
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = Qwen2ForCausalLM(config)
    model.generation_config = sampling_defaults(tokenizer.eos_token_id, tokenizer.pad_token_id)
    return model


def _build(folder: Path, settings: TinySettings, recipe: WarmStartRecipe, report: Progress) -> None:
    tokenizer = make_tokenizer(max_tokens=MAX_TOKENS)
    model = make_model(settings, tokenizer)
    threads = torch.get_num_threads()
    # One thread, whatever the caller uses: the sums, and so the model, do not then depend on the number of cores.
    torch.set_num_threads(1)
    try:
        warm_start(
            model,
            tokenizer,
            steps=settings.warm_start_steps,
            batch_size=settings.warm_start_batch,
            recipe=recipe,
            rng=np.random.default_rng(settings.seed),
            progress=lambda done, total: report(done, total, "warm start of the tiny backbone"),
        )
    finally:
        torch.set_num_threads(threads)
    # What save_pretrained writes, without its own progress bar. The tied output matrix is the embedding: the format
    # refuses one tensor under two names.
    weights = {name: weight for name, weight in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
