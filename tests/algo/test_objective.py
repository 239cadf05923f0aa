"""The loss and its diagnostics, by hand and against slow references."""

import math
from typing import Any, Literal

import numpy as np
import pytest
import torch
from small_policy import masked_one_by_one
from torch import Tensor

from exgrpo_cli.algo import batching, objective
from exgrpo_cli.base import errors, types
from exgrpo_cli.config.sections import check
from exgrpo_cli.config.sections.objective import Aggregation, ObjectiveSettings, Surrogate

TOTALS = objective.Denominators(policy=4.0, replayed=4.0, num_tokens=3, num_fresh_tokens=2)


def logs(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).log()


def wide(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def targets_of(advantages: Tensor, behaviour: Tensor, *replayed: bool) -> objective.TokenTargets:
    return objective.TokenTargets(
        advantages=advantages, behaviour_logprobs=behaviour.detach(), replayed=torch.tensor(list(replayed))
    )


def loss_of(
    logprobs: Tensor,
    targets: objective.TokenTargets,
    *,
    entropies: Tensor | None = None,
    reference: Tensor | None = None,
    clip: bool = False,
    totals: objective.Denominators = TOTALS,
    **settings: Any,
) -> Tensor:
    entropies = torch.zeros_like(logprobs) if entropies is None else entropies
    return objective.micro_batch_loss(
        logprobs, entropies, reference, targets, clip=clip, settings=ObjectiveSettings(**settings), denominators=totals
    )


def gradient(loss: Tensor, of: Tensor) -> Tensor:
    return torch.autograd.grad(loss, of)[0]


def test_surrogates_by_hand() -> None:
    # A > 0: w 1.5 is cut to 1.3, w 0.5 is not; A < 0: w 0.5 is cut to 0.8, w 1.5 is not.
    settings = ObjectiveSettings(clip_low=0.2, clip_high=0.3)
    loss = objective.clipped_surrogate(logs(1.5, 0.5, 0.5, 1.5, 1.1), wide(2, 2, -2, -2, 1), settings)
    torch.testing.assert_close(loss, wide(-2.6, -1.0, 1.6, 3.0, -1.1))
    torch.testing.assert_close(objective.unclipped_surrogate(logs(1.5, 0.5), wide(2, -2)), wide(-3.0, 1.0))
    # f(1) = 1 / 1.1, f(0.1) = 1/2, f(10) = 10 / 10.1.
    shaped = objective.shaped_surrogate(logs(1.0, 0.1, 10.0), wide(1, -2, 1), 0.1)
    torch.testing.assert_close(shaped, wide(-1 / 1.1, 1.0, -10 / 10.1))
    # r = 2: 2 - log 2 - 1; r = 1: 0.
    torch.testing.assert_close(objective.k3_divergence(logs(0.25, 0.5), logs(0.5, 0.5)), wide(1 - math.log(2), 0.0))


@pytest.mark.parametrize("replayed", [False, True])
def test_a_dual_clip_ends_what_a_negative_advantage_costs(replayed: bool) -> None:
    """c = 3. A = -2: w 2 costs 4, w 5 is cut to 3 and costs 6, without a gradient; A = 2: w 5 is cut at 1.3 as ever."""
    bounds = {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 3.0, "replay_surrogate": "clipped"}
    log_ratio = torch.tensor([math.log(2), math.log(5), 800.0, math.log(5)], dtype=torch.float64, requires_grad=True)
    targets = targets_of(wide(-2, -2, -2, 2), wide(0, 0, 0, 0), *[replayed] * 4)
    loss = loss_of(log_ratio, targets, clip=True, **bounds)
    torch.testing.assert_close(loss, wide((4 + 6 + 6 - 2.6) / 4)[0])
    torch.testing.assert_close(gradient(loss, log_ratio), wide(4 / 4, 0, 0, 0))
    settings = ObjectiveSettings(**bounds)
    found = objective.objective_sums(log_ratio, wide(*[0] * 4), None, targets, clip=True, settings=settings).metrics()
    assert found["policy/clip_fraction_replay" if replayed else "policy/clip_fraction"] == 3 / 4
    for wrong in (1.0, -3.0, math.inf, math.nan):
        with pytest.raises(errors.InputError, match="dual_clip"):
            check("objective", ObjectiveSettings(dual_clip=wrong))


def test_the_largest_ratios_are_masked_until_the_second_moment_is_low() -> None:
    """Of those that a clip could act on: .01, .04 and .09 have mean .047; without .09 it is .025."""
    log_ratio, advantages = np.array([0.1, -0.2, 0.3, -2.0, 1.5, 5.0]), np.array([1.0, -1, 2, 1, -1, 0])
    kept = [True, True, False, True, True, True]
    assert objective.second_moment_mask(log_ratio, advantages, 0.04).tolist() == kept
    assert objective.second_moment_mask(log_ratio, advantages, 0.14 / 3 + 1e-12).all()
    assert objective.second_moment_mask(log_ratio, advantages, 0.009).tolist() == [False, False, *kept[2:]]
    # Mean (.03 + .18) / 5: one of the two equal ones would do, both go.
    equal = np.array([0.1, 0.3, 0.1, 0.3, 0.1])
    assert objective.second_moment_mask(equal, np.ones(5), 0.04).tolist() == [True, False, True, False, True]
    assert objective.second_moment_mask(equal, np.zeros(5), 0.04).all()
    rng = np.random.default_rng(0)
    for most in (1e-4, 0.04, 0.3, 9.0):
        log_ratio, advantages, order = rng.normal(0, 0.5, 300), rng.normal(size=300), rng.permutation(300)
        kept = masked_one_by_one(log_ratio, advantages, most)
        assert objective.second_moment_mask(log_ratio, advantages, most).tolist() == kept.tolist()
        assert objective.second_moment_mask(log_ratio[order], advantages[order], most).tolist() == kept[order].tolist()


@pytest.mark.parametrize(("ratio", "weight"), [(1.0, 0.1 / 1.21), (0.1, 0.25), (20.0, 2 / 20.1**2)])
def test_gradient_weight_of_shaping_is_beta_w_over_square(ratio: float, weight: float) -> None:
    log_ratio = logs(ratio).requires_grad_()
    torch.testing.assert_close(
        gradient(objective.shaped_surrogate(log_ratio, wide(1), 0.1).sum(), log_ratio), wide(-weight)
    )


def test_shaping_survives_ratios_where_the_quotient_is_nan() -> None:
    log_ratio = torch.tensor([200.0, -200.0], requires_grad=True)
    assert (log_ratio.exp() / (log_ratio.exp() + 0.1))[0].isnan()
    loss = objective.shaped_surrogate(log_ratio, torch.ones(2), 0.1)
    assert loss.tolist() == [-1.0, 0.0] and gradient(loss.sum(), log_ratio).tolist() == [0.0, 0.0]


def example(*replayed: bool) -> tuple[Tensor, Tensor, objective.TokenTargets]:
    """Ratios 1.5, 0.5 and 2 with advantages 1, -1 and 0.5; the last one replayed where nothing is said."""
    targets = targets_of(wide(1, -1, 0.5), logs(0.4, 0.2, 0.4), *(replayed or (False, False, True)))
    return logs(0.6, 0.1, 0.8).requires_grad_(), wide(0.3, 0.2, 0.4).requires_grad_(), targets


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
    logprobs, _, targets = example()
    torch.testing.assert_close(loss_of(logprobs, targets, clip=clip, shaping=shaping), wide(expected / 4)[0])


def test_loss_scale_multiplies_the_policy_term_only() -> None:
    logprobs, entropies, targets = example()
    scales = {"loss_scale": 64.0, "entropy_coefficient": 0.001, "kl_coefficient": 0.01}
    loss = loss_of(logprobs, targets, entropies=entropies, reference=logs(0.3, 0.1, 0.1), **scales)
    policy = (-1.5 + 0.5 - 0.5 * 2 / 2.1) / 4
    # The replayed token's reference probability differs 8-fold, and must not count.
    divergence = (0.5 - math.log(0.5) - 1) / 2
    torch.testing.assert_close(loss, wide(64 * policy - 0.001 * 0.9 / 3 + 0.01 * divergence)[0])
    torch.testing.assert_close(gradient(loss, entropies), torch.full((3,), -0.001 / 3, dtype=torch.float64))


def test_kl_gradient_of_a_replayed_token_is_zero() -> None:
    logprobs, _, _ = example()
    targets = targets_of(wide(0, 0, 0), logprobs, False, True, True)
    loss = loss_of(logprobs, targets, reference=logs(0.3, 0.9, 0.2), kl_coefficient=1.0)
    # d k3 / d log pi = 1 - r = 1 - 0.3 / 0.6.
    torch.testing.assert_close(gradient(loss, logprobs), wide(0.5 / 2, 0, 0))


def test_overflow_of_one_kind_does_not_reach_the_gradient_of_the_other() -> None:
    logprobs = torch.zeros(3, requires_grad=True)
    # Log-ratios 0 (fresh), 500 (replayed: shaping saturates) and 500 (fresh, without advantage).
    targets = targets_of(torch.tensor([1.0, 1.0, 0.0]), torch.tensor([0.0, -500.0, -500.0]), False, True, False)
    loss = loss_of(logprobs, targets)
    assert loss.item() == -2 / 4 and gradient(loss, logprobs).tolist() == [-1 / 4, 0.0, 0.0]


@pytest.mark.parametrize("clip", [True, False])
def test_on_policy_gradient_is_reinforce(clip: bool) -> None:
    # At w = 1, clipped or not, the gradient of a fresh token is -A / (N * max length).
    logprobs = logs(0.2, 0.7).requires_grad_()
    loss = loss_of(logprobs, targets_of(wide(0.75, -0.25), logprobs, False, False), clip=clip)
    torch.testing.assert_close(gradient(loss, logprobs), wide(-0.75 / 4, 0.25 / 4))


def batch_of(fresh: list[int], replayed: list[int], limit: int) -> batching.MiniBatch:
    """Rows of so many tokens."""
    rows = tuple(
        batching.TrainingRow(
            sequence=types.TokenSequence(prompt_ids=np.zeros(1, np.int32), response_ids=np.zeros(length, np.int32)),
            advantage=1.0,
            behaviour_logprobs=np.zeros(length, np.float32),
            replayed=index >= len(fresh),
        )
        for index, length in enumerate([*fresh, *replayed])
    )
    return batching.MiniBatch(rows=rows, num_rollouts=len(rows), max_response_tokens=limit, clip=False)


@pytest.mark.parametrize(
    ("aggregation", "joint", "fresh", "replayed"),
    [
        # 12 fresh and 4 replayed rows of at most 72 tokens; 400 fresh tokens and 100 replayed ones.
        ("constant", 16 * 72, 12 * 72, 4 * 72),
        ("token-mean", 500, 400, 100),
    ],
)
def test_denominators(aggregation: Aggregation, joint: int, fresh: int, replayed: int) -> None:
    batch = batch_of([30] * 8 + [40] * 4, [25] * 4, 72)
    both = objective.denominators(ObjectiveSettings(aggregation=aggregation), batch)
    assert (both.policy, both.replayed, both.num_tokens, both.num_fresh_tokens) == (joint, joint, 500, 400)
    settings = ObjectiveSettings(aggregation=aggregation, replay_denominator="own")
    own = objective.denominators(settings, batch)
    assert (own.policy, own.replayed) == (fresh, replayed)
    # A kind without rows divides its zero sum by one.
    assert objective.denominators(settings, batch_of([30], [], 72)).replayed == 1
    assert objective.denominators(settings, batch_of([], [30], 72)).policy == 1


def reference_gradient(surrogate: str, logprob: float, behaviour: float, advantage: float) -> float:
    """d term / d log pi of one replayed token, from the definitions in float64."""
    ratio = math.exp(logprob - behaviour)
    cut = ratio > 1.3 if advantage > 0 else ratio < 0.8
    return {
        "shaped": -advantage * 0.1 * ratio / (ratio + 0.1) ** 2, "raw": -advantage * ratio,
        "clipped": 0.0 if cut else -advantage * ratio, "likelihood": -1.0,
    }[surrogate]  # fmt: skip


@pytest.mark.parametrize("denominator", ["joint", "own"])
@pytest.mark.parametrize("aggregation", ["constant", "token-mean"])
@pytest.mark.parametrize("surrogate", ["shaped", "raw", "clipped", "likelihood"])
def test_gradients_of_replayed_tokens(
    surrogate: Surrogate, aggregation: Aggregation, denominator: Literal["joint", "own"]
) -> None:
    """Three fresh rows and two replayed ones, a token each, c = 0.25, no row longer than 8 tokens."""
    chosen = {
        "clip_low": 0.2, "clip_high": 0.3, "replay_surrogate": surrogate, "replay_weight": 0.25,
        "aggregation": aggregation, "replay_denominator": denominator,
    }  # fmt: skip
    logprobs, behaviour = logs(0.5, 0.4, 0.3, 0.6, 0.1).requires_grad_(), logs(0.4, 0.4, 0.4, 0.4, 0.2)
    totals = objective.denominators(ObjectiveSettings(**chosen), batch_of([1, 1, 1], [1, 1], 8))
    targets = targets_of(wide(1, -1, 0.5, 0.75, -0.25), behaviour, False, False, False, True, True)
    loss = loss_of(logprobs, targets, totals=totals, **chosen)
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
    torch.testing.assert_close(gradient(loss, logprobs), wide(*expected))


def test_likelihood_moves_a_token_without_advantage_too() -> None:
    logprobs = logs(0.5, 0.5).requires_grad_()
    targets = targets_of(wide(0, 0), logs(0.5, 1e-300), False, True)
    loss = loss_of(logprobs, targets, replay_surrogate="likelihood", replay_weight=3.0)
    torch.testing.assert_close(gradient(loss, logprobs), wide(0, -3 / 4))


def test_shaping_off_is_the_older_name_of_raw() -> None:
    assert ObjectiveSettings(shaping=False).surrogate == "raw" and ObjectiveSettings().surrogate == "shaped"


def test_diagnostics_by_hand() -> None:
    sums = objective.objective_sums(*example()[:2], None, example()[2], clip=True, settings=ObjectiveSettings())
    # A second micro-batch: one replayed token of ratio 1, one fresh one of ratio 1.
    same = targets_of(wide(1, 1), wide(0, 0), True, False)
    sums = sums + objective.objective_sums(
        wide(0, 0), wide(0.1, 0.5), None, same, clip=True, settings=ObjectiveSettings()
    )
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
    assert sums.metrics() == pytest.approx(expected, rel=1e-12)


def test_diagnostics_without_a_meaning_are_absent() -> None:
    logprobs, entropies, targets = example(False, False, False)
    sums = objective.objective_sums(logprobs, entropies, None, targets, clip=False, settings=ObjectiveSettings())
    assert set(sums.metrics()) == {"policy/entropy", "policy/ratio_fresh", "policy/ratio_fresh_max"}
    # Ratio 2 with A > 0 is cut off; fresh tokens' own fraction has no meaning without a clip.
    settings = ObjectiveSettings(replay_surrogate="clipped")
    metrics = objective.objective_sums(*example()[:2], None, example()[2], clip=False, settings=settings).metrics()
    assert metrics["policy/clip_fraction_replay"] == 1.0 and "policy/clip_fraction" not in metrics
