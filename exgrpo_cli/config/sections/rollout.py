"""Sampling of fresh rollouts."""

from dataclasses import dataclass
from typing import Literal

from exgrpo_cli.config.checks import require, require_fraction, require_positive


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutSettings:
    """Sampling of fresh rollouts."""

    engine: Literal["hf", "vllm"] = "hf"
    """`hf`: transformers with a KV cache; `vllm`: the extra."""
    group_size: int = 8
    """K: rollouts per question."""
    questions_per_step: int = 32
    """B: questions per step, fresh and experiential together."""
    max_rounds: int = 1
    """Rounds of fresh questions a step draws until B of its fresh groups are mixed; then only those train. 1 is off."""
    temperature: float = 1.0
    """T: every log-prob and entropy of training is of softmax(logits / T)."""
    top_p: float = 1.0
    """Training refuses anything but 1: the log-probs of a truncated distribution are not those of the policy."""
    max_response_tokens: int = 96
    """Response limit in tokens, EOS included."""
    require_eos: bool = True
    """A response cut off at the limit earns 0."""
    max_rows: int = 512
    """Rows decoded at once; waiting rows replace finished ones."""
    logprobs: Literal["auto", "trainer", "engine", "sampler"] = "auto"
    """Behaviour log-probs of fresh rollouts: `trainer` recomputes them; `engine` takes what the rollout engine
    computed, in the ledger and, truncated (`objective.tis_cap`), in the loss; `sampler` takes those of the hf engine,
    and its entropies, for the trainer's own, which checks one rollout in 16: a pass less. "auto" is `sampler` for
    `hf` rollouts of a `torch` policy in float32 on a CPU, where both are the same numbers but for rounding, else
    `trainer`."""
    tensor_parallel: int = 1
    """GPUs per vllm engine."""
    gpu_memory_fraction: float = 0.5
    """Share of a GPU's memory the vllm engine may take while awake."""

    def __post_init__(self) -> None:
        require_positive(
            "rollout",
            self,
            "temperature",
            "questions_per_step",
            "max_rounds",
            "max_response_tokens",
            "max_rows",
            "tensor_parallel",
        )
        require(self.group_size >= 2, "rollout.group_size", self.group_size, "at least 2: advantages need a group")
        require(self.top_p == 1.0, "rollout.top_p", self.top_p, "1.0: the ratios of a truncated policy are undefined")
        require_fraction("rollout", self, "gpu_memory_fraction")
        if self.engine != "hf":
            bound = "'auto', 'trainer' or 'engine', or rollout.engine = 'hf': no other engine tells entropies"
            require(self.logprobs != "sampler", "rollout.logprobs", self.logprobs, bound)
        if self.engine == "hf":
            bound = "1, or rollout.engine = 'vllm': the hf engine holds the whole model on each rank"
            require(self.tensor_parallel == 1, "rollout.tensor_parallel", self.tensor_parallel, bound)
