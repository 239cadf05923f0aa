"""Stored results compared: which results belong together, what is compared, and what is written."""

import json
from pathlib import Path
from typing import Any

import pytest
from stored_results import with_successes

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.commands import run
from exgrpo_cli.evaluation.comparison import compare, models_in

SAMPLES = 4


def result(path: Path, benchmark: str, model: str, successes: list[int], **values: Any) -> Path:
    values = {"model__hash": model, **values}
    return with_successes(path, successes, benchmark__name=benchmark, model__name=model, **values)


def two_benchmarks(folder: Path, model: str, shift: int, **values: Any) -> Path:
    """AIME24 with pass rates rising by `shift` quarters, MATH-500 the same for every model."""
    result(folder / f"aime24-{model}", "aime24", model, [shift, shift, 1 + shift, 1] * 4, **values)
    result(folder / f"math500-{model}", "math500", model, [0, 2, 4, 4], **values)
    return folder


def test_two_results_are_paired_by_question_and_shown_as_one_comparison(tmp_path, capsys):
    # Pass rates 0, 1/4, 1/2, 1 and 3/4, 1/4, 3/4, 0: differences 3/4, 0, 1/4, -1, mean 0.
    first = result(tmp_path / "a", "made", "a", [0, 1, 2, 4])
    second = result(tmp_path / "b", "made", "b", [3, 1, 3, 0], environment__cores=64)
    found = compare([first, second]).comparisons["b", "made"]
    assert (found["difference"], found["p_value"]) == (0.0, 1.0) and found["low"] < 0 < found["high"]
    flips = [(flip["question_id"], flip["first"], flip["second"]) for flip in found["flips"]]
    assert flips == [("q4", 1.0, 0.0), ("q1", 0.0, 0.75)]
    assert found["notes"] == []
    assert run(["evaluate", "--compare", str(first), str(second), "--output", str(tmp_path / "both")]) == 0
    shown = capsys.readouterr().out
    assert "\nmade: b minus a: +0.000, 95 % interval " in shown
    assert "  1.00 -> 0.00  q4  Question 4?\n  0.00 -> 0.75  q1" in shown
    (written,) = json.loads((tmp_path / "both" / "comparison.json").read_text())["benchmarks"]["made"]["comparisons"]
    assert [score["value"] for score in written["scores"]] == [7 / 16, 7 / 16]
    assert (tmp_path / "both" / "accuracy.svg").exists() and (tmp_path / "both" / "table.md").exists()


def test_every_model_against_the_first_on_every_shared_benchmark(tmp_path):
    base = two_benchmarks(tmp_path / "base", "base", 0)
    better = two_benchmarks(tmp_path / "better", "better", 2)
    # A third model without MATH-500, and with a benchmark of its own.
    result(tmp_path / "third" / "aime24", "aime24", "third", [1, 0, 1, 1] * 4)
    result(tmp_path / "third" / "mine", "mine", "third", [4, 4])
    table = compare([base, better, tmp_path / "third"])
    assert list(table.models) == ["base", "better", "third"]
    assert table.titles == {"aime24": "AIME24", "math500": "MATH-500", "mine": "mine"}
    assert set(table.comparisons) == {("better", "aime24"), ("third", "aime24"), ("better", "math500")}
    found = table.comparisons["better", "aime24"]
    # Pass rates 0, 0, 1/4, 1/4 and 2/4, 2/4, 3/4, 1/4: differences 1/2, 1/2, 1/2, 0.
    assert found["difference"] == 3 / 8 and found["p_value"] < 0.01
    # Third against first: 1/4, 0, 0, 0.
    assert table.comparisons["third", "aime24"]["difference"] == 1 / 16
    same = table.comparisons["better", "math500"]
    assert (same["difference"], same["p_holm"]) == (0.0, 1.0)
    # The smallest of three p-values is tripled.
    assert found["p_holm"] == pytest.approx(3 * found["p_value"])
    assert table.models["third"]["mine"]["avg_at_k"] == 1.0 and "math500" not in table.models["third"]


def test_the_command_writes_tables_and_a_figure(tmp_path, capsys):
    for model, shift in (("base", 0), ("a_50%", 2), ("other", 1)):
        two_benchmarks(tmp_path / model, model, shift)
    folders = [str(tmp_path / model) for model in ("base", "a_50%", "other")]
    assert run(["evaluate", "--json", "--compare", *folders]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["benchmarks"]["aime24"]["scores"]["other"]["samples"] == SAMPLES
    assert "with --output FOLDER" in shown.err
    output = tmp_path / "figures"
    assert run(["evaluate", "--compare", *folders, "--output", str(output)]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("| Model | AIME24 | MATH-500 | Avg. |") and "| a_50% | 0.500† |" in shown.out
    assert "aime24: a_50% minus base: +0.375, 95 % interval" in shown.out
    assert "adjusted, 16 questions paired, 4 won and 0 lost" in shown.out
    figures = [f"{name}.{kind}" for name in ("accuracy", "pass-at-k") for kind in ("pdf", "png", "svg")]
    assert {path.name for path in output.iterdir()} == {*figures, "comparison.json", "table.md"}
    for name, axis in (("accuracy", "avg@4"), ("pass-at-k", "pass@k")):
        drawn = (output / f"{name}.svg").read_text()
        assert all(text in drawn for text in ("a_50%", "other", "AIME24", "MATH-500", axis))
    assert "| a_50% | 0.500† | 0.625 | **0.562** |" in (output / "table.md").read_text()
    found = json.loads((output / "comparison.json").read_text())
    assert found["models"] == ["base", "a_50%", "other"]
    (first, second) = found["benchmarks"]["aime24"]["comparisons"]
    assert (first["first"], first["second"], first["difference"]) == ("base", "a_50%", 0.375)
    assert second["p_holm"] >= second["p_value"]
    assert found["averages"]["other"]["aime24+math500"]["benchmarks"] == ["aime24", "math500"]


def test_coverage_is_compared_beside_the_mean(tmp_path, capsys):
    """Models of the same mean: one solves each question now and then, the other half of them always."""
    wide = result(tmp_path / "wide", "aime24", "wide", [2] * 16)
    deep = result(tmp_path / "deep", "aime24", "deep", [4, 0] * 8)
    same = result(tmp_path / "same", "aime24", "same", [2] * 16)
    assert run(["evaluate", "--compare", str(wide), str(deep), "--json", "--output", str(tmp_path / "out")]) == 0
    (found,) = json.loads(capsys.readouterr().out)["benchmarks"]["aime24"]["comparisons"]
    assert (found["difference"], found["p_value"]) == (0.0, 1.0)
    # pass@4 of 2 in 4 is 1, of 4 and 0 in 4 it is 1 and 0: half of the questions, 8 of 16, are lost.
    at_four = found["pass_at_k"]["4"]
    assert at_four["difference"] == -0.5 and at_four["high"] < 0
    # Eight differences of one sign out of 2^8 assignments, two-sided: 2/256 = 0.0078, within what 10,000 draws tell.
    assert at_four["p_value"] == pytest.approx(2 / 256, abs=0.004)
    # pass@2: 1 - 1/6 against 1 and 0, mean 5/6 - 1/2.
    assert found["pass_at_k"]["2"]["difference"] == pytest.approx(1 / 2 - 5 / 6)
    assert (tmp_path / "out" / "pass-at-k.png").exists()
    assert run(["evaluate", "--compare", str(wide), str(deep)]) == 0
    assert "  pass@4: -0.500, 95 % interval" in capsys.readouterr().out

    made = compare([wide, deep, same]).comparisons["deep", "aime24"]
    # Two comparisons of pass@4 make their own family: the smaller p-value is doubled.
    assert made["pass_p_holm"] == pytest.approx(2 * made["pass_at_k"]["4"]["p_value"])
    assert made["p_holm"] == 1.0


def test_folders_of_a_shell_pattern_are_put_together(tmp_path):
    for model in ("before", "after"):
        two_benchmarks(tmp_path, model, 1)
    # The table that an evaluation of both writes beside their folders.
    common = tmp_path / "aime24-math500-before"
    common.mkdir()
    (common / "table.md").write_text("| Model |")
    paths = sorted(tmp_path.glob("*-before")) + sorted(tmp_path.glob("*-after"))
    both = ["aime24", "math500"]
    assert [(label, list(found)) for label, found in models_in(paths).items()] == [("before", both), ("after", both)]


def test_one_model_twice_is_told_apart_by_its_folders(tmp_path):
    two_benchmarks(tmp_path / "zero", "m", 1)
    two_benchmarks(tmp_path / "one", "m", 1, sampling__seed=1)
    compared = compare([tmp_path / "zero", tmp_path / "one"])
    assert list(compared.models) == ["m (zero)", "m (one)"]
    assert compared.notes == ["m (one): sampling.seed is 0 and 1"]


def test_what_cannot_be_compared(tmp_path, capsys):
    base = two_benchmarks(tmp_path / "base", "base", 0)
    hot = two_benchmarks(tmp_path / "hot", "hot", 0, sampling__temperature=1.0, grader__name="exact")
    result(tmp_path / "other", "amc", "other", [1, 2])
    (tmp_path / "empty").mkdir()
    for name, message in (
        ("hot", r"aime24-base and .*aime24-hot cannot .* sampling.temperature is 0.6 and 1.0; grader.name is"),
        ("base/aime24-base", "there are results of base alone: name those of a second model"),
        ("other", r"base \(aime24, math500\) shares no benchmark with the other models \(amc\)"),
        ("nowhere", "nowhere is no folder"),
        ("empty", "empty holds no results"),
    ):
        with pytest.raises(InputError, match=message):
            compare([base, tmp_path / name])
    refused = {f"--rescore --output {tmp_path / 'nowhere'}": "name a BENCHMARK", "--compare": "needs results folders"}
    for option in ("--model tiny", "--engine vllm", "--seed 1", "--max-tokens 9", "--rescore", "--dry-run"):
        refused[f"--compare {base} {hot} {option}"] = f"{option.split()[0]} does nothing beside --compare"
    for arguments, message in refused.items():
        assert run(["evaluate", *arguments.split()]) == 2
        assert message in capsys.readouterr().err


def test_results_are_read_without_a_trace(tmp_path):
    base = two_benchmarks(tmp_path / "base", "base", 0)
    other = two_benchmarks(tmp_path / "other", "other", 1)
    unfinished = other / "aime24-other" / "records.jsonl"
    whole = unfinished.read_bytes()
    # Somebody is still evaluating: the last line is being written, in the middle of a letter.
    unfinished.write_bytes(whole[: whole.rfind(b"q9")] + "ü".encode()[:1])
    torn = unfinished.read_bytes()
    with pytest.raises(
        InputError, match=r"aime24-other holds 8 of 16 questions .records.jsonl.: finish the evaluation first"
    ):
        compare([base, other])
    assert unfinished.read_bytes() == torn
