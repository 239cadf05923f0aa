"""Settings of a run: frozen sections, each documented under its fields and validated by itself."""

from dataclasses import dataclass, field
from typing import Literal

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.config.contradictions import require_consistent
from exgrpo_cli.config.sections.backbone import BackboneSettings, TinySettings
from exgrpo_cli.config.sections.data import (
    ArithmeticSettings,
    CountdownSettings,
    DataSettings,
    GymSettings,
    ModularSettings,
    WordProblemSettings,
)
from exgrpo_cli.config.sections.grading import GradingSettings
from exgrpo_cli.config.sections.objective import ObjectiveSettings
from exgrpo_cli.config.sections.optim import OptimSettings
from exgrpo_cli.config.sections.replay import ReplaySettings
from exgrpo_cli.config.sections.rollout import RolloutSettings
from exgrpo_cli.config.sections.run import RunSettings
from exgrpo_cli.config.sections.validation import ValidationSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Everything a run is made of; written to `config.toml` before step 1."""

    run: RunSettings = field(default_factory=RunSettings)
    data: DataSettings = field(default_factory=DataSettings)
    arithmetic: ArithmeticSettings = field(default_factory=ArithmeticSettings)
    word_problems: WordProblemSettings = field(default_factory=WordProblemSettings)
    countdown: CountdownSettings = field(default_factory=CountdownSettings)
    modular: ModularSettings = field(default_factory=ModularSettings)
    gym: GymSettings = field(default_factory=GymSettings)
    backbone: BackboneSettings = field(default_factory=BackboneSettings)
    tiny: TinySettings = field(default_factory=TinySettings)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    grading: GradingSettings = field(default_factory=GradingSettings)
    replay: ReplaySettings = field(default_factory=ReplaySettings)
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    validation: ValidationSettings = field(default_factory=ValidationSettings)

    @property
    def usual_logprobs(self) -> Literal["sampler", "trainer"]:
        """What `rollout.logprobs = "auto"` comes to: the sampler's where they were found to be the trainer's."""
        in_float32_on_a_cpu = self.run.device != "cuda" and self.backbone.dtype != "bfloat16"
        alike = self.rollout.engine == "hf" and self.optim.engine == "torch" and in_float32_on_a_cpu
        return "sampler" if alike else "trainer"

    def __post_init__(self) -> None:
        k = self.rollout.group_size
        require_consistent(self)
        if self.replay.lower_bound >= self.replay.upper(k):
            raise InputError(
                f"replay.lower_bound = {self.replay.lower_bound} and replay.upper_bound = {self.replay.upper(k)} leave "
                "no success count between them, and a visit stores when lower_bound < k <= upper_bound: lower the one "
                "or raise the other."
            )
        if self.optim.schedule == "linear" and 0 < self.optim.horizon <= self.optim.warmup_steps:
            raise InputError(
                f"optim.horizon = {self.optim.horizon} ends the decay within optim.warmup_steps = "
                f"{self.optim.warmup_steps}: raise the one or lower the other."
            )
        if self.optim.minibatches > self.rollout.questions_per_step:
            raise InputError(
                f"optim.minibatches = {self.optim.minibatches} exceeds rollout.questions_per_step = "
                f"{self.rollout.questions_per_step}: a mini-batch holds at least one whole group."
            )
