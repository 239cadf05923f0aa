"""The memory plan: what a run needs on each GPU, part by part, before anything is loaded.

An estimate from the shape and what is asked for. Weights, gradients and optimizer state are exact counts; activations
are the tensors that autograd keeps in a decoder layer with fused attention (no token-by-token matrix); the rest is
named below. On a GPU a vLLM engine takes its fraction of the card while it is awake, whatever it needs; the fraction is
lowered where the trainer, with the optimizer state that the first update makes, leaves less.
"""

import math
from dataclasses import dataclass

from exgrpo_cli.algo.batching import MOST_REPEATED
from exgrpo_cli.algo.logprobs import GPU_TILE_ELEMENTS, TILE_ELEMENTS
from exgrpo_cli.config.settings import Config
from exgrpo_cli.machine.shapes import Shape

GIB = 2**30
CONTEXT_BYTES = 2 * GIB
"""CUDA context, communication buffers and what the allocator cannot hand out again."""
REFERENCE_GPU_BYTES = 80 * 10**9
"""The GPU that is planned for when this machine has none: 80 GB, as in the published runs."""
ENGINE_STEP_TOKENS = 8192
"""Tokens of one step of a vLLM engine, which it makes room for at its start."""
SAMPLING_TENSORS = 4
"""Float32 tensors of rows x vocabulary alive while tokens are drawn."""
TILE_TENSORS = 3
"""Float32 tensors of one logits tile alive at the peak, which is in the forward pass; the backward pass has two and a
narrow one."""
GATHERED = 10**9
"""Parameters that DeepSpeed gathers (stage 3), or steps (its sub-groups), at a time, unless told otherwise."""
LARGEST_GPU_COUNT = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Bytes per GPU (per rank on a CPU), by part."""

    gpus: int
    weights: int
    """The trainer's; under ZeRO stage 3 its shard and what is gathered around a layer."""
    copies: int
    """Whole copies beside them: the reference of a KL penalty, and what hf rollouts sample with under stage 3."""
    gradients: int
    optimizer: int
    """Adam's two moments, and the float32 master weights beside narrower ones; DeepSpeed has masters of all."""
    optimizer_on_host: int
    """Optimizer state and gradients kept in main memory instead (`optim.offload`), or room for the state between
    updates (`optim.offload_during_rollouts`), per rank."""
    optimizer_asleep: int
    """What of the optimizer's stays on the GPU during rollouts."""
    activations: int
    """Kept for the backward pass of one micro-batch."""
    recomputed: int
    """One layer's, made again in the backward pass with gradient checkpointing, when the logit tiles are gone."""
    logprobs: int
    """Logit tiles of log-probs and entropies."""
    rollout_weights: int
    """The rollout engine's own copy; 0 where it shares the trainer's."""
    kv_cache: int
    """Keys and values of one group, the least that vllm should have, or of all rows that hf decodes at once, each at
    full length."""
    sampling: int
    """The rollout engine's activations and logits."""
    gpu_memory_fraction: float
    """Of a GPU, for a vllm engine while it is awake: the setting, or what fits beside the trainer; 0 elsewhere."""
    rollout_engine: int
    """All that the rollout engine takes while awake: that fraction, or weights, cache and sampling."""
    engine_asleep: int
    """What of it stays during the update: vllm's CPU build gives nothing back."""
    context: int
    """Driver and framework; 0 on a CPU."""
    kv_bytes_per_token: int

    @property
    def update_peak(self) -> int:
        """During the update; the rollout engine sleeps, or has freed its cache."""
        resident = self.weights + self.copies + self.gradients + self.optimizer + self.context + self.engine_asleep
        return resident + self.activations + max(self.logprobs, self.recomputed)

    @property
    def scoring_peak(self) -> int:
        """While log-probs are computed without a gradient: of layers hardly anything, and the logit tiles."""
        resident = self.weights + self.copies + self.optimizer + self.context + self.engine_asleep
        return resident + self.logprobs

    @property
    def rollout_peak(self) -> int:
        """During rollouts from step 2 on: the trainer's weights stay where they are, and mostly its optimizer state."""
        return self.weights + self.copies + self.optimizer_asleep + self.context + self.rollout_engine

    @property
    def asleep_peak(self) -> int:
        """Once the rollout engine sleeps, from step 2 on: the trainer as it is during rollouts."""
        return self.weights + self.copies + self.optimizer_asleep + self.context + self.engine_asleep

    @property
    def sync_peak(self) -> int:
        """While new weights are handed over: an engine with weights of its own is awake at the end, hf has no cache."""
        return self.rollout_peak if self.rollout_weights else self.asleep_peak

    @property
    def peak(self) -> int:
        """The larger of the two peaks, in bytes."""
        return max(self.update_peak, self.rollout_peak)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTokens:
    """Upper bounds of one step, all ranks together."""

    rollouts: int
    generated: int
    trained: int
    """Prompt and response tokens through one forward and backward pass."""


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
    width, stage = _width(config), _stage(config)
    whole = shape.num_parameters * width
    longest = (longest_prompt or config.data.max_prompt_tokens) + config.rollout.max_response_tokens
    tokens = min(max(config.optim.microbatch_tokens, longest), trained_rows(config, gpus) * longest)
    state, on_host = optimizer_bytes(shape, config, gpus)
    asleep = 0 if config.optim.offload_during_rollouts else state
    kv_bytes = 2 * shape.num_layers * shape.kv_size * width
    vllm = config.rollout.engine == "vllm"
    parallel = config.rollout.tensor_parallel if vllm else 1
    rows = min(config.rollout.max_rows, config.rollout.group_size if vllm else asked_rows(config, gpus))
    weights = min(whole, whole // gpus + GATHERED * width) if stage == 3 else whole
    copies = whole * ((config.objective.kl_coefficient > 0) + (stage == 3 and not vllm))
    context = CONTEXT_BYTES if on_gpu else 0
    engine_weights, kv_cache = (whole // parallel if vllm else 0), rows * longest * kv_bytes // parallel
    sampling = sampling_bytes(shape, config, rows, width)
    least = engine_weights + kv_cache + sampling
    checkpointing, cells = config.backbone.gradient_checkpointing, attention_cells(config, gpus, longest)
    tile = GPU_TILE_ELEMENTS if on_gpu else TILE_ELEMENTS
    fraction = 0.0
    if vllm and on_gpu:
        free = gpu_bytes - weights - copies - asleep - context
        fraction = affordable_fraction(config.rollout.gpu_memory_fraction, free / gpu_bytes, least / gpu_bytes)
    return MemoryPlan(
        gpus=gpus,
        weights=weights,
        copies=copies,
        gradients=gradient_bytes(shape, config, gpus),
        optimizer=state,
        optimizer_on_host=on_host,
        optimizer_asleep=asleep,
        activations=activation_bytes(shape, tokens, width, checkpointing=checkpointing, cells=cells),
        recomputed=layer_bytes(shape, tokens, width, cells=cells) if checkpointing else 0,
        logprobs=TILE_TENSORS * min(tile, tokens * shape.vocab_size) * 4,
        rollout_weights=engine_weights,
        kv_cache=kv_cache,
        sampling=sampling,
        gpu_memory_fraction=fraction,
        rollout_engine=int(fraction * gpu_bytes) if fraction else least,
        engine_asleep=least if vllm and not on_gpu else 0,
        context=context,
        kv_bytes_per_token=kv_bytes,
    )


def affordable_fraction(wanted: float, free: float, least: float) -> float:
    """Share of a GPU for an engine that needs `least` of it, where `free` is left: `wanted`, or as much as fits.

    In whole percents where it is lowered. Where not even `least` is free it is no less than that, so that the plan says
    by how much the GPU is too small.
    """
    if wanted <= free:
        return wanted
    return min(wanted, max(math.floor(100 * free) / 100, least))


def asked_rows(config: Config, gpus: int) -> int:
    """Most rollouts asked of one of `gpus` ranks at once: those of a step, or of the held-out questions."""
    rollout, validation = config.rollout, config.validation
    of_step = -(-rollout.questions_per_step // gpus) * rollout.group_size
    if not config.data.heldout:
        return of_step
    known = config.arithmetic.num_heldout if config.data.heldout == "arithmetic" else rollout.max_rows * gpus
    questions = min(known, validation.max_questions or known)
    return max(of_step, -(-questions // gpus) * validation.samples)


def trained_rows(config: Config, gpus: int) -> int:
    """Rows of a mini-batch on one of `gpus` ranks: at most one above the mean."""
    groups = -(-config.rollout.questions_per_step // config.optim.minibatches)
    return -(-groups * config.rollout.group_size // gpus) + (gpus > 1)


def sampling_bytes(shape: Shape, config: Config, rows: int, width: int) -> int:
    """Activations and logits of the rollout engine; a vllm engine makes room for its largest step and all its rows."""
    if config.rollout.engine == "hf":
        return SAMPLING_TENSORS * rows * shape.vocab_size * 4
    step = max(ENGINE_STEP_TOKENS, config.rollout.max_rows)
    layer = (4 * shape.hidden_size + 2 * shape.ffn_size) * width
    return step * layer + SAMPLING_TENSORS * config.rollout.max_rows * shape.vocab_size * 4


def gradient_bytes(shape: Shape, config: Config, gpus: int) -> int:
    """Gradients on each of `gpus` ranks: both engines sum them in float32.

    Beside the sums, stage 1 of a bfloat16 model holds the gradients of a pass, and stage 3 copies those of the
    sub-group it steps. Offloaded ones pass through the GPU, the largest tensor at a time.
    """
    parameters, stage = shape.num_parameters, _stage(config)
    if stage and config.optim.offload:
        return 4 * shape.vocab_size * shape.hidden_size
    if stage == 3:
        return 4 * (parameters // gpus + min(parameters // gpus, GATHERED))
    if stage == 2:
        return 4 * parameters // gpus
    return parameters * (6 if stage == 1 and _width(config) == 2 else 4)


def optimizer_bytes(shape: Shape, config: Config, gpus: int) -> tuple[int, int]:
    """Optimizer state of each of `gpus` ranks, on its GPU and in main memory.

    Two moments, and a float32 master: of narrower weights, and with DeepSpeed of all. Offloaded, two copies of the
    gradients and one of the weights stand beside them.
    """
    stage, width = _stage(config), _width(config)
    if not stage:
        state = shape.num_parameters * (12 if width == 2 else 8)
        return state, state if config.optim.offload_during_rollouts else 0
    if config.optim.offload:
        return 0, shape.num_parameters * (12 + 8 + width) // gpus
    return shape.num_parameters * 12 // gpus, 0


def _width(config: Config) -> int:
    """Bytes of a weight."""
    return 2 if config.backbone.dtype == "bfloat16" else 4


def _stage(config: Config) -> int:
    """The ZeRO stage; 0 for the torch engine."""
    return config.optim.zero_stage if config.optim.engine == "deepspeed" else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCells:
    """What attention gathers in a micro-batch."""

    queries: int
    keys: int
    mask: int
    """Elements."""


def attention_cells(config: Config, gpus: int, longest: int) -> AttentionCells:
    """Every row with its prompt, which rows share everywhere else; where that is much of it, the keys alone.

    `longest` is the length of a row in tokens, the response at its limit.
    """
    response, size = config.rollout.max_response_tokens, config.rollout.group_size
    group = longest - response + size * response
    gathered = config.optim.microbatch_tokens * size * longest // group
    cells = min(max(gathered, longest), trained_rows(config, gpus) * longest)
    if size * longest <= MOST_REPEATED * group:
        return AttentionCells(queries=cells, keys=cells, mask=0)
    # Prompts are rows of their own.
    prompts = cells * (longest - response) // (size * longest)
    return AttentionCells(queries=cells * group // (size * longest), keys=cells + prompts, mask=cells * response)


def activation_bytes(shape: Shape, tokens: int, width: int, *, checkpointing: bool, cells: AttentionCells) -> int:
    """Bytes that autograd keeps for `tokens` tokens at `width` bytes per element: every layer's tensors, or with
    checkpointing the inputs of all layers; and around the head the final norm's input, that in float32, and what the
    head reads."""
    head = (2 * width + 4) * shape.hidden_size * tokens
    layer = shape.hidden_size * width * tokens if checkpointing else layer_bytes(shape, tokens, width, cells=cells)
    return shape.num_layers * layer + head


def layer_bytes(shape: Shape, tokens: int, width: int, *, cells: AttentionCells) -> int:
    """Bytes that autograd keeps of one layer: what attention keeps is of `cells`, and its output is kept once more for
    the tokens."""
    queries, keys = cells.queries - tokens, cells.keys - tokens
    gathered = 2 * shape.query_size * queries + 2 * shape.kv_size * keys + cells.mask
    return layer_activation_bytes(shape, width) * tokens + (gathered + shape.query_size * tokens) * width


def layer_activation_bytes(shape: Shape, width: int) -> int:
    """Bytes kept per token in one decoder layer.

    Each of two norms keeps its input, its normalised input (always float32) and its output; attention keeps queries and
    keys (rotated), values and its output; the gated feed-forward keeps gate, activated gate, up-projection and product.
    """
    norms = 4 * shape.hidden_size * width + 2 * shape.hidden_size * 4
    return norms + attention_bytes(shape, width) + 4 * shape.ffn_size * width


def attention_bytes(shape: Shape, width: int) -> int:
    """Bytes that attention keeps per cell in one layer: queries, keys, values and output."""
    return (2 * shape.query_size + 2 * shape.kv_size) * width


def step_tokens(config: Config) -> StepTokens:
    """What one step can come to when every prompt and every response is as long as it may be."""
    rollouts = config.rollout.questions_per_step * config.rollout.group_size
    generated = rollouts * config.rollout.max_response_tokens
    return StepTokens(
        rollouts=rollouts, generated=generated, trained=generated + rollouts * config.data.max_prompt_tokens
    )


def fewest_gpus(shape: Shape, config: Config, *, gpu_memory_bytes: int) -> int | None:
    """Smallest power of two of such GPUs on which the plan fits, or None up to LARGEST_GPU_COUNT."""
    counts = [2**power for power in range(LARGEST_GPU_COUNT.bit_length())]
    plans = (memory_plan(shape, config, gpus=gpus, gpu_bytes=gpu_memory_bytes) for gpus in counts)
    return next((plan.gpus for plan in plans if plan.peak <= gpu_memory_bytes), None)
