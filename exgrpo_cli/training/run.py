"""A whole run: questions and backbone in, validation, the steps, the exported model, the summary and the plots."""

import dataclasses
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from exgrpo_cli.backbones.export import model_card
from exgrpo_cli.config.resolve import to_toml
from exgrpo_cli.config.settings import Config
from exgrpo_cli.console.reporter import Reporter, SilentReporter
from exgrpo_cli.console.signals import Stopper
from exgrpo_cli.engines.vllm.start import require_vllm
from exgrpo_cli.errors import InputError, Interrupted
from exgrpo_cli.files import write_json, write_text
from exgrpo_cli.machine.disk import disk_plan, require_disk
from exgrpo_cli.machine.environment import describe_environment, peak_memory_bytes
from exgrpo_cli.machine.run_plan import settle_ranks
from exgrpo_cli.machine.shapes import backbone_shape
from exgrpo_cli.machine.survey import survey_machine
from exgrpo_cli.machine.threads import choose_threads
from exgrpo_cli.plots import save_all
from exgrpo_cli.ranks.ranks import ALONE, Ranks
from exgrpo_cli.runs.ending import Ending
from exgrpo_cli.runs.folder import RunFolder, writing
from exgrpo_cli.runs.watchdog import Watchdog
from exgrpo_cli.training.assemble import assemble, choose_device, make_pool
from exgrpo_cli.training.checkpoint import export_weights, latest_step, load_checkpoint, save_checkpoint
from exgrpo_cli.training.checkpoint import folder_name as checkpoint_name
from exgrpo_cli.training.groups import Group
from exgrpo_cli.training.guards import Guards
from exgrpo_cli.training.loop import run_step, sync
from exgrpo_cli.training.metrics import Clock
from exgrpo_cli.training.parts import Parts
from exgrpo_cli.training.run_questions import (
    RunQuestions,
    check_answers,
    load_questions,
    store_questions,
    stored_questions,
)
from exgrpo_cli.training.state import RunState
from exgrpo_cli.training.time_limit import TimeLimit
from exgrpo_cli.training.trackers import Tracker, open_trackers, require_trackers
from exgrpo_cli.training.validation import validate
from exgrpo_cli.types import Question


@dataclass(kw_only=True, slots=True)
class Session:
    """A run under way."""

    folder: RunFolder
    parts: Parts
    state: RunState
    heldout: tuple[Question, ...]
    trackers: Sequence[Tracker]
    """Of rank 0 alone."""
    reporter: Reporter
    stopper: Stopper
    since: float
    """Moment up to which wall time has been counted into the state."""
    watchdog: Watchdog
    guards: Guards
    time_limit: TimeLimit
    validated: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Scores on the held-out questions by step, as far as this process measured them between the steps."""

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Work outside the steps, counted as a phase of its own."""
        started = time.perf_counter()
        try:
            with self.watchdog.phase(name):
                yield
        finally:
            self.state.add_seconds(name, time.perf_counter() - started)

    def count_wall_time(self) -> None:
        now = time.perf_counter()
        self.state.add_seconds("total", now - self.since)
        self.since = now

    def save(self) -> None:
        started = time.perf_counter()
        with self.timed("checkpoint"):
            self.count_wall_time()
            save_checkpoint(
                self.folder.checkpoints, self.parts, self.state, keep=self.parts.config.run.keep_checkpoints
            )
        self.time_limit.count_save(time.perf_counter() - started)


def train(
    config: Config,
    path: Path,
    *,
    resume: bool = False,
    reporter: Reporter,
    ranks: Ranks = ALONE,
    time_limit: TimeLimit | None = None,
) -> dict[str, Any]:
    """Train in the run folder `path` and return what its `summary.json` holds.

    Under several ranks each of them calls this; rank 0 alone writes the folder, but for the shards of a sharded
    optimizer, and speaks through `reporter`. With a `time_limit` the run saves and stops before it is over, as after a
    stop signal. Raises InputError before work starts, RunError when the work stops under
    way, and Interrupted after a stop signal, with the state saved.
    """
    started = ranks.local_world_size if ranks.world_size > 1 else 0
    config = pin_choices(settle_ranks(config, survey_machine(), started), ranks)
    require_extras(config)
    torch.set_num_threads(config.run.threads)
    ranks.connect(choose_device(config.run.device, ranks.local_rank), timedelta(minutes=config.run.rank_timeout))
    time_limit = time_limit or TimeLimit(seconds=math.inf)
    path = ranks.from_main(lambda: path)
    with Stopper() as stopper, ExitStack() as stack:
        if not resume:
            ranks.from_main(lambda: check_disk(config, path))
        folder = ranks.from_main(lambda: RunFolder.existing(path) if resume else RunFolder.create(path))
        ranks.from_main(lambda: stack.enter_context(folder.locked()))
        watchdog = Watchdog(path, rank=ranks.rank, seconds=60 * config.run.phase_timeout)
        stack.enter_context(watchdog)
        try:
            speaker = reporter if ranks.is_main else SilentReporter()
            with watchdog.phase("setup"):
                session = open_session(
                    config, folder, stopper, speaker, stack, ranks, watchdog, time_limit, is_new=not resume
                )
        except BaseException:
            if ranks.is_main and not folder.config.exists():
                shutil.rmtree(path)
            raise
        try:
            run(session)
        except KeyboardInterrupt:
            reason = "the time limit is near: " if time_limit.is_near else ""
            raise Interrupted(
                f"{reason}stopped after step {latest_step(folder.checkpoints) or 0} of {config.run.steps}, state "
                f"saved; go on with: exgrpo train --resume --output {path}"
            ) from None
        return finish(session)


def pin_choices(config: Config, ranks: Ranks) -> Config:
    """Settings that say "choose" replaced by the choice, so that `config.toml` repeats the run.

    Raises InputError for several ranks that nobody has started.
    """
    if config.run.nproc > 1 and ranks.world_size == 1:
        raise InputError(
            f"run.nproc = {config.run.nproc}, but this process is the only rank: start it with `exgrpo train --nproc "
            f"{config.run.nproc}` or torchrun."
        )
    run = dataclasses.replace(
        config.run,
        nproc=ranks.local_world_size,
        threads=choose_threads(config.run.threads, processes=ranks.local_world_size),
        device="cuda" if choose_device(config.run.device).type == "cuda" else "cpu",
    )
    optim = config.optim
    if optim.schedule != "constant" and optim.horizon == 0:
        warmup_steps = min(optim.warmup_steps, config.run.steps // 2)
        optim = dataclasses.replace(optim, horizon=config.run.steps, warmup_steps=warmup_steps)
    return dataclasses.replace(config, run=run, optim=optim)


def check_disk(config: Config, path: Path) -> None:
    """Raise InputError where the run folder's disk has no room for what the run certainly writes."""
    shape = backbone_shape(config.backbone, config.tiny)
    if shape is not None:
        require_disk(disk_plan(config, shape), path)


def require_extras(config: Config) -> None:
    """Raise InputError naming the extra to install for the first engine or tracker whose package is not there."""
    if config.rollout.engine == "vllm":
        require_vllm(config.run.device)
    if config.optim.engine == "deepspeed":
        from exgrpo_cli.engines.policy.sharded import require_deepspeed

        require_deepspeed(torch.device(config.run.device))
    require_trackers(config.run.log)


def open_session(
    config: Config,
    folder: RunFolder,
    stopper: Stopper,
    reporter: Reporter,
    stack: ExitStack,
    ranks: Ranks,
    watchdog: Watchdog,
    time_limit: TimeLimit,
    *,
    is_new: bool,
) -> Session:
    """Everything up to the first step; a new run's folder gets its `config.toml` last, when all else is in place."""
    started = time.perf_counter()
    with stopper.immediate():
        questions = ranks.from_main(
            lambda: load_questions(config, reporter) if is_new else stored_questions(folder.data)
        )
        pool = stack.enter_context(make_pool(config))
        if is_new:
            ranks.from_main(lambda: check_answers(config, pool, questions.train))
        parts = assemble(config, folder, questions, pool, reporter, stack, ranks)
        if is_new:
            ranks.from_main(lambda: describe_run(config, folder, questions, ranks))
        step = ranks.from_main(lambda: latest_step(folder.checkpoints))
        if step is None:
            state = RunState()
            warm_start(config, parts, reporter, is_new=is_new)
        else:
            state = load_checkpoint(folder.checkpoints / checkpoint_name(step), parts)
        sync(parts)
        names = config.run.log if ranks.is_main else ()
        trackers = stack.enter_context(open_trackers(names, config, folder.path, step=state.step))
        ranks.from_main(lambda: begin_writing(config, folder, state))
    session = Session(
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
    return session


def describe_run(config: Config, folder: RunFolder, questions: RunQuestions, ranks: Ranks) -> None:
    """Put on disk what a new run is made of."""
    store_questions(folder.data, config, questions)
    environment = describe_environment(config, questions.train_hash) | {"ranks": ranks.world_size}
    write_json(folder.path / "environment.json", environment)


def begin_writing(config: Config, folder: RunFolder, state: RunState) -> None:
    """Bring the folder to the step the run goes on from; raises InputError where no step is left."""
    folder.cut_back(state.step)
    if state.step >= config.run.steps and folder.summary.exists():
        raise InputError(f"{folder.path} has finished its {state.step} steps: raise --steps to go on.")
    write_text(folder.config, to_toml(config))


def warm_start(config: Config, parts: Parts, reporter: Reporter, *, is_new: bool) -> None:
    """Fill the buffer from another run's ledger, where the settings name one."""
    if not (config.replay.warm_start and config.replay.keeps_buffer and is_new):
        return
    report = parts.buffer.warm_start(
        Path(config.replay.warm_start) / "replay",
        max_response_tokens=config.rollout.max_response_tokens,
        with_retired=config.replay.warm_start_retired,
    )
    over_limit = f", {report.num_over_limit} by replay.max_per_question" if config.replay.max_per_question else ""
    reporter.note(
        f"experience from {config.replay.warm_start}: {report.num_trajectories} trajectories of "
        f"{report.num_questions} questions, {report.num_retired} retired; {report.num_too_long} left out as too long"
        f"{over_limit}"
    )


def run(session: Session) -> None:
    """Validate, train to the last step, checkpoint as settings say."""
    config, state = session.parts.config, session.state
    if not state.heldout_before and session.heldout:
        with session.stopper.immediate(), session.timed("validation"):
            state.heldout_before = validate(
                session.parts, session.heldout, session.reporter.progress, "held-out, before"
            )
            note_score(session, state.heldout_before, "before training")
    while state.step < config.run.steps and not state.finished.is_final:
        result = run_step(session.parts, state, state.step + 1, Clock(session.watchdog.phase))
        if result is None:
            state.finished = Ending.ALL_RETIRED
            session.reporter.note(f"all questions are retired after step {state.step}: training ends")
            break
        line = result.line
        for note in (*result.notes, *session.guards.check(line, result.groups)):
            session.reporter.note(note)
        session.time_limit.count_step(line["time/step"])
        if config.validation.every and state.step % config.validation.every == 0 and session.heldout:
            line |= validation_metrics(session)
        if session.parts.ranks.is_main:
            session.folder.append_metrics(line)
            session.folder.append_samples(state.step, samples(result.groups, config.run.samples_per_step))
        for tracker in session.trackers:
            tracker.log(line)
        session.reporter.step(line, config.run.steps)
        stopping = session.parts.ranks.any(session.stopper.requested or session.time_limit.is_near)
        due = state.step % config.run.save_every == 0 or state.step == config.run.steps
        if due or state.best_step == state.step or stopping:
            session.save()
        if stopping and state.step < config.run.steps:
            raise KeyboardInterrupt
    if not state.finished.is_final:
        state.finished = Ending.STEPS_REACHED
    elif session.parts.ranks.from_main(lambda: latest_step(session.folder.checkpoints)) != state.step:
        session.save()


def validation_metrics(session: Session) -> dict[str, float | int]:
    """`val/<benchmark>` of the current weights; remembers the best step."""
    state = session.state
    name = Path(session.parts.config.data.heldout).stem
    with session.timed("validation"):
        score = validate(session.parts, session.heldout, session.reporter.progress, f"held-out, step {state.step}")
    note_score(session, score, f"after step {state.step}")
    session.validated[state.step] = score
    if score["pass_at_1"] > state.best_score:
        state.best_score, state.best_step = score["pass_at_1"], state.step
    return {f"val/{name}": score["pass_at_1"], f"val/{name}/low": score["low"], f"val/{name}/high": score["high"]}


def finish(session: Session) -> dict[str, Any]:
    """Held-out score after training, exported model, plots, summary."""
    folder, parts, state = session.folder, session.parts, session.state
    try:
        with session.stopper.immediate():
            after = session.validated.get(state.step, {})
            if session.heldout and not after:
                with session.timed("validation"):
                    after = validate(parts, session.heldout, session.reporter.progress, "held-out, after")
                note_score(session, after, f"after {state.step} steps")
            with session.timed("export"), writing(folder.model):
                export_run_model(session, after)
            session.count_wall_time()
            summary = summarise(session, after)
            if parts.ranks.is_main:
                if parts.config.run.plots:
                    save_all(folder.path, heldout=summary["heldout"])
                # Last of all: a run with a summary counts as finished.
                write_json(folder.summary, summary)
    except KeyboardInterrupt:
        raise Interrupted(
            f"stopped after the last step, state saved; go on with: exgrpo train --resume --output {folder.path}"
        ) from None
    return summary


def note_score(session: Session, score: dict[str, Any], when: str) -> None:
    session.reporter.note(
        f"held-out pass@1 {when}: {score['pass_at_1']:.3f} [{score['low']:.3f}, {score['high']:.3f}] "
        f"over {score['questions']} questions"
    )


def export_run_model(session: Session, after: dict[str, Any]) -> None:
    """The final weights as `model/`, with a card that says what made them."""
    config, parts = session.parts.config, session.parts
    example = next(iter(parts.questions.values())).prompt[-1].content
    score = f" Held-out pass@1: {after['pass_at_1']:.3f}." if after else ""
    card = model_card(
        title=f"{config.backbone.name} trained with {config.run.method}",
        description=(
            f"Backbone {config.backbone.source!r}, {session.state.step} steps of {config.run.method} on "
            f"{config.data.train!r} (arXiv 2510.02245), seed {config.run.seed}.{score}"
        ),
        folder=str(session.folder.model),
        example=example,
        max_new_tokens=config.rollout.max_response_tokens,
    )
    export_weights(parts, session.folder.model, card=card)


def summarise(session: Session, after: dict[str, Any]) -> dict[str, Any]:
    """The final figures (`summary.json`)."""
    parts, state = session.parts, session.state
    counts, replay = parts.buffer.counts, parts.config.replay
    return {
        "steps": state.step,
        "finished": state.finished,
        "method": parts.config.run.method,
        "backbone": parts.config.backbone.name,
        "seed": parts.config.run.seed,
        "heldout": {"before": state.heldout_before, "after": after},
        "tokens": {"generated": state.tokens_generated, "trained": state.tokens_trained},
        "updates": {"applied": state.updates_applied, "skipped": state.updates_skipped},
        "wall_seconds": {name: round(seconds, 3) for name, seconds in sorted(state.seconds.items())},
        "peak_memory_bytes": max(parts.ranks.gather(peak_memory_bytes())),
        "mixed_from_step": state.first_mixed_step(replay.start_threshold) if replay.enabled else None,
        "replay": {
            "questions": counts.num_questions,
            "trajectories": counts.num_trajectories,
            "retired": counts.num_retired,
            "used": state.replayed,
        },
    }


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
                "experiential": group.replayed is not None,
            }
