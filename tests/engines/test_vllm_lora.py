"""vLLM on the CPU beside an adapted policy, merged on the way or handed the adapter alone: proved as any other sync."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from torch import Tensor
from vllm_pair import MARKS, gaps, opened

from exgrpo_cli.base import reporter, types
from exgrpo_cli.base.errors import InputError, RunError
from exgrpo_cli.config.sections.run import BackboneSettings, LoraSettings
from exgrpo_cli.engines.policy.policy import Policy
from exgrpo_cli.engines.vllm.proof import MAX_GAPS
from exgrpo_cli.models.load import load_folder
from exgrpo_cli.training.run import train

pytestmark = MARKS
PROMPT = np.arange(5, 37, dtype=np.int32)


@pytest.fixture(scope="module", params=[(dtype, sync) for dtype in MAX_GAPS for sync in ("merged", "adapter")])
def pair(request: pytest.FixtureRequest, vllm_backbone: Path) -> Iterator[tuple[Policy, Any]]:
    dtype, sync = request.param
    # Rank 6 of the 8 that vLLM makes room for.
    with opened(vllm_backbone, PROMPT, dtype=dtype, rank=6, sync=sync, max_tokens=100, max_rows=8) as both:
        yield both


def move(policy: Policy) -> None:
    """Change the factors of every layer, by far more than bfloat16 rounds away."""
    generator = torch.Generator().manual_seed(3)
    for name, weight in policy.model.named_parameters():
        if ".lora_B." in name:
            weight.data += 0.05 * torch.randn(weight.shape, generator=generator).to(weight.dtype)


def test_rollouts_are_those_of_the_adapted_policy_after_each_sync(pair: tuple[Policy, Any]) -> None:
    policy, generator = pair
    asked = [types.RolloutRequest(question_id="q", prompt_ids=PROMPT[:12], seeds=tuple(range(8)))]
    params = types.SamplingParams(temperature=0.8, top_p=1.0, max_new_tokens=40)
    for version in (1, 2):
        move(policy)
        before = gaps(policy, asked, generator.generate(asked, params)).mean()
        generator.sync(policy.sampled_weights(), version, policy.score)
        after = gaps(policy, asked, generator.generate(asked, params)).mean()
        assert after < before / 3 and after < {torch.float32: 1e-4, torch.bfloat16: 0.1}[policy.model.dtype]


def test_a_fault_inside_the_adapter_stops_the_run(pair: tuple[Policy, Any]) -> None:
    """Every weight arrives as it was sent, one layer without its adapter: log-probs show it, here in float32."""
    policy, generator = pair
    move(policy)
    base = policy.model.state_dict()

    def wrong() -> Iterator[tuple[str, Tensor]]:
        for name, weight in policy.sampled_weights():
            if ".layers.0.mlp." in name:
                weight = base.get(f"{name.removesuffix('.weight')}.base_layer.weight", weight)
                weight = weight * 0 if ".lora_B." in name else weight
            yield name, weight

    if policy.model.dtype == torch.float32:
        with pytest.raises(RunError, match="log-probs of fixed tokens differ from the trainer's"):
            generator.sync(wrong(), 3, policy.score)
    generator.sync(policy.sampled_weights(), 3, policy.score)
    lacking = (each for each in policy.sampled_weights() if "layers.1.mlp.up_proj" not in each[0])
    with pytest.raises(RunError, match=r"weights were not sent to the rollout engine, 'model.layers.1.mlp.up_proj"):
        generator.sync(lacking, 4, policy.score)
    generator.sync(policy.sampled_weights(), 4, policy.score)


ADAPTER = pytest.mark.parametrize("pair", [(dtype, "adapter") for dtype in MAX_GAPS], indirect=True)


@ADAPTER
@pytest.mark.parametrize(
    "fault", ["model.layers.1.mlp.up_proj.lora_B.weight", "model.layers.0.self_attn.k_proj.lora_A.weight", "frozen", ""]
)
def test_a_bit_of_an_adapter_or_below_it_and_one_that_is_not_taken_stop_the_run(
    pair: tuple[Policy, Any], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    policy, generator = pair
    move(policy)

    def flipped(weight: Tensor) -> Tensor:
        changed = weight.clone()
        changed.view(-1)[5] = torch.nextafter(changed.view(-1)[5], torch.full_like(changed.view(-1)[5], 9.0))
        return changed

    def write(factors: dict[str, Tensor], file: Path) -> None:
        save_file({name: flipped(each) if name.endswith(fault) else each for name, each in factors.items()}, file)

    with monkeypatch.context() as patched:
        if ".lora_" in fault:
            patched.setattr("exgrpo_cli.engines.vllm.generator.save_file", write)
        elif fault:
            norm = generator.llm.apply_model(lambda model: model.model.norm.weight)[0]
            patched.setattr(norm, "data", flipped(norm.data))
        else:
            patched.setattr(generator.llm.llm_engine, "add_lora", lambda request: True)
        named = {"frozen": "model.norm.weight", "": "model.layers.0.self_attn.q_proj.lora_B.weight"}.get(fault, fault)
        with pytest.raises(RunError, match=f"weight '{named}' did not reach the rollout engine"):
            generator.sync(policy.sampled_weights(), 5, policy.score)
    generator.sync(policy.sampled_weights(), 5, policy.score)


@ADAPTER
def test_weights_below_an_adapter_rest_in_main_memory(pair: tuple[Policy, Any], monkeypatch) -> None:
    """They are not sent again: level 2 would lose them."""
    levels: list[int] = []
    monkeypatch.setattr(pair[1].llm, "sleep", lambda level: levels.append(level))
    pair[1].sleep()
    pair[1].sync(pair[0].sampled_weights(), 6, pair[0].score)
    assert levels == [1]


def test_what_vllm_cannot_adapt_is_refused(pair: tuple[Policy, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from exgrpo_cli.engines.vllm import generator as engine

    settings, names = pair[1]._settings, pair[1]._names | {"model.layers.0.mlp.gate.lora_A.weight"}
    monkeypatch.setattr(engine, "open_llm", lambda settings: pair[1].llm)
    monkeypatch.setattr(engine, "names_of", lambda settings: names)
    monkeypatch.setattr(engine.VLLMGenerator, "close", lambda self: None)
    with pytest.raises(InputError, match=r"vLLM cannot adapt model\.layers\.0\.mlp\.gate: use lora\.sync = merged"):
        engine.VLLMGenerator(settings, eos_ids=(0,), canary=pair[1]._canary)
    monkeypatch.undo()
    on_gpu = replace(
        settings, device="cuda", backbone=BackboneSettings(dtype="float32"), lora=LoraSettings(rank=4, sync="adapter")
    )
    with pytest.raises(InputError, match=r"lora.sync = adapter takes backbone.dtype = bfloat16 on a GPU, not"):
        engine.open_llm(on_gpu)


def test_peft_and_vllm_take_the_adapter_that_a_run_has_left(small_config, vllm_backbone: Path, tmp_path: Path) -> None:
    """Log-probs of fixed tokens are those of the merged model, and far from the backbone's."""
    import vllm
    from vllm.lora.request import LoRARequest

    from exgrpo_cli.engines.vllm.generator import VLLMSettings, open_llm

    run = tmp_path / "run"
    settings = ("lora.rank=4", "optim.learning_rate=0.003", "run.steps=2", "data.heldout=none")
    train(small_config(f"backbone.source={vllm_backbone}", *settings), run, reporter=reporter.SilentReporter())
    folders = {"plain": vllm_backbone, "peft": vllm_backbone, "merged": run / "model"}
    models: dict[str, Any] = {name: load_folder(folder, torch.device("cpu")).model for name, folder in folders.items()}
    models["peft"] = PeftModel.from_pretrained(models["peft"], run / "adapter")
    ids, found = torch.from_numpy(PROMPT).long(), {}
    with torch.no_grad():
        for name, model in models.items():
            logprobs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
            found[name] = logprobs.gather(1, ids[1:, None])[:, 0].numpy()
    about = {"folder": vllm_backbone, "backbone": BackboneSettings(dtype="float32"), "device": "cpu"}
    llm = open_llm(VLLMSettings(**about, max_tokens=100, max_rows=8, lora=LoraSettings(rank=4, sync="adapter")))
    asked, params = {"prompt_token_ids": PROMPT.tolist()}, vllm.SamplingParams(max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate(asked, params, lora_request=LoRARequest("mine", 1, str(run / "adapter")), use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    places = zip(output.prompt_logprobs[1:], PROMPT[1:].tolist(), strict=True)
    found["vllm"] = np.array([place[token].logprob for place, token in places])
    for name in ("peft", "vllm"):
        assert np.abs(found[name] - found["merged"]).max() < 1e-3
    assert np.abs(found["plain"] - found["merged"]).max() > 0.01
