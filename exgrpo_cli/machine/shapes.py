"""The architecture of a backbone without its weights: a transformers config, and parameters counted on the meta device.

Nothing is downloaded: a preset carries its shape, the tiny backbone its settings, a folder its `config.json`.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.config.names import is_gguf
from exgrpo_cli.config.sections.run import BackboneSettings, TinySettings
from exgrpo_cli.config.settings import Config
from exgrpo_cli.models.gguf import gguf_config, require_model_folder
from exgrpo_cli.presets import load_preset, preset_names


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The sizes that memory and arithmetic depend on."""

    num_parameters: int
    """Tied tensors counted once."""
    num_layers: int
    hidden_size: int
    ffn_size: int
    query_size: int
    """Query heads times the size of a head."""
    kv_size: int
    """Key heads (as many as value heads) times the size of a head."""
    vocab_size: int


def backbone_shape(backbone: BackboneSettings, tiny: TinySettings) -> Shape | None:
    """The shape of a run's backbone, or None for a hub id that is neither a preset's nor in the local cache.

    Raises InputError when a local folder's config.json cannot be read.
    """
    config = architecture(backbone, tiny)
    return None if config is None else shape_of(config)


def with_dtype(config: Config, *, on_gpu: bool) -> Config:
    """`config` with the precision that `backbone.dtype = "auto"` comes to; as it is where the model is not here."""
    from exgrpo_cli.models.load import pin_dtype

    backbone = config.backbone
    if backbone.dtype != "auto" or (on_gpu and architecture(backbone, config.tiny) is None):
        return config
    return replace(config, backbone=pin_dtype(backbone, config.tiny, on_gpu=on_gpu))


def shape_of(config: Any) -> Shape:
    """Sizes of a transformers config; the model is built on the meta device, so that nothing is allocated."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Shape(
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_size=config.intermediate_size,
        query_size=config.num_attention_heads * head_size,
        kv_size=config.num_key_value_heads * head_size,
        vocab_size=config.vocab_size,
    )


def preset_config(name: str) -> Any:
    """The transformers config of a published preset, from the fields in its `[about.shape]`."""
    from transformers import AutoConfig

    fields = dict(load_preset("backbones", name)["about"]["shape"])
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def architecture(backbone: BackboneSettings, tiny: TinySettings) -> Any:
    """The transformers config of a backbone, or None where only the hub has it.

    Raises InputError when a local folder's config.json cannot be read.
    """
    if backbone.source == "tiny":
        return _tiny_config(tiny)
    for name in preset_names("backbones"):
        if load_preset("backbones", name)["backbone"]["source"] == backbone.source:
            return preset_config(name)
    return _stored_config(backbone)


def _tiny_config(tiny: TinySettings) -> Any:
    from exgrpo_cli.models.tiny import MAX_TOKENS, make_model
    from exgrpo_cli.models.tokenizer import make_tokenizer

    return make_model(tiny, make_tokenizer(max_tokens=MAX_TOKENS)).config


def _stored_config(backbone: BackboneSettings) -> Any:
    from transformers import AutoConfig

    if is_gguf(backbone.source):
        return gguf_config(Path(backbone.source).expanduser())
    folder = Path(backbone.source).expanduser()
    if folder.is_dir():
        require_model_folder(folder)
    try:
        return AutoConfig.from_pretrained(backbone.source, revision=backbone.revision, local_files_only=True)
    except (OSError, ValueError) as error:
        if folder.is_dir():
            first = str(error).strip().splitlines()[0]
            raise InputError(f"backbone.source {backbone.source!r} has no usable config.json: {first}") from error
        return None
