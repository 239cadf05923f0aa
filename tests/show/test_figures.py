"""Figures of run folders: what they show, how they are saved, and that every kind of run has them."""

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.ledger.reader import LedgerReader
from exgrpo_cli.replay.replace import Replace
from exgrpo_cli.runs.folder import RunMetrics, read_metrics
from exgrpo_cli.show.figures.run import (
    accuracy_by_tokens,
    bucket_flow,
    buffers_compared,
    draws_against_promise,
    entropy_at_birth,
    heldout_scores,
    learning_curve,
    policy_diagnostics,
    training_figures,
    what_if_figure,
)
from exgrpo_cli.show.queries import Numbers
from exgrpo_cli.show.record import read_run
from exgrpo_cli.show.statistics import replay_figures, report_runs, save_all, save_reports, summarise

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from synthetic_run import SyntheticRun, write_config, write_run

ALWAYS = {"learning", "diagnostics"}
"""Also of a run that has not been validated."""
TRAINING = ALWAYS | {"learning-tokens"}
REPLAY = {
    f"replay-{name}" for name in ["buckets", "flow", "questions", "entropy", "age-reuse", "entropy-by-bucket", "draws"]
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """45 steps: long enough for moving averages."""
    folder = tmp_path_factory.mktemp("plots") / "run"
    write_run(folder, SyntheticRun(steps=45, num_questions=200, questions_per_step=8, mixed_from=4))
    return folder


@pytest.fixture(scope="module")
def told(run: Path) -> Numbers:
    return summarise(read_run(run))


def names(paths: list[Path], suffix: str) -> set[str]:
    return {path.stem for path in paths if path.suffix == suffix}


def test_every_figure_is_saved_as_png_and_as_svg_with_text_in_it(run: Path) -> None:
    paths = save_all(run)
    assert names(paths, ".png") == names(paths, ".svg") == TRAINING | REPLAY
    assert {path.parent for path in paths} == {run / "plots"}
    assert {path.name for path in (run / "plots").iterdir()} == {path.name for path in paths}
    svg, png = (run / "plots" / "learning.svg").read_text(), (run / "plots" / "learning.png").read_bytes()
    save_all(run)
    assert (run / "plots" / "learning.png").read_bytes() == png and (run / "plots" / "learning.svg").read_text() == svg
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
    told = summarise(read_run(tmp_path / "run"))
    figures = dict([*training_figures(tmp_path / "run"), *replay_figures(told)])
    replays = REPLAY if told["used"] else {"replay-questions"}
    assert set(figures) == (TRAINING if spec.finished else ALWAYS) | replays
    for figure in figures.values():
        figure.canvas.draw()


def test_runs_without_replay_or_steps_get_the_training_figures_only(tmp_path: Path) -> None:
    for name in ("grpo", "new"):
        (tmp_path / name).mkdir()
        write_config(tmp_path / name, SyntheticRun(), method="grpo", replay=False)
    line = {"step": 1, "phase": "on-policy", "batch/pass_at_1": 0.5, "optim/grad_norm": 0.4}
    (tmp_path / "grpo" / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert names(save_all(tmp_path / "grpo"), ".svg") == ALWAYS
    assert "replayed" not in (tmp_path / "grpo" / "plots" / "diagnostics.svg").read_text()
    (tmp_path / "new" / "metrics.jsonl").write_text("")
    assert save_all(tmp_path / "new") == []
    with pytest.raises(InputError, match=r"it has no config\.toml"):
        save_all(tmp_path)


def test_the_flow_between_buckets_follows_each_replayed_question(told: Numbers, run: Path) -> None:
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
    [axes] = bucket_flow(told).axes
    np.testing.assert_allclose(sum(bars.lines[0].get_ydata() for bars in axes.containers), 1)


def test_entropy_is_compared_within_stretches_of_steps(told: Numbers, run: Path) -> None:
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
    [axes] = entropy_at_birth(told).axes
    [hard, _, _] = axes.containers
    drawn = [next(group["mean"] for group in each["by_difficulty"] if group["name"] == "hard") for each in windows]
    np.testing.assert_allclose(hard.lines[0].get_ydata(), drawn)


@pytest.mark.slow
def test_what_another_policy_would_have_drawn_is_a_figure(run: Path, tmp_path: Path) -> None:
    reports = report_runs([run], other="sampler=linear,metric=random")
    assert tmp_path / "replay-what-if.svg" in save_reports(reports, [tmp_path])
    svg = (tmp_path / "replay-what-if.svg").read_text()
    assert ">what if: linear<" in svg and ">what if: random<" in svg and ">run: ent:min<" in svg
    [asked] = reports.values()
    drawn, *_ = what_if_figure(asked).axes
    np.testing.assert_array_equal(drawn.lines[0].get_ydata(), asked["what_if"]["sampler"]["pass_rate"])


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
    few = RunMetrics([dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)])
    figure = learning_curve(few, {"arithmetic": np.array([[0, 0.5, 0.4, 0.6], [60, 0.5, 0.4, 0.6]])})
    [axes] = figure.axes
    lone = [line for line in axes.lines if len(line.get_xdata()) == 2 and line.get_marker() in "oD"]
    assert {line.get_linestyle() for line in lone} == {"None"}
    assert figure.get_supxlabel() == "thin: each step; thick: mean over 3 steps"
    [ratio] = policy_diagnostics(few).axes  # always 0, or logged in a corner only: no panel
    assert ratio.get_yscale() == "log"
    assert [line.get_ydata().max() for line in ratio.lines] == pytest.approx([1.0, 1.0, 50.0])


def test_held_out_scores_are_drawn_with_their_intervals_by_step_and_by_tokens(run: Path, tmp_path: Path) -> None:
    metrics = read_metrics(run)
    heldout = heldout_scores(run, metrics)
    # Validated at 10, 20, 30, 40; before (0) and after (45) come from summary.json.
    scores = heldout["arithmetic"]
    assert scores[:, 0].tolist() == [0, 10, 20, 30, 40, 45]
    assert scores[:, 2] == pytest.approx(scores[:, 1] - 0.03)
    (axes,) = learning_curve(metrics, heldout).axes
    (bars,) = axes.containers
    drawn = [segment[:, 1].tolist() for segment in bars.lines[2][0].get_segments()]
    np.testing.assert_allclose(drawn, scores[:, 2:])
    [axes] = accuracy_by_tokens(metrics, heldout).axes
    generated = metrics.series("tokens/generated")
    assert axes.lines[0].get_xdata().tolist() == [generated[: int(step)].sum() for step in scores[:, 0]]
    axes.figure.canvas.draw()
    assert axes.get_xticklabels()[-1].get_text().endswith("k")
    # While a run goes on its validations are shown without the ends.
    assert heldout_scores(tmp_path, metrics)["arithmetic"][:, 0].tolist() == [10, 20, 30, 40]


def test_draws_stand_beside_their_promise_and_runs_beside_each_other(told: Numbers) -> None:
    (axes,) = draws_against_promise(told).axes
    buckets = told["draws"]["buckets"]
    heights = [bars.lines[0].get_ydata() for bars in axes.containers]
    np.testing.assert_allclose(heights, [[row[name] for row in buckets] for name in ("drawn", "expected")])
    figure = buffers_compared({"a": told, "b": told})
    assert len(figure.axes) == 6
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]


def test_no_figure_has_text_that_leaves_it_or_overlaps_its_neighbours(run: Path, told: Numbers) -> None:
    for name, figure in [*training_figures(run), *replay_figures(told)]:
        figure.canvas.draw()
        renderer = figure.canvas.get_renderer()
        width, height = figure.canvas.get_width_height()
        for axes in figure.axes:
            inside = axes.get_tightbbox(renderer)
            assert inside.x0 > -2 and inside.y0 > -2 and inside.x1 < width + 2 and inside.y1 < height + 2, name
            boxes = [
                tick.label1.get_window_extent(renderer)
                for tick in axes.xaxis.get_major_ticks()
                if tick.label1.get_visible() and tick.label1.get_text()
            ]
            for left, right in itertools.pairwise(boxes):
                assert left.x1 <= right.x0 + 1, f"{name}: tick labels overlap"
