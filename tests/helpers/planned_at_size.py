"""Planned and live bytes of a backbone at its own size: `python -m planned_at_size PRESET RANKS GB [SETTING ...]`.

A check's two steps, the second of them mixed, on a simulated device whose tensors have shapes alone: those of torch's
or, on the first of several ranks, DeepSpeed's trainer, packed by segments as on a GPU. vLLM is a tensor as large as its
share of the card while it is awake, and its responses are made up.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import simulated_device
import torch
import torch.distributed as dist
from measured_on_device import Watched
from simulated_device import counted
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM

from exgrpo_cli.algo import logprobs
from exgrpo_cli.base.types import Rollout, RolloutRequest, SamplingParams, StopReason
from exgrpo_cli.config.layers import build_config
from exgrpo_cli.engines import causal_lm, generators
from exgrpo_cli.engines.policy import adamw, deepspeed, packing, policy
from exgrpo_cli.machine.memory import architecture, backbone_shape, memory_plan
from exgrpo_cli.training.check import Check


class Lent:
    """A generator that takes `room` bytes while it is awake."""

    def __init__(self, room: int) -> None:
        self.room, self.weight_version = room, generators.ASLEEP
        self.taken: torch.Tensor | None = None

    def sync(self, weights: Any, weight_version: int, score: Any = None) -> None:
        """See `Generator.sync`: weights come one at a time."""
        self.taken, self.weight_version = torch.empty(self.room, dtype=torch.uint8, device="sim"), weight_version
        for _ in weights:
            pass

    def sleep(self) -> None:
        """See `Generator.sleep`."""
        self.taken, self.weight_version = None, generators.ASLEEP

    def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[list[Rollout]]:
        """See `Generator.generate`: for one request."""
        ids, request = np.zeros(params.max_new_tokens, dtype=np.int32), requests[0]
        about = {"token_ids": ids, "engine_logprobs": ids.astype(np.float32), "stop_reason": StopReason.LENGTH}
        about |= {"question_id": request.question_id, "weight_version": self.weight_version}
        return [[Rollout(member=member, **about) for member in range(len(request.seeds))]]


def as_on_a_gpu() -> None:
    """Leave out what looks at values, and take the ways of a GPU."""
    packing.prove_packing = causal_lm._prove_linear_head = lambda *given: None
    policy.fingerprint = lambda model: 1
    packing.proved_way = lambda parts: "segments"
    logprobs.TILE_ELEMENTS = logprobs.GPU_TILE_ELEMENTS
    logprobs.wide_matmul = lambda left, right, dtype: torch.mm(left, right.t(), out_dtype=dtype)


def as_one_of(num_ranks: int, card: int) -> None:
    """Have DeepSpeed take this device for one of so many cards; others send nothing, into tensors that are there."""
    torch.__future__.set_swap_module_params_on_conversion(False)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    for name in ("broadcast", "all_reduce", "all_gather_into_tensor"):
        setattr(dist, name, lambda *tensors, **options: None)
    deepspeed.require_deepspeed(torch.device("cpu"))
    from deepspeed.accelerator import get_accelerator

    accelerator: Any = type(get_accelerator())
    accelerator.device_name = accelerator.current_device_name = lambda self, index=None: "sim"
    accelerator.on_accelerator = lambda self, tensor: True
    accelerator.available_memory = lambda self, index=None: card - counted.live_bytes


def main(name: str, num_ranks: int, card: int, *assignments: str) -> None:
    """Print the bytes of the card, and those of each phase, planned and alive, but for what its driver takes."""
    device = simulated_device.install(values=False)
    as_on_a_gpu()
    config = build_config(backbone=name, assignments=("optim.minibatches=1", *assignments))
    shape = backbone_shape(config.backbone, config.tiny)
    plan = memory_plan(shape, config, gpus=num_ranks, gpu_bytes=card)
    meter, make, dtype = Watched(device), adamw.torch_policy, getattr(torch, config.backbone.dtype)
    with device:
        made = architecture(config.backbone, config.tiny)
        model = AutoModelForCausalLM.from_config(made, dtype=dtype, attn_implementation="sdpa")
    if num_ranks > 1:
        as_one_of(num_ranks, card)
        make = deepspeed.deepspeed_policy
    settings = {"objective": config.objective, "optim": config.optim, "lora": config.lora}
    settings["gradient_checkpointing"] = config.backbone.gradient_checkpointing
    prompts = {"q": np.zeros(config.data.max_prompt_tokens, dtype=np.int32)}
    trainer, engine = make(model, temperature=1.0, **settings), Lent(plan.rollout_engine)
    check = Check(config=config, policy=trainer, generator=engine, meter=meter, prompts=prompts, trained=1)
    check.sync()
    for step in (1, 2):
        check.train(step)
    assert not check.problems, check.problems
    phases = {each: (bound - plan.context, meter.peaks[each]) for each, bound in plan.peaks.items()}
    print(json.dumps([card - plan.context, phases]))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) * 10**9, *sys.argv[4:])
