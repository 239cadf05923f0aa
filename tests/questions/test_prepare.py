"""`prepare`: what the audit finds, what the file and the report say, and that the output is whole or not there."""

import json
import signal
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from question_sources import question, write

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.config.requests import PrepareRequest
from exgrpo_cli.config.sections.data import WordProblemSettings
from exgrpo_cli.config.sections.run import GradingSettings
from exgrpo_cli.config.settings import Config
from exgrpo_cli.grading import GradingPool
from exgrpo_cli.questions import audit, prepare, prompts, question_file

ALICE = "Alice has 12 red apples and 7 green ones; she gives 5 of them to Bob. How many apples has she left?"
CAROL = "Carol has 12 red apples and 7 green ones; she gives 5 of them to Bob. How many apples has she left?"
WALK = "A walker covers nine kilometres in four hours with a pause of t minutes in a coffee shop on the way home."


def qa(question, answer):
    return {"question": question, "answer": answer}


def run(source, output, **options):
    return prepare.prepare(str(source), output, prepare.PrepareOptions(**options), lambda *_: None)[0]


def test_the_audit_counts_what_it_drops_folds_and_marks(tmp_path):
    source = write(
        tmp_path / "set.jsonl",
        qa(ALICE, "14"),
        qa(ALICE + " ", "14"),
        qa(ALICE, "15"),
        qa(CAROL, "14"),
        qa("What is half of one?", "\\frac{1}{2}"),
        qa("What is it?", "\\frac{1}{"),
        qa("And what is that?", ""),
        qa(f"{WALK} How long is the pause?", "24"),
    )
    benchmark = {"walks": [f"{WALK} How fast does the walker go?"]}
    output = tmp_path / "data" / "set.parquet"
    report = run(source, output, benchmarks=benchmark)
    dropped = dict(report.dropped)
    assert dropped.pop("no answer") == 1 and dropped.pop("contaminated by walks") == 1
    # The unfinished fraction is dropped as a gold, whatever the verifier calls it.
    assert list(dropped.values()) == [1] and next(iter(dropped)).startswith("gold ")
    # 8 read = 4 kept + 1 folded + 3 dropped.
    assert (report.num_read, len(report.questions), report.num_folded) == (8, 4, 1)
    assert dict(report.marked) == {"same question, different answers": 1, "almost the same question": 1}
    found = question_file.read_questions(output)
    assert [question.answer for question in found.questions] == ["14", "15", "14", "\\frac{1}{2}"]
    assert question_file.is_prepared(found.metadata) and found.content_hash == report.to_json()["content_hash"]
    assert found.metadata["counts"] == report.findings()["counts"] and found.metadata["counts"]["read"] == 8
    assert found.metadata["source_layout"] == "question and answer"
    assert found.metadata["options"]["decontaminate"] == ["walks"]
    assert WALK[:20] in found.metadata["dropped"]["contaminated by walks"]["examples"][0]
    page = "\n".join(report.lines())
    assert "8 read" in page and "1 exact duplicates folded" in page and f"4 kept in {output}" in page
    assert len(report.lines()) < 40
    assert json.loads(json.dumps(report.to_json()))["counts"] == report.findings()["counts"]


def test_nothing_left_says_why_and_writes_nothing(tmp_path):
    source = write(tmp_path / "set.jsonl", qa("What is it?", "\\frac{1}{"), qa("And that?", None))
    with pytest.raises(InputError, match=r"none of the 2 rows is left: 1 no answer .*; 1 gold "):
        run(source, tmp_path / "out.parquet")
    assert not (tmp_path / "out.parquet").exists()
    # Of options the gold is a letter, which is verified as one.
    rows = [{"question": f"Which {n}?", "choices": ["one", "two"], "answer": n % 2} for n in range(4)]
    assert len(run(write(tmp_path / "choices.jsonl", *rows), tmp_path / "out.parquet").questions) == 4


def test_a_made_source_tells_its_seed_and_levels(tmp_path):
    settings = Config(word_problems=WordProblemSettings(num_train=60, num_heldout=30, seed=5))
    options = prepare.PrepareOptions(settings=settings)
    train, heldout = prepare.prepare("word-problems", tmp_path / "train.parquet", options, lambda *_: None)
    assert heldout.output == tmp_path / "train-heldout.parquet" and len(heldout.questions) == 30
    assert train.to_json()["levels"] == dict.fromkeys("1234", 15)
    assert question_file.read_questions(tmp_path / "train.parquet").metadata["options"]["seed"] == 5


def test_an_output_that_is_not_prepares_own_is_refused(tmp_path):
    source = write(tmp_path / "set.jsonl", qa("1 + 1 = ?", "2"))
    other = tmp_path / "other.parquet"
    pq.write_table(pa.table({"x": [1]}), other)
    (tmp_path / "file").write_text("")
    for output, message in (
        (other, "exists and was not made by `exgrpo prepare`"),
        (source, "is the source itself"),
        (tmp_path, "is a folder, where a file is to go"),
        (tmp_path / "file" / "out.parquet", "is not a writable folder"),
    ):
        with pytest.raises(InputError, match=message):
            run(source, output)
    assert pq.read_table(other).to_pylist() == [{"x": 1}]
    run(source, tmp_path / "out.parquet")
    assert len(run(source, tmp_path / "out.parquet").questions) == 1


def test_a_killed_preparation_leaves_the_old_output_and_the_next_one_starts_clean(tmp_path):
    # Powers of x go to math-verify one by one: seconds of work, of which the kill falls into the first.
    source = write(tmp_path / "set.jsonl", *(qa(f"Power {n}?", f"x^{{{n}}}+1") for n in range(3000)))
    output = tmp_path / "out.parquet"
    small = write(tmp_path / "small.jsonl", qa("1 + 1 = ?", "2"))
    run(small, output)
    before = output.read_bytes()
    command = [sys.executable, "-m", "exgrpo_cli", "prepare", str(source), "--output", str(output)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if line.startswith("verifying gold answers"):
            break
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert output.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.parquet", "set.jsonl", "small.jsonl"]
    assert len(run(small, output).questions) == 1


def test_check_golds_names_the_first_bad_one():
    bad = question("?", answer="\\frac{1}{")
    with GradingPool(GradingSettings()) as pool:
        audit.check_golds([question("?", answer="1"), question("?", answer="\\frac{1}{2}")], pool)
        with pytest.raises(InputError, match=rf"1 of 2 gold answers .* of question {bad.id}: gold "):
            audit.check_golds([question("?", answer="1"), bad], pool)


def test_overlap_is_the_share_of_the_benchmark_questions_ngrams():
    index = audit.BenchmarkIndex({"bench": ["one two three four five six", "seven"]}, size=3)
    # Trigrams of the benchmark question: 123 234 345 456; the text holds 123 and 234: 2 of 4.
    assert index.nearest("zero one two three four zero") == ("bench", "one two three four five six", 0.5)
    assert index.nearest("one two zero three four") is None
    # A benchmark question of fewer words than n counts only where it is the whole text.
    assert index.nearest("Seven!") == ("bench", "seven", 1.0) and index.nearest("six seven") is None
    # Signs are words, without which 1+2 and 1-2 would read alike; mark-up and punctuation are not.
    assert audit.words_of("Let $x+1$ be \\frac{A}{b}.") == ("let", "x", "+", "1", "be", "frac", "a", "b")


def test_near_duplicates_agree_with_comparing_all_pairs():
    words = [f"w{n}" for n in range(40)]
    texts = [" ".join(words), "short text", " ".join(words[1:]), " ".join(reversed(words)), " ".join([*words, "end"])]
    pairs = audit.near_duplicates(texts, threshold=0.8)
    # 40 words have 38 trigrams. Text 2 lacks one of them: 37/38. Text 4 has one more: 38/39, against text 2 37/39.
    assert [pair[:2] for pair in pairs] == [(0, 2), (0, 4)]
    assert [pair[2] for pair in pairs] == pytest.approx([37 / 38, 38 / 39])
    assert audit.near_duplicates(texts, threshold=0.99) == []
    # Of few trigrams most are common by chance, here four of six: 9+4, +4+, 4+9, +9+.
    assert audit.near_duplicates(["9+4+9+4=?", "9+4+9+4+9=?"], threshold=0.6) == []


@pytest.mark.slow
def test_real_files(tmp_path, shared_data):
    gsm8k = run(shared_data / "gsm8k_train.jsonl", tmp_path / "gsm8k.parquet")
    assert (gsm8k.layout, gsm8k.num_read, len(gsm8k.questions)) == ("gsm8k", 7473, 7473)
    file, request = shared_data / "verl_format_aime24_math500.parquet", PrepareRequest(layout="verl")
    verl = run(file, tmp_path / "verl.parquet", request=request)
    # 30 questions of AIME24 stand eight times each: 240 - 30 = 210 are folded.
    assert (verl.layout, verl.num_read, verl.num_folded) == ("verl", 740, 210)
    assert len(verl.questions) == 530
    assert {question.prompt[0].content for question in verl.questions} == {prompts.THOUGHT_SOLUTION_SYSTEM}
