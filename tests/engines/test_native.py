"""The native decoding step against transformers in float64, and what happens where it cannot be had."""

import ctypes
import platform
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import slow_sampler
import torch
from processes import python
from scipy.stats import chisquare
from slow_sampler import EOS, ONE, PARAMS, VOCAB, build_model, flat, of_config, requests, slowly
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from exgrpo_cli.base import errors, types
from exgrpo_cli.engines.causal_lm import split_causal_lm
from exgrpo_cli.engines.hf import native
from exgrpo_cli.engines.hf.generator import HFGenerator

SOURCE = Path(native.__file__).with_name("decode.cpp")
SHAPES = [
    ({"hidden_size": 40, "intermediate_size": 50, "num_attention_heads": 6, "head_dim": 20}, 1, 2),
    ({"num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 34}, 33, 70),
    ({"vocab_size": 152_000}, 3, 3),
    ({"max_position_embeddings": 8192, "num_hidden_layers": 1}, 4096, 4),
]
"""Of a model, with the lengths of prompt and response."""


@pytest.fixture
def afresh() -> Iterator[None]:
    """A library looked for anew, and again for the tests that follow."""
    native.native_library.cache_clear()
    yield
    native.native_library.cache_clear()


def native_generator(model: PreTrainedModel, **more: object) -> HFGenerator:
    """A generator that decodes natively, which a machine without a compiler cannot make: skipped there, and said."""
    if isinstance(library := native.native_library(), str):
        pytest.skip(f"no native decoding step: {library}")
    generator = HFGenerator(model, **{"eos_ids": EOS, **more})
    assert isinstance(generator._library, ctypes.CDLL)
    return generator


def one_prompt(length: int, vocab: int, seeds: range | tuple[int, ...] = (1, 2)) -> types.RolloutRequest:
    ids = np.random.default_rng(length).integers(0, vocab, length).astype(np.int32)
    return types.RolloutRequest(question_id="q", prompt_ids=ids, seeds=tuple(seeds))


def exact_logprobs(model: PreTrainedModel, request: types.RolloutRequest, rollout: types.Rollout) -> np.ndarray:
    """Log-probs of the tokens drawn, in float64."""
    whole = np.concatenate([request.prompt_ids, rollout.token_ids]).astype(np.int64)
    with torch.no_grad():
        logits = model.double()(input_ids=torch.from_numpy(whole)[None]).logits[0, len(request.prompt_ids) - 1 : -1]
    model.float()
    return torch.log_softmax(logits, -1)[torch.arange(len(logits)), rollout.token_ids.astype(np.int64)].numpy()


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral"])
@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_rollouts_equal_one_token_at_a_time(family: str, top_p: float) -> None:
    """Six rows at a time: rows end, are replaced and move; pages are given back and taken again."""
    params = replace(PARAMS, top_p=top_p)
    groups = native_generator(build_model(family, torch.float32), max_rows=6).generate(requests(), params)
    expected = slowly(build_model(family), params)
    slow_sampler.assert_as_one_token_at_a_time(groups, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_log_probs_and_entropies_are_those_of_a_full_forward_pass() -> None:
    groups = native_generator(build_model(dtype=torch.float32)).generate(requests(), replace(PARAMS, entropies=True))
    slow_sampler.assert_as_one_full_pass(groups, build_model(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("shape", "prompt", "tokens"), SHAPES)
def test_sizes_that_are_no_multiples_of_a_panel(shape: dict[str, int], prompt: int, tokens: int) -> None:
    """Odd widths, a page that begins and ends within a response, a wide vocabulary, a long prompt that is shared."""
    torch.manual_seed(0)
    base = {
        "vocab_size": 37, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "initializer_range": 0.2, "max_position_embeddings": 256,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **base | shape)).eval()
    request = one_prompt(prompt, model.config.vocab_size)
    params = replace(ONE, max_new_tokens=tokens)
    (group,) = native_generator(model, eos_ids=()).generate([request], params)
    for rollout in group:
        np.testing.assert_allclose(rollout.engine_logprobs, exact_logprobs(model, request, rollout), rtol=0, atol=1e-3)


def test_a_beginning_that_prompts_share_is_read_once_and_changes_nothing() -> None:
    """Prompts of 40 common tokens and up to 9 of their own, one of them none."""
    shared = one_prompt(40, VOCAB).prompt_ids
    asked = [replace(each, prompt_ids=np.concatenate([shared, each.prompt_ids])) for each in requests()]
    asked.append(replace(asked[0], question_id="bare", prompt_ids=shared))
    model = build_model(dtype=torch.float32)
    groups = native_generator(model, max_rows=9).generate(asked, replace(PARAMS, temperature=1.0))
    for request, group in zip(asked, groups, strict=True):
        for rollout in group:
            exact = exact_logprobs(model, request, rollout)
            np.testing.assert_allclose(rollout.engine_logprobs, exact, rtol=0, atol=1e-4)


def test_draws_follow_the_distribution() -> None:
    """Pairs of tokens of 4,000 seeds; the second is drawn natively."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(
        "llama", vocab_size=5, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
        initializer_range=0.5,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    request = one_prompt(3, 5, range(4000))
    (group,) = native_generator(model, eos_ids=()).generate([request], replace(ONE, max_new_tokens=2))
    pairs = np.array([5 * rollout.token_ids[0] + rollout.token_ids[1] for rollout in group])
    ids = torch.from_numpy(request.prompt_ids.astype(np.int64)).repeat(5, 1)
    with torch.no_grad():
        logits = model.double()(input_ids=torch.cat([ids, torch.arange(5)[:, None]], dim=1)).logits.softmax(-1)
    expected = (logits[0, -2][:, None] * logits[:, -1]).flatten().numpy() * len(group)
    assert chisquare(np.bincount(pairs, minlength=25), expected).pvalue > 1e-3


def test_draws_walk_over_all_stretches_of_a_wide_vocabulary() -> None:
    model = of_config("llama", vocab_size=700, initializer_range=0.02).eval()
    request, params = one_prompt(3, 700, range(60)), replace(PARAMS, max_new_tokens=4)
    (group,) = native_generator(model).generate([request], params)
    drawn = [rollout.token_ids.tolist() for rollout in group]
    assert drawn == [slow_sampler.slow_rollout(model, request.prompt_ids, seed, params)[0] for seed in request.seeds]
    assert len({token // 64 for tokens in drawn for token in tokens[1:]}) == 11


def test_threads_change_no_bit(monkeypatch) -> None:
    """Threads of the native steps alone: sums of torch, which reads the prompts, depend on them."""
    found = []
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        groups = native_generator(build_model(dtype=torch.float32)).generate(requests(), PARAMS)
        found.append([(each.token_ids.tolist(), each.engine_logprobs.tolist()) for each in flat(groups)])
    assert found[0] == found[1]


@pytest.mark.parametrize("from_the_start", [True, False])
def test_a_policy_that_diverged_is_named(from_the_start: bool, monkeypatch) -> None:
    """By the draw of the first token, which is torch's, or of a later one."""
    model = build_model(dtype=torch.float32)
    generator = native_generator(model)
    weight = model.model.layers[0].mlp.down_proj.weight
    if from_the_start:
        weight.detach()[0, 0] = torch.nan
    else:
        packed = native.packed
        monkeypatch.setattr(native, "packed", lambda *given, **more: packed(*given, **more).fill_(torch.nan))
    with pytest.raises(errors.RunError, match=r"logits are NaN.*lower optim\.learning_rate"):
        generator.generate(requests(), PARAMS)


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"CXX": "/nowhere/c++"}, "no C++ compiler answers as '/nowhere/c++'"),
        ({"CXX": "false"}, "'false' fails: no message"),
        ({"EXGRPO_CACHE": "/proc/nowhere"}, "cache folder /proc/nowhere cannot be written"),
        ({"EXGRPO_NATIVE": "0"}, "EXGRPO_NATIVE is 0"),
    ],
)  # fmt: skip
def test_without_a_library_one_line_and_the_reference(variables, reason, monkeypatch, afresh) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.warns(errors.ToolkitWarning, match=re.escape(reason)) as said:
        generator = HFGenerator(build_model(dtype=torch.float32), max_rows=6, eos_ids=EOS)
    assert len(said) == 1 and "\n" not in str(said[0].message)
    slow_sampler.assert_as_one_token_at_a_time(generator.generate(requests(), PARAMS), slowly(build_model()))


def test_a_compiler_that_hangs_is_given_up(tmp_path, monkeypatch, afresh) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\nexec sleep 600\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(native, "COMPILE_SECONDS", 0.2)
    for name, value in {"CXX": str(compiler), "EXGRPO_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    assert native.native_library() == f"'{compiler}' is not done after 0.2 s"


def test_a_library_that_computes_something_else_is_found_out(tmp_path, monkeypatch) -> None:
    """A rotation that leaves out half of itself."""
    wrong = SOURCE.read_text(encoding="utf-8").replace("high * cosine[i] + low * sine[i]", "high * cosine[i]")
    assert wrong != SOURCE.read_text(encoding="utf-8")
    (tmp_path / "decode.cpp").write_text(wrong, encoding="utf-8")
    native_generator(build_model(dtype=torch.float32))
    native._compile("c++", tmp_path / "decode.cpp", tmp_path / "decode.so")
    monkeypatch.setattr(native, "native_library", lambda: ctypes.CDLL(str(tmp_path / "decode.so")))
    with pytest.warns(errors.ToolkitWarning, match="its logits differ from transformers' by"):
        HFGenerator(build_model(dtype=torch.float32), eos_ids=EOS)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86-64")
@pytest.mark.parametrize("processor", ["haswell", "x86-64"])
def test_processors_with_narrower_vectors(processor: str, monkeypatch, tmp_path, afresh) -> None:
    """AVX2, which every processor that runs these tests has, and SSE."""
    monkeypatch.setenv("EXGRPO_CACHE", str(tmp_path))
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, f"-march={processor}"))
    test_rollouts_equal_one_token_at_a_time("qwen3", 1.0)
    test_sizes_that_are_no_multiples_of_a_panel({"hidden_size": 40, "num_attention_heads": 6, "head_dim": 20}, 33, 70)


@pytest.mark.parametrize(
    "model",
    [
        lambda: build_model(dtype=torch.float64),
        lambda: build_model(dtype=torch.bfloat16),
        lambda: of_config("llama", hidden_act="gelu"),
        lambda: of_config("llama", mlp_bias=True),
        lambda: of_config("gpt_neox"),
    ],
)  # fmt: skip
def test_models_of_another_shape_are_left_to_transformers(model) -> None:
    assert not native.runs_natively(split_causal_lm(model()))


@pytest.mark.engines
def test_memory_under_a_sanitizer(tmp_path) -> None:
    """Sampling of this file in a process that watches every read and write of the library."""
    native_generator(build_model(dtype=torch.float32))
    runtime = subprocess.run(["c++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    flags = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g")
    program = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1] / "helpers")]!r}
from exgrpo_cli.engines.hf import native
native.FLAGS, native.COMPILE_SECONDS = (*native.FLAGS, *{flags!r}), 600
import test_native as tests
for family in ("qwen2", "qwen3", "llama"):
    for top_p in (1.0, 0.7):
        tests.test_rollouts_equal_one_token_at_a_time(family, top_p)
tests.test_a_beginning_that_prompts_share_is_read_once_and_changes_nothing()
for shape, prompt, tokens in tests.SHAPES:
    tests.test_sizes_that_are_no_multiples_of_a_panel(shape, prompt, tokens)
tests.test_log_probs_and_entropies_are_those_of_a_full_forward_pass()
tests.test_draws_walk_over_all_stretches_of_a_wide_vocabulary()
print("all read and written within bounds")
"""
    variables = {"LD_PRELOAD": runtime.stdout.strip(), "ASAN_OPTIONS": "detect_leaks=0", "EXGRPO_CACHE": str(tmp_path)}
    done = python("-c", program, variables=variables)
    assert done.stdout.splitlines()[-1:] == ["all read and written within bounds"], done.stderr[-2000:]


def test_decoding_multiplies_the_weights_as_the_trainer_rounds_them() -> None:
    linear = native.RoundedLinear(8, 4)
    assert torch.equal(native._factor(linear), linear.weight.bfloat16().float())
