# SPDX-License-Identifier: Apache-2.0
"""Only `analysis` and the verifier walk through the bindings of Relax functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "tvm_ipc"
WALKERS = {"PyExprVisitor", "PyExprMutator", "post_order_visit"}
#: Modules that walk on their own, with the reason.
EXCEPTIONS = {
    # TVM's mutator infers the types of all that follows a call whose type becomes more precise.
    "transform/inline_compiler_functions.py": "types of what follows",
    "transform/lower_extern_calls.py": "types of what follows",
    "transform/outline_compiler_functions.py": "function literals, which may be anywhere",
    "transform/byoc/nested_relax_functions.py": "constants, which may be anywhere",
    "spmd/placements/convert_dist_annotations.py": "types of what follows",
    "tools/inspection/peak_live_bytes.py": "a bound for the planner, which shares no code with it",
}


def names(target: ast.expr) -> Iterator[str]:
    """Yield the variables that a loop assigns."""
    yield from (node.id for node in ast.walk(target) if isinstance(node, ast.Name))


def walks(source: str) -> bool:
    """Return whether code visits expressions, or reads the bindings of each of some blocks."""
    nodes = list(ast.walk(ast.parse(source)))
    loops = [node for node in nodes if isinstance(node, ast.For | ast.comprehension)]
    items = {name for loop in loops for name in names(loop.target)}
    visited = [node for loop in loops for node in ast.walk(loop.iter)]
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == "bindings"
        and isinstance(node.value, ast.Name)
        and node.value.id in items
        for node in visited
    ) or any(
        (isinstance(node, ast.Name) and node.id in WALKERS)
        or (isinstance(node, ast.Attribute) and node.attr in WALKERS)
        for node in nodes
    )


def test_no_other_module_walks() -> None:
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] not in ("analysis", "verify")
        and walks(path.read_text())
    }
    assert found == EXCEPTIONS.keys()


def test_walks_are_found() -> None:
    assert walks("for block in f.blocks:\n  for binding in as_list(block.bindings): pass")
    assert walks("x = [b.var for block in blocks for b in block.bindings]")
    assert walks("class A(PyExprMutator): pass")
    assert walks("relax.analysis.post_order_visit(f, visit)")
    assert not walks("chain.bindings")
    assert not walks("for binding in bindings_of(f.body): pass")
