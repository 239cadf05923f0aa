"""The loss and its diagnostics, by hand and against slow references."""

import math
from typing import Literal

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
from exgrpo_cli.base.errors import InputError
from exgrpo_cli.config.sections.objective import Aggregation, ObjectiveSettings, Surrogate

TOTALS = Denominators(policy=4.0, replayed=4.0, num_tokens=3, num_fresh_tokens=2)


def logs(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).log()


def wide(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_clipped_surrogate_by_hand() -> None:
    # A > 0: w 1.5 is cut to 1.3, w 0.5 is not; A < 0: w 0.5 is cut to 0.8, w 1.5 is not.
    settings = ObjectiveSettings(clip_low=0.2, clip_high=0.3)
    loss = clipped_surrogate(logs(1.5, 0.5, 0.5, 1.5, 1.1), wide(2, 2, -2, -2, 1), settings)
    torch.testing.assert_close(loss, wide(-2.6, -1.0, 1.6, 3.0, -1.1))


@pytest.mark.parametrize("replayed", [False, True])
def test_a_dual_clip_ends_what_a_negative_advantage_costs(replayed: bool) -> None:
    """c = 3. A = -2: w 2 costs 4, w 5 is cut to 3 and costs 6, without a gradient; A = 2: w 5 is cut at 1.3 as ever."""
    settings = ObjectiveSettings(clip_low=0.2, clip_high=0.3, dual_clip=3.0, replay_surrogate="clipped")
    log_ratio = torch.tensor([math.log(2), math.log(5), 800.0, math.log(5)], dtype=torch.float64, requires_grad=True)
    targets = TokenTargets(
        advantages=wide(-2, -2, -2, 2), behaviour_logprobs=wide(0, 0, 0, 0), replayed=torch.tensor([replayed] * 4)
    )
    loss = micro_batch_loss(log_ratio, wide(*[0] * 4), None, targets, clip=True, settings=settings, denominators=TOTALS)
    torch.testing.assert_close(loss, wide((4 + 6 + 6 - 2.6) / 4)[0])
    (grad,) = torch.autograd.grad(loss, log_ratio)
    torch.testing.assert_close(grad, wide(4 / 4, 0, 0, 0))
    found = objective_sums(log_ratio, wide(*[0] * 4), None, targets, clip=True, settings=settings).metrics()
    assert found["policy/clip_fraction_replay" if replayed else "policy/clip_fraction"] == 3 / 4
    for wrong in (1.0, -3.0, math.inf, math.nan):
        with pytest.raises(InputError, match="dual_clip"):
            ObjectiveSettings(dual_clip=wrong)


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
    counts = {
        "num_rollouts": 16,
        "num_replayed": 4,
        "max_response_tokens": 72,
        "num_tokens": 500,
        "num_fresh_tokens": 400,
    }
    constant = denominators(ObjectiveSettings(), **counts)
    assert (constant.policy, constant.num_tokens, constant.num_fresh_tokens) == (16 * 72, 500, 400)
    assert denominators(ObjectiveSettings(aggregation="token-mean"), **counts).policy == 500
    assert constant.replayed == constant.policy


@pytest.mark.parametrize(
    ("aggregation", "fresh", "replayed"),
    [
        # 12 fresh and 4 replayed rows of at most 72 tokens; 400 fresh tokens and 100 replayed ones.
        ("constant", 12 * 72, 4 * 72),
        ("token-mean", 400, 100),
    ],
)
def test_own_denominators_count_each_kind(aggregation: Aggregation, fresh: int, replayed: int) -> None:
    settings = ObjectiveSettings(aggregation=aggregation, replay_denominator="own")
    counts = {"num_rollouts": 16, "max_response_tokens": 72, "num_tokens": 500}
    own = denominators(settings, num_replayed=4, num_fresh_tokens=400, **counts)
    assert (own.policy, own.replayed) == (fresh, replayed)
    # A kind without rows divides its zero sum by one.
    assert denominators(settings, num_replayed=0, num_fresh_tokens=500, **counts).replayed == 1
    assert denominators(settings, num_replayed=16, num_fresh_tokens=0, **counts).policy == 1


def reference_gradient(surrogate: str, logprob: float, behaviour: float, advantage: float) -> float:
    """d term / d log pi of one replayed token, from the definitions in float64."""
    ratio = math.exp(logprob - behaviour)
    match surrogate:
        case "shaped":
            return -advantage * 0.1 * ratio / (ratio + 0.1) ** 2
        case "raw":
            return -advantage * ratio
        case "clipped":
            cut = ratio > 1.3 if advantage > 0 else ratio < 0.8
            return 0.0 if cut else -advantage * ratio
        case "likelihood":
            return -1.0
    raise ValueError(surrogate)


@pytest.mark.parametrize("denominator", ["joint", "own"])
@pytest.mark.parametrize("aggregation", ["constant", "token-mean"])
@pytest.mark.parametrize("surrogate", ["shaped", "raw", "clipped", "likelihood"])
def test_gradients_of_replayed_tokens(
    surrogate: Surrogate, aggregation: Aggregation, denominator: Literal["joint", "own"]
) -> None:
    """Three fresh rows and two replayed ones, a token each, c = 0.25, no row longer than 8 tokens."""
    settings = ObjectiveSettings(
        clip_low=0.2, clip_high=0.3, replay_surrogate=surrogate, replay_weight=0.25, aggregation=aggregation,
        replay_denominator=denominator,
    )  # fmt: skip
    logprobs = logs(0.5, 0.4, 0.3, 0.6, 0.1).requires_grad_()
    behaviour, advantages = logs(0.4, 0.4, 0.4, 0.4, 0.2), wide(1, -1, 0.5, 0.75, -0.25)
    replayed = torch.tensor([False, False, False, True, True])
    totals = denominators(
        settings, num_rollouts=5, num_replayed=2, max_response_tokens=8, num_tokens=5, num_fresh_tokens=3
    )
    targets = TokenTargets(advantages=advantages, behaviour_logprobs=behaviour, replayed=replayed)
    loss = micro_batch_loss(logprobs, wide(*[0] * 5), None, targets, clip=False, settings=settings, denominators=totals)
    (grad,) = torch.autograd.grad(loss, logprobs)
    rows = {"joint": (5, 5), "own": (3, 2)}[denominator]
    fresh, replay = (count * (8 if aggregation == "constant" else 1) for count in rows)
    expected = [
        # Fresh: -A w, w = 5/4, 1, 3/4.
        *(-a * w / fresh for a, w in ((1, 1.25), (-1, 1.0), (0.5, 0.75))),
        *(
            0.25 * reference_gradient(surrogate, math.log(p), math.log(past), a) / replay
            for p, past, a in ((0.6, 0.4, 0.75), (0.1, 0.2, -0.25))
        ),
    ]
    torch.testing.assert_close(grad, wide(*expected))


def test_likelihood_moves_a_token_without_advantage_too() -> None:
    logprobs = logs(0.5, 0.5).requires_grad_()
    targets = TokenTargets(
        advantages=wide(0, 0), behaviour_logprobs=logs(0.5, 1e-300), replayed=torch.tensor([False, True])
    )
    settings = ObjectiveSettings(replay_surrogate="likelihood", replay_weight=3.0)
    loss = micro_batch_loss(logprobs, wide(0, 0), None, targets, clip=False, settings=settings, denominators=TOTALS)
    (grad,) = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(grad, wide(0, -3 / 4))


def test_shaping_off_is_the_older_name_of_raw() -> None:
    assert ObjectiveSettings(shaping=False).surrogate == "raw"
    assert ObjectiveSettings().surrogate == "shaped"


def test_the_clip_fraction_of_replayed_tokens() -> None:
    # Ratio 2 with A > 0 is cut off; the fresh tokens' own fraction stays theirs.
    logprobs, entropies, targets = example()
    settings = ObjectiveSettings(replay_surrogate="clipped")
    metrics = objective_sums(logprobs, entropies, None, targets, clip=False, settings=settings).metrics()
    assert metrics["policy/clip_fraction_replay"] == 1.0
    assert "policy/clip_fraction" not in metrics


def test_diagnostics_by_hand() -> None:
    logprobs, entropies, targets = example()
    sums = objective_sums(logprobs, entropies, None, targets, clip=True, settings=ObjectiveSettings())
    # A second micro-batch: one replayed token of ratio 1, one fresh one of ratio 1.
    sums = sums + ObjectiveSums.of_tokens(
        log_ratio=wide(0, 0), entropies=wide(0.1, 0.5), advantages=wide(1, 1),
        replayed=torch.tensor([True, False]), clip_bounds=(0.8, 1.2, math.inf), divergence=None,
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
