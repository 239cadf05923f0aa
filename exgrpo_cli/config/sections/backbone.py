"""The language model that is trained, and the built-in tiny one."""

from dataclasses import dataclass, fields
from typing import Literal

from exgrpo_cli.config.checks import require, require_known, require_non_negative, require_positive
from exgrpo_cli.config.names import TINY_TASKS


@dataclass(frozen=True, kw_only=True, slots=True)
class BackboneSettings:
    """The language model that is trained."""

    name: str = "tiny"
    """Name of the backbone preset, or of the model when `source` is given on the command line."""
    source: str = "tiny"
    """`tiny` (built in), a local Hugging Face folder, or a hub id."""
    revision: str = "main"
    """Hub revision."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the forward and backward passes; master weights and optimizer state are float32.

    "auto" is float32 on a CPU, and on a GPU what the model's config.json says, half precision as bfloat16."""
    rope_theta: float = 0.0
    """Overrides the model's rope base; 0 keeps it."""
    max_position_embeddings: int = 0
    """Overrides the model's context window in tokens; 0 keeps it."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: slower, far less memory."""

    def __post_init__(self) -> None:
        require(self.source != "", "backbone.source", self.source, "tiny, a folder, a GGUF file or a hub id")
        require_non_negative("backbone", self, "rope_theta", "max_position_embeddings")


@dataclass(frozen=True, kw_only=True, slots=True)
class TinySettings:
    """The built-in tiny backbone and its supervised warm start."""

    hidden_size: int = 128
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 2
    ffn_size: int = 256
    task: str = "arithmetic"
    """Task whose traces it starts from: `arithmetic`, `countdown` or `modular`. It follows `data.train`."""
    warm_start_steps: int = 300
    """Supervised updates; fewer make a weaker start."""
    warm_start_batch: int = 32
    """Traces per supervised update."""
    seed: int = 0
    """Seed of initialisation and traces; independent of run.seed."""

    def __post_init__(self) -> None:
        require_positive("tiny", self, *(f.name for f in fields(self) if f.name not in ("seed", "task")))
        require_known("tiny.task", self.task, TINY_TASKS)
        require_non_negative("tiny", self, "seed")
        head_size = self.hidden_size / self.num_heads
        bound = f"a number that divides tiny.hidden_size = {self.hidden_size} into heads of an even size"
        require(head_size % 2 == 0, "tiny.num_heads", self.num_heads, bound)
        bound = f"a number that divides tiny.num_heads = {self.num_heads}"
        require(self.num_heads % self.num_kv_heads == 0, "tiny.num_kv_heads", self.num_kv_heads, bound)
