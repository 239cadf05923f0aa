"""The tiny backbone's tokenizer: one token a byte, and one for each piece of markup.

It is a Qwen2 tokenizer without merges, because loading a folder with a Qwen2 model always makes a Qwen2 tokenizer of
what is in it. `<think>`, `</think>` and `\\boxed{` are ordinary tokens: decoding without special tokens keeps them.
"""

from tokenizers import AddedToken, pre_tokenizers
from transformers import Qwen2Tokenizer

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
