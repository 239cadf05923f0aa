"""What a run needs against what a machine has: checked before any work starts."""

from dataclasses import replace

import pytest

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.config.layers import build_config
from exgrpo_cli.machine.replay_plan import first_replay_step
from exgrpo_cli.machine.run_plan import plan_run, require_runnable, resolve_ranks, with_engine_fraction
from exgrpo_cli.machine.survey import Gpu, Machine, usable_memory

GIB = 2**30
LAPTOP = Machine(cores=2, memory_bytes=8 * GIB, gpus=())
ONE_GPU = Machine(cores=16, memory_bytes=128 * GIB, gpus=(Gpu(name="H200", memory_bytes=140 * GIB),))
EIGHT = Machine(cores=64, memory_bytes=1024 * GIB, gpus=(Gpu(name="H100", memory_bytes=80 * GIB),) * 8)
PLAIN = ("rollout.engine=hf", "optim.engine=torch", "rollout.max_rows=16")
"""Engines that are always installed."""


def test_the_default_run_needs_nothing_a_laptop_lacks():
    plan = plan_run(build_config(), LAPTOP)
    assert plan.missing == ()
    assert not plan.on_gpu
    require_runnable(plan)


@pytest.mark.parametrize(("name", "memory"), [("smollm2-135m", 8 * GIB), ("qwen2.5-0.5b-instruct", 24 * GIB)])
def test_a_preset_made_for_a_cpu_needs_nothing_else(name, memory):
    plan = plan_run(build_config(backbone=name), replace(LAPTOP, memory_bytes=memory), longest_prompt=400)
    assert (plan.missing, plan.on_gpu, plan.config.backbone.dtype) == ((), False, "float32")
    assert resolve_ranks(build_config(backbone=name), LAPTOP).run.nproc == 1
    with_gpu = plan_run(build_config(backbone=name), ONE_GPU, longest_prompt=400)
    assert (with_gpu.missing, with_gpu.on_gpu, with_gpu.config.backbone.dtype) == ((), True, "bfloat16")


def test_a_published_backbone_wants_a_gpu_and_says_how_many():
    plan = plan_run(build_config(backbone="qwen-math-7b", assignments=["optim.zero_stage=3"]), LAPTOP)
    assert plan.on_gpu
    assert plan.missing[0] == (
        f"no GPU is visible ({plan.memory.gpus} of 80 GB would do); --device cpu runs it on the CPU all the same"
    )
    with pytest.raises(InputError, match="this machine cannot run qwen-math-7b: no GPU is visible"):
        require_runnable(plan)
    eight = plan_run(build_config(backbone="qwen-math-7b", assignments=["run.nproc=8"]), LAPTOP)
    assert eight.memory.gpus == 8
    assert eight.missing[0].startswith("no GPU is visible (4 of 80 GB would do)")


def test_what_is_offloaded_must_fit_into_main_memory():
    """7.6 billion parameters at 22 bytes are 156 GiB."""
    config = build_config(backbone="qwen-math-7b", assignments=["optim.offload=true", "run.nproc=1"])
    missing = plan_run(config, ONE_GPU).missing[0]
    assert missing.startswith("156.0 GiB of main memory for what is offloaded, there are 128.0 GiB")


def test_forced_onto_the_cpu_it_is_held_against_main_memory():
    config = build_config(backbone="qwen-math-1.5b", assignments=["run.device=cpu", *PLAIN])
    assert "of main memory, there are 8.0 GiB" in plan_run(config, LAPTOP).missing[0]
    assert plan_run(config, EIGHT).missing == ()


def test_a_gpu_that_is_too_small_is_named_with_what_to_do():
    config = build_config(backbone="qwen-math-7b", assignments=PLAIN)
    missing = plan_run(config, Machine(cores=8, memory_bytes=64 * GIB, gpus=(Gpu(name="L4", memory_bytes=24 * GIB),)))
    assert "of memory on each GPU, there are 24.0 GiB: lower optim.microbatch_tokens" in missing.missing[0]


def card(gib, memory=64):
    return Machine(cores=8, memory_bytes=memory * GIB, gpus=(Gpu(name="L4", memory_bytes=gib * GIB),))


DEEPSPEED = "use more ranks with optim.engine=deepspeed"
OFFLOADED = "set optim.engine=deepspeed with optim.offload=true"
RESTING = "optim.offload_during_rollouts=true"


@pytest.mark.parametrize(
    ("settings", "machine", "advice"),
    [
        # 1.5 billion weights: 17.3 GiB of state and 5.8 of gradients; both phases are above 18 GiB. The cache of 16
        # rows of 8.6 thousand tokens, 3.7 GiB, stands beside a state that may rest.
        (PLAIN, card(18), ["lower optim.microbatch_tokens", "lower rollout.max_rows", f"set {RESTING}", DEEPSPEED,
                           OFFLOADED]),
        # What rests already leaves the update alone too large, in which no row is sampled.
        ((*PLAIN, RESTING), card(18), ["lower optim.microbatch_tokens", DEEPSPEED, OFFLOADED]),
        # 512 rows are 118 GiB of cache: micro-batches are no matter.
        ((*PLAIN, "rollout.max_rows=512"), card(80),
         ["lower rollout.max_rows", f"set {RESTING}", DEEPSPEED, OFFLOADED]),
        # The preset's own stage 2 on one rank; stage 3 shards over ranks that are not there.
        (("rollout.engine=hf", "rollout.max_rows=16"), card(18),
         ["lower optim.microbatch_tokens", "lower rollout.max_rows", "use more ranks", "set optim.offload=true"]),
        # Each of two ranks would hold half of 1.5 billion weights and gather a billion: no less than all.
        (("rollout.engine=hf", "optim.zero_stage=3", "optim.offload=true"), card(8, memory=128),
         ["lower optim.microbatch_tokens", "lower rollout.max_rows"]),
        # 22 bytes a weight, 31.6 GiB, are in main memory because of it.
        (("rollout.engine=hf", "rollout.max_rows=16", "optim.offload=true"), card(80, memory=16),
         ["leave optim.offload out"]),
        # On a CPU more ranks take more, and nothing is moved anywhere.
        (("run.device=cpu", *PLAIN), LAPTOP, ["lower optim.microbatch_tokens", "lower rollout.max_rows"]),
        (("run.device=cpu", *PLAIN, "rollout.max_rows=1", "optim.microbatch_tokens=1"), LAPTOP,
         ["lower rollout.max_response_tokens", "use a smaller backbone"]),
    ],
)  # fmt: skip
def test_what_is_too_large_is_refused_with_what_would_lower_it(settings, machine, advice):
    config = build_config(backbone="qwen-math-1.5b", assignments=settings)
    *ways, last = advice
    expected = f"{', '.join(ways)}, or {last}" if ways else last
    assert plan_run(config, machine, longest_prompt=400).missing[0].partition(": ")[2] == expected


def test_ranks_default_to_the_visible_gpus():
    published = build_config(backbone="qwen-math-7b")
    assert resolve_ranks(published, EIGHT).run.nproc == 8
    assert resolve_ranks(published, ONE_GPU).run.nproc == 1
    # Without the GPUs it asks for the run cannot start, and the plan is for machines that have them.
    assert resolve_ranks(published, LAPTOP).run.nproc == 0
    on_cpu = build_config(backbone="qwen-math-7b", assignments=["run.device=cpu"])
    assert resolve_ranks(on_cpu, EIGHT).run.nproc == 1
    two = build_config(backbone="qwen-math-7b", assignments=["run.nproc=2"])
    assert resolve_ranks(two, EIGHT).run.nproc == 2


def test_more_ranks_than_gpus_are_refused():
    config = build_config(backbone="qwen-math-1.5b", assignments=["run.nproc=2", *PLAIN])
    assert plan_run(config, ONE_GPU).missing == ("2 ranks (--nproc) on 1 visible GPUs; use at most one per GPU",)


def test_the_memory_of_a_rank_is_planned_over_the_ranks_of_all_hosts():
    """Two hosts of eight: each rank holds a sixteenth of what is sharded, and this host's memory only its own eight."""
    config = build_config(assignments=["optim.engine=deepspeed", "optim.zero_stage=3", "run.nproc=8"])
    one, two = (plan_run(config, LAPTOP, num_ranks=ranks, longest_prompt=99) for ranks in (0, 16))
    assert one.memory is not None and two.memory is not None
    assert (one.memory.gpus, two.memory.gpus) == (8, 16)
    assert two.memory.optimizer == one.memory.optimizer // 2
    room = Machine(cores=2, memory_bytes=8 * two.memory.peak, gpus=())
    assert not [
        line for line in plan_run(config, room, num_ranks=16, longest_prompt=99).missing if "main memory" in line
    ]
    assert [line for line in plan_run(config, room, longest_prompt=99).missing if "main memory" in line]


def test_a_model_of_unknown_shape_is_planned_without_memory():
    plan = plan_run(build_config(backbone="no-one/no-model"), LAPTOP)
    assert plan.memory is None
    assert plan.missing == ()
    assert any("memory     unknown" in line for line in plan.lines())
    assert plan.to_json()["memory"] is None


def test_a_container_limit_below_the_memory_counts(tmp_path):
    limit = tmp_path / "memory.max"
    limit.write_text("1048576\n")
    assert usable_memory(limit) == 1048576
    limit.write_text("max\n")
    assert usable_memory(limit) == usable_memory(tmp_path / "none") > 1048576


def test_what_is_refused_before_the_questions_are_read_lacks_memory_for_any_prompt():
    """A limit of 200,000 tokens, where the prompts have 20: planned at the limit, and refused once they are known."""
    config = build_config(assignments=["data.max_prompt_tokens=200000"])
    plan = plan_run(config, LAPTOP)
    assert plan.memory.peak > LAPTOP.memory_bytes
    assert plan.missing == ()
    assert plan_run(config, LAPTOP, longest_prompt=20).memory.peak < GIB
    long = plan_run(config, LAPTOP, longest_prompt=200_000)
    assert "of main memory, there are 8.0 GiB" in long.missing[0]


def test_the_fraction_of_a_small_gpu_is_lowered_and_said():
    config = build_config(backbone="qwen-math-1.5b", assignments=["rollout.gpu_memory_fraction=0.5"])
    machine = Machine(cores=16, memory_bytes=256 * GIB, gpus=(Gpu(name="A100", memory_bytes=40 * 10**9),))
    plan = plan_run(config, machine, longest_prompt=300)
    assert with_engine_fraction(plan).rollout.gpu_memory_fraction == 0.4
    assert any("0.40 of the GPU (rollout.gpu_memory_fraction, 0.5 asked for)" in line for line in plan.lines())
    on_cpu = plan_run(build_config(), LAPTOP)
    assert with_engine_fraction(on_cpu) == on_cpu.config


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
        # 16 rows are two visits of K = 8. 64 questions, 32 a step: the third pass begins with step 5.
        ("repo", ("arithmetic.num_train=64",), 5),
        # 60 questions: the second pass ends with question 24 of step 4, whose others begin the third.
        ("repo", ("arithmetic.num_train=60",), 4),
        # 8 rows are two visits of at most 7 successes: the third pass of 64 questions begins with step 5.
        ("repo", ("arithmetic.num_train=64", "replay.warmup_steps=2", "replay.min_stored=8", "replay.store=successes",
                  "replay.metric=age", "replay.upper_bound=-1", "replay.lower_bound=0",
                  "replay.collect_before_start=true"), 5),
    ],
)  # fmt: skip
def test_the_first_step_that_can_replay(method, settings, first):
    config = build_config(method=method, assignments=["rollout.questions_per_step=32", *settings])
    assert first_replay_step(config, config.arithmetic.num_train) == first
    in_time, too_short = (
        plan_run(build_config(method=method, assignments=[*settings, f"run.steps={steps}"]), LAPTOP)
        for steps in (max(first, 1), max(first - 1, 1))
    )
    said = [line for line in too_short.lines() if "nothing will be replayed" in line]
    assert not [line for line in in_time.lines() if "nothing will be replayed" in line]
    if first > 1:
        [line] = said
        assert f"step {first} is the first that could, and the run ends after {first - 1}" in line
        assert too_short.to_json()["notes"]


def test_repo_on_the_default_task_is_told_that_it_replays_nothing():
    [nothing, unlimited] = plan_run(build_config(method="repo"), LAPTOP).to_json()["notes"]
    assert "the run ends after 150; use more --steps or a lower replay.min_stored" in nothing
    assert unlimited.startswith("replay.store = 'all' keeps up to 256 rows a step, 38,400 in all")


def test_a_budget_is_part_of_the_plan():
    config = build_config(assignments=["run.budget=generated", "run.budget_amount=2e6"])
    plan = plan_run(config, LAPTOP)
    assert "budget     2,000,000 tokens generated, in at most 600 steps" in plan.lines()
    assert plan.to_json()["budget"] == {"of": "generated", "amount": 2e6}
