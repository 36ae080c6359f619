# SPDX-License-Identifier: Apache-2.0
"""Modules whose collectives were changed by hand: every pass that reads them keeps the rules."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import tvm
from tvm import relax

import tvm_ipc
from tvm_ipc import comm
from tvm_ipc.errors import TransformError
from tvm_ipc.transform import ConvertToCCL, LegalizeOps

Nodes = list[dict[str, Any]]
ALLGATHER = lambda x: comm.allgather(x, team=[[0, 1]])  # noqa: E731
PERMUTE = lambda x: comm.permute(x, [[0, 1], [1, 0]], team=[[0, 1]])  # noqa: E731


def changed(make: Callable[[Any], relax.Call], change: Callable[[Nodes, Any], None]) -> Any:
    """A module with one collective, the attributes of which are changed in its JSON."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((6, 4), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(builder.emit(make(x)))
        builder.emit_func_output(out)
    saved = json.loads(tvm.ir.save_json(builder.get()))
    nodes = saved["nodes"]
    (call,) = [one["data"] for one in nodes if one["type"] == "ir.Call"]
    entries = nodes[nodes[call["attrs"]]["data"]["__dict__"]]["data"]
    attrs = {
        nodes[key]["data"]: value for key, value in zip(entries[::2], entries[1::2], strict=True)
    }
    change(nodes, attrs)
    entries[:] = [one for key, value in attrs.items() for one in (_node(nodes, key), value)]
    return tvm.ir.load_json(json.dumps(saved))


def sets(name: str, value: object) -> Callable[[Nodes, Any], None]:
    """Change an attribute."""

    def change(nodes: Nodes, attrs: Any) -> None:
        attrs[name] = _node(nodes, value)

    return change


def sets_in(name: str, value: object) -> Callable[[Nodes, Any], None]:
    """Change the first number of the first list in an attribute."""

    def change(nodes: Nodes, attrs: Any) -> None:
        first = nodes[attrs[name]]["data"][0]
        nodes[first]["data"][0] = _node(nodes, value)

    return change


def lacks(name: str) -> Callable[[Nodes, Any], None]:
    """Remove an attribute."""
    return lambda nodes, attrs: attrs.pop(name)


_TYPES = {str: "ffi.String", bool: "bool", int: "int"}


def _node(nodes: Nodes, value: object) -> int:
    nodes.append({"type": _TYPES[type(value)], "data": value})
    return len(nodes) - 1


CHANGES: dict[str, tuple[Any, Callable[[Nodes, Any], None], str]] = {
    "kind": (ALLGATHER, sets("kind", "nothing"), "collective: kind is one of 'allreduce'"),
    "another kind": (
        ALLGATHER,
        sets("kind", "reduce"),
        "reduce: reduction is None; expected one of",
    ),
    "reduction": (comm.allreduce, sets("reduction", "mean"), "reduction is one of 'sum'"),
    "workers": (ALLGATHER, sets("workers", 3), "workers is 3, but a team has 2 ranks"),
    "no workers": (ALLGATHER, sets("workers", -1), "workers is -1, but a team has 2 ranks"),
    "team": (ALLGATHER, sets("team", "all"), "team is 'world', 'group' or teams of ranks"),
    "a number": (ALLGATHER, sets("team", 3), "team is teams of equal size"),
    "a rank": (PERMUTE, sets_in("team", -5), "team is teams of equal size"),
    "ranks are texts": (PERMUTE, sets_in("team", "a"), "team is teams of equal size"),
    "pairs": (PERMUTE, sets_in("pairs", 9), "expected pairs of indices in a team of 2"),
    "uneven": (ALLGATHER, sets("uneven", True), "expected the extent of the result"),
    "axis": (ALLGATHER, sets("concat_axis", 7), "there is no axis 7 in"),
    "backend": (ALLGATHER, sets("backend", "x"), "backend is one of 'auto', 'shm'"),
    "no kind": (ALLGATHER, lacks("kind"), "collective: the call has no attribute 'kind'; add it"),
    "unknown": (ALLGATHER, sets("color", 1), "collective: the call has the attribute 'color'; the"),
    "a text": (ALLGATHER, sets("workers", "a"), "collective: workers is int, not 'a'"),
    "a bool": (ALLGATHER, sets("concat_axis", True), "collective: concat_axis is int or None"),
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize(
    "read",
    [tvm_ipc.get_pipeline("llvm", 2), LegalizeOps(), ConvertToCCL()],
    ids=["pipeline", "LegalizeOps", "ConvertToCCL"],
)
def test_what_breaks_a_rule_is_refused(what: str, read: Any) -> None:
    make, change, message = CHANGES[what]
    mod = changed(make, change)
    assert mod.script()
    with pytest.raises((TypeError, ValueError, TransformError), match=re.escape(message)):
        read(mod)


def test_a_type_that_is_not_what_the_attributes_give_is_refused() -> None:
    mod = changed(ALLGATHER, sets("concat_axis", 1))
    with pytest.raises(
        ValueError, match=r"allgather: the module specifies the type .*12.*; expected .*6, 8"
    ):
        LegalizeOps()(mod)


@pytest.mark.parametrize(
    "ty", [relax.TensorType(ndim=2, dtype="float32"), relax.TensorType((4, 4), None)]
)
def test_what_is_not_known_of_a_tensor_cannot_be_lowered(ty: relax.TensorType) -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", ty)
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(builder.emit(ALLGATHER(x)))
        builder.emit_func_output(out)
    with pytest.raises(ValueError, match="expected a tensor with known extents and element type"):
        tvm_ipc.get_pipeline("llvm", 2)(builder.get())
