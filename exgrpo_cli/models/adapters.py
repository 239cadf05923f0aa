"""Adapter folders: an adapter as peft loads it, with the backbone it belongs to; and both merged.

`base.json` names the backbone as the run took it, and tells its weights from others (`engines.lora.fingerprint`).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.files import read_json, whole_folder, write_json
from exgrpo_cli.config.sections.run import BackboneSettings, TinySettings
from exgrpo_cli.models.folders import reading_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CONFIG_FILE, BASE_FILE, WEIGHTS_FILE = "adapter_config.json", "base.json", "adapter_model.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """Backbone of an adapter."""

    backbone: BackboneSettings
    tiny: TinySettings
    fingerprint: int
    """That of the backbone's weights in its precision."""


def export_adapter(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", folder: Path, base: Base) -> None:
    """Write the adapter of `model`, its tokenizer and `base`; renamed into place when whole."""
    from safetensors.torch import save_file

    from exgrpo_cli.engines.lora import ADAPTER, adapter_weights

    with whole_folder(folder) as partial:
        weights = {name: tensor.contiguous() for name, tensor in adapter_weights(model).items()}
        save_file(weights, partial / WEIGHTS_FILE, metadata={"format": "pt"})
        config = model.peft_config[ADAPTER]
        config.base_model_name_or_path = base.backbone.source
        config.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        write_json(partial / BASE_FILE, msgspec.to_builtins(base))


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter and no model."""
    return (folder / CONFIG_FILE).is_file() and not (folder / "config.json").is_file()


def base_of(folder: Path) -> Base:
    """Backbone of the adapter in `folder`. Raises InputError where none is named, or the weights are missing."""
    for name in (BASE_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            remedy = "or merge it with peft (merge_and_unload, then save_pretrained) and name that folder"
            raise InputError(f"{folder} is an adapter without {name}: name one that exgrpo has written, {remedy}.")
    base: Base = msgspec.convert(read_json(folder / BASE_FILE, Base), Base)
    return base


def merge_adapter(model: "PreTrainedModel", folder: Path, base: Base) -> None:
    """Merge the adapter in `folder` into `model`, in place. Raises InputError where it does not belong there."""
    import torch
    from safetensors.torch import load_file

    from exgrpo_cli.engines.lora import IN_FILES, fingerprint, merged

    if fingerprint(model) != base.fingerprint:
        remedy = "restore the backbone that the run was started with"
        raise InputError(f"{folder} is an adapter of other weights than {base.backbone.source!r} has: {remedy}.")
    with reading_model(folder, "adapter that fits its backbone"), torch.no_grad():
        config = read_json(folder / CONFIG_FILE, {"r": int, "lora_alpha": int})
        weights = load_file(folder / WEIGHTS_FILE)
        for name in [name for name in weights if ".lora_A." in name]:
            weight = model.get_parameter(name.removeprefix(IN_FILES).replace(".lora_A", ""))
            up = weights[name.replace(".lora_A.", ".lora_B.")]
            weight.copy_(merged(weight, weights[name], up, config["lora_alpha"] / config["r"]))
