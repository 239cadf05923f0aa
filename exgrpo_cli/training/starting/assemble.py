"""From a configuration and a run folder to the parts a step works with."""

import copy
import hashlib
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from exgrpo_cli.base.console.reporter import Reporter
from exgrpo_cli.base.errors import InputError
from exgrpo_cli.config.settings import Config
from exgrpo_cli.engines.policy.adamw import torch_policy
from exgrpo_cli.engines.protocols import Generator, Policy
from exgrpo_cli.engines.ranked_generator import RankedGenerator
from exgrpo_cli.grading import GradingPool
from exgrpo_cli.ledger.schemas import LedgerIdentity
from exgrpo_cli.ledger.writer import IDENTITY_FILE
from exgrpo_cli.machine.settle import Plan, require_runnable
from exgrpo_cli.models.load import Backbone, load_folder, load_tokenizer, locate
from exgrpo_cli.questions.prompts import Template, answer_format, check_prompt_lengths, choose_template, encode
from exgrpo_cli.questions.stream import QuestionStream
from exgrpo_cli.ranks import Ranks
from exgrpo_cli.replay.store import Store
from exgrpo_cli.runs.folder import RunFolder
from exgrpo_cli.runs.manifest import require_model
from exgrpo_cli.training.parts import Parts, Prompts
from exgrpo_cli.training.resuming.state import make_generators
from exgrpo_cli.training.starting.run_questions import RunQuestions


def choose_device(requested: str, local_rank: int = 0) -> torch.device:
    """The device of the policy: each rank of a host takes the GPU of its number.

    Raises InputError when a GPU is asked for and none is visible, or there are fewer GPUs than ranks.
    """
    if requested == "cuda" and not torch.cuda.is_available():
        raise InputError("run.device = 'cuda', but no GPU is visible: use --device cpu, or check CUDA_VISIBLE_DEVICES.")
    if requested == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise InputError(
            f"local rank {local_rank} has no GPU, this host shows {torch.cuda.device_count()}: start at most one rank "
            "per GPU, or use --device cpu."
        )
    return torch.device("cuda", local_rank)


def take_device(requested: str, local_rank: int) -> torch.device:
    """`choose_device`, made the one that unnamed allocations and collectives of this process use.

    Attention on a GPU leaves cuDNN out, which builds a plan for every new shape, and the shapes of packed rows are new
    at every micro-batch.
    """
    device = choose_device(requested, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def choose_run_template(config: Config, tokenizer: PreTrainedTokenizerBase) -> Template:
    """The settings' prompt template for this tokenizer."""
    require_box = {"auto": None, "always": True, "never": False}[config.data.require_box]
    return choose_template(config.data.template, tokenizer, requires_box=require_box)


def choose_prompts(config: Config, questions: RunQuestions | None, tokenizer: PreTrainedTokenizerBase) -> Template:
    """The run's prompt template, with which every prompt is within the limit; the model need not be there.

    Raises InputError for a template that the tokenizer cannot fill, and for a prompt over the limit.
    """
    template = choose_run_template(config, tokenizer)
    if questions is not None:
        everything = (*questions.train, *questions.heldout)
        check_prompt_lengths(template, everything, tokenizer, max_tokens=config.data.max_prompt_tokens)
    return template


def assemble(
    plan: Plan,
    questions: RunQuestions,
    pool: GradingPool,
    reporter: Reporter,
    stack: ExitStack,
    ranks: Ranks,
) -> Parts:
    """Load the backbone and build engines and stream; `stack` closes them.

    The store comes last, by `open_store`: opening an old one cuts its ledger. Raises InputError for a prompt
    over the limit, a template the backbone cannot fill, or an engine that is not there.
    """
    config = plan.config
    device = choose_device(config.run.device, ranks.local_rank)
    with ranks.first_on_host():
        tokenizer = load_tokenizer(config.backbone, config.tiny, reporter.progress)
    template = choose_prompts(config, questions, tokenizer)
    with ranks.first_on_host():
        folder = locate(config.backbone, config.tiny, reporter.progress)
        require_model(folder)
    backbone = load_folder(folder, device, config.backbone)
    everything = [*questions.train, *questions.heldout]
    check_window(config, backbone)
    prompts = {question.id: encode(template, question, backbone.tokenizer) for question in everything}
    require_runnable(plan, max(map(len, prompts.values())))
    sampled = sampling_backbone(config, backbone)
    policy = make_policy(config, backbone, ranks)
    generator = make_generator(plan, sampled, prompts, device, ranks)
    stack.callback(generator.close)
    rngs = make_generators(config.run.seed)
    return Parts(
        config=config,
        questions={question.id: question for question in everything},
        prompts=prompts,
        answer_format=answer_format(template, require_eos=config.rollout.require_eos),
        backbone=backbone,
        generator=generator,
        policy=policy,
        pool=pool,
        stream=QuestionStream([question.id for question in questions.train], rngs["stream"]),
        rngs=rngs,
        ranks=ranks,
    )


def check_window(config: Config, backbone: Backbone, longest_prompt: int = 1) -> int:
    """Tokens of the longest row: such a prompt and the longest response. Raises InputError over the model's window."""
    limit = config.rollout.max_response_tokens
    window = getattr(backbone.model.config, "max_position_embeddings", None)
    if window is not None and longest_prompt + limit > window:
        raise InputError(
            f"a prompt of {longest_prompt} tokens and rollout.max_response_tokens = {limit} exceed the backbone's "
            f"window of {window}: lower rollout.max_response_tokens to {window - longest_prompt}, or raise "
            "backbone.max_position_embeddings."
        )
    return longest_prompt + limit


def sampling_backbone(config: Config, backbone: Backbone) -> Backbone:
    """What the `hf` generator samples with: the policy's own module, or a copy where ZeRO stage 3 will empty that."""
    emptied = config.optim.engine == "deepspeed" and config.optim.zero_stage == 3 and config.rollout.engine == "hf"
    return replace(backbone, model=copy.deepcopy(backbone.model)) if emptied else backbone


def make_policy(config: Config, backbone: Backbone, ranks: Ranks) -> Policy:
    """The training engine with this run's objective and optimizer."""
    shared: dict[str, Any] = dict(
        temperature=config.rollout.temperature,
        objective=config.objective,
        optim=config.optim,
        gradient_checkpointing=config.backbone.gradient_checkpointing,
        ranks=ranks,
    )
    if config.optim.engine == "torch":
        return torch_policy(backbone.model, **shared)
    from exgrpo_cli.engines.policy.deepspeed import deepspeed_policy

    return deepspeed_policy(backbone.model, **shared)


def make_generator(plan: Plan, backbone: Backbone, prompts: Prompts, device: torch.device, ranks: Ranks) -> Generator:
    """A Generator for `prompts`; `hf` shares the policy's module, `vllm` holds weights of its own.

    Raises InputError when the engine is not installed, or a prompt and its response exceed the backbone's window.
    """
    local = _local_generator(plan, backbone, prompts, device)
    if ranks.world_size == 1:
        return local
    return RankedGenerator(local, ranks, tensor_parallel=plan.config.rollout.tensor_parallel)


def _local_generator(plan: Plan, backbone: Backbone, prompts: Prompts, device: torch.device) -> Generator:
    config = plan.config
    if config.rollout.engine == "hf":
        from exgrpo_cli.engines.hf.generator import HFGenerator

        return HFGenerator(backbone.model, max_rows=config.rollout.max_rows, eos_ids=backbone.eos_ids)
    from exgrpo_cli.engines.vllm.generator import VLLMGenerator
    from exgrpo_cli.engines.vllm.proof import Canary
    from exgrpo_cli.engines.vllm.start import VLLMSettings, config_overrides

    folder = locate(config.backbone, config.tiny)
    settings = VLLMSettings(
        folder=folder,
        dtype=config.backbone.dtype,
        device=device.type,
        max_tokens=check_window(config, backbone, max(map(len, prompts.values()))),
        max_rows=config.rollout.max_rows,
        gpu_memory_fraction=plan.gpu_share,
        tensor_parallel=config.rollout.tensor_parallel,
        hf_overrides=config_overrides(
            folder,
            rope_theta=config.backbone.rope_theta,
            max_position_embeddings=config.backbone.max_position_embeddings,
        ),
    )
    canary = Canary.of_prompt(next(iter(prompts.values())), config.rollout.temperature)
    return VLLMGenerator(settings, eos_ids=backbone.eos_ids, canary=canary)


def open_store(
    config: Config, folder: RunFolder, questions: RunQuestions, backbone: Backbone, stack: ExitStack, step: int
) -> Store:
    """The experience store, new or as it stood after `step`; what its ledger holds of later steps is deleted.

    Where nothing is stored its ledger has the visits alone.
    """
    identity = LedgerIdentity(
        tokenizer_hash=tokenizer_hash(backbone.tokenizer),
        template=choose_run_template(config, backbone.tokenizer).name,
        group_size=config.rollout.group_size,
        questions_hash=questions.train_hash,
        logprob_source=config.rollout.logprobs,
    )
    question_ids = [question.id for question in questions.train]
    if (folder.replay / IDENTITY_FILE).exists():
        store = Store.open(
            folder.replay, identity=identity, rules=config.replay, question_ids=question_ids, at_step=step
        )
    else:
        store = Store.create(folder.replay, identity=identity, rules=config.replay, question_ids=question_ids)
    return stack.enter_context(store)


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 over vocabulary and special tokens: equal hashes mean equal token ids."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return hashlib.sha256(repr((vocabulary, sorted(tokenizer.all_special_ids))).encode()).hexdigest()
