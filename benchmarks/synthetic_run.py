"""A run folder without a model: the real buffer and ledger, driven by a simulated policy that learns.

Questions have a difficulty, the simulated policy's skill rises with the steps, a rollout succeeds with the logistic of
their difference, and entropies fall as the policy grows surer. Everything that `replay-stats` reads is written.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from exgrpo_cli.base.files import append_json_lines
from exgrpo_cli.ledger.schemas import LedgerIdentity
from exgrpo_cli.replay.by_question import Candidates, choose, resolve_metric, resolve_sampler
from exgrpo_cli.replay.replace import Replace
from exgrpo_cli.replay.store import FreshRow, Store, Visit
from exgrpo_cli.runs.folder import RunFolder

MEAN_TOKENS = 24
VOCABULARY = 512
HELDOUT_EVERY = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class SyntheticRun:
    """The size and the settings of a simulated run."""

    steps: int = 60
    num_questions: int = 1000
    questions_per_step: int = 32
    group_size: int = 8
    mixed_from: int = 6
    ratio: float = 0.5
    rules: Replace = field(default_factory=Replace)
    heldout: bool = True
    finished: bool = True
    """Whether summary.json is written."""
    save_every: int = 1
    """Steps between two parts of the ledger."""
    seed: int = 0


def write_run(run: Path, spec: SyntheticRun) -> Store:
    """Simulate `spec` into the new folder `run`; return the buffer as it was left, closed."""
    rng = np.random.default_rng(spec.seed)
    ids = [f"{number:06x}{rng.integers(16**6):06x}" for number in range(spec.num_questions)]
    write_questions(run, ids)
    write_config(run, spec)
    identity = LedgerIdentity(
        tokenizer_hash="t", template="chat", group_size=spec.group_size, questions_hash="q", logprob_source="trainer"
    )
    simulation = _Simulation(spec, ids, rng)
    with (
        Store(run / "replay", identity=identity, rules=spec.rules, question_ids=ids) as buffer,
        (run / "metrics.jsonl").open("w") as metrics,
    ):
        for step in range(1, spec.steps + 1):
            metrics.write(json.dumps(simulation.step(buffer, step)) + "\n")
    if spec.heldout:
        moments = [*range(0, spec.steps, HELDOUT_EVERY), *([spec.steps] if spec.finished else [])]
        append_json_lines(RunFolder(run).validations, map(simulation.validation, moments))
    (run / "environment.json").write_text(json.dumps({"packages": {}, "train_questions_sha256": "q"}))
    if spec.finished:
        _write_summary(run, simulation)
    return buffer


def write_questions(run: Path, ids: list[str]) -> None:
    """RUN/data/train.parquet in the canonical layout."""
    (run / "data").mkdir(parents=True)
    prompt = [[{"role": "user", "content": f"What is {number} + {number + 3}?"}] for number in range(len(ids))]
    table = pa.table(
        {
            "id": ids,
            "prompt": prompt,
            "answer": [str(2 * number + 3) for number in range(len(ids))],
            "source": ["synthetic"] * len(ids),
            "level": [str(2 + number % 6) for number in range(len(ids))],
        }
    )
    pq.write_table(table, run / "data" / "train.parquet")


def write_config(run: Path, spec: SyntheticRun, *, method: str = "exgrpo", replay: bool = True) -> None:
    """RUN/config.toml with the settings that replay statistics depend on."""
    rules = spec.rules
    (run / "config.toml").write_text(
        f'[run]\nmethod = "{method}"\nsteps = {spec.steps}\nseed = {spec.seed}\n'
        f"[rollout]\ngroup_size = {spec.group_size}\nquestions_per_step = {spec.questions_per_step}\n"
        f'[replay]\nenabled = {str(replay).lower()}\nsampler = "{rules.sampler}"\nmetric = "{rules.metric}"\n'
        f'direction = "{rules.direction}"\nmu = {rules.mu}\nsigma = {rules.sigma}\n'
        f"cooldown = {rules.cooldown}\nmax_age = {rules.max_age}\n"
    )


class _Simulation:
    """The policy, the stream and the trainer, reduced to what reaches the ledger and the journal."""

    def __init__(self, spec: SyntheticRun, ids: list[str], rng: np.random.Generator) -> None:
        self.spec = spec
        self.ids = ids
        self.rng = rng
        self.difficulty = dict(zip(ids, rng.normal(0.0, 1.8, len(ids)).tolist(), strict=True))
        self.queue: list[str] = []

    def skill(self, step: int) -> float:
        return -1.2 + 3.2 * (1 - math.exp(-3.0 * step / self.spec.steps))

    def entropy(self, step: int) -> float:
        return 0.55 * math.exp(-1.2 * step / self.spec.steps) + 0.05

    def pass_probability(self, question_id: str, step: int) -> float:
        return 1 / (1 + math.exp(self.difficulty[question_id] - self.skill(step)))

    def step(self, buffer: Store, step: int) -> dict[str, object]:
        spec = self.spec
        mixed = step >= spec.mixed_from
        for question_id in buffer.readmit(step, self.rng):
            self.queue.insert(int(self.rng.integers(len(self.queue) + 1)), question_id)
        replayed, line = self._replay(buffer, step) if mixed else ({}, {})
        fresh = self._fresh(spec.questions_per_step - len(replayed), buffer, replayed)
        counts = {False: [0], True: [0]}
        tokens = 0
        for question_id in [*replayed, *fresh]:
            experiential = question_id in replayed
            members = spec.group_size - experiential
            k = int(self.rng.binomial(members, self.pass_probability(question_id, step)))
            counts[experiential].append(k)
            successes = [self._success(question_id, step) for _ in range(k)]
            tokens += members * MEAN_TOKENS
            visit = Visit(
                question_id=question_id,
                step=step,
                weight_version=step - 1,
                success_count=k + experiential,
                num_fresh_successes=k,
                num_replayed=int(experiential),
                verifier_failed=False,
                rows=successes,
            )
            buffer.record_visits([visit], collecting=mixed)
        buffer.flush(step)
        if step % spec.save_every == 0:
            buffer.seal()
        return self._line(buffer, step, mixed, counts, tokens, replayed) | line

    def _fresh(self, num: int, buffer: Store, replayed: dict[str, int]) -> list[str]:
        taken: list[str] = []
        retired = buffer.retired
        while len(taken) < num:
            if not self.queue:
                self.queue = [self.ids[i] for i in self.rng.permutation(len(self.ids)) if self.ids[i] not in retired]
                if len(self.queue) <= num:
                    return taken
            question_id = self.queue.pop()
            if question_id not in retired and question_id not in replayed:
                taken.append(question_id)
        return taken

    def _success(self, question_id: str, step: int) -> FreshRow:
        length = max(4, int(self.rng.lognormal(math.log(MEAN_TOKENS), 0.4)))
        entropy = max(0.0, self.entropy(step) * (1 + 0.15 * self.difficulty[question_id]) * self.rng.lognormal(0, 0.35))
        return FreshRow(
            token_ids=self.rng.integers(0, VOCABULARY, length, dtype=np.int32),
            behaviour_logprobs=np.full(length, -entropy, dtype=np.float32),
            entropy=entropy,
            nll=entropy * self.rng.lognormal(0, 0.1),
        )

    def _replay(self, buffer: Store, step: int) -> tuple[dict[str, int], dict[str, object]]:
        rules = buffer.rules
        sampler = resolve_sampler(rules.sampler, rules.mu, rules.sigma)
        drawn = buffer.draw_questions(sampler, int(self.spec.ratio * self.spec.questions_per_step), step, self.rng)
        replayed: dict[str, int] = {}
        offered: list[Candidates] = []
        sizes, selected, available = [], [], []
        for question_id in drawn:
            [candidates] = buffer.candidates([question_id])
            if rules.needs_scores:
                stale = candidates.trajectory_ids[step - candidates.measured_version > rules.max_score_staleness]
                drift = self.rng.lognormal(-0.02, 0.05, len(stale))
                buffer.rows["entropy"][stale] *= drift
                buffer.rows["nll"][stale] *= drift
                buffer.rows["measured_version"][stale] = step
                [candidates] = buffer.candidates([question_id])
            [at] = choose(candidates, resolve_metric(rules.metric), rules.direction, self.rng)
            offered.append(candidates)
            replayed[question_id] = int(candidates.trajectory_ids[at])
            sizes.append(len(candidates))
            selected.append(float(candidates.entropy[at]))
            available.append(float(candidates.entropy.mean()))
        buffer.record_choice(step, offered, [[trajectory_id] for trajectory_id in replayed.values()])
        if not replayed:
            return {}, {}
        progress = step / self.spec.steps
        return replayed, {
            "replay/candidates_mean": float(np.mean(sizes)),
            "replay/entropy_selected": float(np.mean(selected)),
            "replay/entropy_available": float(np.mean(available)),
            "replay/ess": float(np.clip(0.97 - 0.35 * progress + self.rng.normal(0, 0.02), 0.05, 1)),
            "policy/ratio_replay": 1 + 0.3 * progress + float(self.rng.normal(0, 0.03)),
            "policy/ratio_replay_max": 4 + 30 * progress * float(self.rng.lognormal(0, 0.6)),
        }

    def _line(
        self,
        buffer: Store,
        step: int,
        mixed: bool,
        counts: dict[bool, list[int]],
        tokens: int,
        replayed: dict[str, int],
    ) -> dict[str, object]:
        size, rng = self.spec.group_size, self.rng
        fresh = np.array(counts[False][1:])
        line: dict[str, object] = {
            "step": step,
            "phase": "mixed" if mixed else "on-policy",
            "tokens/generated": tokens,
            "tokens/trained": tokens + MEAN_TOKENS * len(replayed),
            "replay/questions": buffer.counts.num_questions,
            "replay/trajectories": buffer.counts.num_trajectories,
            "replay/retired": buffer.counts.num_retired,
            "replay/used": len(replayed),
            **{f"replay/bucket/{k}": count for k, count in buffer.counts.buckets.items()},
            "policy/entropy": self.entropy(step) * float(rng.lognormal(0, 0.04)),
            "policy/ratio_fresh": 1 + float(rng.normal(0, 0.002)),
            "policy/ratio_fresh_max": 1.1 + float(rng.gamma(2, 0.15)),
            "policy/logprob_gap_mean": 1e-5 * float(rng.lognormal(0, 0.2)),
            "policy/logprob_gap_max": 1e-4 * float(rng.lognormal(0, 0.4)),
            "optim/grad_norm": 0.4 * float(rng.lognormal(0, 0.3)) * (1 + 1 / step),
            "optim/updates_applied": 2 - int(step == 17),
            "optim/updates_skipped": int(step == 17),
        }
        if len(fresh):
            line |= {
                "reward/mean": float(fresh.mean() / size),
                "batch/pass_at_1": float(fresh.mean() / size),
                "batch/solve_all": float((fresh == size).mean()),
                "batch/solve_none": float((fresh == 0).mean()),
                "batch/questions": len(fresh),
                "length/mean": MEAN_TOKENS + float(rng.normal(0, 1)),
            }
        if len(counts[True]) > 1:
            line["replay/pass_at_1"] = float(np.mean(counts[True][1:]) / (size - 1))
        if not mixed:
            line["policy/clip_fraction"] = float(rng.uniform(0, 0.01))
        if self.spec.heldout and step % HELDOUT_EVERY == 0:
            score = self.heldout(step)
            line |= {"val/arithmetic": score, "val/arithmetic/low": score - 0.03, "val/arithmetic/high": score + 0.03}
        return line

    def heldout(self, step: int) -> float:
        return 0.25 + 0.6 * (1 - math.exp(-3.0 * step / self.spec.steps))

    def validation(self, step: int) -> dict[str, Any]:
        correct = np.random.default_rng(step).binomial(4, self.heldout(step), 600)
        return {"step": step, "generated": 1000 * step, "samples": 4, "correct": " ".join(map(str, correct))}


def _write_summary(run: Path, simulation: _Simulation) -> None:
    heldout = {
        name: {"pass_at_1": score, "low": score - 0.03, "high": score + 0.03, "questions": 600, "samples": 4}
        for name, step in (("before", 0), ("after", simulation.spec.steps))
        for score in (simulation.heldout(step),)
    }
    summary = {
        "steps": simulation.spec.steps,
        "finished": "steps reached",
        "method": "exgrpo",
        "backbone": "tiny",
        "seed": simulation.spec.seed,
        "heldout": {"set": "arithmetic", **heldout},
        "tokens": {"generated": 0, "trained": 0},
        "wall_seconds": {"total": 0.0},
        "peak_memory_bytes": 0,
        "replay": {"questions": 0, "trajectories": 0, "retired": 0, "used": 0},
    }
    (run / "summary.json").write_text(json.dumps(summary))
