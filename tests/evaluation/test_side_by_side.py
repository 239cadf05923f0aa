"""Several models on several benchmarks: which results belong together, what is compared, and what is written."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from stored_results import RIGHT, WRONG, question, record, stored

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.commands import run
from exgrpo_cli.evaluation.compare.side_by_side import side_by_side
from exgrpo_cli.evaluation.results.stored import models_in

SAMPLES = 4


def result(path: Path, benchmark: str, model: str, successes: list[int], **values: Any) -> Path:
    """A finished results folder with this many successes of four at each question."""
    records = [
        record(question(n), *([("4", RIGHT)] * k + [("5", WRONG)] * (SAMPLES - k)))
        for n, k in enumerate(successes, start=1)
    ]
    return stored(path, records, benchmark__name=benchmark, model__name=model, model__hash=model, **values)


def two_benchmarks(folder: Path, model: str, shift: int, **values: Any) -> Path:
    """AIME24 with pass rates rising by `shift` quarters, MATH-500 the same for every model."""
    result(folder / f"aime24-{model}", "aime24", model, [shift, shift, 1 + shift, 1] * 4, **values)
    result(folder / f"math500-{model}", "math500", model, [0, 2, 4, 4], **values)
    return folder


def test_every_model_against_the_first_on_every_shared_benchmark(tmp_path):
    base = two_benchmarks(tmp_path / "base", "base", 0)
    better = two_benchmarks(tmp_path / "better", "better", 2)
    # A third model without MATH-500, and with a benchmark of its own.
    result(tmp_path / "third" / "aime24", "aime24", "third", [1, 0, 1, 1] * 4)
    result(tmp_path / "third" / "mine", "mine", "third", [4, 4])
    compared = side_by_side([base, better, tmp_path / "third"])
    assert compared.models == ("base", "better", "third")
    assert dict(compared.titles) == {"aime24": "AIME24", "math500": "MATH-500", "mine": "mine"}
    assert set(compared.comparisons) == {("better", "aime24"), ("third", "aime24"), ("better", "math500")}
    found = compared.comparisons["better", "aime24"]
    # Pass rates 0, 0, 1/4, 1/4 and 2/4, 2/4, 3/4, 1/4: differences 1/2, 1/2, 1/2, 0.
    assert found.comparison.difference.value == 3 / 8
    assert found.comparison.difference.p_value < 0.01
    # Third against first: 1/4, 0, 0, 0.
    assert compared.comparisons["third", "aime24"].comparison.difference.value == 1 / 16
    same = compared.comparisons["better", "math500"]
    assert (same.comparison.difference.value, same.p_holm) == (0.0, 1.0)
    # The smallest of three p-values is tripled.
    assert found.p_holm == pytest.approx(3 * found.comparison.difference.p_value)
    assert compared.scores["third", "mine"].value == 1.0
    assert ("third", "math500") not in compared.scores


def test_the_command_writes_tables_and_a_figure(tmp_path, capsys):
    for model, shift in (("base", 0), ("a_50%", 2), ("other", 1)):
        two_benchmarks(tmp_path / model, model, shift)
    folders = [str(tmp_path / model) for model in ("base", "a_50%", "other")]
    output = tmp_path / "figures"
    assert run(["evaluate", "--compare", *folders, "--output", str(output)]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("compared with base")
    lines = [line.split() for line in shown.out.splitlines()]
    assert ["AIME24", "avg@4", "base", "12.5"] in [line[:4] for line in lines]
    assert ["a_50%", "50.0"] in [line[:2] for line in lines]
    assert sorted(path.name for path in output.iterdir()) == [
        "accuracy.pdf",
        "accuracy.png",
        "accuracy.svg",
        "comparison.json",
        "pass-at-k.pdf",
        "pass-at-k.png",
        "pass-at-k.svg",
        "table.md",
        "table.tex",
    ]
    assert (output / "accuracy.pdf").read_bytes().startswith(b"%PDF")
    drawn = (output / "accuracy.svg").read_text()
    assert all(text in drawn for text in ("a_50%", "other", "AIME24", "MATH-500", "avg@4"))
    assert "| a_50% | 50.0† | 62.5 | **56.2** |" in (output / "table.md").read_text()
    table = (output / "table.tex").read_text()
    assert "a\\_50\\% & 50.0\\textsuperscript{\\dag{}} & 62.5 & \\textbf{56.2} \\\\" in table
    written = json.loads((output / "comparison.json").read_text())
    assert written["models"] == ["base", "a_50%", "other"]
    (first, second) = written["benchmarks"]["aime24"]["comparisons"]
    assert (first["first"], first["second"], first["difference"]) == ("base", "a_50%", 0.375)
    assert second["p_holm"] >= second["p_value"]
    assert written["benchmarks"]["math500"]["scores"]["other"]["value"] == 0.625
    assert written["averages"]["other"]["aime24+math500"]["benchmarks"] == ["aime24", "math500"]
    curves = (output / "pass-at-k.svg").read_text()
    assert all(text in curves for text in ("a_50%", "other", "AIME24", "MATH-500", "pass@k (%)"))


def test_coverage_is_compared_beside_the_mean(tmp_path, capsys):
    """Two models of the same mean: one solves each question now and then, the other half of them always."""
    wide = result(tmp_path / "wide", "aime24", "wide", [2] * 16)
    deep = result(tmp_path / "deep", "aime24", "deep", [4, 0] * 8)
    assert run(["evaluate", "--compare", str(wide), str(deep), "--json", "--output", str(tmp_path / "out")]) == 0
    found = json.loads(capsys.readouterr().out)
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
    assert "  pass@4: -50.0 points, 95 % interval" in capsys.readouterr().out


def test_coverage_in_the_table_of_several_models(tmp_path, capsys):
    for model, successes in (("base", [2] * 16), ("deep", [4, 0] * 8), ("same", [2] * 16)):
        result(tmp_path / model / "aime24", "aime24", model, successes)
    folders = [str(tmp_path / model) for model in ("base", "deep", "same")]
    assert run(["evaluate", "--compare", *folders]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    start = next(place for place, line in enumerate(lines) if line[:2] == ["AIME24", "pass@4"])
    assert lines[start][2:4] == ["base", "100.0"]
    assert lines[start + 1][:2] == ["deep", "50.0"] and lines[start + 1][5] == "-50.0"
    compared = side_by_side([tmp_path / model for model in ("base", "deep", "same")])
    made = compared.comparisons["deep", "aime24"]
    # Two comparisons of pass@4 make their own family: the smaller p-value is doubled.
    assert made.pass_p_holm == pytest.approx(2 * made.comparison.pass_at_k[4].p_value)
    assert made.p_holm == 1.0
    assert compared.to_json()["benchmarks"]["aime24"]["pass_at_k"]["deep"]["4"]["value"] == 0.5


def test_json_is_one_object(tmp_path, capsys):
    folders = [str(two_benchmarks(tmp_path / model, model, shift)) for model, shift in (("a", 0), ("b", 1))]
    assert run(["evaluate", "--json", "--compare", *folders]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["benchmarks"]["aime24"]["scores"]["b"]["samples"] == SAMPLES
    assert "with --output FOLDER" in shown.err
    # Two folders of one benchmark each: the comparison itself.
    single = [str(tmp_path / model / f"aime24-{model}") for model in "ab"]
    assert run(["evaluate", "--compare", *single, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["benchmark"] == "aime24"


def test_folders_of_a_shell_pattern_are_put_together(tmp_path):
    for model in ("before", "after"):
        two_benchmarks(tmp_path, model, 1)
    # The common table that an evaluation of both writes beside them.
    (tmp_path / "aime24-math500-before").mkdir()
    entries = {
        name: {"protocol": json.loads((tmp_path / f"{name}-before" / "protocol.json").read_text())}
        for name in ("aime24", "math500")
    }
    (tmp_path / "aime24-math500-before" / "results.json").write_text(json.dumps({**entries, "averages": {"all": 0.5}}))
    paths = sorted(tmp_path.glob("*-before")) + sorted(tmp_path.glob("*-after"))
    assert [(m.label, list(m.by_benchmark)) for m in models_in(paths)] == [
        ("before", ["aime24", "math500"]),
        ("after", ["aime24", "math500"]),
    ]
    assert [m.label for m in models_in([tmp_path / "aime24-math500-before", tmp_path / "aime24-after"])] == [
        "before",
        "after",
    ]
    shutil.rmtree(tmp_path / "math500-before")
    with pytest.raises(InputError, match=r"aime24-math500-before counts math500, which is no longer beside it"):
        models_in([tmp_path / "aime24-math500-before"])


def test_one_model_twice_is_told_apart_by_its_folders(tmp_path):
    two_benchmarks(tmp_path / "zero", "m", 1)
    two_benchmarks(tmp_path / "one", "m", 1, sampling__seed=1)
    compared = side_by_side([tmp_path / "zero", tmp_path / "one"])
    assert compared.models == ("m (zero)", "m (one)")
    assert compared.notes == ["m (one): sampling.seed is 0 and 1"]


def test_a_suite_gets_its_averages(tmp_path):
    names = ["mmlu-pro", "aime24", "aime25", "amc", "math500", "minerva", "olympiad", "arc-c", "gpqa-diamond"]
    for model, successes in (("a", [0, 4]), ("b", [2, 4])):
        for name in names:
            result(tmp_path / model / name, name, model, successes)
    compared = side_by_side([tmp_path / "a", tmp_path / "b"])
    assert next(iter(compared.titles)) == "aime24" and list(compared.titles)[-1] == "mmlu-pro"
    averages = compared.average_scores()["b"]
    assert {name: found["value"] for name, found in averages.items()} == {
        "in-distribution": 0.75,
        "out-of-distribution": 0.75,
    }
    # Six and three benchmarks with the same interval: narrower by sqrt(6) and sqrt(3).
    score = compared.scores["b", "aime24"]
    assert averages["in-distribution"]["low"] == pytest.approx(0.75 - (0.75 - score.low) / 6**0.5)
    assert averages["out-of-distribution"]["high"] == pytest.approx(0.75 + (score.high - 0.75) / 3**0.5)
    heads = [column.head for column in compared.rows()[0][1]]
    assert heads.count("Avg.") == 2 and heads[6] == "Avg."


def test_what_cannot_be_compared(tmp_path, capsys):
    base = two_benchmarks(tmp_path / "base", "base", 0)
    hot = two_benchmarks(tmp_path / "hot", "hot", 0, sampling__temperature=1.0)
    with pytest.raises(InputError, match=r"aime24-base and .*aime24-hot cannot .* sampling.temperature is 0.6 and 1.0"):
        side_by_side([base, hot])
    with pytest.raises(InputError, match="there are results of base alone: name those of a second model"):
        side_by_side([base, base / "aime24-base"])
    other = result(tmp_path / "other", "amc", "other", [1, 2])
    with pytest.raises(InputError, match=r"base \(aime24, math500\) shares no benchmark with the other models \(amc\)"):
        side_by_side([base, other])
    with pytest.raises(InputError, match="nowhere is no folder"):
        side_by_side([base, tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="empty holds no results"):
        side_by_side([base, tmp_path / "empty"])
    for line, message in (
        (["--compare"], "--compare needs results folders"),
        (["--compare", str(base)], "there are results of base alone"),
        (["--compare", str(base), str(hot), "--model", "tiny"], "--model does nothing beside --compare"),
        (["--compare", str(base), str(hot), "--engine", "vllm"], "--engine does nothing beside --compare"),
        (["--compare", str(base), str(hot), "--seed", "1"], "--seed does nothing beside --compare"),
        (["--compare", str(base), str(hot), "--max-tokens", "9"], "--max-tokens does nothing beside --compare"),
    ):
        assert run(["evaluate", *line]) == 2
        assert message in capsys.readouterr().err


def test_rescoring_wants_to_know_what(tmp_path, capsys):
    assert run(["evaluate", "--rescore", "--output", str(tmp_path / "nowhere")]) == 2
    assert "--rescore needs to know which samples: name their results folder" in capsys.readouterr().err


def test_results_are_read_without_a_trace(tmp_path):
    base = two_benchmarks(tmp_path / "base", "base", 0)
    other = two_benchmarks(tmp_path / "other", "other", 1)
    unfinished = other / "aime24-other" / "records.jsonl"
    whole = unfinished.read_bytes()
    # Somebody is still evaluating: the last line is being written, in the middle of a letter.
    unfinished.write_bytes(whole[: whole.rfind(b"q9")] + "ü".encode()[:1])
    torn = unfinished.read_bytes()
    with pytest.raises(InputError, match=r"aime24-other holds 8 of 16 questions: finish it before it is compared"):
        side_by_side([base, other])
    assert unfinished.read_bytes() == torn


def test_scoring_a_common_table_again_leaves_each_benchmark_its_own(tmp_path):
    two_benchmarks(tmp_path, "m", 1)
    common = tmp_path / "aime24-math500-m"
    common.mkdir()
    entries = {
        name: {"protocol": json.loads((tmp_path / f"{name}-m" / "protocol.json").read_text())}
        for name in ("aime24", "math500")
    }
    (common / "results.json").write_text(json.dumps(entries))
    assert run(["evaluate", "--rescore", "--output", str(common), "--json"]) == 0
    assert json.loads((common / "results.json").read_text()).keys() == {"aime24", "math500", "averages"}
    assert json.loads((tmp_path / "aime24-m" / "results.json").read_text())["questions"] == 16
    assert (common / "table.md").read_text().startswith("| Model | AIME24 | MATH-500 |")
    assert (common / "accuracy.pdf").exists()
