"""The precision of a backbone that no setting gives, and the device that a rank takes."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from exgrpo_cli.base.console.reporter import SilentReporter
from exgrpo_cli.config.layers import build_config
from exgrpo_cli.machine.memory import preset_config
from exgrpo_cli.machine.settle import settle
from exgrpo_cli.machine.survey import Gpu, Machine
from exgrpo_cli.models.load import pin_dtype
from exgrpo_cli.training.run import train
from exgrpo_cli.training.setup import take_device

ONE_GPU = Machine(cores=16, memory_bytes=2**37, gpus=(Gpu(name="H200", memory_bytes=2**37),))


@pytest.mark.parametrize(
    ("saved", "on_gpu", "on_cpu"),
    [("bfloat16", "bfloat16", "float32"), ("float16", "bfloat16", "float32"), (None, "float32", "float32")],
)
def test_a_folder_is_trained_in_its_own_precision_on_a_gpu(
    tmp_path: Path, saved: str | None, on_gpu: str, on_cpu: str
) -> None:
    preset_config("qwen-math-1.5b").save_pretrained(tmp_path)
    entries = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(entries | {"dtype": saved}))
    config = build_config(backbone=str(tmp_path))
    for device, expected in ((True, on_gpu), (False, on_cpu)):
        assert pin_dtype(config.backbone, config.tiny, on_gpu=device).dtype == expected
    assert settle(config, ONE_GPU)[1].lines()[0].endswith(f"in {on_gpu}")
    wide = build_config(backbone=str(tmp_path), assignments=["backbone.dtype=float32"])
    assert pin_dtype(wide.backbone, wide.tiny, on_gpu=True).dtype == "float32"


class Notes(SilentReporter):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


class Stopped(Exception):
    """The run has got as far as its GPU."""


def stop(device: torch.device) -> None:
    raise Stopped


@pytest.mark.parametrize(
    ("saved", "note"),
    [
        ("bfloat16", "backbone.dtype = bfloat16, in which folder was saved"),
        ("float16", "backbone.dtype = bfloat16: folder was saved in float16, in which nothing is trained here"),
        (None, "backbone.dtype = float32: the config.json of folder names no precision"),
    ],
)
def test_a_run_says_in_which_precision_it_trains_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: str | None, note: str
) -> None:
    properties = SimpleNamespace(name="H200", total_memory=2**37)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "set_device", stop)
    preset_config("qwen-math-1.5b").save_pretrained(tmp_path / "folder")
    file = tmp_path / "folder" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": saved}))
    reporter = Notes()
    with pytest.raises(Stopped):
        train(build_config(backbone=str(tmp_path / "folder")), tmp_path / "run", reporter=reporter)
    assert reporter.notes == [note]


def test_the_built_in_backbone_is_float32_everywhere() -> None:
    config = build_config(assignments=["run.device=cuda"])
    assert pin_dtype(config.backbone, config.tiny, on_gpu=True).dtype == "float32"


def test_each_rank_makes_the_gpu_of_its_number_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it unnamed allocations and collectives of every rank would go to the first GPU."""
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    cudnn: list[bool] = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", cudnn.append)
    assert take_device("cuda", 3) == torch.device("cuda", 3)
    assert taken == [torch.device("cuda", 3)]
    assert take_device("cpu", 3) == torch.device("cpu")
    assert len(taken) == 1
    assert cudnn == [False]
