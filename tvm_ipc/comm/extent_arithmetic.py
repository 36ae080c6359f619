# SPDX-License-Identifier: Apache-2.0
"""Helpers for extents of tensors, which may be symbolic, and of their shards.

Extents that are Python integers do not need TVM's compiler.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import tvm
import tvm_ffi
from tvm import tirx

from tvm_ipc.arguments import counted
from tvm_ipc.comm.placements import Shard
from tvm_ipc.tvm_moved_names import Analyzer

#: The most times an extent is simplified; real programs need one or two.
_SIMPLIFICATIONS: Final = 8


def constant(expr: Any) -> int | None:
    """Return the value of an integer, None if it is not a constant."""
    if isinstance(expr, tirx.IntImm):
        return int(expr.value) if _is_integer_type(expr.ty) else None
    if isinstance(expr, (int, np.integer)) and not isinstance(expr, bool):
        return int(expr)
    return None


def is_integer(expr: Any) -> bool:
    """Return whether an expression is an integer, constant or symbolic."""
    is_number = isinstance(expr, tvm.ir.Expr) and bool(tvm.ir.is_prim_expr(expr))
    return is_number and _is_integer_type(expr.ty)


def _is_integer_type(ty: tvm.ir.PrimType) -> bool:
    return str(ty).startswith(("int", "uint"))


def format_extent(extent: Any) -> str:
    """Return an extent as error messages print it."""
    number = constant(extent)
    return str(extent) if number is None else str(number)


def format_count(extent: Any, noun: str) -> str:
    """Return a number of things, which may be symbolic, as messages print it."""
    number = constant(extent)
    return f"{extent} {noun}s" if number is None else counted(number, noun)


def item_bytes(dtype: tvm.DataType) -> int:
    """Return the size of an element in bytes."""
    return (int(dtype.bits) * int(dtype.lanes) + 7) // 8


def simplified(extent: Any) -> Any:
    """Return an extent simplified until TVM's simplifier no longer changes it."""
    if isinstance(extent, int):
        return extent
    analyzer = Analyzer()
    for _ in range(_SIMPLIFICATIONS):
        before, extent = extent, analyzer.simplify(extent)
        if tvm_ffi.structural_equal(before, extent):
            break
    return extent


def divides(workers: int, extent: tvm.ir.Expr) -> bool:
    """Return whether an extent is provably a multiple of the number of workers."""
    return bool(Analyzer().can_prove_equal(tirx.floormod(extent, workers), 0))


def largest_shard(extent: Any, workers: int) -> Any:
    """Return the extent of the first shard of an axis that is split among workers."""
    if isinstance(extent, int):
        return -(-extent // workers)
    rounded = extent if divides(workers, extent) else extent + workers - 1
    return Analyzer().simplify(tirx.floordiv(rounded, workers))


def local_extent(index: Shard, workers: int, extent: Any) -> Any:
    """Return the extent of a rank's shard of an axis."""
    if index.division is None:
        return largest_shard(extent, workers)
    size = index.division.shard_extent
    return size if isinstance(extent, int) else tirx.IntImm("int64", size)
