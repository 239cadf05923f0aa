"""The precision of a backbone that no setting gives, and the device that a rank takes."""

import json
from pathlib import Path

import pytest
import torch

from exgrpo_cli.base.errors import ToolkitWarning
from exgrpo_cli.config.layers import build_config
from exgrpo_cli.machine import memory, settle, survey
from exgrpo_cli.models.load import pin_dtype
from exgrpo_cli.training.setup import take_device

ONE_GPU = survey.Machine(cores=16, memory_bytes=2**37, gpus=(survey.Gpu(name="H200", memory_bytes=2**37),))


@pytest.mark.parametrize(
    ("saved", "on_gpu", "note"),
    [
        ("bfloat16", "bfloat16", "backbone.dtype = bfloat16: folder was saved in bfloat16"),
        ("float16", "bfloat16", "backbone.dtype = bfloat16: folder was saved in float16"),
        (
            None,
            "float32",
            "backbone.dtype = float32: folder was saved in a precision that its config.json does not name",
        ),
    ],
)
def test_a_folder_is_trained_in_its_own_precision_on_a_gpu_and_says_so(
    tmp_path: Path, saved: str | None, on_gpu: str, note: str
) -> None:
    folder = tmp_path / "folder"
    preset = build_config(backbone="qwen-math-1.5b")
    memory.architecture(preset.backbone, preset.tiny).save_pretrained(folder)
    entries = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(entries | {"dtype": saved}))
    config = build_config(backbone=str(folder))
    for device, expected in ((True, on_gpu), (False, "float32")):
        assert pin_dtype(config.backbone, config.tiny, on_gpu=device).dtype == expected
    plan = settle.settle(config, ONE_GPU)[1]
    assert plan.lines()[0].endswith(f"in {on_gpu}") and note in plan.notes
    wide = build_config(backbone=str(folder), assignments=["backbone.dtype=float32"])
    assert pin_dtype(wide.backbone, wide.tiny, on_gpu=True).dtype == "float32"


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
    kept: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", kept.append)
    assert take_device("cuda", 3) == torch.device("cuda", 3)
    assert taken == [torch.device("cuda", 3)]
    assert take_device("cpu", 3) == torch.device("cpu")
    assert len(taken) == 1
    assert cudnn == [False] and kept == ["expandable_segments:True"]
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:512")
    take_device("cuda", 3)
    assert len(kept) == 1
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.delattr(torch._C, "_accelerator_setAllocatorSettings")
    with pytest.warns(ToolkitWarning, match="segments that grow: GPU memory may fragment"):
        assert take_device("cuda", 3) == taken[0]
