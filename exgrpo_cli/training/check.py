"""Two training steps of a configuration with random weights of its shape, at its full lengths, by its own engines.

Prompts are random tokens, responses run to the limit and rewards are made up: memory and speed depend on none of that.
What takes hours at full size is fewer rows: as many are sampled as decode side by side (256 at most on a rank), and
two micro-batches per mini-batch and rank are trained. No question, no hub and no run folder is needed.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from exgrpo_cli import __version__
from exgrpo_cli.algo.batching import MiniBatch, TrainingRow
from exgrpo_cli.base.console.reporter import Reporter
from exgrpo_cli.base.errors import InputError, RunError, first_line
from exgrpo_cli.base.types import RolloutRequest, TokenScores, TokenSequence, rollout_seed
from exgrpo_cli.config.settings import Config
from exgrpo_cli.engines.protocols import Generator, Policy
from exgrpo_cli.engines.ranked_generator import local_generator
from exgrpo_cli.engines.vllm.generator import VLLMGenerator
from exgrpo_cli.machine.memory import MemoryPlan, architecture, shape_of
from exgrpo_cli.machine.settle import Plan, require_runnable, settle
from exgrpo_cli.machine.survey import package_versions, survey_machine
from exgrpo_cli.models.export import export_model
from exgrpo_cli.models.load import Backbone, load_backbone
from exgrpo_cli.models.tokenizer import make_tokenizer
from exgrpo_cli.ranks import ALONE, Ranks
from exgrpo_cli.training.check_report import (
    CheckReport,
    Memory,
    Meter,
    RunPeaks,
    Speed,
    allowed,
    forward_operations,
    product_speed,
)
from exgrpo_cli.training.metrics import score_gaps
from exgrpo_cli.training.starting.assemble import make_generator, make_policy, sampling_backbone, take_device
from exgrpo_cli.training.starting.setup import require_extras
from exgrpo_cli.training.step.rollouts import sampling_params
from exgrpo_cli.training.step.staleness import MAX_MEAN_GAPS

STEPS = 2
MOST_ROWS = 256
"""Rows sampled on a rank."""
NO_TOKEN = -1
LOST, NUDGED = "a weight that is not sent", "a norm by the next number"


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A check under way."""

    config: Config
    """With as many questions a step as are sampled."""
    backbone: Backbone
    policy: Policy
    generator: Generator
    ranks: Ranks
    meter: Meter
    prompts: dict[str, np.ndarray]
    trained: int
    """Groups of a step that are trained."""


def check_run(config: Config, *, reporter: Reporter, ranks: Ranks = ALONE, plan: Plan | None = None) -> CheckReport:
    """Check `config` on this machine; every rank calls this and gets the same report.

    `plan` is that of a `config` which has been settled.

    Raises InputError where the configuration cannot run here, or the shape of its backbone is not known here. What goes
    wrong later is a problem of the report.
    """
    started = time.perf_counter()
    machine = survey_machine()
    if plan is None:
        config, plan = settle(config, machine, ranks, fetch=True)
    require_extras(config)
    torch.set_num_threads(config.run.threads)
    device = take_device(config.run.device, ranks.local_rank)
    ranks.connect(device, timedelta(minutes=config.run.rank_timeout))
    with TemporaryDirectory(prefix="exgrpo-check-") as name, ExitStack() as stack:
        reporter.note("making random weights of the backbone's shape")
        # Ranks of a host read what the first of them has written.
        folder = ranks.gather(Path(name) / "model")[ranks.rank - ranks.local_rank]
        with ranks.first_on_host():
            local, window = with_random_weights(config, folder, write=ranks.local_rank == 0)
        local, prompts, trained = fewer_rows(local, window, ranks)
        local, local_plan = settle(local, machine, ranks)
        require_runnable(local_plan, longest(prompts))
        whole_run, planned = plan.memory, local_plan.memory_of(longest(prompts))
        assert whole_run is not None, "what a local folder is made of has a shape"
        meter = Meter(device)
        # No token ends a response; vllm knows its own vocabulary and takes none for that.
        endless = () if local.rollout.engine == "vllm" else (NO_TOKEN,)
        backbone = replace(load_backbone(local.backbone, local.tiny, device), eos_ids=endless)
        shape, body = shape_of(backbone.model.config), backbone.model.base_model
        operations = forward_operations(body, shape, _full_groups(local, prompts, trained))
        sampled = sampling_backbone(local, backbone)
        policy = make_policy(local, backbone, ranks)
        generator = make_generator(local_plan, sampled, prompts, device, ranks)
        stack.callback(generator.close)
        check = Check(
            config=local, backbone=backbone, policy=policy, generator=generator, ranks=ranks, meter=meter,
            prompts=prompts, trained=trained,
        )  # fmt: skip
        caught, gap, problems = run_check(check, reporter)
        speed = product_speed(device, next(body.parameters()).dtype)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        memory = tuple(memory_of(meter, planned, ranks))
        return CheckReport(
            backbone=f"{config.backbone.name}, {shape.num_parameters:,} parameters in {config.backbone.dtype}",
            engines=f"{config.rollout.engine} and {config.optim.engine}",
            device=f"{ranks.world_size} x {name}",
            versions={"exgrpo": __version__, **package_versions()},
            lengths=_lengths(local, prompts, trained),
            memory=memory,
            memory_is_judged=device.type == "cuda",
            planned_for_run=_peaks(whole_run) if _peaks(whole_run) != _peaks(planned) else None,
            speeds=tuple(speeds_of(check, operations, speed)),
            phases=tuple(meter.phases),
            seconds=time.perf_counter() - started,
            faults_caught=tuple(caught),
            logprob_gap=gap,
            problems=(*problems, *(over_plan(memory) if device.type == "cuda" else ())),
        )


def with_random_weights(config: Config, folder: Path, *, write: bool) -> tuple[Config, int]:
    """`config` with a local backbone of the same shape and random weights in `folder`, and the window of its model.

    Raises InputError where the shape is not known here.
    """
    made = architecture(config.backbone, config.tiny)
    if made is None:
        raise InputError(
            f"the shape of backbone {config.backbone.source!r} is not known here: name a preset or a model folder, or "
            "download its config.json first."
        )
    if write:
        tokenizer = make_tokenizer(max_tokens=made.max_position_embeddings)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.run.seed)
            model = AutoModelForCausalLM.from_config(made, dtype=getattr(torch, config.backbone.dtype))
        # Weights by name: transformers' own writing leaves it to rank 0.
        export_model(model, tokenizer, folder, eos_ids=(0,), weights=iter(model.state_dict().items()))
    window = config.backbone.max_position_embeddings or made.max_position_embeddings
    return replace(config, backbone=replace(config.backbone, source=str(folder))), int(window)


def fewer_rows(config: Config, window: int, ranks: Ranks) -> tuple[Config, dict[str, np.ndarray], int]:
    """`config` with fewer questions a step, random prompts of full length for them, and how many groups are trained."""
    rollout, optim, number = config.rollout, config.optim, ranks.world_size
    prompt = min(config.data.max_prompt_tokens, window - rollout.max_response_tokens)
    if prompt < 1:
        raise InputError(
            f"rollout.max_response_tokens = {rollout.max_response_tokens} leaves no room for a prompt in the window of "
            f"{window} tokens: lower it."
        )
    rows = min(rollout.max_rows, MOST_ROWS) * number
    questions = max(number, min(rollout.questions_per_step, rows // rollout.group_size))
    length = rollout.group_size * rollout.max_response_tokens + prompt
    groups = max(number, math.ceil(2 * optim.microbatch_tokens * number / length))
    vocabulary = architecture(config.backbone, config.tiny).vocab_size
    rng = np.random.default_rng(config.run.seed)
    prompts = {f"check-{index}": rng.integers(0, vocabulary, prompt, dtype=np.int32) for index in range(questions)}
    smaller = replace(rollout, questions_per_step=questions)
    config = replace(config, rollout=smaller, data=replace(config.data, heldout=""))
    return config, prompts, min(questions, optim.minibatches * groups)


def run_check(check: Check, reporter: Reporter) -> tuple[list[str], float | None, list[str]]:
    """Inject the faults, then train two steps: faults that were caught, the log-prob gap, and what went wrong."""
    problems: list[str] = []
    caught: list[str] = []
    gaps: list[float] = []
    with noting(problems, check.meter, check.ranks):
        check.policy.rest()
        sync(check)
        caught = catch_faults(check)
        problems += [f"the canary let a fault pass: {fault}" for fault in faults(check) if fault not in caught]
        for step in range(1, STEPS + 1):
            check.meter.step = step
            reporter.note(f"step {step} of {STEPS}")
            gap, wrong = run_step(check, step)
            gaps.append(gap)
            problems += wrong
    return caught, float(np.mean(gaps)) if gaps else None, problems


@contextmanager
def noting(problems: list[str], meter: Meter, ranks: Ranks) -> Iterator[None]:
    """What stops a run is a problem here; of several ranks it ends them all, for the others would wait for this one."""
    try:
        yield
    except (RunError, torch.OutOfMemoryError) as error:
        text = str(error)
        if not isinstance(error, RunError):
            after = meter.phases[-1].name if meter.phases else "loading"
            text = f"out of memory in step {meter.step}, after {after}: {first_line(error)}"
        if ranks.world_size > 1:
            raise RunError(text) from error
        problems.append(text)


def run_step(check: Check, step: int) -> tuple[float, list[str]]:
    """One step; returns the mean log-prob gap of its rollouts, and what was wrong with it."""
    config, meter, problems = check.config, check.meter, []
    params = sampling_params(config)
    requests = [
        RolloutRequest(
            question_id=name,
            prompt_ids=prompt,
            seeds=tuple(rollout_seed(config.run.seed, name, step, k) for k in range(config.rollout.group_size)),
        )
        for name, prompt in check.prompts.items()
    ]
    with meter.phase("rollouts"):
        groups = check.generator.generate(requests, params)
    with meter.phase("asleep"):
        check.generator.sleep()
    kept = [
        [TokenSequence(prompt_ids=request.prompt_ids, response_ids=rollout.token_ids) for rollout in group]
        for request, group in zip(requests[: check.trained], groups[: check.trained], strict=True)
    ]
    with meter.phase("scoring"):
        scores = check.policy.score([row for group in kept for row in group])
    rollouts = [rollout for group in groups[: check.trained] for rollout in group]
    gap = float(score_gaps(rollouts, scores)["policy/logprob_gap_mean"])
    bound = MAX_MEAN_GAPS[config.backbone.dtype]
    if not gap <= bound:
        problems.append(f"step {step}: log-probs of rollout engine and trainer differ by {gap:.3g}, bound {bound:g}")
    with meter.phase("update"):
        for batch in minibatches(config, kept, scores):
            report = check.policy.update(batch)
            if not report.applied or not math.isfinite(report.loss):
                problems.append(f"step {step}: an update of loss {report.loss:.3g} was skipped: {report.skip_reason}")
    check.policy.rest()
    with meter.phase("sync"):
        sync(check)
    return gap, problems


def minibatches(
    config: Config, groups: Sequence[Sequence[TokenSequence]], scores: Sequence[TokenScores]
) -> Iterator[MiniBatch]:
    """The groups in M parts, every second row praised."""
    remaining = iter(scores)
    rows = [
        TrainingRow(
            sequence=sequence, advantage=(-1.0) ** index, behaviour_logprobs=next(remaining).logprobs, replayed=False
        )
        for group in groups
        for index, sequence in enumerate(group)
    ]
    size = math.ceil(len(rows) / config.optim.minibatches)
    for start in range(0, len(rows), size):
        part = tuple(rows[start : start + size])
        yield MiniBatch(
            rows=part, num_rollouts=len(part), max_response_tokens=config.rollout.max_response_tokens, clip=True
        )


def sync(check: Check, alter: Callable[[Iterator[tuple[str, Tensor]]], Iterator[tuple[str, Tensor]]] = iter) -> None:
    """Hand the weights over, as the loop does."""
    weights = alter(check.policy.named_weights())
    check.generator.sync(weights, check.policy.weight_version, check.policy.score)


def faults(check: Check) -> list[str]:
    """Those that are injected."""
    return [LOST, *([NUDGED] if isinstance(local_generator(check.generator), VLLMGenerator) else [])]


def catch_faults(check: Check) -> list[str]:
    """Inject the faults one by one; those that stopped the sync, which is whole again afterwards."""
    local, caught = local_generator(check.generator), []
    for fault in faults(check):
        try:
            if isinstance(local, VLLMGenerator) and fault == NUDGED:
                local.transit = nudge_norms
            sync(check, iter if fault == NUDGED else without_first)
        except RunError:
            caught.append(fault)
        finally:
            if isinstance(local, VLLMGenerator):
                local.transit = iter
    sync(check)
    return caught


def without_first(weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """All weights but one, read to their end as the ranks must."""
    return (each for index, each in enumerate(weights) if index)


def nudge_norms(weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The first entry of every vector a unit in the last place larger: what no log-prob shows."""
    for name, weight in weights:
        if weight.ndim == 1:
            weight[0] = torch.nextafter(weight[0], torch.full_like(weight[0], torch.inf))
        yield name, weight


def memory_of(meter: Meter, plan: MemoryPlan, ranks: Ranks) -> Iterator[Memory]:
    """Planned and measured, the most of any rank."""
    for part, planned, phase in (
        ("rollouts", plan.rollout_peak, "rollouts"),
        ("rollout engine asleep", plan.asleep_peak, "asleep"),
        ("scoring", plan.scoring_peak, "scoring"),
        ("update", plan.update_peak, "update"),
        ("sync", plan.sync_peak, "sync"),
    ):
        yield Memory(part=part, planned=planned, measured=max(ranks.gather(meter.peak(phase))))


def over_plan(memory: Sequence[Memory]) -> Iterator[str]:
    """What took clearly more than was planned; of main memory nobody knows so exactly what a phase has taken."""
    for each in memory:
        if each.measured > allowed(each.planned):
            yield f"{each.part} took {each.measured / 2**30:.2f} GiB, {each.planned / 2**30:.2f} were planned"


def speeds_of(check: Check, operations: int, product: float) -> Iterator[Speed]:
    """Of the second step; `operations` are those of one forward pass over what is trained, on all ranks."""
    meter, rollout = check.meter, check.config.rollout
    rows = {"rollouts": len(check.prompts), "scoring": check.trained, "update": check.trained}
    passes = {"scoring": 1, "update": 3}
    for part, groups in rows.items():
        if not (seconds := meter.seconds(part)):
            continue
        tokens = groups * rollout.group_size * rollout.max_response_tokens
        done = passes.get(part, 0) * operations / seconds / check.ranks.world_size
        yield Speed(part=part, tokens_per_second=tokens / seconds, utilisation=done / product if done else None)


def _peaks(plan: MemoryPlan) -> RunPeaks:
    return RunPeaks(rollouts=plan.rollout_peak, update=plan.update_peak)


def longest(prompts: dict[str, np.ndarray]) -> int:
    """Tokens of the longest prompt."""
    return max(map(len, prompts.values()))


def _full_groups(config: Config, prompts: dict[str, np.ndarray], count: int) -> list[list[TokenSequence]]:
    response = np.zeros(config.rollout.max_response_tokens, dtype=np.int32)
    return [
        [TokenSequence(prompt_ids=prompt, response_ids=response)] * config.rollout.group_size
        for prompt in list(prompts.values())[:count]
    ]


def _lengths(config: Config, prompts: dict[str, np.ndarray], trained: int) -> str:
    size = config.rollout.group_size
    return (
        f"prompts of {longest(prompts)} tokens, responses of {config.rollout.max_response_tokens}; {STEPS} steps of "
        f"{len(prompts) * size} rollouts, {trained * size} of them trained in {config.optim.minibatches} updates"
    )
