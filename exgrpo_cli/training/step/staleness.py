"""Whether the rollouts of a step were sampled by the policy that trains on them: a missed sync stops the run."""

from collections.abc import Mapping, Sequence

from exgrpo_cli.base.errors import RunError
from exgrpo_cli.training.step.groups import Group

MAX_MEAN_GAPS = {"float32": 1e-3, "bfloat16": 0.05}
"""Largest mean |log pi_trainer - log pi_engine| over the fresh tokens of a step.

Rounding alone gave 1e-6 in float32, and in bfloat16 0.005, or 0.017 of a model with large key biases; a missed sync of
the tiny backbone 0.125."""


def require_current_weights(groups: Sequence[Group], weight_version: int) -> None:
    """Raise RunError for a rollout that was sampled with other weights than version `weight_version`."""
    for group in groups:
        for member in group.fresh:
            if member.rollout.weight_version != weight_version:
                raise RunError(
                    f"a rollout of question {group.question.id} was sampled with version "
                    f"{member.rollout.weight_version} of the weights, the policy has version {weight_version}: the "
                    "rollout engine missed a sync. Go on with --resume, which hands it the weights again."
                )


def require_small_gap(metrics: Mapping[str, float | int], dtype: str, *, num_checked: int) -> None:
    """Raise RunError where log-probs or entropies of engine and trainer differ by more than rounding in `dtype`.

    `num_checked` rollouts were scored by both: none where all that a step asks for is replayed. Entropies are there
    where the engine tells them.
    """
    measured = "policy/logprob_gap_mean" in metrics
    assert measured or not num_checked, f"{num_checked} rollouts were scored twice, and no gap was measured"
    bound = MAX_MEAN_GAPS[dtype]
    for name, what in (("policy/logprob_gap_mean", "log-probs"), ("policy/entropy_gap_mean", "entropies")):
        if name in metrics and not metrics[name] <= bound:
            raise RunError(
                f"the rollout engine's {what} differ from the trainer's by {metrics[name]:.3g} a token, bound "
                f"{bound:g} in {dtype}: it sampled with other weights, or computes the model otherwise. Go on with "
                "--resume, which hands it the weights again; if it comes back, use another rollout.engine."
            )
