"""The memory plan: what a run needs on each GPU, part by part, before anything is loaded.

An estimate from the shape alone. Weights, gradients and optimizer state are exact counts; activations are the tensors
that autograd keeps in a decoder layer with fused attention (no token-by-token matrix); the rest is named below.
"""

from dataclasses import dataclass

from exgrpo_cli.algo.logprobs import TILE_ELEMENTS
from exgrpo_cli.config.settings import Config
from exgrpo_cli.machine.shapes import Shape

GIB = 2**30
CONTEXT_BYTES = 2 * GIB
"""CUDA context, communication buffers and what the allocator cannot hand out again."""
TILE_TENSORS = 5
"""Tensors of one logits tile alive at the peak of the log-prob's backward pass, in float32."""
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
    """Optimizer state and gradients kept in main memory instead (`optim.offload`), per rank."""
    activations: int
    """Kept for the backward pass of one micro-batch."""
    logprobs: int
    """Logit tiles of log-probs and entropies."""
    rollout_weights: int
    """The rollout engine's own copy; 0 where it shares the trainer's."""
    kv_cache: int
    """Keys and values of one group (vllm) or of all rows decoded at once (hf), each at full length."""
    context: int
    """Driver and framework; 0 on a CPU."""
    kv_bytes_per_token: int

    @property
    def update_peak(self) -> int:
        """During the update; a colocated vllm engine sleeps then."""
        resident = self.weights + self.copies + self.gradients + self.optimizer + self.context
        return resident + self.activations + self.logprobs + (0 if self.rollout_weights else self.kv_cache)

    @property
    def rollout_peak(self) -> int:
        """During rollouts: the trainer's weights and optimizer state stay where they are."""
        resident = self.weights + self.copies + self.optimizer + self.context
        return resident + self.rollout_weights + self.kv_cache

    @property
    def peak(self) -> int:
        return max(self.update_peak, self.rollout_peak)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTokens:
    """Upper bounds of one step, all ranks together."""

    rollouts: int
    generated: int
    trained: int
    """Prompt and response tokens through one forward and backward pass."""


def memory_plan(shape: Shape, config: Config, *, gpus: int, on_gpu: bool = True) -> MemoryPlan:
    """Memory of one of `gpus` ranks; `on_gpu` false is the same on a CPU, without a driver's share."""
    width, stage = _width(config), _stage(config)
    whole = shape.num_parameters * width
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    tokens = max(config.optim.microbatch_tokens, longest)
    state, on_host = optimizer_bytes(shape, config, gpus)
    kv_bytes = 2 * shape.num_layers * shape.kv_size * width
    vllm = config.rollout.engine == "vllm"
    parallel = config.rollout.tensor_parallel if vllm else 1
    rows = config.rollout.group_size if vllm else config.rollout.max_rows
    return MemoryPlan(
        gpus=gpus,
        weights=min(whole, whole // gpus + GATHERED * width) if stage == 3 else whole,
        copies=whole * ((config.objective.kl_coefficient > 0) + (stage == 3 and not vllm)),
        gradients=gradient_bytes(shape, config, gpus),
        optimizer=state,
        optimizer_on_host=on_host,
        activations=activation_bytes(shape, tokens, width, checkpointing=config.backbone.gradient_checkpointing),
        logprobs=TILE_TENSORS * min(TILE_ELEMENTS, tokens * shape.vocab_size) * 4,
        rollout_weights=whole // parallel if vllm else 0,
        kv_cache=rows * longest * kv_bytes // parallel,
        context=CONTEXT_BYTES if on_gpu else 0,
        kv_bytes_per_token=kv_bytes,
    )


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
        return shape.num_parameters * (12 if width == 2 else 8), 0
    if config.optim.offload:
        return 0, shape.num_parameters * (12 + 8 + width) // gpus
    return shape.num_parameters * 12 // gpus, 0


def _width(config: Config) -> int:
    """Bytes of a weight."""
    return 2 if config.backbone.dtype == "bfloat16" else 4


def _stage(config: Config) -> int:
    """The ZeRO stage; 0 for the torch engine."""
    return config.optim.zero_stage if config.optim.engine == "deepspeed" else 0


def activation_bytes(shape: Shape, tokens: int, width: int, *, checkpointing: bool) -> int:
    """Bytes that autograd keeps for `tokens` tokens at `width` bytes per element: every layer's tensors, or with
    checkpointing one layer's and the inputs of all others."""
    layer = layer_activation_bytes(shape, width) * tokens
    if not checkpointing:
        return shape.num_layers * layer
    return (shape.num_layers - 1) * shape.hidden_size * width * tokens + layer


def layer_activation_bytes(shape: Shape, width: int) -> int:
    """Bytes kept per token in one decoder layer.

    Each of two norms keeps its input, its normalised input (always float32) and its output; attention keeps queries and
    keys (rotated), values and its output; the gated feed-forward keeps gate, activated gate, up-projection and product.
    """
    norms = 4 * shape.hidden_size * width + 2 * shape.hidden_size * 4
    attention = (2 * shape.query_size + 2 * shape.kv_size) * width
    return norms + attention + 4 * shape.ffn_size * width


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
    fits = (gpus for gpus in counts if memory_plan(shape, config, gpus=gpus).peak <= gpu_memory_bytes)
    return next(fits, None)
