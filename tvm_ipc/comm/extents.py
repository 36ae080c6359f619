# SPDX-License-Identifier: Apache-2.0
"""Extents of tensors, which may be symbolic, and their parts.

Numbers of Python need no compiler: what has been compiled is described without one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm
from tvm import tirx

from tvm_ipc.comm.placements import Shard


def constant(expr: Any) -> int | None:
    """Return an integer, None where it is not a constant."""
    if isinstance(expr, tirx.IntImm):
        return int(expr.value) if is_integer(expr) else None
    if isinstance(expr, (int, np.integer)) and not isinstance(expr, bool):
        return int(expr)
    return None


def is_integer(expr: Any) -> bool:
    """Whether it is an expression of an integer, constant or not."""
    is_number = isinstance(expr, tvm.ir.Expr) and bool(tvm.ir.is_prim_expr(expr))
    return is_number and str(expr.ty).startswith(("int", "uint"))


def show_extent(extent: Any) -> str:
    """Return an extent as errors say it."""
    number = constant(extent)
    return str(extent) if number is None else str(number)


def item_bytes(dtype: tvm.DataType) -> int:
    """Return how many bytes an element has."""
    return (int(dtype.bits) * int(dtype.lanes) + 7) // 8


def divides(workers: int, extent: tvm.ir.Expr) -> bool:
    """Whether it is sure that an extent is a multiple of the workers."""
    return bool(tvm.sym.Analyzer().can_prove_equal(tirx.floormod(extent, workers), 0))


def largest_part(extent: Any, workers: int) -> Any:
    """Return the extent of the first part of an axis that is divided among workers."""
    if isinstance(extent, int):
        return -(-extent // workers)
    rounded = extent if divides(workers, extent) else extent + workers - 1
    return tvm.sym.Analyzer().simplify(tirx.floordiv(rounded, workers))


def local_extent(one: Shard, workers: int, extent: Any) -> Any:
    """Return the extent of what a rank has of an axis that is divided."""
    if one.division is None:
        return largest_part(extent, workers)
    size = one.division.part
    return size if isinstance(extent, int) else tirx.IntImm("int64", size)
