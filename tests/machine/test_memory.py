"""The memory plan: parameters counted by hand, activations measured, parts and ZeRO stages by arithmetic."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from exgrpo_cli.algo import logprobs
from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.types import TokenSequence
from exgrpo_cli.config.layers import build_config
from exgrpo_cli.config.sections.run import BackboneSettings, LoraSettings, TinySettings
from exgrpo_cli.engines import causal_lm, lora
from exgrpo_cli.engines.policy.packing import pack, response_hidden
from exgrpo_cli.machine import memory
from exgrpo_cli.presets import load_preset, preset_names

PRESETS = {name: load_preset("backbones", name)["about"] for name in preset_names("backbones")}
SHAPED = [name for name, about in PRESETS.items() if "shape" in about]
GIGA = 10**9
SMALL = memory.Shape(
    num_parameters=1000, num_layers=2, hidden_size=8, ffn_size=16, query_size=8, kv_size=4, vocab_size=32
)


# As the model cards give them: 1.54, 7.62, 8.03, 0.135 and 0.49 billion.
SIZES = {"qwen-math-1.5b": 1_543_714_304, "qwen-math-7b": 7_615_616_512, "llama-8b": 8_030_261_248}
SIZES |= {"smollm2-135m": 134_515_008, "qwen2.5-0.5b-instruct": 494_032_768}


def test_a_plan_counts_the_tiles_of_the_log_probs():
    assert (memory.TILE_ELEMENTS, memory.GPU_TILE_ELEMENTS) == (logprobs.TILE_ELEMENTS, logprobs.GPU_TILE_ELEMENTS)


def preset_config(name):
    """The transformers config of a preset."""
    return memory.architecture(build_config(backbone=name).backbone, TinySettings())


@pytest.mark.parametrize("name", SHAPED)
def test_every_shape_has_the_parameters_of_its_architecture(name):
    source = load_preset("backbones", name)["backbone"]["source"]
    counted = memory.backbone_shape(BackboneSettings(name=name, source=source), TinySettings())
    assert counted == memory.shape_of(preset_config(name))
    assert counted.num_parameters == SIZES.get(name, counted.num_parameters)


def test_a_key_that_no_shape_has_is_refused_by_its_name():
    with pytest.raises(InputError, match=r"\[about.shape\] = 'head_count' is not known"):
        memory.counted_shape(**PRESETS["qwen-math-1.5b"]["shape"], head_count=12)


def test_the_tiny_shape_a_folder_and_an_uncached_hub_id(tmp_path):
    config = build_config()
    tiny = memory.backbone_shape(config.backbone, config.tiny)
    assert (tiny.hidden_size, tiny.num_layers, tiny.query_size, tiny.kv_size) == (128, 3, 128, 64)
    assert tiny == memory.shape_of(memory.architecture(config.backbone, config.tiny))
    preset_config("qwen-math-1.5b").save_pretrained(tmp_path)
    folder = BackboneSettings(name="mine", source=str(tmp_path))
    assert memory.backbone_shape(folder, TinySettings()).num_parameters == SIZES["qwen-math-1.5b"]
    assert memory.backbone_shape(BackboneSettings(name="none", source="no-one/no-model"), TinySettings()) is None


@pytest.mark.parametrize(
    ("prompt", "response", "model_type", "dtype", "rank"),
    [
        *((64, 24, "qwen2", "float32", -1), (8, 100, "llama", "float32", -1), (8, 100, "qwen2", "bfloat16", -1)),
        *((64, 24, "qwen2", "float32", 8), (8, 100, "qwen2", "bfloat16", 8)),
    ],
)
def test_activations_of_packed_rows_are_what_autograd_keeps(prompt, response, model_type, dtype, rank):
    """Four groups of 8: a prompt is packed once for its rows, and gathered for each, but where it is long.

    Bytes that one more decoder layer makes autograd keep, weights aside, against the plan. Pads are what is left: 2 %.
    """
    rng = np.random.default_rng(0)
    prompts, response_ids = rng.integers(0, 64, (4, prompt), dtype=np.int32), np.zeros(response, dtype=np.int32)
    rows = [TokenSequence(prompt_ids=ids, response_ids=response_ids) for ids in prompts for _ in range(8)]
    kept = []
    for layers in (1, 2):
        model = AutoModelForCausalLM.from_config(_small_config(model_type, layers), dtype=getattr(torch, dtype))
        parts = causal_lm.split_causal_lm(model)
        if rank > 0:
            lora.adapt(model, LoraSettings(rank=rank), 0)
        batch = pack(rows, torch.device("cpu"))
        kept.append(_bytes_for_backward(model, lambda parts=parts, batch=batch: response_hidden(parts.body, batch)))
    settings = [
        f"optim.microbatch_tokens={batch.input_ids.numel()}", f"rollout.max_response_tokens={response}",
        "rollout.group_size=8", f"backbone.dtype={dtype}", f"lora.rank={rank}",
    ]  # fmt: skip
    shape = memory.shape_of(_small_config(model_type, layers=2))
    planned = memory.layer_bytes(shape, build_config(assignments=settings), 1, prompt + response, on_gpu=False)
    assert kept[1] - kept[0] == pytest.approx(planned, rel=0.02)


def _small_config(model_type, layers):
    return AutoConfig.for_model(
        model_type,
        vocab_size=64,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="sdpa",
    )


def _bytes_for_backward(model, forward):
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            # The tensor is held as well, so that its address is not given to another one meanwhile.
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(size for size, _ in kept.values())


def test_parts_of_a_small_plan_by_hand():
    """1,000 parameters in bfloat16 on the torch engine, K = 8, prompt 10 and response 22 tokens."""
    limits = ["data.max_prompt_tokens=10", "rollout.max_response_tokens=22", "rollout.max_rows=5"]
    config = build_config(assignments=[*limits, "backbone.dtype=bfloat16", "optim.microbatch_tokens=16"])
    plan = memory.memory_plan(SMALL, config, gpus=4)
    assert plan.weights == 2 * 1000
    assert plan.gradients == 4 * 1000  # summed in float32 beside the masters
    assert plan.optimizer == (4 + 4 + 4) * 1000  # master, first and second moment: nothing is sharded
    # 5 rows of 10 + 22 tokens: keys and values, 2 layers, 4 numbers, 2 bytes; four float32 tensors of 32 words.
    assert plan.rollout_engine == 5 * 32 * 2 * 2 * 4 * 2 + 4 * 5 * 32 * 4
    # One sequence is longer than the micro-batch budget of 16, so 32 tokens are the least there can be.
    layer = 4 * 8 * 2 + 2 * 8 * 4 + (2 * 8 + 2 * 4) * 2 + 4 * 16 * 2
    # Attention gathers its queries, keys, values and output by row; its output is packed again.
    # The head has the last norm's input, that in float32, and what it reads.
    assert plan.activations == 2 * (layer + 8 * 2) * 32 + (2 + 4 + 2) * 8 * 32
    assert plan.logits == 3 * 32 * 32 * 4
    resident = plan.weights + plan.optimizer + memory.CONTEXT_BYTES + memory.NCCL_BYTES
    assert plan.peaks["rollouts"] == resident + plan.rollout_engine
    # The cache lives for one call of the generator.
    assert plan.layer == (layer + 8 * 2) * 32
    assert plan.peaks["drawing"] == plan.peaks["scoring"] == resident + max(plan.layer, plan.logits)
    assert plan.peaks["update"] == resident + plan.logits + plan.gradients + plan.activations
    assert plan.peak == max(plan.peaks["update"], plan.peaks["rollouts"])
    assert plan.peaks["asleep"] == plan.peaks["sync"] == resident
    # With checkpointing inputs are kept; the tiles are gone when a layer is made again, and a wide one takes more.
    again = replace(config, backbone=replace(config.backbone, gradient_checkpointing=True))
    for shape in (SMALL, replace(SMALL, ffn_size=10_000)):
        kept = memory.memory_plan(shape, again, gpus=4)
        assert kept.activations == 2 * 8 * 2 * 32 + (2 + 4 + 2) * 8 * 32 + max(0, kept.layer - kept.logits)


def test_parts_of_a_small_plan_with_an_adapter_by_hand():
    """Rank 2 on two layers: q and o are 8 x 8, k and v 8 x 4, gate, up and down 8 x 16; in bfloat16, with a KL penalty.

    Beside the model stand the adapter and, where hf samples, what it changes; no copy is the reference."""
    asked = ["lora.rank=2", "backbone.dtype=bfloat16", "objective.kl_coefficient=0.1"]
    trained = 2 * 2 * (2 * (8 + 8) + 2 * (8 + 4) + 3 * (8 + 16))
    linear = 2 * (2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 16)
    plan = memory.memory_plan(SMALL, build_config(assignments=asked), gpus=1)
    assert (plan.weights, plan.gradients, plan.optimizer) == (2 * (1000 + trained + linear), 4 * trained, 12 * trained)
    sharded = memory.memory_plan(
        SMALL, build_config(assignments=[*asked, "optim.engine=deepspeed", "rollout.engine=vllm"]), gpus=4
    )
    assert (sharded.weights, sharded.optimizer) == (2 * (1000 + trained), 12 * trained // 4)
    two = memory.memory_plan(SMALL, build_config(assignments=[*asked, "lora.targets=q_proj,down_proj"]), gpus=1)
    assert two.gradients == 4 * 2 * 2 * ((8 + 8) + (16 + 8))


@pytest.mark.parametrize(
    ("settings", "weights", "gradients", "optimizer", "on_host"),
    # 1,000 parameters on 4 GPUs: stage 1 shards 12 bytes of state, stage 2 also 4 of gradient, stage 3 2 of weight. At
    # stage 1 the gradients of a pass stand beside their sums, which stay; at stage 3 all is gathered at once.
    [
        (["optim.zero_stage=1"], 2000, 2000, 7000, 0),
        (["optim.zero_stage=2"], 2000, 1000, 3000, 0),
        (["optim.zero_stage=3"], 2000, 2000, 3000, 0),
        # Two copies of the gradients in float32 and one of the weights go along; the largest tensor passes the GPU.
        (["optim.offload=true"], 2000, 4 * 32 * 8, 0, (12 + 8 + 2) * 1000 // 4),
        # Whole copies: a KL penalty's reference, and what hf samples with under stage 3.
        (["objective.kl_coefficient=0.1"], 4000, 1000, 3000, 0),
        (["optim.zero_stage=3", "rollout.engine=hf"], 4000, 2000, 3000, 0),
        (["optim.engine=torch", "rollout.engine=hf"], 2000, 4000, 12000, 0),
        (["optim.engine=torch", "optim.offload_during_rollouts=true"], 2000, 4000, 12000, 12000),
    ],
)
def test_engines_and_zero_stages_hold_what_they_say(settings, weights, gradients, optimizer, on_host):
    plan = memory.memory_plan(SMALL, build_config(backbone="qwen-math-7b", assignments=settings), gpus=4)
    assert (plan.weights, plan.gradients, plan.optimizer) == (weights, gradients, optimizer)
    assert plan.optimizer_on_host == on_host


def test_gradients_are_reduced_in_buckets_and_float32():
    """2^28 gradients in bfloat16, those of 1,000 weights copied; head and embedding, 32 x 8, wait in bfloat16."""
    sharded = {
        stage: build_config(backbone="qwen-math-7b", assignments=[f"optim.zero_stage={stage}"]) for stage in (2, 3)
    }
    plans = {stage: memory.memory_plan(SMALL, config, gpus=4) for stage, config in sharded.items()}
    for stage, width in ((2, 2), (3, 4)):
        assert plans[stage].buckets == 2**28 * width + 4 * 1000 + 2 * 2 * 32 * 8
    plan = plans[2]
    trained = plan.weights + plan.optimizer + plan.gradients + plan.buckets
    assert plan.peaks["update"] == trained + plan.activations + plan.logits + memory.CONTEXT_BYTES + memory.NCCL_BYTES


@pytest.mark.parametrize(("name", "gpus"), [("qwen-math-1.5b", 1), ("qwen-math-7b", 4), ("llama-8b", 4)])
def test_fewest_gpus_is_the_first_count_that_fits(name, gpus):
    config = build_config(backbone=name)
    shape = memory.shape_of(preset_config(name))
    assert memory.fewest_gpus(shape, config, gpu_memory_bytes=80 * GIGA) == gpus
    assert memory.memory_plan(shape, config, gpus=gpus).peak <= 80 * GIGA
    assert gpus == 1 or memory.memory_plan(shape, config, gpus=gpus // 2).peak > 80 * GIGA
    assert memory.fewest_gpus(shape, config, gpu_memory_bytes=GIGA) is None


def test_vllm_has_room_for_an_adapter_that_it_applies_itself():
    """Rank 9 has room for 16, in 2 bytes: its base rests in main memory. On a CPU it is gathered for each token."""
    asked = ["rollout.engine=vllm", "lora.rank=9", "backbone.dtype=bfloat16"]
    configs = [build_config(assignments=[*asked, *more]) for more in ([], ["lora.sync=adapter"])]
    on_cpu = [memory.memory_plan(SMALL, config, gpus=1, on_gpu=False) for config in configs]
    room = 16 * sum(map(sum, SMALL.adapted(configs[1].lora))) * 2
    assert on_cpu[1].rollout_engine - on_cpu[0].rollout_engine == room + 16 * SMALL.ffn_size * 4 * 8192
    on_gpu = [memory.memory_plan(SMALL, config, gpus=1) for config in configs]
    assert [plan.engine_on_host for plan in (*on_cpu, *on_gpu)] == [0, 0, 0, 2 * SMALL.num_parameters]


def test_vllm_on_a_cpu_keeps_its_memory_during_the_update():
    plan = memory.memory_plan(SMALL, build_config(assignments=["rollout.engine=vllm"]), gpus=1, on_gpu=False)
    assert (plan.gpu_memory_fraction, plan.engine_asleep) == (0, plan.rollout_engine)
    trained = plan.weights + plan.gradients + plan.optimizer + plan.activations + plan.logits
    assert plan.peaks["update"] == trained + plan.engine_asleep
    assert plan.peaks["asleep"] == plan.peaks["sync"] == plan.peaks["rollouts"]


def test_stage_3_gathers_a_billion_weights_at_a_time():
    config = build_config(backbone="qwen-math-7b", assignments=["optim.zero_stage=3"])
    plan = memory.memory_plan(replace(SMALL, num_parameters=8 * GIGA), config, gpus=4)
    assert (plan.weights, plan.gradients) == (2 * (2 + 1) * GIGA, 4 * (2 + 1) * GIGA)
