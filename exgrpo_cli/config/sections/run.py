"""The run as a whole: model, rollouts, grading, optimizer, validation; and the job that a cluster is asked for."""

import math
from dataclasses import dataclass, fields
from typing import Literal

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.config.names import GRADERS, TINY_TASKS
from exgrpo_cli.config.sections import (
    refuse_together,
    require,
    require_fraction,
    require_known,
    require_non_negative,
    require_positive,
    setting,
)

Budget = Literal["steps", "generated", "trained", "seconds"]
BUDGET_STEPS = 4
"""Most steps of a run with another budget, as a multiple of `run.steps`: what hardly spends anything ends too."""
MOST_STEPS = 10**9
MOST_SEED = 2**63 - 1
"""The generators of torch and numpy take 64 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """The run as a whole."""

    method: str = "exgrpo"
    """Name of the method preset."""
    regime: str = ""
    """Name of the regime preset: task, start and lengths; empty is the backbone's own."""
    seed: int = setting(0, role="run")
    """Seed of every random stream of the run: questions, rollouts, replay draws, mini-batch order."""
    steps: int = setting(150, resumable=True)
    """Rollout batches to train on."""
    budget: Budget = "steps"
    """Kind of budget: `steps`, or tokens generated, tokens trained or seconds of training up to
    `budget_amount`. The run ends with the step that reaches it, after 4 x steps at the latest, and the learning rate
    follows the share that is spent."""
    budget_amount: float = setting(0.0, role="run")
    """Tokens or seconds of the budget; 0 with `steps`."""
    device: Literal["auto", "cpu", "cuda"] = setting("auto", role="machine", pinned=True)
    """Device of the policy; "auto" takes a GPU when one is visible."""
    threads: int = setting(0, role="machine", pinned=True)
    """CPU threads of torch; 0 takes half the cores and records the choice."""
    nproc: int = setting(1, role="machine", pinned=True, resumable=True)
    """Ranks to start on this host; 0 is one per visible GPU (one on a CPU)."""
    rank_timeout: float = setting(60.0, role="machine", resumable=True)
    """Minutes that ranks wait for one of them before the run ends: more than their rollouts end apart."""
    phase_timeout: float = setting(120.0, role="machine")
    """Minutes a phase (rollout, update, sync, validation, ...) may last before the run ends with the stacks of all its
    ranks in `stacks/`; 0 waits without limit."""
    save_every: int = setting(25, role="machine")
    """Steps between checkpoints; the last step is always saved."""
    keep_checkpoints: int = setting(2, role="machine")
    """Newest checkpoints kept; the best by validation is kept besides. 0 keeps all."""
    samples_per_step: int = setting(4, role="machine")
    """Rollouts a step written to `samples/`."""
    plots: bool = setting(True, role="machine")
    """Draw `plots/` when the run ends; `exgrpo replay-stats` draws the replay ones at any time."""
    log: tuple[str, ...] = setting((), role="machine")
    """Trackers besides the journal: "tensorboard", "wandb", "trackio"."""

    def __post_init__(self) -> None:
        require_positive("run", self, "steps", "rank_timeout", "save_every")
        counts = ("nproc", "threads", "phase_timeout", "keep_checkpoints", "samples_per_step")
        require_non_negative("run", self, "seed", *counts)
        valid = math.isfinite(self.budget_amount) and (self.budget_amount > 0) == (self.budget != "steps")
        bound = f"an amount above 0 for run.budget = {self.budget!r}"
        bound = bound if self.budget != "steps" else "0 with run.budget = 'steps', which run.steps counts"
        require(valid, "run.budget_amount", self.budget_amount, bound)
        require(self.steps <= MOST_STEPS, "run.steps", self.steps, f"at most {MOST_STEPS}")
        require(self.seed <= MOST_SEED, "run.seed", self.seed, f"a whole number from 0 to {MOST_SEED}")
        for name in self.log:
            require_known("run.log", name, ("tensorboard", "wandb", "trackio"))

    @property
    def whole_budget(self) -> int:
        """Steps, tokens or seconds that the run may spend."""
        return self.steps if self.budget == "steps" else int(self.budget_amount)

    @property
    def last_step(self) -> int:
        """Step after which the run ends, whatever is left of another budget."""
        return self.steps if self.budget == "steps" else BUDGET_STEPS * self.steps


@dataclass(frozen=True, kw_only=True, slots=True)
class BackboneSettings:
    """The language model that is trained."""

    name: str = "tiny"
    """Name of the backbone preset, or of the model when `source` is given on the command line."""
    source: str = "tiny"
    """`tiny` (built in), a local Hugging Face folder, or a hub id."""
    revision: str = "main"
    """Hub revision."""
    dtype: Literal["auto", "float32", "bfloat16"] = setting("auto", role="machine")
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
    gpu_memory_fraction: float = setting(0.5, role="machine")
    """Share of a GPU's memory the vllm engine may take while awake."""

    def __post_init__(self) -> None:
        counts = ("questions_per_step", "max_rounds", "max_response_tokens", "max_rows", "tensor_parallel")
        require_positive("rollout", self, "temperature", *counts)
        require(self.group_size >= 2, "rollout.group_size", self.group_size, "at least 2: advantages need a group")
        require(self.top_p == 1.0, "rollout.top_p", self.top_p, "1.0: the ratios of a truncated policy are undefined")
        require_fraction("rollout", self, "gpu_memory_fraction")
        if self.engine != "hf":
            bound = "'auto', 'trainer' or 'engine', or rollout.engine = 'hf': no other engine tells entropies"
            require(self.logprobs != "sampler", "rollout.logprobs", self.logprobs, bound)
        if self.engine == "hf":
            bound = "1, or rollout.engine = 'vllm': the hf engine holds the whole model on each rank"
            require(self.tensor_parallel == 1, "rollout.tensor_parallel", self.tensor_parallel, bound)


LEAST_MEMORY_MB = 256
"""A grading worker holds up to about 150 MiB before any answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GradingSettings:
    """Verification of answers."""

    grader: str = "math"
    """`math` (math-verify), `choice`, `exact`, `oat`, or `python:module:function`."""
    workers: int = setting(1, role="machine")
    """Worker processes."""
    deadline_seconds: float = setting(5.0, role="machine")
    """CPU time one answer may take before its worker is killed and the verdict is timeout; four times that on the
    clock."""
    memory_mb: int = setting(1024, role="machine")
    """Resident memory that a worker may hold, its imports included, in MiB."""
    max_answer_chars: int = 2000
    """A longer answer is 'no answer' at once."""

    def __post_init__(self) -> None:
        require_positive("grading", self, "workers", "deadline_seconds", "max_answer_chars")
        require_known("grading.grader", self.grader, GRADERS, python=True)
        require(self.memory_mb >= LEAST_MEMORY_MB, "grading.memory_mb", self.memory_mb, f"at least {LEAST_MEMORY_MB}")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimSettings:
    """The optimizer and how a step's batch is cut into updates."""

    engine: Literal["torch", "deepspeed"] = "torch"
    learning_rate: float = 1e-6
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear"] = "constant"
    """`linear` decays to `final_fraction` of the learning rate over `horizon` steps."""
    final_fraction: float = 0.05
    """Share of the learning rate that is left at the end of a linear schedule."""
    horizon: int = setting(0, pinned=True, resumable=True)
    """Steps of the decay; 0 is run.steps at the start of the run."""
    warmup_steps: int = setting(0, pinned=True)
    """Steps over which the learning rate rises; a run with a decaying schedule gives it at most half its steps."""
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    """Added to the root of Adam's second moment."""
    weight_decay: float = 0.01
    """Decoupled, on every parameter."""
    minibatches: int = 2
    """M: optimizer updates per step, each on whole groups."""
    microbatch_tokens: int = 16384
    """Token budget (prompt and response, padding included) of one forward and backward pass."""
    grad_clip: float = 1.0
    """Gradients of a larger norm are scaled down to it."""
    skip_norm: float = 500.0
    """An update with a larger or non-finite gradient norm, before clipping, is skipped."""
    max_skipped: int = 5
    """Consecutive skipped updates after which the run stops."""
    zero_stage: int = 2
    """DeepSpeed ZeRO stage."""
    offload: bool = False
    """DeepSpeed: keep optimizer state in CPU memory."""
    offload_during_rollouts: bool = setting(False, role="machine")
    """The torch engine: keep optimizer state and master weights in CPU memory between updates."""

    def __post_init__(self) -> None:
        counts = ("minibatches", "microbatch_tokens", "max_skipped")
        require_positive("optim", self, "learning_rate", "epsilon", "grad_clip", "skip_norm", *counts)
        require_fraction("optim", self, "final_fraction", "beta1", "beta2")
        require_non_negative("optim", self, "horizon", "warmup_steps", "weight_decay")
        require(self.zero_stage in (1, 2, 3), "optim.zero_stage", self.zero_stage, "1, 2 or 3")
        if self.schedule == "linear" and 0 < self.horizon <= self.warmup_steps:
            raise InputError(
                f"the linear schedule ends at step {self.horizon}, within the warm-up of {self.warmup_steps}: raise "
                "optim.horizon or lower optim.warmup_steps."
            )
        if self.offload_during_rollouts and self.engine == "deepspeed":
            instead = "use optim.offload = true, or optim.engine = 'torch'"
            reason = "DeepSpeed moves its state by itself"
            refuse_together("optim", self, "offload_during_rollouts", "engine", reason, instead)


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationSettings:
    """Evaluation before, during and after training."""

    every: int = 0
    """Steps between validations on the held-out questions; 0 is before and after only."""
    samples: int = 4
    """Rollouts per held-out question."""
    temperature: float = 1.0
    top_p: float = 1.0
    max_questions: int = 0
    """First so many held-out questions only, the same ones every time; 0 is all."""
    train_questions: int = 0
    """Training questions, chosen once by `seed`, that are asked before and after training as held-out ones are:
    `result.json` then tells what was memorised. 0 asks none."""
    seed: int = 0

    def __post_init__(self) -> None:
        require_positive("validation", self, "samples", "temperature", "top_p")
        require(self.top_p <= 1, "validation.top_p", self.top_p, "at most 1, which switches it off")
        require_non_negative("validation", self, "every", "max_questions", "train_questions", "seed")


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmSettings:
    """Resources that a job asks of Slurm: the `[slurm]` table of a configuration file, in no run's own settings.

    What is empty or 0 is left to the cluster's defaults.
    """

    partition: str = ""
    """Partition of the jobs."""
    account: str = ""
    """Account that pays."""
    qos: str = ""
    """Quality of service."""
    constraint: str = ""
    """Features of the nodes."""
    hours: float = 24.0
    """Most that a task may run; a run that needs more is requeued and resumes."""
    nodes: int = 1
    """Hosts of one run (`exgrpo train`); what follows is for each of them."""
    gpus: int = 0
    """Per task, all of them used by its one run."""
    cpus: int = 0
    """Per task."""
    memory_gb: float = 0.0
    """Per task, in GB."""
    parallel: int = 0
    """Tasks of the array that may run at once; 0 is all."""
    save_minutes: float = 5.0
    """Before the end of its time, when a task is told to save."""
    setup: tuple[str, ...] = ()
    """Lines of the script before the run: modules, environments."""

    def __post_init__(self) -> None:
        require_non_negative("slurm", self, "hours", "gpus", "cpus", "memory_gb", "parallel", "save_minutes")
        require_positive("slurm", self, "nodes")
        bound = f"more than slurm.save_minutes = {self.save_minutes}"
        require(60 * self.hours > self.save_minutes, "slurm.hours", self.hours, bound)
