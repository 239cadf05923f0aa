"""A whole run: questions and backbone in, validation, the steps, the exported model, the summary and the plots."""

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from exgrpo_cli.base.console.output import Stopper
from exgrpo_cli.base.console.reporter import Reporter, SilentReporter
from exgrpo_cli.base.errors import InputError, Interrupted
from exgrpo_cli.config.settings import Config
from exgrpo_cli.machine.memory import require_disk
from exgrpo_cli.machine.settle import Plan, require_runnable, settle
from exgrpo_cli.machine.survey import survey_machine
from exgrpo_cli.ranks import ALONE, Ranks
from exgrpo_cli.runs.folder import RunFolder
from exgrpo_cli.runs.result import Ending
from exgrpo_cli.runs.watchdog import TimeLimit, Watchdog
from exgrpo_cli.training.active_run import ActiveRun
from exgrpo_cli.training.closing import finish
from exgrpo_cli.training.loop import run_step, spent_share
from exgrpo_cli.training.metrics import Clock
from exgrpo_cli.training.resuming.checkpoint import latest_step
from exgrpo_cli.training.starting.assemble import take_device
from exgrpo_cli.training.starting.setup import require_extras, setup_run
from exgrpo_cli.training.step.groups import Group
from exgrpo_cli.training.validation import ask_heldout, ask_trained, validation_metrics


def train(
    config: Config,
    path: Path,
    *,
    resume: bool = False,
    reporter: Reporter,
    ranks: Ranks = ALONE,
    time_limit: TimeLimit | None = None,
    plan: Plan | None = None,
) -> dict[str, Any]:
    """Train in the run folder `path` and return what its `summary.json` holds.

    Under several ranks each of them calls this; rank 0 alone writes the folder, but for the shards of a sharded
    optimizer, and speaks through `reporter`. With a `time_limit` the run saves and stops before it is over, as after a
    stop signal. `plan` is that of a `config` which has been settled. Raises InputError before work starts, RunError
    when the work stops under way, and Interrupted after a stop signal, with the state saved.
    """
    if plan is None:
        config, plan = settle(config, survey_machine(), ranks, fetch=True)
    if config.run.nproc > 1 and ranks.world_size == 1:
        raise InputError(
            f"run.nproc = {config.run.nproc}, but this process is the only rank: start it with `exgrpo train --nproc "
            f"{config.run.nproc}` or torchrun."
        )
    speaker = reporter if ranks.is_main else SilentReporter()
    for note in plan.notes:
        speaker.note(note)
    require_extras(config)
    require_runnable(plan)
    torch.set_num_threads(config.run.threads)
    ranks.connect(take_device(config.run.device, ranks.local_rank), timedelta(minutes=config.run.rank_timeout))
    time_limit = time_limit or TimeLimit(seconds=math.inf)
    path = ranks.from_main(lambda: path)
    with Stopper() as stopper, ExitStack() as stack:
        if not resume and (disk := plan.disk) is not None:
            ranks.from_main(partial(require_disk, disk, path))
        folder = ranks.from_main(lambda: RunFolder.existing(path) if resume else RunFolder.create(path))
        ranks.from_main(lambda: stack.enter_context(folder.locked()))
        watchdog = Watchdog(path, rank=ranks.rank, seconds=60 * config.run.phase_timeout)
        stack.enter_context(watchdog)
        try:
            with watchdog.phase("setup"):
                run = setup_run(plan, folder, stopper, speaker, stack, ranks, watchdog, time_limit, is_new=not resume)
        except BaseException:
            if ranks.is_main and not folder.config.exists():
                folder.discard()
            raise
        try:
            run_steps(run)
        except KeyboardInterrupt:
            reason = "the time limit is near: " if time_limit.is_near else ""
            raise Interrupted(
                f"{reason}stopped after step {latest_step(folder.checkpoints) or 0} of {config.run.steps}, state "
                f"saved; go on with: exgrpo train --resume --output {path}"
            ) from None
        return finish(run)


def run_steps(run: ActiveRun) -> None:
    """Validate, train to the last step, checkpoint as settings say."""
    config, state = run.parts.config, run.state
    if not state.heldout_before and run.heldout:
        with run.stopper.immediate():
            ask_trained(run, "before training")
            state.heldout_before = ask_heldout(run, "before training")
    last_step = config.run.last_step
    while state.step < last_step and not state.finished.is_final:
        started = time.perf_counter()
        result = run_step(run.parts, state, state.step + 1, Clock(run.watchdog.phase))
        if result is None:
            state.finished = Ending.ALL_RETIRED
            run.reporter.note(f"all questions are retired after step {state.step}: training ends")
            break
        line = result.line
        for note in (*result.notes, *run.guards.check(line, result.groups)):
            run.reporter.note(note)
        if config.validation.every and state.step % config.validation.every == 0 and run.heldout:
            line |= validation_metrics(run)
        shown = list(samples(result.groups, config.run.samples_per_step))
        with run.watchdog.phase("journal"):
            if run.parts.ranks.is_main:
                run.folder.append_metrics(line)
                run.folder.append_samples(state.step, shown)
            for tracker in run.trackers:
                tracker.log(line)
            run.reporter.step(line, config.run.whole_budget)
            share = spent_share(run.parts, state)
            if share is not None and share >= 1:
                state.finished = Ending.BUDGET_SPENT
            # Validation counts: the next step may end with one as well.
            run.time_limit.count_step(time.perf_counter() - started)
            stopping = run.parts.ranks.any(run.stopper.requested or run.time_limit.is_near)
        due = state.step % config.run.save_every == 0 or state.step == last_step or state.finished.is_final
        for tracker in run.trackers if due and shown else ():
            tracker.show_samples(state.step, shown)
        if due or state.best_step == state.step or stopping:
            run.save()
        if stopping and state.step < last_step and not state.finished.is_final:
            raise KeyboardInterrupt
    if not state.finished.is_final:
        state.finished = Ending.STEPS_REACHED
    elif run.parts.ranks.from_main(lambda: latest_step(run.folder.checkpoints)) != state.step:
        run.save()


def samples(groups: tuple[Group, ...], count: int) -> Iterator[dict[str, Any]]:
    """`count` fresh rollouts of a step, one of each of the groups spread over the batch."""
    stride = max(1, len(groups) // count) if count else 1
    for group in groups[::stride][:count]:
        for member in group.fresh[:1]:
            yield {
                "question_id": group.question.id,
                "prompt": group.question.prompt[-1].content,
                "answer": group.question.answer,
                "text": member.text,
                "reward": member.reward,
                "verdict": member.verdict.value,
                "stop_reason": member.rollout.stop_reason.value,
                "num_tokens": len(member.rollout.token_ids),
                "experiential": group.is_experiential,
            }
