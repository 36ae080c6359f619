# SPDX-License-Identifier: Apache-2.0
"""Casts to extents that are defined already, which TVM's fusion substitutes without end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

import tvm_ipc
from tvm_ipc import comm
from tvm_ipc.analysis.rewrite_cyclic_match_casts import without_cycles
from tvm_ipc.errors import IPCError

HALVES = "a tensor of n // 2 * 2 rows is cast to n rows"
NAMED = "rows that equal n are named"
GATHERED = "parts of n // 2 * 2 rows are gathered to 2 * n rows"


def program(name: str) -> tvm.IRModule:
    n = tirx.Var("n", "int64")
    even = tirx.floordiv(n, 2) * 2
    rows = tirx.floordiv(n * 2 + 1, 2) if name == NAMED else even
    x = relax.Var("x", relax.TensorType((rows, 4), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, relax.Var("told", relax.ShapeType([n]))]):
        with builder.dataflow():
            y: Any = builder.emit(relax.op.add(x, x))
            if name == GATHERED:
                y = builder.emit(comm.allgather(y, workers=2, extent=n * 2))
            else:
                extent = tirx.Var("m", "int64") if name == NAMED else n
                y = builder.match_cast(y, relax.TensorType((extent, 4), "float32"))
            out = builder.emit_output(relax.op.add(y, y))
        builder.emit_func_output(out)
    return builder.get()


#: A stack overflow of TVM ends the process, so programs are compiled in another one first.
COMPILE = """
import tvm_ipc
from tests.analysis.test_match_casts import program
tvm_ipc.get_pipeline("llvm", 2)(program({name!r}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", [HALVES, NAMED, GATHERED])
def test_casts_are_checked_at_run_time(name: str, run_python: Callable[..., str]) -> None:
    run_python(COMPILE.format(name=name))
    pipeline = tvm_ipc.get_pipeline("llvm", 2)
    executable = tvm.compile(program(name), "llvm", relax_pipeline=pipeline)
    with tvm_ipc.Session(2, threads=True, timeout=60) as session:
        main = session.load_vm_module(executable)["main"]
        given = np.arange(16, dtype="float32").reshape(4, 4)
        x = session.put(given)
        found = session.get(main(x, tvm.runtime.ShapeTuple([4])), 0)
        whole = np.concatenate([given, given]) if name == GATHERED else given
        np.testing.assert_array_equal(found, 4 * whole)
        if name == HALVES:
            with pytest.raises(IPCError, match="match_cast"):
                session.get(main(x, tvm.runtime.ShapeTuple([5])), 0)


def test_other_casts_stay_as_they_are() -> None:
    n, m, new = (tirx.Var(name, "int64") for name in ("n", "m", "new"))
    x = relax.Var("x", relax.TensorType((tirx.floordiv(n, 2), m), "float32"))
    y = relax.Var("y", relax.TensorType((n, m), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, y]):
        a = builder.match_cast(x, relax.TensorType((new, m), "float32"))
        b = builder.match_cast(y, relax.TensorType((m, n), "float32"))
        builder.emit_func_output(relax.Tuple([a, b]))
    function = builder.get()["main"]
    assert without_cycles(function) is function
