# SPDX-License-Identifier: Apache-2.0
"""The programs that are timed: a collective and its matmul, as they are and overlapped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import tvm
from tvm import relax

import tvm_ipc
from tvm_ipc import comm
from tvm_ipc.bench import gpu
from tvm_ipc.errors import IPCError
from tvm_ipc.transform import OverlapCommunication, collect_report
from tvm_ipc.transform.overlap.cost import Workload

#: Functions of `variants`: without overlap, and the matmul alone.
PLAIN: Final = "plain"
MATMUL: Final = "matmul"


def overlapped(chunks: int) -> str:
    """Return the name of the function with so many chunks."""
    return f"chunks_{chunks}"


def plain(work: Workload, name: str = PLAIN, dtype: str = "float32") -> tvm.IRModule:
    """Return a function of `x` and `w`: the collective and its matmul, in the order of its kind."""
    rows, inner, columns = work.rows, work.inner, work.columns
    mine = rows if work.kind == "allgather" else work.ranks * (rows or 0)
    x = relax.Var("x", relax.TensorType((mine, inner), dtype))
    w = relax.Var("w", relax.TensorType((inner, columns), dtype))
    builder = relax.BlockBuilder()
    with builder.function(name, [x, w]):
        with builder.dataflow():
            if work.kind == "allgather":
                whole = builder.emit(comm.allgather(x, workers=work.ranks))
                result = builder.emit_output(relax.op.matmul(whole, w))
            else:
                product = builder.emit(relax.op.matmul(x, w))
                scatter = work.kind == "reduce_scatter"
                total = (
                    comm.reduce_scatter(product, workers=work.ranks)
                    if scatter
                    else comm.allreduce(product)
                )
                result = builder.emit_output(total)
        builder.emit_func_output(result)
    return builder.get()


def matmul(
    rows: int, inner: int, columns: int, name: str = MATMUL, dtype: str = "float32"
) -> tvm.IRModule:
    """Return a function of `x` and `w`: their product."""
    x = relax.Var("x", relax.TensorType((rows, inner), dtype))
    w = relax.Var("w", relax.TensorType((inner, columns), dtype))
    builder = relax.BlockBuilder()
    with builder.function(name, [x, w]):
        with builder.dataflow():
            result = builder.emit_output(relax.op.matmul(x, w))
        builder.emit_func_output(result)
    return builder.get()


def variants(work: Workload, counts: Iterable[int], dtype: str = "float32") -> tvm.IRModule:
    """Return `PLAIN`, `MATMUL` of all its rows, and a function for each number of chunks."""
    assert None not in (work.rows, work.inner, work.columns)
    modules = [
        plain(work, PLAIN, dtype),
        matmul(work.ranks * (work.rows or 0), work.inner or 0, work.columns or 0, MATMUL, dtype),
    ]
    modules += [_in_chunks(work, count, dtype) for count in counts]
    return together(modules)


def _in_chunks(work: Workload, count: int, dtype: str) -> tvm.IRModule:
    change = OverlapCommunication(chunks=count, blas=work.blas, world_size=work.ranks)
    with collect_report() as report:
        changed = tvm.transform.Sequential([change])(plain(work, overlapped(count), dtype))
    (decision,) = report.decisions
    if decision.verdict == "left alone":
        raise IPCError(f"{decision.subject} is not overlapped: {decision.reason}")
    return changed


def together(modules: Sequence[tvm.IRModule]) -> tvm.IRModule:
    """Return one module with all functions."""
    functions: dict[Any, Any] = {}
    for module in modules:
        functions.update(module.functions_items())
    return tvm.IRModule(functions)


def build(module: tvm.IRModule, workers: int, blas: bool, device: str = "cpu") -> Any:
    """Return an executable for this machine's processor, or its first GPU."""
    if device == "cuda":
        target = tvm.target.Target(gpu.target(), host=tvm.target.Target.from_device("cpu"))
    else:
        target = tvm.target.Target.from_device("cpu")
    pipeline = tvm_ipc.get_pipeline(target, workers, blas=blas)
    return tvm.compile(module, target, relax_pipeline=pipeline)


def compiled_kernels(shapes: Iterable[tuple[int, ...]], workers: int, device: str = "cpu") -> Any:
    """Return an executable with a kernel of TVM for each product of rows, inner and columns."""
    modules = [
        matmul(rows, inner, columns, kernel_name(rows, inner, columns))
        for rows, inner, columns in shapes
    ]
    return build(together(modules), workers, blas=False, device=device)


def kernel_name(rows: int, inner: int, columns: int) -> str:
    """Return the name of the function with the kernel of a product."""
    return f"matmul_{rows}_{inner}_{columns}"
