"""TRL's GRPOTrainer with the experience replay of exgrpo: its store, its draws, its objective.

    pip install trl==1.16.0 exgrpo            # copy this file beside your script

    from exgrpo_cli.config.layers import build_config
    from trl_replay import ReplayTrainer

    trainer = ReplayTrainer(
        model=model,
        reward_funcs=reward,                  # rewards in [0, 1]; `grading.success_at` and more is a success
        args=GRPOConfig(..., num_generations=8, steps_per_generation=2, gradient_accumulation_steps=1),
        train_dataset=rows,                   # with a column `question_id`
        processing_class=tokenizer,
        config=build_config(method="exgrpo"), # replay and objective of any method that scores or draws in one process
        ledger="ledger",                      # a new folder, which `exgrpo.open_run` and duckdb read
    )

Steps are then those of exgrpo: B = generation batch / K questions, drawn by the place of replay or next in the stream
(batches of TRL only count); K rollouts of each and their rewards by TRL; log-probs under the policy that
has sampled them; the store records each group; M = `steps_per_generation` updates on mini-batches of whole groups, and
those of replayed groups alone where the method has such. Sampling, optimizer, schedule, clipping of gradients and logs
are TRL's, whose step is an update. One process; `num_iterations = 1`, no KL penalty, text alone. Learning rate, B, K, M
and temperature are those of GRPOConfig, whatever `config` says of them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from trl import GRPOTrainer

from exgrpo_cli.algo.advantages import centred_advantages, normalised_advantages
from exgrpo_cli.algo.batching import MiniBatch, split_minibatches
from exgrpo_cli.algo.objective import TokenTargets, denominators, micro_batch_loss
from exgrpo_cli.base.types import (
    Grade,
    GradedRollout,
    Question,
    Rollout,
    StopReason,
    TokenScores,
    TokenSequence,
    Trajectory,
    Verdict,
)
from exgrpo_cli.config.settings import Config
from exgrpo_cli.ledger.schemas import LedgerIdentity
from exgrpo_cli.questions.stream import QuestionStream
from exgrpo_cli.replay.place import NO_EXPERIENCE, Asked
from exgrpo_cli.replay.store import Store
from exgrpo_cli.training.loop import with_joined
from exgrpo_cli.training.state import make_generators
from exgrpo_cli.training.step.groups import Group, replayed_row


class ReplayTrainer(GRPOTrainer):  # type: ignore[misc]
    """GRPOTrainer whose steps replay experience."""

    def __init__(self, *args: Any, config: Config, ledger: str | Path, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        form = normalised_advantages if config.objective.advantage == "normalised" else centred_advantages
        for what, holds in (
            ("one process", self.accelerator.num_processes == 1),
            ("num_iterations = 1", self.num_iterations == 1),
            ("gradient_accumulation_steps = 1", self.args.gradient_accumulation_steps == 1),
            ("beta = 0", self.beta == 0),
            ('objective.baseline = "group"', config.objective.baseline == "group"),
            ('a replay_surrogate other than "m2po"', config.objective.replay_surrogate != "m2po"),
            ("rollout.max_rounds = 1", config.rollout.max_rounds == 1),
        ):
            if not holds:
                raise ValueError(f"ReplayTrainer trains with {what} alone; set it, or train with exgrpo itself")
        self.config, self.advantage = config, form
        self.rows_of = {row["question_id"]: row for row in self.train_dataset}
        self.rngs = make_generators(self.args.seed)
        self.store = Store(
            Path(ledger),
            identity=LedgerIdentity(
                tokenizer_hash=str(self.processing_class.name_or_path),
                template="TRL",
                group_size=self.num_generations,
                questions_hash=str(len(self.rows_of)),
                logprob_source="trainer",
            ),
            rules=config.replay,
            question_ids=list(self.rows_of),
        )
        self.prompts: dict[str, np.ndarray] = {}
        """Prompt ids of the questions asked so far."""
        self.is_mixed = config.replay.start_threshold == 0
        self.stream = QuestionStream(list(self.rows_of), self.rngs["stream"])
        self.num_steps = 0
        self.waiting: list[MiniBatch] = []
        """Mini-batches of the step that are still to be trained on."""

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """The next mini-batch of the step, or the first of a new one."""
        if not self.model.training:
            return super()._prepare_inputs(generation_batch)
        if not self.waiting:
            self.num_steps += 1
            self.waiting = self.replay_step(self.num_steps)
        return {"minibatch": self.waiting.pop(0)}

    def _calculate_rewards(self, *args: Any) -> torch.Tensor:
        """Those of TRL, kept for the store: the weighted sum of its reward functions."""
        rewards = super()._calculate_rewards(*args)
        self.rewards = (rewards * self.reward_weights.to(rewards)).nansum(dim=1).double().cpu().numpy()
        return rewards

    def replay_step(self, step: int) -> list[MiniBatch]:
        """The mini-batches of a step: drawn, rolled out, scored, stored."""
        config = self.config
        place, mixed = config.replay, config.replay.enabled and self.is_mixed and step > config.replay.warmup_steps
        wanted = self.args.generation_batch_size // self.num_generations
        asked = Asked(
            store=self.store,
            step=step,
            weight_version=self.state.global_step,
            questions_per_step=wanted,
            from_old=config.objective.importance == "old",
            rngs=self.rngs,
            score=lambda stored: self.score([self.sequence(each) for each in stored]),
        )
        self.stream.readmit(self.store.readmit(step, self.rngs["readmit"]))
        experience = place.before(asked) if mixed else NO_EXPERIENCE
        standing_in = {} if experience.joined else experience.by_question
        fresh = self.stream.take(wanted - len(standing_in), retired=self.store.retired, experiential=set(standing_in))
        groups = self.roll_out([*standing_in, *fresh], standing_in)
        if mixed:
            experience = place.beside(asked, groups, experience)
            groups = [with_joined(group, experience) for group in groups]
        visits = [group.visit(step, self.advantage, None) for group in groups]
        self.store.record_visits(visits, collecting=place.enabled and (mixed or place.collect_before_start))
        self.store.flush(step)
        rewards = np.concatenate([group.rewards for group in groups if not group.is_experiential])
        self.is_mixed |= float(np.mean(rewards >= config.grading.success_at)) > place.start_threshold
        trained = [group for group in groups if group.is_mixed or not experience.drops_unmixed]
        units = [[self.replayed(row) for row in unit] for unit in experience.units]
        return split_minibatches(
            [group.rows(self.advantage) for group in trained],
            units,
            num_minibatches=self.args.steps_per_generation,
            max_response_tokens=self.max_completion_length,
            clip=not mixed or config.objective.clip_in_mixed_phase,
            rng=self.rngs["minibatch"],
            order=config.replay.order,
        )

    def roll_out(self, names: Sequence[str], standing_in: Mapping[str, Any]) -> list[Group]:
        """K rollouts of each question by TRL, less one for each stored row that stands in, with rewards and scores."""
        size = self.num_generations
        out = super()._generate_and_score_completions([self.rows_of[name] for name in names for _ in range(size)])
        rewards, success_at, version = self.rewards, self.config.grading.success_at, self.state.global_step
        groups: list[Group] = []
        for number, name in enumerate(names):
            members = range(number * size, (number + 1) * size)
            stored = standing_in.get(name, ())
            prompt = out["prompt_ids"][members[0]][out["prompt_mask"][members[0]].bool()]
            self.prompts[name] = prompt.cpu().numpy().astype(np.int32)
            fresh = []
            for member, at in enumerate(members[: size - len(stored)]):
                tokens = out["completion_ids"][at][out["completion_mask"][at].bool()].cpu().numpy().astype(np.int32)
                verdict = Verdict.CORRECT if rewards[at] >= success_at else Verdict.WRONG
                rollout = Rollout(
                    question_id=name,
                    member=member,
                    token_ids=tokens,
                    engine_logprobs=np.full(len(tokens), np.nan, dtype=np.float32),
                    stop_reason=StopReason.EOS if tokens[-1] == self._tokenizer.eos_token_id else StopReason.LENGTH,
                    weight_version=version,
                )
                text = self._tokenizer.decode(tokens, skip_special_tokens=True)
                fresh.append(GradedRollout(rollout=rollout, text=text, grade=Grade(verdict, float(rewards[at]))))
            sequences = [
                TokenSequence(prompt_ids=self.prompts[name], response_ids=own.rollout.token_ids) for own in fresh
            ]
            groups.append(
                Group(
                    question=Question(id=name, prompt=(), answer="", source="TRL"),
                    prompt_ids=self.prompts[name],
                    fresh=tuple(fresh),
                    scores=tuple(self.score(sequences)),
                    replayed=tuple(stored),
                    own_advantages=getattr(self.config.replay, "advantage_over", "group") == "own",
                )
            )
        return groups

    def sequence(self, trajectory: Trajectory) -> TokenSequence:
        """A stored row behind its prompt."""
        return TokenSequence(prompt_ids=self.prompts[trajectory.question_id], response_ids=trajectory.token_ids)

    @torch.no_grad()
    def score(self, sequences: Sequence[TokenSequence]) -> list[TokenScores]:
        """Log-probs and entropies of the responses under the current weights."""
        logprobs, entropies = self.forward(self.model, sequences)
        ends = np.cumsum([len(each.response_ids) for each in sequences])[:-1].tolist()
        pairs = zip(logprobs.tensor_split(ends), entropies.tensor_split(ends), strict=True)
        return [TokenScores(*(part.float().cpu().numpy() for part in pair)) for pair in pairs]

    def forward(self, model: Any, sequences: Sequence[TokenSequence]) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies of all response tokens, row after row, by TRL's own pass: prompts padded on the left,
        responses on the right."""
        before = max(len(each.prompt_ids) for each in sequences)
        behind = max(len(each.response_ids) for each in sequences)
        tokens = torch.full((len(sequences), before + behind), self._tokenizer.pad_token_id)
        mask = torch.zeros_like(tokens)
        for row, each in enumerate(sequences):
            whole = np.concatenate([each.prompt_ids, each.response_ids])
            begin = before - len(each.prompt_ids)
            tokens[row, begin : begin + len(whole)] = torch.from_numpy(whole.astype(np.int64))
            mask[row, begin : begin + len(whole)] = 1
        tokens, mask = tokens.to(self.model.device), mask.to(self.model.device)
        logprobs, entropies, _ = self._get_per_token_logps_and_entropies(
            model, tokens, mask, behind, batch_size=None, compute_entropy=True
        )
        chosen = mask[:, before:].bool()
        return logprobs[chosen], entropies[chosen]

    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        """exgrpo's objective of a mini-batch, from TRL's log-probs."""
        if "minibatch" not in inputs:
            return super()._compute_loss(model, inputs)
        batch, objective = inputs["minibatch"], self.config.objective
        logprobs, entropies = self.forward(model, [row.sequence for row in batch.rows])
        columns = {
            "advantages": [row.token_advantages for row in batch.rows],
            "behaviour_logprobs": [row.behaviour_logprobs for row in batch.rows],
            "replayed": [np.full(row.num_tokens, row.replayed) for row in batch.rows],
        }
        flat = {name: torch.from_numpy(np.concatenate(each)).to(logprobs.device) for name, each in columns.items()}
        for name in ("advantages", "behaviour_logprobs"):
            flat[name] = flat[name].to(logprobs.dtype)
        return micro_batch_loss(
            logprobs,
            entropies,
            None,
            TokenTargets(**flat),
            clip=batch.clip,
            settings=objective,
            denominators=denominators(objective, batch),
        )

    def replayed(self, row: Any) -> Any:
        """A unit's row with its prompt."""
        return replayed_row(row, self.prompts[row.trajectory.question_id])
