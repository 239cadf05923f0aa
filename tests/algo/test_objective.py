"""The loss and its diagnostics, by hand and against slow references."""

import math

import pytest
import torch
from torch import Tensor

from exgrpo_cli.algo.diagnostics import ObjectiveSums
from exgrpo_cli.algo.objective import (
    Denominators,
    TokenTargets,
    clipped_surrogate,
    denominators,
    k3_divergence,
    micro_batch_loss,
    objective_sums,
    shaped_surrogate,
    unclipped_surrogate,
)
from exgrpo_cli.config.sections.objective import ObjectiveSettings

TOTALS = Denominators(policy=4.0, num_tokens=3, num_fresh_tokens=2)


def logs(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).log()


def wide(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_clipped_surrogate_by_hand() -> None:
    # A > 0: w 1.5 is cut to 1.3, w 0.5 is not; A < 0: w 0.5 is cut to 0.8, w 1.5 is not.
    loss = clipped_surrogate(logs(1.5, 0.5, 0.5, 1.5, 1.1), wide(2, 2, -2, -2, 1), 0.2, 0.3)
    torch.testing.assert_close(loss, wide(-2.6, -1.0, 1.6, 3.0, -1.1))


def test_unclipped_surrogate_by_hand() -> None:
    torch.testing.assert_close(unclipped_surrogate(logs(1.5, 0.5), wide(2, -2)), wide(-3.0, 1.0))


def test_shaped_surrogate_by_hand() -> None:
    # f(1) = 1 / 1.1, f(0.1) = 1/2, f(10) = 10 / 10.1.
    torch.testing.assert_close(
        shaped_surrogate(logs(1.0, 0.1, 10.0), wide(1, -2, 1), 0.1), wide(-1 / 1.1, 1.0, -10 / 10.1)
    )


@pytest.mark.parametrize(("ratio", "weight"), [(1.0, 0.1 / 1.21), (0.1, 0.25), (20.0, 2 / 20.1**2)])
def test_gradient_weight_of_shaping_is_beta_w_over_square(ratio: float, weight: float) -> None:
    log_ratio = logs(ratio).requires_grad_()
    shaped_surrogate(log_ratio, wide(1), 0.1).sum().backward()
    torch.testing.assert_close(log_ratio.grad, wide(-weight))


def test_shaping_survives_ratios_where_the_quotient_is_nan() -> None:
    log_ratio = torch.tensor([200.0, -200.0], requires_grad=True)
    assert (log_ratio.exp() / (log_ratio.exp() + 0.1))[0].isnan()
    loss = shaped_surrogate(log_ratio, torch.ones(2), 0.1)
    loss.sum().backward()
    assert loss.tolist() == [-1.0, 0.0]
    assert log_ratio.grad is not None and log_ratio.grad.tolist() == [0.0, 0.0]


def test_k3_divergence_by_hand() -> None:
    # r = 2: 2 - log 2 - 1; r = 1: 0.
    torch.testing.assert_close(k3_divergence(logs(0.25, 0.5), logs(0.5, 0.5)), wide(1 - math.log(2), 0.0))


def example(replayed: tuple[bool, ...] = (False, False, True)) -> tuple[Tensor, Tensor, TokenTargets]:
    """Ratios 1.5, 0.5 and 2 with advantages 1, -1 and 0.5."""
    logprobs = logs(0.6, 0.1, 0.8).requires_grad_()
    targets = TokenTargets(
        advantages=wide(1, -1, 0.5), behaviour_logprobs=logs(0.4, 0.2, 0.4), replayed=torch.tensor(replayed)
    )
    return logprobs, wide(0.3, 0.2, 0.4).requires_grad_(), targets


@pytest.mark.parametrize(
    ("clip", "shaping", "expected"),
    [
        (False, True, -1.5 + 0.5 - 0.5 * 2 / 2.1),
        (True, True, -1.2 + 0.8 - 0.5 * 2 / 2.1),
        (False, False, -1.5 + 0.5 - 1.0),
        # Clipping never touches replayed tokens, shaped or not.
        (True, False, -1.2 + 0.8 - 1.0),
    ],
)
def test_each_token_takes_the_equation_of_its_kind(clip: bool, shaping: bool, expected: float) -> None:
    logprobs, entropies, targets = example()
    loss = micro_batch_loss(
        logprobs, entropies, None, targets, clip=clip, settings=ObjectiveSettings(shaping=shaping), denominators=TOTALS
    )
    torch.testing.assert_close(loss, wide(expected / 4)[0])


def test_loss_scale_multiplies_the_policy_term_only() -> None:
    logprobs, entropies, targets = example()
    reference_logprobs = logs(0.3, 0.1, 0.1)
    settings = ObjectiveSettings(loss_scale=64.0, entropy_coefficient=0.001, kl_coefficient=0.01)
    loss = micro_batch_loss(
        logprobs, entropies, reference_logprobs, targets, clip=False, settings=settings, denominators=TOTALS
    )
    policy = (-1.5 + 0.5 - 0.5 * 2 / 2.1) / 4
    # The replayed token's reference probability differs 8-fold, and must not count.
    divergence = (0.5 - math.log(0.5) - 1) / 2
    torch.testing.assert_close(loss, wide(64 * policy - 0.001 * 0.9 / 3 + 0.01 * divergence)[0])
    (grad,) = torch.autograd.grad(loss, entropies)
    torch.testing.assert_close(grad, torch.full((3,), -0.001 / 3, dtype=torch.float64))


def test_kl_gradient_of_a_replayed_token_is_zero() -> None:
    logprobs, entropies, _ = example()
    targets = TokenTargets(
        advantages=wide(0, 0, 0), behaviour_logprobs=logprobs.detach(), replayed=torch.tensor([False, True, True])
    )
    loss = micro_batch_loss(
        logprobs, entropies, logs(0.3, 0.9, 0.2), targets, clip=False,
        settings=ObjectiveSettings(kl_coefficient=1.0), denominators=TOTALS,
    )  # fmt: skip
    (grad,) = torch.autograd.grad(loss, logprobs)
    # d k3 / d log pi = 1 - r = 1 - 0.3 / 0.6.
    torch.testing.assert_close(grad, wide(0.5 / 2, 0, 0))


def test_overflow_of_one_kind_does_not_reach_the_gradient_of_the_other() -> None:
    logprobs = torch.zeros(3, requires_grad=True)
    targets = TokenTargets(
        advantages=torch.tensor([1.0, 1.0, 0.0]),
        # Log-ratios 0 (fresh), 500 (replayed: shaping saturates) and 500 (fresh, without advantage).
        behaviour_logprobs=torch.tensor([0.0, -500.0, -500.0]),
        replayed=torch.tensor([False, True, False]),
    )
    loss = micro_batch_loss(
        logprobs, torch.ones(3), None, targets, clip=False, settings=ObjectiveSettings(), denominators=TOTALS
    )
    loss.backward()
    assert loss.item() == -2 / 4
    assert logprobs.grad is not None and logprobs.grad.tolist() == [-1 / 4, 0.0, 0.0]


def test_on_policy_gradient_is_reinforce() -> None:
    # At w = 1, clipped or not, the gradient of a fresh token is -A / (N * max length).
    for clip in (True, False):
        logprobs = logs(0.2, 0.7).requires_grad_()
        targets = TokenTargets(
            advantages=wide(0.75, -0.25), behaviour_logprobs=logprobs.detach(), replayed=torch.tensor([False, False])
        )
        loss = micro_batch_loss(
            logprobs, wide(0, 0), None, targets, clip=clip, settings=ObjectiveSettings(), denominators=TOTALS
        )
        (grad,) = torch.autograd.grad(loss, logprobs)
        torch.testing.assert_close(grad, wide(-0.75 / 4, 0.25 / 4))


def test_denominators() -> None:
    counts = {"num_rollouts": 16, "max_response_tokens": 72, "num_tokens": 500, "num_fresh_tokens": 400}
    constant = denominators(ObjectiveSettings(), **counts)
    assert (constant.policy, constant.num_tokens, constant.num_fresh_tokens) == (16 * 72, 500, 400)
    assert denominators(ObjectiveSettings(aggregation="token-mean"), **counts).policy == 500


def test_diagnostics_by_hand() -> None:
    logprobs, entropies, targets = example()
    sums = objective_sums(logprobs, entropies, None, targets, clip=True, settings=ObjectiveSettings())
    # A second micro-batch: one replayed token of ratio 1, one fresh one of ratio 1.
    sums = sums + ObjectiveSums.of_tokens(
        log_ratio=wide(0, 0), entropies=wide(0.1, 0.5), advantages=wide(1, 1),
        replayed=torch.tensor([True, False]), clip_bounds=(0.8, 1.2), divergence=None,
    )  # fmt: skip
    metrics = sums.metrics()
    expected = {
        "policy/entropy": (0.3 + 0.2 + 0.4 + 0.1 + 0.5) / 5,
        "policy/ratio_fresh": (1.5 + 0.5 + 1) / 3,
        "policy/ratio_fresh_max": 1.5,
        # w 1.5 with A > 0 and w 0.5 with A < 0 are both cut off.
        "policy/clip_fraction": 2 / 3,
        "policy/ratio_replay": 1.5,
        "policy/ratio_replay_max": 2.0,
        "replay/ess": (2 + 1) ** 2 / (2 * (4 + 1)),
    }
    assert metrics == pytest.approx(expected, rel=1e-12)


def test_diagnostics_without_a_meaning_are_absent() -> None:
    logprobs, entropies, targets = example(replayed=(False, False, False))
    sums = objective_sums(logprobs, entropies, None, targets, clip=False, settings=ObjectiveSettings())
    assert set(sums.metrics()) == {"policy/entropy", "policy/ratio_fresh", "policy/ratio_fresh_max"}
