"""What the settings of replay say before a run starts: when it can first replay, and what it will keep."""

import math

from exgrpo_cli.config.settings import Config


def first_replay_step(config: Config, num_questions: int) -> int:
    """The first step that can replay a row, whatever the rollouts will be.

    A threshold above 0 takes a step of its own, rows are stored before the step that replays them, and a question that
    rows join must have been visited often enough to hold `min_stored` of them. The stream gives out every question once
    before any of them again.
    """
    replay, rollout = config.replay, config.rollout
    begins = max(replay.warmup_steps, int(replay.start_threshold > 0)) + 1
    if replay.warm_start:
        return begins
    stores = 1 if replay.collect_before_start else begins
    if replay.composition != "join":
        return max(begins, stores + 1)
    of_a_visit = rollout.group_size if replay.store == "all" else replay.upper(rollout.group_size)
    visits = math.ceil(replay.min_stored / of_a_visit)
    passes = (stores - 1) * rollout.questions_per_step // num_questions + visits
    return max(begins, passes * num_questions // rollout.questions_per_step + 1)


def replay_notes(config: Config, num_questions: int | None = None) -> list[str]:
    """What the user should know of the run's replay before it starts.

    Where the number of questions is not known yet, as few as a step asks are assumed.
    """
    replay, rollout = config.replay, config.rollout
    if not replay.enabled:
        return []
    notes = []
    if num_questions is None:
        known = {"arithmetic": config.arithmetic.num_train}
        num_questions = known.get(config.data.train, rollout.questions_per_step)
    first = first_replay_step(config, max(num_questions, rollout.questions_per_step))
    if first > config.run.last_step:
        keys = ["warmup_steps"] * bool(replay.warmup_steps) + ["min_stored"] * (replay.composition == "join")
        notes.append(
            f"nothing will be replayed: step {first} is the first that could, and the run ends after "
            f"{config.run.last_step}; use more --steps{''.join(f' or a lower replay.{key}' for key in keys)}"
        )
    if replay.store == "all" and not (replay.capacity or replay.max_age or replay.max_uses):
        rows = rollout.questions_per_step * rollout.group_size
        notes.append(
            f"replay.store = 'all' keeps up to {rows:,} rows a step, {rows * config.run.last_step:,} in all: "
            "replay.capacity, max_age or max_uses would limit them"
        )
    return notes
