"""The proof of replay through the real loop, from what a run leaves on disk: its ledger, checkpoints and journal.

One update a step and a checkpoint of every step: the weights of checkpoint t-1 scored, sampled and were updated in step
t, so every figure of step t can be recomputed in float64.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from run_leaves import metrics
from transformers import AutoModelForCausalLM, AutoTokenizer

from exgrpo_cli.base.reporter import SilentReporter
from exgrpo_cli.ledger.reader import LedgerReader
from exgrpo_cli.training.run import train

STEPS = 8
Recompute = Callable[[int, int], tuple[np.ndarray, float]]


@pytest.fixture(scope="module")
def run(small_config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Mixed from step 2; step 1 is sampled by the backbone itself."""
    folder = tmp_path_factory.mktemp("runs") / "proof"
    config = small_config(
        "arithmetic.num_train=24", "data.heldout=none", "optim.minibatches=1", f"run.steps={STEPS}", "run.save_every=1",
        # Too small to matter, but no row is left out of the update for a zero advantage: every ratio is logged.
        "run.keep_checkpoints=0", "objective.entropy_coefficient=1e-12",
    )  # fmt: skip
    train(config, folder, reporter=SilentReporter())
    return folder


@pytest.fixture(scope="module")
def ledger(run: Path) -> LedgerReader:
    return LedgerReader(run / "replay")


@pytest.fixture(scope="module")
def born(ledger: LedgerReader) -> pd.DataFrame:
    """Stored trajectories by their id."""
    return ledger.trajectories().to_pandas().set_index("trajectory_id")


@pytest.fixture(scope="module")
def scores(ledger: LedgerReader) -> pd.DataFrame:
    return ledger.scores().to_pandas()


@pytest.fixture(scope="module")
def recompute(run: Path, small_backbone: Path, ledger: LedgerReader, born: pd.DataFrame) -> Recompute:
    """(step, trajectory): log-probs of its tokens and mean entropy, in float64, by the weights that step began with."""
    prompts = {row["id"]: row["prompt"] for row in pq.read_table(run / "data" / "train.parquet").to_pylist()}
    tokenizer = AutoTokenizer.from_pretrained(small_backbone)
    bodies = ledger.bodies(range(len(born)))

    @cache
    def weights(step: int) -> torch.nn.Module:
        saved = run / "checkpoints" / f"step-{step - 1:06d}" / "model" if step > 1 else small_backbone
        return AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float64)

    @cache
    def recomputed(step: int, trajectory_id: int) -> tuple[np.ndarray, float]:
        asked = prompts[born.question_id[trajectory_id]]
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        ids = torch.tensor([*prompt, *bodies[trajectory_id][0].tolist()])
        with torch.no_grad():
            logits = weights(step)(ids[None]).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1).mean().item()
        return logprobs.gather(1, ids[len(prompt) :, None])[:, 0].numpy(), entropy

    return recomputed


def journal(run: Path) -> dict[int, dict]:
    return {line["step"]: line for line in metrics(run)}


def test_every_replayed_row_is_the_argmin_of_its_candidates(run, ledger, scores) -> None:
    """Selected, chosen and lowest are the same row in every draw of the run; four a step once as many are stored."""
    events = ledger.events().to_pandas()
    selected = events[events.event == "selected"]
    lines = list(journal(run).values())
    used = [0, 0, *(min(4, before["replay/questions"]) for before in lines[1:-1])]
    assert [line["replay/used"] for line in lines] == used
    lowest = scores.sort_values(["step", "question_id", "entropy", "trajectory_id"]).groupby(["step", "question_id"])
    first = lowest.head(1)
    assert first.chosen.all() and scores.chosen.sum() == len(first) == len(selected) == sum(used) > 10
    pairs = [set(zip(rows.step, rows.trajectory_id, strict=True)) for rows in (first, selected)]
    assert pairs[0] == pairs[1]
    assert (lowest.size() > 1).sum() > 5, "hardly a draw had a choice: the test shows little"


def test_the_candidates_are_all_that_the_question_had_stored(scores: pd.DataFrame, born: pd.DataFrame) -> None:
    """Nothing is evicted here, so a draw of step t weighs every trajectory born before step t."""
    for (step, question_id), group in scores.groupby(["step", "question_id"]):
        stored = born.index[(born.question_id == question_id) & (born.step_born < step)]
        assert sorted(group.trajectory_id) == sorted(stored)


def test_every_score_is_that_of_the_current_policy(scores, born, recompute) -> None:
    """Under the weights that the step began with, and so under those that sampled its fresh rollouts."""
    versions = born.groupby("step_born").weight_version.unique()
    for row in scores.itertuples():
        logprobs, entropy = recompute(row.step, row.trajectory_id)
        assert row.entropy == pytest.approx(entropy, abs=2e-5)
        assert row.nll == pytest.approx(-logprobs.mean(), abs=2e-5)
        if row.step in versions:
            assert [row.weight_version] == versions[row.step].tolist()


def test_stored_log_probs_are_those_of_the_policy_that_sampled(ledger, born, recompute) -> None:
    for row, (_, behaviour) in zip(born.itertuples(), ledger.bodies(range(len(born))), strict=True):
        logprobs, entropy = recompute(row.step_born, row.Index)
        np.testing.assert_allclose(behaviour, logprobs, atol=2e-5)
        assert row.entropy == pytest.approx(entropy, abs=2e-5)


def test_every_importance_ratio_is_against_the_policy_that_sampled_the_row(run, scores, born, recompute) -> None:
    """w = pi_now / pi_past over all replayed tokens of a step: its mean, its maximum and (sum w)^2 / (n sum w^2).

    Neither another generator (here: that of the step after) nor pi_old of this step, whose ratios are all 1, gives the
    logged figures.
    """
    lines, distances = journal(run), []
    for step, rows in scores[scores.chosen].groupby("step"):
        ids = rows.trajectory_id.tolist()
        now = np.concatenate([recompute(step, i)[0] for i in ids])
        past = np.concatenate([recompute(int(born.step_born[i]), i)[0] for i in ids])
        later = np.concatenate([recompute(int(born.step_born[i]) + 1, i)[0] for i in ids])
        w = np.exp(now - past)
        logged = [lines[step][key] for key in ("policy/ratio_replay", "policy/ratio_replay_max", "replay/ess")]
        assert logged == pytest.approx([w.mean(), w.max(), w.sum() ** 2 / (len(w) * (w**2).sum())], rel=1e-4)
        distances.append([abs(w.mean() - 1), abs(w.mean() - np.exp(now - later).mean())])
    assert len(distances) > 3
    assert np.median(distances, axis=0).min() > 1e-3, "the generators are too alike to tell apart"
