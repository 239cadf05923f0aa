"""Model folders that somebody else made: no code of theirs runs, and what cannot be read is one line that names it."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from exgrpo_cli.base.cache import cached_folder
from exgrpo_cli.base.errors import InputError
from exgrpo_cli.config.sections.run import BackboneSettings, TinySettings
from exgrpo_cli.machine.memory import backbone_shape
from exgrpo_cli.models.load import declared_ends, load_folder, read_tokenizer

CPU = torch.device("cpu")
VALUES = [json.loads(line) for line in Path(__file__).with_name("unusable.jsonl").read_text().splitlines()]


class Evil:
    """A pickle that makes the file `was-here`."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mknod, (str(self.marker),)


@pytest.fixture
def folder(small_backbone: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_backbone, tmp_path / "theirs"))


def change(folder: Path, name: str, **values: object) -> None:
    file = folder / name
    file.write_text(json.dumps((json.loads(file.read_text()) if file.is_file() else {}) | values))


def use(folder: Path) -> None:
    """All that a run and an evaluation do with a folder before the first token."""
    backbone_shape(BackboneSettings(source=str(folder)), TinySettings())
    declared_ends(folder, read_tokenizer(folder))
    load_folder(folder, CPU)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.bin", "adapter_model.bin"])
@pytest.mark.parametrize("way", ["alone", "transformers_weights", "index"])
def test_a_pickle_is_no_weights(folder: Path, tmp_path: Path, name: str, way: str) -> None:
    marker = tmp_path / "was-here"
    (folder / name).write_bytes(pickle.dumps(Evil(marker)))
    if way == "transformers_weights":
        change(folder, "config.json", transformers_weights=name)
        use(folder)
    else:
        (folder / "model.safetensors").unlink()
        if way == "index":
            change(folder, "model.safetensors.index.json", metadata={}, weight_map={"model.norm.weight": name})
        with pytest.raises(InputError, match=rf"theirs has no weights as safetensors but {name}, which is not read"):
            use(folder)
    assert not marker.exists()


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("key", ["AutoConfig", "AutoModelForCausalLM", "AutoTokenizer", "AutoProcessor"])
def test_code_of_a_model_folder_never_runs(folder, tmp_path, monkeypatch, name, key, known) -> None:
    """Neither unasked nor after a y: transformers is not let ask."""
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'was-here')!r}, 'w')\nclass Evil: pass\n")
    entry = ["evil.Evil", "evil.Evil"] if key == "AutoTokenizer" else "evil.Evil"
    change(folder, name, auto_map={key: entry}, **({} if known else {"model_type": "evil", "tokenizer_class": "Evil"}))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question was asked"))
    try:
        use(folder)
    except InputError as error:
        assert "trust_remote_code" not in str(error) and "theirs" in str(error)
    assert not (tmp_path / "was-here").exists()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer.json", "{}", "no tokenizer that transformers can load"),
        ("tokenizer.json", '{"model": 1}', "no tokenizer that transformers can load"),
        ("tokenizer.json", "\0", "no tokenizer that transformers can load"),
        ("config.json", "[]", "config.json"),
        ("config.json", "[" * 5000, "config.json"),
        ("model.safetensors", "x", "no model that transformers can load"),
        ("model.safetensors", "\xff" * 100, "no model that transformers can load"),
        ("generation_config.json", "[]", "usable generation_config.json"),
    ],
)
def test_what_cannot_be_read_is_one_line(folder: Path, name: str, content: str, said: str) -> None:
    (folder / name).write_text(content, encoding="latin-1")
    with pytest.raises(InputError) as refused:
        use(folder)
    assert said in str(refused.value) and "theirs" in str(refused.value)


@pytest.mark.parametrize(("name", "values"), VALUES)
def test_a_value_that_no_model_has_is_one_line(folder: Path, name: str, values: dict[str, object]) -> None:
    change(folder, name, **values)
    try:
        use(folder)
    except InputError as error:
        assert "theirs" in str(error)


def test_a_file_in_place_of_a_cached_folder_is_built_again(tmp_path: Path) -> None:
    told: list[str] = []

    def built() -> Path:
        return cached_folder(
            name="x", key={}, build=lambda to: (to / "a").write_text("a"), notice=told.append, cache_dir=tmp_path
        )

    place = built()
    for damage in (lambda: place.write_text("x"), lambda: place.symlink_to("nowhere"), lambda: os.mkfifo(place)):
        shutil.rmtree(place)
        damage()
        assert (built() / "a").read_text() == "a"
    assert len(told) == 3 and all("is built again: it is no folder" in line for line in told)


def test_nothing_in_the_working_folder_stands_in_for_a_module(tmp_path: Path) -> None:
    from exgrpo_cli.studies.schedule import WORKER

    for name in ("numpy.py", "torch.py", "filelock.py"):
        (tmp_path / name).write_text(f"open({str(tmp_path / 'was-here')!r}, 'w')\n")
    command = [*WORKER, "none.toml", "out", str(os.getpid())]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "cannot read the configuration none.toml" in done.stderr
    assert not (tmp_path / "was-here").exists() and sys.executable == WORKER[0]
