"""A configuration settled on a machine: what is chosen, what the run needs there, what is refused before it starts."""

import traceback
from dataclasses import replace

import numpy as np
import pytest
import torch

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.commands import run
from exgrpo_cli.config.layers import build_config
from exgrpo_cli.config.settings import SECTIONS, Config, to_toml
from exgrpo_cli.machine import settle as settling
from exgrpo_cli.machine.settle import Plan, first_replay_step, require_runnable, settle
from exgrpo_cli.machine.survey import Gpu, Machine, usable_memory
from exgrpo_cli.models.load import load_folder, locate
from exgrpo_cli.ranks import ALONE, Ranks
from exgrpo_cli.training import run as training
from exgrpo_cli.training.setup import make_engines

GIB = 2**30


def machine(*gpus: float, memory: float, cores: int = 16) -> Machine:
    cards = tuple(Gpu(name="GPU", memory_bytes=int(each * GIB)) for each in gpus)
    return Machine(cores=cores, memory_bytes=int(memory * GIB), gpus=cards)


LAPTOP = machine(memory=8, cores=4)
ONE_GPU, EIGHT = machine(140, memory=128), machine(*[80] * 8, memory=1024)
PLAIN = ("rollout.engine=hf", "optim.engine=torch", "rollout.max_rows=16")
"""Engines that are always installed."""


def plan_of(on: Machine = LAPTOP, *assignments: str, backbone: str = "tiny", method: str = "exgrpo") -> Plan:
    return settle(build_config(backbone=backbone, method=method, assignments=assignments), on)[1]


def test_nothing_replaces_the_configuration_once_it_is_settled(small_config, tmp_path, monkeypatch):
    """A run from the command to the end of its first step makes no configuration and no section after `settle`."""
    settled, made, steps = [], [], []

    def watched(make):
        def init(self, **values):
            if settled and not steps:
                made.append(f"{type(self).__name__} in {traceback.extract_stack(limit=3)[0]}")
            make(self, **values)

        return init

    for kind in {Config, *(kind for kinds in SECTIONS.values() for kind in kinds)}:
        monkeypatch.setattr(kind, "__init__", watched(kind.__init__))
    real_settle, real_step = settling.settle, training.run_step

    def settle_once(*arguments, **options):
        result = real_settle(*arguments, **options)
        settled.append(result[0])
        return result

    def first_step(parts, *rest):
        assert parts.config is settled[0]
        result = real_step(parts, *rest)
        steps.append(result)
        return result

    for module in (settling, training):
        monkeypatch.setattr(module, "settle", settle_once)
    monkeypatch.setattr(training, "run_step", first_step)
    file = tmp_path / "small.toml"
    file.write_text(to_toml(small_config("run.steps=1", "replay.start_threshold=0", "optim.schedule=linear")))
    assert run(["train", "--quiet", "--config", str(file), "--output", str(tmp_path / "run")]) == 0
    assert (len(settled), len(steps), made) == (1, 1, [])


def test_what_a_run_leaves_open_is_chosen():
    config, _ = settle(build_config(assignments=["optim.schedule=linear", "optim.warmup_steps=100"]), LAPTOP)
    assert (config.run.device, config.run.nproc, config.run.threads) == ("cpu", 1, 2)
    assert (config.backbone.dtype, config.rollout.logprobs) == ("float32", "sampler")
    assert (config.optim.horizon, config.optim.warmup_steps) == (150, 75)
    assert settle(config, LAPTOP)[0] == config
    config, _ = settle(build_config(backbone="qwen-math-1.5b"), EIGHT)
    assert (config.run.device, config.run.nproc, config.run.threads, config.grading.workers) == ("cuda", 8, 1, 1)
    many = replace(EIGHT, cores=64)
    for settings, workers in (((), 4), (("run.nproc=1",), 8), (("grading.workers=3",), 3)):
        assert plan_of(many, *settings, backbone="qwen-math-1.5b").config.grading.workers == workers
    assert (config.optim.horizon, config.rollout.logprobs) == (0, "trainer")
    two = build_config(assignments=["run.nproc=2", "run.budget=generated", "run.budget_amount=9"])
    assert (settle(two, LAPTOP)[0].run.threads, settle(two, LAPTOP)[0].optim.horizon) == (1, 150)


@pytest.mark.parametrize(
    ("backbone", "settings", "on", "nproc", "device"),
    [
        ("qwen-math-7b", (), EIGHT, 8, "cuda"),
        ("qwen-math-7b", (), ONE_GPU, 1, "cuda"),
        # Without the GPUs it asks for the run cannot start, and the plan is for machines that have them.
        ("qwen-math-7b", (), LAPTOP, 0, "auto"),
        ("qwen-math-7b", ("run.device=cpu",), EIGHT, 1, "cpu"),
        ("qwen-math-7b", ("run.nproc=2",), EIGHT, 2, "cuda"),
        ("smollm2-135m", (), LAPTOP, 1, "cpu"),
    ],
)
def test_ranks_default_to_the_visible_gpus(backbone, settings, on, nproc, device):
    config, plan = settle(build_config(backbone=backbone, assignments=settings), on)
    assert (config.run.nproc, config.run.device) == (nproc, device) and plan.on_gpu is (device != "cpu")


@pytest.mark.parametrize(
    ("settings", "on", "engine"),
    [
        ((), ONE_GPU, "torch"),
        ((), EIGHT, "deepspeed"),
        (("run.nproc=1", "optim.offload_during_rollouts=true"), EIGHT, "torch"),
        # What only DeepSpeed has.
        (("optim.offload=true",), ONE_GPU, "deepspeed"),
        (("run.device=cpu",), EIGHT, "torch"),
        # Without its GPUs the run cannot start: the plan is for the one of 80 GB that is enough.
        ((), LAPTOP, "torch"),
    ],
)
def test_published_presets_train_by_torch_on_one_gpu(settings, on, engine):
    plan = plan_of(on, *settings, backbone="qwen-math-1.5b")
    assert plan.config.optim.engine == ("auto" if plan.config.run.nproc == 0 else engine)
    assert f"engines    rollouts vllm, training {engine}" in plan.lines()
    assert any("deepspeed is not" in line for line in plan.missing) <= (engine == "deepspeed")
    assert settle(plan.config, on)[0] == plan.config


def test_what_the_chosen_engine_refuses_is_refused_once_it_is_known():
    for setting, other in (("optim.offload_during_rollouts=true", "optim.offload"), ("lora.rank=8", "zero_stage")):
        with pytest.raises(InputError, match=f"contradicts .*{other}"):
            plan_of(EIGHT, setting, "optim.zero_stage=3", backbone="qwen-math-7b")


@pytest.mark.parametrize(("name", "memory"), [("tiny", 8), ("smollm2-135m", 8), ("qwen2.5-0.5b-instruct", 24)])
def test_a_preset_made_for_a_cpu_needs_nothing_else(name, memory):
    for on, dtype in ((machine(memory=memory), "float32"), (ONE_GPU, "bfloat16")):
        config, plan = settle(build_config(backbone=name), on)
        require_runnable(plan, 400)
        assert plan.missing == ()
        assert config.backbone.dtype == ("float32" if name == "tiny" else dtype)


def test_a_published_backbone_wants_a_gpu_and_says_how_many():
    plan = plan_of(LAPTOP, "optim.zero_stage=3", backbone="qwen-math-7b")
    assert plan.missing[0] == (
        f"no GPU is visible ({plan.memory.gpus} of 80 GB would do); `exgrpo train --device cpu` runs it on the CPU "
        "all the same"
    )
    with pytest.raises(InputError, match="this machine cannot run qwen-math-7b: no GPU is visible"):
        require_runnable(plan)
    eight = plan_of(LAPTOP, "run.nproc=8", backbone="qwen-math-7b")
    assert (eight.memory.gpus, eight.missing[0][:34]) == (8, "no GPU is visible (4 of 80 GB woul")


@pytest.mark.parametrize(
    ("settings", "on", "advice"),
    [
        (("run.nproc=2", *PLAIN), ONE_GPU, "2 ranks (--nproc) on 1 visible GPUs; use at most one per GPU"),
        # 1.5 billion weights: 17.3 GiB of state and 5.8 of gradients.
        (PLAIN, machine(18, memory=64), "GiB of memory on each GPU, there are 18.0 GiB: updates take "),
        # 22 bytes a weight are in main memory because of it.
        (("rollout.engine=hf", "rollout.max_rows=16", "optim.offload=true"), machine(80, memory=16),
         "31.6 GiB of main memory for what is offloaded, there are 16.0 GiB: leave optim.offload, optim."),
        (("run.device=cpu", *PLAIN), LAPTOP, "GiB of main memory, there are 8.0 GiB: updates take "),
    ],
)  # fmt: skip
def test_what_is_too_large_is_refused_with_what_each_phase_takes(settings, on, advice):
    with pytest.raises(InputError) as refused:
        require_runnable(plan_of(on, *settings, backbone="qwen-math-1.5b"), 400)
    assert advice in str(refused.value)


def test_the_memory_of_a_rank_is_planned_over_the_ranks_of_all_hosts():
    """Two hosts of eight: each rank holds a sixteenth of what is sharded, and this host's memory only its own eight."""
    config = build_config(assignments=["optim.engine=deepspeed", "optim.zero_stage=3", "run.nproc=8"])
    hosts = Ranks(world_size=16, local_world_size=8)
    hosts.launched = True
    one, two = settle(config, LAPTOP)[1], settle(config, LAPTOP, hosts)[1]
    assert (one.memory.gpus, two.memory.gpus, two.config.run.nproc) == (8, 16, 8)
    assert two.memory_of(99).optimizer == one.memory_of(99).optimizer // 2
    room = machine(memory=8 * two.memory_of(99).peak / GIB)
    # A machine without deepspeed is told that as well.
    enough, too_little = (refusal(replace(plan, machine=room)) for plan in (two, one))
    assert "main memory" not in enough
    assert "of main memory, there are" in too_little


def refusal(plan):
    try:
        require_runnable(plan, 99)
    except InputError as error:
        return str(error)
    return ""


def test_a_model_of_unknown_shape_is_planned_without_memory():
    plan = plan_of(backbone="no-one/no-model")
    assert (plan.memory, plan.missing, plan.to_json()["memory"]) == (None, (), None)
    assert any("memory     unknown" in line for line in plan.lines())


def test_a_container_limit_below_the_memory_counts(tmp_path):
    limit = tmp_path / "memory.max"
    limit.write_text("1048576\n")
    assert usable_memory(limit) == 1048576
    limit.write_text("max\n")
    assert usable_memory(limit) == usable_memory(tmp_path / "none") > 1048576


def test_what_is_refused_before_the_questions_are_read_lacks_memory_for_any_prompt():
    """A limit of 200,000 tokens, where the prompts have 20: planned at the limit, and refused once they are known."""
    plan = plan_of(LAPTOP, "data.max_prompt_tokens=200000")
    assert plan.memory.peak > LAPTOP.memory_bytes
    require_runnable(plan)
    assert plan.memory_of(20).peak < GIB
    with pytest.raises(InputError, match=r"of main memory, there are 8\.0 GiB"):
        require_runnable(plan, 200_000)


def test_a_share_that_nobody_asked_for_is_what_the_trainer_leaves():
    """1.5 billion weights on 80 GB: 3.1 + 18.5 of state + 2.1 leave 56.2, of which a twentieth stays free."""
    ways = [(80, 0, 0.66, " = 0.66: "), (80, 0.5, 0.5, ""), (80, 0.9, 0.7, " = 0.7 instead of 0.9: ")]
    for card, asked, share, said in [*ways, (40, 0.5, 0.4, " = 0.4 instead of 0.5: ")]:
        on = machine(card * 1e9 / GIB, memory=256)
        plan = plan_of(on, f"rollout.gpu_memory_fraction={asked}", backbone="qwen-math-1.5b")
        assert plan.gpu_share == plan.memory.gpu_memory_fraction == share
        assert plan.config.rollout.gpu_memory_fraction == asked, "config.toml holds what was asked for"
        assert any(f"{share:.2f}  of the GPU is the rollout engine's (rollout.gpu" in line for line in plan.lines())
        assert [note for note in plan.notes if "gpu_memory_fraction" + said in note] == list(plan.notes)
        assert plan.memory.peak <= card * 1e9
    assert plan_of(machine(2000, memory=256), backbone="qwen-math-1.5b").gpu_share == 0.9
    # hf has no share of its own, and a model of unknown size gets half.
    assert not any("fraction" in note for note in plan_of(ONE_GPU, *PLAIN, backbone="qwen-math-1.5b").notes)
    unknown = plan_of(ONE_GPU, "rollout.engine=vllm", backbone="no-one/no-model")
    assert (unknown.gpu_share, [note for note in unknown.notes if "fraction" in note]) == (0.5, [])


def test_ranks_with_fewer_than_two_cores_are_told():
    """One core for eight ranks looks like a hang; ranks of a CPU that a user asks for by --nproc share on purpose."""
    for cores, ranks, told in ((1, 8, True), (15, 8, True), (16, 8, False)):
        card = replace(machine(80, memory=256), cores=cores)
        notes = plan_of(replace(card, gpus=card.gpus * ranks), backbone="qwen-math-1.5b").notes
        assert any(note.startswith(f"{ranks} ranks on this host for {cores} CPU cores") for note in notes) == told


def test_the_rows_that_hf_decodes_at_once_are_lowered_and_said():
    """512 rows of 9,216 tokens, 28 KiB each, and their logits: 126 GiB of cache beside 25.4 of the trainer."""
    plan = plan_of(machine(80, memory=256), "rollout.engine=hf", "optim.engine=torch", backbone="qwen-math-1.5b")
    row = 9216 * 2 * 28 * 256 * 2 + 4 * 151_936 * 4
    assert plan.max_rows == (80 * GIB - plan.memory.peaks["asleep"]) * 19 // 20 // row < 512
    assert plan.notes[-1].startswith(f"rollout.max_rows = {plan.max_rows} instead of 512: ")
    require_runnable(plan, 1024)


@pytest.mark.parametrize(
    ("engine", "asked", "given"),
    [("hf", "max_rows=1000000", "_max_rows"), ("vllm", "gpu_memory_fraction=0.9", "gpu_memory_fraction")],
)
def test_an_engine_is_given_what_the_trainer_leaves(engine, asked, given, monkeypatch):
    """On a card of 4 GiB, less than was asked for."""
    monkeypatch.setattr("exgrpo_cli.engines.vllm.generator.VLLMGenerator", lambda settings, **canary: settings)
    asks, cpu = ("run.device=cuda", f"rollout.engine={engine}", f"rollout.{asked}"), torch.device("cpu")
    plan = plan_of(machine(4, memory=64), *asks)
    backbone = load_folder(locate(plan.config.backbone, plan.config.tiny), cpu)
    made = make_engines(plan, backbone, {"q": np.arange(3, dtype=np.int32)}, cpu, ALONE)[1]
    left = {"hf": plan.max_rows, "vllm": plan.gpu_share}[engine]
    assert getattr(made, given) == left < float(asked.partition("=")[2])


@pytest.mark.parametrize(
    ("method", "settings", "first"),
    [
        # Threshold 0.35: step 1 at least is on-policy, step 2 stores, step 3 replays.
        ("exgrpo", (), 3),
        ("exgrpo", ("replay.collect_before_start=true",), 2),
        ("headroom-drift", (), 2),
        # Warms up for 20 steps and stores in them.
        ("adv-per", (), 21),
        ("rlep", ("replay.warm_start=run",), 1),
        # Solved at step 1, failed at its second visit in step 3, begun in step 4; with a success too few at once.
        ("prefix", ("arithmetic.num_train=64", "replay.at_most=0"), 4), ("prefix", (), 2),
        ("failure-prefix", ("arithmetic.num_train=64", "replay.upper_bound=3"), 4), ("failure-prefix", (), 2),
        # Stored in step 1, and rested for three steps.
        ("prompt-replay", (), 5), ("prompt-replay", ("replay.warm_start=run",), 4),
        # 16 rows are two visits of K = 8. 64 questions, 32 a step: the third pass begins with step 5.
        ("repo", ("arithmetic.num_train=64",), 5),
        # 8 rows are two visits of at most 7 successes: the third pass of 64 questions begins with step 5.
        ("repo", ("arithmetic.num_train=64", "replay.warmup_steps=2", "replay.min_stored=8", "replay.store=successes",
                  "replay.metric=age", "replay.upper_bound=-1", "replay.lower_bound=0",
                  "replay.collect_before_start=true"), 5),
    ],
)  # fmt: skip
def test_the_first_step_that_can_replay(method, settings, first):
    config = build_config(method=method, assignments=["rollout.questions_per_step=32", *settings])
    assert first_replay_step(config, config.arithmetic.num_train) == first
    for steps, too_short in ((max(first, 1), False), (first - 1, True)):
        if steps:
            plan = plan_of(LAPTOP, *settings, f"run.steps={steps}", method=method)
            said = f"step {first} is the first that could, and the run ends after {steps}"
            assert any(said in line for line in plan.lines()) is too_short
            assert any(said in note for note in plan.to_json()["notes"]) is too_short


def test_notes_and_the_budget_are_part_of_the_plan():
    [nothing, unlimited] = plan_of(method="repo").to_json()["notes"]
    assert unlimited.startswith("replay.store = 'all' keeps up to 256 rows a step, 38,400 in all")
    assert "the run ends after 150; use more --steps or a lower replay.min_stored" in nothing
    plan = plan_of(LAPTOP, "run.budget=generated", "run.budget_amount=2e6")
    assert "budget     2,000,000 tokens generated, in at most 600 steps" in plan.lines()
    assert plan.to_json()["budget"] == {"of": "generated", "amount": 2e6}
