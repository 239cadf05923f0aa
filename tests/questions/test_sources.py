"""Sources: layouts recognised by their columns, gaps and odd values, and which files of a folder are meant."""

import json
from decimal import Decimal

import pytest
from question_sources import pairs, read, write

from exgrpo_cli.base.data import tables
from exgrpo_cli.base.errors import InputError
from exgrpo_cli.questions import choices, files, sources, values

TABLES = tables(__file__, "cases.toml")
USER, SYSTEM = {"role": "user", "content": "Sum?"}, {"role": "system", "content": "Think."}
TURNS = [{"from": "human", "value": "Sum?"}, {"from": "assistant", "ground_truth": {"value": "7", "pass_at_n": 0.5}}]
MATH = {"problem": "Sum?", "level": "Level 5", "solution": "We try \\boxed{1}. That is too little. It is \\boxed{7}."}
VERL = {"data_source": "openr1", "prompt": [SYSTEM, USER], "reward_model": {"ground_truth": "7", "style": "rule"}}
CASES = [
    ("gsm8k", {"question": "Sum?", "answer": "14 / 2 = <<14/2=7>>7\n#### 7"}),
    ("math", MATH),
    # A target that is a trace is no answer.
    ("question and answer", {"problem": "Sum?", "target": [{"role": "assistant", "content": "long"}], "answer": "7"}),
    ("question and answer", {"Problem": "Sum?", "Solution": "Because.", "Answer": 7}),
    ("verl", VERL | {"target": [{"role": "assistant", "content": "long"}]}),
    ("canonical", {"id": "x", "prompt": [USER], "answer": "7", "source": "s", "level": "2"}),
    ("canonical", {"prompt": "Sum?", "answer": 7.0}),
    ("orz", {"0": TURNS[0], "1": TURNS[1]}),
]


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json"])
@pytest.mark.parametrize(("layout", "row"), CASES)
def test_a_layout_is_recognised_named_and_read(tmp_path, layout, row, suffix):
    reading = read(write(tmp_path / f"set{suffix}", row))
    assert (reading.layout, pairs(reading)) == (layout, [("Sum?", "7")])
    assert (reading.num_read, reading.num_folded) == (1, 0)


def test_source_and_level_come_from_the_row_or_the_source(tmp_path):
    math, verl = (read(write(tmp_path / "set.jsonl", row)).questions[0] for row in (MATH, VERL))
    assert (math.source, math.level) == ("set", "Level 5")
    assert (verl.source, verl.level, verl.prompt[0].role) == ("openr1", None, "system")


CHOICES = "Which?\n\nA. one\nB. two\nC. three"
TEXTS = ["one", "two", "three"]


@pytest.mark.parametrize(("gold", "row"), [(gold, row) for gold, rows in TABLES["gold"].items() for row in rows])
def test_multiple_choice_in_its_forms(tmp_path, gold, row):
    reading = read(write(tmp_path / "set.jsonl", {"question": "Which?", **json.loads(row)}))
    assert (reading.layout, pairs(reading)) == ("multiple choice", [(CHOICES, gold)])


NO_GOLD = [(why, row) for why, rows in TABLES["no_gold"].items() for row in rows]
NO_GOLD += [("the answer is none of the options", json.dumps({"options": ["one", "two"], "answer": "9" * 5000}))]


@pytest.mark.parametrize(("reason", "row"), NO_GOLD, ids=lambda text: text[:60])
def test_multiple_choice_rows_without_a_gold_option_say_why(tmp_path, reason, row):
    good, bad = {"options": ["x", "y"], "answer": "A"}, json.loads(row)
    reading = read(write(tmp_path / "set.jsonl", *({"question": "Which?", **row} for row in (good, bad))))
    assert (reading.num_read, len(reading.questions), list(reading.dropped)) == (2, 1, [reason])


def test_right_and_wrong_answers_apart_are_placed_by_the_question(tmp_path):
    told = {"Correct Answer": "right", **{f"Incorrect Answer {i}": f"w{i}" for i in (1, 2, 3)}}
    reading = read(write(tmp_path / "gpqa.csv", *[{"Question": f"Which is {n}?", **told} for n in range(40)]))
    placed = [question.answer for question in reading.questions]
    for question in reading.questions:
        options = choices.find_choices(question.prompt[0].content).options
        assert options["ABCD".index(question.answer)] == "right" and sorted(options) == ["right", "w1", "w2", "w3"]
    # 40 questions over four places: each place is taken (a place stays empty with probability 4 * 0.75^40 = 4e-5).
    assert set(placed) == set("ABCD")
    assert placed == [question.answer for question in read(tmp_path / "gpqa.csv").questions]


def test_named_fields_reach_into_structs_and_patterns_cut_the_gold_out(tmp_path):
    row = {"task": {"text": "Sum?"}, "out": "x = 3, so the answer is 12; final: 7", "extra": 1}
    path = write(tmp_path / "set.parquet", row)
    reading = read(path, question_field="task.text", answer_field="out", answer_pattern=r"(?:is|final:) (\d+)")
    assert (reading.layout, pairs(reading)) == ("named fields", [("Sum?", "7")])
    assert pairs(read(path, question_field="task.text", answer_field="out", answer_pattern=r"\d+"))[0][1] == "7"


def test_rows_that_are_no_questions_are_counted_with_their_reason(tmp_path):
    asked = {"1?": "so #### 1", "2?": "nothing", " ": "#### 3", "4?": None, "half \ud800": "#### 5"}
    rows = [{"question": question, "answer": answer} for question, answer in asked.items()]
    reading = read(write(tmp_path / "set.jsonl", *rows))
    assert pairs(reading) == [("1?", "1")]
    assert list(reading.dropped) == ["no #### answer", "no question", "no answer", "text is not valid Unicode"]
    assert reading.dropped.total() == 4
    assert reading.dropped.examples["no #### answer"][0].startswith(f"{tmp_path / 'set.jsonl'}: row 2: ")


def test_exact_duplicates_are_folded_and_one_id_with_other_messages_is_an_error(tmp_path):
    row = {"prompt": [USER], "answer": "7"}
    spaced = {"prompt": [{"role": "user", "content": " Sum?\n"}], "answer": "7 "}
    reading = read(write(tmp_path / "set.jsonl", row, spaced, row))
    assert (len(reading.questions), reading.num_read, reading.num_folded) == (1, 3, 2)
    other = {"prompt": [{"role": "user", "content": "Hi"}, USER], "answer": "7"}
    path = write(tmp_path / "other.jsonl", row, other)
    with pytest.raises(InputError, match=r"other.jsonl: row 1 and .*other.jsonl: row 2 have the id"):
        read(path)


def test_traces_beside_the_questions_are_not_read(tmp_path):
    path = write(tmp_path / "set.parquet", {"problem": "Sum?", "answer": "7", "generations": ["long"]})
    assert [row for _, row in files.iter_rows(path, ("problem", "answer"))] == [{"problem": "Sum?", "answer": "7"}]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"question_field": "questoin", "answer_field": "answer"}, "no column 'questoin' .* Did you mean 'question'"),
        ({"question_field": "question"}, "--answer-field is missing"),
        ({"answer_pattern": "("}, r"--answer-pattern '\(' is no regular expression"),
    ],
)
def test_wrong_field_names(tmp_path, fields, message):
    path = write(tmp_path / "set.jsonl", {"question": "1?", "answer": "1"})
    with pytest.raises(InputError, match=message):
        read(path, **fields)


def test_a_folder_of_several_layouts_or_none(tmp_path):
    write(tmp_path / "a.jsonl", {"question": "1?", "answer": "1"})
    write(tmp_path / "b.jsonl", {"problem": "2?", "solution": "\\boxed{2}"})
    with pytest.raises(InputError, match=r"a.jsonl has the question and answer layout and .*b.jsonl has the math"):
        read(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"empty has no .parquet, .* files: there are no questions"):
        read(tmp_path / "empty")


def test_default_names(tmp_path):
    write(tmp_path / "my set" / "train.jsonl", {"question": "1?", "answer": "1"})
    assert sources.default_name("Elliott/Openr1-Math-46k-8192") == "Openr1-Math-46k-8192"
    assert sources.default_name("openai/gsm8k@v1:main:test") == "gsm8k-main-test"
    assert sources.parse_hub_id("a/b.c-d@refs/convert/parquet:main") == ("a/b.c-d", "refs/convert/parquet", ("main",))
    assert [sources.parse_hub_id(text) for text in ("gsm8k", "a/b/c", "a b/c", "/a/b")] == [None] * 4
    assert sources.default_name(str(tmp_path / "my set" / "train.jsonl")) == "train"
    assert sources.default_name(f"{tmp_path / 'my set'}:train") == "my set-train"
    assert sources.default_name("arithmetic") == "arithmetic"
    packed = write(tmp_path / "My.set.jsonl.gz", {"question": "1?", "answer": "1"}).rename(tmp_path / "My.set.JSONL.GZ")
    assert sources.default_name(str(packed)) == "My.set" and read(packed).questions[0].source == "My.set"


@pytest.mark.parametrize(
    ("value", "gold"),
    [
        (72.0, "72"),
        (0.1, "0.1"),
        # math-verify would read the e of 1e-05 as Euler's number.
        (1e-05, "0.00001"),
        (1e22, "1" + "0" * 22),
        (Decimal("12.50"), "12.50"),
        (Decimal("3.00"), "3"),
        (["7"], "7"),
        ([1, 2.5], "1, 2.5"),
        (None, values.UnusableRow("no answer")),
        (float("nan"), values.UnusableRow("no answer")),
        (float("inf"), values.UnusableRow("answer is infinite")),
        ([], values.UnusableRow("no answer")),
        ([["7"]], values.UnusableRow("answer is a list of lists, not text or a number")),
        ({"value": "7", "pass": 1}, "7"),
        ({"number": "", "spans": ["seven"]}, "seven"),
        ({"a": 1}, values.UnusableRow("answer is a dict without value, text, answer")),
    ],
)
def test_a_gold_that_is_no_text_is_written_as_one_or_says_why_not(value, gold):
    if isinstance(gold, str):
        assert values.gold_text(value) == gold
        return
    with pytest.raises(values.UnusableRow, match=str(gold)):
        values.gold_text(value)


@pytest.mark.parametrize(
    ("answers", "layout", "golds"),
    [
        # gsm8k is told by most of the first rows.
        ((None, "so\n#### 1,234", "#### 3"), "gsm8k", ["1234", "3"]),
        (("it is 7", "so\n#### 1,234", "#### 3"), "gsm8k", ["1234", "3"]),
        (("#### Result 1", "2", "3"), "question and answer", ["#### Result 1", "2", "3"]),
        ((True, 2), "question and answer", ["2"]),
    ],
)
def test_the_layout_is_that_of_most_rows(tmp_path, answers, layout, golds):
    rows = [{"question": f"{n}?", "answer": answer} for n, answer in enumerate(answers)]
    reading = read(write(tmp_path / "set.jsonl", *rows))
    assert (reading.layout, [answer for _, answer in pairs(reading)]) == (layout, golds)


def test_files_of_one_layout_may_name_their_columns_differently(tmp_path):
    write(tmp_path / "set" / "a.jsonl", {"question": "1?", "answer": "1"})
    write(tmp_path / "set" / "b.jsonl", {"problem": "2?", "final_answer": "2", "level": 3})
    write(tmp_path / "set" / "empty.jsonl")
    reading = read(tmp_path / "set")
    assert (reading.layout, pairs(reading)) == ("question and answer", [("1?", "1"), ("2?", "2")])
    assert [question.level for question in reading.questions] == [None, "3"]


@pytest.mark.parametrize("name", ["set.json", "set.jsonl"])
def test_rows_that_are_lists_of_turns(tmp_path, name):
    broken = [{"from": "human", "value": "And?"}, {"from": "assistant", "ground_truth": {"value": None}}]
    reading = read(write(tmp_path / name, TURNS, broken))
    assert (reading.layout, pairs(reading), list(reading.dropped)) == ("orz", [("Sum?", "7")], ["no answer"])


@pytest.mark.parametrize("asked", ["question", "problem", "input", "prompt"])
@pytest.mark.parametrize("answer", ["expected_answer", "ground_truth", "ground_truth_answer", "target", "final_answer"])
def test_names_of_the_answer_column(tmp_path, asked, answer):
    reading = read(write(tmp_path / "set.jsonl", {asked: "Sum?", "solution": "Long, so \\boxed{8}.", answer: "7"}))
    layout = "canonical" if asked == "prompt" else "question and answer"
    assert (reading.layout, pairs(reading)) == (layout, [("Sum?", "7")])


def chosen(paths, *selectors, card=None):
    split, files = sources.select_files("set", paths, card or {}, selectors)
    return *split.split("/"), tuple(files)


def test_configurations_and_splits_without_a_card():
    paths = ["main/train.parquet", "main/test.parquet", "socratic/train.parquet", "README.md", ".cache/train.parquet"]
    assert chosen(paths, "main") == ("main", "train", ("main/train.parquet",))
    assert chosen(paths, "main", "test") == ("main", "test", ("main/test.parquet",))
    with pytest.raises(InputError, match="the configurations main, socratic: say which, for example set:main"):
        chosen(paths)
    assert chosen(["questions.csv"]) == ("default", "train", ("questions.csv",))
    assert chosen(["test.csv"]) == ("default", "test", ("test.csv",))
    both = ("en/dev.csv", "en/validation-0.csv")
    assert chosen(both[::-1])[1:] == ("validation", both)
    with pytest.raises(InputError, match="has the splits validation, test: say which, for example set:validation"):
        chosen(["dev.csv", "test.csv"])
    with pytest.raises(InputError, match=r"mixes .csv and .parquet files"):
        chosen(["train.csv", "train.parquet"])


def test_a_card_decides():
    default = {"config_name": "default", "data_files": [{"split": "train", "path": ["part/*.jsonl"]}]}
    card = {"configs": [default, {"config_name": "other", "data_dir": "other"}]}
    paths = ["part/test-a.jsonl", "part/b.jsonl", "other/test.jsonl", "unused.csv"]
    assert chosen(paths, card=card) == ("default", "train", ("part/b.jsonl", "part/test-a.jsonl"))
    assert chosen(paths, "other", card=card) == ("other", "test", ("other/test.jsonl",))


@pytest.mark.parametrize(
    "configs",
    ["hello", ["main"], [{"config_name": "main", "data_files": [{"path": "a.csv"}]}], [{"data_files": {"train": "a"}}]],
)
def test_a_card_of_another_form_is_named_with_what_to_do(configs):
    with pytest.raises(InputError, match=r"set: `configs` in .* README.md is not a list .* for example set:a.csv"):
        chosen(["a.csv", "b.csv"], card={"configs": configs})
    # A file named outright needs no card.
    assert chosen(["a.csv", "b.csv"], "a.csv", card={"configs": configs})[2] == ("a.csv",)
