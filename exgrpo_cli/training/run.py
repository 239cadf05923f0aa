"""A whole run: questions and backbone in, validation, the steps, the exported model, the summary and the plots."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from exgrpo_cli.base import errors, files, output
from exgrpo_cli.base.reporter import Reporter, SilentReporter, answer_rows
from exgrpo_cli.config.settings import Config
from exgrpo_cli.machine import memory, survey
from exgrpo_cli.machine.settle import Plan, require_runnable, settle
from exgrpo_cli.models.export import CARD
from exgrpo_cli.ranks import ALONE, Ranks
from exgrpo_cli.runs.folder import REPORT_FILE, RunFolder, complete_steps, note_checksums, writing
from exgrpo_cli.runs.result import RESULT_FILE, Ending, write_result
from exgrpo_cli.runs.watchdog import TimeLimit, Watchdog
from exgrpo_cli.show.statistics import save_all
from exgrpo_cli.studies.measure import measure
from exgrpo_cli.training import metrics, setup, validation
from exgrpo_cli.training.checkpoint import export_weights, save_adapter, save_checkpoint
from exgrpo_cli.training.loop import run_step
from exgrpo_cli.training.state import ActiveRun
from exgrpo_cli.training.step.groups import Group
from exgrpo_cli.training.step.guards import Guards


def train(
    config: Config,
    path: Path,
    *,
    resume: bool = False,
    reporter: Reporter,
    ranks: Ranks = ALONE,
    time_limit: TimeLimit | None = None,
    plan: Plan | None = None,
    starts: Path | None = None,
) -> dict[str, Any]:
    """Train in the run folder `path` and return what its `summary.json` holds.

    Under several ranks each of them calls this; rank 0 alone writes the folder, but for the shards of a sharded
    optimizer, and speaks through `reporter`. With a `time_limit`, else that of its Slurm job, the run saves and stops
    before it is over, as after a stop signal. `plan` is that of a `config` which has been settled. Runs of a study
    sample the answers of their common start once, in the folder `starts`. Raises InputError before work starts,
    RunError when the work stops under way, and Interrupted after a stop signal, with the state saved.
    """
    if plan is None:
        config, plan = settle(config, survey.survey_machine(), ranks, fetch=True)
    if config.run.nproc > 1 and ranks.world_size == 1:
        raise errors.InputError(
            f"run.nproc = {config.run.nproc}, but this process is the only rank: start it with `exgrpo train --nproc "
            f"{config.run.nproc}` or torchrun."
        )
    speaker = reporter if ranks.is_main else SilentReporter()
    for note in plan.notes:
        speaker.note(note)
    require_runnable(plan)
    setup.connect(config, ranks, speaker.note)
    time_limit = time_limit or TimeLimit.of_job()
    path = ranks.from_main(lambda: path)
    with output.Stopper(partial(speaker.note, STOPPING)) as stopper, ExitStack() as stack:
        started = time.perf_counter()
        if not resume and (disk := plan.disk) is not None:
            ranks.from_main(partial(memory.require_disk, disk, path))
        folder = ranks.from_main(lambda: RunFolder.existing(path) if resume else RunFolder.create(path))
        ranks.from_main(folder.require_own_folders)
        ranks.from_main(lambda: stack.enter_context(folder.locked()))
        watchdog = stack.enter_context(Watchdog(path, rank=ranks.rank, seconds=60 * config.run.phase_timeout))
        try:
            with watchdog.phase("setup"), stopper.immediate():
                parts, state, trackers = setup.setup_run(plan, folder, speaker, stack, ranks, is_new=not resume)
        except BaseException as error:
            if ranks.is_main and not folder.config.exists():
                folder.remove_set_up()
            if isinstance(error, KeyboardInterrupt):
                raise errors.Interrupted(stopped_text(folder, config, "while it was set up")) from None
            raise
        run = ActiveRun(
            folder=folder, parts=parts, state=state, trackers=trackers, reporter=speaker, stopper=stopper,
            since=started, watchdog=watchdog, time_limit=time_limit, starts=starts,
        )  # fmt: skip
        state.add_seconds("setup", time.perf_counter() - started)
        try:
            run_steps(run)
        except KeyboardInterrupt:
            reason = "the time limit is near: " if time_limit.is_near else ""
            raise errors.Interrupted(reason + stopped_text(folder, config, f"in step {state.step + 1}")) from None
        return finish(run)


STOPPING = "stopping after this step (saved then); Ctrl-C again to stop now and lose it"


def stopped_text(folder: RunFolder, config: Config, moment: str) -> str:
    """The sentence on what is saved of a run that was stopped, cut off at a `moment` where that is not all, and how it
    goes on."""
    if not folder.config.exists():
        return f"stopped {moment}: nothing is saved, the same command begins anew."
    saved = max(complete_steps(folder.checkpoints), default=0)
    reached = max((line["step"] for line in folder.metrics_lines()), default=0)
    go_on = f"exgrpo train --resume --output {folder.path}"
    if not saved:
        return f"stopped {moment}, before its first checkpoint: nothing is saved; begin it anew with: {go_on}"
    if saved < reached or moment == "while it was set up":
        return f"stopped {moment}; its last checkpoint is of step {saved}, go on from there with: {go_on}"
    return f"stopped after step {saved} of {config.run.steps}, state saved; go on with: {go_on}"


def run_steps(run: ActiveRun) -> None:
    """Validate, train to the last step, checkpoint as settings say."""
    config, state, ranks = run.parts.config, run.state, run.parts.ranks
    guards = Guards(run.folder.metrics_lines() if ranks.is_main else ())
    if not state.heldout_before and run.parts.heldout:
        with run.stopper.immediate():
            validation.ask_trained(run, "before training")
            state.heldout_before = validation.ask_heldout(run, "before training")
    last_step = config.run.last_step
    if state.step < last_step and not state.finished.is_final:
        run.reporter.group_size = config.rollout.group_size
        # A first step may take minutes.
        what = "training steps" if config.run.budget == "steps" else "training"
        run.reporter.progress(int(state.spent(config.run.budget)), config.run.whole_budget, what)
    saved, pause = time.perf_counter(), 60 * config.run.save_minutes or math.inf
    while state.step < last_step and not state.finished.is_final:
        started = time.perf_counter()
        result = run_step(run.parts, state, state.step + 1, metrics.Clock(run.phase))
        if result is None:
            state.finished = Ending.ALL_RETIRED
            run.reporter.note(f"all questions are retired after step {state.step}: training ends")
            break
        line, groups, notes = result
        for note in (*notes, *guards.check(line)):
            run.reporter.note(note)
        if config.validation.every and state.step % config.validation.every == 0 and run.parts.heldout:
            line |= validation.validation_metrics(run)
        with run.watchdog.phase("journal"):
            if ranks.is_main:
                run.folder.append_metrics(line)
                run.folder.append_samples(state.step, samples(groups, config.run.samples_per_step))
            for log in run.trackers:
                log(line)
            run.reporter.step(line, config.run.whole_budget)
            if not run.parts.heldout and state.step in (1, last_step):
                # No validation shows an answer.
                (one,) = samples(groups, 1)
                run.reporter.rows(answer_rows(one["prompt"], one["answer"], one["text"], one["verdict"]))
            share = state.spent_share(config.run, ranks)
            if share is not None and share >= 1:
                state.finished = Ending.BUDGET_SPENT
            # Validation counts: the next step may end with one as well.
            run.time_limit.count_step(time.perf_counter() - started)
            overdue = time.perf_counter() - saved > pause
            asked = ranks.gather((run.stopper.requested or run.time_limit.is_near, overdue))
            stopping, overdue = map(any, zip(*asked, strict=True))
        due = state.step % config.run.save_every == 0 or state.step == last_step or state.finished.is_final
        due |= state.step in config.validation.forks
        if due or state.best_step == state.step or stopping or overdue:
            save(run)
            saved = time.perf_counter()
        if stopping and state.step < last_step and not state.finished.is_final:
            raise KeyboardInterrupt
    if not state.finished.is_final:
        state.finished = Ending.STEPS_REACHED
    elif ranks.from_main(lambda: max(complete_steps(run.folder.checkpoints), default=0)) != state.step:
        save(run)


def save(run: ActiveRun) -> None:
    """Write a checkpoint of the current step; raises RunError where the disk is full."""
    started = time.perf_counter()
    with run.timed("checkpoint"):
        run.count_wall_time()
        save_checkpoint(run.folder.checkpoints, run.parts, run.state, keep=run.parts.config.run.keep_checkpoints)
        if run.parts.ranks.is_main:
            note_checksums(run.folder.path)
    run.time_limit.count_save(time.perf_counter() - started)


def samples(groups: Sequence[Group], count: int) -> Iterator[dict[str, Any]]:
    """`count` fresh rollouts of a step, one of each of the groups spread over the batch."""
    stride = max(1, len(groups) // count) if count else 1
    for group in groups[::stride][:count]:
        for member in group.fresh[:1]:
            yield {
                "question_id": group.question.id,
                "prompt": group.question.prompt[-1].content,
                "answer": group.question.answer,
                "text": member.text,
                "reward": member.grade.reward,
                "parts": member.grade.parts,
                "verdict": member.verdict.value,
                "stop_reason": member.rollout.stop_reason.value,
                "num_tokens": len(member.rollout.token_ids),
                "experiential": group.is_experiential,
            }


def finish(run: ActiveRun) -> dict[str, Any]:
    """Held-out score after training, exported model, `result.json`, plots, summary."""
    folder, parts, state, config = run.folder, run.parts, run.state, run.parts.config
    try:
        with run.stopper.immediate():
            after = run.validated.get(state.step, {})
            if run.parts.heldout and not after:
                after = validation.ask_heldout(run, f"after {state.step} steps")
            if run.parts.heldout:
                validation.ask_trained(run, f"after {state.step} steps")
                validation.ask_hotter(run, f"after {state.step} steps")
            with run.timed("export"), writing(folder.model):
                export_run_model(run, after)
                save_adapter(parts, folder.path / "adapter")
            memory = None
            if config.validation.forks and run.parts.heldout:
                # A fork trains too, by this module.
                from exgrpo_cli.training.fork import effect_of_memories

                with run.timed("forks"):
                    memory = effect_of_memories(folder.path, config, run.reporter)
            run.count_wall_time()
            with run.phase("closing"):
                summary = summarise(run, after)
                if parts.ranks.is_main:
                    result = replace(measure(folder.path, config, summary, state.visits), memory=memory)
                    write_result(folder.path / RESULT_FILE, result)
                    if config.run.plots:
                        save_all(folder.path)
                        # That of fewer steps: a finished run without a page has been stopped before it was written.
                        (folder.path / REPORT_FILE).unlink(missing_ok=True)
                    # The last of all: a run with a summary counts as finished.
                    files.write_json(folder.summary, summary)
                    note_checksums(folder.path, at_the_end=True)
    except KeyboardInterrupt:
        raise errors.Interrupted(
            f"stopped after the last step, state saved; go on with: exgrpo train --resume --output {folder.path}"
        ) from None
    return summary


def export_run_model(run: ActiveRun, after: dict[str, Any]) -> None:
    """The final weights as `model/`, with a card that says what made them."""
    config, parts = run.parts.config, run.parts
    # Others may read it: of a path of this machine the last part alone.
    sources = (config.backbone.source, config.data.train)
    backbone, data = (Path(source).name if Path(source).is_absolute() else source for source in sources)
    score = f" Held-out pass@1 ({config.data.heldout_name}): {validation.score_text(after)}." if after else ""
    card = CARD.format(
        title=output.in_markdown(f"{config.backbone.name} trained with {config.run.method}"),
        description=output.in_markdown(
            f"Backbone {backbone}, {run.state.step} steps of {config.run.method} on {data} (arXiv 2510.02245), seed "
            f"{config.run.seed}.{score}"
        ),
        folder="model",
        example=next(iter(parts.questions.values())).prompt[-1].content,
        max_new_tokens=config.rollout.max_response_tokens,
    )
    export_weights(parts, run.folder.model, card=card)


def summarise(run: ActiveRun, after: dict[str, Any]) -> dict[str, Any]:
    """The final figures (`summary.json`)."""
    parts, state = run.parts, run.state
    counts = parts.ranks.from_main(lambda: parts.main_store.counts)
    return {
        "steps": state.step,
        "finished": state.finished,
        "method": parts.config.run.method,
        "backbone": parts.config.backbone.name,
        "seed": parts.config.run.seed,
        "heldout": {"set": parts.config.data.heldout_name, "before": state.heldout_before, "after": after},
        "tokens": {"generated": state.tokens_generated, "trained": state.tokens_trained},
        "updates": {"applied": state.updates_applied, "skipped": state.updates_skipped},
        "wall_seconds": {name: round(seconds, 3) for name, seconds in sorted(state.seconds.items())},
        "peak_memory_bytes": max(parts.ranks.gather(survey.peak_memory_bytes())),
        "replay": {
            "questions": counts.num_questions,
            "trajectories": counts.num_trajectories,
            "retired": counts.num_retired,
            "used": state.replayed,
        },
    }
