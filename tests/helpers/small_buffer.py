"""A buffer of twenty questions and one step with replay on it, by the calls that a run makes."""

from pathlib import Path

import numpy as np
from small_ledger import IDENTITY, QUESTIONS, K

from exgrpo_cli.config.sections.replay import ReplaySettings
from exgrpo_cli.replay.buffer import ExperienceBuffer
from exgrpo_cli.replay.protocol import Buffer
from exgrpo_cli.replay.visits import FreshRow, Visit


def open_buffer(folder: Path) -> ExperienceBuffer:
    return ExperienceBuffer.create(folder, identity=IDENTITY, rules=ReplaySettings(), question_ids=QUESTIONS)


def visit(question_id: str, k: int, step: int) -> Visit:
    successes = [
        FreshRow(
            token_ids=np.array([step, member, int(question_id[1:])], dtype=np.int32),
            behaviour_logprobs=np.full(3, -0.5, dtype=np.float32),
            entropy=0.5,
            nll=0.5,
        )
        for member in range(k)
    ]
    return Visit(
        question_id=question_id, step=step, weight_version=step, success_count=k, num_fresh_successes=k,
        num_replayed=0, verifier_failed=False, rows=successes,
    )  # fmt: skip


def fill(buffer: Buffer) -> None:
    """Step 1: two successes of every question."""
    buffer.record_visits([visit(question_id, 2, 1) for question_id in QUESTIONS], collecting=True)
    buffer.flush(1)


def replay_step(buffer: Buffer, num: int) -> list[int]:
    """Step 2: `num` questions drawn, the higher id of each measured as the surer one; the first one retires."""
    rng = np.random.default_rng(0)
    offer = buffer.offer(num, 2, 2, rng)
    assert len(offer.unmeasured) == 2 * num
    measured = [
        each.measured(
            np.ones(2, dtype=bool), entropy=np.array([0.9, 0.1]), nll=np.array([0.9, 0.1]), weight_version=2
        )
        for each in offer.candidates
    ]  # fmt: skip
    choice = buffer.choose_from(measured, rng)
    buffer.record_replay(2, measured, choice)
    buffer.record_visits([visit(QUESTIONS[0], K, 2)], collecting=True)
    buffer.flush(2)
    return [trajectory.trajectory_id for trajectory in choice.trajectories]
