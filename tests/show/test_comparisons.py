"""Figures of a study, and of models on benchmarks."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np

from exgrpo_cli.runs.result import Memorising, PassRates
from exgrpo_cli.show.figures.comparisons import (
    ArmCurve,
    ArmScore,
    ClaimEffect,
    arm_comparison,
    arm_curves,
    claims_figure,
)
from exgrpo_cli.show.figures.run import memorising_figure
from exgrpo_cli.show.figures.style import looks_of, save

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
    assert arm_comparison([], baselines=["a"], measure="m") is None


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


def many_arms(regime: str, count: int) -> list[str]:
    """Of a claim's study: every third is a baseline, and names are long."""
    return [
        f"{regime}: {'grpo' if n % 3 == 0 else 'headroom-near'} (headroom-whatever-start-{n})" for n in range(count)
    ]


REGIMES = {"search": many_arms("search", 16), "strong": many_arms("strong", 3), "sparse": many_arms("sparse", 1)}
EVERY = [(regime, name) for regime, names in REGIMES.items() for name in names]
BASELINES = [name for names in REGIMES.values() for name in names[::3]]


def assert_readable(figure) -> None:
    """Every text lies within the figure, none of a legend, of titles or of an axis's names overlaps, and the axes have
    1.8 inches of width left."""
    figure.canvas.draw()
    for axes in figure.axes:
        legend = axes.get_legend()
        low, high = sorted(axes.get_ylim())
        ticks = zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)
        named = legend.get_texts() if legend else [label for place, label in ticks if low <= place <= high]
        texts = [*named, axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label]
        boxes = [text.get_window_extent() for text in texts if text.get_text()]
        boxes += [legend.get_window_extent()] if legend else []
        assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 for box in boxes), axes.get_title("left")
        assert all(box.y0 >= 0 and box.y1 <= figure.bbox.y1 for box in boxes), axes.get_title("left")
        if legend:
            assert legend.get_window_extent().x0 >= axes.get_window_extent().x1
        placed = [text.get_window_extent() for text in named]
        assert not any(one.overlaps(other) for one, other in itertools.pairwise(placed))
        assert not axes.get_visible() or axes.get_window_extent().width > 1.8 * figure.dpi
    titles = [axes.title.get_window_extent() for axes in figure.axes if axes.get_title()]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(titles, 2))


def test_each_regime_has_a_panel_with_the_curves_and_the_legend_of_its_own_arms() -> None:
    """Twenty arms in three regimes, six of the baselines in one of them."""
    points = {"mean": [0.3, 0.5, 0.7], "low": [0.2, 0.4, 0.6], "high": [0.4, 0.6, 0.8]}
    curves = [
        ArmCurve(name=name, regime=regime, steps=[0, 10, 20], tokens=[0, 700, 900], **points) for regime, name in EVERY
    ]
    for tokens in (False, True):
        figure = arm_curves(curves, baselines=BASELINES, measure="held-out pass@1", tokens=tokens)
        assert [axes.get_title("left") for axes in figure.axes] == list(REGIMES)
        assert figure.axes[0].lines[0].get_xdata().tolist() == ([0, 700, 900] if tokens else [0, 10, 20])
        for axes, (regime, names) in zip(figure.axes, REGIMES.items(), strict=True):
            told = [text.get_text().replace("\n", " ") for text in axes.get_legend().get_texts()]
            assert told == [name.removeprefix(f"{regime}: ") for name in names]
            drawn = [(line.get_color(), line.get_linestyle(), line.get_marker()) for line in axes.lines]
            assert len(drawn) == len(set(drawn)) == len(names)
            black = [name for name, look in zip(names, drawn, strict=True) if look[0] == "#000000"]
            assert black == names[::3]
            assert axes.get_window_extent().height > 0.9 * figure.dpi, "the axes are a strip"
        assert_readable(figure)


def test_no_two_arms_look_alike_up_to_28_baselines_and_168_others() -> None:
    names = [f"arm {n}" for n in range(28 + 168)]
    looks = looks_of(names, names[:28])
    assert len({tuple(look.values()) for look in looks.values()}) == len(names)
    assert [looks[name]["linestyle"] for name in names[28:34]] == ["-"] * 6


def test_rows_of_each_regime_have_a_panel_and_their_own_baseline() -> None:
    scores = [
        ArmScore(name=name, regime=regime, mean=0.5, low=0.4, high=0.6, seeds=[0.4, 0.5, 0.6]) for regime, name in EVERY
    ]
    figure = arm_comparison(scores, baselines=BASELINES, measure="held-out pass@1")
    assert [axes.get_title("left") for axes in figure.axes] == list(REGIMES)
    # search has six baselines, so no line is that of the baseline; the others have one each.
    assert [sum(len(line.get_xdata()) == 2 for line in axes.lines) for axes in figure.axes] == [0, 1, 1]
    assert_readable(figure)
    others = [replace(score, mean=0.1 * n) for n, score in enumerate(scores) if score.name not in BASELINES]
    figure = arm_comparison(others, baselines=BASELINES, measure="held-out pass@1", differences=True)
    assert [axes.get_title("left") for axes in figure.axes] == ["search", "strong"]
    assert [len(axes.get_yticks()) for axes in figure.axes] == [10, 2]
    assert all(0 in {line.get_xdata()[0] for line in axes.lines if len(line.get_xdata()) == 2} for axes in figure.axes)
    assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim()
    assert_readable(figure)


def test_long_names_of_a_study_of_one_regime_are_wrapped() -> None:
    settings = "objective.shaping_beta=0.1 replay.ratio=0.25 replay.max_drift=0.05"
    names = [f"headroom-drift optim.learning_rate={rate} {settings}" for rate in ("1.5e-4", "3e-4")]
    points = {"mean": [0.3, 0.5, 0.7], "low": [0.2, 0.4, 0.6], "high": [0.4, 0.6, 0.8]}
    assert_readable(
        arm_curves([ArmCurve(name=name, steps=[0, 5, 9], **points) for name in names], baselines=names[:1], measure="m")
    )
    scores = [ArmScore(name=name, mean=0.5, low=0.4, high=0.6, seeds=[0.5]) for name in names]
    assert_readable(arm_comparison(scores, baselines=names[:1], measure="held-out pass@1"))


def test_titles_of_many_panels_are_wrapped() -> None:
    rates = PassRates(questions=20, before=0.2, after=0.6)
    kinds = dict.fromkeys(("replayed", "rolled_out", "never_seen", "heldout"), rates)
    found = Memorising(trained_questions=1234, replayed_questions=20, **kinds)
    figure = memorising_figure({name: [found] for _, name in EVERY} | {"short": [found]})
    assert figure is not None and len([axes for axes in figure.axes if axes.get_visible()]) == 21
    told = [axes.get_title().replace("-\n", "-").replace("\n", " ") for axes in figure.axes]
    assert told == [f"{name} (1,234 questions)" for name in (*(name for _, name in EVERY), "short")]
    assert figure.axes[-1].get_title() == "short (1,234 questions)"
    assert_readable(figure)


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
    assert [list(line.get_xdata()) for line in axes.lines].count([1.0, 1.0]) == 3
    rows = axes.get_yticks()
    (bottom, top), in_order = axes.get_ylim(), sorted(rows)
    assert list(rows) == in_order and bottom > rows[-1] and rows[0] > top, "the first is on top, and all are within"
    assert claims_figure([]) is None
