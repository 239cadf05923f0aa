"""The disk plan: its parts by arithmetic and against what a run leaves; a disk that is too small is refused."""

import shutil

import pytest

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.reporter import SilentReporter
from exgrpo_cli.config.layers import build_config
from exgrpo_cli.machine.memory import backbone_shape, disk_bytes, require_disk
from exgrpo_cli.training.run import train


def plan_of(config):
    return disk_bytes(config, backbone_shape(config.backbone, config.tiny))


def test_bytes_by_arithmetic():
    assignments = ["run.steps=100", "run.save_every=10", "run.keep_checkpoints=2", "validation.every=10"]
    config = build_config(backbone="qwen-math-1.5b", assignments=assignments)
    # bfloat16 model; float32 masters and two moments. Two kept, the best one, one being written.
    assert plan_of(config) == (4 * (4 + 8 + 2) + 2) * backbone_shape(config.backbone, config.tiny).num_parameters
    kept = build_config(backbone="tiny", assignments=["run.steps=100", "run.save_every=30", "run.keep_checkpoints=0"])
    # After steps 30, 60, 90 and 100, and one being written; the best one only where validation looks for it.
    number = 5 + (kept.validation.every > 0)
    assert plan_of(kept) == (number * (4 + 8 + 4) + 4) * backbone_shape(kept.backbone, kept.tiny).num_parameters


def test_the_plan_covers_what_a_run_leaves(small_config, tmp_path):
    config = small_config("run.steps=2", "run.save_every=1")
    train(config, tmp_path / "run", reporter=SilentReporter())
    plan = plan_of(config)
    sizes = {path: path.stat().st_size for path in (tmp_path / "run").rglob("*.safetensors")}
    sizes |= {path: path.stat().st_size for path in (tmp_path / "run").rglob("optimizer.pt")}
    assert 0.5 * plan < sum(sizes.values()) < 1.1 * plan


def test_a_disk_that_is_too_small_is_refused_before_the_folder_is_made(small_config, tmp_path, monkeypatch):
    config = small_config()
    real = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real._replace(free=1000))
    with pytest.raises(InputError, match=r"run will take .* MiB for checkpoints and the model, and .* has 0.0 MiB"):
        train(config, tmp_path / "run", reporter=SilentReporter())
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real)
    require_disk(plan_of(config), tmp_path / "not" / "there" / "yet")
