# SPDX-License-Identifier: Apache-2.0
"""Stages that are computed where they are read, instead of being stored.

    b[i] = a[i] + 1         c[i] = (a[i] + 1) * 2
    c[i] = b[i] * 2

A stage stays that is a reduction, a result, or would be computed more often than now although that
takes long; and a reshape that is read backwards, whose indices would be `a[(7 - i) // 4,
(7 - i) % 4]`: where an index falls, TVM's `FlattenBuffer` takes its quotient and remainder for
others when it joins them, and reads beyond the tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import tvm
import tvm_ffi
from tvm import sym, tirx

from tvm_ipc.transform.kernels.functions import FUNCTIONS
from tvm_ipc.transform.kernels.stages import (
    Axis,
    Stage,
    Stages,
    calls_of,
    has_branches,
    key,
    loads,
    operator,
    substitute,
    uses,
)

#: Operators that cost no more than an addition, or are none.
_CHEAP: Final = frozenset(
    (
        *("if_then_else", "likely", "reinterpret", "fabs", "bitwise_and", "bitwise_or"),
        *("bitwise_xor", "bitwise_not", "shift_left", "shift_right", "isnan", "floor", "ceil"),
        *("trunc", "round", "nearbyint", "infinity", "max_value", "min_value"),
    )
)
#: A value of more nodes than this is not repeated.
_MOST_NODES: Final = 256


def inline(stages: Stages) -> list[Stage]:
    """Return the stages that are left."""
    left = list(stages.stages)
    analyzer = sym.Analyzer()
    place = 0
    while place < len(left):
        stage = left[place]
        readers = [
            other
            for other in left[place + 1 :]
            if any(key(load.source) == key(stage.buffer) for load in loads(other.value))
        ]
        goes = _may_go(stage, stages, left[place + 1 :]) and _pays(stage, readers, analyzer)
        values = [_read_through(reader.value, stage) for reader in readers] if goes else []
        if not goes or any(map(_divides_falling_indices, values, readers)):
            place += 1
            continue
        for reader, value in zip(readers, values, strict=True):
            reader.value = value
        del left[place]
    return left


def _may_go(stage: Stage, stages: Stages, later: list[Stage]) -> bool:
    if stage.reduced or key(stage.buffer) not in stages.own:
        return False
    # What is computed for first values is hardly ever read; it stays simple.
    return not any(
        key(load.source) == key(stage.buffer) for other in later for load in loads(other.init)
    )


def _pays(stage: Stage, readers: list[Stage], analyzer: Any) -> bool:
    cheap, nodes = cost(stage.value)
    reads = sum(
        key(load.source) == key(stage.buffer) for reader in readers for load in loads(reader.value)
    )
    if reads > 1 and nodes > _MOST_NODES:
        return False
    if cheap:
        return True
    if reads != 1 or has_branches(readers[0].value) or _in_function(readers[0].value, stage):
        return False
    return bool(analyzer.can_prove_equal(_points(stage), _points(readers[0])))


def cost(value: Any) -> tuple[bool, int]:
    """Whether a value is computed in few operations, and how many nodes it has."""
    nodes, dear = [0], []

    def count(_: Any) -> None:
        nodes[0] += 1

    def call(one: Any) -> None:
        nodes[0] += 1
        if operator(one) not in _CHEAP:
            dear.append(one)

    def division(one: Any) -> None:
        nodes[0] += 1
        if "float" in str(one.ty.dtype):
            dear.append(one)

    tvm_ffi.structural_walk(
        value,
        [
            (tvm.ir.Call, call),
            (tirx.Div, division),
            (tirx.Let, dear.append),
            ((tirx.Add, tirx.Sub, tirx.Mul, tirx.Select, tirx.Cast, tvm.ir.TensorLoad), count),
        ],
    )
    return not dear, nodes[0]


def _in_function(value: Any, stage: Stage) -> bool:
    """Whether a function is computed of a stage that computes one, too: one at a time can be in
    operations of vectors."""
    read = (key(load.source) for call in calls_of(value, FUNCTIONS) for load in loads(call))
    return key(stage.buffer) in read and bool(calls_of(stage.value, FUNCTIONS))


def _points(stage: Stage) -> Any:
    points = tirx.const(1, "int64")
    for axis in (*stage.axes, *stage.reduced):
        points = points * tirx.Cast("int64", axis.extent)
    return points


def _read_through(value: Any, stage: Stage) -> Any:
    wanted = key(stage.buffer)

    def load(one: Any) -> Any:
        if key(one.source) != wanted:
            return one
        indices = {axis.var: index for axis, index in zip(stage.axes, one.indices, strict=True)}
        return substitute(stage.value, indices)

    return tvm_ffi.structural_map(value, (tvm.ir.TensorLoad, load))


def _divides_falling_indices(value: Any, reader: Stage) -> bool:
    """Whether an index is the quotient or the remainder of what falls along an axis."""
    found: list[Any] = []

    def minus(one: Any) -> None:
        if any(uses(one.b, axis.var) for axis in (*reader.axes, *reader.reduced)):
            found.append(one)

    def times(one: Any) -> None:
        if any(isinstance(x, tirx.IntImm) and x.value < 0 for x in (one.a, one.b)):
            found.append(one)

    def divided(one: Any) -> None:
        tvm_ffi.structural_walk(one.a, [(tirx.Sub, minus), (tirx.Mul, times)])

    for load in loads(value):
        for index in load.indices:
            tvm_ffi.structural_walk(index, [((tirx.FloorDiv, tirx.FloorMod), divided)])
    return bool(found)


def simplify_indices(stage: Stage, bounds: list[tuple[Any, Any, Any]]) -> Stage:
    """Return a stage whose indices and conditions know where their variables are.

    A bound is a variable, its least value, and how many it has.
    """
    analyzer = sym.Analyzer()
    for var, least, extent in bounds:
        analyzer.bind(var, tvm.ir.Range.from_min_extent(least, extent))
    return Stage(
        stage.buffer,
        stage.axes,
        stage.reduced,
        simplified(stage.value, analyzer),
        None if stage.init is None else simplified(stage.init, analyzer),
    )


def bounds_of(axes: list[Axis]) -> list[tuple[Any, Any, Any]]:
    """Return where the variables of axes are."""
    return [(axis.var, tirx.const(0, axis.var.ty.dtype), axis.extent) for axis in axes]


def simplified(value: Any, analyzer: Any) -> Any:
    """Return a value with simple indices, and without the branches that are never taken."""

    def load(one: Any) -> Any:
        indices = [analyzer.simplify(index) for index in one.indices]
        return tirx.BufferLoad(one.source, indices)

    def branch(condition: Any, yes: Any, no: Any, other: Callable[[], Any]) -> Any:
        condition = analyzer.simplify(condition)
        if isinstance(condition, tirx.IntImm):
            return yes if bool(condition.value) else no
        return other()

    def call(one: Any) -> Any:
        if operator(one) != "if_then_else":
            return one
        condition, yes, no = one.args
        return branch(condition, yes, no, lambda: one)

    def select(one: Any) -> Any:
        return branch(one.condition, one.true_value, one.false_value, lambda: one)

    return tvm_ffi.structural_map(
        value, [(tvm.ir.TensorLoad, load), (tvm.ir.Call, call), (tirx.Select, select)]
    )
