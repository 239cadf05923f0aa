"""Report of a check: memory of each part beside the plan, speeds, phases, faults caught, and a verdict."""

from dataclasses import asdict, dataclass
from typing import Any

from exgrpo_cli.machine.memory import size

ROOM, SLACK_BYTES = 0.1, 2**29
"""Bounds above the plan: a tenth, and half a gibibyte for what is too small to be planned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """One phase of one step."""

    name: str
    step: int
    """From 1; 0 is before the first."""
    seconds: float
    peak_bytes: int
    """Most memory in use, beyond what there was before the model was loaded: on a GPU that of other processes, and this
    one's CUDA context; 0 on a CPU whose system has no /proc."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Memory of one part of a step, per rank, in bytes."""

    part: str
    planned: int
    """For the rows of the check."""
    measured: int
    """The most that a rank had."""
    judged: bool
    """Whether clearly more than planned is a problem: on a GPU alone."""

    @property
    def allowed(self) -> int:
        """The most bytes that count as planned when they are measured."""
        return int((1 + ROOM) * self.planned) + SLACK_BYTES

    @property
    def problem(self) -> str:
        """The problem where clearly more was measured than planned; else empty."""
        above = self.judged and self.measured > self.allowed
        return f"{self.part} took {size(self.measured)}, {size(self.planned)} were planned" if above else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckReport:
    """Two steps of a configuration on this machine."""

    backbone: str
    engines: str
    device: str
    versions: dict[str, str]
    lengths: str
    """Tokens of prompts and responses, and numbers of rows."""
    memory: tuple[Memory, ...]
    planned_for_run: dict[str, int]
    """Bytes by phase in the plan that `--dry-run` prints."""
    tokens_per_second: dict[str, float]
    """By part of the second step, all ranks together."""
    phases: tuple[Phase, ...]
    """Those of the main rank."""
    seconds: float
    """From before the weights are made to after the last measurement."""
    faults_caught: tuple[str, ...]
    logprob_gap: float | None
    """Mean over fresh tokens of both steps."""
    problems: tuple[str, ...]
    """Empty when all is well."""

    def to_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return asdict(self) | {"well": not self.problems}

    def lines(self) -> list[str]:
        """For people, one fact a line, the verdict last."""
        run, gap = self.planned_for_run, self.logprob_gap
        seconds = {name: 0.0 for name in (*(phase.name for phase in self.phases), "loading and all else")}
        for phase in self.phases:
            seconds[phase.name] += phase.seconds
        seconds["loading and all else"] = self.seconds - sum(seconds.values())
        speeds = [f"{part} {speed:,.0f}" for part, speed in self.tokens_per_second.items()]
        memory = [
            f"memory     {each.part}: {size(each.measured)}; planned {size(each.planned)}"
            + (f", up to {size(each.allowed)} is as planned" if each.judged else "")
            for each in self.memory
        ]
        return [
            f"exgrpo check of {self.backbone}, {self.engines}, on {self.device}",
            f"with       {', '.join(f'{name} {version}' for name, version in self.versions.items())}",
            f"lengths    {self.lengths}",
            *memory,
            "note       planned are this check's rows and no validation; the run is planned at "
            f"{size(run['rollouts'])} during rollouts and {size(run['update'])} during the update (--dry-run)",
            f"speed      tokens a second: {', '.join(speeds) or 'not measured'}",
            f"time       {self.seconds:.1f} s: {', '.join(f'{name} {taken:.1f} s' for name, taken in seconds.items())}",
            f"canary     stopped the run for: {', '.join(self.faults_caught) or 'nothing'}",
            f"log-probs  of rollout engine and trainer differ by {'nan' if gap is None else f'{gap:.2g}'} a token",
            *(f"problem    {problem}" for problem in self.problems),
            f"verdict    {f'{len(self.problems)} problems, see above' if self.problems else 'all is well'}",
        ]
