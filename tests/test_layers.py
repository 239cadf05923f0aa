"""Packages in layers: each imports from the layers below its own, and heavy packages stay where they belong."""

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from processes import python

ROOT = Path(__file__).parents[1]
TABLE = re.findall(r"^\| (\d+) \| (.*) \|$", (ROOT / "docs" / "architecture.md").read_text(), flags=re.MULTILINE)
LAYERS = {name: int(layer) for layer, text in TABLE for name in re.findall(r"`([a-z_.]+)/?`", text)}
"""The ground plan, as the page on architecture tells it."""
ENGINES_ONLY = ("vllm", "deepspeed")
# What is read, drawn or shown without a model stays quick to import.
TORCH_FREE = ("grading", "ledger", "runs", "questions", "replay", "studies.measure", "show")


def package_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return layer_of(parts[1:] if parts[0] == "exgrpo_cli" else parts)


def layer_of(parts: Sequence[str]) -> str:
    """The key of LAYERS that a module, by its names below `exgrpo_cli`, belongs to: itself, or its package."""
    return ".".join(parts[:2]) if ".".join(parts[:2]) in LAYERS else parts[0]


MODULES = [
    path
    for folder in ("exgrpo_cli", "commands", "presets")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path != ROOT / "exgrpo_cli" / "__init__.py"
]


def imported(tree: ast.AST) -> Iterator[str]:
    """Full names of everything imported, wherever in the module, also for type checking only."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: absolute imports only"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def violations(package: str, names: list[str]) -> list[str]:
    """Names that a module of `package` imports although it may not."""
    found = []
    for name in names:
        top, *rest = name.split(".")
        if top == "exgrpo_cli" and rest and rest[0] in LAYERS:
            target = layer_of(rest)
            # The settings know the places of replay, and their own names.
            is_own = target == package or {target.split(".")[0], package.split(".")[0]} == {"config"}
            if not is_own and LAYERS[package] > 0 and LAYERS[target] >= LAYERS[package]:
                found.append(f"{name}: layer {LAYERS[target]} from layer {LAYERS[package]}")
            if not is_own and LAYERS[package] == 0 and LAYERS[target] > 0:
                found.append(f"{name}: layer {LAYERS[target]} from layer 0")
        if top in ENGINES_ONLY and package != "engines":
            found.append(f"{name}: only engines/ imports it")
        if top == "torch" and (LAYERS[package] == 0 or package in TORCH_FREE):
            found.append(f"{name}: no torch here")
        if top == "typer" and package != "commands":
            found.append(f"{name}: only commands/ knows the command line")
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_from_the_layers_below(path):
    assert package_of(path) in LAYERS, f"{path} is in no package of the ground plan"
    assert violations(package_of(path), list(imported(ast.parse(path.read_text())))) == []


@pytest.mark.parametrize(
    ("package", "name", "allowed"),
    [
        ("training", "exgrpo_cli.engines.hf.generator.HFGenerator", True),
        ("engines", "exgrpo_cli.training.loop.run_step", False), ("ledger", "exgrpo_cli.replay.store", False),
        ("base", "torch", False), ("ledger", "torch", False), ("config", "exgrpo_cli.grading.pool", False),
        ("show", "torch.nn", False), ("training", "vllm", False), ("engines", "vllm.LLM", True),
        ("training", "typer", False), ("training", "exgrpo_cli.show.report.run_page", False),
        ("show", "exgrpo_cli.show.report.run_page", False), ("show.report", "exgrpo_cli.studies.study", True),
    ],
)  # fmt: skip
def test_the_rule_itself(package, name, allowed):
    assert (violations(package, [name]) == []) is allowed


@pytest.mark.parametrize("command", ["train --dry-run", "ablate --methods grpo,exgrpo --seeds 2 --dry-run", "presets"])
def test_what_only_plans_imports_neither_torch_nor_transformers(command: str, tmp_path: Path) -> None:
    told = "print([each for each in ('torch', 'transformers') if each in sys.modules], file=sys.stderr)"
    code = f"import sys; from exgrpo_cli.commands import run; assert run(sys.argv[1:]) == 0; {told}"
    done = python("-c", code, *command.split(), cwd=tmp_path)
    assert done.stderr.splitlines()[-1] == "[]", done.stderr
