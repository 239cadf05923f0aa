"""What would lower the memory of a run that does not fit: changes not yet made, each tried on the plan itself."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from exgrpo_cli.config.settings import Config

Needed = Callable[[Config, int], Sequence[int]]
"""Bytes that each phase needs with a configuration, on so many times the ranks."""


def ways_out(config: Config, room: int, needed: Needed) -> list[str]:
    """The changes that lower a phase which needs more than `room`; something shorter or smaller where none does."""
    now = needed(config, 1)
    large = [phase for phase, taken in enumerate(now) if taken > room]
    ways = []
    for words, changed, times in _changes(config):
        then = needed(changed, times)
        if any(then[phase] < now[phase] for phase in large):
            ways.append(words)
    return ways or ["lower rollout.max_response_tokens", "use a smaller backbone"]


def _changes(config: Config) -> Iterator[tuple[str, Config, int]]:
    """Words, the configuration then, and how many times the ranks: what costs the least first."""
    rollout, optim, backbone = config.rollout, config.optim, config.backbone
    half = replace(optim, microbatch_tokens=max(1, optim.microbatch_tokens // 2))
    yield "lower optim.microbatch_tokens", replace(config, optim=half), 1
    fewer = replace(rollout, max_rows=max(1, rollout.max_rows // 2))
    yield "lower rollout.max_rows", replace(config, rollout=fewer), 1
    checkpointing = replace(backbone, gradient_checkpointing=True)
    yield "set backbone.gradient_checkpointing=true", replace(config, backbone=checkpointing), 1
    # What is moved to main memory may be too large for that.
    kept = replace(optim, offload=False, offload_during_rollouts=False)
    moves = "offload" if optim.offload else "offload_during_rollouts"
    yield f"leave optim.{moves} out", replace(config, optim=kept), 1
    deepspeed = replace(kept, engine="deepspeed")
    if optim.engine == "torch":
        resting = replace(optim, offload_during_rollouts=True)
        yield "set optim.offload_during_rollouts=true", replace(config, optim=resting), 1
        yield "use more ranks with optim.engine=deepspeed", replace(config, optim=deepspeed), 2
        also = " optim.engine=deepspeed with"
    else:
        deepspeed, also = optim, ""
        yield "use more ranks", config, 2
    yield f"set{also} optim.zero_stage=3", replace(config, optim=replace(deepspeed, zero_stage=3)), 1
    yield f"set{also} optim.offload=true", replace(config, optim=replace(deepspeed, offload=True)), 1
