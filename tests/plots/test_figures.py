"""Figures of run folders: what they show, how they are saved, and that every kind of run has them."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import LogNorm

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.config.sections.replay import ReplaySettings
from exgrpo_cli.ledger.reader import LedgerReader
from exgrpo_cli.plots import save_all
from exgrpo_cli.plots.buffer.buckets import bucket_flow, bucket_occupancy
from exgrpo_cli.plots.buffer.comparison import buffers_compared
from exgrpo_cli.plots.buffer.draws import draws_against_promise, entropy_by_bucket
from exgrpo_cli.plots.buffer.what_if import what_if_figure
from exgrpo_cli.plots.diagnostics import policy_diagnostics
from exgrpo_cli.plots.evaluation import accuracy_by_level, level_scores
from exgrpo_cli.plots.gallery import replay_figures, save_reports, training_figures
from exgrpo_cli.plots.learning import HeldoutScore, accuracy_by_tokens, heldout_scores, learning_curve
from exgrpo_cli.plots.series import moving_average
from exgrpo_cli.plots.style import brief_count, bucket_colours, full_rows, save
from exgrpo_cli.replay_stats.output.report import report_runs
from exgrpo_cli.replay_stats.summary import ReplaySummary, summarise
from exgrpo_cli.runs.metrics import RunMetrics, read_metrics

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from synthetic_run import SyntheticRun, write_config, write_run

TRAINING = {"learning", "learning-tokens", "diagnostics"}
ALWAYS = {"learning", "diagnostics"}
"""Also of a run that has not been validated."""
REPLAY = {
    "replay-buckets",
    "replay-flow",
    "replay-questions",
    "replay-entropy",
    "replay-age-reuse",
    "replay-entropy-by-bucket",
    "replay-draws",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """45 steps: long enough for moving averages."""
    folder = tmp_path_factory.mktemp("plots") / "run"
    write_run(folder, SyntheticRun(steps=45, num_questions=200, questions_per_step=8, mixed_from=4))
    return folder


@pytest.fixture(scope="module")
def summary(run: Path) -> ReplaySummary:
    return summarise(run)


def names(paths: list[Path], suffix: str) -> set[str]:
    return {path.stem for path in paths if path.suffix == suffix}


def test_every_figure_is_saved_as_png_and_as_svg_with_text_in_it(run: Path) -> None:
    paths = save_all(run)
    assert names(paths, ".png") == names(paths, ".svg") == TRAINING | REPLAY
    assert {path.parent for path in paths} == {run / "plots"}
    assert {path.name for path in (run / "plots").iterdir()} == {path.name for path in paths}
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG" if path.suffix == ".png" else b"<?xml")
    svg = (run / "plots" / "learning.svg").read_text()
    for words in ("pass@1", "fresh questions", "held-out: arithmetic (95 %)", "mixed phase"):
        assert f">{words}<" in svg


def test_equal_figures_give_equal_files(run: Path, tmp_path: Path) -> None:
    metrics = read_metrics(run)
    first, second = (save(learning_curve(metrics, {}), tmp_path / name, "learning") for name in "ab")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


@pytest.mark.parametrize(
    "spec",
    [
        SyntheticRun(steps=1, num_questions=60, questions_per_step=8, mixed_from=2, finished=False),
        SyntheticRun(steps=3, num_questions=60, questions_per_step=8, mixed_from=2, finished=False),
        SyntheticRun(
            steps=3, num_questions=60, questions_per_step=8, mixed_from=1, rules=ReplaySettings(metric="random")
        ),
    ],
    ids=["nothing stored", "one replay", "nothing measured"],
)
def test_short_runs_are_drawn_without_a_warning(tmp_path: Path, spec: SyntheticRun) -> None:
    write_run(tmp_path / "run", spec)
    figures = dict([*training_figures(tmp_path / "run"), *replay_figures(summarise(tmp_path / "run"))])
    assert set(figures) == (TRAINING if spec.finished else ALWAYS) | REPLAY
    for figure in figures.values():
        figure.canvas.draw()


def test_a_run_without_replay_gets_the_training_figures_only(tmp_path: Path) -> None:
    write_config(make(tmp_path / "grpo"), SyntheticRun(), method="grpo", replay=False)
    line = {"step": 1, "phase": "on-policy", "batch/pass_at_1": 0.5, "optim/grad_norm": 0.4}
    (tmp_path / "grpo" / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    paths = save_all(tmp_path / "grpo")
    assert names(paths, ".svg") == ALWAYS
    assert "replayed" not in (tmp_path / "grpo" / "plots" / "diagnostics.svg").read_text()


def test_a_run_before_its_first_step_says_that_there_is_nothing(tmp_path: Path) -> None:
    write_config(make(tmp_path / "new"), SyntheticRun())
    (tmp_path / "new" / "metrics.jsonl").write_text("")
    save_all(tmp_path / "new")
    for name in ALWAYS:
        assert ">no step has finished yet<" in (tmp_path / "new" / "plots" / f"{name}.svg").read_text()


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no metrics\.jsonl"):
        save_all(tmp_path)


def test_the_heat_map_holds_the_questions_of_every_bucket_and_step(summary: ReplaySummary) -> None:
    counts, draws, _ = bucket_occupancy(summary).axes
    occupied = np.flatnonzero(summary.occupancy.in_bucket.any(axis=0))
    shown = range(occupied[0], occupied[-1] + 1)
    [image] = counts.collections
    np.testing.assert_array_equal(image.get_array().filled(0), summary.occupancy.in_bucket[:, shown].T)
    assert isinstance(image.norm, LogNorm)
    drawn = {k: sum(row.drawn for row in summary.draws.buckets if row.bucket == k) for k in shown}
    assert {round(bar.get_y() + bar.get_height() / 2): bar.get_width() for bar in draws.patches} == drawn


def test_the_flow_between_buckets_follows_each_replayed_question(summary: ReplaySummary, run: Path) -> None:
    ledger = LedgerReader(run / "replay")
    expected: dict[tuple[int, object], int] = {}
    latest: dict[tuple[int, str], tuple[str, object]] = {}
    for row in ledger.events().to_pylist():
        latest[row["step"], row["question_id"]] = (row["event"], row["bucket"])
    for row in ledger.events().to_pylist():
        if row["event"] == "selected":
            event, bucket = latest[row["step"], row["question_id"]]
            key = (row["bucket"], "retired" if event == "retired" else bucket)
            expected[key] = expected.get(key, 0) + 1
    flow = summary.flow
    told = {(b, a): n for (b, a), n in np.ndenumerate(flow.between) if n}
    told |= {(b, "retired"): n for b, n in enumerate(flow.retired) if n} | {
        (b, None): n for b, n in enumerate(flow.dropped) if n
    }
    assert told == expected
    (axes,) = bucket_flow(summary).axes
    first = int(np.flatnonzero(flow.visits)[0])
    row = [float(text.get_text().rstrip("%")) for text in axes.texts if text.get_position()[1] == 0.5]
    assert sum(row) == pytest.approx(100, abs=5)
    assert axes.get_yticklabels()[0].get_text() == f"{first} ({flow.visits[first]})"


def test_entropy_is_compared_within_stretches_of_steps(summary: ReplaySummary, run: Path) -> None:
    windows = summary.entropy_windows
    assert len(windows) == 4 and windows[-1].last_step == 45
    born = LedgerReader(run / "replay").trajectories().to_pylist()
    assert all(second.first_step == first.last_step + 1 for first, second in itertools.pairwise(windows))
    for window in windows:
        inside = [row for row in born if window.first_step <= row["step_born"] <= window.last_step]
        hard = np.mean([row["entropy"] for row in inside if row["k"] <= 2])
        easy = np.mean([row["entropy"] for row in inside if row["k"] >= 6])
        assert window.hard_over_easy == pytest.approx(hard / easy)
        assert sum(group.trajectories for group in window.by_bucket) == len(inside)
    figure = entropy_by_bucket(summary)
    assert "whiskers 5-95 %" in figure.get_supxlabel()
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()][-1] == "whole run"


@pytest.mark.slow
def test_what_another_policy_would_have_drawn_is_a_figure(run: Path, tmp_path: Path) -> None:
    reports = report_runs([run], what_if="sampler=linear,metric=random")
    assert tmp_path / "replay-what-if.svg" in save_reports(reports, [tmp_path])
    svg = (tmp_path / "replay-what-if.svg").read_text()
    assert ">what if: linear<" in svg and ">what if: random<" in svg and ">run: ent:min<" in svg
    bars = what_if_figure(reports[0]).axes[0].patches
    assert sum(bar.get_height() for bar in bars[: len(bars) // 2]) == len(reports[0].summary.replays.step)


def test_two_lone_points_are_not_joined_and_maxima_are_not_averaged() -> None:
    few = RunMetrics(
        steps=np.arange(1, 61),
        mixed=np.zeros(60, dtype=bool),
        columns={
            "batch/pass_at_1": np.linspace(0.2, 0.6, 60),
            "replay/pass_at_1": np.where(np.arange(60) < 2, 0.5, np.nan),
            "policy/ratio_fresh": np.full(60, 1.0),
            "policy/ratio_fresh_max": np.where(np.arange(60) == 30, 50.0, 2.0),
            "policy/clip_fraction": np.where(np.arange(60) < 3, 0.1, np.nan),
            "replay/ess": np.zeros(60),
        },
    )
    ends = [HeldoutScore(step=step, value=0.5, low=0.4, high=0.6) for step in (0, 60)]
    figure = learning_curve(few, {"arithmetic": ends})
    [axes] = figure.axes
    assert {
        line.get_linestyle() for line in axes.lines if len(line.get_xdata()) == 2 and line.get_marker() in "oD"
    } == {"None"}
    assert figure.get_supxlabel() == "thin: each step; thick: mean over 3 steps"
    [ratio] = policy_diagnostics(few).axes  # always 0, or logged in a corner only: no panel
    assert [line.get_ydata().max() for line in ratio.lines] == [1.0, 1.0, 50.0]


def test_accuracy_is_drawn_against_the_tokens_it_cost(run: Path) -> None:
    metrics = read_metrics(run)
    heldout = heldout_scores(run, metrics)
    [axes] = accuracy_by_tokens(metrics, heldout).axes
    generated = metrics.series("tokens/generated")
    expected = [generated[: score.step].sum() for score in heldout["arithmetic"]]
    assert axes.lines[0].get_xdata().tolist() == expected
    assert accuracy_by_tokens(metrics, {}) is None


def test_panels_leave_no_place_empty() -> None:
    figure, panels = full_rows(5, 3, width=7, row_height=2)
    figure.canvas.draw()
    ends = [round(axes.get_position().x1, 2) for axes in panels]
    assert len(panels) == 5 and ends[2] == ends[4]


def test_the_learning_curve_shows_held_out_scores_with_their_intervals(run: Path) -> None:
    metrics = read_metrics(run)
    heldout = heldout_scores(run, metrics)
    # Validated at 10, 20, 30, 40; before (0) and after (45) come from summary.json.
    assert [score.step for score in heldout["arithmetic"]] == [0, 10, 20, 30, 40, 45]
    assert heldout["arithmetic"][0].low == pytest.approx(heldout["arithmetic"][0].value - 0.03)
    (axes,) = learning_curve(metrics, heldout).axes
    (bars,) = axes.containers
    drawn = [segment[:, 1].tolist() for segment in bars.lines[2][0].get_segments()]
    np.testing.assert_allclose(drawn, [[score.low, score.high] for score in heldout["arithmetic"]])


def test_while_a_run_goes_on_its_validations_are_shown_without_the_ends(run: Path, tmp_path: Path) -> None:
    metrics = read_metrics(run)
    assert [score.step for score in heldout_scores(tmp_path, metrics)["arithmetic"]] == [10, 20, 30, 40]


def test_diagnostics_leave_out_what_was_not_logged() -> None:
    metrics = RunMetrics(
        steps=np.array([1, 2]),
        mixed=np.array([False, False]),
        columns={"policy/entropy": np.array([0.5, 0.4]), "optim/grad_norm": np.array([0.2, 90.0])},
    )
    entropy, norm = policy_diagnostics(metrics).axes
    assert (entropy.get_title(loc="left"), norm.get_title(loc="left")) == ("policy entropy (nats)", "gradient norm")
    assert (entropy.get_yscale(), norm.get_yscale()) == ("linear", "log")


def test_drawn_and_promised_are_both_there(summary: ReplaySummary) -> None:
    (axes,) = draws_against_promise(summary).axes
    assert [bar.get_height() for bar in axes.patches] == [row.drawn for row in summary.draws.buckets]
    (promised,) = axes.lines
    np.testing.assert_allclose(promised.get_ydata(), [row.expected for row in summary.draws.buckets])


def test_runs_are_compared_in_one_figure(summary: ReplaySummary) -> None:
    figure = buffers_compared(["a", "b"], [summary, summary])
    assert len(figure.axes) == 6
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]


def test_no_figure_has_text_that_leaves_it_or_overlaps_its_neighbours(run: Path, summary: ReplaySummary) -> None:
    for name, figure in [*training_figures(run), *replay_figures(summary)]:
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


def test_moving_average_by_hand() -> None:
    # Window 3: at the ends over two values.
    values = np.array([1.0, 2.0, 6.0, 1.0])
    assert moving_average(values, 3).tolist() == [1.5, 3.0, 3.0, 3.5]


def test_brief_counts() -> None:
    counts = {0: "0", 999: "999", 1000: "1k", 9_940: "9.9k", 9_960: "10k", 31_400: "31k", 1_500_000: "1.5M"}
    assert {count: brief_count(count) for count in counts} == counts


def test_bucket_colours_rise_in_lightness() -> None:
    lightness = [0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b, _ in bucket_colours(8)]
    assert lightness == sorted(lightness)


BLOCKED = """
import sys, warnings
warnings.simplefilter("error")
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "vllm", "deepspeed"):
            raise ImportError(f"{name} is not installed")
sys.meta_path.insert(0, Blocker())
from pathlib import Path
from exgrpo_cli.plots.evaluation import accuracy_by_level, level_scores
from exgrpo_cli.plots.gallery import replay_figures, save_reports, training_figures
from exgrpo_cli.plots.style import save
from exgrpo_cli.replay_stats.output.report import report_runs
from exgrpo_cli.replay_stats.summary import summarise
figures = dict([*training_figures(Path(sys.argv[1])), *replay_figures(summarise(Path(sys.argv[1])))])
save(figures["learning"], Path(sys.argv[2]), "learning")
print(len(figures))
"""


def test_figures_need_no_torch_and_no_writable_home(run: Path, tmp_path: Path) -> None:
    # A home that is no folder refuses even the superuser.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "MPL"))}
    result = subprocess.run(
        [sys.executable, "-c", BLOCKED, str(run), str(tmp_path / "plots")],
        env=environment | {"HOME": "/dev/null"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{len(TRAINING | REPLAY)}\n", "")
    assert (tmp_path / "plots" / "learning.png").is_file()


def test_levels_come_in_the_order_of_their_numbers() -> None:
    by_level = {level: {"avg_at_k": share, "questions": 5} for level, share in (("10", 0.1), ("2", 0.9), ("hard", 0.0))}
    by_level["10"] |= {"low": 0.05, "high": 0.3}
    scores = level_scores({"a": {"by_level": by_level}, "b": {"by_level": {}}}, {"a": "Benchmark"})
    (axes,) = accuracy_by_level(scores).axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["2\n(5)", "10\n(5)", "hard\n(5)"]
    assert axes.lines[0].get_ydata().tolist() == [90.0, 10.0, 0.0]
    # An older result has no intervals.
    (bars,) = (each for each in axes.collections if hasattr(each, "get_segments"))
    assert bars.get_segments()[1][:, 1].tolist() == [5.0, 30.0]
