"""The published results: docs/claims.md has the verdicts that they give, and effects on some questions can be had."""

import json
import math
import re
import runpy
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.config.requests import StudyRequest
from exgrpo_cli.runs.result import read_result
from exgrpo_cli.studies.claims import chosen_claims, claim_outcomes, claim_results
from exgrpo_cli.studies.planning import plan_claims

DOCS = Path(__file__).parents[2] / "docs"
REAL, REAL_SEEDS = DOCS / "results" / "real", range(500, 512)
CLAIMS = (DOCS / "claims.md").read_text()


def test_the_verdicts_are_those_of_the_results(tmp_path: Path) -> None:
    study = plan_claims(chosen_claims("all"), tmp_path / "claims", StudyRequest(results=[DOCS / "results"]))
    judged = [each for each in claim_outcomes(study).values() if each["verdict"] != "not run"]
    found = Counter((each["regime"], each["verdict"]) for each in judged)
    said = re.findall(
        r"^\| .* \| `([a-z-]+)` \| (?:\*\*)?(supported|too small to matter|reversed|undecided)(?:\*\*)? \|",
        CLAIMS,
        flags=re.MULTILINE,
    )
    assert Counter(said) == found


def reference_interval(matrix: list[list[float]], level: float) -> tuple[float, float, float]:
    """Mean and ends of seeds x questions by sums written out; of one column a plain t interval, or where all seeds
    agree as far as Wilson's upper end of 0 of S, in [-1, 1], at 95 %."""
    num_seeds, num_questions = len(matrix), len(matrix[0])
    mean = sum(map(sum, matrix)) / (num_seeds * num_questions)
    seeds = [sum(row) / num_questions for row in matrix]
    questions = [sum(row[q] for row in matrix) / num_seeds for q in range(num_questions)]
    squares = sum((each - mean) ** 2 for each in seeds) / ((num_seeds - 1) * num_seeds)
    if num_questions > 1:
        residual = sum(
            (value - seeds[s] - questions[q] + mean) ** 2 for s, row in enumerate(matrix) for q, value in enumerate(row)
        ) / ((num_seeds - 1) * (num_questions - 1))
        between = sum((each - mean) ** 2 for each in questions) / (num_questions - 1)
        squares += max(0.0, between - residual / num_seeds) / num_questions
    quantile, usual = (float(stats.t.ppf(0.5 + each / 2, num_seeds - 1)) for each in (level, 0.95))
    if squares == 0:
        z = float(stats.norm.ppf(0.975))
        squares = ((1 + abs(mean)) * z**2 / (num_seeds + z**2) / usual) ** 2
    half = quantile * math.sqrt(squares)
    return mean, mean - half, mean + half


def written(mean: float, low: float, high: float) -> str:
    """An effect as the pages write it."""
    return f"{mean:+.3f} [{low:.3f}, {high:.3f}]"


def gain(of: Any) -> float:
    """Pass@1 after training less before."""
    return float(of.after - of.before)


def test_the_table_of_verdicts_follows_from_the_result_files_by_a_reference(tmp_path: Path) -> None:
    """Every claim judged again from the counts of right answers, or from what a run says of itself as a whole."""
    claims = chosen_claims("all")
    study = plan_claims(claims, tmp_path / "claims", StudyRequest(results=[DOCS / "results"]))
    results, told = study.results(), claim_outcomes(study)
    values: dict[str, Callable[[Any], list[float]]] = {
        "pass_at_1": lambda run: [right / run.samples for right in run.after],
        "pass_at_n": lambda run: [float(right > 0) for right in run.after],
        "beyond_pass_at_1": lambda run: [float(right > 0) - right / run.samples for right in run.after],
        "intact": lambda run: [0.0 if run.collapsed else 1.0],
        "memorised": lambda run: [gain(run.memorising.replayed) - gain(run.memorising.never_seen)],
        "valid_auc_within": lambda run: [run.valid_traces.auc_within],
        "valid_gap": lambda run: [run.valid_traces.low_entropy - run.valid_traces.high_entropy],
    }
    for claim in claims:
        runs, rows = claim_results(claim, study.arms, results), []
        for contrast in claim.contrasts:
            value, matrix = values[contrast.endpoint], []
            for seed, run in sorted(runs[contrast.arm].items()):
                of_run = value(run)
                control = [contrast.reference] * len(of_run)
                if contrast.control:
                    control = value(runs[contrast.control][seed])
                matrix.append([own - other for own, other in zip(of_run, control, strict=True)])
            smallest = contrast.smallest_effect
            asked = smallest if contrast.direction == "greater" else -smallest
            ends = [reference_interval(matrix, level) for level in (0.95, 1 - 0.05 / len(claim.contrasts))]
            rows.append((asked, smallest, ends))
        verdict = "undecided"
        if all(ends[0][1] > asked for asked, _, ends in rows):
            verdict = "supported"
        elif any(ends[1][2] < -smallest for _, smallest, ends in rows):
            verdict = "reversed"
        elif any(asked > 0 and -asked < ends[1][1] and ends[1][2] < asked for asked, _, ends in rows):
            verdict = "too small to matter"
        assert told[claim.name]["verdict"] == verdict, claim.name
        for (_, _, ends), contrast in zip(rows, told[claim.name]["contrasts"], strict=True):
            found = [contrast["effect"][each] for each in ("mean", "low", "high")]
            assert found == pytest.approx([max(-1.0, min(1.0, end)) for end in ends[0]], abs=1e-9)
            assert written(*found) in CLAIMS, (claim.name, contrast["endpoint"])
    assert len(claims) == 24


def test_the_row_of_the_real_model_follows_from_its_result_files() -> None:
    """ExGRPO less on-policy training, by the same reference: of twelve seeds, and of the eight that were read first."""
    pairs = [[read_result(REAL / f"{arm}-{seed}.result.json") for arm in ("exgrpo", "grpo")] for seed in REAL_SEEDS]
    matrix = [[(own - other) / 4 for own, other in zip(a.after, b.after, strict=True)] for a, b in pairs]
    effect, first = (written(*reference_interval(matrix[:seeds], 0.95)) for seeds in (12, 8))
    assert f"pass@1 {effect}, +0.04: " in CLAIMS
    assert f"pass@1 (primary; secondary) | **{first}**" in (DOCS / "lab-notebook.md").read_text()


PUBLISHED = sorted((DOCS / "results").rglob("*.json"))


def test_every_result_would_be_missed_if_a_figure_of_it_changed(tmp_path: Path) -> None:
    """Results of earlier versions, which have no checksum, are read without one: here none may be."""
    assert len(PUBLISHED) > 400
    assert [path.name for path in PUBLISHED if "checksum" not in json.loads(path.read_text())] == []
    for path in PUBLISHED:
        assert read_result(path).samples > 0
    changed = Path(shutil.copy(DOCS / "results" / "strong-grpo-200.result.json", tmp_path))
    text = changed.read_text()
    assert '"generated": 508462' in text
    changed.write_text(text.replace('"generated": 508462', '"generated": 408462'))
    with pytest.raises(InputError, match=r"strong-grpo-200\.result\.json has changed since its run wrote it"):
        read_result(changed)


def printed(capsys: pytest.CaptureFixture[str], script: str) -> list[str]:
    runpy.run_path(str(DOCS / "results" / script), run_name="__main__")
    return capsys.readouterr().out.splitlines()


@pytest.mark.slow
def test_effects_on_some_of_the_questions_are_those_of_the_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    notebook = (DOCS / "lab-notebook.md").read_text()
    lines = printed(capsys, "by_question.py")
    assert len(lines) == 5 * 7 * 3
    assert {int(line.split(", ")[3]) for line in lines} >= {400, 254, 146, 200, 73, 181}
    lines = printed(capsys, "sampler/compare.py")
    effects = [re.search(r"[+-]\d.*", line) for line in lines]
    assert len(lines) == 6 and all(effect and effect[0] in notebook for effect in effects)
    lines = printed(capsys, "by_level.py")
    assert len(lines) == 3 * 2 * 6
    [other_seeds] = [line for line in lines if line.startswith("8 seeds from 440, pass@1, levels 5 to 7:")]
    effect = re.search(r"[+-]\d\S+ \[.*?\]", other_seeds)
    assert effect and effect[0] in notebook


def test_the_map_is_drawn_from_the_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["map.py", str(tmp_path)])
    assert "pass@1: exgrpo, search, 16 seeds from 360: +0.081 [0.061, 0.102]" in printed(capsys, "map.py")
    assert (tmp_path / "map.png").is_file()
