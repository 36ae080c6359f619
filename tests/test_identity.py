# SPDX-License-Identifier: Apache-2.0
"""Dataclasses that hold IR are compared by identity.

`==` of symbolic expressions returns an expression, and raises a `TypeError` if an operand is not
a number, for example the ranks of a team. `in` and `index` call the generated `__eq__`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "tvm_ipc"
#: What annotations of IR mention. IR of several kinds, and of TVM's untyped modules, is `Any`.
IR = ("relax", "tirx", "tvm", "te", "nn", "Any")
#: Classes that are compared by value, and why their fields are no IR.
BY_VALUE = {
    "models/hf/model_folder.py: ModelFolder": "what a JSON file contains",
    "nodes/start_and_watch_agents.py: _Node": "what an agent sent as JSON",
    "runtime/oversized_calls_and_tensors.py: LargeTensor": "the dtype has a value",
    "verify/per_rank_and_uniform_values.py: PerRank": "numbers, strings, polynomials, None",
}


def dataclasses_of(source: str) -> Iterator[tuple[ast.ClassDef, set[str]]]:
    """Yield the dataclasses of a file with the options that are False."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ClassDef):
            continue
        for decorator in node.decorator_list:
            call = decorator if isinstance(decorator, ast.Call) else None
            if ast.unparse(call.func if call else decorator).rpartition(".")[2] == "dataclass":
                keywords = call.keywords if call else []
                yield node, {str(one.arg) for one in keywords if ast.unparse(one.value) == "False"}


def compared_ir(node: ast.ClassDef) -> list[str]:
    """Return the fields that may hold IR and that a generated `__eq__` compares."""
    return [
        ast.unparse(one.target)
        for one in node.body
        if isinstance(one, ast.AnnAssign)
        and {name.id for name in ast.walk(one.annotation) if isinstance(name, ast.Name)} & {*IR}
        and "compare=False" not in ast.unparse(one)
    ]


def by_value(source: str) -> dict[str, list[str]]:
    """Return the dataclasses that compare IR by value, with the fields that hold it."""
    found = {
        node.name: compared_ir(node) for node, off in dataclasses_of(source) if "eq" not in off
    }
    return {name: fields for name, fields in found.items() if fields}


def test_dataclasses_that_hold_ir_are_compared_by_identity() -> None:
    found = {
        f"{path.relative_to(PACKAGE).as_posix()}: {name}": fields
        for path in sorted(PACKAGE.rglob("*.py"))
        for name, fields in by_value(path.read_text()).items()
    }
    wrong = {name: fields for name, fields in found.items() if name not in BY_VALUE}
    assert not wrong, f"{wrong} are compared by value: give the dataclasses eq=False"
    assert not BY_VALUE.keys() - found.keys(), "these are no such dataclasses any more"


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("@dataclass\nclass A:\n    x: relax.Expr\n    y: int", ["x"]),
        ("@dataclass(frozen=True)\nclass A:\n    x: dict[str, Any]", ["x"]),
        ("@dataclass(frozen=True, eq=False)\nclass A:\n    x: tirx.Var", []),
        ("@dataclasses.dataclass\nclass A:\n    x: Any = field(compare=False)", []),
        ("@dataclass\nclass A:\n    x: int", []),
        ("class A:\n    x: tvm.IRModule", []),
    ],
)
def test_the_search_finds_ir(text: str, fields: list[str]) -> None:
    assert by_value(text) == ({"A": fields} if fields else {})
