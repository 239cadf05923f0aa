"""`exgrpo prepare` as typed: files, reports, exit codes, one line for what is wrong."""

import json
import re
import signal
import subprocess
import sys

import pytest
from question_sources import write

from exgrpo_cli.commands import run
from exgrpo_cli.models.tiny import make_tokenizer
from exgrpo_cli.questions.question_file import read_questions


@pytest.fixture
def backbone(workdir):
    """A model folder with nothing but what prompts need."""
    make_tokenizer(max_tokens=512).save_pretrained(workdir / "model")
    (workdir / "model" / "config.json").write_text('{"model_type": "qwen2"}')
    return "model"


def questions(workdir, *answers):
    rows = [json.dumps({"q": f"What is {answer} + 0?", "gold": f"answer: {answer}"}) for answer in answers]
    (workdir / "set.jsonl").write_text("\n".join(rows))
    return ["set.jsonl", "--question-field", "q", "--answer-field", "gold", "--answer-pattern", r"answer: (\S+)"]


def test_without_options_arithmetic_and_its_heldout_questions_are_made(workdir, capsys):
    small = ["--set", "arithmetic.num_train=60", "--set", "arithmetic.num_heldout=30"]
    assert run(["prepare", *small]) == 0
    assert len(read_questions("data/arithmetic.parquet").questions) == 60
    assert len(read_questions("data/arithmetic-heldout.parquet").questions) == 30
    page = capsys.readouterr().out
    assert "60 kept in data/arithmetic.parquet" in page and "30 kept in data/arithmetic-heldout.parquet" in page
    first = read_questions("data/arithmetic.parquet")
    assert run(["prepare", *small, "--quiet"]) == 0
    assert read_questions("data/arithmetic.parquet") == first
    assert run(["prepare", *small, "--seed", "1", "--quiet"]) == 0
    assert read_questions("data/arithmetic.parquet").content_hash != first.content_hash
    assert capsys.readouterr() == ("", "")


def test_json_is_one_object_on_stdout(workdir, capsys):
    assert run(["prepare", *questions(workdir, 1, 2), "--layout", "verl", "--output", "out/v.parquet", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["output"], report["layout"]) == ("out/v.parquet", "named fields")
    assert report["counts"] == {"read": 2, "kept": 2, "folded": 0, "dropped": {}}
    found = read_questions("out/v.parquet")
    assert report["content_hash"] == found.content_hash and [q.answer for q in found.questions] == ["1", "2"]


def test_the_prompts_are_shown_as_the_backbone_sees_them(workdir, backbone, capsys):
    arguments = ["prepare", *questions(workdir, 1, 2, 3), "--backbone", backbone, "--show", "2", "--quiet"]
    assert run(arguments) == 0
    shown = capsys.readouterr().out.split("---\n")
    # One token a byte and one each for <|user|>, <|assistant|>, <think>: 3 + len("What is 1 + 0?") + the newline.
    assert shown[0].endswith(", 18 tokens\n<|user|>What is 1 + 0?<|assistant|><think>\n\n")
    assert "What is 2 + 0?" in shown[1] and len(shown) == 3
    assert run([*arguments, "--json"]) == 0
    assert [prompt["tokens"] for prompt in json.loads(capsys.readouterr().out)["shown"]] == [18, 18]


def test_prompts_over_the_limit_are_left_out(workdir, backbone, capsys):
    limit = ["--backbone", backbone, "--max-prompt-tokens", "19"]
    assert run(["prepare", *questions(workdir, 1, 22, 333), *limit, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["counts"]["dropped"] == {"prompt over 19 tokens": 1}


@pytest.mark.parametrize(
    ("files", "named", "dropped"),
    [
        (["own.jsonl"], "own.jsonl", {"contaminated by own": 1}),
        (["a/test.jsonl", "b/test.jsonl"], "a/test.jsonl,b/test.jsonl", {"contaminated by test": 2}),
        (["b/test.jsonl"], "b", {"contaminated by b": 1}),
    ],
)
def test_questions_of_a_benchmark_are_left_out_whatever_its_layout(workdir, capsys, files, named, dropped):
    """Benchmark files of one name all count, and a folder is read too."""
    for number, path in enumerate(files, start=1):
        (workdir / path).parent.mkdir(exist_ok=True)
        (workdir / path).write_text(json.dumps({"problem": f"What is {number} + 0?", "answer": "1"}))
    assert run(["prepare", *questions(workdir, 1, 2, 3, 4), "--decontaminate", named, "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["counts"]["dropped"] == dropped and "reading files: 1/1" in said.err


def test_ctrl_c_says_how_to_go_on(workdir):
    rows = [json.dumps({"question": f"Power {n}?", "answer": f"x^{{{n}}}+1"}) for n in range(3000)]
    (workdir / "set.jsonl").write_text("\n".join(rows))
    code = "import signal; signal.signal(2, signal.default_int_handler); from exgrpo_cli.main import main; main()"
    arguments = [sys.executable, "-c", code, "prepare", "set.jsonl"]
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("verifying gold answers"):
            break
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "stopped, data/set.parquet was not written; run the same command again" in stderr.splitlines()[-1]
    assert [path.name for path in workdir.iterdir()] == ["set.jsonl"]


def test_a_dry_run_writes_nothing(workdir, capsys):
    assert run(["prepare", *questions(workdir, 1), "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["source"], plan["output"], plan["question_field"]) == ("set.jsonl", "data/set.parquet", "q")
    assert sorted(path.name for path in workdir.iterdir()) == ["set.jsonl"]


def test_the_report_of_a_split_adds_up(workdir, capsys):
    rows = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(20)]
    write(workdir / "mine.jsonl", *rows, rows[0], {"question": "And?", "answer": None})
    assert run(["prepare", "mine.jsonl", "--split", "0.2"]) == 0
    told = capsys.readouterr().out
    counts = [int(line.split()[0]) for line in told.splitlines()[1:] if re.match(r" {5,10}\d", line)]
    # Read, folded, dropped, of that without an answer, kept, held out.
    assert counts == [22, 1, 1, 1, 16, 4] and "4 held out in data/mine-heldout.parquet" in told
    assert run(["prepare", "mine.jsonl", "--split", "0.2", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    for part in (value, value["heldout"]):
        read, kept, folded, dropped, other = part["counts"].values()
        assert read == kept + folded + sum(dropped.values()) + other == 22
