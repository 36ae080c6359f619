# SPDX-License-Identifier: Apache-2.0
"""Build the programs that `tvm-ipc bench` times: matmuls with a collective, plain or in chunks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import tvm
from tvm import relax

import tvm_ipc
from tvm_ipc import comm
from tvm_ipc.errors import IPCError
from tvm_ipc.tools import gpu_assignment
from tvm_ipc.transform import OverlapCommunication, collect_report
from tvm_ipc.transform.overlap.cost_model import Workload

#: Functions in the module of `variants`: without overlap, and only the matmul.
PLAIN: Final = "plain"
MATMUL: Final = "matmul"


def overlapped(chunks: int) -> str:
    """Return the name of the function that works in `chunks` chunks."""
    return f"chunks_{chunks}"


def plain(work: Workload, name: str = PLAIN, dtype: str = "float32") -> tvm.IRModule:
    """Return a function of `x` and `w` with the collective and the matmul of a workload."""
    rows, inner, columns = work.rows, work.inner, work.columns
    own_rows = rows if work.kind == "allgather" else work.ranks * (rows or 0)
    x = relax.Var("x", relax.TensorType((own_rows, inner), dtype))
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
    """Return a function that multiplies `x` by `w`."""
    x = relax.Var("x", relax.TensorType((rows, inner), dtype))
    w = relax.Var("w", relax.TensorType((inner, columns), dtype))
    builder = relax.BlockBuilder()
    with builder.function(name, [x, w]):
        with builder.dataflow():
            result = builder.emit_output(relax.op.matmul(x, w))
        builder.emit_func_output(result)
    return builder.get()


def variants(work: Workload, counts: Iterable[int], dtype: str = "float32") -> tvm.IRModule:
    """Return `PLAIN`, `MATMUL` with the rows of all ranks, and a function per number of chunks."""
    assert None not in (work.rows, work.inner, work.columns)
    modules = [
        plain(work, PLAIN, dtype),
        matmul(work.ranks * (work.rows or 0), work.inner or 0, work.columns or 0, MATMUL, dtype),
    ]
    modules += [_in_chunks(work, count, dtype) for count in counts]
    return merge_modules(modules)


def _in_chunks(work: Workload, count: int, dtype: str) -> tvm.IRModule:
    overlap_pass = OverlapCommunication(chunks=count, blas=work.blas, world_size=work.ranks)
    with collect_report() as report:
        overlapped_module = tvm.transform.Sequential([overlap_pass])(
            plain(work, overlapped(count), dtype)
        )
    (decision,) = report.decisions
    if decision.verdict == "skipped":
        raise IPCError(f"{decision.subject} cannot be overlapped: {decision.reason}")
    return overlapped_module


def merge_modules(modules: Sequence[tvm.IRModule]) -> tvm.IRModule:
    """Return one module with the functions of all modules."""
    functions: dict[Any, Any] = {}
    for module in modules:
        functions.update(module.functions_items())
    return tvm.IRModule(functions)


def build(module: tvm.IRModule, workers: int, blas: bool, device: str = "cpu") -> Any:
    """Compile a module for this machine's CPU or its first GPU."""
    if device == "cuda":
        gpu_assignment.require_gpus("bench")
        target = tvm.target.Target(gpu_assignment.target(), host=tvm_ipc.cpu_target())
    else:
        target = tvm_ipc.cpu_target()
    pipeline = tvm_ipc.get_pipeline(target, workers, blas=blas)
    return tvm.compile(module, target, relax_pipeline=pipeline)


def compiled_kernels(shapes: Iterable[tuple[int, ...]], workers: int, device: str = "cpu") -> Any:
    """Compile one TVM matmul kernel per shape, given as rows, inner extent and columns."""
    modules = [
        matmul(rows, inner, columns, kernel_name(rows, inner, columns))
        for rows, inner, columns in shapes
    ]
    return build(merge_modules(modules), workers, blas=False, device=device)


def kernel_name(rows: int, inner: int, columns: int) -> str:
    """Return the name of the function with the kernel of a shape."""
    return f"matmul_{rows}_{inner}_{columns}"
