"""What is made of stored samples: second graders, re-scoring, tables."""

import io
import json
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
from processes import python
from stored_results import NONE, RIGHT, WRONG, question, record, stamp, stored

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.files import values_digest
from exgrpo_cli.base.types import Verdict
from exgrpo_cli.evaluation import sampling, service
from exgrpo_cli.evaluation.comparison import ResultTable, markdown, score_table
from exgrpo_cli.evaluation.results import ResultsFolder, differences, grader_version, rescore, score_folder, ungraded
from exgrpo_cli.grading import GradingPool


@pytest.fixture(scope="module")
def pool():
    with sampling.open_pool("math") as pool:
        yield pool


def test_time_outs_are_tried_again_before_the_score_and_kept(tmp_path, pool: GradingPool):
    records = [record(question(1, answer="x+1"), ("1+x", Verdict.TIMEOUT), ("x", Verdict.TIMEOUT), ("1+x", WRONG))]
    path = stored(tmp_path / "made", records)
    with ResultsFolder.open(path) as folder:
        result = score_folder(folder, pool)
        kept = [sample.verdict for sample in folder.records()["q1"].samples]
    # What was not late stays as it was graded.
    assert kept == [RIGHT, WRONG, WRONG] and result["avg_at_k"] == pytest.approx(1 / 3)


def test_what_the_verifier_failed_on_stands_beside_the_score():
    verdicts = {"correct": 3, "wrong": 1, "no answer": 0, "unparsable gold": 2, "timeout": 1, "crashed": 0}
    assert ungraded({"verdicts": verdicts}) == "counted as wrong: 1 timed out, 2 have a gold that does not parse"
    assert ungraded({"verdicts": dict.fromkeys(verdicts, 0)}) == ""


def test_a_second_grader_has_a_column_of_the_samples(tmp_path, pool: GradingPool):
    # One half written 0.5 is right for math and wrong for exact.
    half = record(question(1, answer="\\frac{1}{2}"), ("0.5", RIGHT), ("\\frac{1}{2}", RIGHT))
    path = stored(tmp_path / "made", [half, record(question(2), ("4", RIGHT), ("5", WRONG))])
    with ResultsFolder.open(path) as folder:
        result = score_folder(folder, pool, ("exact",))
    assert (result["avg_at_k"], result["second_graders"]["exact"]["avg_at_k"]) == (3 / 4, 2 / 4)
    rows = pq.read_table(path / "samples.parquet").to_pylist()
    assert [row["verdict_exact"] for row in rows] == ["wrong", "correct", "correct", "wrong"]
    assert [row["verdict"] for row in rows] == ["correct", "correct", "correct", "wrong"]


def test_where_questions_bring_a_verifier_no_other_grader_stands_beside_it(tmp_path, pool: GradingPool):
    asked = replace(question(1, answer="3-2"), metadata='{"verifier": "countdown", "numbers": [2, 3], "target": 1}')
    with ResultsFolder.open(stored(tmp_path / "made", [record(asked, ("3-2", RIGHT), ("1", WRONG))])) as folder:
        assert "second_graders" not in score_folder(folder, pool)
        assert "oat" in score_folder(folder, pool, ("oat",))["second_graders"]


def test_oat_stands_beside_math_unasked(tmp_path, pool: GradingPool):
    # Oat's grader looks at the last box alone; on the other two samples the graders agree.
    records = [record(question(1, answer="7,8"), ("7} and \\boxed{8", RIGHT), ("7,8", RIGHT), ("6", WRONG))]
    made = ("made", "other")
    for name in made:
        path = stored(tmp_path / name, records, benchmark__name=name)
        with ResultsFolder.open(path) as folder:
            result = score_folder(folder, pool)
        oat = result["second_graders"]["oat"]
        assert (result["avg_at_k"], oat["avg_at_k"], oat["disagreements"]) == (2 / 3, 1 / 3, 1)
        rows = pq.read_table(path / "samples.parquet").to_pylist()
        pairs = [(row["verdict"], row["verdict_oat"]) for row in rows]
        assert [pair for pair in pairs if pair[0] != pair[1]] == [("correct", "wrong")]
    report = service.rescore_folders([tmp_path / name for name in made], (), tmp_path / "both")
    average = report.to_json()["averages"]["made+other"]
    assert (average["value"], average["second_graders"]["oat"]["value"]) == (2 / 3, 1 / 3)
    assert average["pass_at_k"]["2"]["value"] == 1
    rows = (tmp_path / "both" / "table.md").read_text().splitlines()
    assert rows[2].startswith("| a | 0.667 | 0.667 | **0.667** |")
    assert rows[4].startswith("| a, by oat | 0.333 | 0.333 | **0.333** |")


def test_rescoring_needs_no_model_and_updates_the_stamp(tmp_path):
    # Verdicts as an older grader may have given them: both wrong.
    records = [record(question(1), ("4", WRONG), ("5", RIGHT)), record(question(2), ("2+2", WRONG), ("4", RIGHT))]
    path = stored(tmp_path / "made", records)
    code = (
        "import sys; from pathlib import Path; from exgrpo_cli.evaluation.service import rescore_folders;"
        f"path = Path({str(path)!r}); print(rescore_folders([path], (), path).results['made']['avg_at_k']);"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = python("-c", code, check=True)
    assert done.stdout.split() == ["0.75", "[]"]
    with ResultsFolder.open(path) as folder:
        verdicts = [[sample.verdict for sample in record.samples] for record in folder.records().values()]
        assert verdicts == [[RIGHT, WRONG], [RIGHT, RIGHT]]
        assert folder.stamp["grader"]["version"] == grader_version("math")
    foreign = stored(tmp_path / "foreign", records, grader__name="python:cProfile:run")
    with pytest.raises(InputError, match=r"foreign names the grader 'python:cProfile:run', which would run code"):
        service.rescore_folders([foreign], (), foreign)


def test_unfinished_and_damaged_results_are_not_scored(tmp_path, pool: GradingPool):
    records = [record(question(1), ("4", RIGHT)), record(question(2), ("4", RIGHT))]
    with ResultsFolder.create(tmp_path / "made", stamp(1), records) as folder:
        folder.append(records[:1])
        with pytest.raises(InputError, match=r"holds 1 of 2 questions \(records.jsonl\): finish the evaluation first"):
            score_folder(folder, pool)
        rescore(folder, pool)
        assert len(folder.records()) == 1
        row = {"question_id": "q9", "samples": []}
        with (tmp_path / "made" / "records.jsonl").open("a") as file:
            file.write(json.dumps(row | {"checksum": values_digest(row)}) + "\n")
        with pytest.raises(
            InputError, match=r"records\.jsonl, line 2 is no record of a question that was asked .*: remove"
        ):
            folder.records()


def test_differences_name_absent_keys():
    one = stamp(4)
    other = {**one, "sampling": {**one["sampling"], "top_k": 20}}
    assert differences(one, other, may_differ=()) == ["sampling.top_k is absent and 20"]


def result(value: float, k: int = 1) -> dict[str, object]:
    coverage = {"value": value + 0.2, "low": value + 0.15, "high": value + 0.28}
    found = {"avg_at_k": value, "k": k, "low": value - 0.1, "high": value + 0.1, "questions": 30}
    found |= {"pass_at_k": dict.fromkeys(("1", str(k)), coverage), "smallest_detectable_difference": 0.25}
    return found | {"mean_tokens": 1234.4, "share_clipped": 0.05}


def test_tables_follow_the_paper():
    names = ("aime24", "aime25", "amc", "math500", "minerva", "olympiad", "arc-c", "gpqa-diamond")
    whole = {name: result(0.4) for name in names} | {"amc": result(0.1), "arc-c": result(0.5)}
    titles = {name: name.upper() for name in names} | {"amc": "Y%"}
    table = ResultTable(titles=titles, models={"my_model": whole, "part": {"arc-c": result(0.5)}})
    assert markdown(table).splitlines() == [
        "| Model | AIME24 | AIME25 | Y% | MATH500 | MINERVA | OLYMPIAD | Avg. | ARC-C | GPQA-DIAMOND | Avg. |",
        "| --- |" + " ---: |" * 10,
        "| my_model | 0.400 | 0.400 | 0.100 | 0.400 | 0.400 | 0.400 | **0.350** | 0.500 | 0.400 | **0.450** |",
        # Intervals of 0.1 on either side: 0.1 / sqrt(6) = 0.041 and 0.1 / sqrt(2) = 0.071.
        "| 95 % interval | 0.300 to 0.500 | 0.300 to 0.500 | 0.000 to 0.200 | 0.300 to 0.500 | 0.300 to 0.500 "
        "| 0.300 to 0.500 | 0.309 to 0.391 | 0.400 to 0.600 | 0.300 to 0.500 | 0.379 to 0.521 |",
        # An average waits for all its members.
        "| part | - | - | - | - | - | - | - | 0.500 | - | - |",
        "| 95 % interval |  |  |  |  |  |  |  | 0.400 to 0.600 |  |  |",
    ]


def test_terminal_table_says_what_the_score_can_show():
    from rich.console import Console

    console, results = Console(width=120, record=True, file=io.StringIO()), dict.fromkeys("xy", result(0.4, k=32))
    console.print(score_table(ResultTable(titles={"x": "AIME24", "y": "B"}, models={"m": results})))
    text = console.export_text()
    assert "AIME24 avg@32" in text and "0.300 to 0.500" in text and "±0.250" in text
    assert "0.600  0.550 to 0.680" in text
    # The distances of the ends, divided by the square root of two.
    last = ["Avg.", "x+y", "0.400", "0.329", "to", "0.471", "0.600", "0.565", "to", "0.657"]
    assert text.splitlines()[-1].split() == last


def test_figures_of_an_evaluation():
    right, wrong = (("4", RIGHT), ("4", RIGHT)), (("5", WRONG), ("", NONE))
    evaluation = sampling.Evaluation(records=(record(question(1), *right), record(question(2), *wrong)))
    assert list(evaluation.correct) == [2, 0]
    assert (evaluation.mean_tokens, evaluation.share_clipped) == (10.0, 0.0)
    summary = evaluation.figures()
    assert summary["verdicts"]["no answer"] == 1
    # One of two questions solved: Wilson's interval of 1 in 2 at the largest k, the bootstrap's at k = 1.
    assert summary["pass_at_k"]["2"] == pytest.approx({"value": 0.5, "low": 0.0945, "high": 0.9055}, abs=1e-4)
    first = summary["pass_at_k"]["1"]
    assert (first["value"], first["low"], first["high"]) == (0.5, summary["low"], summary["high"])
