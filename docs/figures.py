"""Every figure of these pages, drawn anew: `.venv/bin/python docs/figures.py [RUNS]`.

Studies and claims are drawn from `results/`, the map of regimes by `results/map.py`. The guide shows two runs,
RUNS/healthy and RUNS/sick: without RUNS, or where they are not there, they are trained first (15 minutes on two quiet
cores). The README's picture puts `images/terminal.svg` beside them, which `python docs/terminal.py` records anew.
`images/architecture.svg` is written by hand. Colours are those of Okabe and Ito (2008), distinct to
colour-blind readers.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent / "results"))
import map as map_of_regimes
import numpy as np
import real_model
from PIL import Image

from exgrpo_cli.base.statistics import t_interval
from exgrpo_cli.config.requests import StudyRequest
from exgrpo_cli.runs.result import read_result
from exgrpo_cli.show.figures import style
from exgrpo_cli.show.figures.comparisons import ArmScore, arm_curves, claims_figure
from exgrpo_cli.show.figures.style import TITLE as OF_FIGURE
from exgrpo_cli.show.figures.style import entitle
from exgrpo_cli.show.figures.written import save
from exgrpo_cli.show.statistics import save_all
from exgrpo_cli.studies.claims import claim_outcomes
from exgrpo_cli.studies.endpoints import Effect, endpoint_named, paired_effect, pass_at_1
from exgrpo_cli.studies.output import TITLE, study_figures
from exgrpo_cli.studies.planning import plan_request
from exgrpo_cli.studies.report import compare_runs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOCS = Path(__file__).parent
RESULTS = DOCS / "results"
SICK = "optim.learning_rate=6e-4 optim.warmup_steps=0 validation.every=10 arithmetic.num_heldout=200"
GUIDE = {
    "healthy": ((), ("learning", "diagnostics", "replay-questions", "replay-entropy", "replay-buckets")),
    "sick": (("--steps", "60", *(f"--set={each}" for each in SICK.split())), ("learning", "diagnostics")),
}
"""Options of the guide's runs, as `guide/reading-a-run.md` has them, and the figures of each that it shows."""
METHODS = (
    "grpo,exgrpo,latest,headroom-drift,uniform-fifo,adv-per,fresh-per,repo,trl-refill,bapo-refill,su01,sft-successes,"
    "dynamic-sampling,dapo,dbb"
)
SMOLLM2 = {"on-policy (grpo)": (0.500, 0.450, 0.550), "exgrpo": (0.510, 0.475, 0.560)}
"""Held-out pass@1 after 35 steps with seeds 200, 201 and 202, as `real-model.md` has it; before training 0.225."""

ADAPTERS = {32: (-0.011, -0.030, 0.007), 8: (-0.036, -0.054, -0.018), 1: (-0.144, -0.161, -0.127)}
"""What an adapter of a rank loses on tiny, as entry 37 of the notebook has it."""
ROUNDED = (0.012, -0.006, 0.031)
"""What rounded factors change on tiny (entry 40)."""
RESAMPLED = {"strong": (0.006, -0.011, 0.024), "weak": (-0.009, -0.038, 0.021)}
"""ExGRPO less dynamic sampling on tiny, of the results of entries 17 and 33."""
SOUND = (0.904, 0.791, 1.0)
"""By entropy, of SmolLM2's right answers with sound working (entry 44)."""
SMALL_STUDIES = ("lora-smollm2", "rounded-smollm2")
"""Folders of results of SmolLM2 with two to four seeds."""
LARGER = ("Qwen2.5-0.5B", "Qwen2.5-Math-1.5B", "Qwen2.5-Math-7B")


def retitle(figure: "Figure", title: str) -> "Figure":
    """The figure with another title."""
    for text in [text for text in figure.texts if text.get_gid() == OF_FIGURE]:
        text.remove()
    return entitle(figure, title)


def studies() -> "Iterator[tuple[str, Figure]]":
    """Name and figure of all that published results tell."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        every = plan_request(StudyRequest(claim="all", results=(RESULTS,), output=folder / "claims"))
        if figure := claims_figure(claim_outcomes(every).values()):
            yield "claims", figure
        weak = plan_request(StudyRequest(claim="no-collapse-weak", results=(RESULTS,), output=folder / "weak"))
        title = "Held-out pass@1 after steps that are too large: on-policy training falls to 0, ExGRPO recovers"
        yield "weak-model", retitle(study_figures(weak, compare_runs(weak))["curves"], title)
        published, seeds = (RESULTS, RESULTS / "methods"), "200,201,202,203,204"
        methods = plan_request(
            StudyRequest(
                regimes="strong",
                methods=METHODS,
                seeds=seeds,
                equal="steps",
                config_file=RESULTS / "budget.toml",
                results=published,
                output=folder / "methods",
            )
        )
        title = "What each method adds to the held-out pass@1 of on-policy training at equal generated tokens"
        yield "methods", retitle(study_figures(methods, compare_runs(methods))["differences"], title)
    curves = []
    for name, after in SMOLLM2.items():
        ends = [t_interval([0.225] * len(after)), t_interval(after, bounds=(0.0, 1.0))]
        means, lows, highs = ([getattr(end, part) for end in ends] for part in ("mean", "low", "high"))
        curves.append(ArmScore(name=name, steps=[0, 35], mean=means, low=lows, high=highs))
    yield "laptop-or-scale", laptop_or_scale()
    figure = arm_curves(curves, baselines=["on-policy (grpo)"], measure=TITLE)
    assert figure is not None
    yield (
        "smollm2",
        retitle(figure, "SmolLM2-135M learns word problems with both methods, which three seeds do not tell apart"),
    )


def laptop_or_scale() -> "Figure":
    """Contrasts that were run on tiny and on SmolLM2 under one another, with empty rows for what a GPU has to say."""
    endings: dict[str, dict[int, float]] = {}
    for path in sorted(path for folder in SMALL_STUDIES for path in (RESULTS / folder).glob("*.result.json")):
        arm, result = path.name.rpartition("-")[0], read_result(path)
        endings.setdefault(arm, {})[result.seed] = float(pass_at_1(result).mean())

    def of_smollm2(arm: str, control: str) -> style.Row:
        seeds = sorted(endings[arm].keys() & endings[control].keys())
        differences = [endings[arm][seed] - endings[control][seed] for seed in seeds]
        found, few = t_interval(differences), len(differences) < 3
        low, high = (found.mean, found.mean) if few else (found.low, found.high)
        name = f"SmolLM2-135M, {len(differences)}{' (no interval)' if few else ''}"
        return style.Row(name, found.mean, low, high, None, style.ORANGE, dots=differences)

    _, secondary = real_model.effects(real_model.read(RESULTS / "real"))

    def of_real(endpoint: str) -> Effect:
        arms = [
            {result.seed: result for result in map(read_result, (RESULTS / "real").glob(f"{arm}-*.result.json"))}
            for arm in ("exgrpo", "grpo")
        ]
        found = paired_effect(endpoint_named(endpoint), *arms)
        assert found is not None
        return found

    def ends(effect: Effect) -> tuple[float, float, float]:
        return effect.mean, effect.low, effect.high

    def told(name: str, ends: Sequence[float], colour: str = style.BLUE) -> style.Row:
        return style.Row(name, *ends, None, colour)

    panels = {
        "ExGRPO less on-policy training": [
            told("tiny, strong, 8 seeds", (-0.012, -0.032, 0.008)),
            told("tiny, hard-tail, 17", (0.011, -0.002, 0.025)),
            told("tiny, search, 14", (0.013, 0.003, 0.023)),
            told("tiny, search, weak starts at 1e-3, 16", (0.081, 0.061, 0.102)),
            told("SmolLM2-135M, word problems, 12", ends(of_real("pass_at_1")), style.ORANGE),
            told("the same, 35 steps of other seeds, 3", (0.015, -0.030, 0.060), style.ORANGE),
            of_smollm2("exgrpo", "on-policy"),
            *(told(name, (np.nan,) * 3) for name in LARGER),
        ],
        "The same in pass@4": [
            told("tiny, strong, 8 seeds", (-0.013, -0.027, 0.002)),
            told("tiny, hard-tail, 17", (0.002, -0.014, 0.019)),
            told("tiny, search, 14", (-0.038, -0.058, -0.018)),
            told("SmolLM2-135M, word problems, 12", ends(of_real("pass_at_n")), style.ORANGE),
        ],
        "ExGRPO less dynamic sampling": [
            told("tiny, strong, 5 seeds", RESAMPLED["strong"]),
            told("tiny, search, weak starts at 1e-3, 8", RESAMPLED["weak"]),
            told("SmolLM2-135M, word problems, 8", ends(secondary["pass@1 less dynamic-sampling"]), style.ORANGE),
        ],
    }
    for rank, tiny in ADAPTERS.items():
        title = f"An adapter of rank {rank} less all weights"
        panels[title] = [told("tiny, strong, 13", tiny), of_smollm2(f"rank-{rank}", "exgrpo")]
    panels["Matmuls of bfloat16 factors less float32"] = [told("tiny, 16", ROUNDED), of_smollm2("rounded", "exgrpo")]
    panels["Low entropy marks sound working (AUC)"] = [
        told("tiny, strong, 8", (0.751, 0.738, 0.764)),
        told("tiny, guessable, 8", (0.819, 0.784, 0.854)),
        told("SmolLM2-135M, word problems, 6", SOUND, style.ORANGE),
    ]
    heights = [len(rows) + 0.2 for rows in panels.values()]
    height = 1.2 + 0.4 * sum(heights)
    with style.styled():
        figure, places = style.new_figure(len(panels), height=height, height_ratios=heights)
        for axes, (title, rows) in zip(places, panels.items(), strict=True):
            style.draw_rows(axes, rows, reference=0.0 if axes is not places[-1] else 0.5)
            for place, row in enumerate(rows):
                if np.isnan(row.mean):
                    axes.text(-0.14, place + 0.5, "not run: needs a GPU", va="center", fontsize=8, color=style.GREY)
            axes.set_title(title, loc="left")
        for axes in places[:-1]:
            axes.set_xlim(-0.18, 0.12)
            axes.tick_params(labelbottom=axes is places[-2])
        places[-2].set_xlabel("difference in held-out pass@1, or pass@4\n(mean, 95 % interval; circles: single seeds)")
        return entitle(figure, "What a laptop has told of each contrast, and what is still to be told at scale")


def lighten(*pictures: Path) -> None:
    """Write pictures anew with 64 colours, which is all that lines and letters need: a third of the bytes."""
    for path in pictures:
        with Image.open(path) as picture:
            picture.convert("RGB").quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)


def guide(runs: Path) -> None:
    """Figures of the two runs, which are trained where they are not there."""
    for name, (options, shown) in GUIDE.items():
        run = runs / name
        if not (run / "summary.json").is_file():
            subprocess.run([sys.executable, "-m", "exgrpo_cli", "train", "--output", run, *options], check=True)
        save_all(run)
        for figure in shown:
            shutil.copyfile(run / "plots" / f"{figure}.png", DOCS / "figures" / f"{name}-{figure}.png")


SCREEN = """<body style="margin:12px;display:flex;gap:16px;align-items:center;background:white">
<img src="images/terminal.svg" width="760"><div><img src="figures/healthy-learning.png" width="600">
<img src="figures/healthy-replay-buckets.png" width="600"></div></body>"""


def first_screen() -> None:
    """The picture of the README: the terminal of a run beside two of its figures, as a browser lays them out."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("images/first-run.png needs chromium: install it, then run this again.")
    with tempfile.NamedTemporaryFile("w", dir=DOCS, suffix=".html") as page:
        page.write(SCREEN)
        page.flush()
        options = ("--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1410,940")
        shot = f"--screenshot={DOCS / 'images' / 'first-run.png'}"
        subprocess.run([browser, *options, shot, Path(page.name).as_uri()], check=True, capture_output=True)


def main() -> None:
    """Draw them all."""
    map_of_regimes.main(DOCS / "images")
    for name, figure in studies():
        lighten(*save(figure, DOCS / "images", name, formats=("png",)))
    with tempfile.TemporaryDirectory() as made:
        guide(Path(sys.argv[1] if len(sys.argv) > 1 else made))
    first_screen()


if __name__ == "__main__":
    main()
