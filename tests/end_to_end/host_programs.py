# SPDX-License-Identifier: Apache-2.0
"""Programs that call packed functions themselves, in memory that they allocate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import tvm
from tvm import relax, te

from tvm_ipc.analysis.walk_and_rewrite_bindings import calls
from tvm_ipc.packed_functions import IPC_MEMORY, PROGRAMS

#: Passes of TVM that may take a call for one that nobody needs, or for another one.
OPTIMIZATIONS = pytest.mark.parametrize(
    "transform",
    [
        relax.transform.DeadCodeElimination(),
        relax.transform.EliminateCommonSubexpr(),
        relax.transform.CanonicalizeBindings(),
        relax.transform.FoldConstant(),
        relax.transform.KillAfterLastUse(),
    ],
    ids=lambda one: str(one.info.name),
)


class HostBuilder:
    """A program while it is built."""

    def __init__(self) -> None:
        self.builder = relax.BlockBuilder()

    def packed(self, name: str, *operands: Any, ty: Any = None) -> Any:
        """Call a packed function, of ours where the name has no prefix."""
        arguments = [relax.prim_value(o) if isinstance(o, (int, float)) else o for o in operands]
        function = relax.ExternFunc(name if "." in name else f"tvm_ipc.{name}")
        types = [relax.TupleType([]) if ty is None else ty]
        return self.builder.emit(relax.Call(function, arguments, ty_args=types))

    def tensor(self, *shape: int, dtype: str = "float32") -> relax.TensorType:
        return relax.TensorType(shape, dtype)

    def empty(self, *shape: int, dtype: str = "float32", scope: str = "global") -> Any:
        extents = relax.ShapeExpr(shape)
        return self.builder.emit(relax.op.builtin.alloc_tensor(extents, dtype, 0, scope))

    def add_matmul(self, rows: int, inner: int, columns: int) -> relax.GlobalVar:
        """Add a kernel."""
        a, b = te.placeholder((rows, inner), "float32"), te.placeholder((inner, columns), "float32")
        k = te.reduce_axis((0, inner))
        out = te.compute((rows, columns), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k))
        kernel = te.create_prim_func([a, b, out]).with_attr("global_symbol", "linear")
        return self.builder.add_func(kernel, "linear")

    def call(self, kernel: relax.GlobalVar, *operands: Any) -> None:
        """Call a kernel, whose last operand is what it writes."""
        self.builder.emit(relax.Call(kernel, list(operands), ty_args=[relax.TupleType([])]))


def packed_names(module: tvm.IRModule) -> list[str]:
    """The packed functions that `main` calls, in their order."""
    operators = [call.op for call in calls(module["main"])]
    return [str(one.global_symbol) for one in operators if isinstance(one, relax.ExternFunc)]


def racing(
    name: str,
    shapes: Mapping[str, tuple[int, ...]],
    numbers: Mapping[str, Any],
    *,
    waits: bool,
    written: str = "send",
) -> tvm.IRModule:
    """A call of which a tensor is written again, after all ranks met or not."""
    function = PROGRAMS[f"tvm_ipc.{name}"]
    program = HostBuilder()
    x = relax.Var("x", program.tensor(*shapes["send"]))
    with program.builder.function("main", [x], pure=False):
        given = {
            one.name: numbers[one.name]
            if one.name in numbers
            else program.empty(
                *shapes[one.name], scope=IPC_MEMORY if one.name == "send" else "global"
            )
            for one in function.parameters
        }
        program.packed("copy", x, given["send"])
        program.packed(name, *given.values())
        if waits:
            program.packed("runtime.disco.allgather", program.empty(1), 0, program.empty(2))
        program.packed("copy", x, given[written])
        program.builder.emit_func_output(list(given.values())[-1])
    return program.builder.get()
