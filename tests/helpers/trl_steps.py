"""A training in real TRL by docs/trl_replay.py, then exgrpo's own of the same rollouts and weights; losses as JSON.

python tests/helpers/trl_steps.py BACKBONE FOLDER METHOD SETTING...
"""

import json
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig

from exgrpo_cli.base.reporter import SilentReporter
from exgrpo_cli.config.layers import build_config
from exgrpo_cli.engines.policy.adamw import torch_policy
from exgrpo_cli.grading.pool import GradingPool
from exgrpo_cli.grading.routes import GradingItem
from exgrpo_cli.questions.prompts import answer_format
from exgrpo_cli.training import run, setup
from exgrpo_cli.training.questions import load_questions

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))
from trl_replay import ReplayTrainer

backbone, folder, method, *chosen = sys.argv[1:]
config = build_config(method=method, assignments=[*chosen, f"backbone.source={backbone}", "rollout.logprobs=trainer"])
questions = load_questions(config, SilentReporter()).train
tokenizer = AutoTokenizer.from_pretrained(backbone)
template = setup.choose_run_template(config, tokenizer)
form = answer_format(template, require_eos=config.rollout.require_eos)
groups, weights, updates = [], [], []
"""Of each step its groups by question; of each update the weights before it, its loss and its replayed rows."""


def copied(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


class Told(ReplayTrainer):
    """Keeps what it samples, and the weights and the loss of every update."""

    def roll_out(self, *asked):
        made = super().roll_out(*asked)
        groups.append({group.question.id: group for group in made})
        return made

    def _compute_loss(self, model, inputs):
        weights.append(copied(model))
        loss = super()._compute_loss(model, inputs)
        updates.append((float(loss.detach()), inputs["minibatch"].num_replayed))
        return loss


class Ending(TrainerCallback):
    """Ends the training with the last update of a step; a step may have more than M."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = trainer.num_steps == config.run.steps and not trainer.waiting


def reward(completions: Any, answer: list[str], **_: Any) -> list[float]:
    texts = [completion[0]["content"] for completion in completions]
    item = partial(GradingItem, finished=True, answer_format=form)
    items = [item(gold=gold, response=text) for gold, text in zip(answer, texts, strict=True)]
    return [verdict.reward for verdict in pool.grade(items)]


class Given:
    """A generator of the rollouts that TRL has sampled, and a policy with the weights that it had."""

    def __init__(self, policy: Any) -> None:
        self.policy, self.weight_version, self.step, self.updates = policy, 0, 0, []
        self.score_now, self.update_now = policy.score, policy.update
        policy.score, policy.update = self.score, self.update

    def follow(self) -> None:
        self.policy.model.load_state_dict(weights[len(self.updates)])

    def score(self, sequences: Any) -> Any:
        self.follow()
        return self.score_now(sequences)

    def update(self, minibatch: Any) -> Any:
        self.follow()
        report = self.update_now(minibatch)
        self.updates.append((report.loss, minibatch.num_replayed))
        return report

    def generate(self, requests: Any, params: Any, on_finished: Any = None, enough: Any = None) -> Any:
        made = []
        for at, request in enumerate(requests):
            group = groups[self.step][request.question_id]
            assert group.prompt_ids.tolist() == request.prompt_ids.tolist()
            assert len(group.fresh) == len(request.seeds), "as many stored rows stand in"
            pairs = zip(group.fresh, group.scores, strict=True)
            made.append(
                [
                    replace(own.rollout, engine_logprobs=scores.logprobs, weight_version=self.weight_version)
                    for own, scores in pairs
                ]
            )
            for rollout in made[-1]:
                on_finished(at, rollout)
        self.step += 1
        return made

    def sync(self, named: Any, version: int, *_: Any) -> None:
        self.weight_version = version

    def close(self) -> None: ...

    sleep = wake = close


rollout = config.rollout
plain = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "disable_tqdm": True}
plain |= {"report_to": "none", "save_strategy": "no"}
torch.set_num_threads(1)
with GradingPool(config.grading) as pool:
    trainer = Told(
        config=config,
        ledger=Path(folder) / "trl",
        model=AutoModelForCausalLM.from_pretrained(backbone, dtype=torch.float32),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=folder,
            learning_rate=config.optim.learning_rate,
            max_steps=1000,
            per_device_train_batch_size=rollout.questions_per_step * rollout.group_size // config.optim.minibatches,
            steps_per_generation=config.optim.minibatches,
            gradient_accumulation_steps=1,
            num_generations=rollout.group_size,
            max_completion_length=rollout.max_response_tokens,
            temperature=rollout.temperature,
            seed=config.run.seed,
            beta=0.0,
            **plain,
        ),
        train_dataset=Dataset.from_list([{**asdict(each), "question_id": each.id} for each in questions]),
        processing_class=tokenizer,
    )
    trainer.add_callback(Ending())
    trainer.train()
    trainer.store.close()

policy = torch_policy(
    AutoModelForCausalLM.from_pretrained(backbone, dtype=torch.float32, attn_implementation="sdpa"),
    temperature=rollout.temperature,
    objective=config.objective,
    optim=config.optim,
)
given = Given(policy)
setup.make_engines = lambda *_: (policy, given)
run.train(config, Path(folder) / "own", reporter=SilentReporter())
print(json.dumps({"trl": updates, "own": given.updates}))
