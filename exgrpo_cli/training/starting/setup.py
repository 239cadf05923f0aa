"""Everything up to the first step: extras required, parts assembled, state restored, the folder opened for writing."""

import dataclasses
import time
import warnings
from contextlib import ExitStack
from pathlib import Path

import torch

from exgrpo_cli.base.console.output import Stopper
from exgrpo_cli.base.console.reporter import Reporter
from exgrpo_cli.base.errors import DamageWarning, InputError
from exgrpo_cli.base.files import write_json, write_text
from exgrpo_cli.config.contradictions import setting
from exgrpo_cli.config.settings import Config, to_toml
from exgrpo_cli.engines.vllm.start import require_vllm
from exgrpo_cli.grading import GradingPool
from exgrpo_cli.machine.settle import Plan, replay_notes
from exgrpo_cli.machine.survey import describe_environment
from exgrpo_cli.ranks import Ranks
from exgrpo_cli.replay.by_unit import UnitPlace
from exgrpo_cli.replay.replace import Replace
from exgrpo_cli.replay.warm_start import WarmStartReport
from exgrpo_cli.runs.folder import RunFolder
from exgrpo_cli.runs.manifest import forget_checksums, note_checksums
from exgrpo_cli.runs.watchdog import TimeLimit, Watchdog
from exgrpo_cli.training.active_run import ActiveRun
from exgrpo_cli.training.loop import sync
from exgrpo_cli.training.parts import Parts
from exgrpo_cli.training.resuming.checkpoint import ResumePoint, find_resume_point, load_checkpoint, set_aside
from exgrpo_cli.training.resuming.checkpoint import folder_name as checkpoint_name
from exgrpo_cli.training.resuming.resume import remember_run
from exgrpo_cli.training.resuming.state import RunState
from exgrpo_cli.training.starting.assemble import assemble, open_store
from exgrpo_cli.training.starting.run_questions import (
    RunQuestions,
    check_answers,
    load_questions,
    store_questions,
    stored_questions,
)
from exgrpo_cli.training.step.guards import Guards
from exgrpo_cli.training.trackers import open_trackers, require_trackers


def require_extras(config: Config) -> None:
    """Raise InputError naming the extra to install for the first engine or tracker whose package is not there."""
    if config.rollout.engine == "vllm":
        require_vllm(config.run.device)
    if config.optim.engine == "deepspeed":
        from exgrpo_cli.engines.policy.deepspeed import require_deepspeed

        require_deepspeed(torch.device(config.run.device))
    require_trackers(config.run.log)


def setup_run(
    plan: Plan,
    folder: RunFolder,
    stopper: Stopper,
    reporter: Reporter,
    stack: ExitStack,
    ranks: Ranks,
    watchdog: Watchdog,
    time_limit: TimeLimit,
    *,
    is_new: bool,
) -> ActiveRun:
    """Everything up to the first step; a new run's folder gets its `config.toml` last, when all else is in place."""
    started, config = time.perf_counter(), plan.config
    with stopper.immediate():
        point = ResumePoint() if is_new else ranks.from_main(lambda: find_resume_point(folder, config))
        for note in point.notes if ranks.is_main else ():
            warnings.warn(note, DamageWarning, stacklevel=2)
        questions = ranks.from_main(
            lambda: load_questions(config, reporter) if is_new else stored_questions(folder.data, config)
        )
        pool = stack.enter_context(GradingPool(config.grading))
        if is_new:
            ranks.from_main(lambda: check_answers(config, pool, questions.train))
        parts = assemble(plan, questions, pool, reporter, stack, ranks)
        for note in replay_notes(config, len(questions.train)):
            reporter.note(note)
        if is_new:
            ranks.from_main(lambda: describe_run(config, folder, questions, ranks))
        state = RunState()
        if point.step is not None:
            state = load_checkpoint(folder.checkpoints / checkpoint_name(point.step), parts)
        sync(parts)
        names = config.run.log if ranks.is_main else ()
        trackers = stack.enter_context(open_trackers(names, config, folder.path, step=state.step))
        # Everything has been checked: from here on the folder changes.
        if ranks.is_main:
            store = open_store(config, folder, questions, parts.backbone, stack, point.step or 0)
            parts = dataclasses.replace(parts, store=store)
        warm_start(config, parts, reporter, is_new=is_new)
        # At the start, and after the last step, a run asks the held-out questions whatever was asked before.
        validates = point.step is None or state.finished.is_final or state.step >= config.run.last_step
        ranks.from_main(lambda: begin_writing(config, folder, point, validates_again=validates))
    run = ActiveRun(
        folder=folder,
        parts=parts,
        state=state,
        trackers=trackers,
        heldout=questions.heldout,
        reporter=reporter,
        stopper=stopper,
        since=started,
        watchdog=watchdog,
        guards=Guards(folder.metrics_lines() if ranks.is_main else ()),
        time_limit=time_limit,
    )
    state.add_seconds("setup", time.perf_counter() - started)
    return run


def describe_run(config: Config, folder: RunFolder, questions: RunQuestions, ranks: Ranks) -> None:
    """Put on disk what a new run is made of."""
    store_questions(folder.data, config, questions)
    environment = describe_environment(config, questions.train_hash) | {"ranks": ranks.world_size}
    write_json(folder.path / "environment.json", environment)
    remember_run(folder.path, config)


def begin_writing(config: Config, folder: RunFolder, point: ResumePoint, *, validates_again: bool) -> None:
    """Bring the folder to the step the run goes on from."""
    forget_checksums(folder.path)
    set_aside(folder, point)
    folder.remove_partials()
    folder.cut_back(point.step or 0, validates_again=validates_again)
    write_text(folder.config, to_toml(config))
    note_checksums(folder.path)


def warm_start(config: Config, parts: Parts, reporter: Reporter, *, is_new: bool) -> None:
    """Fill the buffer from another run's ledger, where the settings name one."""
    if not (config.replay.warm_start and config.replay.keeps_buffer and is_new):
        return
    report = parts.ranks.from_main(
        lambda: parts.main_store.warm_start(
            Path(config.replay.warm_start) / "replay",
            max_response_tokens=config.rollout.max_response_tokens,
            with_retired=config.replay.warm_start_retired,
        )
    )
    require_noted(config, report)
    left_out = {
        "too long": report.num_too_long,
        "failures": report.num_failures,
        "of groups that were not kept whole": report.num_incomplete,
        "by replay.max_per_question": report.num_over_limit,
    }
    reporter.note(
        f"experience from {config.replay.warm_start}: {report.num_trajectories} trajectories of "
        f"{report.num_questions} questions, {report.num_retired} retired; left out: "
        f"{', '.join(f'{num} {what}' for what, num in left_out.items() if num) or 'none'}"
    )


def require_noted(config: Config, report: WarmStartReport) -> None:
    """Raise InputError where the settings need log-probs or advantages of birth that trajectories came without."""
    replay, objective = config.replay, config.objective
    imitates = objective.surrogate == "likelihood"
    priority = replay.priority if isinstance(replay, UnitPlace) else ""
    by_logprobs = {
        "replay.max_drift": isinstance(replay, UnitPlace) and replay.max_drift > 0,
        "replay.ess_bound": isinstance(replay, Replace) and replay.ess_bound > 0,
        "replay.priority": priority == "headroom",
        "objective.importance": objective.importance == "behaviour" and not imitates,
    }
    by_advantage = {
        "replay.priority": priority in ("advantage", "signal", "headroom"),
        "replay.composition": replay.draws_units and not imitates,
    }
    for num, what, needs, instead in (
        (report.num_without_logprobs, "log-probs", by_logprobs, "use objective.importance = 'old' or "),
        (report.num_without_advantage, "an advantage", by_advantage, "use composition = 'join' or 'replace', or "),
    ):
        name = next((name for name, holds in needs.items() if holds), "")
        if num and name:
            raise InputError(
                f"{replay.warm_start}: {num} of its {report.num_trajectories} trajectories came without {what}, which "
                f"{name} = {setting(config, name)!r} reads: {instead}objective.replay_surrogate = 'likelihood' "
                "without a priority or bound that reads them, or take another pool."
            )
