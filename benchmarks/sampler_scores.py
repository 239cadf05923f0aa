"""How far the sampler's log-probs and entropies lie from the trainer's, and both from float64.

    python benchmarks/sampler_scores.py                      # the default run's backbone and questions, 32 x 8 rollouts
    python benchmarks/sampler_scores.py --set rollout.temperature=0.7 --json

`sampler` is what the hf engine computed while it sampled, `trainer` what the policy computes of the finished rollouts,
`trainer, other micro-batches` the same in pieces of a quarter, `float64` the model in double precision, one rollout at
a time. Absolute differences of log-probs and of entropies over all response tokens, in nats.
"""

import argparse
import copy
import json
from dataclasses import replace

import numpy as np
import torch

from exgrpo_cli.base.types import RolloutRequest, SamplingParams, TokenScores, TokenSequence, rollout_seed
from exgrpo_cli.config.layers import build_config
from exgrpo_cli.engines.hf.generator import HFGenerator
from exgrpo_cli.engines.policy.adamw import torch_policy
from exgrpo_cli.models.load import load_folder, locate
from exgrpo_cli.questions.made.sums import make_arithmetic
from exgrpo_cli.questions.prompts import choose_template, encode


def in_float64(model: torch.nn.Module, rows: list[TokenSequence], temperature: float) -> list[TokenScores]:
    """Log-probs and entropies of softmax(logits / T), each row by itself."""
    precise, scores = copy.deepcopy(model).double(), []
    for row in rows:
        ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids])).long()
        with torch.no_grad():
            logits = precise(input_ids=ids[None]).logits[0, len(row.prompt_ids) - 1 : -1] / temperature
        logprobs = torch.log_softmax(logits, -1)
        chosen = logprobs.gather(-1, ids[len(row.prompt_ids) :, None])[:, 0]
        scores.append(TokenScores(logprobs=chosen.numpy(), entropies=-(logprobs.exp() * logprobs).sum(-1).numpy()))
    return scores


def difference(first: list[TokenScores], second: list[TokenScores]) -> dict[str, float]:
    """Mean and largest, of log-probs and entropies."""
    values: dict[str, float] = {}
    for name in ("logprobs", "entropies"):
        pairs = zip(first, second, strict=True)
        gap = np.concatenate([np.abs(getattr(a, name) - getattr(b, name).astype(np.float64)) for a, b in pairs])
        values |= {f"{name}_mean": float(gap.mean()), f"{name}_max": float(gap.max())}
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", help="a preset, asked the questions of the default run in its own template")
    parser.add_argument("--set", action="append", default=[], dest="assignments", metavar="SECTION.KEY=VALUE")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    config = build_config(backbone=arguments.backbone, assignments=arguments.assignments)
    torch.set_num_threads(1)
    backbone = load_folder(locate(config.backbone, config.tiny), torch.device("cpu"), config.backbone)
    template = choose_template(config.data.template, backbone.tokenizer)
    rollout = config.rollout
    requests = [
        RolloutRequest(
            question_id=question.id,
            prompt_ids=encode(template, question, backbone.tokenizer),
            seeds=tuple(rollout_seed(config.run.seed, question.id, 0, k) for k in range(rollout.group_size)),
        )
        for question in make_arithmetic(config.arithmetic).train[: rollout.questions_per_step]
    ]
    sampling = SamplingParams(
        temperature=rollout.temperature, top_p=1.0, max_new_tokens=rollout.max_response_tokens, entropies=True
    )
    generator = HFGenerator(backbone.model, max_rows=rollout.max_rows, eos_ids=backbone.eos_ids)
    rows, own = [], []
    for request, group in zip(requests, generator.generate(requests, sampling), strict=True):
        for member in group:
            assert member.engine_entropies is not None
            rows.append(TokenSequence(prompt_ids=request.prompt_ids, response_ids=member.token_ids))
            own.append(TokenScores(logprobs=member.engine_logprobs, entropies=member.engine_entropies))

    def scored(microbatch_tokens: int) -> list[TokenScores]:
        optim = replace(config.optim, microbatch_tokens=microbatch_tokens)
        model = copy.deepcopy(backbone.model)
        policy = torch_policy(model, temperature=rollout.temperature, objective=config.objective, optim=optim)
        return policy.score(rows)

    trainer, other = scored(config.optim.microbatch_tokens), scored(config.optim.microbatch_tokens // 4)
    exact = in_float64(backbone.model, rows, rollout.temperature)
    pairs = {
        "sampler, trainer": (own, trainer),
        "trainer, other micro-batches": (trainer, other),
        "sampler, float64": (own, exact),
        "trainer, float64": (trainer, exact),
    }
    values = {name: difference(*pair) for name, pair in pairs.items()}
    if arguments.json:
        print(json.dumps(values))
        return
    print(f"{sum(len(row.response_ids) for row in rows)} tokens; mean and largest difference")
    print(f"{'':30}{'log-probs':>20}{'entropies':>20}")
    for name, value in values.items():
        figures = (f"{value[f'{of}_mean']:.1e} {value[f'{of}_max']:.1e}" for of in ("logprobs", "entropies"))
        print(f"{name:30}" + "".join(f"{each:>20}" for each in figures))


if __name__ == "__main__":
    main()
