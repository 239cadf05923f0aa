"""Two training steps of a configuration with random weights of its shape, at its full lengths, by its own engines.

Prompts are random tokens, responses run to the limit and rewards are made up: memory and speed depend on none of that.
What takes hours at full size is fewer rows: as many are sampled as decode side by side (256 at most on a rank), and
two micro-batches per mini-batch and rank are trained. No question, no hub and no run folder is needed.
"""

import ctypes
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from jaxtyping import Int32
from torch import Tensor
from transformers import AutoModelForCausalLM

from exgrpo_cli import __version__
from exgrpo_cli.algo.batching import TrainingRow, split_minibatches
from exgrpo_cli.base.console.reporter import Reporter
from exgrpo_cli.base.errors import InputError, RunError, first_line
from exgrpo_cli.base.types import RolloutRequest, TokenSequence, rollout_seed
from exgrpo_cli.config.settings import Config
from exgrpo_cli.engines.protocols import Generator, Policy
from exgrpo_cli.engines.ranked_generator import local_generator
from exgrpo_cli.engines.vllm.generator import VLLMGenerator
from exgrpo_cli.machine.memory import MemoryPlan, architecture
from exgrpo_cli.machine.settle import Plan, require_runnable, settle
from exgrpo_cli.machine.survey import package_versions, survey_machine
from exgrpo_cli.models.export import export_model
from exgrpo_cli.models.load import load_folder, locate
from exgrpo_cli.models.tiny import make_tokenizer
from exgrpo_cli.ranks import ALONE, Ranks
from exgrpo_cli.training.check_report import CheckReport, Memory, Phase
from exgrpo_cli.training.metrics import score_gaps
from exgrpo_cli.training.setup import make_generator, make_policy, sampling_backbone, take_device
from exgrpo_cli.training.step.guards import MAX_MEAN_GAPS
from exgrpo_cli.training.step.rollouts import sampling_params

STEPS = 2
MOST_ROWS = 256
"""Rows sampled on a rank."""
NO_TOKEN = -1
LOST, NUDGED = "a weight that is not sent", "a norm by the next number"
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Meter:
    """Times phases and reads their memory."""

    def __init__(self, device: torch.device) -> None:
        """Begin to count memory here: what is taken so far is not the run's, on a GPU that others use too."""
        self.phases: list[Phase] = []
        self.step = 0
        self._device = device
        self._before = self._taken()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Work to be measured."""
        if self._device.type == "cuda":
            # What torch keeps afterwards is then the most that this phase has taken.
            torch.cuda.empty_cache()
        elif _CLEAR.exists():
            # What is free goes back to the system, and the mark down to what is left.
            ctypes.CDLL(None).malloc_trim(0)
            _CLEAR.write_text("5")
        started = time.perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds, taken = time.perf_counter() - started, max(0, self._taken() - self._before)
        self.phases.append(Phase(name=name, step=self.step, seconds=seconds, peak_bytes=taken))

    def peak(self, name: str) -> int:
        """Most memory over all phases of that name, in bytes."""
        return max((phase.peak_bytes for phase in self.phases if phase.name == name), default=0)

    def _taken(self) -> int:
        """Bytes taken on the GPU; of main memory the most that this process had since the mark was last cleared."""
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            return total - free
        lines = _STATUS.read_text().splitlines() if _STATUS.exists() else []
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A check under way, and what it has found."""

    config: Config
    """With as many questions a step as are sampled."""
    policy: Policy
    generator: Generator
    ranks: Ranks
    meter: Meter
    prompts: dict[str, Int32[np.ndarray, " prompt_tokens"]]
    trained: int
    """Groups of a step that are trained."""
    caught: list[str] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    """Mean log-prob gap of each step's rollouts."""
    problems: list[str] = field(default_factory=list)

    def run(self, reporter: Reporter) -> None:
        """Inject the faults, then train two steps."""
        with noting(self.problems, self.meter, self.ranks):
            self.policy.rest()
            self.sync()
            self.inject_faults()
            for step in range(1, STEPS + 1):
                self.meter.step = step
                reporter.note(f"step {step} of {STEPS}")
                self.train(step)

    def sync(self, *, losing: bool = False) -> None:
        """Hand the weights over, as the loop does; one is lost on the way where so asked, read as the ranks must."""
        weights = self.policy.named_weights()
        sent = (each for index, each in enumerate(weights) if index or not losing)
        self.generator.sync(sent, self.policy.weight_version, self.policy.score)

    def inject_faults(self) -> None:
        """Inject the faults one by one; the sync is whole again afterwards."""
        local = local_generator(self.generator)
        vllm = local if isinstance(local, VLLMGenerator) else None
        for fault in (LOST, NUDGED) if vllm else (LOST,):
            if vllm and fault == NUDGED:
                vllm.transit = nudge_norms
            try:
                self.sync(losing=fault == LOST)
                self.problems.append(f"the canary let a fault pass: {fault}")
            except RunError:
                self.caught.append(fault)
            if vllm:
                vllm.transit = iter
        self.sync()

    def train(self, step: int) -> None:
        """One step: rollouts, scores, updates and a sync; every second rollout is praised."""
        config, meter = self.config, self.meter
        members = range(config.rollout.group_size)
        requests = [
            RolloutRequest(
                question_id=name,
                prompt_ids=prompt,
                seeds=tuple(rollout_seed(config.run.seed, name, step, member) for member in members),
            )
            for name, prompt in self.prompts.items()
        ]
        with meter.phase("rollouts"):
            groups = self.generator.generate(requests, sampling_params(config))
        with meter.phase("asleep"):
            self.generator.sleep()
        rollouts = [rollout for group in groups[: self.trained] for rollout in group]
        sequences = [
            TokenSequence(prompt_ids=self.prompts[each.question_id], response_ids=each.token_ids) for each in rollouts
        ]
        with meter.phase("scoring"):
            scores = self.policy.score(sequences)
        gap, bound = score_gaps(rollouts, scores)["policy/logprob_gap_mean"], MAX_MEAN_GAPS[config.backbone.dtype]
        self.gaps.append(gap)
        if not gap <= bound:
            self.problems.append(f"step {step}: log-probs of engine and trainer differ by {gap:.3g}, bound {bound:g}")
        rows = [
            TrainingRow(
                sequence=sequence, advantage=(-1.0) ** index, behaviour_logprobs=scored.logprobs, replayed=False
            )
            for index, (sequence, scored) in enumerate(zip(sequences, scores, strict=True))
        ]
        batches = split_minibatches(
            [rows[start : start + len(members)] for start in range(0, len(rows), len(members))],
            num_minibatches=config.optim.minibatches,
            max_response_tokens=config.rollout.max_response_tokens,
            clip=True,
            rng=np.random.default_rng((config.run.seed, step)),
        )
        with meter.phase("update"):
            reports = [self.policy.update(batch) for batch in batches]
        self.problems.extend(
            f"step {step}: an update of loss {report.loss:.3g} was skipped: {report.skip_reason}"
            for report in reports
            if not report.applied or not math.isfinite(report.loss)
        )
        self.policy.rest()
        with meter.phase("sync"):
            self.sync()

    def memory(self, plan: MemoryPlan, *, on_gpu: bool) -> tuple[Memory, ...]:
        """Memory planned and measured, the most of any rank."""
        planned = {"rollouts": plan.rollout_peak, "asleep": plan.asleep_peak, "scoring": plan.scoring_peak}
        planned |= {"update": plan.update_peak, "sync": plan.sync_peak}
        return tuple(
            Memory(part=part, planned=bound, measured=max(self.ranks.gather(self.meter.peak(part))), judged=on_gpu)
            for part, bound in planned.items()
        )

    def tokens_per_second(self) -> dict[str, float]:
        """Speed by part of the second step; one that did not come to its end has none."""
        seconds = {phase.name: phase.seconds for phase in self.meter.phases}
        groups = {"rollouts": len(self.prompts), "scoring": self.trained, "update": self.trained}
        tokens = self.config.rollout.group_size * self.config.rollout.max_response_tokens
        return {part: number * tokens / seconds[part] for part, number in groups.items() if part in seconds}


def check_run(config: Config, *, reporter: Reporter, ranks: Ranks = ALONE, plan: Plan) -> CheckReport:
    """Check a settled `config` by its `plan` on this machine; every rank calls this and gets the same report.

    Raises InputError where the configuration cannot run here, or the shape of its backbone is not known here. What goes
    wrong later is a problem of the report.
    """
    started, run = time.perf_counter(), plan.memory
    torch.set_num_threads(config.run.threads)
    device = take_device(config.run.device, ranks.local_rank)
    ranks.connect(device, timedelta(minutes=config.run.rank_timeout))
    with TemporaryDirectory(prefix="exgrpo-check-") as name, ExitStack() as stack:
        reporter.note("making random weights of the backbone's shape")
        # Ranks of a host read what the first of them has written.
        folder = ranks.gather(Path(name) / "model")[ranks.rank - ranks.local_rank]
        with ranks.first_on_host():
            local, prompts, trained = smaller(config, folder, ranks)
        local, local_plan = settle(local, survey_machine(), ranks)
        longest, on_gpu = max(map(len, prompts.values())), device.type == "cuda"
        require_runnable(local_plan, longest)
        assert run is not None and plan.shape is not None, "what has random weights has a shape"
        meter = Meter(device)
        # No token ends a response; vllm knows its own vocabulary and takes none for that.
        endless = () if local.rollout.engine == "vllm" else (NO_TOKEN,)
        backbone = replace(load_folder(locate(local.backbone, local.tiny), device, local.backbone), eos_ids=endless)
        sampled = sampling_backbone(local, backbone)
        policy = make_policy(local, backbone, ranks)
        generator = make_generator(local_plan, sampled, prompts, device, ranks)
        stack.callback(generator.close)
        check = Check(
            config=local, policy=policy, generator=generator, ranks=ranks, meter=meter, prompts=prompts, trained=trained
        )
        check.run(reporter)
        memory = check.memory(local_plan.memory_of(longest), on_gpu=on_gpu)
        group_size = local.rollout.group_size
        return CheckReport(
            backbone=f"{config.backbone.name}, {plan.shape.num_parameters:,} parameters in {local.backbone.dtype}",
            engines=f"{local.rollout.engine} and {local.optim.engine}",
            device=f"{ranks.world_size} x {torch.cuda.get_device_name(device) if on_gpu else 'CPU'}",
            versions={"exgrpo": __version__, **package_versions()},
            lengths=f"prompts of {longest} tokens, responses of {local.rollout.max_response_tokens}; {STEPS} steps of "
            f"{len(prompts) * group_size} rollouts, {trained * group_size} of them trained in "
            f"{local.optim.minibatches} updates",
            memory=memory,
            planned_for_run={"rollouts": run.rollout_peak, "update": run.update_peak},
            tokens_per_second=check.tokens_per_second(),
            phases=tuple(meter.phases),
            seconds=time.perf_counter() - started,
            faults_caught=tuple(check.caught),
            logprob_gap=float(np.mean(check.gaps)) if check.gaps else None,
            problems=(*check.problems, *(each.problem for each in memory if each.problem)),
        )


def smaller(
    config: Config, folder: Path, ranks: Ranks
) -> tuple[Config, dict[str, Int32[np.ndarray, " prompt_tokens"]], int]:
    """`config` with a backbone of its shape and random weights in `folder`, and with fewer questions a step; random
    prompts of full length for them, and how many groups are trained.

    Raises InputError where the shape is not known here, and where responses leave no room for a prompt.
    """
    backbone, rollout, optim, number = config.backbone, config.rollout, config.optim, ranks.world_size
    made = architecture(backbone, config.tiny)
    if made is None:
        raise InputError(
            f"the shape of backbone {backbone.source!r} is not known here: name a preset or a model folder, or "
            "download its config.json first."
        )
    if ranks.local_rank == 0:
        tokenizer = make_tokenizer(max_tokens=made.max_position_embeddings)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.run.seed)
            model = AutoModelForCausalLM.from_config(made, dtype=getattr(torch, backbone.dtype))
        # Weights by name: transformers' own writing leaves it to rank 0.
        export_model(model, tokenizer, folder, eos_ids=(0,), weights=iter(model.state_dict().items()))
    window = backbone.max_position_embeddings or made.max_position_embeddings
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
    rng = np.random.default_rng(config.run.seed)
    prompts = {f"check-{index}": rng.integers(0, made.vocab_size, prompt, dtype=np.int32) for index in range(questions)}
    config = replace(
        config,
        backbone=replace(backbone, source=str(folder)),
        rollout=replace(rollout, questions_per_step=questions),
        data=replace(config.data, heldout=""),
    )
    return config, prompts, min(questions, optim.minibatches * groups)


@contextmanager
def noting(problems: list[str], meter: Meter, ranks: Ranks) -> Iterator[None]:
    """Turn what stops a run into a problem; of several ranks it ends all, for the others would wait for this one."""
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


def nudge_norms(weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The first entry of every vector a unit in the last place larger: what no log-prob shows."""
    for name, weight in weights:
        if weight.ndim == 1:
            weight[0] = torch.nextafter(weight[0], torch.full_like(weight[0], torch.inf))
        yield name, weight
