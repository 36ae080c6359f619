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
from tvm import s_tir, tirx

#: A tile of a product: 12 registers of 16 numbers, and less memory than TVM allots on the heap.
_ROWS: Final = 6
_COLUMNS: Final = 32
_LANES: Final = 16
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
    how(schedule)
    return schedule.mod["main"]


def _matmul(schedule: Any) -> None:
    block = schedule.get_sblock("matmul")
    loops = schedule.get_loops(block)
    if len(loops) != 3:
        return
    rows = schedule.get(loops[0]).extent
    if isinstance(rows, tvm.tirx.IntImm) and int(rows) == 1:
        _one_row(schedule, block)
    else:
        _many_rows(schedule, block)


def _one_row(schedule: Any, block: Any) -> None:
    i, j, k = schedule.get_loops(block)
    k, deep = schedule.split(k, [None, _divisor(schedule.get(k).extent, _DEPTH)])
    j, lanes = schedule.split(j, [None, _divisor(schedule.get(j).extent, _LANES)])
    schedule.reorder(i, k, j, deep, lanes)
    schedule.unroll(deep)
    schedule.vectorize(lanes)
    schedule.decompose_reduction(block, k)


def _many_rows(schedule: Any, block: Any) -> None:
    # The number of rows may be unknown: a tile is always whole, what it has too much is dropped.
    schedule.pad_einsum(block, [_ROWS, 1, 1])
    (result,) = schedule.get_consumers(block)
    for epilogue in schedule.get_consumers(result):
        schedule.reverse_compute_inline(epilogue)
    panel = schedule.cache_read(block, 1, "global")
    i, j, k = schedule.get_loops(block)
    columns = _divisor(schedule.get(j).extent, _COLUMNS)
    i, rows = schedule.split(i, [None, _ROWS])
    j, blocks, lanes = schedule.split(
        j, [None, columns // min(columns, _LANES), min(columns, _LANES)]
    )
    schedule.reorder(j, i, k, rows, blocks, lanes)
    schedule.compute_at(panel, j)
    schedule.vectorize(schedule.get_loops(panel)[-1])
    schedule.reverse_compute_at(result, i)
    *_, row, column = schedule.get_loops(result)
    schedule.unroll(row)
    schedule.vectorize(column)
    schedule.unroll(rows)
    schedule.unroll(blocks)
    schedule.vectorize(lanes)
    schedule.decompose_reduction(block, k)


def _norm(schedule: Any) -> None:
    *stages, result = _blocks(schedule)
    for block in stages:
        if schedule.get(block).name_hint not in ("T_multiply_red", "rsqrt"):
            schedule.compute_inline(block)
    total, root = schedule.get_sblock("T_multiply_red"), schedule.get_sblock("rsqrt")
    # A sum in as many parts as a vector has numbers, which are added at the end.
    *_, k = schedule.get_loops(total)
    lanes = _divisor(schedule.get(k).extent, _LANES)
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
