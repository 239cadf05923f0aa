"""Writing a trained model as a Hugging Face folder that loads as in any model card."""

import json
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from exgrpo_cli.base.files import whole_folder
from exgrpo_cli.engines.lora import plain_name

SHARD_BYTES = 2**31
"""Weights held at once, and the size of a file, where they come one by one."""

CARD = Path(__file__).with_name("card.md").read_text(encoding="utf-8")


def sampling_defaults(eos_ids: int | list[int], pad_id: int) -> GenerationConfig:
    """Defaults of `generate`: sample from the whole distribution, as training does."""
    return GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=eos_ids, pad_token_id=pad_id
    )


def export_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    eos_ids: tuple[int, ...],
    card: str | None = None,
    weights: Iterator[tuple[str, Tensor]] | None = None,
) -> None:
    """Write safetensors, configuration, tokenizer, chat template and generation config; renamed into place when whole.

    An existing `folder` is replaced only after the new one is complete. `weights` are written instead of the model's
    own, in several files, with at most SHARD_BYTES of them in memory.
    """
    with whole_folder(folder) as partial:
        if weights is None:
            model.save_pretrained(partial)
        else:
            model.config.save_pretrained(partial)
            write_shards(weights, partial, stored={plain_name(name) for name, _ in model.named_parameters()})
        tokenizer.save_pretrained(partial)
        pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos_ids[0]
        sampling_defaults(list(eos_ids), pad_id).save_pretrained(partial)
        if card is not None:
            (partial / "README.md").write_text(card, encoding="utf-8")


def write_shards(weights: Iterator[tuple[str, Tensor]], folder: Path, *, stored: set[str]) -> None:
    """Write the weights named in `stored` as safetensors of about SHARD_BYTES and the index that names their files.

    Tied weights come under each of their names and are stored under the first. All of `weights` is read.
    """
    shard: dict[str, Tensor] = {}
    file_of: dict[str, str] = {}
    total = 0

    def write() -> None:
        name = f"model-{len(set(file_of.values())) + 1:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        file_of.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, tensor in weights:
        if name not in stored:
            continue
        if shard and sum(own.nbytes for own in shard.values()) + tensor.nbytes > SHARD_BYTES:
            write()
        shard[name] = tensor.detach().cpu().clone()
        total += tensor.nbytes
    write()
    index = {"metadata": {"total_size": total}, "weight_map": file_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
