"""Benchmark presets, and the questions behind them."""

from dataclasses import replace

import pytest
from benchmark_layouts import verl
from question_sources import write

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.evaluation import benchmarks
from exgrpo_cli.presets import preset_names

MEMBERS = ("aime24", "aime25", "amc", "math500", "minerva", "olympiad", "arc-c", "gpqa-diamond", "mmlu-pro")


def choice_benchmark(seed: int = 0) -> benchmarks.Benchmark:
    return replace(benchmarks.own_benchmark("quiz"), protocol=benchmarks.Protocol(grader="choice", shuffle_seed=seed))


def names_of(*names: str) -> tuple[str, ...]:
    return tuple(benchmark.name for benchmark in benchmarks.load_benchmarks(names))


def test_presets_follow_the_published_protocol():
    assert set(preset_names("benchmarks")) == {*MEMBERS, "arithmetic", "paper", "paper-id", "paper-ood"}
    benchmarks.load_benchmark("arithmetic")
    # Paper, section 4: avg@32 for the small ones, pass@1 for the rest, T = 0.6, top-p 1, 8,192 new tokens.
    for name in MEMBERS:
        protocol = benchmarks.load_benchmark(name).protocol
        assert protocol.samples == (32 if name in ("aime24", "aime25", "amc") else 1)
        assert (protocol.temperature, protocol.top_p, protocol.max_tokens) == (0.6, 1.0, 8192)


def test_suites_are_spelled_out_and_no_benchmark_comes_twice():
    assert (names_of("paper"), names_of("paper-id"), names_of("paper-ood")) == (MEMBERS, MEMBERS[:6], MEMBERS[6:])
    assert names_of("aime25", "paper", "aime25") == ("aime25", *(name for name in MEMBERS if name != "aime25"))


@pytest.mark.parametrize(
    ("names", "averages"),
    [
        (("aime24",), {}),
        (MEMBERS, {"in-distribution": MEMBERS[:6], "out-of-distribution": MEMBERS[6:]}),
        (MEMBERS[:6], {"in-distribution": MEMBERS[:6]}),
        (("math500", "aime24"), {"aime24+math500": ("aime24", "math500")}),
        # A group that is whole keeps its name, the other is named by what there is of it.
        ((*MEMBERS[:6], *MEMBERS[6::2]), {"in-distribution": MEMBERS[:6], "arc-c+mmlu-pro": MEMBERS[6::2]}),
        # One of each group, or a benchmark of neither: one average over all of them.
        (("aime24", "arc-c"), {"aime24+arc-c": ("aime24", "arc-c")}),
        (("arithmetic", "aime24", "amc"), {"arithmetic+aime24+amc": ("arithmetic", "aime24", "amc")}),
    ],
)
def test_averages_are_over_whatever_was_run(names, averages):
    assert benchmarks.averages_over(names) == averages


def test_columns_stand_in_the_order_of_a_suite():
    assert benchmarks.in_suite_order(("mine", "mmlu-pro", "aime24")) == ["aime24", "mmlu-pro", "mine"]


def test_without_network_and_data_the_message_names_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(InputError, match=r"aime24: HuggingFaceH4/aime_2024@main is not in the cache .* --data FILE"):
        benchmarks.benchmark_questions(benchmarks.load_benchmark("aime24"))


def test_what_is_unknown_or_cannot_be_sampled_is_refused():
    with pytest.raises(InputError, match=r"'aime2024'.* Did you mean 'aime24'"):
        benchmarks.load_benchmarks(("aime2024",))
    with pytest.raises(InputError, match=r"temperature = 0\.0 is out of range: use a finite number above 0"):
        benchmarks.Protocol(temperature=0.0)
    with pytest.raises(InputError, match=r"top_p = 1\.5"):
        benchmarks.Protocol(top_p=1.5)


def test_file_keeps_own_rows_and_folds_repeated_ones(tmp_path):
    rows = [verl("aime", system=True)(f"Question {n}", str(n)) for n in range(3) for _ in range(8)]
    rows += [verl("math")("Another", "1"), verl("AIME_2024")("Question 9", "9")]
    loaded = benchmarks.benchmark_questions(benchmarks.load_benchmark("aime24"), write(tmp_path / "all.parquet", *rows))
    assert [question.answer for question in loaded.questions] == ["0", "1", "2", "9"]
    assert loaded.num_folded == 3 * 7


def test_file_without_rows_of_the_benchmark_names_its_sources_and_without_a_benchmark_all_count(tmp_path):
    path = write(tmp_path / "all.parquet", verl("math")("One", "1"), verl("gsm8k")("Two", "2"))
    with pytest.raises(InputError, match="no questions of aime24: its sources are 'gsm8k', 'math', and those of"):
        benchmarks.benchmark_questions(benchmarks.load_benchmark("aime24"), path)
    assert len(benchmarks.benchmark_questions(benchmarks.own_benchmark("mine"), path).questions) == 2
    with pytest.raises(InputError, match="'aime24' is the name of a shipped benchmark"):
        benchmarks.own_benchmark("aime24")


def test_own_file_may_be_of_any_known_format(tmp_path):
    sums = {"problem": "Sum?", "answer": 142.0}
    path = write(tmp_path / "mine.jsonl", sums, {"problem": "Roots?", "answer": ["1", "2"]})
    loaded = benchmarks.benchmark_questions(benchmarks.own_benchmark("mine"), path)
    assert [question.answer for question in loaded.questions] == ["142", "1, 2"]
    unanswered = {"problem": "Roots?", "answer": None}
    for rows, message in (((sums, unanswered), "row 2 is no question of mine: no a"), ((), "mine.jsonl has no rows")):
        with pytest.raises(InputError, match=message):
            benchmarks.benchmark_questions(benchmarks.own_benchmark("mine"), write(path, *rows))


def test_option_order_does_not_depend_on_the_place_in_the_file(tmp_path):
    rows = [{"question": f"Q{n}", "options": ["a", "b", "c", "d", "e"], "answer": "A"} for n in range(5)]
    paths = write(tmp_path / "1.parquet", *rows), write(tmp_path / "2.parquet", *rows[::-1])
    read = [benchmarks.benchmark_questions(choice_benchmark(), path).records for path in paths]
    forward, backward = ({record.question.id: record.options for record in records} for records in read)
    assert forward == backward and len(set(forward.values())) > 1
