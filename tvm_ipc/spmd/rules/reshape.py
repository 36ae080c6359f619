# SPDX-License-Identifier: Apache-2.0
"""Sharding rules of reshapes: which axes stay sharded.

The axes before and after are matched in groups of equal product. In a group the sharded axis must
be the first one longer than 1, both before and after. A shard is then contiguous in the group, and
is the same block of elements after the reshape if the shards have equally many elements.

    (b, 12, 64) -> (b, 4, 3, 64)        groups b | 12 -> 4, 3 | 64; 12 and 4 can be sharded

If extents are constants, other divisions are kept too. The axes outside and inside of the sharded
one become factors of the division, or are removed from it.

    (b, 10, 64) -> (b, 640)             10 heads on 4 ranks, at most 3 each, are 10/4x64 of 640
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce
from math import prod
from operator import mul
from typing import Final

from tvm import relax, tirx

from tvm_ipc.comm import Division, Placement, Shard
from tvm_ipc.comm.extent_arithmetic import constant, largest_shard
from tvm_ipc.comm.legalize import reshaped
from tvm_ipc.spmd.rules.axis_label_rule import MOVES, Choice, LocalCall, Rule, shard
from tvm_ipc.spmd.rules.operation import Operation, tensors_among
from tvm_ipc.tvm_moved_names import Analyzer

#: Axes before a reshape, and the axes after it that have the same product.
Group = tuple[list[int], list[int]]


def reshape(op: Operation) -> Rule:
    """Return the rule of a reshape, in which each group of axes shares one label."""
    before, after = op.dims(), op.result_dims()
    result_labels: list[int] = [len(before) + axis for axis in range(len(after))]
    whole: dict[int, str] = {}
    divisibility: dict[int, Callable[[int], str]] = {}
    groups = groups_of(before, after)
    for old, new in groups:
        first, target = _first(before, old), _first(after, new)
        if first is None and target is None and old and new:  # all are 1 long
            first, target = old[0], new[0]
        for axis in old:
            if target is None or first is None:
                whole[axis] = "that axis is no axis of the result"
            elif axis != first:
                whole[axis] = f"that axis becomes an inner part of axis {target} of the result"
            else:
                result_labels[target] = axis
                divisibility[axis] = _equal_shards(before, after, old, new, axis, target)

    def propagate(label: int, division: Division | None, workers: int) -> list[Placement] | str:
        if division is None:
            why_not = whole.get(label) or divisibility[label](workers)
            if not why_not:
                return [Shard(result_labels.index(label))]
        else:
            why_not = f"its shards, {division}, are no shards of an axis of the result"
        extent = constant(before[label])
        if division is None and extent:
            division = Division.plain(extent, workers)
        kept = division and _reshape_division(division, before, after, groups, label)
        return [shard(*kept, workers)] if kept else why_not

    def origin(_: int, placement: Shard, workers: int) -> Choice:
        label = result_labels[placement.axis]
        if (
            placement.division is None
            and label in divisibility
            and not divisibility[label](workers)
        ):
            return label, None
        extent = constant(after[placement.axis])
        division = placement.division or (Division.plain(extent, workers) if extent else None)
        inverse = [(new, old) for old, new in groups]
        source = division and _reshape_division(division, after, before, inverse, placement.axis)
        if not source:
            return None
        axis, of_axis = source
        return axis, shard(axis, of_axis, workers).division

    def local(local_call: LocalCall) -> relax.Expr:
        return reshaped(local_call.builder, local_call.call.args[0], local_call.results[0])

    return Rule(
        (op.labels,),
        (tuple(result_labels),),
        whole=whole,
        divisibility=divisibility,
        propagate={label: partial(propagate, label) for label in op.labels},
        origin=origin,
        local=local,
        **MOVES,
    )


def reshape_by_function(op: Operation) -> Rule:
    """Return the rule of `call_tir` of a function that reshapes its operand."""

    def local(local_call: LocalCall) -> relax.Expr:
        (tensor,) = tensors_among(local_call.call.args[1:])
        return reshaped(local_call.builder, tensor, local_call.results[0])

    return replace(reshape(op), local=local)


def _reshape_division(
    division: Division,
    before: Sequence[tirx.Expr],
    after: Sequence[tirx.Expr],
    groups: Sequence[Group],
    label: int,
) -> tuple[int, Division] | None:
    """Return the axis of the result that is sharded and its division, or None for no axis."""
    old, new = next((old, new) for old, new in groups if label in old)
    old_extents = [constant(before[axis]) or 0 for axis in old]
    new_extents = [constant(after[axis]) or 0 for axis in new]
    if 0 in old_extents or 0 in new_extents:  # empty, or symbolic
        return None
    position = old.index(label)
    flat = division.times(prod(old_extents[position + 1 :])).within(prod(old_extents[:position]))
    for position, axis in enumerate(new):
        outer = flat.over(prod(new_extents[position + 1 :]))
        reshaped_division = outer and outer.under(prod(new_extents[:position]))
        if reshaped_division and reshaped_division.extent == new_extents[position]:
            return axis, reshaped_division
    return None


def _equal_shards(
    before: Sequence[tirx.Expr],
    after: Sequence[tirx.Expr],
    old: Sequence[int],
    new: Sequence[int],
    axis: int,
    target: int,
) -> Callable[[int], str]:
    """Return the condition that shards before and after a reshape have the same elements."""

    def why_not(workers: int) -> str:
        shard_before = largest_shard(before[axis], workers) * _product(before, old, axis)
        shard_after = largest_shard(after[target], workers) * _product(after, new, target)
        if Analyzer().can_prove_equal(shard_before, shard_after):
            return ""
        return f"on {workers} ranks the shards of axis {target} of the result have other elements"

    return why_not


def groups_of(before: Sequence[tirx.Expr], after: Sequence[tirx.Expr]) -> list[Group]:
    """Return the smallest groups of axes with equal products, in order."""
    analyzer = Analyzer()
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
