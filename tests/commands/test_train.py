"""`exgrpo train` from the command line: the plan, what is refused before work starts, and one real run."""

import json
import os
import re
import time
import tomllib

import pytest
from transformers import AutoTokenizer

from exgrpo_cli.commands import run
from exgrpo_cli.config import layers, settings

pytestmark = pytest.mark.usefixtures("workdir")


def test_a_dry_run_prints_a_file_for_config(tmp_path, capsys):
    assert run(["train", "--method", "rho-0.25", "--set", "replay.mu=0.4", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "# memory     per process on the CPU" in text
    file = tmp_path / "mine.toml"
    file.write_text(text)
    config = layers.build_config(config_file=file)
    assert (config.replay.ratio, config.replay.mu, config.run.method) == (0.25, 0.4, "rho-0.25")
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(("cards", "gpus", "missing"), [("24", 1, True), ("80", 1, False), ("8x80", 8, False)])
def test_a_plan_for_cards_that_are_not_here(cards, gpus, missing, capsys):
    assert run(["train", "--backbone", "qwen-math-1.5b", "--dry-run", "--json", "--gpu", cards]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert (plan["memory"]["gpus"], plan["memory"]["device"]) == (gpus, "gpu")
    assert any("of memory on each GPU, there are 22" in line for line in plan["missing"]) == missing


def test_a_dry_run_as_json(capsys):
    assert run(["train", "--backbone", "qwen-math-1.5b", "--dry-run", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["plan"]["parameters"] == 1_543_714_304 and shown["plan"]["memory"]["device"] == "gpu"
    assert shown["plan"]["memory"]["weights"] == 2 * 1_543_714_304
    assert shown["plan"]["per_step_at_most"]["generated"] == 128 * 8 * 8192
    assert shown["plan"]["missing"][0].startswith("no GPU is visible")
    assert shown["config"]["run"]["method"] == "exgrpo"


def test_options_become_settings(tmp_path, capsys):
    """A question file is kept by its absolute path."""
    (tmp_path / "mine.csv").write_text("question,answer\n1 + 1,2\n2 + 2,4\n")
    options = "--steps 7 --seed 5 --device cpu --nproc 2 --log tensorboard --rollout vllm --engine deepspeed"
    assert run(["train", *options.split(), "--data", "mine.csv", "--dry-run"]) == 0
    settings = tomllib.loads(capsys.readouterr().out)
    chosen = {"steps": 7, "seed": 5, "nproc": 2, "log": ["tensorboard"]}
    assert {name: settings["run"][name] for name in chosen} == chosen
    assert (settings["rollout"]["engine"], settings["optim"]["engine"]) == ("vllm", "deepspeed")
    assert settings["data"]["train"] == str(tmp_path / "mine.csv")


def test_a_published_backbone_without_a_gpu_is_refused_with_its_plan(tmp_path, capsys):
    assert run(["train", "--backbone", "qwen-math-7b"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "update peak" in err and "no GPU is visible" in err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_resume_alone_takes_the_newest_unfinished_run(tmp_path, capsys):
    for name, age in (("older", 100), ("newer", 0)):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.toml").write_text(settings.to_toml(layers.build_config()))
        os.utime(folder / "config.toml", (time.time() - age, time.time() - age))
    assert run(["train", "--resume", "--dry-run"]) == 2
    assert "runs/newer/data/manifest.json is missing" in capsys.readouterr().err
    assert run(["train", "--resume", "--config", "x.toml"]) == 2
    assert "--resume goes on with runs/newer's own configuration: leave --config x.toml out" in capsys.readouterr().err


def test_a_run_its_summary_its_table_and_its_sequel(small_config, tmp_path, capsys):
    (tmp_path / "small.toml").write_text(settings.to_toml(small_config("run.steps=2", "grading.grader=math")))
    assert run(["train", "--config", "small.toml", "--output", "runs/one", "--json"]) == 0
    out, err = capsys.readouterr()
    summary = json.loads(out)
    assert summary == json.loads((tmp_path / "runs" / "one" / "summary.json").read_text())
    assert (summary["steps"], summary["updates"]["applied"] + summary["updates"]["skipped"]) == (2, 4)
    assert summary["heldout"]["after"]["second_graders"]["oat"]["disagreements"] == 0
    assert run(["report", "runs/one"]) == 0
    capsys.readouterr()
    assert "Not shown" not in (tmp_path / "runs" / "one" / "report.html").read_text()
    assert "step 2/2" in err and "\x1b" not in err
    # An answer to the same question before and after training, with its verdict.
    shown = re.findall(r"^  question: (.*)\n  answer: .* \((.*)\)$", err, re.MULTILINE)
    assert len(shown) >= 2 and len({question for question, _ in shown}) == 1

    assert run(["train", "--config", "small.toml", "--output", "runs/one"]) == 2
    assert "runs/one exists" in capsys.readouterr().err

    assert run(["train", "--resume", "--output", "runs/one", "--steps", "3", "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "held-out pass@1 " in out and "each, temperature 1" in out
    assert re.search(
        r"It all lies in runs/one \(\d+\.\d MiB\): report.html, model, plots, checkpoints; open its", out, re.MULTILINE
    )
    assert len((tmp_path / "runs" / "one" / "metrics.jsonl").read_text().splitlines()) == 3

    assert run(["train", "--config", "runs/one/config.toml", "--steps", "1", "--quiet"]) == 0
    capsys.readouterr()
    (default,) = (folder for folder in (tmp_path / "runs").iterdir() if folder.name != "one")
    assert default.name.startswith("exgrpo-tiny-")


def test_a_model_without_a_chat_template_is_told_before_its_weights_are_loaded(tmp_path, small_backbone, capsys):
    folder, arguments = tmp_path / "base", ["train", "--quiet", "--output", str(tmp_path / "run"), "--backbone"]
    folder.mkdir()
    (folder / "config.json").write_bytes((small_backbone / "config.json").read_bytes())
    (folder / "model.safetensors").write_bytes(b"whoever reads these fails otherwise")
    tokenizer = AutoTokenizer.from_pretrained(small_backbone)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    for words in ([], ["--dry-run"]):
        assert run([*arguments, str(folder), *words]) == 2
        out, err = capsys.readouterr()
        assert not out and err.count("needs a chat template and this backbone's tokenizer has none: use 'step-by") == 1
    # The run's own folder of this name is not the built-in backbone.
    folder.rename(tmp_path / "tiny")
    assert run(["train", "--dry-run", "--quiet"]) == 0
    (tmp_path / "tiny").rename(folder)
    plain = ["--set", "data.template=step-by-step", "--dry-run"]
    assert run([*arguments, str(folder), *plain]) == 0
    assert run([*arguments, str(folder), *plain, "--set", "data.max_prompt_tokens=9"]) == 2
    assert "prompts are over the limit of 9 tokens" in capsys.readouterr().err


def test_a_folder_without_a_tokenizer_that_loads_is_named(tmp_path, small_backbone, capsys):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_bytes((small_backbone / "config.json").read_bytes())
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    assert run(["train", "--backbone", str(tmp_path / "base"), "--dry-run"]) == 2
    assert f"{tmp_path / 'base'} has no tokenizer that transformers can load: " in capsys.readouterr().err
