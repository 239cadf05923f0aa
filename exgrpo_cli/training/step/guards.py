"""Guards: notes for a person while a run goes wrong without an error, and the end of one that trains on stale rollouts.

Each guard looks at the journal lines of a run, fires once when its condition has held for so many steps in a row, and
is armed again when the condition ends; it changes nothing. Rollouts that another policy sampled stop the run.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from exgrpo_cli.base.data import tables
from exgrpo_cli.base.errors import RunError
from exgrpo_cli.base.types import Rollout, Verdict

Line = Mapping[str, Any]
FIRST_STEPS = 3
"""Steps whose mean entropy is what a collapse is measured against."""
COLLAPSED = 0.1
"""Share of the first entropy below which a policy that is mostly wrong counts as collapsed."""
CUT_OFF = 0.5
"""Share of responses at the length limit that is worth a word."""
FALLEN = 0.5
"""Share of an earlier pass@1 on fresh questions below which it has fallen."""
FALL_STEPS, FALL_WITHIN = 3, 20
"""Steps whose pass@1 is taken together, and steps back in which an earlier one counts: the questions change."""
FALL_ERRORS = 3.0
"""Standard errors by which a fall must exceed chance; a question's rate has a variance of at most a quarter."""
SKIPPED = 0.25
"""Share of skipped updates, over a guard's steps, that is worth a word."""
BURST, MEAN_BURST = 100.0, 1.5
"""Largest ratio of a fresh token, and mean one of replayed tokens, beyond which a step's importance ratios are a burst:
healthy runs stay below 10 and at 1.0 to 1.25; single replayed tokens reach 100 and more in them too."""
MAX_MEAN_GAPS = {"float32": 1e-3, "bfloat16": 0.05}
"""Largest mean |log pi_trainer - log pi_engine| over the fresh tokens of a step, unless rounding makes more.

Rounding alone gave 1e-6 in float32, and in bfloat16 0.005, or 0.017 of a model with large key biases; 0.03 to 0.05 are
published of Qwen2.5. A missed sync of the tiny backbone gave 0.125."""
GAP_ROOM = 2.0
"""Room above the gap of the first steps; before any of them above the bound, in bfloat16."""
LEAST_ENTROPY = 0.1
"""Nats a token from which on rounding grows with the entropy."""
GAP_WARNING = 0.7
"""Share of the bound that is worth a word."""
GAP_GROWTH = 1.25
"""Growth of the gap since the last word on it that is worth another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Guard:
    """One condition on the journal lines of successive steps, and what is said where it holds (`guards.toml`)."""

    holds: Callable[["Guards", Line], bool]
    after: int
    """Steps in a row for which the condition must hold."""
    message: str
    """Meaning and usual causes; `{after}` and the keys of the journal line are filled in."""
    with_verdicts: bool = False
    """Whether the shares of verdicts help to find the cause."""


class Guards:
    """The state of all guards of a run: how long each condition has held."""

    def __init__(self, lines: Iterable[Line] = ()) -> None:
        """`lines` are the steps that a resumed run has behind it: they count, and nothing is said of them again."""
        self._held = [0] * len(GUARDS)
        self.first_entropies: list[float] = []
        """Mean token entropies (nats) of the run's first steps."""
        self.fresh: list[tuple[float, int]] = []
        """pass@1 on the fresh questions of the latest steps, and how many these were."""
        for line in lines:
            self._count(line)

    def check(self, line: Line) -> list[str]:
        """Notes after the step with this journal line; mostly nothing."""
        return [_sentence(guard, line) for guard in self._count(line)]

    def _count(self, line: Line) -> list[Guard]:
        if len(self.first_entropies) < FIRST_STEPS and "policy/entropy" in line:
            self.first_entropies.append(line["policy/entropy"])
        if "batch/pass_at_1" in line:
            self.fresh = [*self.fresh, (line["batch/pass_at_1"], line.get("batch/questions", 1))]
            self.fresh = self.fresh[-FALL_WITHIN - FALL_STEPS :]
        fired = []
        for number, guard in enumerate(GUARDS):
            self._held[number] = self._held[number] + 1 if guard.holds(self, line) else 0
            if self._held[number] == guard.after:
                fired.append(guard)
        return fired


def _collapsed(guards: Guards, line: Line) -> bool:
    first, entropy = guards.first_entropies, line.get("policy/entropy", math.inf)
    return entropy * len(first) < COLLAPSED * sum(first) and line.get("batch/pass_at_1", 1.0) < 0.5


def _fallen(guards: Guards, line: Line) -> bool:
    """Whether success on fresh questions is far below that of some steps before, beyond chance."""
    spans = [guards.fresh[end - FALL_STEPS : end] for end in range(FALL_STEPS, len(guards.fresh) + 1)]
    counts = [sum(asked for _, asked in span) for span in spans]
    rates = [sum(rate * asked for rate, asked in span) / count for span, count in zip(spans, counts, strict=True)]
    earlier = list(zip(rates, counts, strict=True))[:-FALL_STEPS]
    if not earlier:
        return False
    best, asked = max(earlier)
    return rates[-1] < FALLEN * best and best - rates[-1] > FALL_ERRORS * math.sqrt(0.25 / asked + 0.25 / counts[-1])


def _skipping(guards: Guards, line: Line) -> bool:
    skipped, applied = line.get("optim/updates_skipped", 0), line.get("optim/updates_applied", 0)
    return skipped > 0 and skipped >= SKIPPED * (skipped + applied)


CONDITIONS: dict[str, Callable[[Guards, Line], bool]] = {
    "no reward": lambda guards, line: line.get("verdict/correct", 0) == 0 and not line.get("reward/mean"),
    "no mixed group": lambda guards, line: (
        line.get("batch/solve_all", 0.0) + line.get("batch/solve_none", 0.0) >= 1.0
        and line.get("reward/mean", line.get("batch/pass_at_1")) == line.get("batch/pass_at_1")
    ),
    "collapsed": _collapsed,
    "fallen": _fallen,
    "fresh burst": lambda guards, line: line.get("policy/ratio_fresh_max", 1.0) > BURST,
    "replayed burst": lambda guards, line: line.get("policy/ratio_replay", 1.0) > MEAN_BURST,
    "cut off": lambda guards, line: line.get("length/clipped", 0.0) >= CUT_OFF,
    "skipping": _skipping,
    "drifted": lambda guards, line: line.get("replay/scanned", 0) > 0 and line["replay/accepted"] == 0,
}
GUARDS = [Guard(holds=CONDITIONS[name], **words) for name, words in tables(__file__, "guards.toml").items()]


def _sentence(guard: Guard, line: Line) -> str:
    text = f"step {line['step']}: " + guard.message.format(after=guard.after, **line)
    if not guard.with_verdicts:
        return text
    counts = {verdict.value: line.get(f"verdict/{verdict.value.replace(' ', '_')}", 0) for verdict in Verdict}
    total = max(1, sum(counts.values()))
    shares = ", ".join(f"{name} {count / total:.0%}" for name, count in counts.items() if count)
    return f"{text}. Verdicts: {shares}; responses are in samples/"


def require_current_weights(rollouts: Iterable[Rollout], weight_version: int) -> None:
    """Raise RunError for a rollout that was sampled with other weights than version `weight_version`."""
    for rollout in rollouts:
        if rollout.weight_version != weight_version:
            raise RunError(
                f"a rollout of question {rollout.question_id} was sampled with version {rollout.weight_version} of the "
                f"weights, the policy has version {weight_version}: the rollout engine missed a sync. Go on with "
                "--resume, which hands it the weights again."
            )


def gap_bound(dtype: str, asked: float, first: Sequence[tuple[float, float]], entropy: float) -> float:
    """Largest mean gap of a step of this entropy: what is `asked`, or by gap and entropy of the run's `first` steps.

    Rounding grows with the logits' spread over the tokens that are likely, and so with the entropy.
    """
    fixed = asked or MAX_MEAN_GAPS[dtype]
    if asked or dtype == "float32":
        return fixed
    if not first:
        return GAP_ROOM * fixed
    gap, before = (sum(column) / len(first) for column in zip(*first, strict=True))
    return max(fixed, GAP_ROOM * gap * max(1.0, entropy / max(before, LEAST_ENTROPY)))


def require_small_gap(metrics: Mapping[str, float | int], dtype: str, bound: float) -> None:
    """Raise RunError where log-probs or entropies of engine and trainer differ by more than `bound` in `dtype`.

    Entropies are there where the engine tells them.
    """
    for name, what in (("policy/logprob_gap_mean", "log-probs"), ("policy/entropy_gap_mean", "entropies")):
        if name in metrics and not metrics[name] <= bound:
            raise RunError(
                f"the rollout engine's {what} differ from the trainer's by {metrics[name]:.3g} a token, bound "
                f"{bound:.3g} in {dtype}: it sampled with other weights, or computes the model otherwise. Go on with "
                "--resume, which hands it the weights again; if it comes back, use another rollout.engine, or allow "
                "more with --set rollout.max_logprob_gap."
            )
