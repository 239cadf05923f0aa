"""The worked numbers of every method, through the real loop: who was scanned, taken, weighted how, is in the ledger.

Verdicts are given by hand, and where a number needs them the log-probs that the policy finds of stored responses;
everything between is a run's own. The numbers of dynamic sampling and of a question's past: `test_rounds_and_history`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from question_sources import write
from run_leaves import metrics
from transformers import AutoTokenizer

from exgrpo_cli.algo.batching import MiniBatch
from exgrpo_cli.algo.objective import TokenTargets
from exgrpo_cli.base import reporter, types
from exgrpo_cli.config.settings import Config
from exgrpo_cli.engines.policy import policy as policies
from exgrpo_cli.engines.policy.policy import Policy
from exgrpo_cli.ledger.reader import LedgerReader
from exgrpo_cli.show import asked, record
from exgrpo_cli.training import importing, questions
from exgrpo_cli.training.run import train

ONE_UPDATE = (
    "data.heldout=none", "optim.minibatches=1", "objective.entropy_coefficient=0", "replay.start_threshold=0",
    "run.save_every=100",
)  # fmt: skip
ENGINES = pytest.mark.engines
"""Longer than a second: beside the quick tests, these run on every change too."""


def pool_of(folder: Path, config: Config, rows: Sequence[Mapping[str, object]]) -> str:
    """A pool of these rows, each of the question whose number it names; the setting that replays from it."""
    ids = [question.id for question in questions.load_questions(config, reporter.SilentReporter()).train]
    own = [{**row, "question_id": ids[row["question_id"]]} for row in rows]
    importing.prepare_pool(write(folder / "rollouts.jsonl", *own), folder / "pool", config, reporter.SilentReporter())
    return f"replay.warm_start={folder / 'pool'}"


class World:
    """Runs of few questions, with verdicts given by hand, read back from what they leave."""

    def __init__(self, make: Callable[..., Config], folder: Path, verdicts: Callable[..., None]) -> None:
        self.make, self.folder, self.verdicts = make, folder, verdicts

    def config(self, method: str, *settings: str, questions: int = 1, group_size: int = 4, steps: int) -> Config:
        """B questions a step of as many, K rollouts each."""
        own = (
            f"arithmetic.num_train={questions}", f"rollout.questions_per_step={questions}",
            f"rollout.group_size={group_size}", f"run.steps={steps}",
        )  # fmt: skip
        return self.make(*ONE_UPDATE, *own, *settings, method=method)

    def run(self, method: str, *settings: str, name: str = "run", **sizes: int) -> dict[str, pd.DataFrame]:
        """The tables of the ledger that a run leaves, and its journal."""
        train(self.config(method, *settings, **sizes), self.folder / name, reporter=reporter.SilentReporter())
        reader = LedgerReader(self.folder / name / "replay")
        tables = ("trajectories", "replays", "events", "visits", "scores", "prefixes")
        found = {table: reader.table(table).to_pandas() for table in tables}
        return found | {"journal": pd.DataFrame(metrics(self.folder / name)).set_index("step")}


@pytest.fixture
def world(small_config, tmp_path: Path, verdicts: Callable[..., None]) -> World:
    return World(small_config, tmp_path, verdicts)


def give_logprobs(monkeypatch: pytest.MonkeyPatch, now: Mapping[tuple[int, ...], Sequence[float]]) -> None:
    """What the policy finds of the responses named by their token ids; all others are scored."""
    score = Policy.score

    def given(policy: Policy, sequences: Sequence[types.TokenSequence]) -> list[types.TokenScores]:
        found = score(policy, sequences)
        for place, sequence in enumerate(sequences):
            logprobs = now.get(tuple(sequence.response_ids.tolist()))
            if logprobs is not None:
                found[place] = replace(found[place], logprobs=np.array(logprobs, dtype=np.float32))
        return found

    monkeypatch.setattr(Policy, "score", given)


def test_headroom_and_drift_of_a_group(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A > 0 with pi .2, .6 and A < 0 with pi .9: H = (.8 + .4 + .9) / 3 = .7.

    Log-ratios .1, -.2, 0 since: Drift = (.01 + .04 + 0) / 3 = .0167 > 1e-3, refused. What is kept is the headroom of
    now: 1 - .2 e^.1 = .779, 1 - .6 e^-.2 = .509, .9, on average .729, within sqrt(.0167) = .129 of .7.
    """
    config = world.config("headroom-drift", "replay.ratio=1", group_size=2, steps=1)
    birth = np.log([0.2, 0.6, 0.9])
    right = {"question_id": 0, "token_ids": [5, 6], "logprobs": birth[:2].tolist(), "reward": 1}
    wrong = {"question_id": 0, "token_ids": [7], "logprobs": birth[2:].tolist(), "reward": 0}
    pool = pool_of(world.folder, config, [right, wrong])
    now = birth + np.array([0.1, -0.2, 0.0])
    give_logprobs(monkeypatch, {(5, 6): now[:2].tolist(), (7,): now[2:].tolist()})
    found = world.run("headroom-drift", "replay.ratio=1", pool, group_size=2, steps=1)
    [scanned] = found["replays"].to_dict("records")
    assert scanned["priority"] == pytest.approx(0.7, rel=1e-6)
    assert scanned["drift"] == pytest.approx(0.05 / 3, rel=1e-5) and not scanned["accepted"]
    assert scanned["headroom"] == pytest.approx((1 - 0.2 * np.exp(0.1) + 1 - 0.6 * np.exp(-0.2) + 0.9) / 3, rel=1e-5)
    assert abs(scanned["headroom"] - 0.7) <= np.sqrt(scanned["drift"])
    assert found["journal"].loc[1, "replay/used"] == 0
    replayed = asked.step_replay(record.read_run(world.folder / "run"), 1)
    assert replayed["nothing"] == "every unit scanned had drifted by more than replay.max_drift = 0.001"


def test_the_first_of_most_headroom_within_the_drift_is_taken(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Headrooms .9, .7, .6 with drifts .02, 1e-4, 5e-4, one wanted of B = 3: two are scored, the second is taken.

    A right token of pi = 1 - H and a wrong one of pi = H have headroom H. All log-probs fall by sqrt(Drift), the
    headrooms of the two to (1 - .1 e^-.141 + .9 e^-.141) / 2 = .847 and (1 - .3 e^-.01 + .7 e^-.01) / 2 = .698, which
    order step 2.
    """
    config = world.config("headroom-drift", questions=3, group_size=2, steps=2)
    headrooms, drifts = np.array([0.9, 0.7, 0.6]), np.array([0.02, 1e-4, 5e-4])
    rows, now = [], {}
    for number, (headroom, drift) in enumerate(zip(headrooms, drifts, strict=True)):
        for reward, chance in ((1, 1 - headroom), (0, headroom)):
            token, logprob = 5 + 2 * number + reward, float(np.log(chance))
            rows.append({"question_id": number, "token_ids": [token], "logprobs": [logprob], "reward": reward})
            now[(token,)] = [logprob - float(np.sqrt(drift))]
    pool = pool_of(world.folder, config, rows)
    give_logprobs(monkeypatch, now)
    world.verdicts([[0, 0, 0]] * 2, 2)
    replays = world.run("headroom-drift", pool, questions=3, group_size=2, steps=2)["replays"]
    first, second = replays[replays.step == 1], replays[replays.step == 2]
    assert first.unit_id.tolist() == [0, 2] and first.accepted.tolist() == [False, True]
    assert first.priority.tolist() == pytest.approx([0.9, 0.7], rel=1e-6)
    assert first.drift.tolist() == pytest.approx([0.02, 1e-4], rel=1e-3)
    renewed = (1 + (2 * headrooms[:2] - 1) * np.exp(-np.sqrt(drifts[:2]))) / 2
    assert renewed == pytest.approx([0.847, 0.698], abs=5e-4)
    assert first.headroom.tolist() == pytest.approx(renewed, rel=1e-5)
    assert second.priority.tolist() == pytest.approx(renewed, rel=1e-5)
    assert (first.weight == 1).all() and first.probability.isna().all()


@ENGINES
def test_rows_by_their_advantage_for_ten_steps(world: World) -> None:
    """K = 4, k = 1: |A| .75 and .25 three times, their roots .866 and .5: P .366 and .211. Born at 5: gone at 16."""
    world.verdicts([[1 if step in (5, 15, 16) else 0] for step in range(1, 17)], 4)
    replays = world.run("adv-per", "replay.warmup_steps=1", "replay.ratio=1", steps=16)["replays"]
    drawn = replays[replays.step == 15].sort_values("unit_id")
    assert drawn.unit_id.tolist() == [0, 1, 2, 3]
    assert drawn.probability.tolist() == pytest.approx([0.366, 0.211, 0.211, 0.211], abs=5e-4)
    assert drawn.priority.tolist() == pytest.approx([0.75, 0.25, 0.25, 0.25], abs=1e-5)
    assert (drawn.weight == 1).all() and drawn.accepted.all()
    # Those of step 15 alone.
    assert sorted(replays[replays.step == 16].unit_id) == [4, 5, 6, 7]
    assert sorted(set(replays.step)) == [15, 16]


@ENGINES
def test_successes_fade(world: World) -> None:
    """Ages one time constant apart (of 2 steps here): (1, 1/e)^.6 = 1, .549: P .646, .354; weights .787 and 1."""
    world.verdicts([[1], [0], [1], [1]], 4)
    replays = world.run("fresh-per", "replay.store=successes", "replay.age_decay=2", steps=4)["replays"]
    drawn = replays[replays.step == 4].sort_values("unit_id", ascending=False)
    assert drawn.unit_id.tolist() == [1, 0]
    assert drawn.probability.tolist() == pytest.approx([0.646, 0.354], abs=5e-4)
    assert drawn.weight.tolist() == pytest.approx([0.787, 1.0], abs=5e-4)


def test_a_failure_is_hardly_drawn_and_sets_the_scale_of_weights(world: World, batches: list[MiniBatch]) -> None:
    """Success and failure of one age: P ratio ((1 + 1e-6) / 1e-6)^.6 = 3981, the success weighs 3981^-.4 = .0363."""
    world.verdicts([[1], [1]], 4)
    replays = world.run("fresh-per", steps=2)["replays"].set_index("unit_id").sort_index()
    assert replays.probability[0] / replays.probability[1] == pytest.approx(3981, abs=1)
    assert replays.weight.tolist() == pytest.approx([0.0363, 1, 1, 1], abs=5e-5)
    # Replayed after the fresh updates; the weights are those of the rows that train.
    trained = [row for batch in batches for row in batch.rows if row.replayed]
    weights = sorted(1.0 if row.importance_weights is None else float(row.importance_weights[0]) for row in trained)
    assert weights == pytest.approx([0.0363, 1, 1, 1], abs=5e-5)


@ENGINES
def test_eight_of_a_questions_sixteen_rows(world: World, batches: list[MiniBatch]) -> None:
    """3 of 16 right: A_off .625 three times, -.375 five times. 9 of 16, all eight right: zeros.

    At R = K the joint denominator counts 2 K rows, each own one K: half the gradient.
    """
    found = {}
    for denominator in ("own", "joint"):
        world.verdicts([[1], [2], [7], [4]], 8)
        own = f"objective.replay_denominator={denominator}"
        found[denominator] = world.run("repo", own, group_size=8, steps=4, name=denominator)
    rows = found["own"]["trajectories"].set_index("trajectory_id")
    scores = found["own"]["scores"]
    assert sorted(set(scores.step)) == [3, 4] and scores.groupby("step").chosen.sum().tolist() == [8, 8]
    for step, right, chosen in ((3, 3, 3), (4, 9, 8)):
        held = scores[scores.step == step]
        assert len(held) == 16 and rows.reward[held.trajectory_id].sum() == right
        assert rows.reward[held[held.chosen].trajectory_id].sum() == chosen
    replayed = [sorted(row.advantage for row in batch.rows if row.replayed) for batch in batches[:4]]
    assert replayed[:2] == [[], []]
    assert replayed[2] == pytest.approx([-0.375] * 5 + [0.625] * 3) and replayed[3] == [0] * 8
    norms = {name: tables["journal"]["optim/grad_norm"] for name, tables in found.items()}
    assert norms["joint"][[1, 2]].tolist() == norms["own"][[1, 2]].tolist()
    assert norms["joint"][3] == pytest.approx(norms["own"][3] / 2, rel=1e-4)


def test_nothing_joins_a_group_that_does_not_train(world: World) -> None:
    """With several rounds a group without a success is left out of N, and so are the rows its question holds."""
    world.verdicts([[1], [0], [2]], 4)
    own = ("replay.min_stored=1", "rollout.max_rounds=2", "objective.replay_denominator=joint")
    found = world.run("repo", *own, steps=3)
    assert found["journal"]["replay/used"].tolist() == [0, 0, 8]
    assert found["journal"]["tokens/trained"][2] == 0 and sorted(set(found["scores"].step)) == [3]


def test_two_rows_of_a_pool_beside_four_rollouts(world: World, batches: list[MiniBatch]) -> None:
    """K = 4, k = 1, M = 2: 3 of 6 are right, A +.5 three times and -.5 three times; w* = 1 whatever was stored."""
    stored = [{"question_id": 0, "token_ids": [5, 6 + n], "logprobs": [-9.0, -0.1], "reward": 1} for n in range(2)]
    pool = pool_of(world.folder, world.config("exgrpo", steps=1), stored)
    world.verdicts([[1]], 4)
    found = world.run("rlep", pool, steps=1)
    assert found["scores"].chosen.tolist() == [True, True]
    [batch] = batches
    assert [row.replayed for row in batch.rows] == [False] * 4 + [True] * 2
    assert [row.advantage for row in batch.rows] == pytest.approx([0.5] + [-0.5] * 3 + [0.5] * 2)
    for ratio in ("policy/ratio_replay", "policy/ratio_replay_max"):
        assert found["journal"][ratio].tolist() == pytest.approx([1.0], abs=1e-5)
    assert found["visits"].k.tolist() == [1]


def test_groups_by_their_signal_take_the_places_of_others(world: World, batches: list[MiniBatch]) -> None:
    """B = 4. Two mixed, one stored: N = 3 K. k = 2 has signal 2 * .577 = 1.155, k = 1, 3 1.5 * .5 = .75: P .606, .394.

    A store of two lets the weakest go, of equals the first: k = 1 of step 2.
    """
    world.verdicts([[2, 0, 0, 0], [1, 3, 0, 4], [0, 4, 4, 0]], 4)
    found = world.run("trl-refill", "replay.capacity=2", "rollout.questions_per_step=4", questions=5, steps=3)
    replays = found["replays"]
    assert replays[replays.step == 2].unit_id.tolist() == [0]
    assert [(batch.num_rollouts, len(batch.rows)) for batch in batches] == [(4, 4), (12, 12), (8, 8)]
    assert found["journal"]["replay/refilled"].tolist() == [0, 1, 2]
    drawn = replays[replays.step == 3].sort_values("unit_id")
    assert drawn.priority.tolist() == pytest.approx([1.155, 0.75], abs=5e-4)
    assert drawn.probability.tolist() == pytest.approx([0.606, 0.394], abs=5e-4)
    assert drawn.unit_id.tolist() == [0, 8]


def test_a_single_success_is_stored_and_five_retire(world: World) -> None:
    """K = 8: k = 1 stores, 2 only moves the bucket, 4 stays, 5 retires. A quarter of B = 3 is no replay."""
    world.verdicts([[1, 1, 1], [2, 4, 5]], 8)
    found = world.run("su01", questions=3, group_size=8, steps=2)
    visits = found["visits"][found["visits"].step == 2].set_index("k").question_id
    events = found["events"]
    assert events[events.step == 1].event.tolist() == ["collected"] * 3
    second = events[events.step == 2].set_index("question_id")
    assert second.event[[visits[2], visits[4], visits[5]]].tolist() == ["moved", "moved", "retired"]
    assert second.bucket[[visits[2], visits[4]]].tolist() == [2, 4]
    assert len(found["trajectories"]) == 3


def test_the_likelihood_of_replayed_tokens_alone_has_a_gradient(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replayed log-prob has gradient -c / D_r, D_r = N L, whatever A and w: c = 1/2, N = 4 fresh and one."""
    seen: list[tuple[TokenTargets, torch.Tensor]] = []
    loss_of = policies.objective.micro_batch_loss

    def watched(logprobs: torch.Tensor, entropies: torch.Tensor, reference: None, targets: TokenTargets, **rest):
        if logprobs.requires_grad:
            logprobs.register_hook(lambda gradient: seen.append((targets, gradient.clone())))
        return loss_of(logprobs, entropies, reference, targets, **rest)

    monkeypatch.setattr(policies.objective, "micro_batch_loss", watched)
    world.verdicts([[1], [1]], 4)
    found = world.run("sft-successes", "objective.replay_weight=0.5", "objective.loss_scale=1", steps=2)
    [taken] = found["replays"][found["replays"].accepted].unit_id
    replayed = torch.cat([gradient[targets.replayed] for targets, gradient in seen])
    assert len(replayed) == found["trajectories"].num_tokens[taken]
    expected = torch.full_like(replayed, -0.5 / (5 * world.make().rollout.max_response_tokens))
    torch.testing.assert_close(replayed, expected, rtol=1e-6, atol=0)


def test_a_question_is_asked_again_once_it_has_rested(world: World, batches: list[MiniBatch]) -> None:
    """B = 2, one of them asked again: k = 2 of step 1 rests in step 2, of K = 4 now 1 is right; then one of step 3.

    All rows are fresh and every group is a visit; a question that all four solve retires.
    """
    world.verdicts([[2, 0], [0, 0], [1, 2], [0, 0], [4, 0]], 4)
    sizes = ("arithmetic.num_train=12", "rollout.questions_per_step=2", "replay.cooldown=1")
    found = world.run("prompt-replay", *sizes, steps=5)
    visits, events = found["visits"], found["events"]
    asked_in = {step: own.question_id.tolist() for step, own in visits.groupby("step")}
    assert found["journal"]["replay/used"].tolist() == [0, 0, 1, 0, 1]
    assert asked_in[3][0] == asked_in[1][0] and len({*visits.question_id}) == 8
    assert asked_in[5][0] in (asked_in[1][0], asked_in[3][1])
    assert visits.k.tolist() == [2, 0, 0, 0, 1, 2, 0, 0, 4, 0]
    assert events[events.event == "retired"].question_id.tolist() == [asked_in[5][0]]
    assert events[events.event == "selected"].step.tolist() == [3, 5]
    assert not any(row.replayed for batch in batches for row in batch.rows) and found["prefixes"].empty
    assert [row.advantage for row in batches[2].rows[:4]] in ([0.75] + [-0.25] * 3, [0.5, 0.5, -0.5, -0.5])
    assert found["journal"]["batch/questions"].tolist() == [2] * 5


def test_a_question_asked_again_counts_for_the_rounds(world: World, batches: list[MiniBatch]) -> None:
    """B = 2: in step 2 the one asked again is mixed, the fresh one is not, so that one more is drawn."""
    world.verdicts([[2, 3], [1, 0], [2]], 4)
    sizes = ("arithmetic.num_train=12", "rollout.questions_per_step=2", "replay.cooldown=0", "rollout.max_rounds=2")
    found = world.run("prompt-replay", *sizes, steps=2)
    assert found["journal"].loc[2, ["replay/used", "batch/questions", "rollout/rounds"]].tolist() == [1, 3, 2]
    assert [len(batch.rows) for batch in batches] == [8, 8]


@pytest.mark.parametrize(
    ("settings", "rounds", "born"),
    [
        (("replay.store=successes",), [2, 0, 1, 3], (True, [0, 1])),
        (("replay.store=failures", "replay.retirement=false"), [2, 4, 1, 3], (False, [2, 3])),
    ],
)
def test_a_stored_beginning_stands_before_all_rollouts(world: World, batches, settings, rounds, born) -> None:
    """K = 4, cut at .4 of its tokens: floor(.4 n) of the shortest stored row, the first of equals, one at least.

    Step 1 stores two rows, step 2 solves none (all): steps 3 and 4 begin with a success (a failure). Of one right and
    three wrong advantages are .75 and -.25. They are no visits, so the question stays where it is.
    """
    correct, stored = born
    world.verdicts([[count] for count in rounds], 4)
    own = ("replay.ratio=1", "replay.cut=share", "replay.cut_share=0.4", "replay.metric=length", *settings)
    found = world.run("prefix", *own, steps=4)
    rows, prefixes = found["trajectories"], found["prefixes"]
    # Equal failures are stored once.
    assert rows.correct.tolist() == [correct] * len(rows) and len(rows) <= len(stored)
    parent = rows.sort_values(["num_tokens", "trajectory_id"]).iloc[0]
    num = max(1, int(0.4 * parent.num_tokens))
    assert prefixes.drop(columns="question_id").to_dict("records") == [
        {"step": 3, "trajectory_id": parent.trajectory_id, "num_tokens": num, "k": 1, "num_members": 4},
        {"step": 4, "trajectory_id": parent.trajectory_id, "num_tokens": num, "k": 3, "num_members": 4},
    ]
    assert found["visits"].k.tolist() == rounds[:2]
    assert found["events"].event.tolist() == ["collected"] * len(rows) + ["moved", "selected", "selected"]
    assert found["journal"]["replay/prefix_tokens"].dropna().tolist() == [num, num]
    assert found["journal"]["replay/pass_at_1"].dropna().tolist() == [0.25, 0.75]
    [(tokens, _)] = LedgerReader(world.folder / "run" / "replay").bodies([int(parent.trajectory_id)])
    prompt = batches[0].rows[0].sequence.prompt_ids
    grown = batches[-2].rows
    assert [row.advantage for row in grown] == [0.75, -0.25, -0.25, -0.25]
    for row in grown:
        assert row.sequence.prompt_ids.tolist() == [*prompt, *tokens[:num]] and not row.replayed
        assert row.num_tokens <= world.config("prefix", steps=4).rollout.max_response_tokens - num
    told = [json.loads(line) for line in (world.folder / "run/samples/step-000003.jsonl").read_text().splitlines()]
    text = AutoTokenizer.from_pretrained(world.folder / "run/model").decode(tokens[:num])
    assert told and all(one["text"].startswith(text) and one["experiential"] for one in told)
