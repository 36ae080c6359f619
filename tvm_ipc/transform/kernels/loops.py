# SPDX-License-Identifier: Apache-2.0
"""The loops of a stage, so that a code generator finds vectors in them.

An elementwise stage has its last axis innermost, in as many pieces as it has branches, and LLVM
makes vectors of it:

    for i, j in T.grid(128, 64):                        for i in range(128):
        b[i, j] = T.if_then_else(j < 32, x, y)              for j in range(32): b[i, j] = x
                                                            for j in range(32): b[i, 32 + j] = y

LLVM may not change the order of additions. So a reduction along memory is done in lanes, whose sums
are added at the end, in an order that depends on the extent alone:

    for k in range(n):          for k in range(n // 64):
        s = s + a[k]                for l in T.vectorized(64): lanes[l] = lanes[l] + a[k * 64 + l]
                                for k in range(n % 64): lanes[0] = lanes[0] + a[n // 64 * 64 + k]
                                ... then 32 of them are added to 32, 16 to 16, and so on

Any other reduction whose last axis of results goes along memory is one loop over it for each
reduced element; what is left has a sum of its own for each result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Final

import tvm
import tvm_ffi
from tvm import sym, tirx

from tvm_ipc.transform.kernels.functions import vector_function
from tvm_ipc.transform.kernels.inline import bounds_of, simplified
from tvm_ipc.transform.kernels.stages import (
    Axis,
    Stage,
    has_branches,
    loads,
    operator,
    reduction,
    substitute,
    uses,
)
from tvm_ipc.transform.kernels.widths import without_bfloat16

#: What a reduction begins with where it has lanes.
_NEUTRAL: Final = {tirx.Add: 0, tirx.Mul: 1}
#: The most pieces that a loop is cut into at the branches in it.
_MOST_PIECES: Final = 4


@dataclass
class Nests:
    """Loops are made one after the other; what memory they need is collected."""

    lanes: int  #: of float32, which a reduction adds at once
    buffers: list[Any] = field(default_factory=list)

    def stage(self, stage: Stage, outer: list[Axis], rest: int) -> Any:
        """Return the loops over the axes from `rest` on; those of `outer` are around them."""
        around = bounds_of(outer)
        axes = stage.axes[rest:]
        if not stage.reduced:
            return self._elementwise(stage, axes, around)
        analyzer = _analyzer(around, [*axes, *stage.reduced])
        value = simplified(stage.value, analyzer)
        stage = Stage(stage.buffer, stage.axes, stage.reduced, value, stage.init)
        parts = reduction(stage)
        if parts is not None and self._in_lanes(parts[1], stage.reduced[-1]):
            return self._with_lanes(stage, axes, *parts)
        if axes and _along(value, axes[-1].var) and not _is_one(axes[-1].extent):
            return _row_by_row(stage, axes)
        return _one_by_one(stage, axes)

    # ---- elementwise --------------------------------------------------------------------------

    def _elementwise(self, stage: Stage, axes: list[Axis], around: list[Any]) -> Any:
        simple = simplified(stage.value, _analyzer(around, axes))
        if not axes:
            return _store(stage, _vectorizable(simple))
        *others, last = axes
        pieces = []
        for begin, extent in _pieces(simple, last):
            piece = Axis(tirx.Var(last.var.name, last.var.ty), extent)
            place = tirx.const(begin, last.var.ty.dtype) + piece.var if begin else piece.var
            value = substitute(simple, {last.var: place})
            value = _vectorizable(simplified(value, _analyzer(around, [*others, piece])))
            indices = [*(axis.var for axis in stage.axes[:-1]), place]
            pieces.append(_loop(piece, tirx.BufferStore(stage.buffer, value, indices)))
        return _loops(others, _sequence(pieces))

    # ---- reductions ---------------------------------------------------------------------------

    def _in_lanes(self, value: Any, axis: Axis) -> bool:
        """Whether a value can be computed for many places of an axis at once."""
        if isinstance(axis.extent, tirx.IntImm) and int(axis.extent.value) < self.lanes:
            return False
        branches: list[Any] = []
        tvm_ffi.structural_walk(
            value,
            [
                (tvm.ir.Call, lambda call: branches.append(call) if not _is_vector(call) else None),
                (tirx.Let, branches.append),
            ],
        )
        return not branches and _along(value, axis.var)

    def _with_lanes(
        self, stage: Stage, axes: list[Axis], combine: Callable[..., Any], value: Any
    ) -> Any:
        *others, last = stage.reduced
        dtype = str(stage.buffer.ty.dtype)
        lanes = self.lanes
        extent = last.extent
        if not isinstance(extent, tirx.IntImm) or int(extent.value) >= 4 * lanes:
            lanes *= 4  # several sums at once, so that none waits for another
        name = f"{stage.buffer.name}_lanes"
        memory = tirx.decl_buffer((lanes,), dtype, name=name, layout=None)
        self.buffers.append(memory)
        index = last.var.ty.dtype
        many = tirx.const(lanes, index)
        neutral = _NEUTRAL.get(combine)
        first = stage.init if neutral is None else tirx.const(neutral, dtype)

        def lane(count: int, store: Callable[[Any], tuple[Any, Any]]) -> Any:
            var = tirx.Var("lane", tvm.ir.PrimType("int32"))
            place, result = store(var)
            body = tirx.BufferStore(memory, result, [place])
            return tirx.For(
                var,
                tirx.const(0, "int32"),
                tirx.const(count, "int32"),
                tirx.ForKind.VECTORIZED,
                body,
            )

        def at(place: Any) -> Any:
            return tirx.BufferLoad(memory, [place])

        whole = tirx.Var(last.var.name, last.var.ty)
        values = _vectorizable(value)

        def with_place(place: Any) -> Any:
            return tvm_ffi.structural_map(
                values, (tvm.ir.Var, lambda one: place if one.same_as(last.var) else one)
            )

        steps = [
            lane(lanes, lambda var: (var, first)),
            _loops(
                others,
                _sequence(
                    [
                        _loop(
                            Axis(whole, _quotient(extent, lanes)),
                            lane(
                                lanes,
                                lambda var: (
                                    var,
                                    combine(
                                        at(var),
                                        with_place(whole * many + tirx.Cast(index, var)),
                                    ),
                                ),
                            ),
                        ),
                        *self._tail(stage, combine, with_place, memory, lanes),
                    ]
                ),
            ),
        ]
        half = lanes // 2
        while half > 1:
            upper = tirx.const(half, "int32")
            steps.append(lane(half, partial(_folded, combine, at, upper)))
            half //= 2
        zero, one = tirx.const(0, "int32"), tirx.const(1, "int32")
        result = combine(at(zero), at(one))
        if neutral is not None and not _is_zero(stage.init):
            result = combine(stage.init, result)
        steps.append(_store(stage, result))
        return _loops(axes, _sequence(steps))

    def _tail(
        self, stage: Stage, combine: Callable[..., Any], with_place: Any, memory: Any, lanes: int
    ) -> list[Any]:
        last = stage.reduced[-1]
        extent, index = last.extent, last.var.ty.dtype
        left = _remainder(extent, lanes)
        if isinstance(left, tirx.IntImm) and int(left.value) == 0:
            return []
        var = tirx.Var(last.var.name, last.var.ty)
        begin = _quotient(extent, lanes) * tirx.const(lanes, index)
        zero = tirx.const(0, "int32")
        value = combine(tirx.BufferLoad(memory, [zero]), with_place(begin + var))
        return [_loop(Axis(var, left), tirx.BufferStore(memory, value, [zero]))]


def _folded(combine: Callable[..., Any], at: Any, upper: Any, var: Any) -> tuple[Any, Any]:
    """Return where one half of the lanes is combined with the other, and how."""
    return var, combine(at(var), at(var + upper))


def _row_by_row(stage: Stage, axes: list[Axis]) -> Any:
    """One loop over the last axis for each reduced element."""
    last = axes[-1]
    begin = _loop(last, _store(stage, stage.init))
    var = tirx.Var(last.var.name, last.var.ty)
    store = _store(stage, _vectorizable(stage.value))
    again = tvm_ffi.structural_map(
        store, (tvm.ir.Var, lambda one: var if one.same_as(last.var) else one)
    )
    step = _loops(stage.reduced, _loop(Axis(var, last.extent), again))
    return _loops(axes[:-1], _sequence([begin, step]))


def _one_by_one(stage: Stage, axes: list[Axis]) -> Any:
    step = _loops(stage.reduced, _store(stage, _vectorizable(stage.value)))
    return _loops(axes, _sequence([_store(stage, stage.init), step]))


def _along(value: Any, var: Any) -> bool:
    """Whether every element that is read is the next one with the next value of a variable, or the
    same, and one is the next."""
    found = False
    for load in loads(value):
        *others, last = load.indices or [None]
        if last is None or not any(uses(index, var) for index in load.indices):
            continue
        if any(uses(index, var) for index in others):
            return False
        linear = sym.detect_linear_equation(last, [var])
        if len(linear) != 2 or not isinstance(linear[0], tirx.IntImm) or int(linear[0].value) != 1:
            return False
        found = True
    return found


def _is_vector(call: Any) -> bool:
    return operator(call) in _VECTOR_CALLS


_VECTOR_CALLS: Final = frozenset(
    (
        *("exp", "sigmoid", "tanh", "erf", "sqrt", "fabs", "floor", "ceil", "reinterpret"),
        *("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "shift_left", "shift_right"),
    )
)


def _vectorizable(value: Any) -> Any:
    """Return an expression in operations of vectors.

    What is in a branch that may not be taken stays: it might read what is not there.
    """
    branches = has_branches(value)
    if not branches:
        value = tvm_ffi.structural_map(value, (tvm.ir.Call, vector_function))
    value = without_bfloat16(value)
    return value if branches else _hoisted(value)


def _hoisted(value: Any) -> Any:
    """Return an expression whose `Let`s are around it, of which none is in the value of another."""
    lets: list[tuple[Any, Any]] = []

    def without(one: Any) -> Any:
        return tvm_ffi.structural_map(one, (tirx.Let, let), order="pre")

    def let(one: Any) -> Any:
        while isinstance(one, tirx.Let):
            bound = without(one.value)
            lets.append((one.var, bound))
            one = one.body
        return one

    value = without(value)
    for var, bound in reversed(lets):
        value = tirx.Let(var, bound, value)
    return value


def _pieces(value: Any, axis: Axis) -> list[tuple[int, Any]]:
    """Return where the pieces of an axis begin, in each of which its branches go one way, and how
    many elements each has."""
    if not isinstance(axis.extent, tirx.IntImm):
        return [(0, axis.extent)]
    extent = int(axis.extent.value)
    places: set[int] = set()

    def compare(one: Any) -> None:
        sides = (one.a, one.b)
        for side, other, more in ((sides[0], sides[1], 0), (sides[1], sides[0], 1)):
            if (
                isinstance(side, tvm.ir.Var)
                and side.same_as(axis.var)
                and isinstance(other, tirx.IntImm)
            ):
                strict = isinstance(one, tirx.LT | tirx.GE)
                # v < c and v >= c change at c; v <= c and v > c at c + 1; the other way round if
                # the variable is on the right.
                place = int(other.value) + (0 if strict != bool(more) else 1)
                if 0 < place < extent:
                    places.add(place)

    tvm_ffi.structural_walk(value, [((tirx.LT, tirx.LE, tirx.GT, tirx.GE), compare)])
    if len(places) >= _MOST_PIECES:
        places = set()
    ends = [0, *sorted(places), extent]
    return [(begin, tirx.const(end - begin, axis.var.ty.dtype)) for begin, end in pairwise(ends)]


def _analyzer(around: list[Any], axes: list[Axis]) -> Any:
    analyzer = sym.Analyzer()
    for var, least, extent in (*around, *bounds_of(axes)):
        analyzer.bind(var, tvm.ir.Range.from_min_extent(least, extent))
    return analyzer


def _store(stage: Stage, value: Any) -> Any:
    return tirx.BufferStore(stage.buffer, value, [axis.var for axis in stage.axes])


def _loop(axis: Axis, body: Any) -> Any:
    zero = tirx.const(0, axis.var.ty.dtype)
    return tirx.For(axis.var, zero, axis.extent, tirx.ForKind.SERIAL, body)


def _loops(axes: list[Axis], body: Any) -> Any:
    for axis in reversed(axes):
        body = _loop(axis, body)
    return body


def _sequence(statements: list[Any]) -> Any:
    return statements[0] if len(statements) == 1 else tirx.SeqStmt(statements)


def _quotient(extent: Any, lanes: int) -> Any:
    if isinstance(extent, tirx.IntImm):
        return tirx.const(int(extent.value) // lanes, extent.ty.dtype)
    return tirx.floordiv(extent, tirx.const(lanes, extent.ty.dtype))


def _remainder(extent: Any, lanes: int) -> Any:
    if isinstance(extent, tirx.IntImm):
        return tirx.const(int(extent.value) % lanes, extent.ty.dtype)
    return tirx.floormod(extent, tirx.const(lanes, extent.ty.dtype))


def _is_one(extent: Any) -> bool:
    return isinstance(extent, tirx.IntImm) and int(extent.value) == 1


def _is_zero(value: Any) -> bool:
    return isinstance(value, tirx.IntImm | tirx.FloatImm) and value.value == 0
