"""Effect of one memory: steps made again from a checkpoint, as they were and without one unit that the first replayed.

All branches begin with the same state and random numbers, and their first step has the same rollouts. A unit (a stored
row, or a group where groups are drawn) is left out after the place has given its whole experience: it is no member of
its group and not in the loss, while all else trains in the mini-batches where it was; one of that unit alone is no
update. Its effect is the outcome of the factual branch less that of the branch without it, on the held-out questions.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from filelock import FileLock

from exgrpo_cli.base import files, reporter, statistics, types
from exgrpo_cli.base.errors import InputError, RunError
from exgrpo_cli.config.settings import Config
from exgrpo_cli.grading.verifiers import sum_asked
from exgrpo_cli.ledger import reader, schemas, writer
from exgrpo_cli.machine import settle, survey
from exgrpo_cli.questions.made import countdown, sums
from exgrpo_cli.ranks import ALONE
from exgrpo_cli.replay.store import Store
from exgrpo_cli.runs.folder import RunFolder, complete_steps
from exgrpo_cli.training import checkpoint, loop, metrics, questions, setup, validation, verify

PLACES = ("replace", "join", "append", "refill")
"""Places whose rows train beside rollouts that are the same without them."""
FEATURES = ("entropy", "advantage", "headroom", "age", "num_tokens", "k")
"""Columns that say what was known of a unit before the step that replayed it."""
EFFECTS = ("effect_logprob", "effect_pass_at_1")
AT_ONCE = 8
"""Most branches that a process makes before it begins anew."""

Unit = dict[str, Any]
Outcome = tuple[list[dict[str, Any]], list[np.ndarray], np.ndarray]
"""The end of a branch: lines of its journal; of each held-out question the log-probs of its gold answer's tokens, in
nats, and pass@1."""


def fork(
    run: Path,
    config: Config,
    bases: list[int],
    steps: int,
    rows: int,
    seed: int,
    jobs: int,
    to: Path,
    tell: reporter.Reporter,
    *,
    instead: bool = False,
) -> dict[str, Any]:
    """Effects, `steps` steps later, of what the step after each of `bases` replayed, of at most `rows` units of it (0:
    all), drawn by `seed`; what `exgrpo fork --json` prints. `config` is the run's own.

    An effect is beside a branch without the unit, or with `instead` beside one in which another row of its question
    trains that could have been chosen.

    Raises InputError for what cannot be made again, RunError where a step comes out otherwise than it did.
    """
    require_forkable(run, config, bases, steps)
    ledger, wanted = reader.LedgerReader(run / "replay"), dict[tuple[int, int, int | None], Unit]()
    for base in bases:
        if not (units := replayed_units(ledger, base, groups=config.replay.draws_groups)):
            raise InputError(f"step {base + 1} of {run} replayed nothing: there is nothing to leave out.")
        rng = np.random.default_rng((seed, base))
        if instead and not (units := with_others(ledger, base, units, rng)):
            raise InputError(f"step {base + 1} of {run} had one row to choose from for each question: none is another.")
        drawn = rng.permutation(len(units))[: rows or None]
        wanted |= {(base, units[at]["unit_id"], units[at]["instead"]): units[at] for at in sorted(drawn)}
    to.mkdir(parents=True, exist_ok=True)
    log, saved = to / "forks.jsonl", to / "forks.parquet"

    def made() -> dict[tuple[int, int, int | None], Unit]:
        found = [line for line in files.read_json_lines(log) if line["steps"] == steps]
        lines = {(line["step"], line["unit_id"], line.get("instead")): line for line in found}
        return {key: lines[key] for key in wanted if key in lines}

    with files.take(FileLock(to / ".lock"), f"{to} is being written by another process."), ExitStack() as stack:
        log.touch()
        files.drop_torn_line(log)
        # Those in a run's own folder go where it goes.
        if to.parent != run and (others := {line["run"] for line in files.read_json_lines(log)} - {str(run)}):
            raise InputError(f"{to} holds forks of {min(others)}: name another folder by --output.")
        done = made()
        left = [[unit for key, unit in wanted.items() if key[0] == base and key not in done] for base in bases]
        parts = [units[at : at + AT_ONCE] for units in left for at in range(0, len(units), AT_ONCE)]
        spawned = partial(ProcessPoolExecutor, jobs, get_context("spawn"), initializer=_end_with_parent)
        each: Any = stack.enter_context(spawned()).map if jobs > 1 else map
        for _ in each(partial(make_branches, run, config, steps, log), parts):
            tell.progress(len(made()), len(wanted), "branches")
        table = pa.Table.from_pylist(found := list(made().values()))
        files.write_whole(saved, lambda file: writer.write_parquet(file, table, table.schema))
    return {"run": str(run), "step": bases, "steps": steps, "table": str(saved), **summary(found)}


def effect_of_memories(run: Path, config: Config, tell: reporter.Reporter) -> float | None:
    """Mean effect on gold log-probs, in nats, of every unit that the steps behind `validation.forks` replayed, a step
    later; None where they replayed none, and with a note where they cannot be made again."""
    if not has_memories(config):
        return None
    ledger, groups = reader.LedgerReader(run / "replay"), config.replay.draws_groups
    bases = [base for base in sorted({*config.validation.forks}) if replayed_units(ledger, base, groups=groups)]
    try:
        found = fork(run, config, bases, 1, 0, 0, 1, run / "forks", tell) if bases else None
    except (InputError, RunError) as error:
        # The run itself is whole.
        tell.note(f"no effect of memories: {error}")
        found = None
    return float(found[EFFECTS[0]]["mean"]) if found else None


def has_memories(config: Config) -> bool:
    """Whether what a step replays can be left out of it."""
    return config.replay.enabled and config.replay.composition in PLACES and not config.rollout.carry_over


def require_forkable(run: Path, config: Config, bases: Sequence[int], steps: int) -> None:
    """Raise InputError where branches cannot be made from the checkpoints of `bases`."""
    verify.require_repeatable(run, config)
    if not has_memories(config):
        why = "with rollouts that what is replayed changes" if config.replay.enabled else "without replay"
        raise InputError(f"{run} was made {why}: no step of it has a memory to leave out.")
    if unlike := verify.machine_differences(run):
        raise InputError(f"{run} was made on another kind of machine ({'; '.join(unlike)}): fork it on one like that.")
    folder = RunFolder.existing(run)
    reached = max((line["step"] for line in folder.metrics_lines()), default=0)
    saved = [base for base in complete_steps(folder.checkpoints) if base + steps <= reached]
    if missing := sorted({*bases} - {*saved}):
        raise InputError(f"{run} has no checkpoint of step {missing[0]} and {steps} steps after it, but of {saved}.")
    if not questions.stored_questions(folder.data).heldout:
        raise InputError(f"{run} has no held-out questions, by which an effect is measured.")


def replayed_units(ledger: reader.LedgerReader, base: int, *, groups: bool) -> list[Unit]:
    """The units that the step after `base` replayed, each with its rows and what was known of it before."""
    is_next, units = pc.field("step") == base + 1, []
    selected = ledger.events().filter(is_next & (pc.field("event") == schemas.Event.SELECTED.value))
    scanned = ledger.replays().filter(is_next & pc.field("accepted")).to_pylist()
    found = dict.fromkeys(selected["trajectory_id"].to_pylist()) | {row["unit_id"]: row["headroom"] for row in scanned}
    scores = ledger.scores().filter(pc.field("step") <= base + 1).to_pylist()
    measured = {score["trajectory_id"]: score["entropy"] for score in scores}
    born = ledger.trajectories()
    for unit, headroom in found.items():
        rows = born.filter(pc.field("group_id" if groups else "trajectory_id") == unit).to_pylist()
        entropies = [measured.get(row["trajectory_id"], row["entropy"]) for row in rows]
        advantages = [abs(np.nan if row["advantage"] is None else row["advantage"]) for row in rows]
        known = [np.mean(entropies), np.mean(advantages), np.nan if headroom is None else headroom]
        known += [base + 1 - rows[0]["step_born"], sum(row["num_tokens"] for row in rows), rows[0]["k"]]
        told = {"step": base, "unit_id": unit, "question_id": rows[0]["question_id"], "instead": None}
        told |= {name: float(own) if np.isfinite(own) else None for name, own in zip(FEATURES, known, strict=True)}
        units.append(told | {"ids": [row["trajectory_id"] for row in rows]})
    return units


def with_others(ledger: reader.LedgerReader, base: int, units: Sequence[Unit], rng: np.random.Generator) -> list[Unit]:
    """The units whose questions had other candidates in the step after `base`, each with one of these, drawn evenly."""
    passed_over = ledger.scores().filter((pc.field("step") == base + 1) & ~pc.field("chosen"))
    lists = passed_over.group_by("question_id").aggregate([("trajectory_id", "list")]).to_pylist()
    others = {row["question_id"]: row["trajectory_id_list"] for row in lists}
    known = [unit for unit in units if unit["question_id"] in others]
    return [unit | {"instead": int(rng.choice(others[unit["question_id"]]))} for unit in known]


def _end_with_parent() -> None:
    """Let this process end when its parent does, which may have been killed."""
    parent: Any = parent_process()
    Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def make_branches(run: Path, config: Config, steps: int, log: Path, units: Sequence[Unit]) -> None:
    """Make the factual branch, and that without each of these units of one step: a line of `log`.

    Raises RunError where the factual branch is not what the run did.
    """
    recorded = {line["step"]: line for line in RunFolder.existing(run).metrics_lines()}
    with branching(run, config, units[0]["step"], steps) as branch:
        factual = branch({})
        for line in factual[0]:
            told = {key: value for key, value in line.items() if not key.startswith("time/")}
            if told.items() - recorded[line["step"]].items():
                raise RunError(f"step {line['step']} of {run} comes out otherwise: exgrpo verify says where.")
        for unit in units:
            line = {"run": str(run), "steps": steps, **unit}
            without = branch(dict.fromkeys(line.pop("ids"), line["instead"]))
            files.append_json_lines(log, [line | effect(factual, without)])


@contextmanager
def branching(
    run: Path, config: Config, base: int, steps: int
) -> Iterator[Callable[[Mapping[int, int | None]], Outcome]]:
    """Yields the function that makes a branch, in whose first step other trajectories (None: nothing) train instead of
    some, by their ids."""
    with TemporaryDirectory(prefix="exgrpo-fork-") as folder, ExitStack() as stack:
        there = RunFolder(Path(folder) / "run")
        own, plan = settle.settle(verify.copy_until(run, there.path, config, base), survey.survey_machine())
        torch.set_num_threads(own.run.threads)
        parts, _, _ = setup.setup_run(plan, there, reporter.SilentReporter(), stack, ALONE, is_new=False)
        tokenizer, golds = parts.backbone.tokenizer, []
        for question in parts.heldout:
            ids = tokenizer.encode(gold_response(question, parts.answer_format), add_special_tokens=False)
            response = np.array([*ids, tokenizer.eos_token_id], dtype=np.int32)
            golds.append(types.TokenSequence(prompt_ids=parts.prompts[question.id], response_ids=response))
        (old := parts.main_store).close()
        opened = partial(Store, old.folder, identity=old.writer.identity, rules=old.rules, barred=old.barred)

        def branch(instead: Mapping[int, int | None]) -> Outcome:
            parts.generator.sleep()
            state = checkpoint.load_checkpoint(there.checkpoints / checkpoint.folder_name(base), parts)
            parts.policy.offload()
            parts.sync()
            lines, clock = list[dict[str, Any]](), metrics.Clock(lambda phase: nullcontext())
            with opened(question_ids=old.questions.numbers, at_step=base) as store:
                now = replace(parts, store=store, instead=instead)
                while len(lines) < steps and (made := loop.run_step(now, state, state.step + 1, clock)):
                    lines.append(made[0])
                    now = replace(now, instead={})
            gold = [scores.logprobs for scores in parts.policy.score(golds)]
            parts.policy.offload()
            answers = validation.answered(parts, parts.heldout)
            return lines, gold, answers.correct / answers.samples

        yield branch


def gold_response(question: types.Question, form: types.AnswerFormat) -> str:
    """The response that states the gold answer, with its working where the question is a sum or of countdown."""
    asked, value, lines = sum_asked(question), 0, list[str]()
    # One operation after the other: that is what the brackets of countdown say.
    text = sums.expression(asked.terms) if asked else question.answer * (question.source == countdown.SOURCE)
    for sign, number in re.findall(r"([-+*]?)\(*(\d+)", text):
        before, other = value, int(number)
        value = {"*": value * other, "-": value - other}.get(sign, value + other)
        value = value % asked.modulus if asked and asked.modulus and lines else value
        lines.append(f"{before}{sign}{number}={value}")
    answer = f"\\boxed{{{question.answer}}}" if form.requires_box else question.answer
    return "\n".join([*lines[1:], *[sums.THINK_END] * form.opens_think, answer])


def effect(factual: Outcome, without: Outcome) -> dict[str, float]:
    """Effect of a unit: the factual outcome less that without it, each difference with its 95 % interval over the
    questions, and the mean absolute difference of the gold tokens' log-probs."""
    apart = [one.astype(np.float64) - other for one, other in zip(factual[1], without[1], strict=True)]
    own = statistics.t_interval([float(each.sum()) for each in apart])
    passed = statistics.compare_paired(without[2], factual[2], np.random.default_rng(0))
    told = {"effect_logprob": own.mean, "effect_logprob_low": own.low, "effect_logprob_high": own.high}
    told |= {"effect_pass_at_1": passed.value, "effect_pass_at_1_low": passed.low, "effect_pass_at_1_high": passed.high}
    return told | {"drift": float(np.abs(np.concatenate(apart)).mean())}


def summary(found: Sequence[Unit]) -> dict[str, Any]:
    """Mean effects over units, and the rank correlation of each feature with the effect on log-probs; null where fewer
    than four units have it, or all alike."""
    ranked = {}
    for name in FEATURES:
        pairs = [(unit[name], unit[EFFECTS[0]]) for unit in found if unit[name] is not None]
        known = statistics.rank_correlation(pairs)
        ranked[name] = known and {"units": len(pairs), **asdict(known)}
    means = {name: asdict(statistics.t_interval([unit[name] for unit in found])) for name in EFFECTS}
    return {"units": len(found), **means, "rank_correlation": ranked}
