"""Which model `--model` means, and what the command says."""

import json
import os
from pathlib import Path

import pytest

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.commands import run
from exgrpo_cli.config import layers, settings
from exgrpo_cli.evaluation.models import choose_model
from exgrpo_cli.presets import load_preset


def make_run(folder: Path, *, finished: bool = True, template: str = "auto") -> Path:
    (folder / "checkpoints").mkdir(parents=True)
    options = {"data": {"template": template}, "backbone": {"rope_theta": 40000.0}}
    (folder / "config.toml").write_text(settings.to_toml(layers.build_config(options=options)))
    for model in ("model", "checkpoints/step-000025/model", "checkpoints/step-000050/model"):
        (folder / model).mkdir(parents=True)
        (folder / model / "config.json").write_text("{}")
    (folder / "checkpoints" / "latest").write_text("step-000050\n")
    (folder / "checkpoints" / "best").write_text("step-000025\n")
    if finished:
        (folder / "summary.json").write_text("{}")
    return folder


def test_a_run_its_checkpoints_and_its_exported_model(tmp_path):
    folder = make_run(tmp_path / "one", template="step-by-step")
    for chosen, model in (
        ("", "model"),
        ("@step-000025", "checkpoints/step-000025/model"),
        ("@latest", "checkpoints/step-000050/model"),
    ):
        assert choose_model(f"{folder}{chosen}").config.backbone.source == str(folder / model)
    assert choose_model(f"{folder}@best").name == "one@step-000025"
    for text in (f"{folder}@best", f"{folder}/model", f"{folder}/checkpoints/step-000025/model"):
        choice = choose_model(text)
        assert (choice.run, choice.config.data.template) == (folder, "step-by-step")
        # The exported config has the run's rope base already.
        assert choice.config.backbone.rope_theta == 0.0


def test_what_is_not_there_is_named(tmp_path):
    folder = make_run(tmp_path / "one")
    (tmp_path / "empty").mkdir()
    bare, missing = folder / "model", r"model \(no file config.json\): is the run"
    (bare / "config.json").unlink()
    (folder / "checkpoints/step-000025/model/config.json").unlink()
    (folder / "checkpoints/step-000025/model/config.json").mkdir()
    (folder / "checkpoints" / "best").write_text("../../elsewhere")
    for text, message in (
        (f"{folder}@", "one@' names no checkpoint after the @"),
        (f"{folder}@step-1", "one@step-1: no such checkpoint"),
        (f"{folder}@best", "no such checkpoint"),
        ("owner/name@", "is neither a run folder"),
        (f"{folder}@step-000099", rf"one has no model in .*/step-000099/{missing} finished\? Checkpoints: latest"),
        (str(bare), rf"one has no model in .*/one/{missing} .* name one as .*/one@latest\."),
        (f"{folder}/checkpoints/step-000025/model", f"one has no model in .*/step-000025/{missing}"),
        (f"{folder}@newest", r"one@newest: no such checkpoint. Known: latest, best, step-000025, step-0"),
        (str(tmp_path / "empty"), "empty is neither a run folder"),
        ("tinyy", r"model 'tinyy' is neither .* Did you mean 'tiny'"),
    ):
        with pytest.raises(InputError, match=message):
            choose_model(text)


def test_hub_ids_presets_and_gguf_files(tmp_path):
    choice = choose_model("Qwen/Qwen2.5-Math-1.5B@c0ffee")
    assert (choice.config.backbone.source, choice.config.backbone.revision) == ("Qwen/Qwen2.5-Math-1.5B", "c0ffee")
    preset = choose_model("qwen-math-1.5b")
    assert preset.config.data.template == load_preset("backbones", "qwen-math-1.5b")["data"]["template"] != "auto"
    assert preset.config.backbone.max_position_embeddings == 16384
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    choice = choose_model(str(tmp_path / "model.gguf"))
    assert (choice.name, choice.config.backbone.source) == ("model.gguf", str(tmp_path / "model.gguf"))


def test_without_a_model_the_newest_finished_run_is_taken(tmp_path):
    with pytest.raises(InputError, match=r"no finished run under .*: name a model with --model, or train one"):
        choose_model(None, tmp_path)
    for age, name in enumerate(("newest", "older")):
        os.utime(make_run(tmp_path / name) / "summary.json", (1_000_000 - age, 1_000_000 - age))
    make_run(tmp_path / "unfinished", finished=False)
    assert choose_model(None, tmp_path).name == "newest"


def test_dry_run_names_benchmark_model_and_folder(workdir, capsys):
    make_run(workdir / "runs" / "one")
    assert run(["eval", "arithmetic", "aime24", "--samples", "8", "--dry-run", "--json"]) == 0
    shown = capsys.readouterr()
    assert "with one, the newest finished run" in shown.err
    plan = json.loads(shown.out)
    aime, arithmetic = (plan["benchmarks"][name] for name in ("aime24", "arithmetic"))
    assert (plan["model"]["name"], aime["folder"], aime["samples"]) == ("one", "results/aime24-one", 8)
    assert arithmetic["temperature"] == 1.0
    assert not (workdir / "results").exists()


def test_a_model_is_asked_and_answers(small_backbone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = "--samples 2 --max-tokens 20 --seed 3"
    arguments = ["sample", str(small_backbone), "Compute (3 + 4).", *asked.split()]
    assert run([*arguments, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert "Compute (3 + 4)." in shown["prompt"]
    assert [0 < response["num_tokens"] <= 20 for response in shown["responses"]] == [True, True]
    assert run([*arguments, "--quiet"]) == 0
    assert capsys.readouterr().out == "".join(response["text"] + "\n" for response in shown["responses"])


def test_a_run_of_a_study_is_called_by_study_arm_and_seed(tmp_path: Path) -> None:
    run_folder = tmp_path / "studies" / "ent" / "ent-min" / "seed-0"
    run_folder.mkdir(parents=True)
    assert layers.run_label(run_folder) == "seed-0"
    run_folder.with_name("seed-0.toml").touch()
    assert layers.run_label(run_folder) == "ent/ent-min/seed-0"
