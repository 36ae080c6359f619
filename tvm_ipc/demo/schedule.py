# SPDX-License-Identifier: Apache-2.0
"""A schedule for matrix products on one core.

Without one a product is the plain triple loop, a hundred times slower, and there would be
nothing to see of the collectives.
"""

from __future__ import annotations

from typing import Any, Final

import tvm
from tvm import s_tir, tirx

#: A tile of the output that stays in registers while the inner dimension goes by.
_ROWS: Final = 4
_COLUMNS: Final = 64


@tvm.transform.module_pass(opt_level=0, name="ScheduleMatmuls")  # type: ignore[untyped-decorator]
def schedule_matmuls(module: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
    """Tile and vectorize every matrix product of the module."""
    schedule = s_tir.Schedule(module)
    for variable, function in module.functions_items():
        if isinstance(function, tirx.PrimFunc) and "matmul" in variable.name_hint:
            schedule.work_on(variable.name_hint)
            _tile(schedule, schedule.get_sblock("matmul"))
    return schedule.mod


def _tile(schedule: Any, block: Any) -> None:
    i, j, k = schedule.get_loops(block)
    i, rows = schedule.split(i, [None, _divisor(schedule.get(i).extent, _ROWS)])
    j, columns = schedule.split(j, [None, _divisor(schedule.get(j).extent, _COLUMNS)])
    schedule.reorder(i, j, k, rows, columns)
    schedule.vectorize(columns)
    schedule.unroll(rows)
    schedule.decompose_reduction(block, k)


def _divisor(extent: Any, limit: int) -> int:
    """Return the largest divisor up to the limit, so that every tile is whole."""
    return next(d for d in range(limit, 0, -1) if int(extent) % d == 0)
