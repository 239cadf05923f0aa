"""From backbone settings to a loaded model and tokenizer: the built-in tiny one, a local folder, or a hub id."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from exgrpo_cli.base.cache import cached_folder
from exgrpo_cli.base.errors import InputError, first_line
from exgrpo_cli.base.files import file_digest
from exgrpo_cli.config.names import is_gguf
from exgrpo_cli.config.sections.run import BackboneSettings, TinySettings
from exgrpo_cli.models.adapters import BASE_FILE, CONFIG_FILE, WEIGHTS_FILE, base_of, is_adapter, merge_adapter
from exgrpo_cli.models.folders import converted, reading_model, require_model_folder, require_safetensors
from exgrpo_cli.presets import about_backbone
from exgrpo_cli.questions.prompts import require_bounded
from exgrpo_cli.runs.folder import require_model

if TYPE_CHECKING:
    # A plan asks for a precision, and needs neither.
    import torch
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

Progress = Callable[[int, int, str], None]
"""Called with (done, total, what is being done)."""

OTHER_FORMATS = ("*.bin", "*.pth", "*.gguf", "*.msgpack", "*.h5", "original/*")
"""Copies of the weights that are not read: safetensors alone is."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True, kw_only=True, slots=True)
class Backbone:
    """A causal language model with the tokenizer that belongs to it."""

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    eos_ids: tuple[int, ...]
    """Token ids that end a response; a trailing one is left out of decoded text."""

    def decode(self, token_ids: Any) -> str:
        """Text of a response, without the EOS but with every other token."""
        return decode_response(self.tokenizer, self.eos_ids, token_ids)


def decode_response(tokenizer: "PreTrainedTokenizerBase", eos_ids: tuple[int, ...], token_ids: Any) -> str:
    """Text of response `token_ids` without a trailing EOS; special tokens inside are kept, so nothing is hidden."""
    ids = list(token_ids)
    if ids and ids[-1] in eos_ids:
        ids.pop()
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def locate(
    settings: BackboneSettings, tiny: TinySettings, progress: Progress | None = None, *, weights: bool = True
) -> Path:
    """The local Hugging Face folder of a backbone, built or downloaded when it is not there yet.

    Without `weights` only configuration and tokenizer are downloaded.

    Raises InputError when the folder has no model or the hub does not have (or may not be asked for) it.
    """
    if settings.source == "tiny":
        from exgrpo_cli.models.tiny import build_tiny

        return build_tiny(settings=tiny, progress=progress)
    if is_gguf(settings.source):
        report = progress or (lambda done, total, what: None)
        return converted(Path(settings.source).expanduser(), notice=lambda text: report(0, 1, text))
    folder = Path(settings.source).expanduser()
    if is_adapter(folder):
        base = base_of(folder)
        return _merged(folder, progress) if weights else locate(base.backbone, base.tiny, progress, weights=False)
    if folder.is_dir():
        require_model_folder(folder)
        return folder
    if settings.source.startswith((".", "/", "~")) or settings.source.count("/") != 1:
        kinds = "neither a folder nor a hub id of the form owner/name. `exgrpo presets` lists the backbones that ship"
        raise InputError(f"backbone.source {settings.source!r} is {kinds}.")
    return _download(settings, weights)


def _merged(folder: Path, progress: Progress | None) -> Path:
    """The Hugging Face folder of an adapter and its backbone, merged when first asked for, then from the cache."""
    base, report = base_of(folder), progress or (lambda done, total, what: None)
    require_model(folder)

    def build(target: Path) -> None:
        import torch

        report(0, 1, f"merging {folder} into {base.backbone.name}")
        backbone = load_folder(locate(base.backbone, base.tiny, progress), torch.device("cpu"), base.backbone)
        merge_adapter(backbone.model, folder, base)
        backbone.model.save_pretrained(target)
        backbone.tokenizer.save_pretrained(target)

    return cached_folder(
        name="merged",
        key={"format": 1, **{name: file_digest(folder / name) for name in (BASE_FILE, CONFIG_FILE, WEIGHTS_FILE)}},
        build=build,
        notice=lambda text: report(0, 1, text),
    )


def _download(settings: BackboneSettings, weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    from huggingface_hub.utils import disable_progress_bars

    # The toolkit shows one progress of its own; the hub's bars would tear the live view.
    disable_progress_bars()
    try:
        ignored = [*OTHER_FORMATS, *([] if weights else ["*.safetensors"])]
        return Path(snapshot_download(settings.source, revision=settings.revision, ignore_patterns=ignored))
    except LocalEntryNotFoundError as error:
        elsewhere = f"; {about['elsewhere']}" if "elsewhere" in (about := about_backbone(settings.source)) else ""
        raise InputError(
            f"backbone {settings.source!r} is not in the local cache and the hub cannot be reached: "
            f"go online, unset HF_HUB_OFFLINE, or pass a local folder as --backbone (of evaluate: --model){elsewhere}."
        ) from error
    except HFValidationError as error:
        raise InputError(f"backbone.source {settings.source!r} is no hub id: {first_line(error)}") from error
    except HfHubHTTPError as error:
        refused = f"{settings.source!r} at revision {settings.revision!r} ({error.response.status_code})"
        remedy = "check the id and the revision, and HF_TOKEN for a gated model"
        raise InputError(f"the hub refused {refused}: {remedy}.") from error


def load_tokenizer(
    settings: BackboneSettings, tiny: TinySettings, progress: Progress | None = None
) -> "PreTrainedTokenizerBase":
    """The backbone's tokenizer alone."""
    return read_tokenizer(locate(settings, tiny, progress, weights=False))


def read_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """The tokenizer of a local folder. Raises InputError where transformers cannot load one."""
    from transformers import AutoTokenizer

    missing = f"{folder} has no tokenizer files (tokenizer.json): copy those of the model it was made from."
    try:
        with reading_model(folder, "tokenizer that transformers can load"):
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            require_bounded(tokenizer, str(folder))
            # Of a folder without tokenizer files transformers may make an empty one, which encodes a text as nothing.
            ids = tokenizer.encode("1 + 1", add_special_tokens=False)
    except InputError as error:
        if any((folder / name).is_file() for name in TOKENIZER_FILES):
            raise
        raise InputError(missing) from error
    if not ids:
        raise InputError(missing)
    return tokenizer


def pin_dtype(settings: BackboneSettings, tiny: TinySettings, *, on_gpu: bool) -> BackboneSettings:
    """`settings` with the precision that "auto" comes to; asks the hub for config.json where only that can say.

    Raises InputError where `locate` does, or config.json cannot be read.
    """
    if settings.dtype != "auto":
        return settings
    return replace(settings, dtype=_trained_dtype(_saved_dtype(settings, tiny)) if on_gpu else "float32")


def dtype_note(settings: BackboneSettings, tiny: TinySettings) -> str:
    """Note of what "auto" comes to on a GPU, and why. Raises InputError where `pin_dtype` does."""
    saved = _saved_dtype(settings, tiny)
    said = "a precision that its config.json does not name" if saved is None else saved
    return f"backbone.dtype = {_trained_dtype(saved)}: {settings.name} was saved in {said}"


def _saved_dtype(settings: BackboneSettings, tiny: TinySettings) -> str | None:
    """The precision that config.json, or the preset, says a backbone was saved in."""
    if "dtype" in (about := about_backbone(settings.source)):
        return str(about["dtype"])
    folder = locate(settings, tiny, weights=False)
    from transformers import AutoConfig

    with reading_model(folder, "usable config.json"):
        return _dtype_name(AutoConfig.from_pretrained(folder, trust_remote_code=False).dtype)


def _dtype_name(saved: "torch.dtype | None") -> str | None:
    return None if saved is None else str(saved).removeprefix("torch.")


def _trained_dtype(saved: str | None) -> Literal["float32", "bfloat16"]:
    """Half precision, whose range gradients leave, is trained as bfloat16; what is not known, as float32."""
    return "bfloat16" if saved in ("bfloat16", "float16") else "float32"


def load_folder(folder: Path, device: "torch.device", settings: BackboneSettings = BackboneSettings()) -> Backbone:
    """Load a local Hugging Face folder, `settings` overriding precision, rope base and window where given."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = read_tokenizer(folder)
    with reading_model(folder, "model that transformers can load"):
        require_safetensors(folder)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        # The name of any file, pickles among them, that would be read in place of the safetensors.
        config.transformers_weights = None
        if settings.rope_theta:
            config.rope_parameters["rope_theta"] = settings.rope_theta
        if settings.max_position_embeddings:
            config.max_position_embeddings = settings.max_position_embeddings
        dtype = settings.dtype
        if dtype == "auto":
            dtype = _trained_dtype(_dtype_name(config.dtype)) if device.type == "cuda" else "float32"
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=getattr(torch, dtype),
            attn_implementation="sdpa",
            use_safetensors=True,
            trust_remote_code=False,
        )
    torch.nn.Module.to(model, device)
    return Backbone(model=model.eval(), tokenizer=tokenizer, eos_ids=_ends(model.generation_config, tokenizer, folder))


def declared_ends(folder: Path, tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    """Every token id that ends a response, of a local folder's model that is not loaded."""
    from transformers import AutoConfig, GenerationConfig

    with reading_model(folder, "usable generation_config.json or config.json"):
        try:
            config = GenerationConfig.from_pretrained(folder)
        except OSError:
            config = GenerationConfig.from_model_config(AutoConfig.from_pretrained(folder, trust_remote_code=False))
    return _ends(config, tokenizer, folder)


def _ends(config: "GenerationConfig | None", tokenizer: "PreTrainedTokenizerBase", folder: Path) -> tuple[int, ...]:
    """Those of the generation config and of the tokenizer, ascending."""
    declared = config.eos_token_id if config is not None else None
    named = [*(declared if isinstance(declared, list) else [declared]), tokenizer.eos_token_id]
    ids = {each for each in named if isinstance(each, int)}
    if not ids or any(each is not None and not isinstance(each, int) for each in named):
        raise InputError(f"{folder} declares no EOS token: set eos_token_id to a token id, or a list of them.")
    return tuple(sorted(ids))
