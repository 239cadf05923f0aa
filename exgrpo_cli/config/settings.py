"""Settings of a run: frozen sections, each documented under its fields and validated by itself."""

import math
from dataclasses import dataclass, field, fields
from typing import Literal

from exgrpo_cli.errors import InputError, nearest


def _require(condition: bool, key: str, value: object, bound: str) -> None:
    if not condition:
        raise InputError(f"{key} = {value!r} is out of range: use {bound}.")


def _require_positive(section: str, settings: object, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        _require(math.isfinite(value) and value > 0, f"{section}.{name}", value, "a finite number above 0")


def _require_fraction(section: str, settings: object, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        _require(math.isfinite(value) and 0 <= value <= 1, f"{section}.{name}", value, "a number from 0 to 1")


def _require_non_negative(section: str, settings: object, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        _require(math.isfinite(value) and value >= 0, f"{section}.{name}", value, "a finite number of at least 0")


def _one_of(key: str, value: str, known: tuple[str, ...], *, python: bool = False) -> None:
    if value in known or (python and value.startswith("python:")):
        return
    raise InputError(f"{key} = {value!r} is not known.{nearest(value, known)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """The run as a whole."""

    method: str = "exgrpo"
    """Name of the method preset."""
    seed: int = 0
    """Seed of every random stream of the run: questions, rollouts, replay draws, mini-batch order."""
    steps: int = 150
    """Rollout batches to train on."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the policy lives; "auto" takes a GPU when one is visible."""
    threads: int = 0
    """CPU threads of torch; 0 takes half the cores and records the choice."""
    nproc: int = 1
    """Ranks to start on this host; 0 is one per visible GPU (one on a CPU)."""
    rank_timeout: float = 60.0
    """Minutes that ranks wait for one of them before the run ends: more than their rollouts end apart."""
    save_every: int = 25
    """Steps between checkpoints; the last step is always saved."""
    keep_checkpoints: int = 2
    """Newest checkpoints kept; the best by validation is kept besides. 0 keeps all."""
    samples_per_step: int = 4
    """Rollouts a step written to `samples/`."""
    plots: bool = True
    """Draw `plots/` when the run ends; `exgrpo replay-stats` draws the replay ones at any time."""
    log: tuple[str, ...] = ()
    """Trackers besides the journal: "tensorboard", "wandb"."""

    def __post_init__(self) -> None:
        _require_positive("run", self, "steps", "rank_timeout", "save_every")
        _require_non_negative("run", self, "seed", "nproc", "threads", "keep_checkpoints", "samples_per_step")
        for name in self.log:
            _one_of("run.log", name, ("tensorboard", "wandb"))


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSettings:
    """Questions to train and validate on."""

    train: str = "arithmetic"
    """`arithmetic`, a question file, or a data set id that `prepare` understands."""
    heldout: str = "arithmetic"
    """Held-out questions: `arithmetic`, a question file, a benchmark name, or empty for none."""
    template: str = "auto"
    """Prompt template; "auto" is the backbone's own chat template."""
    require_box: Literal["auto", "always", "never"] = "auto"
    """Whether a response without `\\boxed{}` has no answer; "auto" asks where the template's text asks for a box."""
    max_prompt_tokens: int = 1024
    """A longer prompt is refused before the run starts."""

    def __post_init__(self) -> None:
        _require_positive("data", self, "max_prompt_tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class ArithmeticSettings:
    """The built-in arithmetic questions."""

    num_train: int = 2400
    """Training questions; 150 steps see each about once with replay (half of 32 a step), twice without."""
    num_heldout: int = 600
    """Held-out questions, disjoint from the training ones by construction."""
    levels: tuple[int, ...] = (2, 3, 4, 5, 6, 7)
    """Operations per question, in equal shares."""
    seed: int = 0
    """Seed of the question set; independent of run.seed, so that runs of several seeds share their questions."""

    def __post_init__(self) -> None:
        _require_positive("arithmetic", self, "num_train", "num_heldout")
        _require_non_negative("arithmetic", self, "seed")
        possible = min(self.levels, default=0) >= 1 and len(set(self.levels)) == len(self.levels)
        _require(possible, "arithmetic.levels", self.levels, "levels of at least 1, each once")


@dataclass(frozen=True, kw_only=True, slots=True)
class BackboneSettings:
    """The language model that is trained."""

    name: str = "tiny"
    """Name of the backbone preset, or of the model when `source` is given on the command line."""
    source: str = "tiny"
    """`tiny` (built in), a local Hugging Face folder, or a hub id."""
    revision: str = "main"
    """Hub revision."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the forward and backward passes; master weights and optimizer state are float32."""
    rope_theta: float = 0.0
    """Overrides the model's rope base; 0 keeps it."""
    max_position_embeddings: int = 0
    """Overrides the model's context window in tokens; 0 keeps it."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: slower, far less memory."""

    def __post_init__(self) -> None:
        _require_non_negative("backbone", self, "rope_theta", "max_position_embeddings")


@dataclass(frozen=True, kw_only=True, slots=True)
class TinySettings:
    """The built-in tiny backbone and its supervised warm start."""

    hidden_size: int = 128
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 2
    ffn_size: int = 256
    warm_start_steps: int = 300
    """Supervised updates; fewer make a weaker start."""
    warm_start_batch: int = 32
    """Traces per supervised update."""
    seed: int = 0
    """Seed of initialisation and traces; independent of run.seed."""

    def __post_init__(self) -> None:
        _require_positive("tiny", self, *(f.name for f in fields(self) if f.name != "seed"))


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutSettings:
    """Sampling of fresh rollouts."""

    engine: Literal["hf", "vllm"] = "hf"
    """`hf`: transformers with a KV cache; `vllm`: the extra."""
    group_size: int = 8
    """K: rollouts per question."""
    questions_per_step: int = 32
    """B: questions per step, fresh and experiential together."""
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
    logprobs: Literal["trainer", "engine"] = "trainer"
    """Behaviour log-probs of fresh rollouts: `trainer` recomputes them; `engine` takes what the rollout engine
    computed, in the ledger and, truncated (`objective.tis_cap`), in the loss."""
    tensor_parallel: int = 1
    """GPUs per vllm engine."""
    gpu_memory_fraction: float = 0.5
    """Share of a GPU's memory the vllm engine may take while awake."""

    def __post_init__(self) -> None:
        _require_positive(
            "rollout", self, "temperature", "questions_per_step", "max_response_tokens", "max_rows", "tensor_parallel"
        )
        _require(self.group_size >= 2, "rollout.group_size", self.group_size, "at least 2: advantages need a group")
        _require(self.top_p == 1.0, "rollout.top_p", self.top_p, "1.0: the ratios of a truncated policy are undefined")
        _require_fraction("rollout", self, "gpu_memory_fraction")
        if self.engine == "hf":
            bound = "1, or rollout.engine = 'vllm': the hf engine holds the whole model on each rank"
            _require(self.tensor_parallel == 1, "rollout.tensor_parallel", self.tensor_parallel, bound)


@dataclass(frozen=True, kw_only=True, slots=True)
class GradingSettings:
    """Verification of answers."""

    grader: str = "math"
    """`math` (math-verify), `choice`, `exact`, or `python:module:function`."""
    workers: int = 1
    """Worker processes."""
    deadline_seconds: float = 5.0
    """Time one answer may take before its worker is killed and the verdict is timeout."""
    memory_mb: int = 1024
    """Address space a worker may use beyond its start, in MiB."""
    max_answer_chars: int = 2000
    """A longer answer is 'no answer' at once."""

    def __post_init__(self) -> None:
        _require_positive("grading", self, "workers", "deadline_seconds", "memory_mb", "max_answer_chars")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplaySettings:
    """The experience buffer and what is drawn from it (paper, section 3)."""

    enabled: bool = True
    """Keep correct trajectories and replay them; off is the on-policy baseline."""
    ratio: float = 0.5
    """rho: share of a mixed step's questions that are experiential."""
    start_threshold: float = 0.35
    """Delayed start: the step after batch pass@1 exceeds this is the first mixed one. 0 is mixed from step 1."""
    collect_before_start: bool = False
    """Store successes during the on-policy phase as well."""
    metric: str = "ent"
    """Which trajectory of a question is replayed: `ent`, `ent-sum`, `ppl`, `length`, `random`, or `python:m:f`."""
    direction: Literal["min", "max"] = "min"
    """Whether the lowest or the highest metric is chosen."""
    sampler: str = "normal"
    """Which questions are replayed: `normal`, `linear`, `linear-clip`, `sqrt`, `uniform`, or `python:m:f`."""
    mu: float = 0.5
    """Mean of the `normal` sampler, on the accuracy scale."""
    sigma: float = 0.125
    """Standard deviation of the `normal` sampler, on the accuracy scale."""
    lower_bound: int = 0
    """A visit stores its successes when lower_bound < k <= upper_bound."""
    upper_bound: int = -1
    """-1 is K - 1."""
    retirement: bool = True
    """A question solved by all K leaves the stream and the buffer."""
    readmit_fraction: float = 0.0
    """Share of the retired questions, rounded up, that returns every `readmit_every` steps."""
    readmit_every: int = 25
    max_per_question: int = 0
    """Most trajectories kept per question; 0 is unbounded, as in the paper."""
    eviction: str = "oldest"
    """Which trajectory leaves a full question: `oldest`, `highest-entropy`, `longest`, `random`."""
    max_age: int = 0
    """Steps after which a trajectory is no longer replayed; 0 is never."""
    cooldown: int = 0
    """Steps a question rests after a replay; 0 is none."""
    count_fresh_only: bool = False
    """An experiential group's success count is over its K-1 fresh members instead of all K."""
    max_score_staleness: int = 0
    """Weight versions a measured entropy may lag behind before it is measured again; 0 is exact."""
    warm_start: str = ""
    """Run folder whose ledger fills the buffer before step 1; empty is none."""
    warm_start_retired: bool = False
    """Take the retired questions of that run over as well."""
    ess_bound: float = 0.0
    """Least effective sample size (share of tokens) of a replayed draw; below it the step stays fresh. 0 is off."""

    def __post_init__(self) -> None:
        _require_fraction("replay", self, "ratio", "start_threshold", "readmit_fraction", "ess_bound")
        _require_positive("replay", self, "sigma", "readmit_every")
        _require(math.isfinite(self.mu), "replay.mu", self.mu, "a finite number")
        _require_non_negative(
            "replay", self, "lower_bound", "max_per_question", "max_age", "cooldown", "max_score_staleness"
        )
        _require(self.upper_bound >= -1, "replay.upper_bound", self.upper_bound, "-1 (K - 1) or a count")
        _one_of("replay.metric", self.metric, ("ent", "ent-sum", "ppl", "length", "random"), python=True)
        samplers = ("normal", "linear", "linear-clip", "sqrt", "uniform")
        _one_of("replay.sampler", self.sampler, samplers, python=True)
        _one_of("replay.eviction", self.eviction, ("oldest", "highest-entropy", "longest", "random"))


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveSettings:
    """The policy objective (paper, section 3.3; `docs/algorithm.md`)."""

    advantage: Literal["mean", "normalised"] = "mean"
    """`mean`: r - mean(r) (Dr.GRPO); `normalised`: divided by the group's standard deviation as well (GRPO)."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_in_mixed_phase: bool = False
    """Keep the PPO clip on fresh tokens in the mixed phase."""
    shaping: bool = True
    """Replayed tokens use f(w) = w / (w + beta); off uses the raw ratio w."""
    shaping_beta: float = 0.1
    importance: Literal["behaviour", "old"] = "behaviour"
    """Denominator of a replayed token's ratio: the policy that generated it, or this step's pi_old (an ablation)."""
    tis_cap: float = 2.0
    """With rollout.logprobs = "engine", fresh tokens weigh min(pi_old / pi_engine, tis_cap)."""
    aggregation: Literal["constant", "token-mean"] = "constant"
    """`constant`: sum over tokens / (N * max_response_tokens); `token-mean`: / number of tokens."""
    loss_scale: float = 1.0
    """Multiplies the policy term; 64 gives the published clip, skip bound and entropy coefficient their meaning."""
    entropy_coefficient: float = 0.0
    kl_coefficient: float = 0.0
    """k3 KL to the initial policy, fresh tokens only."""

    def __post_init__(self) -> None:
        _require_positive("objective", self, "shaping_beta", "loss_scale", "tis_cap")
        _require_non_negative("objective", self, "clip_low", "clip_high", "kl_coefficient")
        finite = math.isfinite(self.entropy_coefficient)
        _require(finite, "objective.entropy_coefficient", self.entropy_coefficient, "a finite number")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimSettings:
    """The optimizer and how a step's batch is cut into updates."""

    engine: Literal["torch", "deepspeed"] = "torch"
    learning_rate: float = 1e-6
    schedule: Literal["constant", "linear"] = "constant"
    """`linear` decays to `final_fraction` of the learning rate over `horizon` steps."""
    final_fraction: float = 0.05
    horizon: int = 0
    """Steps of the decay; 0 is run.steps at the start of the run."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises; a run with a decaying schedule gives it at most half its steps."""
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.01
    minibatches: int = 2
    """M: optimizer updates per step, each on whole groups."""
    microbatch_tokens: int = 16384
    """Token budget (prompt and response, padding included) of one forward and backward pass."""
    grad_clip: float = 1.0
    skip_norm: float = 500.0
    """An update with a larger or non-finite gradient norm is skipped."""
    max_skipped: int = 5
    """Consecutive skipped updates after which the run stops."""
    zero_stage: int = 2
    """DeepSpeed ZeRO stage."""
    offload: bool = False
    """DeepSpeed: keep optimizer state in CPU memory."""

    def __post_init__(self) -> None:
        _require_positive(
            "optim", self, "learning_rate", "minibatches", "microbatch_tokens", "grad_clip", "skip_norm", "max_skipped"
        )
        _require_fraction("optim", self, "final_fraction", "beta1", "beta2")
        _require_non_negative("optim", self, "horizon", "warmup_steps", "weight_decay")
        _require(self.zero_stage in (1, 2, 3), "optim.zero_stage", self.zero_stage, "1, 2 or 3")


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
    seed: int = 0

    def __post_init__(self) -> None:
        _require_positive("validation", self, "samples", "temperature", "top_p")
        _require_non_negative("validation", self, "every", "max_questions", "seed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Everything a run is made of; written to `config.toml` before step 1."""

    run: RunSettings = field(default_factory=RunSettings)
    data: DataSettings = field(default_factory=DataSettings)
    arithmetic: ArithmeticSettings = field(default_factory=ArithmeticSettings)
    backbone: BackboneSettings = field(default_factory=BackboneSettings)
    tiny: TinySettings = field(default_factory=TinySettings)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    grading: GradingSettings = field(default_factory=GradingSettings)
    replay: ReplaySettings = field(default_factory=ReplaySettings)
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    validation: ValidationSettings = field(default_factory=ValidationSettings)

    def __post_init__(self) -> None:
        k = self.rollout.group_size
        if self.replay.upper_bound >= k and self.replay.retirement:
            raise InputError(f"replay.upper_bound = {self.replay.upper_bound} has no effect: K = {k} is retired.")
        if self.optim.minibatches > self.rollout.questions_per_step:
            raise InputError(
                f"optim.minibatches = {self.optim.minibatches} exceeds rollout.questions_per_step = "
                f"{self.rollout.questions_per_step}: a mini-batch holds at least one whole group."
            )

    @property
    def upper_bound(self) -> int:
        """Largest success count whose trajectories are stored."""
        return self.rollout.group_size - 1 if self.replay.upper_bound < 0 else self.replay.upper_bound
