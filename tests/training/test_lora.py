"""Runs that train an adapter: killed and resumed, what they leave, who takes it, and what is refused in one line."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from run_leaves import killed, metrics, timeless, train_and_die
from safetensors.torch import load_file, save_file

from exgrpo_cli.base.errors import RunError
from exgrpo_cli.base.reporter import SilentReporter
from exgrpo_cli.commands import run as exgrpo
from exgrpo_cli.config.settings import Config
from exgrpo_cli.engines import lora
from exgrpo_cli.evaluation.models import choose_model
from exgrpo_cli.models.load import load_folder, locate
from exgrpo_cli.training import run as training
from exgrpo_cli.training.run import train

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
SETTINGS = ("run.steps=4", "run.save_every=2", "lora.rank=4", "replay.start_threshold=0", "validation.every=2")


@pytest.fixture(scope="module")
def finished(small_config, tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Path]:
    config, run = small_config(*SETTINGS), tmp_path_factory.mktemp("lora") / "run"
    train(config, run, reporter=SilentReporter())
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
    train(config, cut, resume=True, reporter=SilentReporter())
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
    base = load_folder(locate(config.backbone, config.tiny), torch.device("cpu")).model
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    by_peft = PeftModel.from_pretrained(base, run / "adapter").merge_and_unload().state_dict()
    model = tensors(run / "model")
    assert_same(model, {name: by_peft[name] for name in model})
    assert any(not torch.equal(tensor, before[name]) for name, tensor in model.items())
    for named in (f"{run}@step-000004", f"{run}@best", f"{checkpoint / 'adapter'}", f"{run / 'adapter'}"):
        choice = choose_model(named)
        assert choice.run == run
        assert_same(
            model if "best" not in named else tensors(locate(choice.config.backbone, choice.config.tiny)),
            tensors(locate(choice.config.backbone, choice.config.tiny)),
        )
    assert json.loads((run / "adapter/adapter_config.json").read_text())["r"] == 4


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


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "base.json").unlink(), "is an adapter without base.json: name one that exgrpo has"),
        (
            lambda folder: (folder / "adapter_model.safetensors").unlink(),
            "is an adapter without adapter_model.safetens",
        ),
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


def alter(folder: Path, **values: object) -> None:
    base = json.loads((folder / "base.json").read_text())
    (folder / "base.json").write_text(json.dumps(base | values))


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
            yield (
                name,
                tensors.get(f"{name.removesuffix('.weight')}.base_layer.weight", weight)
                if ".1.mlp" in name
                else weight,
            )

    monkeypatch.setattr("exgrpo_cli.engines.policy.adamw.merged_weights", stale)
    with pytest.raises(RunError, match="log-probs differ from the trainer's"):
        train(small_config(*SETTINGS, "optim.learning_rate=0.01"), tmp_path / "run", reporter=SilentReporter())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["lora.rank=0"], "lora.rank = 0 is out of range: use 1 to 1024, or leave it out to train all weights."),
        (["lora.rank=-2"], "lora.rank = -2 is out of range"),
        (["lora.alpha=16"], "lora.alpha = 16 contradicts lora.rank = -1: all weights are trained; set lora.rank"),
        (["lora.targets=q_proj"], "lora.targets = 'q_proj' contradicts lora.rank = -1"),
        (["lora.learning_rate_factor=3"], "lora.learning_rate_factor = 3.0 contradicts lora.rank = -1"),
        (["lora.rank=8", "lora.dropout=0.1"], "lora.dropout = 0.1 is out of range: use 0.0: dropout makes"),
        (["lora.rank=8", "lora.alpha=0"], "lora.alpha = 0 is out of range"),
        (["lora.rang=8"], "unknown key lora.rang. Did you mean 'lora.rank'?"),
        (
            ["lora.rank=8", "optim.engine=deepspeed", "optim.zero_stage=3"],
            "lora.rank = 8 contradicts optim.zero_stage = 3",
        ),
        (["lora.sync=adapter"], "lora.sync = 'adapter' contradicts lora.rank = -1"),
        (["lora.rank=8", "lora.sync=adapter"], "lora.sync = 'adapter' contradicts rollout.engine = 'hf': hf samples"),
        (
            ["lora.rank=600", "lora.sync=adapter", "rollout.engine=vllm"],
            "lora.rank = 600 contradicts lora.sync = 'adapter': vLLM takes adapters up to rank 512;",
        ),
        (["lora.rank=8", "lora.targets=qproj"], "lora.targets names 'qproj'"),
    ],
)
def test_what_contradicts_itself_is_refused_in_one_line(settings: list[str], said: str, tmp_path: Path, capsys) -> None:
    options = [item for text in settings for item in ("--set", text)]
    assert exgrpo(["train", "--quiet", *options, "--output", str(tmp_path / "run")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line and not (tmp_path / "run").exists()


def test_the_plan_says_what_is_trained_and_how_fast(capsys) -> None:
    """7 parts of 3 layers: q and o 256, k and v 192, gate, up and down 384 rows and columns together."""
    assert exgrpo(["train", "--dry-run", "--set", "lora.rank=8"]) == 0
    trained = 8 * 3 * (2 * 256 + 2 * 192 + 3 * 384)
    out = capsys.readouterr().out
    assert re.search(rf"adapter +rank 8, all-linear, {trained:,} parameters; learning rate 0.003 = 10 x optim", out)
