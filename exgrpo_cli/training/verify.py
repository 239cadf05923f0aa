"""Steps of a run made once more from its checkpoints, and all that its folder says of them otherwise.

A step is made again in a temporary folder, by the code that trains: from the newest checkpoint before it, which is
taken as it is, or from the beginning. What the folder says of every step on the way is compared: lines of the journals,
samples, rows of the ledger with their bodies, the checkpoint after the last of them, and at the end of the run its
model and final figures. On the same kind of machine all of it is equal; on another one rounding makes other samples
sooner or later, so that the journal's numbers alone are compared, within TOLERANCE.
"""

import math
import random
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from exgrpo_cli.base.errors import InputError, Interrupted
from exgrpo_cli.base.files import file_digest, find_damage, read_json, read_json_lines, write_text
from exgrpo_cli.base.reporter import Reporter, SilentReporter
from exgrpo_cli.base.versions import describe_machine, processor
from exgrpo_cli.config.settings import Config, to_toml
from exgrpo_cli.ledger import reader, schemas
from exgrpo_cli.machine.survey import visible_gpus
from exgrpo_cli.runs.folder import RunFolder, complete_steps, find_changes
from exgrpo_cli.runs.result import RESULT_FILE, config_hash
from exgrpo_cli.runs.watchdog import TimeLimit
from exgrpo_cli.training import checkpoint, questions
from exgrpo_cli.training.run import train

TOLERANCE = 0.05
"""Largest difference of a number of the journal, relative or absolute, between machines of two kinds."""
CLOCKED = {"time", "seconds", "wall_seconds", "training_seconds", "started", "ended"}
UNLIKE = CLOCKED | {"peak_memory_bytes", "code", "machine", "checksum"}
"""Beginnings of the names of values that no second run has again."""

DECISIVE = ("processor", "devices", "torch", "transformers", "vllm")
"""Kind of machine: results have other last bits on another."""

Facts = dict[tuple[str, int, str], Mapping[str, Any]]
"""Values by the file or table that has them, the step that they are of, and the row."""


@dataclass(kw_only=True, slots=True)
class StepLimit(TimeLimit):
    """Limit of a run that is to stop, its state saved, after so many steps."""

    seconds: float = math.inf
    left: int

    def count_step(self, seconds: float) -> None:
        """See `TimeLimit.count_step`."""
        self.left -= 1

    @property
    def is_near(self) -> bool:
        """Whether all of them are made."""
        return self.left <= 0


def verify(run: Path, config: Config, *, steps: int, seed: int, reporter: Reporter) -> dict[str, Any]:
    """Make `steps` steps of the run, drawn by `seed`, again, and compare; what `exgrpo verify --json` prints.

    `config` is the run's own. Nothing is written into its folder. Raises InputError for what cannot be made again.
    """
    folder = RunFolder.existing(run)
    made = max((line["step"] for line in folder.metrics_lines()), default=0)
    require_repeatable(run, config)
    if not (saved := complete_steps(folder.checkpoints)):
        raise InputError(f"{run} has no checkpoint to go on from or to compare weights with: restore them from a copy.")
    if not 1 <= steps <= made:
        raise InputError(f"--steps {steps} is more than the {made} steps of {run}: ask for 1 to {made}.")
    questions.stored_questions(folder.data)
    ledger_step, problem = reader.whole_until(folder.replay)
    damage = {step: find_damage(folder.checkpoints / checkpoint.folder_name(step)) for step in saved}
    broken = f"{folder.replay} from step {ledger_step} on: {problem}" if problem else ""
    said = (*find_changes(run), *damage.values(), broken)
    differences: list[dict[str, Any]] = [{"what": sentence} for sentence in said if sentence]
    if (run / RESULT_FILE).is_file() and (noted := read_json(run / RESULT_FILE)["config_hash"]) != config_hash(config):
        differences += [{"what": "config.toml", "key": "hash", "recorded": noted, "recomputed": config_hash(config)}]
    chosen, unlike = sorted(random.Random(seed).sample(range(1, made + 1), steps)), machine_differences(run)
    whole = [0, *(step for step in saved if not damage[step] and step <= ledger_step)]
    ends = {max(base for base in whole if base < step): step for step in chosen}
    with TemporaryDirectory(prefix="exgrpo-verify-") as folder_again:
        for base, last in ends.items():
            reporter.note(f"making steps {base + 1} to {last} again")
            repeat(run, again := Path(folder_again) / checkpoint.folder_name(base), config, base, last)
            recorded, recomputed = (facts(place, run, again, base, last) for place in (run, again))
            differences += compare(recorded, recomputed, exact=not unlike)
            shutil.rmtree(again)
    told = {"made_again": sum(last - base for base, last in ends.items()), "unlike": unlike, "tolerance": TOLERANCE}
    return {"run": str(run), "steps": chosen, "exact": not unlike, **told, "differences": differences}


def require_repeatable(run: Path, config: Config) -> None:
    """Raise InputError where steps of the run would not come out the same."""
    if config.run.nproc > 1 or config.run.budget == "seconds":
        why = "on several ranks" if config.run.nproc > 1 else "by the clock (run.budget = 'seconds')"
        raise InputError(f"{run} was made {why}: only runs of one rank with another budget are made again.")


def machine_differences(run: Path) -> list[str]:
    """Signs in the run's folder that it was made on another kind of machine than this: packages, cards, processor."""
    noted = read_json(run / "environment.json", {"packages": dict, "devices": list})
    ended = read_json(run / RESULT_FILE) if (run / RESULT_FILE).is_file() else {}
    own = processor().partition("\n")[0].rpartition(": ")[2]
    here = {"processor": own, "devices": ", ".join(gpu.name for gpu in visible_gpus())}
    here |= describe_machine()["packages"]
    there = {"processor": ended.get("machine", {}).get("processor", own), "devices": ", ".join(noted["devices"])}
    there |= noted["packages"]
    pairs = {name: (there.get(name), here.get(name)) for name in DECISIVE}
    return [f"{name} {one or 'none'}, here {other or 'none'}" for name, (one, other) in pairs.items() if one != other]


def repeat(run: Path, again: Path, config: Config, base: int, last: int) -> None:
    """Train in the folder `again` from the run's checkpoint of step `base`, or its beginning, to step `last`."""
    own, limit = copy_until(run, again, config, base), StepLimit(left=last - base)
    try:
        train(own, again, resume=True, reporter=SilentReporter(), time_limit=limit)
    except Interrupted:
        if not limit.is_near:
            raise


def copy_until(run: Path, again: Path, config: Config, base: int) -> Config:
    """Copy into the folder `again` what the run goes on with from its checkpoint of step `base`, or its beginning;
    returns its configuration there, which does not save on the way."""
    # Of those at which it is forked at its end, the earlier ones too.
    saved = [step for step in complete_steps(run / "checkpoints") if step in (base, *config.validation.forks)]
    checkpoints = [f"checkpoints/{checkpoint.folder_name(step)}" for step in saved if step <= base]
    for name in ("data", "replay", *checkpoints):
        shutil.copytree(run / name, again / name)
    for name in ("environment.json", *(("metrics.jsonl", "validations.jsonl") if base else ())):
        if (run / name).is_file():
            shutil.copy(run / name, again / name)
    own = replace(config, run=replace(config.run, plots=False, log=(), save_every=10**9, save_minutes=0.0))
    write_text(again / "config.toml", to_toml(own))
    return own


def facts(place: Path, run: Path, again: Path, base: int, last: int) -> Facts:
    """All that a folder, the run's or the one made anew, says of the steps behind `base` up to `last`.

    Of what was asked, and of the files that stand at the end, what the run made anew has as well: a run that was made
    longer has asked more than it would now.
    """
    steps, found = range(base + 1 if base else 0, last + 1), Facts()
    asked = {(line["step"], line["asked"]) for line in lines_of(again / "validations.jsonl")}
    for name in ("metrics.jsonl", "validations.jsonl"):
        for line in lines_of(place / name):
            own = line["step"], line.get("asked", "")
            if line["step"] in steps and (name == "metrics.jsonl" or own in asked):
                found[name, *own] = line
    for step in steps:
        name = f"samples/step-{step:06d}.jsonl"
        found |= {(name, step, f"row {row}"): line for row, line in enumerate(lines_of(place / name))}
    ledger = reader.LedgerReader(place / "replay")
    for table in schemas.TABLES[1:]:
        for row, line in enumerate(ledger.table(table).to_pylist()):
            step = line["step_born" if table == schemas.TRAJECTORIES else "step"]
            if step in steps and table == schemas.TRAJECTORIES:
                [body] = ledger.bodies([line["trajectory_id"]])
                line["body"] = sha256(b"".join(part.tobytes() for part in body)).hexdigest()[:16]
            found |= {(f"replay/{table}", step, f"row {row}"): line} if step in steps else {}
    ends = (f"checkpoints/{checkpoint.folder_name(last)}", "model", "adapter", "summary.json", RESULT_FILE)
    for made in (path for end in ends if (run / end).exists() for path in (again / end, *(again / end).rglob("*"))):
        path = place / made.relative_to(again)
        whole = path.suffix in (".safetensors", ".pt")
        if made.is_file() and (whole or made.name in ("state.json", "summary.json", RESULT_FILE)):
            digest = {"sha256": file_digest(path) if path.is_file() else "none"}
            found[str(path.relative_to(place)), last, ""] = digest if whole else read_json(path)
    return found


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Objects of a file of JSON lines; none where it is not there."""
    return list(read_json_lines(path)) if path.is_file() else []


def flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested values by their paths, without those that no second run has again."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name.partition("/")[0] not in UNLIKE:
            found |= flat(value, f"{before}{name}.") if isinstance(value, Mapping) else {before + name: value}
    return found


def compare(recorded: Facts, recomputed: Facts, *, exact: bool) -> Iterator[dict[str, Any]]:
    """Every value that the two say otherwise; unless `exact`, of numbers of the journal alone, beyond TOLERANCE."""
    for place in sorted(recorded.keys() | recomputed.keys()):
        one, other = flat(recorded.get(place, {})), flat(recomputed.get(place, {}))
        for key in dict.fromkeys((*one, *other) if exact or place[0] == "metrics.jsonl" else ()):
            told: tuple[Any, Any] = one.get(key), other.get(key)
            near = not exact and all(isinstance(each, int | float) for each in told)
            # By their words: NaN is NaN.
            if repr(told[0]) != repr(told[1]) and not (
                near and math.isclose(*told, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
            ):
                where = dict(zip(("what", "step", "row"), place, strict=True))
                yield where | {"key": key, "recorded": told[0], "recomputed": told[1]}
