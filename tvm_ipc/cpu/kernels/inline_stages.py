# SPDX-License-Identifier: Apache-2.0
"""Inlining of stages into the stages that read them.

    b[i] = a[i] + 1         c[i] = (a[i] + 1) * 2
    c[i] = b[i] * 2

A stage is not inlined if it is a reduction or a result, or if it is expensive and would be computed
more often. A reshape that is read backwards is not inlined either. Its indices would be
`a[(7 - i) // 4, (7 - i) % 4]`, and TVM's `FlattenBuffer` merges quotient and remainder of a
decreasing index wrongly, so that the kernel would read beyond the tensor.

If results have to be reproducible, they must not depend on what is inlined. Then a stage is not
inlined if it computes a 16-bit type, which is rounded when it is stored; nor into a reduction,
whose order depends on its value; nor where it would keep a function from being expanded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import tvm
import tvm_ffi
from tvm import tirx

from tvm_ipc.cpu.kernels.primfunc_stages import (
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
from tvm_ipc.cpu.kernels.vector_math import FUNCTIONS
from tvm_ipc.cpu.kernels.widen_16bit_floats import NARROW
from tvm_ipc.tvm_moved_names import Analyzer, TensorLoad

#: Calls that cost at most as much as an addition.
_CHEAP: Final = frozenset(
    (
        *("if_then_else", "likely", "reinterpret", "fabs", "bitwise_and", "bitwise_or"),
        *("bitwise_xor", "bitwise_not", "shift_left", "shift_right", "isnan", "floor", "ceil"),
        *("trunc", "round", "nearbyint", "infinity", "max_value", "min_value"),
    )
)
#: A value of more nodes than this is not repeated.
_MAX_NODES: Final = 256


def inline(stages: Stages, *, reproducible: bool = False) -> list[Stage]:
    """Return the remaining stages, with the others inlined into them."""
    remaining = list(stages.stages)
    analyzer = Analyzer()
    index = 0
    while index < len(remaining):
        stage = remaining[index]
        readers = [
            later
            for later in remaining[index + 1 :]
            if any(key(load.source) == key(stage.buffer) for load in loads(later.value))
        ]
        inlines = _can_be_inlined(stage, stages, remaining[index + 1 :]) and _is_worth_inlining(
            stage, readers, analyzer
        )
        inlines = inlines and not (reproducible and any(_changes_bits(r, stage) for r in readers))
        values = [_substitute_loads(reader.value, stage) for reader in readers] if inlines else []
        if not inlines or any(map(_divides_decreasing_index, values, readers)):
            index += 1
            continue
        for reader, value in zip(readers, values, strict=True):
            reader.value = value
        del remaining[index]
    return remaining


def _changes_bits(reader: Stage, stage: Stage) -> bool:
    """Return whether the bits of a reader depend on whether a stage is inlined into it."""
    is_rounded = str(stage.buffer.ty.dtype) in NARROW and not _is_move(stage.value)
    keeps_function = has_branches(stage.value) and bool(calls_of(reader.value, FUNCTIONS))
    return bool(is_rounded or reader.reduced or keeps_function)


def _is_move(value: Any) -> bool:
    """Return whether a value is an element of another tensor, or a constant."""
    if isinstance(value, tvm.ir.Call) and operator(value) == "if_then_else":
        return all(map(_is_move, value.args[1:]))
    return isinstance(value, TensorLoad | tirx.FloatImm)


def _can_be_inlined(stage: Stage, stages: Stages, later: list[Stage]) -> bool:
    if stage.reduced or key(stage.buffer) not in stages.own:
        return False
    # Initial values of reductions rarely read other stages; they are kept simple.
    return not any(
        key(load.source) == key(stage.buffer)
        for stage_after in later
        for load in loads(stage_after.init)
    )


def _is_worth_inlining(stage: Stage, readers: list[Stage], analyzer: Any) -> bool:
    cheap, nodes = cost(stage.value)
    reads = sum(
        key(load.source) == key(stage.buffer) for reader in readers for load in loads(reader.value)
    )
    if reads > 1 and nodes > _MAX_NODES:
        return False
    if cheap:
        return True
    if reads != 1 or has_branches(readers[0].value) or _nests_functions(readers[0].value, stage):
        return False
    return bool(analyzer.can_prove_equal(_num_points(stage), _num_points(readers[0])))


def cost(value: Any) -> tuple[bool, int]:
    """Return whether a value is cheap to compute, and the number of its nodes."""
    nodes, expensive = [0], []

    def count(_: Any) -> None:
        nodes[0] += 1

    def call(node: Any) -> None:
        nodes[0] += 1
        if operator(node) not in _CHEAP:
            expensive.append(node)

    def division(node: Any) -> None:
        nodes[0] += 1
        if "float" in str(node.ty.dtype):
            expensive.append(node)

    tvm_ffi.structural_walk(
        value,
        [
            (tvm.ir.Call, call),
            (tirx.Div, division),
            (tirx.Let, expensive.append),
            ((tirx.Add, tirx.Sub, tirx.Mul, tirx.Select, tirx.Cast, TensorLoad), count),
        ],
    )
    return not expensive, nodes[0]


def _nests_functions(value: Any, stage: Stage) -> bool:
    """Return whether inlining would nest function calls, of which only one can be expanded."""
    read = (key(load.source) for call in calls_of(value, FUNCTIONS) for load in loads(call))
    return key(stage.buffer) in read and bool(calls_of(stage.value, FUNCTIONS))


def _num_points(stage: Stage) -> Any:
    points = tirx.const(1, "int64")
    for axis in (*stage.axes, *stage.reduced):
        points = points * tirx.Cast("int64", axis.extent)
    return points


def _substitute_loads(value: Any, stage: Stage) -> Any:
    source = key(stage.buffer)

    def load(node: Any) -> Any:
        if key(node.source) != source:
            return node
        indices = {axis.var: index for axis, index in zip(stage.axes, node.indices, strict=True)}
        return substitute(stage.value, indices)

    return tvm_ffi.structural_map(value, (TensorLoad, load))


def _divides_decreasing_index(value: Any, reader: Stage) -> bool:
    """Return whether an index is the quotient or remainder of a decreasing function of an axis."""
    decreasing: list[Any] = []

    def check_subtraction(node: Any) -> None:
        if any(uses(node.b, axis.var) for axis in (*reader.axes, *reader.reduced)):
            decreasing.append(node)

    def check_product(node: Any) -> None:
        if any(isinstance(x, tirx.IntImm) and x.value < 0 for x in (node.a, node.b)):
            decreasing.append(node)

    def check_dividend(node: Any) -> None:
        tvm_ffi.structural_walk(node.a, [(tirx.Sub, check_subtraction), (tirx.Mul, check_product)])

    for load in loads(value):
        for index in load.indices:
            tvm_ffi.structural_walk(index, [((tirx.FloorDiv, tirx.FloorMod), check_dividend)])
    return bool(decreasing)


def simplified(value: Any, analyzer: Any) -> Any:
    """Return a value with simplified indices and without branches that are never taken."""

    def load(node: Any) -> Any:
        indices = [analyzer.simplify(index) for index in node.indices]
        return tirx.BufferLoad(node.source, indices)

    def fold_branch(
        condition: Any, if_true: Any, if_false: Any, unchanged: Callable[[], Any]
    ) -> Any:
        condition = analyzer.simplify(condition)
        if isinstance(condition, tirx.IntImm):
            return if_true if bool(condition.value) else if_false
        return unchanged()

    def call(node: Any) -> Any:
        if operator(node) != "if_then_else":
            return node
        condition, if_true, if_false = node.args
        return fold_branch(condition, if_true, if_false, lambda: node)

    def select(node: Any) -> Any:
        return fold_branch(node.condition, node.true_value, node.false_value, lambda: node)

    return tvm_ffi.structural_map(
        value, [(TensorLoad, load), (tvm.ir.Call, call), (tirx.Select, select)]
    )
