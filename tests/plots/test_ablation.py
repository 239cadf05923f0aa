"""Figures of a study."""

import itertools
from pathlib import Path

import numpy as np

from exgrpo_cli.plots.ablation import (
    ArmCurve,
    ArmScore,
    arm_comparison,
    arm_curves,
    arm_curves_by_tokens,
    paired_differences,
)
from exgrpo_cli.plots.claims import ClaimEffect, claims_figure
from exgrpo_cli.plots.style import save

ARMS = [
    ArmScore(name="on-policy", mean=0.80, low=0.78, high=0.82, seeds=[0.79, 0.80, 0.81]),
    ArmScore(name="ent-min", mean=0.75, low=0.70, high=0.80, seeds=[0.72, 0.75, 0.78]),
    ArmScore(name="random", mean=0.74, low=0.74, high=0.74, seeds=[0.74]),
]


def test_one_row_per_arm_with_mean_interval_seeds_and_baseline(tmp_path: Path) -> None:
    figure = arm_comparison(ARMS, baselines=["on-policy"], measure="held-out pass@1")
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["on-policy (baseline)", "ent-min", "random"]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # the first arm is on top
    intervals = [bars.lines[2][0].get_segments()[0][:, 0] for bars in axes.containers]
    np.testing.assert_allclose(intervals, [[0.78, 0.82], [0.70, 0.80], [0.74, 0.74]])
    dots = [line.get_xdata() for line in axes.lines if line.get_marker() == "o"]
    assert [list(seeds) for seeds in dots] == [arm.seeds for arm in ARMS]
    assert 0.80 in {line.get_xdata()[0] for line in axes.lines if len(line.get_xdata()) == 2}
    assert axes.get_xlabel() == "held-out pass@1\n(mean, 95 % interval, 3 seeds)"
    assert [path.suffix for path in save(figure, tmp_path, "ablation")] == [".png", ".svg"]


def test_curves_have_a_band_and_skip_what_was_not_measured() -> None:
    nan = float("nan")
    curves = [
        ArmCurve(name="on-policy", steps=[0, 10, 20], mean=[0.3, 0.5, 0.7], low=[0.2, 0.4, 0.6], high=[0.4, 0.6, 0.8]),
        ArmCurve(name="ent-min", steps=[0, 10, 20], mean=[0.3, nan, 0.6], low=[0.2, nan, nan], high=[0.4, nan, nan]),
    ]
    (axes,) = arm_curves(curves, baselines=["on-policy"], measure="pass@1").axes
    [joined] = [line for line in axes.lines if line.get_linestyle() == "-"]
    assert joined.get_xdata().tolist() == [0, 10, 20] and joined.get_color() == "#000000"
    [lone] = axes.containers  # two points are not joined
    np.testing.assert_allclose(lone.lines[0].get_ydata(), [0.3, 0.6])


def test_differences_are_drawn_from_zero_with_their_seeds() -> None:
    arms = [ArmScore(name="ent-min", mean=-0.05, low=-0.08, high=-0.02, seeds=[-0.07, -0.05, -0.03])]
    (axes,) = paired_differences(arms, baselines=["on-policy"], measure="held-out pass@1").axes
    assert axes.get_xlabel() == "held-out pass@1 minus on-policy, same seeds\n(mean, 95 % interval, 3 seeds)"
    assert 0 in {line.get_xdata()[0] for line in axes.lines if len(line.get_xdata()) == 2}
    [bars] = axes.containers
    np.testing.assert_allclose(bars.lines[2][0].get_segments()[0][:, 0], [-0.08, -0.02])


def test_each_regime_has_its_baseline_and_the_label_stays_short() -> None:
    baselines = ["strong: on-policy", "search: on-policy"]
    arms = [
        ArmScore(name=f"{regime}: ent-min", mean=0.1, low=0.0, high=0.2, seeds=[0.1]) for regime in ("strong", "search")
    ]
    figure = paired_differences(arms, baselines=baselines, measure="held-out pass@1")
    figure.canvas.draw()
    label = figure.axes[0].xaxis.label.get_window_extent()
    assert label.x0 >= 0 and label.x1 <= figure.bbox.x1
    scores = [ArmScore(name=name, mean=0.5, low=0.4, high=0.6, seeds=[0.5]) for name in baselines]
    (axes,) = arm_comparison(scores, baselines=baselines, measure="held-out pass@1").axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [f"{name} (baseline)" for name in baselines]
    assert not [line for line in axes.lines if len(line.get_xdata()) == 2]


def test_curves_against_tokens_lie_where_their_tokens_are() -> None:
    curve = ArmCurve(
        name="a", steps=[0, 5, 9], tokens=[0, 700, 900], mean=[0.1, 0.2, 0.3], low=[0.1, 0.2, 0.3], high=[0.1, 0.2, 0.3]
    )
    (axes,) = arm_curves_by_tokens([curve], baselines=["a"], measure="pass@1").axes
    assert axes.lines[0].get_xdata().tolist() == [0, 700, 900]


def test_a_study_that_has_nothing_yet_says_so() -> None:
    for draw in (arm_comparison, arm_curves, arm_curves_by_tokens, paired_differences):
        figure = draw([], baselines=["a"], measure="m")
        (axes,) = figure.axes
        assert axes.texts[0].get_text().endswith("yet")


def test_many_arms_stay_apart() -> None:
    names = [f"an-arm-with-a-long-name-{n}" for n in range(16)]
    arms = [ArmScore(name=name, mean=0.5, low=0.4, high=0.6, seeds=[0.5]) for name in names]
    figure = arm_comparison(arms, baselines=[names[0]], measure="pass@1")
    figure.canvas.draw()
    boxes = [label.get_window_extent() for label in figure.axes[0].get_yticklabels()]
    assert all(above.y0 >= below.y1 for above, below in itertools.pairwise(boxes))


def test_claims_are_drawn_with_what_they_must_exceed_and_their_verdict() -> None:
    asked = {"contrast": "pass_at_1: a minus b > 0.03", "threshold": 0.03}
    claims = [
        ClaimEffect(title="It helps", mean=0.05, low=0.04, high=0.06, verdict="supported", **asked),
        ClaimEffect(title="It does not", mean=-0.02, low=-0.05, high=0.01, verdict="contradicted", **asked),
        ClaimEffect(title="", mean=0.0, low=-0.02, high=0.02, verdict="contradicted", **asked),
    ]
    (axes,) = claims_figure(claims).axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    said = asked["contrast"]
    assert labels == [f"It helps\n{said}", f"It does not\n{said}", said]
    intervals = [bars.lines[2][0].get_segments()[0][:, 0] for bars in axes.containers]
    np.testing.assert_allclose(intervals, np.array([[0.04, 0.06], [-0.05, 0.01], [-0.02, 0.02]]) / 0.03)
    beside = [text.get_text() for text in axes.texts]
    first, second = "supported\n+0.050 [0.040, 0.060]", "contradicted\n-0.020 [-0.050, 0.010]"
    assert beside == [first, second, "+0.000 [-0.020, 0.020]"]
    assert [line.get_xdata()[0] for line in axes.lines].count(1.0) == 3
    rows = axes.get_yticks()
    (bottom, top), in_order = axes.get_ylim(), sorted(rows)
    assert list(rows) == in_order and bottom > rows[-1] and rows[0] > top, "the first is on top, and all are within"
    assert claims_figure([]) is None
