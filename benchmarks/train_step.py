"""One training step (scoring and M updates) on a randomly initialised backbone of any preset's shape.

    python benchmarks/train_step.py --backbone qwen-math-1.5b            # a GPU
    python benchmarks/train_step.py --scale 0.05 --vocab 4000 --questions 2 --response 128   # a CPU

Compared: a mixed step, half of whose questions have one replayed row and whose candidates are scored first, and the
same step on-policy only. Model FLOP utilisation counts 6 FLOP per parameter and token of the update (a shared prompt
once, the head for response tokens alone) and those of causal attention (recomputation not counted), against the
device's published dense bfloat16 rate, or, where that is not known, against a large matrix product on it.
"""

import argparse
import json
import resource
import time
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from exgrpo_cli.algo.batching import MiniBatch, TrainingRow
from exgrpo_cli.base.types import TokenSequence
from exgrpo_cli.config.layers import build_config
from exgrpo_cli.config.sections.objective import ObjectiveSettings
from exgrpo_cli.config.sections.run import OptimSettings
from exgrpo_cli.engines.policy.adamw import torch_policy
from exgrpo_cli.engines.policy.policy import Policy
from exgrpo_cli.machine.memory import Shape, architecture, shape_of

PUBLISHED_RATES = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Dense bfloat16 FLOP per second, by a part of the device's name."""
GROUP_SIZE = 8


def scaled_config(name: str, scale: float, vocab: int) -> Any:
    """The preset's config with hidden and ffn sizes and layers times `scale`, in whole heads of the same size."""
    preset = build_config(backbone=name)
    config = architecture(preset.backbone, preset.tiny)
    head = config.hidden_size // config.num_attention_heads
    per_kv = config.num_attention_heads // config.num_key_value_heads
    kv_heads = max(1, round(config.num_key_value_heads * scale))
    config.num_key_value_heads, config.num_attention_heads = kv_heads, kv_heads * per_kv
    config.hidden_size = config.num_attention_heads * head
    config.intermediate_size = max(64, int(config.intermediate_size * scale))
    config.num_hidden_layers = max(2, round(config.num_hidden_layers * scale))
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    config.vocab_size = vocab or config.vocab_size
    config.pad_token_id = config.bos_token_id = config.eos_token_id = 0
    return config


def build(config: Any, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()


def rows(arguments: argparse.Namespace, vocab: int, *, mixed: bool) -> list[TrainingRow]:
    """Groups of 8 with lengths spread around `--response`, half of the groups with a replayed row where `mixed`."""
    rng = np.random.default_rng(0)
    made = []
    for question in range(arguments.questions):
        prompt = rng.integers(1, vocab, arguments.prompt).astype(np.int32)
        for member in range(GROUP_SIZE):
            length = int(np.clip(rng.normal(0.6, 0.25) * arguments.response, 8, arguments.response))
            made.append(
                TrainingRow(
                    sequence=TokenSequence(
                        prompt_ids=prompt, response_ids=rng.integers(1, vocab, length).astype(np.int32)
                    ),
                    advantage=float(rng.normal()),
                    behaviour_logprobs=np.full(length, -np.log(vocab), dtype=np.float32),
                    replayed=mixed and question % 2 == 0 and member == 0,
                )
            )
    return made


def reachable_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP per second of the device: published, or of its fastest of twenty large products."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for part, rate in PUBLISHED_RATES.items():
            if part in name:
                return rate
    size = 8192 if device.type == "cuda" else 1024
    matrix, best = torch.randn(size, size, device=device, dtype=dtype), float("inf")
    for _ in range(20):
        best = min(best, timed(lambda: matrix @ matrix, device)[0])
    return 2 * size**3 / best


def timed(work: Any, device: torch.device) -> tuple[float, Any]:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started, result


def update_flops(shape: Shape, made: list[TrainingRow], *, tied: bool) -> float:
    """Forward and backward of what must be computed: a shared prompt once, the head for response tokens alone."""
    head = shape.vocab_size * shape.hidden_size
    body = shape.num_parameters - head * (1 if tied else 2)
    prompts = {row.sequence.prompt_ids.tobytes(): len(row.sequence.prompt_ids) for row in made}
    responses = sum(row.num_tokens for row in made)
    inputs = sum(prompts.values()) + responses - len(made)
    squares = sum((len(row.sequence.prompt_ids) + row.num_tokens - 1) ** 2 for row in made)
    return float(6 * (body * inputs + head * responses + shape.num_layers * shape.query_size * squares))


def step(policy: Policy, made: list[TrainingRow], arguments: argparse.Namespace, *, mixed: bool) -> dict[str, Any]:
    """Seconds of each phase of one step."""
    device = policy.model.device
    seconds: dict[str, float] = {}
    half = made[: len(made) // 2]
    if mixed:
        # Two candidates for each experiential question, as many rows as a quarter of the batch.
        seconds["replay"], _ = timed(lambda: policy.score([row.sequence for row in half[::2]]), device)
    seconds["logprobs"], scores = timed(lambda: policy.score([row.sequence for row in made]), device)
    behaviour = [s.logprobs for s in scores]
    trained = [
        TrainingRow(sequence=r.sequence, advantage=r.advantage, behaviour_logprobs=b, replayed=r.replayed)
        for r, b in zip(made, behaviour, strict=True)
    ]
    size = len(trained) // arguments.minibatches
    batches = [
        MiniBatch(rows=tuple(part), num_rollouts=len(part), max_response_tokens=arguments.response, clip=not mixed)
        for part in (trained[start : start + size] for start in range(0, size * arguments.minibatches, size))
    ]
    seconds["update"], _ = timed(lambda: [policy.update(batch) for batch in batches], device)
    return seconds


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, arguments.dtype)
    config = scaled_config(arguments.backbone, arguments.scale, arguments.vocab)
    shape = shape_of(config)
    policy = torch_policy(
        build(config, dtype, device),
        temperature=1.0,
        objective=ObjectiveSettings(),
        optim=OptimSettings(microbatch_tokens=arguments.microbatch_tokens),
        gradient_checkpointing=arguments.gradient_checkpointing,
    )
    rate = reachable_rate(device, dtype)
    figures: dict[str, Any] = {
        "backbone": arguments.backbone,
        "parameters": shape.num_parameters,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "reachable_tflops": rate / 1e12,
    }
    for name, mixed in (("mixed", True), ("on_policy", False)):
        made = rows(arguments, config.vocab_size, mixed=mixed)
        step(policy, made, arguments, mixed=mixed)
        seconds = step(policy, made, arguments, mixed=mixed)
        tokens = sum(row.num_tokens for row in made)
        figures[name] = {
            "response_tokens": tokens,
            "seconds": seconds | {"step": sum(seconds.values())},
            "tokens_per_second": tokens / sum(seconds.values()),
            "update_flop_utilisation": update_flops(shape, made, tied=config.tie_word_embeddings)
            / seconds["update"]
            / rate,
        }
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    figures["peak_memory_bytes"] = torch.cuda.max_memory_allocated() if device.type == "cuda" else peak
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="qwen-math-1.5b", help="preset whose shape is taken")
    parser.add_argument("--scale", type=float, default=1.0, help="shrinks width and depth")
    parser.add_argument("--vocab", type=int, default=0, help="vocabulary; 0 is the preset's")
    parser.add_argument("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32")
    parser.add_argument("--questions", type=int, default=16, help="questions a step, 8 rollouts each")
    parser.add_argument("--prompt", type=int, default=200, help="prompt tokens")
    parser.add_argument("--response", type=int, default=2048, help="response limit")
    parser.add_argument("--minibatches", type=int, default=2)
    parser.add_argument("--microbatch-tokens", type=int, default=16_384)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    figures = measure(arguments)
    if arguments.json:
        print(json.dumps(figures))
        return
    rate, peak = figures["reachable_tflops"], figures["peak_memory_bytes"] / 2**30
    print(f"{figures['backbone']}, {figures['parameters']:,} parameters, {figures['device']}")
    print(f"{rate:.3g} TFLOP/s reachable, peak memory {peak:.2f} GiB")
    for name in ("mixed", "on_policy"):
        part = figures[name]
        phases = "  ".join(f"{phase} {seconds:.2f} s" for phase, seconds in part["seconds"].items())
        print(f"{name:10} {part['tokens_per_second']:10,.0f} tokens/s  "
              f"utilisation {part['update_flop_utilisation']:.2f}  {phases}")  # fmt: skip


if __name__ == "__main__":
    main()
