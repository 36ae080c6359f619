# SPDX-License-Identifier: Apache-2.0
"""Scripts in `benchmarks/` use names of each other that exist; few of them run in tests."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks"
TREES = {path.stem: ast.parse(path.read_text()) for path in sorted(FOLDER.glob("*.py"))}


def names_of(tree: ast.Module) -> set[str]:
    """Return what the top level of a module defines, also in `if` and `try`."""
    names = {"__file__", "__doc__"}
    blocks: list[list[ast.stmt]] = [tree.body]
    while blocks:
        for node in blocks.pop():
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
                continue
            if isinstance(node, ast.Import | ast.ImportFrom):
                names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
            names |= {
                part.id
                for part in ast.walk(node)
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
            }
            blocks += [getattr(node, part, []) for part in ("body", "orelse")]
            blocks += [handler.body for handler in getattr(node, "handlers", [])]
    return names


@pytest.mark.parametrize("module", TREES)
def test_names_of_other_benchmarks_exist(module: str) -> None:
    modules = {
        alias.asname or alias.name: alias.name
        for node in ast.walk(TREES[module])
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name in TREES
    }
    used = [
        (modules[node.value.id], node.attr)
        for node in ast.walk(TREES[module])
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in modules
    ]
    used += [
        (node.module, alias.name)
        for node in ast.walk(TREES[module])
        if isinstance(node, ast.ImportFrom) and node.module in TREES
        for alias in node.names
    ]
    missing = [f"{other}.{name}" for other, name in used if name not in names_of(TREES[other])]
    assert not missing
