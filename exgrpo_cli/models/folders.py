"""Model folders: what is read of them, and those that are made of GGUF files.

transformers reads a GGUF file, but a model read that way carries its quantisation along and cannot be saved; its
tensors are copied into a plain model of the same configuration.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from exgrpo_cli.base.cache import Notice, cached_folder
from exgrpo_cli.base.errors import ExgrpoError, InputError, first_line
from exgrpo_cli.base.files import file_digest
from exgrpo_cli.base.versions import install_command


@contextmanager
def reading_model(place: object, what: str) -> Iterator[None]:
    """Turn whatever comes of reading `what` at a place (a folder, a file, a setting) into an InputError that says so.

    transformers, tokenizers and safetensors meet foreign bytes with errors of every kind, a plain Exception among them.
    """
    from transformers.utils import logging

    # The toolkit shows one progress of its own; transformers' bars would tear the live view.
    logging.disable_progress_bar()
    try:
        yield
    except (ExgrpoError, MemoryError):
        raise
    except Exception as error:
        raise InputError(f"{place} has no {what}: {type(error).__name__}, {first_line(error)}") from error


def require_safetensors(folder: Path) -> None:
    """Raise InputError for a model folder whose weights are not in safetensors alone: other formats may hold code."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return
    shards = json.loads(index.read_bytes())["weight_map"].values() if index.is_file() else ()
    names = list(shards) or [path.name for path in sorted(folder.glob("*.bin"))] or ["nothing"]
    if others := [name for name in names if not name.endswith(".safetensors")]:
        unread = f"but {others[0]}, which is not read, since other formats may hold code"
        raise InputError(f"{folder} has no weights as safetensors {unread}: save the model again with save_pretrained.")


def require_model_folder(folder: Path) -> None:
    """Raise InputError for a folder without config.json; one that holds GGUF files is told to name a file."""
    if (folder / "config.json").is_file():
        return
    file = min(folder.glob("*.gguf"), default=None)
    instead = f"; the GGUF file in it is a backbone by its own name: {file}" if file else ""
    raise InputError(f"{folder} is not a model folder: no config.json{instead}.")


def gguf_config(file: Path) -> Any:
    """The transformers config of a GGUF file, without its weights.

    Raises InputError when there is no such file, the packages it takes are missing or transformers cannot read it.
    """
    from transformers import AutoConfig

    return _read(AutoConfig, file)


def converted(file: Path, notice: Notice) -> Path:
    """The Hugging Face folder of a GGUF file: float32 weights, tokenizer, chat template.

    Built when it is first asked for, then taken from the cache by the content of `file`; `notice` hears of a damaged
    copy that is built again. Raises InputError as `gguf_config`.
    """
    _require_file(file)
    key = {"format": 1, "sha256": file_digest(file)}
    return cached_folder(name=file.stem.lower(), key=key, build=lambda folder: _convert(file, folder), notice=notice)


def _convert(file: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    quantised = _read(AutoModelForCausalLM, file, dtype=torch.float32)
    config = gguf_config(file)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = "float32"
    config.name_or_path = file.stem
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    model.load_state_dict(quantised.state_dict())
    model.generation_config = quantised.generation_config
    model.save_pretrained(folder)
    _read(AutoTokenizer, file).save_pretrained(folder)


def _require_file(file: Path) -> None:
    if not file.is_file():
        raise InputError(f"the GGUF file {file} is not there.")


def _read(kind: Any, file: Path, **options: Any) -> Any:
    _require_file(file)
    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise InputError(f"{file} is a GGUF file, which takes {' and '.join(missing)}: {install_command('gguf')}.")
    with reading_model(file, "GGUF content that transformers can load"):
        return kind.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False, **options)
