# SPDX-License-Identifier: Apache-2.0
"""Which axes stay divided when a tensor is reshaped.

The axes before and after are taken in groups of equal product. Within a group an axis that is
divided must be the first one that is longer than 1, before and after: a rank's part lies in one
piece then, and is the same piece afterwards, if the parts have as many elements.

    (b, 12, 64) -> (b, 4, 3, 64)        groups b | 12 -> 4, 3 | 64; 12 and 4 can be divided
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import mul
from typing import Final

import tvm
from tvm import relax, tirx

from tvm_ipc.comm.legalize import reshaped
from tvm_ipc.comm.operator import constant, largest_part
from tvm_ipc.transform.rules import keeps
from tvm_ipc.transform.rules.operation import Operation
from tvm_ipc.transform.rules.rule import Part, Rule

#: Axes before, and the axes after that have as many elements.
Group = tuple[list[int], list[int]]


def reshape(op: Operation) -> Rule:
    """Return the rule of a reshape: each group of axes has one label."""
    before, after = op.dims(), op.made()
    labels = list(range(len(before)))
    made: list[int] = [len(before) + axis for axis in range(len(after))]  # of no operand
    whole: dict[int, str] = {}
    among: dict[int, Callable[[int], str]] = {}
    for old, new in _groups(before, after):
        first, target = _first(before, old), _first(after, new)
        if first is None and target is None and old and new:  # all are 1 long
            first, target = old[0], new[0]
        for axis in old:
            if target is None or first is None:
                whole[axis] = "that axis is none of the result"
            elif axis != first:
                whole[axis] = f"that axis lies within axis {target} of the result"
            else:
                made[target] = axis
                among[axis] = _divides_alike(before, after, old, new, axis, target)

    def local(part: Part) -> relax.Expr:
        return reshaped(part.builder, part.call.args[0], part.results[0])

    return Rule(
        (tuple(labels),),
        (tuple(made),),
        whole=whole,
        among=among,
        keeps=keeps.all_alike,
        zeros=all,
        local=local,
    )


def _divides_alike(
    before: Sequence[tirx.Expr],
    after: Sequence[tirx.Expr],
    old: Sequence[int],
    new: Sequence[int],
    axis: int,
    target: int,
) -> Callable[[int], str]:
    def why_not(workers: int) -> str:
        rows = largest_part(before[axis], workers) * _product(before, old, axis)
        others = largest_part(after[target], workers) * _product(after, new, target)
        if tvm.sym.Analyzer().can_prove_equal(rows, others):
            return ""
        return f"among {workers} ranks axis {target} of the result would be divided elsewhere"

    return why_not


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


RULES: Final = dict.fromkeys(
    ("reshape", "expand_dims", "squeeze", "flatten", "nn.batch_flatten"), reshape
)
