"""From a settled configuration to the first step: parts assembled, state restored, the folder opened for writing."""

import copy
import hashlib
import os
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from exgrpo_cli.base import files, versions
from exgrpo_cli.base.errors import DamageWarning, InputError, ToolkitWarning
from exgrpo_cli.base.reporter import Reporter
from exgrpo_cli.config.settings import Config, to_toml
from exgrpo_cli.engines.generators import Generator, RankedGenerator
from exgrpo_cli.engines.lora import plain_copy
from exgrpo_cli.engines.policy.adamw import torch_policy
from exgrpo_cli.engines.policy.policy import Policy
from exgrpo_cli.grading import GradingPool
from exgrpo_cli.ledger.schemas import IDENTITY_FILE, LedgerIdentity
from exgrpo_cli.machine import settle, survey
from exgrpo_cli.models.load import Backbone, load_folder, load_tokenizer, locate
from exgrpo_cli.questions.prompts import Template, answer_format, choose_template, encode_within
from exgrpo_cli.questions.stream import QuestionStream
from exgrpo_cli.ranks import Ranks
from exgrpo_cli.replay.store import Store
from exgrpo_cli.replay.warm_start import warm_start
from exgrpo_cli.runs.folder import SET_UP_FILE, RunFolder, forget_checksums, note_checksums, require_model
from exgrpo_cli.training.checkpoint import ResumePoint, find_resume_point, load_checkpoint, set_aside
from exgrpo_cli.training.checkpoint import folder_name as checkpoint_name
from exgrpo_cli.training.questions import RunQuestions, check_answers, load_questions, store_questions, stored_questions
from exgrpo_cli.training.start import remember_run
from exgrpo_cli.training.state import Parts, Prompts, RunState, make_generators
from exgrpo_cli.training.trackers import Tracker, open_trackers


def setup_run(
    plan: settle.Plan, folder: RunFolder, reporter: Reporter, stack: ExitStack, ranks: Ranks, *, is_new: bool
) -> tuple[Parts, RunState, list[Tracker]]:
    """Parts, state and trackers of a run, ready for its next step; `stack` closes what is opened.

    A new run's folder gets its `config.toml` last, when all else is in place.
    """
    config = plan.config
    point = ResumePoint() if is_new else ranks.from_main(lambda: find_resume_point(folder, config))
    for note in point.notes if ranks.is_main else ():
        warnings.warn(note, DamageWarning, stacklevel=2)
    reporter.phase("setting up")
    questions = ranks.from_main(lambda: load_questions(config, reporter) if is_new else stored_questions(folder.data))
    pool = stack.enter_context(GradingPool(config.grading))
    if is_new:
        ranks.from_main(lambda: check_answers(config, pool, questions.train, reporter))
    parts = assemble(plan, questions, pool, reporter, stack, ranks)
    for note in settle.replay_notes(config, len(questions.train)):
        reporter.note(note)
    if is_new:
        ranks.from_main(lambda: describe_run(config, folder, questions, ranks))
    state = RunState()
    if point.step is not None:
        state = load_checkpoint(folder.checkpoints / checkpoint_name(point.step), parts)
    parts.policy.offload()
    parts.sync()
    trackers = open_trackers(config.run.log if ranks.is_main else (), config, folder.path, stack, step=state.step)
    # Everything has been checked: from here on the folder changes.
    if ranks.is_main:
        # New, or as it stood after the step. Where nothing is stored its ledger has the visits alone.
        store = Store(
            folder.replay,
            identity=identity_of(config, parts.backbone.tokenizer, questions, config.rollout.logprobs),
            rules=config.replay,
            question_ids=(ids := [question.id for question in questions.train]),
            barred=[each for each in ids if config.data.is_barred(each, config.run.seed)],
            at_step=(point.step or 0) if (folder.replay / IDENTITY_FILE).exists() else None,
        )
        parts = replace(parts, store=stack.enter_context(store))
    take_experience(config, parts, reporter, is_new=is_new)
    # At the start, and after the last step, a run asks the held-out questions whatever was asked before.
    validates = point.step is None or state.finished.is_final or state.step >= config.run.last_step
    ranks.from_main(lambda: begin_writing(config, folder, point, validates_again=validates))
    return parts, state, trackers


def describe_run(config: Config, folder: RunFolder, questions: RunQuestions, ranks: Ranks) -> None:
    """Put on disk what a new run is made of."""
    store_questions(folder.data, config, questions)
    environment = {
        "started": versions.now(),
        "code": versions.code_version(),
        **versions.describe_machine(),
        "threads": config.run.threads,
        "devices": [gpu.name for gpu in survey.visible_gpus()],
        "train_questions_sha256": questions.train_hash,
        "seed": config.run.seed,
        "ranks": ranks.world_size,
    }
    files.write_json(folder.path / "environment.json", environment)
    remember_run(folder.path, config)


def begin_writing(config: Config, folder: RunFolder, point: ResumePoint, *, validates_again: bool) -> None:
    """Bring the folder to the step the run goes on from."""
    forget_checksums(folder.path, point.step or 0)
    set_aside(folder, point)
    folder.make_folders()
    folder.remove_partials()
    folder.cut_back(point.step or 0, validates_again=validates_again)
    files.write_text(folder.config, to_toml(config))
    (folder.path / SET_UP_FILE).unlink(missing_ok=True)
    note_checksums(folder.path)


def take_experience(config: Config, parts: Parts, reporter: Reporter, *, is_new: bool) -> None:
    """Fill the buffer from another run's ledger, where the settings name one."""
    if not (config.replay.warm_start and config.replay.keeps_buffer and is_new):
        return
    source, most = Path(config.replay.warm_start) / "replay", config.rollout.max_response_tokens
    reporter.note(parts.ranks.from_main(lambda: warm_start(parts.main_store, source, config.objective, most)))


def connect(config: Config, ranks: Ranks, note: Callable[[str], None]) -> torch.device:
    """The policy's device, once the ranks have met; `note` hears how fast the network between hosts is."""
    torch.set_num_threads(config.run.threads)
    device = take_device(config.run.device, ranks.local_rank)
    ranks.connect(device, timedelta(minutes=config.run.rank_timeout))
    if network := ranks.measure_network(device):
        note(network)
    return device


def take_device(requested: str, local_rank: int) -> torch.device:
    """The device of the policy, by the settled `run.device`: each rank of a host takes the GPU of its number.

    It is the one that unnamed allocations and collectives of this process use. Attention on a GPU leaves cuDNN out,
    which builds a plan for every new shape, and the shapes of packed rows are new at every micro-batch. For the same
    reason torch's memory has segments that grow, unless the environment says how it is to be kept.
    """
    if requested != "cuda":
        return torch.device(requested)
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        # A name inside torch: the variable is read too late, and vllm refuses it.
        if set_memory := getattr(torch._C, "_accelerator_setAllocatorSettings", None):
            set_memory("expandable_segments:True")
        else:
            slower = f"torch {torch.__version__} lets no program ask for segments that grow: GPU memory may fragment"
            warnings.warn(f"{slower}; where it runs out, lower optim.microbatch_tokens.", ToolkitWarning, stacklevel=2)
    torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def choose_run_template(config: Config, tokenizer: PreTrainedTokenizerBase) -> Template:
    """The settings' prompt template. Raises InputError for one that the tokenizer cannot fill."""
    return choose_template(config.data.template, tokenizer, require_box=config.data.require_box)


def assemble(
    plan: settle.Plan, questions: RunQuestions, pool: GradingPool, reporter: Reporter, stack: ExitStack, ranks: Ranks
) -> Parts:
    """Load the backbone and build engines and stream; `stack` closes them.

    The store is opened later: that cuts the ledger of a resumed run. Raises InputError for a prompt over the limit, a
    template the backbone cannot fill, or an engine that is not there.
    """
    config = plan.config
    device = take_device(config.run.device, ranks.local_rank)
    with ranks.first_on_host():
        tokenizer = load_tokenizer(config.backbone, config.tiny, reporter.progress)
    template, everything = choose_run_template(config, tokenizer), (*questions.train, *questions.heldout)
    reporter.phase(f"reading {len(everything):,} prompts")
    prompts = encode_within(template, everything, tokenizer, max_tokens=config.data.max_prompt_tokens)
    with ranks.first_on_host():
        folder = locate(config.backbone, config.tiny, reporter.progress)
        require_model(folder)
    with reporter.showing(f"loading {config.backbone.name}"):
        backbone = load_folder(folder, device, config.backbone)
    check_window(config, backbone.model.config)
    settle.require_runnable(plan, max(map(len, prompts.values())))
    with reporter.showing(f"starting {config.rollout.engine} and {config.optim.engine} for {config.backbone.name}"):
        policy, generator = make_engines(plan, backbone, prompts, device, ranks)
    stack.callback(generator.close)
    rngs = make_generators(config.run.seed)
    return Parts(
        config=config, backbone=backbone, generator=generator, policy=policy, pool=pool, rngs=rngs, ranks=ranks,
        questions={question.id: question for question in everything}, heldout=questions.heldout, prompts=prompts,
        answer_format=answer_format(template, require_eos=config.rollout.require_eos),
        stream=QuestionStream([question.id for question in questions.train], rngs["stream"]),
    )  # fmt: skip


def check_window(config: Config, model: PreTrainedConfig, longest_prompt: int = 1) -> int:
    """Tokens of the longest row: such a prompt and the longest response. Raises InputError over the model's window."""
    limit = config.rollout.max_response_tokens
    window = config.backbone.max_position_embeddings or getattr(model, "max_position_embeddings", None)
    if window is not None and longest_prompt + limit > window:
        raise InputError(
            f"a prompt of {longest_prompt} tokens and rollout.max_response_tokens = {limit} exceed the backbone's "
            f"window of {window}: lower rollout.max_response_tokens to {window - longest_prompt}, or raise "
            "backbone.max_position_embeddings."
        )
    return longest_prompt + limit


def make_engines(
    plan: settle.Plan, backbone: Backbone, prompts: Prompts, device: torch.device, ranks: Ranks
) -> tuple[Policy, Generator]:
    """The training engine with the run's objective and optimizer, and a Generator for `prompts`.

    `hf` shares the policy's module, but for a copy where ZeRO stage 3 will empty that, or of what an adapter changes;
    `vllm` holds weights of its own. Raises InputError when an engine is not installed, a prompt and its response exceed
    the backbone's window, or the backbone cannot have the adapter.
    """
    config, sampled = plan.config, backbone
    make: Callable[..., Policy] = torch_policy
    if config.optim.engine == "deepspeed":
        from exgrpo_cli.engines.policy.deepspeed import deepspeed_policy

        make = deepspeed_policy
        if config.optim.zero_stage == 3 and config.rollout.engine == "hf":
            sampled = replace(backbone, model=copy.deepcopy(backbone.model))
    if config.lora.rank > 0 and config.rollout.engine == "hf":
        sampled = replace(backbone, model=plain_copy(backbone.model))
    policy = make(
        backbone.model,
        temperature=config.rollout.temperature,
        objective=config.objective,
        optim=config.optim,
        gradient_checkpointing=config.backbone.gradient_checkpointing,
        ranks=ranks,
        lora=config.lora,
        seed=config.run.seed,
    )
    generator = _local_generator(plan, sampled, prompts, device)
    if ranks.world_size > 1:
        generator = RankedGenerator(generator, ranks, tensor_parallel=config.rollout.tensor_parallel)
    return policy, generator


def _local_generator(plan: settle.Plan, backbone: Backbone, prompts: Prompts, device: torch.device) -> Generator:
    config = plan.config
    if config.rollout.engine == "hf":
        from exgrpo_cli.engines.hf.generator import HFGenerator

        return HFGenerator(backbone.model, max_rows=plan.max_rows, eos_ids=backbone.eos_ids)
    from exgrpo_cli.engines.vllm.generator import VLLMGenerator, VLLMSettings
    from exgrpo_cli.engines.vllm.proof import canary_of

    settings = VLLMSettings(
        folder=locate(config.backbone, config.tiny),
        backbone=config.backbone,
        device=device.type,
        max_tokens=check_window(config, backbone.model.config, max(map(len, prompts.values()))),
        max_rows=config.rollout.max_rows,
        gpu_memory_fraction=plan.gpu_share,
        tensor_parallel=config.rollout.tensor_parallel,
        lora=config.lora,
    )
    canary = canary_of(next(iter(prompts.values()))), config.rollout.temperature
    return VLLMGenerator(settings, eos_ids=backbone.eos_ids, canary=canary)


def identity_of(
    config: Config, tokenizer: PreTrainedTokenizerBase, questions: RunQuestions, logprob_source: str
) -> LedgerIdentity:
    """The identity of a ledger; equal sha256 over vocabulary and special tokens mean equal token ids."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return LedgerIdentity(
        tokenizer_hash=hashlib.sha256(repr((vocabulary, sorted(tokenizer.all_special_ids))).encode()).hexdigest(),
        template=choose_run_template(config, tokenizer).name,
        group_size=config.rollout.group_size,
        questions_hash=questions.train_hash,
        logprob_source=logprob_source,
    )
