# SPDX-License-Identifier: Apache-2.0
"""Generation of the loops of a stage in a form that LLVM vectorizes.

The last axis of an elementwise stage becomes the innermost loop, which is split at its branches:

    for i, j in T.grid(128, 64):                        for i in range(128):
        b[i, j] = T.if_then_else(j < 32, x, y)              for j in range(32): b[i, j] = x
                                                            for j in range(32): b[i, 32 + j] = y

LLVM may not change the order of additions. A reduction along contiguous memory is therefore
computed in SIMD lanes. Their sums are added at the end, in an order that depends only on the
extent:

    for k in range(n):          for k in range(n // 64):
        s = s + a[k]                for l in T.vectorized(64): lanes[l] = lanes[l] + a[k * 64 + l]
                                for k in range(n % 64): lanes[0] = lanes[0] + a[n // 64 * 64 + k]
                                ... then 32 lanes are added to 32, 16 to 16, and so on

Another reduction whose last result axis is contiguous in memory becomes a loop over that axis for
each reduced element. Any other reduction computes one result after another.

A branch that does not depend on the reduced axes, and adds zeros on one side, is taken out of the
reduction: elements on that side are not computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Final

import tvm
import tvm_ffi
from tvm import tirx

from tvm_ipc.cpu.kernels.inline_stages import simplified
from tvm_ipc.cpu.kernels.primfunc_stages import (
    Axis,
    Stage,
    has_branches,
    is_integer,
    loads,
    operator,
    reduction,
    substitute,
    uses,
)
from tvm_ipc.cpu.kernels.vector_math import vector_function
from tvm_ipc.cpu.kernels.widen_16bit_floats import widen_bfloat16
from tvm_ipc.tvm_moved_names import Analyzer, detect_linear_equation

#: The neutral element with which lanes are initialized.
_NEUTRAL: Final = {tirx.Add: 0, tirx.Mul: 1}
#: The most pieces into which a loop is split at its branches.
_MAX_PIECES: Final = 4


@dataclass(eq=False)
class LoopBuilder:
    """A builder of the loops of stages, which also collects the buffers that they need."""

    lanes: int  #: the number of float32 in a vector
    buffers: list[Any] = field(default_factory=list)

    def stage(self, stage: Stage, outer: list[Axis], num_outer: int) -> Any:
        """Return the loops of a stage.

        Parameters
        ----------
        stage : the stage.
        outer : the axes of the loops around the result.
        num_outer : the number of axes of the stage that these loops cover.
        """
        axes = stage.axes[num_outer:]
        if not stage.reduced:
            return self._elementwise(stage, axes, outer)
        value = simplified(stage.value, _analyzer(*outer, *axes, *stage.reduced))
        stage = replace(stage, value=value)
        combination = reduction(stage)
        if combination is not None and (guard := _guard(stage, *combination)) is not None:
            return self._guarded(stage, axes, combination[0], guard)
        if combination is not None and self._can_use_lanes(combination[1], stage.reduced[-1]):
            return self._reduce_in_lanes(stage, axes, *combination)
        if (
            axes
            and _is_contiguous_along(value, axes[-1].var)
            and not is_integer(axes[-1].extent, 1)
        ):
            return _reduce_rows(stage, axes)
        return _reduce_elements(stage, axes)

    # ---- elementwise --------------------------------------------------------------------------

    def _elementwise(self, stage: Stage, axes: list[Axis], outer: list[Axis]) -> Any:
        value_of_stage = simplified(stage.value, _analyzer(*outer, *axes))
        if not axes:
            return _store(stage, _vectorize(value_of_stage))
        *outer_axes, last = axes
        pieces = []
        for begin, extent in _split_at_branches(value_of_stage, last):
            piece = Axis(tirx.Var(last.var.name, last.var.ty), extent)
            index = tirx.const(begin, last.var.ty.dtype) + piece.var if begin else piece.var
            value = substitute(value_of_stage, {last.var: index})
            value = _vectorize(simplified(value, _analyzer(*outer, *outer_axes, piece)))
            indices = [*(axis.var for axis in stage.axes[:-1]), index]
            pieces.append(_loop(piece, tirx.BufferStore(stage.buffer, value, indices)))
        return loops(outer_axes, sequence(pieces))

    # ---- reductions ---------------------------------------------------------------------------

    def _guarded(
        self, stage: Stage, axes: list[Axis], combine: Callable[..., Any], guard: Any
    ) -> Any:
        """Return the loops of a reduction that only elements of a condition need."""
        condition, value, _ = guard.args
        own = tirx.BufferLoad(stage.buffer, [axis.var for axis in stage.axes])
        stage = replace(stage, value=combine(own, value))
        if self._can_use_lanes(value, stage.reduced[-1]):
            reduce = self._reduce_in_lanes(stage, [], combine, value)
        else:
            reduce = _reduce_elements(stage, [])
        return loops(axes, tirx.IfThenElse(condition, reduce, _store(stage, stage.init)))

    def _can_use_lanes(self, value: Any, axis: Axis) -> bool:
        """Return whether a value can be computed for several indices of an axis at once."""
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
        return not branches and _is_contiguous_along(value, axis.var)

    def _reduce_in_lanes(
        self, stage: Stage, axes: list[Axis], combine: Callable[..., Any], value: Any
    ) -> Any:
        """Return the loops of a reduction along the last reduced axis in lanes."""
        *outer_axes, last = stage.reduced
        dtype = str(stage.buffer.ty.dtype)
        lanes = self.lanes
        extent = last.extent
        if not isinstance(extent, tirx.IntImm) or int(extent.value) >= 4 * lanes:
            lanes *= 4  # independent sums hide the latency of an addition
        name = f"{stage.buffer.name}_lanes"
        memory = tirx.decl_buffer((lanes,), dtype, name=name, layout=None)
        self.buffers.append(memory)
        index_dtype = last.var.ty.dtype
        lane_count = tirx.const(lanes, index_dtype)
        block = Axis(tirx.Var(last.var.name, last.var.ty), _quotient(extent, lanes))
        neutral = _NEUTRAL.get(combine)
        initial = stage.init if neutral is None else tirx.const(neutral, dtype)

        vectorized = _vectorize(value)

        def lane_loop(count: int, value_of: Callable[[Any], Any]) -> Any:
            lane = tirx.Var("lane", tvm.ir.PrimType("int32"))
            begin, end = tirx.const(0, "int32"), tirx.const(count, "int32")
            store = tirx.BufferStore(memory, value_of(lane), [lane])
            return tirx.For(lane, begin, end, tirx.ForKind.VECTORIZED, store)

        def load_lane(index: Any) -> Any:
            return tirx.BufferLoad(memory, [index])

        def combine_block(lane: Any) -> Any:
            index = block.var * lane_count + tirx.Cast(index_dtype, lane)
            return combine(load_lane(lane), substitute(vectorized, {last.var: index}))

        in_lanes = [_loop(block, lane_loop(lanes, combine_block))]
        in_lanes += self._tail(stage, combine, vectorized, memory, lanes)
        steps = [lane_loop(lanes, lambda _: initial), loops(outer_axes, sequence(in_lanes))]
        half = lanes // 2
        while half > 1:
            offset = tirx.const(half, "int32")

            def combine_halves(lane: Any, offset: Any = offset) -> Any:
                return combine(load_lane(lane), load_lane(lane + offset))

            steps.append(lane_loop(half, combine_halves))
            half //= 2
        zero, one = tirx.const(0, "int32"), tirx.const(1, "int32")
        result = combine(load_lane(zero), load_lane(one))
        if neutral is not None and not _is_zero(stage.init):
            result = combine(stage.init, result)
        steps.append(_store(stage, result))
        return loops(axes, sequence(steps))

    def _tail(
        self, stage: Stage, combine: Callable[..., Any], value: Any, memory: Any, lanes: int
    ) -> list[Any]:
        """Return the loop over the elements that do not fill all lanes, if there are any."""
        last = stage.reduced[-1]
        extent, index_dtype = last.extent, last.var.ty.dtype
        remainder = _remainder(extent, lanes)
        if is_integer(remainder, 0):
            return []
        var = tirx.Var(last.var.name, last.var.ty)
        begin = _quotient(extent, lanes) * tirx.const(lanes, index_dtype)
        zero = tirx.const(0, "int32")
        element = substitute(value, {last.var: begin + var})
        result = combine(tirx.BufferLoad(memory, [zero]), element)
        return [_loop(Axis(var, remainder), tirx.BufferStore(memory, result, [zero]))]


def _guard(stage: Stage, combine: Callable[..., Any], value: Any) -> Any | None:
    """Return the branch that a reduced value consists of, if it can be taken out of the reduction.

    Its condition does not depend on the reduced axes, and its other side is the neutral element.
    """
    if not isinstance(value, tvm.ir.Call) or operator(value) != "if_then_else":
        return None
    condition, _, other = value.args
    if any(uses(condition, axis.var) for axis in stage.reduced):
        return None
    neutral = _NEUTRAL.get(combine)
    return value if neutral is not None and _equals(other, neutral) else None


def _equals(value: Any, number: int) -> bool:
    """Return whether an expression is a constant with the value of a number."""
    return isinstance(value, (tirx.IntImm, tirx.FloatImm)) and float(value.value) == number


def _reduce_rows(stage: Stage, axes: list[Axis]) -> Any:
    """Return a loop over the last axis for each reduced element."""
    last = axes[-1]
    initialize = _loop(last, _store(stage, stage.init))
    var = tirx.Var(last.var.name, last.var.ty)
    update = substitute(_store(stage, _vectorize(stage.value)), {last.var: var})
    step = loops(stage.reduced, _loop(Axis(var, last.extent), update))
    return loops(axes[:-1], sequence([initialize, step]))


def _reduce_elements(stage: Stage, axes: list[Axis]) -> Any:
    """Return loops that compute one result after another."""
    step = loops(stage.reduced, _store(stage, _vectorize(stage.value)))
    return loops(axes, sequence([_store(stage, stage.init), step]))


def _is_contiguous_along(value: Any, var: Any) -> bool:
    """Return whether every load is contiguous in a variable or independent of it.

    At least one load must depend on the variable.
    """
    contiguous = False
    for load in loads(value):
        *outer_indices, last = load.indices or [None]
        if last is None or not any(uses(index, var) for index in load.indices):
            continue
        if any(uses(index, var) for index in outer_indices):
            return False
        linear = detect_linear_equation(last, [var])
        if len(linear) != 2 or not isinstance(linear[0], tirx.IntImm) or int(linear[0].value) != 1:
            return False
        contiguous = True
    return contiguous


def _is_vector(call: Any) -> bool:
    return operator(call) in _VECTOR_CALLS


_VECTOR_CALLS: Final = frozenset(
    (
        *("exp", "sigmoid", "tanh", "erf", "sqrt", "fabs", "floor", "ceil", "reinterpret"),
        *("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "shift_left", "shift_right"),
    )
)


def _vectorize(value: Any) -> Any:
    """Return an expression with functions expanded to vector operations.

    An expression with branches is not expanded, since a branch may guard a load that is out of
    bounds.
    """
    branches = has_branches(value)
    if not branches:
        value = tvm_ffi.structural_map(value, (tvm.ir.Call, vector_function))
    value = widen_bfloat16(value)
    return value if branches else _hoist_lets(value)


def _hoist_lets(value: Any) -> Any:
    """Return an expression with its `Let` expressions moved outward and not nested in values."""
    lets: list[tuple[Any, Any]] = []

    def remove_lets(node: Any) -> Any:
        return tvm_ffi.structural_map(node, (tirx.Let, collect), order="pre")

    def collect(node: Any) -> Any:
        while isinstance(node, tirx.Let):
            bound = remove_lets(node.value)
            lets.append((node.var, bound))
            node = node.body
        return node

    value = remove_lets(value)
    for var, bound in reversed(lets):
        value = tirx.Let(var, bound, value)
    return value


def _split_at_branches(value: Any, axis: Axis) -> list[tuple[int, Any]]:
    """Return begin and extent of the pieces of an axis in which every condition is constant."""
    if not isinstance(axis.extent, tirx.IntImm):
        return [(0, axis.extent)]
    extent = int(axis.extent.value)
    boundaries: set[int] = set()

    def compare(comparison: Any) -> None:
        sides = (comparison.a, comparison.b)
        for side, other, reversed_order in ((sides[0], sides[1], 0), (sides[1], sides[0], 1)):
            if (
                isinstance(side, tvm.ir.Var)
                and side.same_as(axis.var)
                and isinstance(other, tirx.IntImm)
            ):
                strict = isinstance(comparison, tirx.LT | tirx.GE)
                # v < c and v >= c change at c; v <= c and v > c change at c + 1. It is the reverse
                # if the variable is on the right.
                boundary = int(other.value) + (0 if strict != bool(reversed_order) else 1)
                if 0 < boundary < extent:
                    boundaries.add(boundary)

    tvm_ffi.structural_walk(value, [((tirx.LT, tirx.LE, tirx.GT, tirx.GE), compare)])
    if len(boundaries) >= _MAX_PIECES:
        boundaries = set()
    ends = [0, *sorted(boundaries), extent]
    return [(begin, tirx.const(end - begin, axis.var.ty.dtype)) for begin, end in pairwise(ends)]


def _analyzer(*axes: Axis) -> Any:
    """Return an analyzer that knows the range of the variable of each axis."""
    analyzer = Analyzer()
    for axis in axes:
        zero = tirx.const(0, axis.var.ty.dtype)
        analyzer.bind(axis.var, tvm.ir.Range.from_min_extent(zero, axis.extent))
    return analyzer


def _store(stage: Stage, value: Any) -> Any:
    return tirx.BufferStore(stage.buffer, value, [axis.var for axis in stage.axes])


def _loop(axis: Axis, body: Any) -> Any:
    zero = tirx.const(0, axis.var.ty.dtype)
    return tirx.For(axis.var, zero, axis.extent, tirx.ForKind.SERIAL, body)


def loops(axes: list[Axis], body: Any) -> Any:
    """Return serial loops over axes around a statement, the first axis outermost."""
    for axis in reversed(axes):
        body = _loop(axis, body)
    return body


def sequence(statements: list[Any]) -> Any:
    """Return statements, at least one, as one statement."""
    return statements[0] if len(statements) == 1 else tirx.SeqStmt(statements)


def _quotient(extent: Any, lanes: int) -> Any:
    return tirx.floordiv(extent, tirx.const(lanes, extent.ty.dtype))


def _remainder(extent: Any, lanes: int) -> Any:
    return tirx.floormod(extent, tirx.const(lanes, extent.ty.dtype))


def _is_zero(value: Any) -> bool:
    return isinstance(value, tirx.IntImm | tirx.FloatImm) and value.value == 0
