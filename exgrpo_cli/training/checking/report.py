"""What a check found, as lines that can be pasted into an issue and as JSON."""

from dataclasses import asdict, dataclass
from typing import Any

from exgrpo_cli.machine.disk import size
from exgrpo_cli.training.checking.measure import Phase

ROOM = 0.1
SLACK_BYTES = 2**29
"""What may be measured above the plan: a tenth, and half a gibibyte for what is too small to be planned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Memory of one part of a step, per rank, in bytes."""

    part: str
    planned: int | None
    """None where the plan says nothing."""
    measured: int
    """The most that a rank had."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """How fast the second step went, all ranks together."""

    part: str
    tokens_per_second: float
    utilisation: float | None
    """Operations of the model a second over those of a large matrix product on the same device; None for rollouts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckReport:
    """Two steps of a configuration on this machine."""

    backbone: str
    engines: str
    device: str
    versions: dict[str, str]
    lengths: str
    """Of prompts and responses, and how many rows."""
    memory: tuple[Memory, ...]
    speeds: tuple[Speed, ...]
    phases: tuple[Phase, ...]
    """Of the main rank."""
    faults_caught: tuple[str, ...]
    logprob_gap: float | None
    """Mean over fresh tokens of both steps."""
    problems: tuple[str, ...]
    """Empty when all is well."""

    def to_json(self) -> dict[str, Any]:
        """What `--json` prints."""
        return asdict(self) | {"well": not self.problems}

    def lines(self) -> list[str]:
        """For people, one fact a line, the verdict last."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        gap = "not measured" if self.logprob_gap is None else f"{self.logprob_gap:.2g} a token"
        return [
            f"exgrpo check of {self.backbone}, {self.engines}, on {self.device}",
            f"with       {versions}",
            f"lengths    {self.lengths}",
            *(f"memory     {_memory(each)}" for each in self.memory),
            *(f"speed      {_speed(each)}" for each in self.speeds),
            f"canary     stopped the run for: {', '.join(self.faults_caught) or 'nothing'}",
            f"log-probs  of rollout engine and trainer differ by {gap}",
            *(f"problem    {problem}" for problem in self.problems),
            f"verdict    {f'{len(self.problems)} problems, see above' if self.problems else 'all is well'}",
        ]


def allowed(planned: int) -> int:
    """The most bytes that count as `planned` when they are measured."""
    return int((1 + ROOM) * planned) + SLACK_BYTES


def _memory(memory: Memory) -> str:
    if memory.planned is None:
        return f"{memory.part}: {size(memory.measured)}"
    bound = size(allowed(memory.planned))
    return f"{memory.part}: {size(memory.measured)}; planned {size(memory.planned)}, up to {bound} is as planned"


def _speed(speed: Speed) -> str:
    share = "" if speed.utilisation is None else f", {speed.utilisation:.0%} of a large matrix product's FLOP/s"
    return f"{speed.part}: {speed.tokens_per_second:,.0f} tokens/s{share}"
