"""Every public module, class and function says what it is."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = [path for folder in ("exgrpo_cli", "commands", "presets") for path in sorted((ROOT / folder).rglob("*.py"))]


def undocumented(node: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[str]:
    """Names of the public classes, functions and methods below `node` without a docstring."""
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not child.name.startswith("_"):
            if not ast.get_docstring(child):
                yield prefix + child.name
            if isinstance(child, ast.ClassDef):
                yield from undocumented(child, f"{prefix}{child.name}.")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_everything_public_has_a_docstring(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), f"{path.relative_to(ROOT)} does not say what it is"
    assert list(undocumented(tree)) == []
    strings = [
        each.value.value
        for each in ast.walk(tree)
        if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)
    ]
    asks = re.compile(r"(What|Of|Where|Which|How|Whose)\b")
    assert [text for text in strings if isinstance(text, str) and asks.match(text)] == [], "begin with a noun or a verb"
