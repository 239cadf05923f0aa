"""Two training steps of a configuration with random weights of its shape, at its full lengths, by its own engines.

The second is mixed where the run replays: what the first one sampled is scored as stored candidates are, and half of
the groups train one of them.

Prompts are random tokens, responses run to the limit and rewards are made up: memory and speed depend on none of that.
What takes hours at full size is fewer rows: as many are sampled as decode side by side (256 at most on a rank), and
two micro-batches per mini-batch and rank are trained. No question, no hub and no run folder is needed.
"""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from exgrpo_cli.algo.batching import TrainingRow, split_minibatches
from exgrpo_cli.base.errors import InputError, RunError, first_line
from exgrpo_cli.base.reporter import Reporter
from exgrpo_cli.base.types import RolloutRequest, TokenSequence
from exgrpo_cli.config.settings import Config
from exgrpo_cli.engines.generators import Generator
from exgrpo_cli.engines.policy.policy import Policy
from exgrpo_cli.machine.memory import MemoryPlan, architecture, size
from exgrpo_cli.machine.settle import Plan, require_runnable, settle
from exgrpo_cli.machine.survey import survey_machine
from exgrpo_cli.models import export, tiny
from exgrpo_cli.models.load import load_folder, locate
from exgrpo_cli.ranks import ALONE, Ranks
from exgrpo_cli.training.setup import check_window, connect, make_engines
from exgrpo_cli.training.state import Prompts
from exgrpo_cli.training.step.rollouts import sampling_params

STEPS = 2
MOST_ROWS = 256
"""Rows sampled on a rank."""
NO_TOKEN = -1
ROOM, SLACK_BYTES = 0.1, 2**29
"""Bounds above the plan: a tenth, and half a gibibyte for what is too small to be planned."""


class Meter:
    """Times phases and reads their memory, on a GPU."""

    def __init__(self, device: torch.device) -> None:
        """Begin to count memory here: what is taken so far is not the run's, on a GPU that others use too."""
        self.seconds: dict[str, list[float]] = defaultdict(list)
        """By phase, step after step."""
        self.peaks: Counter[str] = Counter()
        """Most bytes alive in a phase, beyond what there was before the model was loaded; 0 on a CPU."""
        self.doing = "loading"
        self.step = 1
        self._device = device
        self._before = self._taken()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Work to be measured."""
        self.doing = f"{name} of step {self.step}"
        self._begin()
        started = time.perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.seconds[name].append(time.perf_counter() - started)
        self.peaks[name] = max(self.peaks[name], self._taken() - self._before)

    def _begin(self) -> None:
        """Let what torch keeps afterwards be what this phase has taken."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)

    def _taken(self) -> int:
        """Bytes taken on the GPU, by whomever, but for what torch has kept without need: of a cache that grows it keeps
        every earlier one."""
        if self._device.type != "cuda":
            return 0
        free, total = torch.cuda.mem_get_info(self._device)
        unused = torch.cuda.memory_reserved(self._device) - torch.cuda.max_memory_allocated(self._device)
        return total - free - max(0, unused)


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A check under way, and what it has found."""

    config: Config
    """With as many questions a step as are sampled."""
    policy: Policy
    generator: Generator
    meter: Meter
    prompts: Prompts
    trained: int
    """Groups of a step that are trained."""
    stored: list[TrainingRow] = field(default_factory=list)
    """Rows of the step before, as a store would hold them."""
    problems: list[str] = field(default_factory=list)

    def sync(self, *, losing: bool = False) -> None:
        """Hand the weights over, as the loop does; one is lost on the way where so asked, read as the ranks must."""
        sent = (each for index, each in enumerate(self.policy.sampled_weights()) if index or not losing)
        self.generator.sync(sent, self.policy.weight_version, self.policy.score)

    def inject_fault(self) -> None:
        """Lose a weight, which the canary has to find; the sync is whole again afterwards."""
        with suppress(RunError):
            self.sync(losing=True)
            self.problems.append("the canary let a fault pass: a weight that is not sent")
        self.sync()

    def train(self, step: int) -> None:
        """One step, in the order of the loop; advantages are 1 and -1 in turn."""
        config, meter = self.config, self.meter
        meter.step = step
        if step > 1:
            if config.replay.enabled:
                with meter.phase("drawing"):
                    self.policy.score([row.sequence for row in self.stored])
            with meter.phase("sync"):
                self.sync()
        seeds = tuple(range(config.rollout.group_size))
        requests = [
            RolloutRequest(question_id=name, prompt_ids=prompt, seeds=seeds) for name, prompt in self.prompts.items()
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
        rows = [
            TrainingRow(
                sequence=sequence, advantage=(-1.0) ** index, behaviour_logprobs=scored.logprobs, replayed=False
            )
            for index, (sequence, scored) in enumerate(zip(sequences, scores, strict=True))
        ]
        if config.replay.enabled:
            stored = [replace(row, replayed=True) for row in self.stored]
            self.stored[:] = rows
            rows = [stored[i] if stored and i % (2 * len(seeds)) == 0 else row for i, row in enumerate(rows)]
        batches = split_minibatches(
            [rows[start : start + len(seeds)] for start in range(0, len(rows), len(seeds))],
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
        self.policy.offload()


def check_run(plan: Plan, *, reporter: Reporter, ranks: Ranks = ALONE) -> dict[str, Any]:
    """Check the configuration of `plan` on this machine; every rank calls this and gets the same report.

    The report is the object that `--json` prints. Raises InputError where the configuration cannot run here, or the
    shape of its backbone is not known here, and RunError for what would stop a run.
    """
    started, config = time.perf_counter(), plan.config
    device = connect(config, ranks, reporter.note)
    with TemporaryDirectory(prefix="exgrpo-check-") as name, ExitStack() as stack:
        reporter.note("making random weights of the backbone's shape")
        # Ranks of a host read what the first of them has written.
        folder = ranks.gather(Path(name) / "model")[ranks.rank - ranks.local_rank]
        with ranks.first_on_host():
            local, prompts, trained = smaller(config, folder, ranks)
        local, plan = settle(local, survey_machine(), ranks)
        longest, rollout = max(map(len, prompts.values())), local.rollout
        require_runnable(plan, longest)
        assert plan.shape is not None, "what has random weights has a shape"
        meter = Meter(device)
        # No token ends a response; vllm knows its own vocabulary and takes none for that.
        endless = () if rollout.engine == "vllm" else (NO_TOKEN,)
        backbone = replace(load_folder(locate(local.backbone, local.tiny), device, local.backbone), eos_ids=endless)
        policy, generator = make_engines(plan, backbone, prompts, device, ranks)
        stack.callback(generator.close)
        check = Check(config=local, policy=policy, generator=generator, meter=meter, prompts=prompts, trained=trained)
        policy.offload()
        check.sync()
        check.inject_fault()
        try:
            for step in range(1, STEPS + 1):
                reporter.note(f"step {step} of {STEPS}")
                check.train(step)
        except torch.OutOfMemoryError as error:
            raise RunError(f"out of memory in {meter.doing}: {first_line(error)}") from error
        on_gpu = device.type == "cuda"
        memory = compared(plan.memory_of(longest), ranks.gather(meter.peaks)) if on_gpu else {}
        problems = [*check.problems, *above_plan(memory)]
        return {
            "about": f"{config.backbone.name}, {plan.shape.num_parameters:,} parameters in {local.backbone.dtype}, "
            f"{rollout.engine} and {local.optim.engine}, on {ranks.world_size} x "
            f"{torch.cuda.get_device_name(device) if on_gpu else 'CPU'}",
            "lengths": f"prompts of {longest} tokens, responses of {rollout.max_response_tokens}; {STEPS} steps of "
            f"{len(prompts) * rollout.group_size} rollouts, {trained * rollout.group_size} of them trained in "
            f"{local.optim.minibatches} updates",
            "parameters": plan.shape.num_parameters,
            "memory": memory,
            "tokens_per_second": {
                part: groups * rollout.group_size * rollout.max_response_tokens / meter.seconds[part][-1]
                for part, groups in (("rollouts", len(prompts)), ("scoring", trained), ("update", trained))
            },
            "phases": {name: sum(seconds) for name, seconds in meter.seconds.items()},
            "seconds": time.perf_counter() - started,
            "problems": problems,
            "well": not problems,
        }


def smaller(config: Config, folder: Path, ranks: Ranks) -> tuple[Config, Prompts, int]:
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
        tokenizer = tiny.make_tokenizer(max_tokens=made.max_position_embeddings)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.run.seed)
            model = AutoModelForCausalLM.from_config(
                made, dtype=getattr(torch, backbone.dtype), attn_implementation="sdpa", trust_remote_code=False
            )
        # Weights by name: transformers' own writing leaves it to rank 0.
        export.export_model(model, tokenizer, folder, eos_ids=(0,), weights=iter(model.state_dict().items()))
    window = backbone.max_position_embeddings or made.max_position_embeddings
    prompt = min(config.data.max_prompt_tokens, window - rollout.max_response_tokens)
    check_window(config, made, max(1, prompt))
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
        data=replace(config.data, heldout="none"),
    )
    return config, prompts, min(questions, optim.minibatches * groups)


def compared(plan: MemoryPlan, peaks: Sequence[Counter[str]]) -> dict[str, dict[str, int]]:
    """Bytes of each part on the rank that had most: `planned`, `allowed` (the plan with its slack) and `measured`."""
    return {
        part: {
            "planned": bound,
            "allowed": int((1 + ROOM) * bound) + SLACK_BYTES,
            "measured": max(of_rank[part] for of_rank in peaks),
        }
        for part, bound in plan.peaks.items()
        if any(part in of_rank for of_rank in peaks)
    }


def above_plan(memory: Mapping[str, Mapping[str, int]]) -> list[str]:
    """The problems of parts of which clearly more was measured than planned."""
    return [
        f"{part} took {size(each['measured'])}, {size(each['planned'])} were planned"
        for part, each in memory.items()
        if each["measured"] > each["allowed"]
    ]


def report_lines(report: Mapping[str, Any]) -> list[str]:
    """A check's report for people, one fact a line, the verdict last."""
    problems = report["problems"]
    phases = report["phases"] | {"loading and all else": report["seconds"] - sum(report["phases"].values())}
    speeds = ", ".join(f"{part} {speed:,.0f}" for part, speed in report["tokens_per_second"].items())
    return [
        f"exgrpo check of {report['about']}",
        f"lengths    {report['lengths']}",
        *(
            f"memory     {part}: {size(each['measured'])}; planned {size(each['planned'])}, up to "
            f"{size(each['allowed'])} is as planned"
            for part, each in report["memory"].items()
        ),
        "note       rows are this check's, without validation; --dry-run plans the whole run",
        f"speed      tokens a second: {speeds}",
        f"time       {report['seconds']:.1f} s: {', '.join(f'{name} {taken:.1f} s' for name, taken in phases.items())}",
        *(f"problem    {problem}" for problem in problems),
        f"verdict    {f'{len(problems)} problems, see above' if problems else 'all is well'}",
    ]
