# SPDX-License-Identifier: Apache-2.0
"""Which axes stay divided when a tensor is reshaped.

The axes before and after are taken in groups of equal product. Within a group an axis that is
divided must be the first one that is longer than 1, before and after: a rank's part lies in one
piece then, and is the same piece afterwards, if the parts have as many elements.

    (b, 12, 64) -> (b, 4, 3, 64)        groups b | 12 -> 4, 3 | 64; 12 and 4 can be divided
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import mul

import tvm
from tvm import tirx

from tvm_ipc.comm.operator import constant, largest_part
from tvm_ipc.transform.placements.rules import Refusal

#: Axes before, and the axes after that have as many elements.
Group = tuple[list[int], list[int]]


def new_axis(
    before: Sequence[tirx.Expr], after: Sequence[tirx.Expr], axis: int, workers: int
) -> int:
    """Return where the axis is that is divided among workers; raise `Refusal` where it is none."""
    old, new = next(group for group in _groups(before, after) if axis in group[0])
    first, target = _first(before, old), _first(after, new)
    if first is None or target is None:  # all are 1 long
        first, target = axis, (new[0] if new and constant(before[axis]) == 1 else None)
    elif axis != first:
        raise Refusal(
            f"axis {axis} of its operand is divided, and lies within axis {target} of the result, "
            "not at its beginning"
        )
    if target is None:
        raise Refusal(f"axis {axis} of its operand is divided, and is no axis of the result")
    rows = largest_part(before[axis], workers) * _product(before, old, axis)
    others = largest_part(after[target], workers) * _product(after, new, target)
    if not tvm.sym.Analyzer().can_prove_equal(rows, others):
        raise Refusal(
            f"axis {axis} of its operand is divided among {workers} ranks, and axis {target} of "
            "the result would be divided elsewhere"
        )
    return target


def _groups(before: Sequence[tirx.Expr], after: Sequence[tirx.Expr]) -> list[Group]:
    """Return the smallest groups of equal product, in their order."""
    analyzer = tvm.sym.Analyzer()
    groups: list[Group] = []
    start_old = start_new = 0
    for end_old in range(1, len(before) + 1):
        left = _all(before, range(start_old, end_old))
        for end_new in range(start_new + 1, len(after) + 1):
            right = _all(after, range(start_new, end_new))
            if analyzer.can_prove_equal(left, right):
                groups.append((list(range(start_old, end_old)), list(range(start_new, end_new))))
                start_old, start_new = end_old, end_new
                break
    rest_old, rest_new = range(start_old, len(before)), range(start_new, len(after))
    if rest_old or rest_new:
        groups.append((list(rest_old), list(rest_new)))
    return groups


def _all(dims: Sequence[tirx.Expr], axes: Sequence[int]) -> tirx.Expr:
    return reduce(mul, [dims[axis] for axis in axes], tirx.IntImm("int64", 1))


def _product(dims: Sequence[tirx.Expr], axes: Sequence[int], without: int) -> tirx.Expr:
    return _all(dims, [axis for axis in axes if axis != without])


def _first(dims: Sequence[tirx.Expr], axes: Sequence[int]) -> int | None:
    return next((axis for axis in axes if constant(dims[axis]) != 1), None)
