"""The ground plan: a room imports from the floors below its own, and heavy packages stay where they belong."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = {
    "errors": 0,
    "types": 0,
    "seeds": 0,
    "statistics": 0,
    "files": 0,
    "manifest": 0,
    "shapes": 0,
    "config": 0,
    "presets": 0,
    "console": 0,
    "algo": 1,
    "grading": 1,
    "ledger": 1,
    "ranks": 1,
    "runs": 1,
    "data": 2,
    "replay": 2,
    "engines": 2,
    "replay_stats": 3,
    "backbones": 3,
    "evaluation": 4,
    "endpoints": 4,
    "plots": 4,
    "machine": 4,
    "training": 5,
    "ablation": 6,
    "reports": 7,
    "publishing": 8,
    "face": 9,
    "commands": 9,
    "start": 10,
    "__main__": 11,
}
ENGINES_ONLY = ("vllm", "deepspeed")
# What is read, drawn or shown without a model stays quick to import.
TORCH_FREE = ("grading", "ledger", "runs", "data", "replay", "replay_stats", "endpoints", "plots")


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return (parts[1] if parts[0] == "exgrpo_cli" else parts[0]).removesuffix(".py")


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


def violations(room: str, names: list[str]) -> list[str]:
    """What a module of `room` imports although it may not."""
    found = []
    for name in names:
        top, *rest = name.split(".")
        if top == "exgrpo_cli" and rest and rest[0] in FLOORS:
            target = rest[0]
            if target != room and FLOORS[room] > 0 and FLOORS[target] >= FLOORS[room]:
                found.append(f"{name}: floor {FLOORS[target]} from floor {FLOORS[room]}")
            if FLOORS[room] == 0 and FLOORS[target] > 0:
                found.append(f"{name}: floor {FLOORS[target]} from floor 0")
        if top in ENGINES_ONLY and room != "engines":
            found.append(f"{name}: only engines/ imports it")
        if top == "torch" and (FLOORS[room] == 0 or room in TORCH_FREE):
            found.append(f"{name}: no torch here")
        if top == "typer" and room != "commands":
            found.append(f"{name}: only commands/ knows the command line")
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_from_the_floors_below(path):
    assert room_of(path) in FLOORS, f"{path} is in no room of the ground plan"
    assert violations(room_of(path), list(imported(ast.parse(path.read_text())))) == []


@pytest.mark.parametrize(
    ("room", "name", "allowed"),
    [
        ("training", "exgrpo_cli.engines.hf.generator.HFGenerator", True),
        ("engines", "exgrpo_cli.training.loop.run_step", False),
        ("evaluation", "exgrpo_cli.plots.style", False),
        ("data", "exgrpo_cli.data.stream.QuestionStream", True),
        ("replay", "exgrpo_cli.data.stream", False),
        ("replay", "exgrpo_cli.ledger.writer", True),
        ("ledger", "exgrpo_cli.replay.buffer", False),
        ("replay_stats", "exgrpo_cli.runs.metrics", True),
        ("files", "exgrpo_cli.errors", True),
        ("console", "torch", False),
        ("ledger", "torch", False),
        ("config", "exgrpo_cli.grading.pool", False),
        ("replay", "torch", False),
        ("ledger", "torch", False),
        ("console", "torch", False),
        ("plots", "torch.nn", False),
        ("algo", "torch", True),
        ("training", "vllm", False),
        ("engines", "vllm.LLM", True),
        ("training", "typer", False),
    ],
)
def test_the_rule_itself(room, name, allowed):
    assert (violations(room, [name]) == []) is allowed
