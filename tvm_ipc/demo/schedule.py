# SPDX-License-Identifier: Apache-2.0
"""Schedules for one core: matrix products and norms.

Without them a product is the plain triple loop, a hundred times slower, and there would be
nothing to see of the collectives. Nothing here depends on the sizes of the demo.

    many rows  a tile of the result stays in registers while the inner dimension goes by; a panel
               of the weights is packed, so that it is read from the cache in a straight line
    one row    memory is the limit: the weights are read once, some whole rows at a time
"""

from __future__ import annotations

from typing import Any, Final

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.target import codegen

#: A tile of a product: 12 registers, and less memory than TVM allots on the heap.
_ROWS: Final = 6
_VECTORS: Final = 2
#: Rows of the weights that are added to the result at once where it has one row.
_DEPTH: Final = 8


@tvm.transform.module_pass(opt_level=0, name="ScheduleKernels")  # type: ignore[untyped-decorator]
def schedule_kernels(module: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
    """Schedule every matrix product with two-dimensional operands, and every norm."""
    scheduled = {}
    for variable, function in module.functions_items():
        if not isinstance(function, tirx.PrimFunc):
            continue
        if "matmul" in variable.name_hint:
            scheduled[variable] = _schedule(function, _matmul)
        elif "rms_norm" in variable.name_hint:
            scheduled[variable] = _schedule(function, _norm)
    module = module.clone()
    for variable, function in scheduled.items():
        module[variable] = function
    return module


def _schedule(function: tirx.PrimFunc, how: Any) -> tirx.PrimFunc:
    schedule = s_tir.Schedule(function)
    wide = how(schedule)
    function = schedule.mod["main"]
    return _read_wide(function, wide) if wide else function


def _read_wide(function: tirx.PrimFunc, names: set[str]) -> tirx.PrimFunc:
    """Read buffers that were widened to float32 as they are, not by way of their old type.

    Their numbers came from that type, so the way there and back changes nothing.
    """

    def value(cast: Any) -> Any:
        inner = cast.value
        if not isinstance(inner, tirx.Cast) or not isinstance(inner.value, tvm.ir.TensorLoad):
            return cast
        return inner.value if inner.value.source.name in names else cast

    return function.with_body(tvm_ffi.structural_map(function.body, (tirx.Cast, value)))


def _lanes() -> int:
    """Return how many float32 a vector of the target has."""
    return 16 if codegen.llvm_cpu_has_features("avx512f", tvm.target.Target.current()) else 8


def _matmul(schedule: Any) -> set[str] | None:
    block = schedule.get_sblock("matmul")
    loops = schedule.get_loops(block)
    if len(loops) != 3:
        return None
    rows = schedule.get(loops[0]).extent
    if isinstance(rows, tvm.tirx.IntImm) and int(rows) == 1:
        _one_row(schedule, block)
        return None
    return _many_rows(schedule, block)


def _one_row(schedule: Any, block: Any) -> None:
    i, j, k = schedule.get_loops(block)
    k, deep = schedule.split(k, [None, _divisor(schedule.get(k).extent, _DEPTH)])
    j, lanes = schedule.split(j, [None, _divisor(schedule.get(j).extent, _lanes())])
    schedule.reorder(i, k, j, deep, lanes)
    schedule.unroll(deep)
    schedule.vectorize(lanes)
    schedule.decompose_reduction(block, k)


def _many_rows(schedule: Any, block: Any) -> set[str]:
    # The number of rows may be unknown: a tile is always whole, what it has too much is dropped.
    schedule.pad_einsum(block, [_ROWS, 1, 1])
    (result,) = schedule.get_consumers(block)
    for epilogue in schedule.get_consumers(result):
        schedule.reverse_compute_inline(epilogue)
    panel = schedule.cache_read(block, 1, "global")
    # Numbers of 16 bits are widened once, not each time that they are multiplied.
    wide = set()
    for copy in (schedule.get_producers(block)[0], panel):
        target = schedule.get(copy).writes[0].source
        if str(target.ty.dtype) != "float32":
            schedule.unsafe_set_dtype(copy, 0, "float32")
            wide.add(str(target.name))
    i, j, k = schedule.get_loops(block)
    vector = _lanes()
    columns = _divisor(schedule.get(j).extent, _VECTORS * vector)
    vector = min(columns, vector)
    i, rows = schedule.split(i, [None, _ROWS])
    j, vectors, lanes = schedule.split(j, [None, columns // vector, vector])
    schedule.reorder(j, i, k, rows, vectors, lanes)
    schedule.compute_at(panel, j)
    schedule.vectorize(schedule.get_loops(panel)[-1])
    schedule.reverse_compute_at(result, i)
    *_, row, column = schedule.get_loops(result)
    schedule.unroll(row)
    schedule.vectorize(column)
    schedule.unroll(rows)
    schedule.unroll(vectors)
    schedule.vectorize(lanes)
    schedule.decompose_reduction(block, k)
    return wide


def _norm(schedule: Any) -> None:
    *stages, result = _blocks(schedule)
    for block in stages:
        if schedule.get(block).name_hint not in ("T_multiply_red", "rsqrt"):
            schedule.compute_inline(block)
    total, root = schedule.get_sblock("T_multiply_red"), schedule.get_sblock("rsqrt")
    # A sum in as many parts as a vector has numbers, which are added at the end.
    *_, k = schedule.get_loops(total)
    lanes = _divisor(schedule.get(k).extent, _lanes())
    partial = schedule.rfactor(schedule.split(k, [None, lanes])[1], 0)
    row, column = schedule.get_loops(result)
    for block in (root, total, partial):
        schedule.compute_at(block, row)
    *_, lane, k = schedule.get_loops(partial)
    schedule.reorder(k, lane)
    schedule.vectorize(lane)
    schedule.decompose_reduction(partial, k)
    schedule.vectorize(schedule.split(column, [None, lanes])[1])


def _blocks(schedule: Any) -> list[Any]:
    """Return all blocks, in the order in which they run."""
    return list(schedule.get_child_blocks(schedule.get_sblock("root")))


def _divisor(extent: Any, limit: int) -> int:
    """Return the largest power of two up to the limit that divides, so that vectors are whole."""
    while int(extent) % limit:
        limit //= 2
    return limit
