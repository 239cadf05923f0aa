"""Writing a trained model as a Hugging Face folder that loads as in any model card."""

import os
import shutil
from pathlib import Path

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

CARD = """---
library_name: transformers
tags: [exgrpo, reinforcement-learning, rlvr]
---

# {title}

{description}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{folder}")
model = AutoModelForCausalLM.from_pretrained("{folder}")
messages = [{{"role": "user", "content": {example!r}}}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
response = model.generate(**inputs, max_new_tokens={max_new_tokens}, do_sample=True)
print(tokenizer.decode(response[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))
```
"""


def export_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    eos_ids: tuple[int, ...],
    card: str | None = None,
) -> None:
    """Write safetensors, configuration, tokenizer, chat template and generation config; renamed into place when whole.

    An existing `folder` is replaced only after the new one is complete.
    """
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=list(eos_ids),
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos_ids[0],
    ).save_pretrained(partial)
    if card is not None:
        (partial / "README.md").write_text(card)
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)


def model_card(*, title: str, description: str, folder: str, example: str, max_new_tokens: int) -> str:
    """The exported model's README: what made it, and lines that can be pasted to use it."""
    return CARD.format(
        title=title, description=description, folder=folder, example=example, max_new_tokens=max_new_tokens
    )
