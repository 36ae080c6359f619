# SPDX-License-Identifier: Apache-2.0
"""OverlapCommunication with symbolic rows: TVM simplifies what chunks have, and must end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tvm
import tvm_ffi
from tvm import tirx

from tvm_ipc.comm.extent_arithmetic import simplified

#: A stack overflow of TVM ends the process, so programs are compiled in another one.
COMPILE = """
import itertools
import tvm
from tvm import relax, tirx
import tvm_ipc
from tvm_ipc import comm

n = tirx.Var("n", "int64")
rows_of = (n, n * 2, n * 3, n * 4, n + 1, tirx.floordiv(n * 2 + 1, 2), tirx.min(n, n * 2))
for rows, overlap, columns in itertools.product(rows_of, (1, 2, 3), (16, 5)):
    print(kind, rows, overlap, columns, flush=True)
    x = relax.Var("x", relax.TensorType((rows, columns), "float32"))
    w = relax.Var("w", relax.TensorType((columns, columns), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w, relax.Var("told", relax.ShapeType([n]))]):
        with builder.dataflow():
            left = builder.emit(comm.allgather(x, workers=2)) if kind == "allgather" else x
            y = builder.emit(relax.op.matmul(left, w))
            if kind == "reduce_scatter":
                y = builder.emit(comm.reduce_scatter(y, workers=2, uneven=True))
            elif kind == "allreduce":
                y = builder.emit(comm.allreduce(y))
            out = builder.emit_output(y)
        builder.emit_func_output(out)
    tvm_ipc.get_pipeline("llvm", 2, overlap=overlap, blas=False)(builder.get())
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["allgather", "reduce_scatter", "allreduce"])
def test_every_number_of_chunks_compiles(kind: str, run_python: Callable[..., str]) -> None:
    """Rows of chunks are those of the tensor, a variable, or an expression of one."""
    lines = run_python(f"kind = {kind!r}\n{COMPILE}")
    assert len(lines.splitlines()) == 42


def test_extents_are_simplified_until_nothing_changes() -> None:
    n = tirx.Var("n", "int64")
    assert simplified(tirx.floordiv(n * 2 + 1, 2)).same_as(n)
    assert simplified(tirx.min(tirx.floordiv(n + 15, 16) * 16, n)).same_as(n)
    assert simplified(7) == 7
    other = simplified(tirx.min(n, n * 2 - 1))
    assert tvm_ffi.structural_equal(tvm.sym.Analyzer().simplify(other), other)
