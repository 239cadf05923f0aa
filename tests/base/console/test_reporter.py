"""What a person sees of a step: whole words and whole numbers, however narrow the terminal."""

import io

import pytest
from rich.console import Console

from exgrpo_cli.base.console.reporter import bucket_bars, step_figures

LINE = {
    "step": 12,
    "phase": "on-policy",
    "batch/pass_at_1": 0.53125,
    "reward/mean": 0.53125,
    "replay/pass_at_1": 0.4,
    "policy/entropy": 0.61,
    "replay/questions": 1234,
    "replay/trajectories": 98765,
    "replay/retired": 7,
    "replay/bucket/1": 30,
    "replay/bucket/4": 15,
    "length/mean": 61.2,
    "time/step": 1.25,
}
SHOWN = (
    "phase on-policy",
    "pass@1 0.531",
    "reward 0.531",
    "replayed pass@1 0.400",
    "entropy 0.610",
    "buffered 1234",
    "trajectories 98765",
    "retired 7",
    "length 61",
    "s/step 1.25",
)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_every_figure_of_a_step_is_shown_whole(width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    console.print(step_figures(LINE), bucket_bars(LINE))
    shown = console.file.getvalue()
    assert max(map(len, shown.splitlines())) <= width
    for figure in (*SHOWN, "k=1", "30", "k=4", "15"):
        assert figure in shown, shown
