# SPDX-License-Identifier: Apache-2.0
"""Which axes stay divided when a tensor is reshaped.

The axes before and after are taken in groups of equal product. Within a group an axis that is
divided must be the first one that is longer than 1, before and after: a rank's part lies in one
piece then, and is the same piece afterwards, if the parts have as many elements.

    (b, 12, 64) -> (b, 4, 3, 64)        groups b | 12 -> 4, 3 | 64; 12 and 4 can be divided

Where extents are known, other divisions go through too: what is outside of a divided axis and what
is inside of it become factors, or are taken from them.

    (b, 10, 64) -> (b, 640)             10 heads among 4 ranks, 3 at most, are 10/4x64 of 640
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from math import prod
from operator import mul
from typing import Final

import tvm
from tvm import relax, tirx

from tvm_ipc.comm import Division, Placement, Shard
from tvm_ipc.comm.extents import constant, largest_part
from tvm_ipc.comm.legalize import reshaped
from tvm_ipc.transform.rules import keeps
from tvm_ipc.transform.rules.operation import Operation
from tvm_ipc.transform.rules.rule import Part, Rule, shard

#: Axes before, and the axes after that have as many elements.
Group = tuple[list[int], list[int]]


def reshape(op: Operation) -> Rule:
    """Return the rule of a reshape: each group of axes has one label."""
    before, after = op.dims(), op.made()
    labels = list(range(len(before)))
    made: list[int] = [len(before) + axis for axis in range(len(after))]  # of no operand
    whole: dict[int, str] = {}
    among: dict[int, Callable[[int], str]] = {}
    groups = groups_of(before, after)
    for old, new in groups:
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

    def carry(label: int, division: Division | None, workers: int) -> list[Placement] | str:
        if division is None:
            why_not = whole.get(label) or among[label](workers)
            if not why_not:
                return [Shard(made.index(label))]
        else:
            why_not = f"its parts, {division}, are none of the result's axes"
        extent = constant(before[label])
        if division is None and extent:
            division = Division.plain(extent, workers)
        found = division and _through(division, before, after, groups, label)
        return [shard(*found, workers)] if found else why_not

    def local(part: Part) -> relax.Expr:
        return reshaped(part.builder, part.call.args[0], part.results[0])

    return Rule(
        (tuple(labels),),
        (tuple(made),),
        whole=whole,
        among=among,
        carry=carry,
        keeps=keeps.all_alike,
        zeros=all,
        local=local,
    )


def _through(
    division: Division,
    before: Sequence[tirx.Expr],
    after: Sequence[tirx.Expr],
    groups: Sequence[Group],
    label: int,
) -> tuple[int, Division] | None:
    """Return which axis of the result is divided, and how; None if that is none."""
    old, new = next((old, new) for old, new in groups if label in old)
    was = [constant(before[axis]) or 0 for axis in old]
    made = [constant(after[axis]) or 0 for axis in new]
    if 0 in was or 0 in made:  # or not known
        return None
    place = old.index(label)
    flat = division.times(prod(was[place + 1 :])).within(prod(was[:place]))
    for place, axis in enumerate(new):
        rest = flat.over(prod(made[place + 1 :]))
        found = rest and rest.under(prod(made[:place]))
        if found and found.extent == made[place]:
            return axis, found
    return None


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


def groups_of(before: Sequence[tirx.Expr], after: Sequence[tirx.Expr]) -> list[Group]:
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
