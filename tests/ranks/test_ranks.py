"""Two real processes against one: shares, gradients, whole runs, two agents as two hosts, ranks that end or hang."""

import json
import pickle
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from rank_worker import TORCH
from recorded_rollouts import train_and_note
from run_leaves import assert_same_run, metrics, wait_for_step
from small_buffer import fill, open_store, replay_step, surer_by_id
from small_policy import build_model, build_policy, minibatch, sequences, weights
from two_ranks import agents, two_ranks

from exgrpo_cli.algo.batching import rank_shares
from exgrpo_cli.config.settings import to_toml
from exgrpo_cli.ledger.reader import LedgerReader
from exgrpo_cli.ranks import ALONE, Ranks


def test_shares_keep_prompts_together_and_have_as_many_tokens() -> None:
    """97 tokens with prompts: two shares of 45 to 52, which differ by no more than the longest row, 17."""
    shares = rank_shares(sequences(), 2)
    assert sorted(index for share in shares for index in share) == list(range(12))
    tokens = [sum(len(sequences()[i].prompt_ids) + len(sequences()[i].response_ids) for i in share) for share in shares]
    assert abs(tokens[0] - tokens[1]) <= 17
    prompts = [{sequences()[i].prompt_ids.tobytes() for i in share} for share in shares]
    assert len(prompts[0] & prompts[1]) <= 1


@pytest.mark.engines
@pytest.mark.parametrize("job", TORCH)
def test_two_processes_have_the_scores_and_the_gradient_of_one(job: str, tmp_path: Path) -> None:
    done = two_ranks(job, tmp_path)
    assert done.returncode == 0, done.stderr
    model = build_model()
    alone = build_policy(model, **TORCH[job])
    before = weights(model)
    scores = alone.score(sequences())
    report = alone.update(minibatch())
    change = weights(model) - before
    results = [pickle.loads((tmp_path / f"rank-{rank}.pkl").read_bytes()) for rank in range(2)]
    assert torch.equal(results[0][2], results[1][2])
    for their_scores, their_report, their_change in results:
        for ours, theirs in zip(scores, their_scores, strict=True):
            np.testing.assert_allclose(theirs.logprobs, ours.logprobs, rtol=1e-6)
            np.testing.assert_allclose(theirs.entropies, ours.entropies, rtol=1e-6)
        assert float((their_change - change).norm() / change.norm()) < 1e-5
        assert their_report.grad_norm == pytest.approx(report.grad_norm, rel=1e-5)
        assert their_report.loss == pytest.approx(report.loss, rel=1e-5)
        assert their_report.metrics == pytest.approx(report.metrics, rel=1e-5)
        assert their_report.num_tokens == report.num_tokens


@pytest.mark.engines
def test_ranks_exchange_as_often_for_twelve_questions_as_for_two_and_one_ends_the_other(tmp_path: Path) -> None:
    """Two exchanges a place asked: the rows to be scored, and what is replayed. Then rank 1 refuses, alone."""
    done = two_ranks("store", tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("InputError: rank 1 refuses") == 1, done.stderr
    theirs = [pickle.loads((tmp_path / f"rank-{rank}.pkl").read_bytes()) for rank in range(2)]
    assert theirs[0] == theirs[1]
    for num, (exchanges, chosen) in theirs[0].items():
        with open_store(tmp_path / f"alone-{num}") as alone:
            fill(alone)
            assert chosen == replay_step(alone, num, surer_by_id)
        assert (exchanges, len(chosen)) == (2, num)
        assert {trajectory_id % 2 for trajectory_id in chosen} == {1}


@pytest.mark.engines
def test_the_network_between_hosts_is_named_and_measured_before_a_run(tmp_path: Path) -> None:
    done = two_ranks("network", tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        one_host, two_hosts, slow = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert one_host == ""
        assert re.match(r"network of 2 hosts: lo, [0-9.e+-]+ GB/s", two_hosts)
        assert slow.endswith("GB/s, which is slow: GLOO_SOCKET_IFNAME=NAME takes another interface (`ip -br address` "
                             "lists them)")  # fmt: skip


@pytest.mark.engines
def test_a_rank_that_hangs_is_named_and_ended(tmp_path: Path) -> None:
    """Rank 1 sleeps in Python, rank 0 waits 5 s for it; the sleeper is ended 10 s after rank 0 has spoken."""
    done = two_ranks("hang", tmp_path)
    assert done.returncode != 0
    assert "RunError: rank 0 could not wait for the other ranks: one of them has ended or hangs" in done.stderr
    assert "Rank 1 failed to pass monitoredBarrier in 5000 ms" in done.stderr


@pytest.mark.parametrize(("minutes", "nccl"), [(60, 10), (2, 2)])
def test_a_collective_on_gpus_waits_ten_minutes_at_most(minutes, nccl, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[timedelta] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *named, timeout, **options: waits.append(timeout))
    monkeypatch.setattr(dist, "new_group", lambda backend, timeout: waits.append(timeout))
    ranks = Ranks(rank=1, world_size=2, _store=dist.HashStore())
    ranks.connect(torch.device("cuda", 0), timedelta(minutes=minutes))
    assert waits == [timedelta(minutes=nccl), timedelta(minutes=minutes)]


@pytest.mark.engines
def test_two_processes_ask_draw_and_choose_as_one_does(small_config, tmp_path: Path) -> None:
    """On the same recorded rollouts: the ledger is the same, and every gradient within 1e-5, replayed steps included.

    At the learning rate of the paper the weights stay together: Adam moves a weight whose gradient is all rounding by
    1e-6 either way, which the gradients of later updates do not show.
    """
    settings = ("run.steps=4", "data.heldout=none", "optim.learning_rate=1e-6", "optim.warmup_steps=0")
    config = small_config(*settings, "data.barred=0.3")
    (tmp_path / "settings.toml").write_text(to_toml(config))
    alone = train_and_note(ALONE, tmp_path)
    done = two_ranks("recorded", tmp_path)
    assert done.returncode == 0, done.stderr
    ours, theirs = (LedgerReader(tmp_path / f"run-{ranks}" / "replay") for ranks in (1, 2))
    assert theirs.events().to_pylist() == ours.events().to_pylist()
    assert theirs.draws().to_pylist() == ours.draws().to_pylist()
    chosen = ["step", "question_id", "trajectory_id", "chosen"]
    assert theirs.scores(chosen).to_pylist() == ours.scores(chosen).to_pylist()
    replayed = [row["question_id"] for row in ours.scores(chosen).to_pylist() if row["chosen"]]
    assert replayed and not any(config.data.is_barred(question, config.run.seed) for question in replayed)
    assert len(alone) == 8
    for rank in range(2):
        for mine, gradient in zip(alone, torch.load(tmp_path / f"gradients-{rank}.pt"), strict=True):
            assert float((gradient - mine).norm() / mine.norm()) < 1e-5


@pytest.mark.engines
def test_a_killed_rank_is_named_in_lines_of_our_own(small_config, tmp_path: Path) -> None:
    """torch's C++ code would put a line of gloo's beside them, which says less and comes last."""
    file, run = tmp_path / "settings.toml", tmp_path / "run"
    file.write_text(to_toml(small_config("run.steps=500", "run.nproc=2")))
    command = [sys.executable, "-m", "exgrpo_cli", "train", "--quiet", "--config", str(file), "--output", str(run)]
    started = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_for_step(run, 1, started)
    psutil.Process(started.pid).children()[1].kill()
    _, talk = started.communicate(timeout=60)
    assert started.returncode == 1
    assert all(line.startswith("exgrpo: rank ") for line in talk.splitlines()), talk
    assert "one of them has ended or hangs" in talk.splitlines()[0]
    assert "was ended by SIGKILL, most often for want of memory" in talk.splitlines()[-1]


@pytest.mark.engines
@pytest.mark.timeout(600)
def test_rollouts_that_carry_over_go_on_after_a_rank_is_killed_as_if_it_were_not(small_config, tmp_path: Path) -> None:
    """Journal, ledger and weights to the bit; the ranks stop together, and a stored row waits with its group."""
    file, cut, whole = (tmp_path / name for name in ("settings.toml", "cut", "whole"))
    own = ("rollout.carry_over=0.5", "rollout.questions_per_step=4", "replay.start_threshold=0", "data.heldout=none")
    file.write_text(to_toml(small_config("run.nproc=2", "run.steps=5", "run.save_every=2", *own)))
    command = [sys.executable, "-m", "exgrpo_cli", "train", "--quiet"]
    subprocess.run([*command, "--config", str(file), "--output", str(whole)], check=True, timeout=250)
    started = subprocess.Popen([*command, "--config", str(file), "--output", str(cut)])
    wait_for_step(cut, 3, started)
    psutil.Process(started.pid).children()[1].kill()
    assert started.wait(timeout=60) == 1
    saved = max((cut / "checkpoints").glob("step-*"))
    carried = json.loads((saved / "state.json").read_text())["state"]["carried"]
    assert any(each["token_ids"] for group in carried for each in group["rollouts"]) and saved.name < "step-000005"
    subprocess.run([*command, "--resume", "--output", str(cut)], check=True, timeout=250)
    assert max(line["rollout/versions_max"] for line in metrics(whole)) > 1
    assert_same_run(cut, whole)


@pytest.mark.engines
def test_of_two_hosts_rank_0_alone_writes_the_run_folder_and_names_the_network(small_config, tmp_path: Path) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text(to_toml(small_config("run.steps=2")))
    hosts = [tmp_path / "first", tmp_path / "second"]
    for host in hosts:
        host.mkdir()
    started = agents(["--config", str(settings), "--output", "run", "--json"], hosts)
    outputs = [process.communicate(timeout=200) for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    # The rendezvous gives rank 0 to either host.
    (main,) = (number for number, host in enumerate(hosts) if (host / "run").exists())
    assert list(hosts[1 - main].iterdir()) == [] and outputs[1 - main][0] == ""
    assert json.loads(outputs[main][0])["steps"] == 2
    assert all(0 <= line["time/rollout_idle"] < line["time/rollout"] for line in metrics(hosts[main] / "run"))
    assert json.loads((hosts[main] / "run" / "environment.json").read_text())["ranks"] == 2
    assert (hosts[main] / "run" / "model" / "model.safetensors").is_file()
    assert "network of 2 hosts: lo, " in outputs[main][1]
