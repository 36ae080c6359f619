# SPDX-License-Identifier: Apache-2.0
"""Schedule matmuls for one CPU core, for programs without OpenBLAS.

Without a schedule a matmul is a plain triple loop, up to a hundred times slower, which would hide
the cost of the collectives. The schedules do not depend on the sizes of the decoder. The pipeline
schedules all other kernels.

    many rows  A tile of the result stays in registers over the inner dimension. A panel of the
               weights is packed, so that it is read from the cache contiguously.
    one row    Memory bandwidth is the limit: the weights are read once, several rows at a time.
"""

from __future__ import annotations

from typing import Any, Final

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.target import codegen

from tvm_ipc.tvm_moved_names import TensorLoad

#: Rows and vectors of a tile of a matmul: 12 registers, and too small for TVM to use the heap.
_ROWS: Final = 6
_VECTORS: Final = 2
#: Rows of the weights that are accumulated together into a result with one row.
_DEPTH: Final = 8


@tvm.transform.module_pass(opt_level=0, name="ScheduleMatmuls")  # type: ignore[untyped-decorator]
def schedule_matmuls(module: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
    """Schedule every matmul of two-dimensional operands."""
    scheduled = module.clone()
    for variable, function in module.functions_items():
        if isinstance(function, tirx.PrimFunc) and "matmul" in variable.name_hint:
            schedule = s_tir.Schedule(function)
            widened = _schedule_matmul(schedule)
            function = schedule.mod["main"]
            scheduled[variable] = _remove_casts(function, widened) if widened else function
    return scheduled


def _remove_casts(function: tirx.PrimFunc, names: set[str]) -> tirx.PrimFunc:
    """Remove the casts of widened buffers to their old type and back to float32.

    Their values were converted from that type, so these casts change nothing.
    """

    def without_cast(cast: Any) -> Any:
        inner = cast.value
        if not isinstance(inner, tirx.Cast) or not isinstance(inner.value, TensorLoad):
            return cast
        return inner.value if inner.value.source.name in names else cast

    return function.with_body(tvm_ffi.structural_map(function.body, (tirx.Cast, without_cast)))


def _lanes() -> int:
    """Return the number of float32 elements in a vector of the target."""
    return 16 if codegen.llvm_cpu_has_features("avx512f", tvm.target.Target.current()) else 8


def _schedule_matmul(schedule: Any) -> set[str] | None:
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
    k, unrolled = schedule.split(k, [None, _divisor(schedule.get(k).extent, _DEPTH)])
    j, lanes = schedule.split(j, [None, _divisor(schedule.get(j).extent, _lanes())])
    schedule.reorder(i, k, j, unrolled, lanes)
    schedule.unroll(unrolled)
    schedule.vectorize(lanes)
    schedule.decompose_reduction(block, k)


def _many_rows(schedule: Any, block: Any) -> set[str]:
    # The number of rows may be symbolic: tiles are always full, and the padding is dropped.
    schedule.pad_einsum(block, [_ROWS, 1, 1])
    (result,) = schedule.get_consumers(block)
    for epilogue in schedule.get_consumers(result):
        schedule.reverse_compute_inline(epilogue)
    panel = schedule.cache_read(block, 1, "global")
    # Convert 16-bit types once, not at each multiplication.
    widened = set()
    for copy in (schedule.get_producers(block)[0], panel):
        target = schedule.get(copy).writes[0].source
        if str(target.ty.dtype) != "float32":
            schedule.unsafe_set_dtype(copy, 0, "float32")
            widened.add(str(target.name))
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
    return widened


def _divisor(extent: Any, limit: int) -> int:
    """Return the largest power of two up to `limit` that divides `extent`."""
    while int(extent) % limit:
        limit //= 2
    return limit
