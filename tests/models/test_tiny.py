"""The tiny backbone: its tokenizer as anybody loads it, its warm start, and a cache that is whole or not there."""

import json
import os
import subprocess
import sys
import unicodedata
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from run_leaves import kill_once
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Tokenizer

from exgrpo_cli.base import cache, errors, files
from exgrpo_cli.config.sections.run import TinySettings
from exgrpo_cli.models import tiny

SMALL = TinySettings(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, ffn_size=48, warm_start_steps=3)
QUESTION = [{"role": "user", "content": "9+3-2=?"}]
RESPONSE = "9+3=12\n12-2=10\n</think>\n\\boxed{10}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build_tiny(settings=SMALL, cache_dir=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def tokenizer() -> Qwen2Tokenizer:
    return tiny.make_tokenizer(max_tokens=tiny.MAX_TOKENS)


def test_any_text_survives_a_round_trip(tokenizer):
    @settings(max_examples=50, deadline=None)
    @given(st.text(max_size=40))
    def round_trip(text: str) -> None:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if not any(token in text for token in tokenizer.all_special_tokens):
            assert tokenizer.decode(ids, skip_special_tokens=True) == unicodedata.normalize("NFC", text)

    round_trip()


def test_markup_is_one_token_each_and_is_never_stripped(tokenizer):
    for piece in tiny.MARKUP:
        assert len(tokenizer.encode(piece, add_special_tokens=False)) == 1
    ids = tokenizer.encode("<think>\n" + RESPONSE + tiny.EOS + tiny.PAD, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>\n" + RESPONSE
    # 6 + 1 + 7 + 1 characters of working, `</think>`, a newline, the box, two digits, a brace.
    assert len(tokenizer.encode(RESPONSE, add_special_tokens=False)) == 15 + 1 + 1 + 1 + 2 + 1


def test_a_saved_folder_loads_as_the_same_tokenizer(folder, tokenizer):
    # With a Qwen2 model beside it, AutoTokenizer ignores the pipeline in tokenizer.json and makes a Qwen2 one.
    loaded = AutoTokenizer.from_pretrained(folder)
    for text in ("<think>\n" + RESPONSE + tiny.EOS, "Wörter, 数 and  blanks\n\n"):
        assert loaded.encode(text, add_special_tokens=False) == tokenizer.encode(text, add_special_tokens=False)
        assert loaded.decode(loaded.encode(text)) == text
    assert (loaded.eos_token, loaded.pad_token, len(loaded)) == (tiny.EOS, tiny.PAD, 264)
    # Two roles, `<think>` and a newline around the seven characters of the question.
    ids = loaded.apply_chat_template(QUESTION, add_generation_prompt=True)["input_ids"]
    assert len(ids) == 2 + 2 + 7 and loaded.decode(ids) == "<|user|>9+3-2=?<|assistant|><think>\n"
    turns = [{"role": "system", "content": "Add."}, *QUESTION, {"role": "assistant", "content": "<think>\n" + RESPONSE}]
    whole = loaded.apply_chat_template(turns, tokenize=False)
    assert whole == "<|system|>Add.<|user|>9+3-2=?<|assistant|><think>\n" + RESPONSE + tiny.EOS
    with pytest.raises(Exception, match="not tool"):
        loaded.apply_chat_template([{"role": "tool", "content": "4"}], tokenize=False)


def test_the_folder_works_as_a_model_card_says(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.model_type == "qwen2" and model.dtype == torch.float32
    defaults = model.generation_config
    assert (defaults.eos_token_id, defaults.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert (defaults.do_sample, defaults.temperature) == (True, 1.0)
    inputs = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt")
    torch.manual_seed(0)
    output = model.generate(**inputs, max_new_tokens=5, num_return_sequences=3)
    assert output.shape[0] == 3 and inputs["input_ids"].shape[1] < output.shape[1] <= inputs["input_ids"].shape[1] + 5


def test_default_size_is_about_half_a_million(tokenizer):
    model = tiny.make_model(TinySettings(), tokenizer)
    # Embedding 264*128; a layer: q and o 128*128 each, k and v 64*128 each, biases 128+64+64, three 256*128 matrices,
    # two norms of 128; a last norm. The output matrix is the embedding.
    layer = 2 * 128 * 128 + 2 * 64 * 128 + (128 + 64 + 64) + 3 * 256 * 128 + 2 * 128
    assert sum(weight.numel() for weight in model.parameters()) == 264 * 128 + 3 * layer + 128 == 477_824


def row_loss(model, prompt_ids: list[int], response_ids: list[int]) -> torch.Tensor:
    """Cross-entropy of a response, summed over its tokens."""
    logits = model(input_ids=torch.tensor([prompt_ids + response_ids])).logits[0, len(prompt_ids) - 1 : -1]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(response_ids), reduction="sum")


def test_gradient_is_that_of_one_row_at_a_time(tokenizer):
    model = tiny.make_model(SMALL, tokenizer)
    rows = tiny.draw_rows(tokenizer, 11, tiny.WarmStartRecipe(), np.random.default_rng(0))
    tiny.accumulate_gradient(model, rows, tokenizer.pad_token_id)
    batched = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    (sum(row_loss(model, *row) for row in rows) / sum(len(response_ids) for _, response_ids in rows)).backward()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(batched[name], weight.grad, atol=1e-6, rtol=1e-4)


def test_rows_end_with_eos_and_start_with_the_prompt(tokenizer):
    for prompt_ids, response_ids in tiny.draw_rows(tokenizer, 20, tiny.WarmStartRecipe(), np.random.default_rng(1)):
        assert tokenizer.decode(prompt_ids).endswith("=?<|assistant|><think>\n")
        assert response_ids[-1] == tokenizer.eos_token_id and response_ids.count(tokenizer.eos_token_id) == 1


@pytest.mark.parametrize("shape", [(24, 24), (40, 16), (16, 40)])
def test_muon_is_torchs_in_float32(shape):
    generator = torch.Generator().manual_seed(0)
    ours = torch.nn.Parameter(torch.randn(shape, generator=generator))
    theirs = torch.nn.Parameter(ours.detach().clone())
    reference = torch.optim.Muon([theirs], lr=0.1, weight_decay=0.0, momentum=0.95)
    velocity = torch.zeros_like(ours)
    start = ours.detach().clone()
    for _ in range(3):
        ours.grad = torch.randn(shape, generator=generator)
        theirs.grad = ours.grad.clone()
        tiny.muon_step([ours], [velocity], 0.1)
        reference.step()
    # bfloat16 keeps eight bits: the steps agree to about a hundredth of their size.
    assert (ours - theirs).norm() < 0.02 * (ours - start).norm()


def test_warm_start_learns_and_leaves_the_callers_state_alone(tmp_path):
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    steps = []
    longer = replace(SMALL, warm_start_steps=40)
    path = tiny.build_tiny(settings=longer, cache_dir=tmp_path, progress=lambda *report: steps.append(report))
    assert torch.rand(1) == expected
    assert [report[:2] for report in steps] == [(done, 40) for done in range(1, 41)]
    tokenizer = AutoTokenizer.from_pretrained(path)
    rows = tiny.draw_rows(tokenizer, 32, tiny.WarmStartRecipe(), np.random.default_rng(9))

    @torch.no_grad()
    def loss(model) -> float:
        return float(sum(row_loss(model, *row) / len(row[1]) for row in rows)) / len(rows)

    # 264 equally likely tokens cost ln 264 = 5.6 nats, the 25 that occur ln 25 = 3.2.
    assert loss(tiny.make_model(longer, tokenizer)) > 5.0
    assert loss(AutoModelForCausalLM.from_pretrained(path)) < 3.2


def test_second_build_is_taken_from_the_cache_and_other_settings_are_not(folder):
    written = (folder / "model.safetensors").stat().st_mtime_ns
    reports = []
    again = tiny.build_tiny(settings=SMALL, cache_dir=folder.parent, progress=lambda *report: reports.append(report))
    assert again == folder and reports == [] and (folder / "model.safetensors").stat().st_mtime_ns == written
    other = tiny.build_tiny(settings=replace(SMALL, seed=1), cache_dir=folder.parent)
    assert other != folder
    assert (other / "model.safetensors").read_bytes() != (folder / "model.safetensors").read_bytes()


def test_a_damaged_copy_is_rebuilt_and_says_so(folder):
    weights, reports = folder / "model.safetensors", []
    others = [path.name for path in folder.iterdir() if path != weights]
    before = weights.read_bytes()
    for damage, expected in (
        (lambda: weights.write_bytes(before[:-1] + bytes([before[-1] ^ 1])), "is damaged (its checksum differs)"),
        (weights.unlink, "is missing"),
        # Weights that a manifest does not list are nobody's.
        (lambda: files.write_manifest(folder, others), "is not in its manifest.json"),
    ):
        damage()
        assert tiny.build_tiny(settings=SMALL, cache_dir=folder.parent, progress=lambda *r: reports.append(r)) == folder
        assert f"{folder} is built again: {weights} {expected}" in [what for _, _, what in reports]
        # Trained again from the same seed: the same weights, bit for bit.
        assert weights.read_bytes() == before


BUILDER = """
import sys, time
from pathlib import Path
from exgrpo_cli.base.cache import cached_folder

root, seconds = Path(sys.argv[1]), float(sys.argv[2])

def build(folder):
    with (root / "builds").open("a") as log:
        log.write("build\\n")
    (folder / "one").write_text("1")
    time.sleep(seconds)
    (folder / "two").write_text("2")

print(cached_folder(name=sys.argv[3], key={"a": 1}, build=build, notice=print, cache_dir=root))
"""


def start_builder(root: Path, seconds: float, name: str = "thing") -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", BUILDER, str(root), str(seconds), name]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def test_two_processes_build_once(tmp_path):
    builders = [start_builder(tmp_path, 0.5) for _ in range(2)]
    folders = {builder.communicate(timeout=60)[0].strip() for builder in builders}
    assert [builder.returncode for builder in builders] == [0, 0]
    assert len(folders) == 1 and (tmp_path / "builds").read_text() == "build\n"
    assert sorted(json.loads((Path(folders.pop()) / "manifest.json").read_text())["files"]) == ["one", "two"]


@pytest.mark.parametrize("next_name", ["thing", "other"])
def test_a_killed_build_leaves_nothing_that_looks_finished_nor_anything_after_the_next(tmp_path, next_name):
    at_work = files.partial_path(tmp_path / "third")
    at_work.mkdir()
    builder = start_builder(tmp_path, 60.0)
    kill_once(lambda: any(tmp_path.glob(".thing-*.partial-*/one")), builder)
    builder.communicate()
    assert [path for path in tmp_path.glob("thing-*") if path.is_dir()] == []
    output, _ = start_builder(tmp_path, 0.0, next_name).communicate(timeout=60)
    folder = Path(output.strip())
    assert (folder / "two").read_text() == "2"
    assert {path for path in tmp_path.iterdir() if path.is_dir()} == {folder, at_work}


def test_the_cache_folder_follows_the_environment_and_is_named_where_it_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setenv("EXGRPO_CACHE", str(tmp_path / "mine"))
    folder = cache.cached_folder(name="x", key={}, build=lambda folder: (folder / "f").touch(), notice=print)
    assert folder.parent == tmp_path / "mine"
    (tmp_path / "file").touch()
    with pytest.raises(errors.InputError, match=r"cache folder .*file/cache cannot be written .*set EXGRPO_CACHE"):
        cache.cached_folder(name="x", key={}, build=lambda f: None, notice=print, cache_dir=tmp_path / "file" / "cache")
