"""Runs that train an adapter: killed and resumed, what they leave, who takes it, and what is refused in one line."""

import json
import re
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from peft import PeftModel
from random_model import questions_file
from run_leaves import killed, metrics, timeless, train_and_die
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from exgrpo_cli.base import errors, reporter
from exgrpo_cli.commands import run as exgrpo
from exgrpo_cli.config.sections.run import BackboneSettings, LoraSettings, TinySettings
from exgrpo_cli.config.settings import Config
from exgrpo_cli.engines import lora
from exgrpo_cli.evaluation.models import choose_model
from exgrpo_cli.models import adapters, export, load, tiny
from exgrpo_cli.presets import load_preset
from exgrpo_cli.training import run as training
from exgrpo_cli.training.run import train

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
SETTINGS = ("run.steps=4", "run.save_every=2", "lora.rank=4", "replay.start_threshold=0", "validation.every=2")


@pytest.fixture(scope="module")
def finished(small_config, tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Path]:
    config, run = small_config(*SETTINGS), tmp_path_factory.mktemp("lora") / "run"
    train(config, run, reporter=reporter.SilentReporter())
    return config, run


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys() and ours
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_a_run_that_was_killed_goes_on_bit_for_bit(finished: tuple[Config, Path], tmp_path: Path) -> None:
    (config, whole), cut = finished, tmp_path / "cut"
    train_and_die(killed(training, "run_step", when=lambda parts, state, step, clock: step == 4), cut, config)
    train(config, cut, resume=True, reporter=reporter.SilentReporter())
    assert timeless(metrics(cut)) == timeless(metrics(whole))
    assert sum(line["replay/used"] for line in metrics(whole)) > 0
    for name in ("model", "adapter", "checkpoints/step-000004/policy"):
        assert_same(tensors(cut / name), tensors(whole / name))


def test_a_run_leaves_an_adapter_and_the_merged_model(finished: tuple[Config, Path]) -> None:
    """Checkpoints hold the adapter alone; what peft merges is the model, and so is what a checkpoint comes to."""
    config, run = finished
    checkpoint = run / "checkpoints/step-000004"
    assert not (checkpoint / "model").exists()
    assert all(".lora_" in name for name in tensors(checkpoint / "policy"))
    base = load.load_folder(load.locate(config.backbone, config.tiny), torch.device("cpu")).model
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    by_peft = PeftModel.from_pretrained(base, run / "adapter").merge_and_unload().state_dict()
    model = tensors(run / "model")
    assert_same(model, {name: by_peft[name] for name in model})
    assert any(not torch.equal(tensor, before[name]) for name, tensor in model.items())
    for named in (f"{run}@step-000004", f"{run}@best", f"{checkpoint / 'adapter'}", f"{run / 'adapter'}"):
        choice = choose_model(named)
        assert choice.run == run
        assert_same(
            model if "best" not in named else tensors(load.locate(choice.config.backbone, choice.config.tiny)),
            tensors(load.locate(choice.config.backbone, choice.config.tiny)),
        )
    assert json.loads((run / "adapter/adapter_config.json").read_text())["r"] == 4


@pytest.mark.engines
def test_an_adapter_is_asked_published_and_trained_on(finished: tuple[Config, Path], tmp_path: Path, capsys) -> None:
    config, run = finished
    assert exgrpo(["sample", f"{run}@step-000002", "1+2=?", "--max-tokens", "4"]) == 0
    assert exgrpo(["publish", str(run), "--to", "me/adapted", "--dry-run"]) == 0
    assert "model-00001.safetensors" in capsys.readouterr().out
    settings = [item for text in (*SETTINGS[2:4], "run.steps=1", "data.heldout=none") for item in ("--set", text)]
    for number, more in enumerate(([], ["--replay-from", str(run)])):
        again = ["train", "--quiet", "--backbone", str(run / "adapter"), "--data", str(config.data.train)]
        again = [*again, *settings, *more, "--output", str(tmp_path / str(number))]
        assert exgrpo(again) == 0, capsys.readouterr().err


def test_an_adapter_is_asked_and_evaluated_as_the_merged_model(finished: tuple[Config, Path], tmp_path, capsys) -> None:
    data, answers, tables = questions_file(tmp_path, 4), [], []
    limits = ("--samples", "3", "--max-tokens", "9")
    for name in ("model", "adapter"):
        model, results = str(finished[1] / name), tmp_path / name
        about = ["--model", model, "--data", str(data), "--output", str(results), "--grader", "exact"]
        assert exgrpo(["evaluate", *about, *limits]) == 0
        tables.append(pq.read_table(results / "samples.parquet"))
        capsys.readouterr()
        assert exgrpo(["sample", model, "1+2=?", *limits, "--json"]) == 0
        answers.append(json.loads(capsys.readouterr().out)["responses"])
    assert answers[0] == answers[1] and tables[0].equals(tables[1]) and len(tables[0]) == 12


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "base.json").unlink(), "is an adapter without base.json: name one that exgrpo has"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "is an adapter without adapter_model."),
        (lambda folder: (folder / "base.json").write_text("{}"), "base.json is damaged (Object missing required field"),
        (lambda folder: alter(folder, fingerprint=1), "is an adapter of other weights than"),
        (lambda folder: resized(folder), "has no adapter that fits its backbone"),
    ],
)
def test_an_adapter_that_does_not_belong_to_its_backbone_is_refused(finished, damage, said, tmp_path, capsys) -> None:
    folder = shutil.copytree(finished[1] / "adapter", tmp_path / "mine")
    damage(folder)
    assert exgrpo(["sample", str(folder), "1+2=?"]) == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert said in line and str(folder) in line


def test_an_adapter_of_another_real_model_is_refused_wherever_it_is_named(tmp_path: Path, capsys) -> None:
    """Made for two layers of SmolLM2-135M's shape; where those lay are two of Qwen2.5-0.5B's."""
    tokenizer, mine = tiny.make_tokenizer(max_tokens=512), tmp_path / "backbone"
    for preset in ("smollm2-135m", "qwen2.5-0.5b-instruct"):
        shape = load_preset("backbones", preset)["about"]["shape"]
        small = {"num_hidden_layers": 2, "vocab_size": len(tokenizer)}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape | small))
        export.export_model(model, tokenizer, mine, eos_ids=(tokenizer.eos_token_id,))
        if preset == "smollm2-135m":
            base = adapters.Base(
                backbone=BackboneSettings(source=str(mine)), tiny=TinySettings(), fingerprint=lora.fingerprint(model)
            )
            lora.adapt(model, LoraSettings(rank=2), 0)
            adapters.export_adapter(model, tokenizer, tmp_path / "adapter", base)
    adapter, run = str(tmp_path / "adapter"), str(tmp_path / "run")
    for command in (
        ["sample", adapter, "1+2=?"],
        ["evaluate", "arithmetic", "--model", adapter, "--output", run],
        ["train", "--quiet", "--backbone", adapter, "--output", run],
    ):
        assert exgrpo(command) == 2
        (line,) = capsys.readouterr().err.splitlines()[-1:]
        assert f"{adapter} is an adapter of other weights than '{mine}' has: restore the backbone" in line
        assert not (tmp_path / "run").exists()


def alter(folder: Path, **values: object) -> None:
    (folder / "base.json").write_text(json.dumps(json.loads((folder / "base.json").read_text()) | values))


def resized(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    save_file({name: tensor[:, :3].contiguous() for name, tensor in load_file(file).items()}, file)


def test_a_damaged_adapter_of_a_run_is_named(finished: tuple[Config, Path], tmp_path: Path, capsys) -> None:
    run = shutil.copytree(finished[1], tmp_path / "run")
    for folder in (run / "adapter", run / "checkpoints/step-000002/adapter"):
        (folder / "adapter_config.json").write_text("{}")
        assert exgrpo(["sample", str(folder), "1+2=?"]) == 2
        assert "adapter_config.json" in capsys.readouterr().err


def test_a_sampler_that_lacks_part_of_the_adapter_stops_the_run(small_config, tmp_path: Path, monkeypatch) -> None:
    """One layer keeps the weights that it began with: the log-probs of one rollout in 16 show it."""
    merged = lora.merged_weights

    def stale(model):
        tensors = model.state_dict()
        for name, weight in merged(model):
            before = tensors.get(f"{name.removesuffix('.weight')}.base_layer.weight", weight)
            yield name, before if ".1.mlp" in name else weight

    monkeypatch.setattr("exgrpo_cli.engines.lora.merged_weights", stale)
    with pytest.raises(errors.RunError, match="log-probs differ from the trainer's"):
        train(small_config(*SETTINGS, "optim.learning_rate=0.01"), tmp_path / "run", reporter=reporter.SilentReporter())


def test_the_plan_says_what_is_trained_and_how_fast(capsys) -> None:
    """7 parts of 3 layers: q and o 256, k and v 192, gate, up and down 384 rows and columns together."""
    assert exgrpo(["train", "--dry-run", "--set", "lora.rank=8"]) == 0
    trained = 8 * 3 * (2 * 256 + 2 * 192 + 3 * 384)
    out = capsys.readouterr().out
    assert re.search(rf"adapter +rank 8, all-linear, {trained:,} parameters; learning rate 0.003 = 10 x optim", out)
