"""Peak memory of two updates of SmolLM2-135M's shape (random weights, float32, CPU) with an adapter and without one.

`python benchmarks/lora_memory.py`: for each rank (-1 trains all weights) the plan of an update beside what the process
holds at most beyond what it held before the model was made. What is freed goes back to the system at once, so that it
counts tensors and not what the heap keeps.

`--sync`: a sync of vLLM (`lora.sync`), merged and of the adapter alone: what goes over, CPU seconds of the sync and
of rollouts.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

ROWS, PROMPT, RESPONSE = 16, 16, 240
MICROBATCH_TOKENS = 4096


def measure(rank: int) -> dict[str, float]:
    """MiB of the plan and of the process, whose most is counted from its start."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    from exgrpo_cli.algo.batching import MiniBatch, TrainingRow
    from exgrpo_cli.base.types import TokenSequence
    from exgrpo_cli.config.layers import build_config
    from exgrpo_cli.engines.policy.adamw import torch_policy
    from exgrpo_cli.machine.memory import architecture, memory_plan, shape_of

    torch.set_num_threads(1)
    limits = [f"data.max_prompt_tokens={PROMPT}", f"rollout.max_response_tokens={RESPONSE}", "optim.minibatches=1"]
    sizes = [f"rollout.questions_per_step={ROWS // 8}", f"optim.microbatch_tokens={MICROBATCH_TOKENS}"]
    config = build_config(assignments=[*limits, *sizes, f"lora.rank={rank}", "rollout.engine=vllm"])
    model_config = architecture(build_config(backbone="smollm2-135m").backbone, config.tiny)
    plan = memory_plan(shape_of(model_config), config, gpus=1, on_gpu=False)
    rng, flat = np.random.default_rng(0), np.full(RESPONSE, -7.0, dtype=np.float32)
    prompts = [rng.integers(0, 1000, PROMPT).astype(np.int32) for _ in range(ROWS // 8)]
    rows = tuple(
        TrainingRow(
            sequence=TokenSequence(prompt_ids=prompts[index // 8], response_ids=rng.integers(0, 1000, RESPONSE)),
            advantage=(-1.0) ** index,
            behaviour_logprobs=flat,
            replayed=False,
        )
        for index in range(ROWS)
    )
    batch = MiniBatch(rows=rows, num_rollouts=ROWS, max_response_tokens=RESPONSE, clip=True)
    before = taken()
    model = AutoModelForCausalLM.from_config(model_config, dtype=torch.float32, attn_implementation="sdpa")
    policy = torch_policy(model, temperature=1.0, objective=config.objective, optim=config.optim, lora=config.lora)
    for _ in range(2):
        policy.update(batch)
    return {"planned": plan.peaks["update"] / 2**20, "measured": taken() - before}


def measure_sync(rank: int, sync: str) -> dict[str, str]:
    """MiB that a sync hands over, and CPU seconds of it (median of five) and of 2,048 tokens of rollouts."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    from exgrpo_cli.base.types import RolloutRequest, SamplingParams
    from exgrpo_cli.config.layers import build_config
    from exgrpo_cli.config.sections.run import BackboneSettings, LoraSettings
    from exgrpo_cli.engines.policy.adamw import torch_policy
    from exgrpo_cli.engines.vllm.generator import VLLMGenerator, VLLMSettings
    from exgrpo_cli.engines.vllm.proof import canary_of
    from exgrpo_cli.machine.memory import architecture

    torch.set_num_threads(1)
    config, prompt = build_config(backbone="smollm2-135m"), np.arange(5, 37, dtype=np.int32)
    shape, lora = architecture(config.backbone, config.tiny), LoraSettings(rank=rank, sync=sync)
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32, attn_implementation="sdpa")
    with TemporaryDirectory() as name:
        model.save_pretrained(name)
        about = {
            "backbone": BackboneSettings(dtype="float32"),
            "device": "cpu",
            "max_tokens": 200,
            "max_rows": 16,
            "lora": lora,
        }
        policy = torch_policy(model, temperature=1.0, objective=config.objective, optim=config.optim, lora=lora)
        generator = VLLMGenerator(VLLMSettings(folder=Path(name), **about), eos_ids=(0,), canary=(canary_of(prompt), 1))
    seconds = []
    for version in range(6):
        before = time.process_time()
        generator.sync(policy.sampled_weights(), version, policy.score)
        seconds.append(time.process_time() - before)
    over = [each for name, each in policy.sampled_weights() if sync == "merged" or ".lora_" in name]
    before, asked = time.process_time(), RolloutRequest(question_id="q", prompt_ids=prompt, seeds=tuple(range(16)))
    generator.generate([asked], SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=128))
    spent, handed = time.process_time() - before, sum(each.nbytes for each in over) / 2**20
    return {"MiB": f"{handed:.1f}", "sync": f"{np.median(seconds[1:]):.2f} s", "rollouts": f"{spent:.1f} s"}


def taken() -> float:
    """MiB that this process has held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--sync", nargs="?", const="both", choices=["both", "merged", "adapter"])
    rank, sync = parser.parse_args().rank, parser.parse_args().sync
    if sync == "both":
        for rank, sync in ((32, "merged"), (32, "adapter"), (8, "adapter")):
            subprocess.run([sys.executable, __file__, "--rank", str(rank), "--sync", sync], check=True)
        return
    if rank is not None:
        print(rank, sync, measure_sync(rank, sync)) if sync else print(json.dumps(measure(rank)))
        return
    heap = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    for rank in (-1, 8, 32):
        command = [sys.executable, __file__, "--rank", str(rank)]
        done = subprocess.run(command, env=heap, capture_output=True, text=True, check=True)
        print(rank, {name: f"{value:,.0f} MiB" for name, value in json.loads(done.stdout).items()})


if __name__ == "__main__":
    main()
