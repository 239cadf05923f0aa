"""Where replay pays: each kind less on-policy training in each regime, as `docs/images/map.png`.

Run as `.venv/bin/python docs/results/map.py [FOLDER]`; prints what it draws. Every row has as many generated tokens in
all of its arms; pairs are of one seed and one start.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from exgrpo_cli.runs.result import read_result
from exgrpo_cli.show.figures.style import BLUE, GREEN, GREY, PURPLE, VERMILION, entitle, new_figure, styled
from exgrpo_cli.show.figures.written import save
from exgrpo_cli.studies.endpoints import SEEDS_FOR_A_VERDICT, Effect, effect_over_questions, pass_at_1, pass_at_n

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FOLDER = Path(__file__).parent
ENDPOINTS = {"pass@1": pass_at_1, "pass@4": pass_at_n}


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A kind of replay."""

    arm: str
    title: str
    colour: str
    marker: str


KINDS = (
    Kind(arm="exgrpo", title="ExGRPO", colour=VERMILION, marker="D"),
    Kind(arm="headroom-near", title="headroom-near: beside the batch", colour=BLUE, marker="o"),
    Kind(arm="refill-near", title="refill-near: in place of groups that teach nothing", colour=GREEN, marker="s"),
    Kind(arm="sft-successes", title="sft-successes: stored successes imitated", colour=PURPLE, marker="^"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    """Runs of one arm and of on-policy training with the same seeds."""

    seeds: Sequence[int]
    folder: str = "."
    control: str = "."
    """Folder of on-policy training."""


REGIMES: Mapping[str, tuple[str, Mapping[str, Runs]]] = {
    "a good start\n(strong)": (
        "strong",
        {
            "exgrpo": Runs(seeds=range(200, 208)),
            "headroom-near": Runs(seeds=range(200, 208)),
            "sft-successes": Runs(seeds=range(200, 205), folder="methods"),
        },
    ),
    "half of the questions too hard\n(hard-tail)": (
        "hard-tail",
        {
            "exgrpo": Runs(seeds=(*range(200, 209), *range(440, 448))),
        },
    ),
    "found by search\n(search, 14 starts)": (
        "search",
        {
            "exgrpo": Runs(seeds=range(340, 354)),
            "headroom-near": Runs(seeds=range(320, 334), folder="starts", control="starts"),
            "refill-near": Runs(seeds=range(340, 354)),
        },
    ),
    "search, steps too large: on-policy\nends at 0 (1e-3, 16 and 8 starts)": (
        "search",
        {
            "exgrpo": Runs(seeds=range(360, 376)),
            "sft-successes": Runs(seeds=range(360, 368), folder="weak"),
        },
    ),
    "hardly ever a success\n(sparse)": (
        "sparse",
        {
            "exgrpo": Runs(seeds=range(110, 113), folder="headrooms", control="headrooms"),
            "headroom-near": Runs(seeds=range(110, 113), folder="variants", control="headrooms"),
            "refill-near": Runs(seeds=range(110, 113), folder="variants", control="headrooms"),
        },
    ),
    "a guess pays one time in five\n(guessable)": (
        "guessable",
        {
            "exgrpo": Runs(seeds=range(110, 113), folder="headrooms", control="headrooms"),
            "headroom-near": Runs(seeds=range(110, 113), folder="variants", control="headrooms"),
            "refill-near": Runs(seeds=range(110, 113), folder="variants", control="headrooms"),
        },
    ),
    "a good start, steps too large\n(collapse)": (
        "collapse",
        {
            "exgrpo": Runs(seeds=range(200, 209)),
            "headroom-near": Runs(seeds=range(200, 203), folder="variants"),
            "refill-near": Runs(seeds=range(200, 203), folder="variants"),
        },
    ),
}
"""Title, name, and where the runs of each kind are."""


def scores(arm: str, regime: str, folder: str, seeds: Sequence[int], endpoint: str) -> np.ndarray:
    """Of each seed (first axis) and held-out question."""
    paths = [FOLDER / folder / f"{regime}-{arm}-{seed}.result.json" for seed in seeds]
    return np.stack([ENDPOINTS[endpoint](read_result(path)) for path in paths])


def effect(arm: str, regime: str, runs: Runs, endpoint: str) -> Effect:
    """The arm less on-policy training."""
    own = scores(arm, regime, runs.folder, runs.seeds, endpoint)
    other = scores("grpo", regime, runs.control, runs.seeds, endpoint)
    return effect_over_questions(own - other, bounds=(-1.0, 1.0))


def draw(panel: "Axes", endpoint: str) -> None:
    """A row a regime, in it a mark a kind of replay; print each."""
    from matplotlib.ticker import MaxNLocator

    panel.axvline(0.0, color=GREY, linewidth=0.9, linestyle=(0, (4, 2)), zorder=1)
    for row, (regime, of_kind) in enumerate(REGIMES.values()):
        for place, kind in enumerate(KINDS):
            if kind.arm not in of_kind:
                continue
            runs = of_kind[kind.arm]
            found = effect(kind.arm, regime, runs, endpoint)
            numbers = f"{found.mean:+.3f} [{found.low:.3f}, {found.high:.3f}]"
            print(f"{endpoint}: {kind.arm}, {regime}, {found.seeds} seeds from {runs.seeds[0]}: {numbers}")
            full = found.seeds >= SEEDS_FOR_A_VERDICT
            panel.errorbar(
                [found.mean],
                [row + 0.21 * (place - 1.5)],
                xerr=[[found.mean - found.low], [found.high - found.mean]],
                color=kind.colour,
                marker=kind.marker,
                markersize=4.5,
                markerfacecolor=kind.colour if full else "white",
                elinewidth=1.4 if full else 0.7,
                capsize=2.5,
            )
    panel.xaxis.set_major_locator(MaxNLocator(nbins=6))
    panel.set_title(f"{endpoint} less that of on-policy training")
    panel.set_ylim(len(REGIMES) - 0.5, -0.5)
    panel.set_yticks(range(len(REGIMES)), [""] * len(REGIMES))
    panel.tick_params(axis="y", length=0)
    panel.grid(visible=False, axis="y")
    for row in range(1, len(REGIMES)):
        panel.axhline(row - 0.5, color="#E3E3E3", linewidth=0.5)


def main(folder: Path) -> None:
    """Draw into the folder, print."""
    from matplotlib.lines import Line2D

    with styled():
        figure, panels = new_figure(columns=2, width=7.0, height=4.6)
        for panel, endpoint in zip(panels, ENDPOINTS, strict=True):
            draw(panel, endpoint)
        panels[0].set_yticks(range(len(REGIMES)), list(REGIMES))
        marks = [
            Line2D([], [], color=kind.colour, marker=kind.marker, markersize=4.5, linestyle="", label=kind.title)
            for kind in KINDS
        ]
        few = Line2D([], [], color=GREY, marker="o", markersize=4.5, markerfacecolor="white", linestyle="")
        few.set_label("fewer than eight seeds: no finding")
        figure.legend(handles=[*marks, few], loc="outside lower center", ncols=2, columnspacing=1.5)
    entitle(figure, "Where replay pays: what each kind of it adds to on-policy training, regime by regime")
    save(figure, folder, "map", formats=("png",))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER.parent / "images")
