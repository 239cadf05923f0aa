"""Replaying by question: buckets are drawn from, and of each question drawn some stored trajectories are chosen."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool

from exgrpo_cli.config.sections.replay import ReplaySettings
from exgrpo_cli.ledger.schemas import DRAWS, SCORES
from exgrpo_cli.ledger.writer import LedgerWriter
from exgrpo_cli.replay.buffer_state import BufferState
from exgrpo_cli.replay.drawing import selection
from exgrpo_cli.replay.drawing.sampling import check_draw, resolve_sampler
from exgrpo_cli.replay.drawing.selection import Candidates, resolve_metric
from exgrpo_cli.replay.protocol import Choice, Offer


class QuestionReplay:
    """Draws questions of a buffer, chooses among their trajectories, and records both in the ledger."""

    def __init__(self, state: BufferState, writer: LedgerWriter, rules: ReplaySettings) -> None:
        """Raises InputError for a sampler or metric of the settings that is not known."""
        self._state = state
        self._writer = writer
        self._rules = rules
        self._sampler = resolve_sampler(rules.sampler, rules.mu, rules.sigma)
        self._metric = resolve_metric(rules.metric)

    def offer(self, num: int, step: int, weight_version: int, rng: np.random.Generator) -> Offer:
        """Draw up to `num` questions, with their candidates and the bodies of those to be measured for a choice.

        Raises RunError where a custom sampler breaks its promises.
        """
        drawn = self.draw(num, step, rng)
        return self._offered(tuple(self.candidates(question_id) for question_id in drawn), weight_version)

    def offer_joining(self, question_ids: Sequence[str], step: int, weight_version: int) -> Offer:
        """What those of the questions that hold enough rows have to offer for a join."""
        self._state.begin(step)
        candidates = []
        for question_id in question_ids:
            number = self._state.number(question_id)
            if self._state.questions.is_drawable(number) and self._state.index.count(number) >= self._rules.min_stored:
                candidates.append(self.candidates(question_id))
        return self._offered(tuple(candidates), weight_version)

    def _offered(self, candidates: tuple[Candidates, ...], weight_version: int) -> Offer:
        if not self._rules.needs_scores:
            return Offer(candidates=candidates)
        stale = [int(i) for each in candidates for i in each.trajectory_ids[self.stale(each, weight_version)]]
        return Offer(candidates=candidates, unmeasured=tuple(self._state.trajectories(stale)))

    def available(self, step: int) -> int:
        """Questions that may be drawn at this step: buffered, rested, with a trajectory that is not over age."""
        self._state.begin(step)
        return self._state.questions.num_drawable

    def draw(self, num: int, step: int, rng: np.random.Generator) -> tuple[str, ...]:
        """Draw up to `num` distinct questions, and record what the sampler promised of each bucket.

        Raises RunError where a custom sampler breaks its promises.
        """
        self._state.begin(step)
        offered = self._state.questions.drawable()
        if num <= 0 or not offered:
            return ()
        buckets = [bucket for _, bucket in offered]
        num = min(num, self._state.questions.num_drawable)
        drawn = check_draw(self._sampler(buckets, num, rng), buckets, num, self._rules.sampler)
        states = self._state.questions
        keys = [states.bucket(states.number(question_id)) for question_id in drawn.question_ids]
        for (key, bucket), probability in zip(offered, drawn.probabilities.tolist(), strict=True):
            self._writer.append(
                DRAWS,
                {
                    "step": step,
                    "bucket": key.success_count,
                    "num_members": key.num_members,
                    "num_questions": len(bucket),
                    "probability": probability,
                    "num_drawn": keys.count(key),
                },
            )
        return drawn.question_ids

    def candidates(self, question_id: str) -> Candidates:
        """The stored trajectories of a question, with their last measurements."""
        return self._state.index.candidates(self._state.number(question_id), question_id)

    def stale(self, candidates: Candidates, weight_version: int) -> Bool[np.ndarray, " candidates"]:
        """Which candidates must be measured under the current weights before `choose`."""
        return candidates.stale(weight_version, self._rules.max_score_staleness)

    def choose(self, candidates: Candidates, rng: np.random.Generator) -> list[int]:
        """Positions of the candidates to replay, best first, by the rules' metric and direction; of equals the oldest.

        Raises RunError where a metric of the user's own breaks its promises.
        """
        return selection.choose(candidates, self._metric, self._rules.direction, rng, num=self._rules.per_question)

    def choose_from(self, candidates: Sequence[Candidates], rng: np.random.Generator) -> Choice:
        """The rows to replay of each question, by the rules' metric and direction."""
        positions = tuple(tuple(self.choose(each, rng)) for each in candidates)
        chosen = [int(each.trajectory_ids[at]) for each, own in zip(candidates, positions, strict=True) for at in own]
        return Choice(positions=positions, trajectories=tuple(self._state.trajectories(chosen)))

    def record_replay(self, step: int, candidates: Sequence[Candidates], choice: Choice | None) -> None:
        """Record what was measured of the candidates and which are replayed: none of them where `choice` is None."""
        chosen = choice.positions if choice is not None else [()] * len(candidates)
        for each, positions in zip(candidates, chosen, strict=True):
            self.record_scores(step, each, *positions)
        if choice is not None:
            self.record_selected(step, [trajectory.trajectory_id for trajectory in choice.trajectories])

    def record_scores(self, step: int, candidates: Candidates, *chosen: int) -> None:
        """One row per candidate of a question, as measured when it was chosen from.

        `chosen` are the positions of those that are replayed.
        """
        self._state.index.measure(
            candidates.trajectory_ids,
            entropy=candidates.entropy,
            nll=candidates.nll,
            measured_version=candidates.measured_version,
        )
        for position in range(len(candidates)):
            self._writer.append(
                SCORES,
                {
                    "step": step,
                    "question_id": candidates.question_id,
                    "trajectory_id": int(candidates.trajectory_ids[position]),
                    "weight_version": int(candidates.measured_version[position]),
                    "entropy": float(candidates.entropy[position]),
                    "nll": float(candidates.nll[position]),
                    "num_tokens": int(candidates.num_tokens[position]),
                    "chosen": position in chosen,
                },
            )

    def record_selected(self, step: int, trajectory_ids: Sequence[int]) -> None:
        """The trajectories that are replayed in this step; their questions rest afterwards."""
        for trajectory_id in trajectory_ids:
            self._state.select(step, trajectory_id)
