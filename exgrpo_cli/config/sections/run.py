"""The run as a whole: model, rollouts, grading, optimizer, validation; and the job that a cluster is asked for."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from exgrpo_cli.config import names, sections
from exgrpo_cli.config.sections import FRACTION, NON_NEGATIVE, POSITIVE, SET, Bound, Needs, between, require, setting

_FULL = Needs("all weights are trained", rank=SET)
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM makes room for; an adapter of another one takes the next."""
Budget = Literal["steps", "generated", "trained", "seconds"]
BUCKET_ELEMENTS = 2**28
"""Gradients that DeepSpeed reduces at a time, for which it takes room during a backward pass."""
MOST_WORKERS = 8
"""Grading processes that are started unasked."""
BUDGET_STEPS = 4
"""Most steps of a run with another budget, as a multiple of `run.steps`: what hardly spends anything ends too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """The run as a whole."""

    method: str = "exgrpo"
    """Name of the method preset."""
    regime: str = ""
    """Name of the regime preset: task, start and lengths; empty is the backbone's own."""
    # The generators of torch and numpy take 64 bits.
    seed: int = setting(0, between(0, 2**63 - 1), role="run")
    """Seed of every random stream of the run: questions, rollouts, replay draws, mini-batch order."""
    steps: int = setting(150, between(1, 10**9), resumable=True)
    """Rollout batches to train on."""
    budget: Budget = setting("steps", needs=Needs("nothing would be spent", budget_amount=SET))
    """Kind of budget: `steps`, or tokens generated, tokens trained or seconds of training up to
    `budget_amount`. The run ends with the step that reaches it, after 4 x steps at the latest, and the learning rate
    follows the share that is spent."""
    budget_amount: float = setting(0.0, NON_NEGATIVE, Needs("run.steps is the budget", budget=SET), role="run")
    """Tokens or seconds of the budget; 0 with `steps`."""
    device: names.Device = setting("auto", role="machine", pinned=True)
    """Device of the policy; "auto" takes a CUDA GPU when one is visible, "mps" is the GPU of a Mac."""
    threads: int = setting(0, NON_NEGATIVE, role="machine", pinned=True)
    """CPU threads of torch; 0 takes half the cores and records the choice."""
    nproc: int = setting(1, NON_NEGATIVE, role="machine", pinned=True, resumable=True)
    """Ranks to start on this host; 0 is one per visible GPU (one on a CPU)."""
    rank_timeout: float = setting(60.0, sections.DURATION, role="machine", resumable=True)
    """Minutes that ranks wait for one of them before the run ends: more than their rollouts end apart."""
    phase_timeout: float = setting(120.0, sections.PAUSE, role="machine", resumable=True)
    """Minutes a phase (rollout, update, sync, validation, ...) may last before the run ends with the stacks of ranks
    that hang in `stacks/`; 0 waits without limit."""
    save_every: int = setting(25, POSITIVE, role="machine")
    """Steps between checkpoints; the last step is always saved."""
    save_minutes: float = setting(20.0, sections.PAUSE, role="machine")
    """Minutes after a checkpoint from which on the next step that ends is saved as well; 0 goes by steps alone."""
    keep_checkpoints: int = setting(2, NON_NEGATIVE, role="machine")
    """Newest checkpoints kept; the best by validation is kept besides. 0 keeps all."""
    samples_per_step: int = setting(4, NON_NEGATIVE, role="machine")
    """Rollouts a step written to `samples/`."""
    plots: bool = setting(True, role="machine")
    """Draw `plots/` when the run ends; `exgrpo replay-stats` draws the replay ones at any time."""
    claims: tuple[str, ...] = setting((), sections.ONE_LINE, role="run", resumable=True)
    """Claims that the run is for, each with the hash that it had when the run was begun; `ablate --claim` sets it."""
    log: tuple[str, ...] = setting((), ("tensorboard", "wandb"), role="machine")
    """Trackers besides the journal: "tensorboard", "wandb"."""

    @property
    def wants_gpus(self) -> bool:
        """Whether CUDA GPUs are taken, where they are visible."""
        return self.device in ("auto", "cuda")

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
    source: str = setting("tiny", Bound(bool, "tiny, a folder, a GGUF file or a hub id"))
    """`tiny` (built in), a local Hugging Face folder, a GGUF file, or a hub id."""
    revision: str = "main"
    """Hub revision."""
    dtype: Literal["auto", "float32", "bfloat16"] = setting("auto", role="machine")
    """Precision of the forward and backward passes; master weights and optimizer state are float32.

    "auto" is float32 on a CPU, and on a GPU what the model's config.json says, half precision as bfloat16."""
    rope_theta: float = setting(0.0, NON_NEGATIVE)
    """Overrides the model's rope base; 0 keeps it."""
    max_position_embeddings: int = setting(0, NON_NEGATIVE)
    """Overrides the model's context window in tokens; 0 keeps it."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: slower, far less memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TinySettings:
    """The built-in tiny backbone and its supervised warm start."""

    hidden_size: int = setting(128, between(1, 2**20))
    """Columns of the model."""
    num_layers: int = setting(3, between(1, 1024))
    """Layers."""
    num_heads: int = setting(4, POSITIVE)
    """Attention heads, which share the columns."""
    num_kv_heads: int = setting(2, POSITIVE)
    """Heads with keys and values of their own, each for as many of the others."""
    ffn_size: int = setting(256, between(1, 2**20))
    """Columns inside a layer's feed-forward part."""
    task: str = setting("arithmetic", names.TINY_TASKS)
    """Task whose traces it starts from: `arithmetic`, `countdown`, `countdown-20` (numbers to 20) or
    `modular`. It follows `data.train`."""
    warm_start_steps: int = setting(300, POSITIVE)
    """Supervised updates; fewer make a weaker start."""
    warm_start_batch: int = setting(32, POSITIVE)
    """Traces per supervised update."""
    seed: int = setting(0, NON_NEGATIVE)
    """Seed of initialisation and traces; independent of run.seed."""

    @property
    def shape(self) -> dict[str, Any]:
        """Sizes of the model by the names of a transformers config, but for its vocabulary."""
        return {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.ffn_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "tie_word_embeddings": True,
        }

    def __post_init__(self) -> None:
        # A number of heads below 1 is out of its own bound.
        head_size = self.hidden_size / max(self.num_heads, 1)
        bound = f"a number that divides tiny.hidden_size = {self.hidden_size} into heads of an even size"
        require(head_size % 2 == 0, "tiny.num_heads", self.num_heads, bound)
        bound = f"a number that divides tiny.num_heads = {self.num_heads}"
        require(self.num_heads % max(self.num_kv_heads, 1) == 0, "tiny.num_kv_heads", self.num_kv_heads, bound)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSettings:
    """LoRA: an adapter of low rank is trained in place of all weights, where `rank` is given (extra `lora`)."""

    rank: int = setting(
        -1, Bound(lambda r: r == -1 or 1 <= r <= 1024, "1 to 1024, or leave it out to train all weights")
    )
    """Rank r of the adapter; without one all weights are trained."""
    alpha: int = setting(32, POSITIVE, _FULL)
    """An adapted weight is W + alpha / r x B A. With one alpha the best learning rate hardly depends on the rank."""
    targets: str = setting("all-linear", needs=_FULL)
    """Layers that are adapted: all linear ones but the head, or their names, such as `q_proj,v_proj`."""
    dropout: float = setting(0.0, Bound(lambda share: share == 0, "0.0: dropout makes importance ratios random"), _FULL)
    """Dropout of the adapter's inputs."""
    learning_rate_factor: float = setting(10.0, POSITIVE, _FULL)
    """The adapter's learning rate as a multiple of `optim.learning_rate`, which is meant for all weights."""
    sync: Literal["merged", "adapter"] = setting("merged", needs=_FULL)
    """Weights that vLLM is handed: all of them, `merged`, or the `adapter` alone, which it applies itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutSettings:
    """Sampling of fresh rollouts."""

    engine: Literal["hf", "vllm"] = "hf"
    """`hf`: transformers with a KV cache; `vllm`: the extra."""
    group_size: int = setting(8, Bound(lambda k: k >= 2, "at least 2: advantages need a group"))
    """K: rollouts per question."""
    questions_per_step: int = setting(32, POSITIVE)
    """B: questions per step, fresh and experiential together."""
    max_rounds: int = setting(1, POSITIVE)
    """Rounds of fresh questions a step draws until B of its fresh groups are mixed; then only those train. 1 is off."""
    carry_over: float = setting(0.0, FRACTION, Needs("a round waits for all its rollouts", max_rounds=1))
    """Share of the groups under way that a step does not wait for: their rollouts go on in the next step, with the
    weights of then. A step trains B groups and has B / (1 - share) under way. 0 is off."""
    temperature: float = setting(1.0, POSITIVE)
    """T: every log-prob and entropy of training is of softmax(logits / T)."""
    top_p: float = setting(1.0, Bound(lambda p: p == 1, "1.0: the ratios of a truncated policy are undefined"))
    """Share of the distribution that is sampled from."""
    max_response_tokens: int = setting(96, POSITIVE)
    """Response limit in tokens, EOS included."""
    require_eos: bool = True
    """A response cut off at the limit earns 0."""
    max_rows: int = setting(512, POSITIVE)
    """Rows decoded at once; waiting rows replace finished ones."""
    logprobs: Literal["auto", "trainer", "engine", "sampler"] = setting(
        "auto", needs={"sampler": Needs("no other engine tells entropies", engine="hf")}
    )
    """Behaviour log-probs of fresh rollouts: `trainer` recomputes them; `engine` takes what the rollout engine
    computed, in the ledger and, truncated (`objective.tis_cap`), in the loss; `sampler` takes those of the hf engine,
    and its entropies, for the trainer's own, which the first update compares: a pass less. "auto" is `sampler` for
    `hf` rollouts of a `torch` policy in float32 on a CPU, where both are the same numbers but for rounding, else
    `trainer`."""
    max_logprob_gap: float = setting(0.0, NON_NEGATIVE, role="machine", resumable=True)
    """Mean |log pi_trainer - log pi_engine| of a step's tokens beyond which the run stops. 0 is 1e-3 in float32, and in
    bfloat16 0.05 or, where that is more, twice the gap of the first steps, in proportion to the entropy since."""
    tensor_parallel: int = setting(1, POSITIVE, Needs("hf holds the whole model on each rank", engine="vllm"))
    """GPUs per vllm engine."""
    gpu_memory_fraction: float = setting(0.0, between(0, 1), role="machine")
    """Share of a GPU's memory the vllm engine may take while awake; 0 is what the trainer leaves, up to 0.9."""

    @property
    def groups_under_way(self) -> int:
        """Groups that a step samples, of which it trains B."""
        return math.ceil(round(self.questions_per_step / (1 - self.carry_over), 9))


@dataclass(frozen=True, kw_only=True, slots=True)
class GradingSettings:
    """Verification of answers."""

    grader: str = setting("math", (*names.GRADERS, names.PREFIX))
    """`math` (math-verify), `choice`, `exact`, `oat`, or `python:module:function`."""
    rewards: dict[str, float] = setting({}, (*names.GRADERS, names.PREFIX))
    """Weights of several graders whose sum is the reward, such as `{"python:my:format" = 0.2}`; that of `grader` is 1
    unless it is among them. Whether an answer is correct is for `grader` alone to say."""
    success_at: float = setting(1.0, sections.SHARE_OF_ONE)
    """Least reward of `grader` that counts as correct, where it gives part of a point and does not say so itself."""
    workers: int = setting(0, NON_NEGATIVE, role="machine", pinned=True)
    """Worker processes of each rank; 0 is its part of half the cores, up to 8."""
    deadline_seconds: float = setting(5.0, sections.DURATION, role="machine")
    """CPU time one answer may take before its worker is killed and the verdict is timeout; four times that on the
    clock."""
    # A worker holds up to about 150 MiB before any answer.
    memory_mb: int = setting(1024, sections.at_least(256), role="machine")
    """Resident memory that a worker may hold, its imports included, in MiB."""
    max_answer_chars: int = setting(2000, POSITIVE)
    """A longer answer is 'no answer' at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimSettings:
    """The optimizer and how a step's batch is cut into updates."""

    engine: Literal["torch", "deepspeed", "auto"] = setting("torch", role="machine", pinned=True)
    """`torch` needs nothing besides; `deepspeed` shards the optimizer over ranks (extra `deepspeed`). "auto" is `torch`
    for one rank that does not `offload`, else `deepspeed`."""
    learning_rate: float = setting(1e-6, POSITIVE)
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear"] = "constant"
    """`linear` decays to `final_fraction` of the learning rate over `horizon` steps."""
    final_fraction: float = setting(0.05, between(0, 1))
    """Share of the learning rate that is left at the end of a linear schedule."""
    horizon: int = setting(0, NON_NEGATIVE, pinned=True, resumable=True)
    """Steps of the decay; 0 is run.steps at the start of the run."""
    warmup_steps: int = setting(0, NON_NEGATIVE, pinned=True)
    """Steps over which the learning rate rises; a run with a decaying schedule gives it at most half its steps."""
    beta1: float = setting(0.9, FRACTION)
    """Adam's decay of the mean gradient."""
    beta2: float = setting(0.999, FRACTION)
    """Adam's decay of the mean squared gradient."""
    epsilon: float = setting(1e-8, POSITIVE)
    """Added to the root of Adam's second moment."""
    weight_decay: float = setting(0.01, NON_NEGATIVE)
    """Decoupled, on every parameter."""
    minibatches: int = setting(2, POSITIVE)
    """M: optimizer updates per step, each on whole groups."""
    microbatch_tokens: int = setting(16384, POSITIVE)
    """Token budget (prompt and response, padding included) of one forward and backward pass."""
    matmul_dtype: Literal["float32", "bfloat16"] = setting(
        "float32", needs=Needs("DeepSpeed multiplies in backbone.dtype", engine=("torch", "auto"))
    )
    """Factors of the layers' matmuls on a CPU. bfloat16 is faster where the processor has it; weights stay float32."""
    grad_clip: float = setting(1.0, POSITIVE)
    """Gradients of a larger norm are scaled down to it."""
    skip_norm: float = setting(500.0, POSITIVE)
    """An update with a larger or non-finite gradient norm, before clipping, is skipped."""
    max_skipped: int = setting(5, POSITIVE)
    """Consecutive skipped updates after which the run stops."""
    zero_stage: int = setting(2, between(1, 3))
    """DeepSpeed ZeRO stage."""
    offload: bool = False
    """DeepSpeed: keep optimizer state in CPU memory."""
    moments: Literal["float32", "8bit"] = setting("float32", needs=Needs("DeepSpeed has its own Adam", engine="torch"))
    """Adam's two moments of a weight: 8 bytes, or 2 (extra `8bit`), in blocks of 256 with a scale each."""
    offload_during_rollouts: bool = setting(
        False, needs=Needs("DeepSpeed has optim.offload", engine=("torch", "auto")), role="machine"
    )
    """The torch engine: keep optimizer state and master weights in CPU memory between updates."""

    def __post_init__(self) -> None:
        ends_early = self.schedule == "linear" and 0 < self.horizon <= self.warmup_steps
        bound = f"more than optim.warmup_steps = {self.warmup_steps}: a linear schedule ends at the horizon"
        require(not ends_early, "optim.horizon", self.horizon, bound)

    def engine_of(self, num_ranks: int) -> Literal["torch", "deepspeed", "auto"]:
        """The engine that so many ranks take; "auto" stays while their number is not known (0)."""
        if self.engine != "auto" or num_ranks == 0:
            return self.engine
        return "deepspeed" if num_ranks > 1 or self.offload else "torch"


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationSettings:
    """Evaluation before, during and after training."""

    every: int = setting(0, NON_NEGATIVE)
    """Steps between validations on the held-out questions; 0 is before and after only."""
    samples: int = setting(4, POSITIVE)
    """Rollouts per held-out question."""
    temperature: float = setting(1.0, POSITIVE)
    """T of the answers to held-out questions."""
    temperatures: tuple[float, ...] = setting(
        (), Bound(lambda each: all(0 < t < math.inf for t in each), "finite numbers above 0")
    )
    """More temperatures at which held-out questions are asked after training, each in a pass of its own: whether an arm
    is ahead at one of them alone (endpoints `pass_at_1@T`, `pass_at_n@T`)."""
    forks: tuple[int, ...] = setting((), Bound(lambda each: all(step >= 1 for step in each), "steps of at least 1"))
    """Steps whose checkpoints stay, and behind which the run is forked when it has ended: each row or group that the
    next step replayed is left out by turns (`exgrpo fork`, endpoint `memory`)."""
    top_p: float = setting(1.0, Bound(lambda p: 0 < p <= 1, "a number above 0, at most 1, which switches it off"))
    """Most likely tokens that are kept, as a share of the probability."""
    max_questions: int = setting(0, NON_NEGATIVE)
    """First so many held-out questions only, the same ones every time; 0 is all."""
    train_questions: int = setting(0, NON_NEGATIVE)
    """Training questions, chosen once by `seed`, that are asked before and after training as held-out ones are:
    `result.json` then has what each gained. 0 asks none."""
    seed: int = setting(0, NON_NEGATIVE)
    """Seed of those answers, and of the choice of training questions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmSettings:
    """Resources that a job asks of Slurm: the `[slurm]` table of a configuration file, in no run's own settings.

    What is empty or 0 is left to the cluster's defaults.
    """

    partition: str = setting("", sections.ONE_WORD)
    """Partition of the jobs."""
    account: str = setting("", sections.ONE_WORD)
    """Account that pays."""
    qos: str = setting("", sections.ONE_WORD)
    """Quality of service."""
    constraint: str = setting("", sections.ONE_WORD)
    """Features of the nodes."""
    hours: float = setting(24.0, sections.DURATION)
    """Most that a task may run; a run that needs more is requeued and resumes."""
    nodes: int = setting(1, POSITIVE)
    """Hosts of one run (`exgrpo train`); what follows is for each of them."""
    gpus: int = setting(0, NON_NEGATIVE)
    """Per task, all of them used by its one run."""
    cpus: int = setting(0, NON_NEGATIVE)
    """Per task."""
    memory_gb: float = setting(0.0, NON_NEGATIVE)
    """Per task, in GB."""
    parallel: int = setting(0, NON_NEGATIVE)
    """Tasks of the array that may run at once; 0 is all."""
    save_minutes: float = setting(5.0, sections.PAUSE)
    """Before the end of its time, when a task is told to save."""
    setup: tuple[str, ...] = setting((), sections.ONE_LINE, runs=True)
    """Lines of the script before the run: modules, environments. A file with some needs `--allow-code`."""

    def __post_init__(self) -> None:
        bound = f"more than slurm.save_minutes = {self.save_minutes}"
        require(60 * self.hours > self.save_minutes, "slurm.hours", self.hours, bound)
