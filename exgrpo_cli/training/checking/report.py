"""What a check found, as lines that can be pasted into an issue and as JSON."""

from dataclasses import asdict, dataclass
from typing import Any

from exgrpo_cli.machine.memory import size
from exgrpo_cli.training.checking.measure import Phase

ROOM = 0.1
SLACK_BYTES = 2**29
"""What may be measured above the plan: a tenth, and half a gibibyte for what is too small to be planned."""
LONG_SECONDS = 600
REST = "loading and all else"


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Memory of one part of a step, per rank, in bytes."""

    part: str
    planned: int
    """For the rows of the check."""
    measured: int
    """The most that a rank had."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPeaks:
    """What a plan comes to on a rank, in bytes."""

    rollouts: int
    update: int


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
    memory_is_judged: bool
    """Whether clearly more than planned is a problem: on a GPU alone."""
    planned_for_run: RunPeaks | None
    """The plan that `--dry-run` prints; None where it is the one of the check."""
    speeds: tuple[Speed, ...]
    phases: tuple[Phase, ...]
    """Of the main rank."""
    seconds: float
    """From before the weights are made to after the last measurement."""
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
            *(f"memory     {_memory(each, judged=self.memory_is_judged)}" for each in self.memory),
            *self._plan_lines(),
            *(f"speed      {_speed(each)}" for each in self.speeds),
            *self._time_lines(),
            f"canary     stopped the run for: {', '.join(self.faults_caught) or 'nothing'}",
            f"log-probs  of rollout engine and trainer differ by {gap}",
            *(f"problem    {problem}" for problem in self.problems),
            f"verdict    {f'{len(self.problems)} problems, see above' if self.problems else 'all is well'}",
        ]

    def _plan_lines(self) -> list[str]:
        if (run := self.planned_for_run) is None:
            return []
        return [
            "note       the plan above is of this check, its rows and no validation; the run is planned at "
            f"{size(run.rollouts)} during rollouts and {size(run.update)} during the update (--dry-run)"
        ]

    def _time_lines(self) -> list[str]:
        """Seconds of both steps by phase."""
        names = dict.fromkeys(phase.name for phase in self.phases)
        seconds = {name: sum(phase.seconds for phase in self.phases if phase.name == name) for name in names}
        seconds[REST] = self.seconds - sum(seconds.values())
        parts = ", ".join(f"{name} {taken:.1f} s" for name, taken in seconds.items())
        lines = [f"time       {self.seconds:.1f} s: {parts}"]
        if self.seconds > LONG_SECONDS:
            longest = max(seconds, key=lambda name: seconds[name])
            lines.append(f"note       this took more than ten minutes, most of them for {longest}")
        return lines


def allowed(planned: int) -> int:
    """The most bytes that count as `planned` when they are measured."""
    return int((1 + ROOM) * planned) + SLACK_BYTES


def _memory(memory: Memory, *, judged: bool) -> str:
    bound = f", up to {size(allowed(memory.planned))} is as planned" if judged else ""
    return f"{memory.part}: {size(memory.measured)}; planned {size(memory.planned)}{bound}"


def _speed(speed: Speed) -> str:
    share = "" if speed.utilisation is None else f", {speed.utilisation:.0%} of a large matrix product's FLOP/s"
    return f"{speed.part}: {speed.tokens_per_second:,.0f} tokens/s{share}"
