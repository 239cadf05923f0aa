"""Figures of runs, of studies, and of models on benchmarks: what they show, how they are saved, all readable."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from synthetic_run import SyntheticRun, write_config, write_run

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.ledger.reader import LedgerReader
from exgrpo_cli.replay.replace import Replace
from exgrpo_cli.runs import folder, result, validations
from exgrpo_cli.show import queries, record, statistics
from exgrpo_cli.show.figures import comparisons, replay, style, written
from exgrpo_cli.show.figures import run as figures
from exgrpo_cli.show.figures.comparisons import ArmScore

ALWAYS = {"learning", "diagnostics"}
"""Also of a run that has not been validated."""
TRAINING = ALWAYS | {"learning-tokens"}
REPLAY = {
    f"replay-{name}"
    for name in ["buckets", "flow", "lives", "questions", "entropy", "age-reuse", "entropy-by-bucket", "draws"]
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """45 steps: long enough for moving averages."""
    folder = tmp_path_factory.mktemp("plots") / "run"
    write_run(folder, SyntheticRun(steps=45, num_questions=200, questions_per_step=8, mixed_from=4))
    return folder


@pytest.fixture(scope="module")
def told(run: Path) -> queries.Numbers:
    return statistics.summarise(record.read_run(run))


def assert_readable(figure, panel_inches: float = 0.0) -> None:
    """All is within the figure, no two names of an axis or a legend, nor two titles, overlap, and panels have room."""
    figure.canvas.draw()
    shown = [axes for axes in figure.axes if axes.get_visible()]
    for axes in shown:
        inside, legend = axes.get_tightbbox(), axes.get_legend()
        assert inside.x0 > -2 and inside.y0 > -2 and inside.x1 < figure.bbox.x1 + 2 and inside.y1 < figure.bbox.y1 + 2
        assert axes.get_window_extent().width > panel_inches * figure.dpi
        named = [
            [label for place, label in zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=True)
             if low <= place <= high]
            for axis, (low, high) in ((axes.xaxis, sorted(axes.get_xlim())), (axes.yaxis, sorted(axes.get_ylim())))
        ]  # fmt: skip
        for texts in [*named, legend.get_texts() if legend else []]:
            boxes = [text.get_window_extent() for text in texts if text.get_text()]
            assert not any(one.overlaps(other) for one, other in itertools.pairwise(boxes))
    titles = [axes.title.get_window_extent() for axes in shown if axes.get_title()]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(titles, 2))


def names(paths: list[Path], suffix: str) -> set[str]:
    return {path.stem for path in paths if path.suffix == suffix}


def test_every_figure_is_saved_as_png_and_as_svg_with_text_in_it(run: Path, tmp_path: Path) -> None:
    paths = statistics.save_all(run)
    assert names(paths, ".png") == names(paths, ".svg") == TRAINING | REPLAY
    assert {path.parent for path in paths} == {run / "plots"}
    assert {path.name for path in (run / "plots").iterdir()} == {path.name for path in paths}
    svg, png = (run / "plots" / "learning.svg").read_text(), (run / "plots" / "learning.png").read_bytes()
    written.save(dict(figures.training_figures(run))["learning"], tmp_path, "learning")
    assert (tmp_path / "learning.png").read_bytes() == png and (tmp_path / "learning.svg").read_text() == svg
    for words in ("pass@1", "fresh questions", "held-out: arithmetic (95 %)", "mixed phase"):
        assert f">{words}<" in svg


@pytest.mark.parametrize(
    "spec",
    [
        SyntheticRun(steps=1, num_questions=60, questions_per_step=8, mixed_from=2, finished=False),
        SyntheticRun(steps=3, num_questions=60, questions_per_step=8, mixed_from=2, finished=False),
        SyntheticRun(steps=3, num_questions=60, questions_per_step=8, mixed_from=1, rules=Replace(metric="random")),
    ],
    ids=["nothing stored", "one replay", "nothing measured"],
)
def test_short_runs_are_drawn_without_a_warning(tmp_path: Path, spec: SyntheticRun) -> None:
    write_run(tmp_path / "run", spec)
    told = statistics.summarise(record.read_run(tmp_path / "run"))
    drawn = dict([*figures.training_figures(tmp_path / "run"), *statistics.replay_figures(told)])
    replays = REPLAY if told["used"] else {"replay-questions"}
    assert set(drawn) == TRAINING | replays
    for figure in drawn.values():
        figure.canvas.draw()


def test_runs_without_replay_or_steps_get_the_training_figures_only(tmp_path: Path) -> None:
    for name in ("grpo", "new"):
        (tmp_path / name).mkdir()
        write_config(tmp_path / name, SyntheticRun(), method="grpo", replay=False)
    line = {"step": 1, "phase": "on-policy", "batch/pass_at_1": 0.5, "optim/grad_norm": 0.4}
    (tmp_path / "grpo" / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert names(statistics.save_all(tmp_path / "grpo"), ".svg") == ALWAYS
    assert "replayed" not in (tmp_path / "grpo" / "plots" / "diagnostics.svg").read_text()
    (tmp_path / "new" / "metrics.jsonl").write_text("")
    assert statistics.save_all(tmp_path / "new") == []
    with pytest.raises(InputError, match=r"it has no config\.toml"):
        statistics.save_all(tmp_path)


def test_the_flow_between_buckets_follows_each_replayed_question(told: queries.Numbers, run: Path) -> None:
    events = LedgerReader(run / "replay").events().to_pylist()
    latest = {(row["step"], row["question_id"]): row for row in events}
    expected: dict[tuple[int, object], int] = {}
    for row in (row for row in events if row["event"] == "selected"):
        last = latest[row["step"], row["question_id"]]
        key = (row["bucket"], "retired" if last["event"] == "retired" else last["bucket"])
        expected[key] = expected.get(key, 0) + 1
    flow = told["flow"]
    counted = {(before, after): num for before, row in flow.items() for after, num in row["after"].items()}
    counted |= {(before, "retired"): row["retired"] for before, row in flow.items() if row["retired"]}
    counted |= {(before, None): row["dropped"] for before, row in flow.items() if row["dropped"]}
    assert counted == expected
    [axes] = replay.bucket_flow(told).axes
    np.testing.assert_allclose(sum(bars.lines[0].get_ydata() for bars in axes.containers), 1)


def test_entropy_is_compared_within_stretches_of_steps(told: queries.Numbers, run: Path) -> None:
    windows = told["entropy"]["windows"]
    assert len(windows) == 4 and windows[-1]["last_step"] == 45
    born = LedgerReader(run / "replay").trajectories().to_pylist()
    assert all(second["first_step"] == first["last_step"] + 1 for first, second in itertools.pairwise(windows))
    for window in windows:
        inside = [row for row in born if window["first_step"] <= row["step_born"] <= window["last_step"]]
        hard = np.mean([row["entropy"] for row in inside if row["k"] <= 2])
        easy = np.mean([row["entropy"] for row in inside if row["k"] >= 6])
        assert window["hard_over_easy"] == pytest.approx(hard / easy)
        assert sum(group["trajectories"] for group in window["by_bucket"]) == len(inside)
    [axes] = replay.entropy_at_birth(told).axes
    [hard, _, _] = axes.containers
    drawn = [next(group["mean"] for group in each["by_difficulty"] if group["name"] == "hard") for each in windows]
    np.testing.assert_allclose(hard.lines[0].get_ydata(), drawn)


def test_functions_of_ones_own_are_named_within_their_panel() -> None:
    half, name = np.full(45, 0.5), "python:replay_rules.of_mine:the_questions_of_which_least_were_solved_lately"
    both = {who: {"entropy": half, "age": half} for who in ("chosen", "other")}
    sampler = {"names": ["normal(0.5, 0.125)", name], "pass_rate": half, "expected_pass_rate": half}
    kinds = {"sampler": sampler, "metric": {"names": ["ent:min", f"{name}:min"], "by_step": both}}
    asked = {"steps": 45, "what_if": {kind: own | {"steps": np.arange(45)} for kind, own in kinds.items()}}
    figure = replay.what_if_figure(asked)
    assert_readable(figure, 1.8)
    legends = [axes.get_legend() for axes in figure.axes]
    said = [text.get_text() for text in legends[0].get_texts()]
    assert said == ["run: normal(0.5, 0.125)", "what if: the_questions_of_whi\nch_least_were_solved_lately"]
    assert legends[0].get_window_extent().x1 < legends[1].get_window_extent().x0


def test_two_lone_points_are_not_joined_and_maxima_are_not_averaged() -> None:
    columns = {
        "step": np.arange(1, 61),
        "batch/pass_at_1": np.linspace(0.2, 0.6, 60),
        "replay/pass_at_1": np.where(np.arange(60) < 2, 0.5, np.nan),
        "policy/ratio_fresh": np.full(60, 1.0),
        "policy/ratio_fresh_max": np.where(np.arange(60) == 30, 50.0, 2.0),
        "policy/clip_fraction": np.where(np.arange(60) < 3, 0.1, np.nan),
        "replay/ess": np.zeros(60),
    }
    few = folder.RunMetrics([dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)])
    figure = figures.learning_curve(few, {"arithmetic": np.array([[0, 0.5, 0.4, 0.6], [60, 0.5, 0.4, 0.6]])})
    [axes] = figure.axes
    lone = [line for line in axes.lines if len(line.get_xdata()) == 2 and line.get_marker() in "oD"]
    assert {line.get_linestyle() for line in lone} == {"None"}
    assert figure.get_supxlabel() == "thin: each step; thick: mean over 3 steps"
    [ratio] = figures.policy_diagnostics(few).axes  # always 0, or logged in a corner only: no panel
    assert ratio.get_yscale() == "log"
    assert [line.get_ydata().max() for line in ratio.lines] == pytest.approx([1.0, 1.0, 50.0])


def test_held_out_scores_are_drawn_with_their_intervals_by_step_and_by_tokens(run: Path, tmp_path: Path) -> None:
    metrics = folder.read_metrics(run)
    heldout = figures.heldout_scores(run, metrics)
    # Validated at 10, 20, 30, 40 by the journal; before (0) and after (45) come from validations.jsonl alone.
    scores = heldout["arithmetic"]
    assert scores[:, 0].tolist() == [0, 10, 20, 30, 40, 45]
    assert scores[1:-1, 2] == pytest.approx(scores[1:-1, 1] - 0.03)
    assert scores[0, 1] == validations.read_validations(run)[0].pass_at_1 and scores[0, 2] < scores[0, 1] < scores[0, 3]
    (axes,) = figures.learning_curve(metrics, heldout).axes
    (bars,) = axes.containers
    drawn = [segment[:, 1].tolist() for segment in bars.lines[2][0].get_segments()]
    np.testing.assert_allclose(drawn, scores[:, 2:])
    [axes] = figures.accuracy_by_tokens(metrics, heldout).axes
    generated = metrics.series("tokens/generated")
    assert axes.lines[0].get_xdata().tolist() == [generated[: int(step)].sum() for step in scores[:, 0]]
    axes.figure.canvas.draw()
    assert axes.get_xticklabels()[-1].get_text().endswith("k")
    # Also of a run that goes on, or was resumed: nothing of it needs the final figures.
    write_run(tmp_path / "unfinished", SyntheticRun(steps=12, num_questions=200, questions_per_step=8, finished=False))
    assert dict(figures.training_figures(tmp_path / "unfinished")).keys() >= TRAINING
    found = figures.heldout_scores(tmp_path / "unfinished", folder.read_metrics(tmp_path / "unfinished"))
    assert found["arithmetic"][:, 0].tolist() == [0, 10]


def test_draws_stand_beside_their_promise_and_runs_beside_each_other(told: queries.Numbers) -> None:
    (axes,) = replay.draws_against_promise(told).axes
    buckets = told["draws"]["buckets"]
    heights = [bars.lines[0].get_ydata() for bars in axes.containers]
    np.testing.assert_allclose(heights, [[row[name] for row in buckets] for name in ("drawn", "expected")])
    figure = replay.buffers_compared({"a": told, "b": told})
    assert len(figure.axes) == 6
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]


def test_no_figure_has_text_that_leaves_it_or_overlaps_its_neighbours(run: Path, told: queries.Numbers) -> None:
    for name, figure in [*figures.training_figures(run), *statistics.replay_figures(told)]:
        assert_readable(figure)
        assert style.title_of(figure) and style.WORDS["captions"][name] and figure.get_figwidth() == style.WIDTH


POINTS = {"mean": [0.3, 0.5, 0.7], "low": [0.2, 0.4, 0.6], "high": [0.4, 0.6, 0.8]}
ARMS = [
    ArmScore(name="on-policy", mean=0.80, low=0.78, high=0.82, seeds=[0.79, 0.80, 0.81]),
    ArmScore(name="ent-min", mean=0.75, low=0.70, high=0.80, seeds=[0.72, 0.75, 0.78]),
    ArmScore(name="random", mean=0.74, low=0.74, high=0.74, seeds=[0.74]),
]


def test_one_row_per_arm_with_mean_interval_seeds_and_baseline() -> None:
    (axes,) = comparisons.arm_comparison(ARMS, baselines=["on-policy"], measure="held-out pass@1").axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["on-policy (baseline)", "ent-min", "random"]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # the first arm is on top
    intervals = [bars.lines[2][0].get_segments()[0][:, 0] for bars in axes.containers]
    np.testing.assert_allclose(intervals, [[0.78, 0.82], [0.70, 0.80], [0.74, 0.74]])
    dots = [line.get_xdata() for line in axes.lines if line.get_marker() == "o"]
    assert [list(seeds) for seeds in dots] == [arm.seeds for arm in ARMS]
    assert 0.80 in {line.get_xdata()[0] for line in axes.lines if len(line.get_xdata()) == 2}
    assert axes.get_xlabel() == "held-out pass@1\n(mean, 95 % interval, 3 seeds)"
    assert comparisons.arm_comparison([], baselines=["a"], measure="m") is None


def test_curves_have_a_band_and_skip_what_was_not_measured() -> None:
    nan = float("nan")
    curves = [
        ArmScore(name="on-policy", steps=[0, 10, 20], **POINTS),
        ArmScore(name="ent-min", steps=[0, 10, 20], mean=[0.3, nan, 0.6], low=[0.2, nan, nan], high=[0.4, nan, nan]),
    ]
    (axes,) = comparisons.arm_curves(curves, baselines=["on-policy"], measure="pass@1").axes
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


def test_each_regime_has_a_panel_with_the_curves_and_the_legend_of_its_own_arms() -> None:
    """Twenty arms in three regimes, six of the baselines in one of them."""
    curves = [
        ArmScore(name=name, regime=regime, steps=[0, 10, 20], tokens=[0, 700, 900], **POINTS) for regime, name in EVERY
    ]
    for tokens in (False, True):
        figure = comparisons.arm_curves(curves, baselines=BASELINES, measure="held-out pass@1", tokens=tokens)
        assert [axes.get_title("left") for axes in figure.axes] == list(REGIMES)
        assert figure.axes[0].lines[0].get_xdata().tolist() == ([0, 700, 900] if tokens else [0, 10, 20])
        for axes, (regime, names) in zip(figure.axes, REGIMES.items(), strict=True):
            told = [text.get_text() for text in axes.get_legend().get_texts()]
            told = [name.replace("-\n", "-").replace("\n", " ") for name in told]
            assert told == [name.removeprefix(f"{regime}: ") for name in names]
            drawn = [(line.get_color(), line.get_linestyle(), line.get_marker()) for line in axes.lines]
            assert len(drawn) == len(set(drawn)) == len(names)
            black = [name for name, look in zip(names, drawn, strict=True) if look[0] == "#000000"]
            assert black == names[::3]
            assert axes.get_window_extent().height > 0.9 * figure.dpi, "the axes are a strip"
        assert_readable(figure, 1.8)


def test_no_two_arms_look_alike_up_to_28_baselines_and_168_others() -> None:
    names = [f"arm {n}" for n in range(28 + 168)]
    looks = style.looks_of(names, names[:28])
    assert len({tuple(look.values()) for look in looks.values()}) == len(names)
    assert [looks[name]["linestyle"] for name in names[28:34]] == ["-"] * 6


def test_rows_of_each_regime_have_a_panel_and_their_own_baseline() -> None:
    scores = [
        ArmScore(name=name, regime=regime, mean=0.5, low=0.4, high=0.6, seeds=[0.4, 0.5, 0.6]) for regime, name in EVERY
    ]
    figure = comparisons.arm_comparison(scores, baselines=BASELINES, measure="held-out pass@1")
    assert [axes.get_title("left") for axes in figure.axes] == list(REGIMES)
    # search has six baselines, so no line is that of the baseline; the others have one each.
    assert [sum(len(line.get_xdata()) == 2 for line in axes.lines) for axes in figure.axes] == [0, 1, 1]
    assert_readable(figure, 1.8)
    others = [score._replace(mean=0.1 * n) for n, score in enumerate(scores) if score.name not in BASELINES]
    figure = comparisons.arm_comparison(others, baselines=BASELINES, measure="held-out pass@1", differences=True)
    assert [axes.get_title("left") for axes in figure.axes] == ["search", "strong"]
    assert [len(axes.get_yticks()) for axes in figure.axes] == [10, 2]
    assert all(0 in {line.get_xdata()[0] for line in axes.lines if len(line.get_xdata()) == 2} for axes in figure.axes)
    assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim()
    assert_readable(figure, 1.8)


def test_titles_of_many_panels_are_wrapped() -> None:
    kinds = dict.fromkeys(
        ("replayed", "rolled_out", "never_seen", "heldout"), result.PassRates(questions=20, before=0, after=1)
    )
    found = result.Memorising(trained_questions=1234, replayed_questions=20, **kinds)
    figure = figures.memorising_figure({name: [found] for _, name in EVERY})
    told = [axes.get_title().replace("-\n", "-").replace("\n", " ") for axes in figure.axes if axes.get_visible()]
    assert told == [f"{name} (1,234 questions)" for _, name in EVERY]
    assert_readable(figure, 1.8)


def test_claims_are_drawn_with_what_they_must_exceed_and_their_verdict() -> None:
    said = "pass_at_1: a minus b > 0.03"

    def claim(title: str, verdict: str, *effects: tuple[float, float, float]) -> dict:
        found = [dict(zip(("mean", "low", "high"), effect, strict=True)) for effect in effects]
        contrasts = [{"contrast": said, "threshold": 0.03, "effect": each} for each in found]
        return {"title": title, "verdict": verdict, "regime": "", "seeds": 8, "contrasts": contrasts}

    claims = [
        claim("It helps", "supported", (0.05, 0.04, 0.06)),
        claim("It was not tried", "not run"),
        claim("It does not", "too small to matter", (-0.02, -0.05, 0.01), (0.0, -0.02, 0.02)),
    ]
    (axes,) = comparisons.claims_figure(claims).axes
    intervals = [bars.lines[2][0].get_segments()[0][:, 0] for bars in axes.containers]
    np.testing.assert_allclose(intervals, np.array([[0.04, 0.06], [-0.05, 0.01], [-0.02, 0.02]]) / 0.03)
    over = [text.get_text().replace("\u00a0", " ") for text in axes.texts if text.get_visible()]
    said += ", 8 seeds"
    assert over == [
        f"Supported: It helps\n{said}: +0.050 [0.040, 0.060]",
        f"Too small to matter: It does not\n{said}: -0.020 [-0.050, 0.010]",
        f"{said}: +0.000 [-0.020, 0.020]",
    ]
    assert style.title_of(axes.figure) == "Claims put to the test: 1 supported, 1 too small to matter"
    assert [list(line.get_xdata()) for line in axes.lines].count([1.0, 1.0]) == 3
    bottom, top = axes.get_ylim()
    assert bottom > top, "the first is on top"
    assert comparisons.claims_figure([]) is None


def test_a_line_of_many_steps_has_few_points_each_of_which_stands_for_several() -> None:
    """5,000 values, so every 3: their means, of maxima the largest, on the first step of each."""
    values = np.arange(5000.0) % 7
    with style.styled():
        figure, (axes,) = style.new_figure(height=2.0)
        look = {"color": "#000000", "linestyle": "-", "marker": "o"}
        assert style.draw_line(axes, None, values, "reward", **look) == (251, 3)
        assert style.draw_line(axes, None, values, style.MAXIMA, **look) == (0, 3)
        thin, thick, maxima = (line.get_xydata() for line in axes.lines)
        style.explain_smoothing(figure, 251, 3)
    assert len(thin) == len(thick) == len(maxima) == 1667 <= style.MOST_POINTS
    assert thin[:3].tolist() == [[0, 1], [3, 4], [6, (6 + 0 + 1) / 3]]
    assert thin[-1].tolist() == [4998, (4998 % 7 + 4999 % 7) / 2]
    assert thick[100].tolist() == pytest.approx([300, values[300 - 125 : 300 + 126].mean()])
    assert maxima[:3].tolist() == [[0, 2], [3, 5], [6, 6]]
    assert "thin: mean (of maxima the largest) of every 3 steps; thick: mean over 251 steps" in style.words_of(figure)
