"""What each rank of the tests does: `torchrun rank_worker.py JOB FOLDER`; results go to FOLDER."""

import json
import pickle
import re
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from exgrpo_cli import ranks as ranks_module
from exgrpo_cli.base.errors import InputError
from exgrpo_cli.config.sections.objective import ObjectiveSettings
from exgrpo_cli.config.sections.run import LoraSettings, OptimSettings
from exgrpo_cli.engines.policy.policy import Policy
from exgrpo_cli.ranks import RANK_TIMEOUT, Ranks

ALL_WEIGHTS = LoraSettings()
ADAPTER = LoraSettings(rank=3, learning_rate_factor=1.0)
TORCH: dict[str, dict[str, Any]] = {
    "torch": {},
    "torch-lora": {"lora": ADAPTER},
    "torch-m2po": {"objective": ObjectiveSettings(replay_surrogate="m2po")},
}
"""By job: what a policy has that the others have not."""


def torch_update(ranks: Ranks, folder: Path, **settings: Any) -> None:
    """Scores and one update whose change of the weights is the gradient itself."""
    from small_policy import build_model, build_policy, minibatch, sequences, weights

    model = build_model()
    policy = build_policy(model, ranks=ranks, **settings)
    before = weights(model)
    scores = policy.score(sequences())
    report = policy.update(minibatch())
    change = weights(model) - before
    with (folder / f"rank-{ranks.rank}.pkl").open("wb") as out:
        pickle.dump((scores, report, change), out)


def sharded(
    model: PreTrainedModel, ranks: Ranks, stage: int, lora: LoraSettings = ALL_WEIGHTS, **bounds: float
) -> Policy:
    from small_policy import TEMPERATURE

    from exgrpo_cli.engines.policy.deepspeed import deepspeed_policy

    optim = OptimSettings(learning_rate=1e-3, zero_stage=stage, **bounds)
    objective = ObjectiveSettings()
    return deepspeed_policy(model, temperature=TEMPERATURE, objective=objective, optim=optim, ranks=ranks, lora=lora)


def deepspeed_updates(
    ranks: Ranks, folder: Path, stage: int, dtype: torch.dtype, lora: LoraSettings = ALL_WEIGHTS
) -> None:
    """Five updates at learning rate 1e-3; then saved, loaded into another policy and updated once more."""
    from small_policy import build_model, minibatch, sequences

    def policy(**bounds: float) -> Policy:
        return sharded(build_model(dtype), ranks, stage, lora, microbatch_tokens=24, **bounds)

    def taken(policy: Policy) -> dict[str, torch.Tensor]:
        return {name: weight.clone() for name, weight in policy.named_weights()}

    trained = policy()
    scores = trained.score(sequences())
    history, norms = [], []
    for _ in range(5):
        norms.append(trained.update(minibatch()).grad_norm)
        history.append(taken(trained))
    trained.save(folder / "saved")
    ranks.barrier()
    resumed = policy()
    resumed.load(folder / "saved")
    same = all(torch.equal(weight, history[-1][name]) for name, weight in resumed.named_weights())
    first, second = trained.update(minibatch()), resumed.update(minibatch())
    again = taken(resumed)
    same_after = all(torch.equal(weight, again[name]) for name, weight in trained.named_weights())
    # A checkpoint of three ranks, as far as this one gets to read it.
    other = folder / f"of-three-{ranks.rank}"
    other.mkdir()
    state = json.loads((folder / "saved" / "policy.json").read_text())
    (other / "policy.json").write_text(json.dumps(state | {"num_ranks": 3}))
    try:
        resumed.load(other)
        refused = ""
    except InputError as error:
        refused = str(error)
    # The gradient of a mini-batch is far above this bound.
    bounded = policy(skip_norm=1e-3)
    before = taken(bounded)
    skipped = bounded.update(minibatch())
    unmoved = all(torch.equal(weight, before[name]) for name, weight in bounded.named_weights())
    if ranks.is_main:
        torch.save(
            {
                "scores": scores,
                "history": history,
                "norms": norms,
                "resumed": (same, same_after, first.grad_norm == second.grad_norm),
                "refused": refused,
                "skipped": (skipped.applied, skipped.skip_reason, bounded.consecutive_skips, unmoved),
            },
            folder / "results.pt",
        )


def deepspeed_sum(ranks: Ranks, folder: Path, stage: int, dtype: torch.dtype) -> None:
    """The gradient of the last norm, 256 on one rank and 1 on the other, by the norm of their sum."""
    from small_policy import build_model, sequences

    model = build_model(dtype)
    policy = sharded(model, ranks, stage)
    policy._stepper.begin()
    logprobs, _ = policy._stepper.forward(policy._pack(sequences()[:1]))
    weight = model.model.norm.weight
    policy._stepper.backward(0.0 * logprobs.sum() + (1.0 if ranks.rank else 256.0) * weight.float().sum())
    norm, _ = policy._stepper.step(1e-3)
    if ranks.is_main:
        (folder / "sum.json").write_text(json.dumps(norm / weight.numel() ** 0.5))


def recorded_run(ranks: Ranks, folder: Path) -> None:
    """A run on rollouts of another one; its gradients."""
    from recorded_rollouts import train_and_note

    gradients = train_and_note(ranks, folder)
    torch.save(gradients, folder / f"gradients-{ranks.rank}.pt")


def store_exchanges(ranks: Ranks, folder: Path) -> None:
    """A place asked for 2 and for 12 questions on rank 0: how often ranks exchange, and what they get."""
    from small_buffer import fill, open_store, replay_step, surer_by_id

    from exgrpo_cli.training.state import ask_main

    results = {}
    for num in (2, 12):
        store = open_store(folder / str(num)) if ranks.is_main else None
        if store is not None:
            fill(store)
        exchange = torch.distributed.broadcast_object_list
        calls = []

        def counted(*arguments: Any, exchange: Any = exchange, calls: list[int] = calls, **options: Any) -> None:
            calls.append(1)
            exchange(*arguments, **options)

        torch.distributed.broadcast_object_list = counted
        chosen = ask_main(ranks, lambda score, store=store, num=num: replay_step(store, num, score), surer_by_id)
        torch.distributed.broadcast_object_list = exchange
        results[num] = (len(calls), chosen)
        if store is not None:
            store.close()
    (folder / f"rank-{ranks.rank}.pkl").write_bytes(pickle.dumps(results))


def main(job: str, folder: Path) -> None:
    torch.set_num_threads(1)
    ranks = Ranks.of_environment()
    with ranks.together():
        if job == "recorded":
            recorded_run(ranks, folder)
            return
        ranks.connect(torch.device("cpu"), RANK_TIMEOUT)
        if job.startswith("torch"):
            torch_update(ranks, folder, **TORCH[job])
        elif sharding := re.fullmatch(r"(zero|lora|sum)(\d)-(\w+)", job):
            adapted = partial(deepspeed_updates, lora=ADAPTER)
            work = {"zero": deepspeed_updates, "lora": adapted, "sum": deepspeed_sum}[sharding[1]]
            work(ranks, folder, int(sharding[2]), getattr(torch, sharding[3]))
        elif job == "store":
            store_exchanges(ranks, folder)
            ranks.barrier()
            if ranks.rank == 1:
                raise InputError("rank 1 refuses")
        elif job == "network":
            # As if each were a host of its own.
            one, ranks.local_world_size = ranks.measure_network(torch.device("cpu")), 1
            two = ranks.measure_network(torch.device("cpu"))
            ranks_module.SLOW_NETWORK = 1e9
            texts = [one, two, ranks.measure_network(torch.device("cpu"))]
            (folder / f"rank-{ranks.rank}.json").write_text(json.dumps(texts))
        elif job == "hang":
            ranks.barrier()
            ranks._timeout = timedelta(seconds=5)
            if ranks.rank == 1:
                time.sleep(600)
        ranks.barrier()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
