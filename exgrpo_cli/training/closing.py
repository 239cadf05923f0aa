"""Everything after the last step: held-out score, exported model, plots, summary."""

from pathlib import Path
from typing import Any

from exgrpo_cli.base.errors import Interrupted
from exgrpo_cli.base.files import write_json
from exgrpo_cli.endpoints.measure import measure
from exgrpo_cli.machine.survey import peak_memory_bytes
from exgrpo_cli.models.export import model_card
from exgrpo_cli.runs.folder import writing
from exgrpo_cli.runs.manifest import note_checksums
from exgrpo_cli.runs.result import RESULT_FILE, remarks, write_result
from exgrpo_cli.show.statistics import save_all
from exgrpo_cli.training.active_run import ActiveRun
from exgrpo_cli.training.resuming.checkpoint import export_weights
from exgrpo_cli.training.validation import ask_heldout, ask_trained


def finish(run: ActiveRun) -> dict[str, Any]:
    """Held-out score after training, exported model, plots, summary."""
    folder, parts, state = run.folder, run.parts, run.state
    try:
        with run.stopper.immediate():
            after = run.validated.get(state.step, {})
            if run.heldout and not after:
                after = ask_heldout(run, f"after {state.step} steps")
            if run.heldout:
                ask_trained(run, f"after {state.step} steps")
            with run.timed("export"), writing(folder.model):
                export_run_model(run, after)
            run.count_wall_time()
            with run.watchdog.phase("closing"):
                summary = summarise(run, after)
                if parts.ranks.is_main:
                    write_final_files(run, summary)
    except KeyboardInterrupt:
        raise Interrupted(
            f"stopped after the last step, state saved; go on with: exgrpo train --resume --output {folder.path}"
        ) from None
    return summary


def write_final_files(run: ActiveRun, summary: dict[str, Any]) -> None:
    """`result.json`, the figures and `summary.json`, the last of all: a run with a summary counts as finished."""
    folder, parts, state = run.folder, run.parts, run.state
    write_result(folder.path / RESULT_FILE, measure(folder.path, parts.config, summary, state.visits))
    if parts.config.run.plots:
        drawn = save_all(folder.path, heldout=summary["heldout"])
        figures = {path.stem: path for path in drawn if path.suffix == ".png"}
        for tracker in run.trackers:
            tracker.show_figures(state.step, figures)
    write_json(folder.summary, summary)
    note_checksums(folder.path, at_the_end=True)


def export_run_model(run: ActiveRun, after: dict[str, Any]) -> None:
    """The final weights as `model/`, with a card that says what made them."""
    config, parts = run.parts.config, run.parts
    example = next(iter(parts.questions.values())).prompt[-1].content
    score = ""
    if after:
        interval = f"{after['pass_at_1']:.3f} [{after['low']:.3f}, {after['high']:.3f}]"
        asked = f"{after['questions']} questions of {config.data.heldout_name}"
        score = f" Held-out pass@1 on {asked}: {interval}{remarks(after)}."
    card = model_card(
        title=f"{config.backbone.name} trained with {config.run.method}",
        description=(
            f"Backbone {shown_name(config.backbone.source)}, {run.state.step} steps of {config.run.method} on "
            f"{shown_name(config.data.train)} (arXiv 2510.02245), seed {config.run.seed}.{score}"
        ),
        folder="model",
        example=example,
        max_new_tokens=config.rollout.max_response_tokens,
    )
    export_weights(parts, run.folder.model, card=card)


def shown_name(source: str) -> str:
    """A source as others may read it: a path of this machine by its last part alone."""
    return Path(source).name if Path(source).is_absolute() else source


def summarise(run: ActiveRun, after: dict[str, Any]) -> dict[str, Any]:
    """The final figures (`summary.json`)."""
    parts, state = run.parts, run.state
    counts, replay = parts.ranks.from_main(lambda: parts.main_store.counts), parts.config.replay
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
        "peak_memory_bytes": max(parts.ranks.gather(peak_memory_bytes())),
        "mixed_from_step": (
            state.first_mixed_step(replay.start_threshold, replay.warmup_steps) if replay.enabled else None
        ),
        "replay": {
            "questions": counts.num_questions,
            "trajectories": counts.num_trajectories,
            "retired": counts.num_retired,
            "used": state.replayed,
        },
    }
