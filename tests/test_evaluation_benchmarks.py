"""Benchmark presets, and the questions behind them."""

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from exgrpo_cli.errors import InputError
from exgrpo_cli.evaluation.benchmarks import Benchmark, Protocol, Source, load_benchmark, load_suite, own_benchmark
from exgrpo_cli.evaluation.hub import read_files
from exgrpo_cli.evaluation.questions import benchmark_questions
from exgrpo_cli.presets import preset_names

MEMBERS = ("aime24", "aime25", "amc", "math500", "minerva", "olympiad", "arc-c", "gpqa-diamond", "mmlu-pro")


def verl_row(source: str, question: str, answer: str) -> dict[str, object]:
    return {
        "data_source": source,
        "prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": question}],
        "reward_model": {"ground_truth": answer, "style": "rule"},
        "extra_info": {"index": 0},
    }


def write_rows(path: Path, rows: list[dict[str, object]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def choice_benchmark(**source: object) -> Benchmark:
    return Benchmark(
        name="quiz",
        title="Quiz",
        source=Source(dataset="someone/quiz", question="question", **source),
        protocol=Protocol(grader="choice"),
    )


def test_every_preset_loads():
    assert set(preset_names("benchmarks")) == {*MEMBERS, "arithmetic", "paper"}
    for name in (*MEMBERS, "arithmetic"):
        load_benchmark(name)


def test_published_protocol():
    # Paper, section 4: avg@32 for the small ones, pass@1 for the rest, T = 0.6, top-p 1, 8,192 new tokens.
    for name in MEMBERS:
        protocol = load_benchmark(name).protocol
        assert protocol.samples == (32 if name in ("aime24", "aime25", "amc") else 1)
        assert (protocol.temperature, protocol.top_p, protocol.max_tokens) == (0.6, 1.0, 8192)


def test_paper_is_the_nine_with_two_averages():
    suite = load_suite(("paper",))
    assert tuple(benchmark.name for benchmark in suite.benchmarks) == MEMBERS
    assert suite.averages == {"in-distribution": MEMBERS[:6], "out-of-distribution": MEMBERS[6:]}


def test_benchmarks_named_twice_are_evaluated_once():
    names = [benchmark.name for benchmark in load_suite(("aime25", "paper", "aime25")).benchmarks]
    assert names == ["aime25", *(name for name in MEMBERS if name != "aime25")]


def test_unknown_benchmark_names_the_nearest():
    with pytest.raises(InputError, match=r"'aime2024'.* Did you mean 'aime24'"):
        load_suite(("aime2024",))


def test_protocol_refuses_what_cannot_be_sampled():
    with pytest.raises(InputError, match=r"temperature = 0\.0 is out of range: use a finite number above 0"):
        replace(load_benchmark("aime24").protocol, temperature=0.0)
    with pytest.raises(InputError, match=r"top_p = 1\.5"):
        replace(load_benchmark("aime24").protocol, top_p=1.5)


def test_arithmetic_is_the_held_out_set():
    from exgrpo_cli.data.arithmetic import make_questions
    from exgrpo_cli.settings import ArithmeticSettings

    settings = ArithmeticSettings()
    split = make_questions(
        num_train=settings.num_train, num_heldout=settings.num_heldout, levels=settings.levels, seed=settings.seed
    )
    assert benchmark_questions(load_benchmark("arithmetic")).questions == tuple(split.heldout)


def test_file_keeps_own_rows_and_folds_repeated_ones(tmp_path):
    rows = [verl_row("aime", f"Question {n}", str(n)) for n in range(3) for _ in range(8)]
    rows += [verl_row("math", "Another", "1"), verl_row("AIME_2024", "Question 9", "9")]
    loaded = benchmark_questions(load_benchmark("aime24"), write_rows(tmp_path / "all.parquet", rows))
    assert [question.answer for question in loaded.questions] == ["0", "1", "2", "9"]
    assert loaded.num_folded == 3 * 7


def test_file_without_rows_of_the_benchmark_names_its_sources(tmp_path):
    path = write_rows(tmp_path / "all.parquet", [verl_row("math", "One", "1"), verl_row("gsm8k", "Two", "2")])
    with pytest.raises(InputError, match="no questions of aime24: its sources are 'gsm8k', 'math', and those of"):
        benchmark_questions(load_benchmark("aime24"), path)


def test_own_benchmark_takes_every_row(tmp_path):
    path = write_rows(tmp_path / "mine.parquet", [verl_row("a", "One", "1"), verl_row("b", "Two", "2")])
    assert len(benchmark_questions(own_benchmark("mine"), path).questions) == 2
    with pytest.raises(InputError, match="'aime24' is the name of a shipped benchmark"):
        own_benchmark("aime24")


def test_free_answers_of_published_files(tmp_path):
    path = tmp_path / "test.jsonl"
    rows = [{"problem": "Sum?", "answer": 142.0}, {"problem": "Roots?", "answer": ["1", "2"]}]
    path.write_text("\n".join(map(json.dumps, rows)))
    source = Source(dataset="someone/sums", question="problem", answer="answer")
    read = read_files(replace(choice_benchmark(), source=source), [path], commit="c0ffee")
    assert [question.answer for question in read.questions] == ["142", "1, 2"]


@pytest.mark.parametrize(
    ("columns", "row"),
    [
        (
            {"options": ("choices.text",), "labels": "choices.label", "answer": "key", "answer_names": "label"},
            {"choices": {"text": ["red", "blue", "green"], "label": ["1", "2", "3"]}, "key": "2"},
        ),
        ({"options": ("all",), "answer": "right", "answer_names": "index"}, {"all": ["red", "blue"], "right": 1}),
        ({"options": ("yes", "no1", "no2"), "answer_names": "first"}, {"yes": "blue", "no1": "red", "no2": "green"}),
        ({"options": ("all",), "answer": "right"}, {"all": ["red", "blue"], "right": "blue"}),
    ],
)
def test_gold_letter_follows_the_shuffled_option(tmp_path, columns, row):
    letters = set()
    for seed in range(12):
        benchmark = choice_benchmark(**columns)
        benchmark = replace(benchmark, protocol=replace(benchmark.protocol, shuffle_seed=seed))
        path = write_rows(tmp_path / "quiz.parquet", [{"question": "Colour?", **row}])
        read = read_files(benchmark, [path], commit="c0ffee")
        (question,) = read.questions
        options = read.options[question.id]
        assert options["ABC".index(question.answer)] == "blue"
        assert f"\n{question.answer}. blue\n" in question.prompt[-1].content
        letters.add(question.answer)
    assert len(letters) > 1


def test_option_order_does_not_depend_on_the_place_in_the_file(tmp_path):
    rows = [{"question": f"Q{n}", "all": ["a", "b", "c", "d", "e"], "right": 0} for n in range(5)]
    benchmark = choice_benchmark(options=("all",), answer="right", answer_names="index")
    forward = read_files(benchmark, [write_rows(tmp_path / "1.parquet", rows)], commit="").options
    backward = read_files(benchmark, [write_rows(tmp_path / "2.parquet", rows[::-1])], commit="").options
    assert forward == backward
    assert len(set(forward.values())) > 1


def test_a_row_whose_answer_names_no_option(tmp_path):
    path = write_rows(tmp_path / "quiz.parquet", [{"question": "Colour?", "all": ["red", "blue"], "right": 2}])
    benchmark = choice_benchmark(options=("all",), answer="right", answer_names="index")
    with pytest.raises(InputError, match=r"someone/quiz/quiz.parquet: row 1: right is 2, which names none"):
        read_files(benchmark, [path], commit="")


def test_a_missing_column_is_named(tmp_path):
    path = write_rows(tmp_path / "quiz.parquet", [{"question": "Colour?", "all": ["red", "blue"]}])
    benchmark = choice_benchmark(options=("choices.text",), answer_names="first")
    with pytest.raises(InputError, match=r"row 1 has no value in column 'choices.text': found \['all', 'question'\]"):
        read_files(benchmark, [path], commit="")
