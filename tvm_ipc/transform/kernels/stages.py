# SPDX-License-Identifier: Apache-2.0
"""A PrimFunc as stages: each computes one buffer, element by element, from what there is.

    for i, j in T.grid(4, 64):
        with T.sblock("exp"):                     Stage(buffer=b, axes=[i, j], reduced=[],
            vi, vj = T.axis.remap("SS", [i, j])         value=T.exp(a[i, j]))
            b[vi, vj] = T.exp(a[vi, vj])

This is what legalization and fusion make. A function that is anything else has been written, or
scheduled, by somebody, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import tvm
import tvm_ffi
from tvm import s_tir, tirx

#: Annotations of blocks that say what a block is, not how it is to run.
_DESCRIBE: Final = frozenset(("axis",))
#: How a reduction may combine two elements.
_COMBINERS: Final = (tirx.Add, tirx.Mul, tirx.Max, tirx.Min)
_SPATIAL: Final = tirx.IterVar.DataPar
_REDUCED: Final = tirx.IterVar.CommReduce


class NotStagesError(Exception):
    """A function is no sequence of stages; the text says why."""


@dataclass(frozen=True)
class Axis:
    """A loop from 0 to an extent."""

    var: Any
    extent: Any


@dataclass
class Stage:
    """One buffer, an element for each point of its axes.

    The value of a stage with reduced axes reads the element that it writes, which `init` begins.
    """

    buffer: Any
    axes: list[Axis]  #: one for each dimension of the buffer
    reduced: list[Axis]
    value: Any
    init: Any = None


@dataclass
class Stages:
    """A function."""

    function: tirx.PrimFunc
    #: By address, buffers that only the function sees.
    own: dict[int, Any] = field(default_factory=dict)
    stages: list[Stage] = field(default_factory=list)


def read_stages(function: tirx.PrimFunc) -> Stages:
    """Return the stages of a function; raise `NotStagesError`."""
    root = function.body
    if not isinstance(root, s_tir.SBlockRealize) or not _is_true(root.predicate):
        raise NotStagesError("its body is no block")
    block = root.block
    if len(block.iter_vars) or len(block.match_buffers) or block.init is not None:
        raise NotStagesError("its block has axes")
    if len(block.annotations):
        raise NotStagesError("its block has annotations")
    found = Stages(function, {key(buffer): buffer for buffer in block.alloc_buffers})
    for buffer in (*found.own.values(), *(p for p in function.params if is_buffer(p))):
        _check_buffer(buffer)
    body = block.body
    for nest in body.seq if isinstance(body, tirx.SeqStmt) else [body]:
        found.stages += _stages_of(nest)
    _check_order(found)
    return found


def key(buffer: Any) -> int:
    """Return what tells a variable from others, while it lives."""
    return int(buffer.__chandle__())


def is_buffer(var: Any) -> bool:
    """Whether a variable is memory."""
    return isinstance(var.ty, tirx.BufferType)


def loads(expr: Any) -> Iterator[Any]:
    """Yield the elements that an expression reads."""
    found: list[Any] = []
    if expr is not None:
        tvm_ffi.structural_walk(expr, [(tvm.ir.TensorLoad, found.append)])
    yield from found


def operator(call: tvm.ir.Call) -> str:
    """Return the name of what a call calls, without that of its dialect."""
    return str(call.op.name).rpartition(".")[2] if isinstance(call.op, tvm.ir.Op) else ""


def calls_of(expr: Any, names: Container[str]) -> list[Any]:
    """Return the calls in an expression of some operators."""
    found: list[Any] = []

    def call(one: Any) -> None:
        if operator(one) in names:
            found.append(one)

    tvm_ffi.structural_walk(expr, [(tvm.ir.Call, call)])
    return found


def has_branches(expr: Any) -> bool:
    """Whether a part of an expression is only computed where a condition holds."""
    return bool(calls_of(expr, ("if_then_else",)))


def uses(expr: Any, var: Any) -> bool:
    """Whether a variable is in an expression."""
    wanted, found = key(var), []

    def visit(one: Any) -> None:
        if key(one) == wanted:
            found.append(one)

    tvm_ffi.structural_walk(expr, [(tvm.ir.Var, visit)])
    return bool(found)


def substitute(expr: Any, values: dict[Any, Any]) -> Any:
    """Return an expression with values in the place of variables."""
    by_key = {key(var): value for var, value in values.items()}
    if not by_key:
        return expr
    return tvm_ffi.structural_map(expr, (tvm.ir.Var, lambda var: by_key.get(key(var), var)))


def reduction(stage: Stage) -> tuple[Callable[..., Any], Any] | None:
    """Return how a stage combines, and what with its own element; None where that is not known."""
    kind = type(stage.value)
    if kind not in _COMBINERS:
        return None
    left, right = stage.value.a, stage.value.b
    for own, value in ((left, right), (right, left)):
        mine = isinstance(own, tvm.ir.TensorLoad) and own.source.same_as(stage.buffer)
        if mine and not any(load.source.same_as(stage.buffer) for load in loads(value)):
            return kind, value
    return None


def _check_buffer(buffer: Any) -> None:
    ty = buffer.ty
    if len(ty.strides or ()) or str(ty.storage_scope) not in ("", "global"):
        raise NotStagesError(f"{buffer.name} has strides or a memory scope")


def _stages_of(nest: Any) -> list[Stage]:
    loops: dict[int, Any] = {}
    while isinstance(nest, tirx.For):
        serial = nest.kind == tirx.ForKind.SERIAL and not len(nest.annotations)
        if not serial or not _is_integer(nest.min, 0) or nest.step is not None:
            raise NotStagesError(f"its loop {nest.loop_var.name} is scheduled")
        loops[key(nest.loop_var)] = nest.extent
        nest = nest.body
    if not isinstance(nest, s_tir.SBlockRealize) or not _is_true(nest.predicate):
        raise NotStagesError("a loop has no block that runs always")
    block = nest.block
    if len(block.alloc_buffers) or len(block.match_buffers):
        raise NotStagesError(f"its block {block.name_hint} has buffers of its own")
    if not {str(name) for name in block.annotations} <= _DESCRIBE:
        raise NotStagesError(f"its block {block.name_hint} is annotated")
    axes: dict[int, Axis] = {}
    reduced: list[Axis] = []
    for axis, value in zip(block.iter_vars, nest.iter_values, strict=True):
        if isinstance(value, tvm.ir.Var) and key(value) in loops:
            extent = loops.pop(key(value))
        elif _is_integer(value, 0):
            extent = tirx.const(1, value.ty.dtype)
        else:
            raise NotStagesError(f"its block {block.name_hint} has an axis that is no loop")
        if axis.iter_type == _SPATIAL:
            axes[key(axis.var)] = Axis(axis.var, extent)
        elif axis.iter_type == _REDUCED:
            reduced.append(Axis(axis.var, extent))
        else:
            raise NotStagesError(f"its block {block.name_hint} has an axis of another kind")
    if loops:
        raise NotStagesError(f"its block {block.name_hint} is in a loop that it does not use")
    return _stores(block, axes, reduced)


def _stores(block: Any, axes: dict[int, Axis], reduced: list[Axis]) -> list[Stage]:
    """Return a stage for each buffer that a block writes."""
    stores: list[Any] = []
    values: dict[Any, Any] = {}
    for one in block.body.seq if isinstance(block.body, tirx.SeqStmt) else [block.body]:
        if isinstance(one, tirx.Bind) and not stores:
            values[one.var] = substitute(one.value, values)
        elif isinstance(one, tirx.BufferStore):
            stores.append(one)
        else:
            raise NotStagesError(f"its block {block.name_hint} does more than to store")
    inits = block.init.seq if isinstance(block.init, tirx.SeqStmt) else [block.init]
    if block.init is None:
        inits = [None] * len(stores)
    if len(inits) != len(stores) or (block.init is None) != (not reduced):
        raise NotStagesError(
            f"its block {block.name_hint} has other first values than it has buffers"
        )
    written = {key(store.buffer) for store in stores}
    found = []
    for store, init in zip(stores, inits, strict=True):
        if init is not None and not tvm_ffi.structural_equal(init.indices, store.indices):
            raise NotStagesError(f"its block {block.name_hint} begins elsewhere than it goes on")
        if init is not None and not init.buffer.same_as(store.buffer):
            raise NotStagesError(f"its block {block.name_hint} has first values of other buffers")
        value = substitute(store.value, values)
        others = written - {key(store.buffer)}
        if any(key(load.source) in others for load in loads(value)):
            raise NotStagesError(
                f"its block {block.name_hint} computes several buffers of one another"
            )
        found.append(_stage(block, store, value, init, dict(axes), reduced))
    return found


def _stage(
    block: Any, store: Any, value: Any, init: Any, axes: dict[int, Axis], reduced: list[Axis]
) -> Stage:
    ordered = []
    for index, extent in zip(store.indices, store.buffer.ty.shape, strict=True):
        if isinstance(index, tvm.ir.Var) and key(index) in axes:
            axis = axes.pop(key(index))
        elif _is_integer(index, 0):
            axis = Axis(tirx.Var("z", index.ty), tirx.const(1, index.ty.dtype))
        else:
            raise NotStagesError(
                f"its block {block.name_hint} writes in another order than it runs"
            )
        if not _equal(axis.extent, extent):
            raise NotStagesError(f"its block {block.name_hint} writes a part of a buffer")
        ordered.append(axis)
    if not all(_is_integer(axis.extent, 1) for axis in axes.values()):
        raise NotStagesError(f"its block {block.name_hint} writes elements more than once")
    zeros = {axis.var: tirx.const(0, axis.var.ty.dtype) for axis in axes.values()}
    # Each stage has variables of its own.
    fresh = [
        Axis(tirx.Var(axis.var.name, axis.var.ty), axis.extent) for axis in (*ordered, *reduced)
    ]
    zeros |= {old.var: new.var for old, new in zip((*ordered, *reduced), fresh, strict=True)}
    first = None if init is None else substitute(init.value, zeros)
    value = substitute(value, zeros)
    own = [load for load in loads(value) if load.source.same_as(store.buffer)]
    spatial = fresh[: len(ordered)]
    if not reduced:
        if own:
            raise NotStagesError(f"its block {block.name_hint} reads what it writes")
    elif not all(_is_element(load, spatial) for load in own):
        raise NotStagesError(f"its block {block.name_hint} reduces more than its own element")
    return Stage(store.buffer, spatial, fresh[len(ordered) :], value, first)


def _is_element(load: Any, axes: list[Axis]) -> bool:
    return all(
        (isinstance(index, tvm.ir.Var) and key(index) == key(axis.var))
        or (_is_integer(index, 0) and _is_integer(axis.extent, 1))
        for index, axis in zip(load.indices, axes, strict=True)
    )


def _check_order(found: Stages) -> None:
    """Refuse a function that reads a buffer before it computes it, or computes one twice."""
    computed: set[int] = set()
    written = {key(stage.buffer) for stage in found.stages}
    if len(written) != len(found.stages):
        raise NotStagesError("a buffer is written twice")
    if not found.own.keys() <= written:
        raise NotStagesError("a buffer of its own is never written")
    for stage in found.stages:
        this = key(stage.buffer)
        for load in (*loads(stage.value), *loads(stage.init)):
            read = key(load.source)
            if read in written and read not in computed and read != this:
                raise NotStagesError(f"{load.source.name} is read before it is written")
        computed.add(this)


def _is_true(predicate: Any) -> bool:
    return isinstance(predicate, tirx.IntImm) and bool(predicate.value)


def _is_integer(value: Any, wanted: int) -> bool:
    return isinstance(value, tirx.IntImm) and int(value.value) == wanted


def _equal(one: Any, other: Any) -> bool:
    return bool(tvm_ffi.structural_equal(one, other)) or (
        isinstance(one, tirx.IntImm)
        and isinstance(other, tirx.IntImm)
        and int(one.value) == int(other.value)
    )
