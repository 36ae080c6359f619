# SPDX-License-Identifier: Apache-2.0
"""Programs that read fields of tuples compile, and give what NumPy gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import Tuple, TupleGetItem, op

import tvm_ipc

ROWS = 4
Emit = Callable[[Any], relax.Var]


def of_one(emit: Emit, x: Any, y: Any) -> Any:
    return op.exp(emit(TupleGetItem(Tuple([y]), 0)))


def of_several(emit: Emit, x: Any, y: Any) -> Any:
    return op.add(emit(TupleGetItem(Tuple([x, y]), 1)), y)


def of_a_variable(emit: Emit, x: Any, y: Any) -> Any:
    return op.exp(emit(TupleGetItem(emit(Tuple([y, x])), 0)))


def of_a_tuple_of_tuples(emit: Emit, x: Any, y: Any) -> Any:
    inner = emit(TupleGetItem(Tuple([Tuple([x, y]), x]), 0))
    return op.exp(emit(TupleGetItem(inner, 1)))


def of_tuples_with_names(emit: Emit, x: Any, y: Any) -> Any:
    inner = emit(TupleGetItem(emit(Tuple([emit(Tuple([x, y])), x])), 0))
    return op.exp(emit(TupleGetItem(inner, 1)))


def of_several_results(emit: Emit, x: Any, y: Any) -> Any:
    halves = emit(op.split(y, 2))
    pair = emit(TupleGetItem(Tuple([halves, x]), 0))
    return op.exp(emit(op.concat([emit(TupleGetItem(pair, k)) for k in (0, 1)])))


def in_a_concatenation(emit: Emit, x: Any, y: Any) -> Any:
    return op.concat([emit(TupleGetItem(Tuple([y, x]), k)) for k in (0, 1)])


def of_a_call(emit: Emit, x: Any, y: Any) -> Any:
    return op.exp(emit(TupleGetItem(Tuple([op.negative(y), x]), 0)))


def as_a_result(emit: Emit, x: Any, y: Any) -> Any:
    return TupleGetItem(Tuple([y, x]), 0)


def in_a_row(emit: Emit, x: Any, y: Any) -> Any:
    again = emit(op.exp(emit(TupleGetItem(Tuple([y]), 0))))
    return TupleGetItem(Tuple([again]), 0)


def of_a_constant(emit: Emit, x: Any, y: Any) -> Any:
    ones = relax.const(np.ones((ROWS, ROWS), "float32"))
    return op.add(emit(TupleGetItem(Tuple([ones]), 0)), y)


def of_a_parameter(emit: Emit, x: Any, y: Any) -> Any:
    return op.add(emit(TupleGetItem(Tuple([x]), 0)), y)


def by_an_index(emit: Emit, x: Any, y: Any) -> Any:
    """TVM legalizes this operator to a field of a tuple."""
    return op.index_tensor(x, [emit(op.astype(y, "int64"))])


def by_two_indices(emit: Emit, x: Any, y: Any) -> Any:
    rows = emit(op.astype(y, "int64"))
    return op.index_tensor(emit(op.exp(x)), [rows, emit(op.add(rows, relax.const(0, "int64")))])


def put_at_indices(emit: Emit, x: Any, y: Any) -> Any:
    rows = emit(op.astype(emit(op.max(y, [1])), "int64"))
    return op.index_put(x, (rows, rows), emit(op.max(y, [0])))


def put_at_an_index(emit: Emit, x: Any, y: Any) -> Any:
    rows = emit(op.astype(emit(op.max(y, [1])), "int64"))
    return op.index_put(emit(op.max(x, [0])), (rows,), emit(op.min(y, [0])))


def without_dropout(emit: Emit, x: Any, y: Any) -> Any:
    return op.exp(emit(TupleGetItem(emit(op.nn.dropout(y)), 0)))


def put(given: Any, at: tuple[Any, ...], values: Any) -> Any:
    found = given.copy()
    found[at] = values
    return found


#: For each program what NumPy gives for `x` and `y`.
PROGRAMS: dict[Callable[..., Any], Callable[[Any, Any], Any]] = {
    of_one: lambda x, y: np.exp(y),
    of_several: lambda x, y: y + y,
    of_a_variable: lambda x, y: np.exp(y),
    of_a_tuple_of_tuples: lambda x, y: np.exp(y),
    of_tuples_with_names: lambda x, y: np.exp(y),
    of_several_results: lambda x, y: np.exp(y),
    in_a_concatenation: lambda x, y: np.concatenate([y, x]),
    of_a_call: lambda x, y: np.exp(-y),
    as_a_result: lambda x, y: y,
    in_a_row: lambda x, y: np.exp(y),
    of_a_constant: lambda x, y: 1 + y,
    of_a_parameter: lambda x, y: x + y,
    by_an_index: lambda x, y: x[y.astype(int)],
    by_two_indices: lambda x, y: np.exp(x)[y.astype(int), y.astype(int)],
    put_at_indices: lambda x, y: put(x, (y.max(1).astype(int),) * 2, y.max(0)),
    put_at_an_index: lambda x, y: put(x.max(0), (y.max(1).astype(int),), y.min(0)),
    without_dropout: lambda x, y: np.exp(y),
}


def module() -> tvm.IRModule:
    """Return a function for each program; `y` is made by an operator that TVM fuses."""
    builder = relax.BlockBuilder()
    for build in PROGRAMS:
        x = relax.Var("x", relax.TensorType((ROWS, ROWS), "float32"))
        with builder.function(build.__name__, [x]):
            with builder.dataflow():
                y = builder.emit(op.abs(x))
                out = builder.emit_output(build(builder.emit, x, y))
            builder.emit_func_output(out)
    return builder.get()


@pytest.fixture(scope="module")
def machine() -> relax.VirtualMachine:
    pipeline = tvm_ipc.get_pipeline("llvm", 2)
    executable = tvm.compile(module(), "llvm", relax_pipeline=pipeline)
    return relax.VirtualMachine(executable, tvm.cpu())


@pytest.mark.parametrize("build", PROGRAMS, ids=lambda build: build.__name__)
def test_programs(machine: relax.VirtualMachine, build: Callable[..., Any]) -> None:
    # The largest of each row is another one, of each column too.
    x = np.array([[0, 1, 2, -3], [2, 0.5, 1, 0], [-1, 0.5, 0, 0], [0.5, 0, 0, 0]], "float32")
    assert sorted(np.abs(x).max(1).astype(int)) == [0, 1, 2, 3]
    found = machine[build.__name__](tvm.runtime.tensor(x)).numpy()
    right = PROGRAMS[build](x, np.abs(x))
    assert found.shape == right.shape
    np.testing.assert_allclose(found, right, rtol=1e-5)
