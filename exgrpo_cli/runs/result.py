"""Figures of a finished run: `result.json`, which studies compare, and `summary.json` read back.

A result stands for its run wherever the run folder is not: on another machine, or in `docs/results/`.
"""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import msgspec
import numpy as np
from jaxtyping import Int64

from exgrpo_cli.base.errors import DamageWarning, InputError
from exgrpo_cli.base.files import NUMBER, Shape, file_digest, read_json, require_shape, values_digest, write_json
from exgrpo_cli.config.settings import NOT_HASHED, Config, flat
from exgrpo_cli.runs.folder import find_changes

RESULT_FILE = "result.json"
VERDICT_FILE = "verified.json"
"""Verdict of `verify --keep`, beside the digest of the journal that it read."""
SUFFIX = f".{RESULT_FILE}"
"""File name of a result outside its run folder: `exgrpo-100.result.json`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CurvePoint:
    """Held-out pass@1 at one moment of a run."""

    step: int
    generated: int
    """Tokens generated until then."""
    pass_at_1: float
    trained: int | None = None
    """Tokens trained until then; None where they were not counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PassRates:
    """pass@1 of some questions before and after training."""

    questions: int
    before: float | None
    """None where there is no such question."""
    after: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Memorising:
    """Whether a run learnt more about the questions it replayed than about others of their level."""

    trained_questions: int
    """Distinct questions that were rolled out."""
    replayed_questions: int
    """Distinct questions that were replayed."""
    replayed: PassRates
    """Pass rates of the training questions asked before and after that were replayed."""
    rolled_out: PassRates
    """Those that were rolled out and never replayed."""
    never_seen: PassRates
    """Held-out questions, weighted to have the levels of the replayed ones; all of them where levels are not known."""
    heldout: PassRates


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSample:
    """The training questions that were asked before and after training, each by itself, all in one order."""

    ids: str
    """With a blank between two."""
    samples: int
    """Responses to each, before and after."""
    before: Int64[np.ndarray, " asked"]
    """Correct ones before training."""
    after: Int64[np.ndarray, " asked"]
    visits: Int64[np.ndarray, " asked"]
    """Groups that were rolled out."""
    successes: Int64[np.ndarray, " asked"]
    """Correct ones among the fresh rollouts of those."""
    replays: Int64[np.ndarray, " asked"]
    """Replays of a stored trajectory, or of a stored group."""
    barred: Int64[np.ndarray, " asked"]
    """1 where `data.barred` bars it from replay, else 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidTraces:
    """Stored correct responses whose every step is right, where the task can tell."""

    trajectories: int
    valid: float
    """Share of all."""
    auc: float | None
    """Chance that a valid one has the lower entropy of a pair of one valid and one not; None without both kinds."""
    low_entropy: float | None
    """Share valid in the third of lowest entropy."""
    high_entropy: float | None
    """Share valid in the third of highest entropy."""
    auc_within: float | None = None
    """As `auc`, of pairs of one question alone, which is what a choice among a question's trajectories needs: neither
    its difficulty nor when they were sampled tells for them. None without such a pair."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """Totals that a run spent."""

    steps: int
    updates: int
    generated: int
    trained: int
    scored: int
    seconds: float
    """Wall time, interruptions not counted."""
    training_seconds: float
    """Part of it in the phases of the steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """Endpoints and spending of one finished run."""

    format: Literal[1] = 1
    config_hash: str
    method: str
    regime: str
    seed: int
    budget_amount: float
    """Tokens or seconds that the run might spend; 0 where steps were counted. No part of the hash, since in a study of
    equal budgets each seed has its own."""
    finished: str
    samples: int
    """Responses a held-out question was given; 0 where none was asked."""
    before: Int64[np.ndarray, " questions"]
    """Correct ones of each held-out question before training."""
    after: Int64[np.ndarray, " questions"]
    """After training, the same questions in the same order."""
    curve: tuple[CurvePoint, ...]
    area: float | None
    """Area under the held-out curve over tokens generated, divided by their number: a mean pass@1."""
    newly_solved: float | None
    """Share of the held-out questions without a correct response before training that had one at a later validation."""
    collapsed: bool | None
    """Whether the last held-out pass@1, upper end of its interval, is below half of the best one."""
    memorising: Memorising | None
    valid_traces: ValidTraces | None
    totals: Totals
    after_valid: Int64[np.ndarray, " questions"] | None = None
    """Correct answers of `after` that are right in every step, where the task can tell."""
    after_at: Mapping[str, Int64[np.ndarray, " questions"]] = field(default_factory=dict)
    """As `after`, by each further temperature (`validation.temperatures`)."""
    lost: float | None = None
    """Share of the visits after one that solved their question which did not; None without such a visit."""
    regained: float | None = None
    """Share of the visits of a question that was lost which solved it."""
    memory: float | None = None
    """Mean effect in nats of a replayed row or group on held-out gold log-probs, a step later (`validation.forks`)."""
    second_graders: Mapping[str, float] = field(default_factory=dict)
    """Held-out pass@1 after training by each grader that stands beside the run's own."""
    training_sample: TrainingSample | None = None
    """None where no training questions were asked."""
    started: str | None = None
    """When the run was begun, UTC; None in results of versions that did not say, which are *undated*."""
    ended: str | None = None
    code: str = ""
    """The code that began the run, `commit HASH` or `files HASH`, and `, then ...` where another ended it."""
    machine: Mapping[str, str | int] = field(default_factory=dict)
    """Processor, GPUs, torch and threads of the machine that began it."""
    claim: Mapping[str, str] = field(default_factory=dict)
    """Hash of each claim that the run was begun for, by the claim's name."""

    def to_json(self) -> dict[str, Any]:
        """As `result.json` has it, with a checksum, which goes where the file goes; counts of correct responses are one
        text of numbers, which stays on one line."""

        def plain(value: Any) -> Any:
            return " ".join(map(str, value)) if isinstance(value, np.ndarray) else value.item()

        values: dict[str, Any] = msgspec.to_builtins(self, enc_hook=plain)
        return values | {"checksum": values_digest(values)}


def write_result(path: Path, result: RunResult) -> None:
    """Write a result file. Raises RunError where the disk refuses."""
    write_json(path, result.to_json())


def read_result(path: Path) -> RunResult:
    """Read a result file. Raises InputError naming the file that is damaged, no result, or of another format."""
    if path.name == RESULT_FILE and (changes := find_changes(path.parent, (RESULT_FILE,))):
        raise InputError(f"{changes[0]}: restore it, or leave the run out.")
    values = read_json(path)
    if values.pop("checksum", None) != values_digest(values):
        raise InputError(f"{path} has changed since its run wrote it: restore it, or leave it out.")
    try:
        return msgspec.convert(values, RunResult, dec_hook=lambda _, text: np.array(text.split(), dtype=np.int64))
    except (ValueError, AttributeError) as error:
        raise InputError(f"{path} is not the result of a run ({error}): restore it, or leave it out.") from error


def find_results(folder: Path) -> Iterator[RunResult]:
    """The results below a folder: of runs, and copies of them, which end in `.result.json`.

    Raises InputError for a folder that is not there and for a damaged result.
    """
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder of results: name one that holds {RESULT_FILE} files.")
    yield from map(read_result, sorted(folder.rglob(f"*{RESULT_FILE}")))


def config_hash(config: Config) -> str:
    """Sixteen digits that two runs share where they differ in nothing but seed and machine.

    What a run settles when it starts is settled here too, so that a plan and the run of it agree. Settings at their
    defaults are left out: a setting that a later version adds changes no hash, nor does whose log-probs a default run
    takes, since they are the same but for rounding. A GGUF file counts by its name, wherever it lies.
    """
    values = flat(config) | {f"optim.{name}": value for name, value in config.settled_schedule().items()}
    if config.rollout.logprobs == config.usual_logprobs:
        values["rollout.logprobs"] = "auto"
    if config.optim.schedule == "constant":
        values["optim.horizon"] = 0
    if config.backbone.source.endswith(".gguf"):
        values["backbone.source"] = Path(config.backbone.source).name
    # The place of this run's replay may have keys that the default one has not.
    own = {f"replay.{key}": value for key, value in asdict(type(config.replay)()).items()}
    usual = own | flat(Config())
    return values_digest({name: values[name] for name in values.keys() - NOT_HASHED if values[name] != usual[name]})


_SCORE: Shape = {**dict.fromkeys(("pass_at_1", "low", "high"), NUMBER), **dict.fromkeys(("questions", "samples"), int)}
_SUMMARY: Shape = {
    "steps": int,
    "finished": str,
    "method": str,
    "backbone": str,
    "seed": int,
    "heldout": {"set": str, "before": dict, "after": dict},
    "tokens": {"generated": int, "trained": int},
    "wall_seconds": dict[str, NUMBER],
    "peak_memory_bytes": int,
    "replay": {"questions": int, "trajectories": int, "retired": int, "used": int},
}


class _AtK(TypedDict):
    value: float
    low: float
    high: float


class _Second(TypedDict):
    pass_at_1: float
    disagreements: int


_REMARKED: Shape = {
    "pass_at_k": dict[Annotated[str, msgspec.Meta(pattern="^[0-9]{1,9}$")], _AtK],
    "valid_pass_at_1": NUMBER,
    "constant_answer": {"answer": str, "pass_at_1": NUMBER},
    "second_graders": dict[str, _Second],
}
"""Parts of a score that not every run has."""
LEAST_CONSTANT = 0.02
"""pass@1 from which a constant answer is reported, where a score is no better."""


class Ending(StrEnum):
    """Reasons for which training ends by itself."""

    UNDER_WAY = ""
    """It has not ended."""
    STEPS_REACHED = "steps reached"
    """All of `run.steps`; more of them may be asked for."""
    BUDGET_SPENT = "budget spent"
    """The tokens or seconds of `run.budget_amount`."""
    ALL_RETIRED = "all questions retired"
    """No question is left to train on; no further step is possible."""

    @property
    def is_final(self) -> bool:
        """Whether a resumed run has nothing left to do, however many steps it is given."""
        return self in (Ending.ALL_RETIRED, Ending.BUDGET_SPENT)


def has_ended(run: Path, last_step: int) -> bool:
    """Whether a run has its summary and nothing left to do up to `last_step`.

    A damaged summary is none, of which a warning tells: a resumed run writes it again.
    """
    path = run / "summary.json"
    if not path.is_file():
        return False
    try:
        summary = read_json(path, {"steps": int, "finished": str})
    except InputError as error:
        warnings.warn(f"{error} The run counts as unfinished.", DamageWarning, stacklevel=2)
        return False
    ended_early = summary["finished"] in [ending for ending in Ending if ending.is_final]
    return ended_early or bool(summary["steps"] >= last_step)


def read_summary(path: Path) -> dict[str, Any]:
    """The final figures in a `summary.json`. Raises InputError where it is missing or damaged."""
    summary = dict(read_json(path, _SUMMARY))
    for name in ("before", "after"):
        if score := summary["heldout"][name]:
            more = {key: shape for key, shape in _REMARKED.items() if key in score}
            require_shape(score, {**_SCORE, **more}, f"{path}, heldout.{name}")
    require_shape(summary["wall_seconds"], {"total": NUMBER}, f"{path}, wall_seconds")
    return summary


def measures(score: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """The measures of a held-out score by name, for people, each with its meaning; 95 % intervals in brackets."""
    value = f"{score['pass_at_1']:.3f} [{score['low']:.3f}, {score['high']:.3f}]"
    found = {"pass@1": (value, "share of answers that are correct, in brackets its 95 % interval")}
    if (k := max(map(int, score.get("pass_at_k", {})), default=1)) > 1:
        at_k = score["pass_at_k"][str(k)]
        value = f"{at_k['value']:.3f} [{at_k['low']:.3f}, {at_k['high']:.3f}]"
        found[f"pass@{k}"] = value, f"questions with a correct answer among {k}"
    if "valid_pass_at_1" in score:
        found["valid pass@1"] = f"{score['valid_pass_at_1']:.3f}", "answers whose working is correct as well"
    for name, second in score.get("second_graders", {}).items():
        if apart := second["disagreements"]:
            found[f"by {name}"] = f"{second['pass_at_1']:.3f}", f"pass@1 by a second grader, which differs on {apart}"
    return found


def learnt(heldout: Mapping[str, Any]) -> str:
    """One sentence on the held-out pass@1 of a run, before and after where it has both."""
    before, after = heldout["before"], heldout["after"]
    if not before or not after:
        return f"held-out pass@1 {'after' if after else 'before'} training {(after or before)['pass_at_1']:.3f}"
    rose, fell = after["low"] > before["high"], after["high"] < before["low"]
    chance = "" if rose or fell else ", which may be chance (the 95 % intervals overlap)"
    verb = "rose" if rose else "fell" if fell else "went"
    return f"held-out pass@1 {verb} from {before['pass_at_1']:.3f} to {after['pass_at_1']:.3f}{chance}"


def how_asked(score: Mapping[str, Any], name: str, temperature: float) -> str:
    """Questions behind a held-out score, of the set `name`, and their sampling."""
    answers = f"{score['samples']} answer{'s' * (score['samples'] > 1)}"
    return f"{score['questions']} questions of {name}, {answers} each, temperature {temperature:g}"


def verdict_of(run: Path) -> str:
    """Steps of a run that were made again, and what came of it; empty where none were, or its journal is longer by now.

    Raises InputError for a file that is damaged.
    """
    if not (file := run / VERDICT_FILE).is_file():
        return ""
    noted = read_json(file, {"steps": list, "exact": bool, "differences": int, "journal": str})
    if noted["journal"] != file_digest(run / "metrics.jsonl"):
        return ""
    how = "to the bit" if noted["exact"] else "on another kind of machine, within a tolerance"
    return f"steps {', '.join(map(str, noted['steps']))} made again, {how}: {noted['differences'] or 'no'} differences"


def remarks(score: Mapping[str, Any]) -> str:
    """Behind `; ` each, what a reader of a score must know: coverage, right steps, a constant answer, other graders."""
    found = [f"{name} {value}" for name, (value, _) in list(measures(score).items())[1:] if name.startswith("pass@")]
    if "valid_pass_at_1" in score:
        found.append(f"{score['valid_pass_at_1']:.3f} right in every step of the working, not in the answer alone")
    constant = score.get("constant_answer", {"pass_at_1": 0.0})
    if constant["pass_at_1"] >= max(LEAST_CONSTANT, score["low"]):
        gets = f"what answering {constant['answer']} throughout gets"
        found.append(f"not significantly above {constant['pass_at_1']:.3f}, {gets}")
    for name, second in score.get("second_graders", {}).items():
        apart = second["disagreements"]
        differs = f"by the second grader {name} {second['pass_at_1']:.3f} (differs on {apart} answers)"
        found.append(differs if apart else f"the second grader {name} agrees on every answer")
    return "".join(f"; {remark}" for remark in found)
