"""Memory and disk that a run needs, from the shape of its backbone, before anything is loaded.

Weights, gradients and optimizer state are exact counts; activations are the tensors that autograd keeps in a decoder
layer with fused attention; the rest is named below. On a GPU a vLLM engine takes its share of the card while it is
awake, whatever it needs: what the trainer leaves, with the optimizer state that the first update makes, or the share
that is asked for, which is lowered where the trainer leaves less. So are the rows that hf decodes at once.
"""

import math
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from exgrpo_cli.algo.batching import MOST_REPEATED, SLICED_WIDTH
from exgrpo_cli.base.errors import InputError
from exgrpo_cli.config import names, sections
from exgrpo_cli.config.sections.run import BUCKET_ELEMENTS, VLLM_RANKS, BackboneSettings, LoraSettings, TinySettings
from exgrpo_cli.config.settings import Config
from exgrpo_cli.models import adapters, folders
from exgrpo_cli.presets import about_backbone

CONTEXT_BYTES = 2 * 2**30
"""CUDA context, communication buffers and what the allocator cannot hand out again."""
REFERENCE_GPU_BYTES = 80 * 10**9
"""The GPU that is planned for when this machine has none: 80 GB, as in the published runs."""
ENGINE_STEP_TOKENS = 8192
"""Tokens of one step of a vLLM engine, which it makes room for at its start."""
SAMPLING_TENSORS = 4
"""Float32 tensors of rows x vocabulary alive while tokens are drawn."""
TILE_ELEMENTS, GPU_TILE_ELEMENTS = 2**24, 2**26
"""Logits of a tile, those of `algo.logprobs`, which imports torch: a plan needs none."""
TILE_TENSORS = 3
"""Float32 tensors of one logits tile alive at the peak, which is in the forward pass."""
GATHERED = 10**9
"""Parameters that DeepSpeed gathers (stage 3), or steps (its sub-groups), at a time, unless told otherwise."""
NCCL_BYTES = 2**30
"""Buffers between several GPUs: channels of the trainer's group and of the rollout engine's."""
MOST_SHARE = 0.9
"""Most of a GPU that a vLLM engine takes unasked."""
LARGEST_GPU_COUNT = 64
CHECKPOINT_BYTES = 12
"""Bytes of a saved weight, whatever the model computes in: float32, and Adam's two moments."""


MOST_LAYERS = 10_000
"""A model of more is a mistake in its config.json, and would take hours to be counted."""
TINY_VOCABULARY = 264
"""Tokens of the tiny backbone: bytes and markup."""


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

    @property
    def linear(self) -> dict[str, tuple[int, int]]:
        """Ins and outs of a layer's linear parts, by the names that an adapter's targets have."""
        hidden, ffn = self.hidden_size, self.ffn_size
        attention = {"q_proj": (hidden, self.query_size), "o_proj": (self.query_size, hidden)}
        attention |= dict.fromkeys(("k_proj", "v_proj"), (hidden, self.kv_size))
        return attention | {"gate_proj": (hidden, ffn), "up_proj": (hidden, ffn), "down_proj": (ffn, hidden)}

    def adapted(self, lora: LoraSettings) -> list[tuple[int, int]]:
        """Ins and outs of what is adapted in all layers; nothing without an adapter."""
        named = [each.strip() for each in lora.targets.split(",")]
        chosen = [size for name, size in self.linear.items() if lora.targets == "all-linear" or name in named]
        return chosen * self.num_layers if lora.rank > 0 else []

    def num_trained(self, lora: LoraSettings) -> int:
        """Parameters of the adapter, or of the model."""
        return lora.rank * sum(map(sum, self.adapted(lora))) if lora.rank > 0 else self.num_parameters


def backbone_shape(backbone: BackboneSettings, tiny: TinySettings) -> Shape | None:
    """The shape of a run's backbone, or None for a hub id that is neither a preset's nor in the local cache.

    Raises InputError when a local folder's config.json cannot be read.
    """
    if backbone.source == "tiny":
        return counted_shape(model_type="qwen2", vocab_size=TINY_VOCABULARY, **tiny.shape)
    if about := about_backbone(backbone.source):
        return counted_shape(**about["shape"])
    config = architecture(backbone, tiny)
    if config is None:
        return None
    with folders.reading_model(f"backbone.source {backbone.source!r}", "usable config.json"):
        return shape_of(config)


def counted_shape(**sizes: Any) -> Shape:
    """Sizes from the fields of a config of llama or qwen2, counted without transformers, whose import takes seconds.

    A layer has q, k, v (in Qwen2 with biases), o, gate, up, down and two norms. Raises InputError for another field.
    """
    for name in sizes:
        sections.require_known("field of [about.shape]", name, ("model_type", "vocab_size", *TinySettings().shape))
    config, hidden = SimpleNamespace(**sizes), sizes["hidden_size"]
    kv_size = hidden // config.num_attention_heads * config.num_key_value_heads
    biases = hidden + 2 * kv_size if config.model_type == "qwen2" else 0
    layer = hidden * (2 * hidden + 2 * kv_size + 3 * config.intermediate_size + 2) + biases
    embeddings = (1 if config.tie_word_embeddings else 2) * config.vocab_size * hidden
    return _shape(config, embeddings + config.num_hidden_layers * layer + hidden)


def shape_of(config: Any) -> Shape:
    """Sizes of a transformers config; the model is built on the meta device, so that nothing is allocated."""
    import torch
    from transformers import AutoModelForCausalLM

    if config.num_hidden_layers > MOST_LAYERS:
        raise InputError(f"num_hidden_layers = {config.num_hidden_layers} is out of range: at most {MOST_LAYERS}.")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", trust_remote_code=False)
    return _shape(config, sum(parameter.numel() for parameter in model.parameters()))


def _shape(config: Any, num_parameters: int) -> Shape:
    """Sizes by the names that a transformers config has for them."""
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Shape(
        num_parameters=num_parameters, num_layers=config.num_hidden_layers, vocab_size=config.vocab_size,
        hidden_size=config.hidden_size, ffn_size=config.intermediate_size,
        query_size=config.num_attention_heads * head_size, kv_size=config.num_key_value_heads * head_size,
    )  # fmt: skip


def architecture(backbone: BackboneSettings, tiny: TinySettings) -> Any:
    """The transformers config of a backbone, or None where only the hub has it: nothing is downloaded.

    Raises InputError when a local folder's config.json cannot be read.
    """
    if backbone.source == "tiny":
        from exgrpo_cli.models.tiny import MAX_TOKENS, make_config, make_tokenizer

        return make_config(tiny, make_tokenizer(max_tokens=MAX_TOKENS))
    from transformers import AutoConfig

    if about := about_backbone(backbone.source):
        return AutoConfig.for_model(**about["shape"])
    folder = Path(backbone.source).expanduser()
    if adapters.is_adapter(folder):
        base = adapters.base_of(folder)
        return architecture(base.backbone, base.tiny)
    if names.is_gguf(backbone.source):
        return folders.gguf_config(folder)
    if folder.is_dir():
        folders.require_model_folder(folder)
    options = {"revision": backbone.revision, "local_files_only": True, "trust_remote_code": False}
    try:
        with folders.reading_model(f"backbone.source {backbone.source!r}", "usable config.json"):
            return AutoConfig.from_pretrained(backbone.source, **options)
    except InputError:
        if folder.is_dir():
            raise
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Bytes per GPU (per rank on a CPU), by part."""

    gpus: int
    weights: int
    """The trainer's; under ZeRO stage 3 its shard and what is gathered around a layer. With whole copies beside them:
    the reference of a KL penalty, and what hf rollouts sample with under stage 3."""
    gradients: int
    buckets: int
    """DeepSpeed's, in which gradients are reduced, with a float32 copy of narrower ones, and those of head and
    embedding, which are larger and wait as they are."""
    optimizer: int
    """Adam's two moments, and the float32 master weights beside narrower ones; DeepSpeed has masters of all, and at
    stage 1 keeps the sums of narrow gradients."""
    optimizer_on_host: int
    """Optimizer state and gradients kept in main memory instead (`optim.offload`), or room for the state between
    updates (`optim.offload_during_rollouts`), per rank."""
    activations: int
    """Kept for the backward pass of one micro-batch; with checkpointing also what a layer made again takes beyond the
    logits, which are gone by then."""
    layer: int
    """Memory that one decoder layer takes of a micro-batch that is scored."""
    logits: int
    """Logit tiles of log-probs and entropies."""
    rollout_engine: int
    """The rollout engine while awake: its share of the GPU, or weights (where it has its own), cache and sampling."""
    gpu_memory_fraction: float
    """Share of a GPU for a vllm engine while it is awake: the setting, or what fits beside the trainer; 0 elsewhere."""
    max_rows: int
    """Rows decoded at once: the setting, or as many as hf has room for beside the trainer on a GPU."""
    engine_asleep: int
    """Part of it that stays during the update: vllm's CPU build gives nothing back."""
    engine_on_host: int
    """Weights that vllm keeps in main memory while it sleeps, because `lora.sync` brings an adapter alone."""
    context: int
    """Driver and framework; 0 on a CPU."""

    @property
    def peaks(self) -> dict[str, int]:
        """Most bytes of each phase from step 2 on.

        While the engine is asleep there are the weights, and the optimizer's state unless that rests. Scoring, of
        stored candidates (drawing) and of rollouts, has one layer or its logits at a time. New weights go to an
        engine that is awake where it has some of its own; hf has no cache then. During an update the engine sleeps, or
        has freed its cache.
        """
        asleep = self.weights + self.context + self.engine_asleep + (0 if self.optimizer_on_host else self.optimizer)
        rollouts = asleep - self.engine_asleep + self.rollout_engine
        trainer = self.weights + self.optimizer + self.context + self.engine_asleep
        scoring = trainer + max(self.layer, self.logits)
        update = trainer + self.logits + self.gradients + self.buckets + self.activations
        sync = rollouts if self.gpu_memory_fraction or self.engine_asleep else asleep
        return dict(drawing=scoring, sync=sync, rollouts=rollouts, asleep=asleep, scoring=scoring, update=update)

    @property
    def peak(self) -> int:
        """The larger of update and rollouts."""
        return max(self.peaks["update"], self.peaks["rollouts"])

    def parts(self) -> dict[str, Any]:
        """All of it by name, with the peaks of both phases."""
        return asdict(self) | {"update_peak": self.peaks["update"], "rollout_peak": self.peaks["rollouts"]}


def memory_plan(
    shape: Shape,
    config: Config,
    *,
    gpus: int,
    on_gpu: bool = True,
    gpu_bytes: int = REFERENCE_GPU_BYTES,
    longest_prompt: int | None = None,
) -> MemoryPlan:
    """Memory of one of `gpus` ranks, each on a GPU of `gpu_bytes`; `on_gpu` false is the same on a CPU.

    `longest_prompt` is in tokens; None is the limit of the settings.
    """
    vllm, kept = config.rollout.engine == "vllm", on_gpu and config.lora.sync == "adapter"
    longest = (longest_prompt or config.data.max_prompt_tokens) + config.rollout.max_response_tokens
    trained = _trained_bytes(shape, config, gpus)
    context = CONTEXT_BYTES + NCCL_BYTES * (gpus > 1) if on_gpu else 0
    state = 0 if trained["optimizer_on_host"] else trained["optimizer"]
    free, rows, share = gpu_bytes - trained["weights"] - state - context, config.rollout.max_rows, 0.0
    roomy = free * 19 // 20
    if on_gpu and not vllm:
        # Waiting rows take the places of those that end; fewer than a group would be no use. Moving them takes a bit.
        rows = min(rows, max(roomy // _row_bytes(shape, config, longest), config.rollout.group_size))
    engine = _engine_bytes(shape, config, gpus, longest, rows, on_gpu=on_gpu)
    if vllm and on_gpu:
        share, left = config.rollout.gpu_memory_fraction, free
        if not share:
            share, left = MOST_SHARE, roomy if engine <= roomy else free
        # In whole percents where it is lowered.
        share = share if share * gpu_bytes <= left else max(0, math.floor(100 * left / gpu_bytes)) / 100
    return MemoryPlan(
        **trained,
        **_activation_bytes(shape, config, gpus, longest, on_gpu=on_gpu),
        gpus=gpus,
        rollout_engine=max(int(share * gpu_bytes), engine),
        gpu_memory_fraction=share,
        max_rows=rows,
        engine_asleep=engine if vllm and not on_gpu else 0,
        engine_on_host=shape.num_parameters * _width(config) // config.rollout.tensor_parallel if kept else 0,
        context=context,
    )


def fewest_gpus(shape: Shape, config: Config, *, gpu_memory_bytes: int) -> int | None:
    """Smallest power of two of such GPUs on which the plan fits, or None up to LARGEST_GPU_COUNT."""
    counts = [2**power for power in range(LARGEST_GPU_COUNT.bit_length())]
    plans = (memory_plan(shape, config, gpus=gpus, gpu_bytes=gpu_memory_bytes) for gpus in counts)
    return next((plan.gpus for plan in plans if plan.peak <= gpu_memory_bytes), None)


def _trained_bytes(shape: Shape, config: Config, gpus: int) -> dict[str, int]:
    """Weights, gradients and optimizer state of each of `gpus` ranks, as parts of a plan.

    Both engines sum gradients in float32. Stage 1 of a bfloat16 model keeps the sums from update to update, as part of
    its state, and holds the gradients of a pass beside them; stage 3 copies those of the sub-group it steps. Adam has
    two moments, and a float32 master of narrower weights, with DeepSpeed of all. Offloaded, two copies of the gradients
    and one of the weights stand beside them in main memory, and gradients pass through the GPU, the largest tensor at a
    time. With an adapter hf samples with a copy of what it changes, and the reference is the model without it.
    """
    optim, lora, width = config.optim, config.lora, _width(config)
    stage = optim.zero_stage if optim.engine_of(gpus) == "deepspeed" else 0
    weights = whole = shape.num_parameters * width
    parameters = shape.num_trained(lora)
    moments = 8 if optim.moments == "float32" else 2
    buckets, gradients, state = 0, 4 * parameters, parameters * (moments + 4 * (width == 2 or stage > 0))
    if stage:
        kept = 4 * parameters * (stage == 1 and width == 2)
        state, gradients = state // gpus + kept, (gradients - kept // 2, gradients // gpus, 0)[stage - 1]
        head = 0 if lora.rank > 0 else shape.vocab_size * shape.hidden_size
        buckets = BUCKET_ELEMENTS * (width if stage == 2 else 4) + 2 * width * head
        buckets += 4 * max(min(parameters, BUCKET_ELEMENTS), head) * (width == 2)
    if stage == 3:
        shard = parameters // gpus
        weights, gradients = min(whole, whole // gpus + GATHERED * width), 4 * (shard + min(shard, GATHERED))
    on_host = state if optim.offload_during_rollouts else 0
    if stage and optim.offload:
        gradients, state, on_host = 4 * shape.vocab_size * shape.hidden_size, 0, parameters * (20 + width) // gpus
    sampled = config.rollout.engine == "hf"
    if lora.rank > 0:
        weights += width * (parameters + sampled * sum(ins * outs for ins, outs in shape.adapted(lora)))
    else:
        weights += whole * ((config.objective.kl_coefficient > 0) + (stage == 3 and sampled))
    return dict(weights=weights, gradients=gradients, buckets=buckets, optimizer=state, optimizer_on_host=on_host)


def _activation_bytes(shape: Shape, config: Config, gpus: int, longest: int, *, on_gpu: bool) -> dict[str, int]:
    """Tensors that autograd keeps of a micro-batch of rows of `longest` tokens, those of a layer, and the logit tiles,
    as parts of a plan.

    With checkpointing the inputs of all layers are kept. Around the head stand the norm's input, that in float32, and
    its output.
    """
    width, layer = _width(config), layer_bytes(shape, config, gpus, longest, on_gpu=on_gpu)
    tokens = min(max(config.optim.microbatch_tokens, longest), _trained_rows(config, gpus) * longest)
    tiles = TILE_TENSORS * min(GPU_TILE_ELEMENTS if on_gpu else TILE_ELEMENTS, tokens * shape.vocab_size) * 4
    kept = shape.num_layers * layer
    if config.backbone.gradient_checkpointing:
        kept = shape.num_layers * shape.hidden_size * width * tokens + max(0, layer - tiles)
    return dict(activations=kept + (2 * width + 4) * shape.hidden_size * tokens, layer=layer, logits=tiles)


def layer_bytes(shape: Shape, config: Config, gpus: int, longest: int, *, on_gpu: bool) -> int:
    """Bytes that autograd keeps of one decoder layer for a micro-batch of rows of `longest` tokens.

    Each of two norms keeps its input, its normalised input (always float32) and its output, the gated feed-forward
    gate, activated gate, up-projection and product. Attention keeps queries and keys (rotated), values and output, of
    every row with its prompt, which rows share everywhere else, and its output once more for the tokens; by segments,
    where that would be much of it, the keys alone; by slices, as on a CPU, nothing twice.
    """
    budget, most = config.optim.microbatch_tokens, _trained_rows(config, gpus) * longest
    response, size = config.rollout.max_response_tokens, config.rollout.group_size
    group, rows = longest - response + size * response, size * longest
    tokens, cells = min(max(budget, longest), most), min(max(budget * rows // group, longest), most)
    queries, keys, once_more, repeated = cells, cells, tokens, rows > MOST_REPEATED * group
    if not on_gpu and (repeated or shape.query_size >= SLICED_WIDTH):
        queries, keys, once_more = tokens, tokens, 0
    elif repeated and _width(config) < 4:
        # Prompts are segments of their own.
        queries, keys = cells * group // rows, cells + cells * (longest - response) // rows
    attention = shape.query_size * (2 * queries + once_more) + 2 * shape.kv_size * keys
    elements = (4 * shape.hidden_size + 4 * shape.ffn_size) * tokens + attention
    if adapted := shape.adapted(config.lora):
        # Each keeps the first factor's output; norms whose weights are frozen keep no normalised input of that width.
        elements += (config.lora.rank * len(adapted) // shape.num_layers - 2 * shape.hidden_size) * tokens
    return elements * _width(config) + 2 * 4 * shape.hidden_size * tokens


def _trained_rows(config: Config, gpus: int) -> int:
    """Rows of a mini-batch on one of `gpus` ranks: at most one above the mean."""
    groups = -(-config.rollout.questions_per_step // config.optim.minibatches)
    return -(-groups * config.rollout.group_size // gpus) + (gpus > 1)


def _row_bytes(shape: Shape, config: Config, longest: int) -> int:
    """Cache and logits of a row that hf decodes."""
    cache = 2 * shape.num_layers * shape.kv_size * _width(config) * longest
    return cache + SAMPLING_TENSORS * shape.vocab_size * 4


def _engine_bytes(shape: Shape, config: Config, gpus: int, longest: int, rows: int, *, on_gpu: bool) -> int:
    """Least that the rollout engine needs: weights where it has its own, cache at full length of `rows`, and logits.

    vllm should have a cache for one group, and makes room for its largest step and the logits of all its rows. An
    adapter that it applies itself has a rank of its own there, and on a CPU factors are gathered for each token. hf
    decodes all that is asked of a rank at once: the rollouts of a step, or those of the held-out questions.
    """
    rollout, validation, width = config.rollout, config.validation, _width(config)
    logits, row = SAMPLING_TENSORS * shape.vocab_size * 4, _row_bytes(shape, config, longest)
    if rollout.engine == "vllm":
        cache = min(rows, rollout.group_size) * (row - logits)
        step = (4 * shape.hidden_size + 2 * shape.ffn_size) * width * max(ENGINE_STEP_TOKENS, rows)
        if config.lora.sync == "adapter":
            lora_rank = next(size for size in VLLM_RANKS if size >= config.lora.rank)
            cache += lora_rank * sum(map(sum, shape.adapted(config.lora))) * width
            step += 0 if on_gpu else lora_rank * shape.ffn_size * 4 * max(ENGINE_STEP_TOKENS, rows)
        held = (shape.num_parameters * width, cache)
        return sum(each // rollout.tensor_parallel for each in held) + step + logits * rows
    asked = -(-rollout.groups_under_way // gpus) * rollout.group_size
    if config.data.has_heldout:
        known = config.arithmetic.num_heldout if config.data.heldout == "arithmetic" else rollout.max_rows * gpus
        asked = max(asked, -(-min(known, validation.max_questions or known) // gpus) * validation.samples)
    packed = 0 if on_gpu or width != 4 else shape.num_parameters * width
    return packed + min(rows, asked) * row


def _width(config: Config) -> int:
    """Bytes of a weight."""
    return 2 if config.backbone.dtype == "bfloat16" else 4


def disk_bytes(config: Config, shape: Shape) -> int:
    """Bytes of checkpoints and model, which no run can do without: those kept, the best one, one being written.

    A checkpoint holds weights, optimizer, and the weights once more as a Hugging Face folder; or an adapter's.
    """
    run, model = config.run, shape.num_parameters * _width(config)
    trained = shape.num_trained(config.lora)
    saved = math.ceil(run.steps / run.save_every)
    kept = min(saved, run.keep_checkpoints) if run.keep_checkpoints else saved
    num_checkpoints = kept + 1 + (config.validation.every > 0) + len(config.validation.forks)
    return num_checkpoints * (CHECKPOINT_BYTES + _width(config)) * trained + model


def require_disk(needed: int, output: Path) -> None:
    """Raise InputError where the disk of `output` has less room than `needed` bytes."""
    place = next(each for each in (output.absolute(), *output.absolute().parents) if each.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        room = f"{size(needed)} for checkpoints and the model, and {place} has {size(free)} free"
        raise InputError(f"{output} will take {room}: choose another --output, or lower run.keep_checkpoints.")


def size(num_bytes: int) -> str:
    """A number of bytes as people read it."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
