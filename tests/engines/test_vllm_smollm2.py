"""The two engines on a real language model, in both precisions: how far apart they are, and that a fault shows."""

from pathlib import Path

import numpy as np
import pytest
import torch

from exgrpo_cli.base.errors import RunError
from exgrpo_cli.base.types import RolloutRequest, SamplingParams, TokenSequence
from exgrpo_cli.config.layers import build_config
from exgrpo_cli.config.sections.objective import ObjectiveSettings
from exgrpo_cli.config.sections.run import BackboneSettings, OptimSettings
from exgrpo_cli.engines.policy.adamw import torch_policy
from exgrpo_cli.models.load import load_folder
from exgrpo_cli.questions.made.word_problems import make_word_problems
from exgrpo_cli.questions.prompts import choose_template, encode
from exgrpo_cli.training.step.guards import MAX_MEAN_GAPS

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore:::vllm"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probs_agree_and_a_withheld_layer_is_seen(smollm2: Path, dtype: str) -> None:
    from exgrpo_cli.engines.vllm.generator import VLLMGenerator
    from exgrpo_cli.engines.vllm.proof import Canary
    from exgrpo_cli.engines.vllm.start import VLLMSettings

    backbone = load_folder(smollm2, torch.device("cpu"), BackboneSettings(dtype=dtype))
    policy = torch_policy(backbone.model, temperature=1.0, objective=ObjectiveSettings(), optim=OptimSettings())
    config = build_config(assignments=["word_problems.num_train=3", "word_problems.examples=0"])
    template = choose_template("chat", backbone.tokenizer)
    prompts = [
        encode(template, question, backbone.tokenizer) for question in make_word_problems(config.word_problems).train
    ]
    generator = VLLMGenerator(
        VLLMSettings(folder=smollm2, dtype=dtype, device="cpu", max_tokens=200, max_rows=8),
        eos_ids=backbone.eos_ids,
        canary=Canary.of_prompt(prompts[0], 1.0),
    )
    generator.sync(policy.named_weights(), 0, policy.score)
    requests = [
        RolloutRequest(question_id=str(index), prompt_ids=prompt, seeds=(2 * index, 2 * index + 1))
        for index, prompt in enumerate(prompts)
    ]
    groups = generator.generate(requests, SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=8))
    rollouts = [(prompt, rollout) for prompt, group in zip(prompts, groups, strict=True) for rollout in group]
    scores = policy.score([TokenSequence(prompt_ids=ids, response_ids=rollout.token_ids) for ids, rollout in rollouts])
    gaps = [
        np.abs(score.logprobs - rollout.engine_logprobs) for score, (_, rollout) in zip(scores, rollouts, strict=True)
    ]
    assert np.concatenate(gaps).mean() <= MAX_MEAN_GAPS[dtype]

    before = {name: weight.clone() for name, weight in policy.named_weights()}
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.01)
    withheld = "model.layers.29.self_attn.o_proj.weight"
    generator.transit = lambda weights: (
        (name, before[name] if name == withheld else weight) for name, weight in weights
    )
    with pytest.raises(RunError, match=r"weight '[a-z0-9_.]+' did not reach the rollout engine"):
        generator.sync(policy.named_weights(), 1, policy.score)
    generator.transit = iter
    generator.sync(policy.named_weights(), 1, policy.score)
    generator.close()
