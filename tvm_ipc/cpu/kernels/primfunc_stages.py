# SPDX-License-Identifier: Apache-2.0
"""Analysis of a PrimFunc as stages, each of which computes a buffer element by element.

    for i, j in T.grid(4, 64):
        with T.sblock("exp"):                     Stage(buffer=b, axes=[i, j], reduced=[],
            vi, vj = T.axis.remap("SS", [i, j])         value=T.exp(a[i, j]))
            b[vi, vj] = T.exp(a[vi, vj])

Legalization and fusion generate functions of this form. Functions of any other form, which were
written or scheduled by hand, raise `NotStagesError`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import tvm
import tvm_ffi
from tvm import tirx

from tvm_ipc.tvm_moved_names import SBlockRealize, TensorLoad

#: Annotations of blocks that do not affect scheduling.
_DESCRIBE: Final = frozenset(("axis",))
#: The operators with which a reduction may combine two elements.
_COMBINERS: Final = (tirx.Add, tirx.Mul, tirx.Max, tirx.Min)
_SPATIAL: Final = tirx.IterVar.DataPar
_REDUCED: Final = tirx.IterVar.CommReduce


class NotStagesError(Exception):
    """Raised for a function that is not a sequence of stages; the message is the reason."""


@dataclass(frozen=True, eq=False)
class Axis:
    """A loop from 0 to an extent."""

    var: Any
    extent: Any


@dataclass(eq=False)
class Stage:
    """The computation of a buffer, with an element for each point of its axes.

    With reduced axes, the value reads the element that it updates, and `init` is its initial value.
    """

    buffer: Any
    axes: list[Axis]  #: an axis for each dimension of the buffer
    reduced: list[Axis]
    value: Any
    init: Any = None


@dataclass(eq=False)
class Stages:
    """The stages of a function."""

    function: tirx.PrimFunc
    #: The buffers that the function allocates, by `key`.
    own: dict[int, Any] = field(default_factory=dict)
    stages: list[Stage] = field(default_factory=list)


def read_stages(function: tirx.PrimFunc) -> Stages:
    """Return the stages of a function; raise NotStagesError if it has another form."""
    root = function.body
    if not isinstance(root, SBlockRealize) or not _is_true(root.predicate):
        raise NotStagesError("its body is not a block")
    block = root.block
    if len(block.iter_vars) or len(block.match_buffers) or block.init is not None:
        raise NotStagesError("its block has axes")
    if len(block.annotations):
        raise NotStagesError("its block has annotations")
    stages = Stages(function, {key(buffer): buffer for buffer in block.alloc_buffers})
    for buffer in (*stages.own.values(), *(p for p in function.params if is_buffer(p))):
        _check_buffer(buffer)
    body = block.body
    for nest in body.seq if isinstance(body, tirx.SeqStmt) else [body]:
        stages.stages += _stages_of(nest)
    _check_order(stages)
    return stages


def key(buffer: Any) -> int:
    """Return the identity of a variable, which is unique while the variable is alive."""
    return int(buffer.__chandle__())


def is_buffer(var: Any) -> bool:
    """Return whether a variable is a buffer."""
    return isinstance(var.ty, tirx.BufferType)


def loads(expr: Any) -> Iterator[Any]:
    """Yield the elements that an expression reads."""
    loads: list[Any] = []
    if expr is not None:
        tvm_ffi.structural_walk(expr, [(TensorLoad, loads.append)])
    yield from loads


def operator(call: tvm.ir.Call) -> str:
    """Return the name of the operator of a call without its dialect, "" for other calls."""
    return str(call.op.name).rpartition(".")[2] if isinstance(call.op, tvm.ir.Op) else ""


def calls_of(expr: Any, names: Container[str]) -> list[Any]:
    """Return the calls of some operators in an expression."""
    calls: list[Any] = []

    def call(node: Any) -> None:
        if operator(node) in names:
            calls.append(node)

    tvm_ffi.structural_walk(expr, [(tvm.ir.Call, call)])
    return calls


def is_index_of(index: Any, axis: Axis) -> bool:
    """Return whether an index is the variable of an axis, or 0 if the axis has the extent 1."""
    if isinstance(index, tvm.ir.Var):
        return key(index) == key(axis.var)
    return is_integer(index, 0) and is_integer(axis.extent, 1)


def is_integer(value: Any, expected: int) -> bool:
    """Return whether an expression is an integer constant with a value."""
    return isinstance(value, tirx.IntImm) and int(value.value) == expected


def has_branches(expr: Any) -> bool:
    """Return whether a part of an expression is evaluated conditionally."""
    return bool(calls_of(expr, ("if_then_else",)))


def uses(expr: Any, var: Any) -> bool:
    """Return whether an expression contains a variable."""
    target, found = key(var), []

    def visit(node: Any) -> None:
        if key(node) == target:
            found.append(node)

    tvm_ffi.structural_walk(expr, [(tvm.ir.Var, visit)])
    return bool(found)


def substitute(expr: Any, values: dict[Any, Any]) -> Any:
    """Return an expression with values substituted for variables."""
    by_key = {key(var): value for var, value in values.items()}
    if not by_key:
        return expr
    return tvm_ffi.structural_map(expr, (tvm.ir.Var, lambda var: by_key.get(key(var), var)))


def reduction(stage: Stage) -> tuple[Callable[..., Any], Any] | None:
    """Return the combiner of a reduction and the combined value, None if there is no combiner."""
    kind = type(stage.value)
    if kind not in _COMBINERS:
        return None
    left, right = stage.value.a, stage.value.b
    for own, value in ((left, right), (right, left)):
        is_own = isinstance(own, TensorLoad) and own.source.same_as(stage.buffer)
        if is_own and not any(load.source.same_as(stage.buffer) for load in loads(value)):
            return kind, value
    return None


def _not_stages(block: Any, reason: str) -> NotStagesError:
    return NotStagesError(f"its block {block.name_hint} {reason}")


def _check_buffer(buffer: Any) -> None:
    ty = buffer.ty
    if len(ty.strides or ()) or str(ty.storage_scope) not in ("", "global"):
        raise NotStagesError(f"{buffer.name} has strides or a memory scope")


def _stages_of(nest: Any) -> list[Stage]:
    loops: dict[int, Any] = {}
    while isinstance(nest, tirx.For):
        serial = nest.kind == tirx.ForKind.SERIAL and not len(nest.annotations)
        if not serial or not is_integer(nest.min, 0) or nest.step is not None:
            raise NotStagesError(f"its loop {nest.loop_var.name} is scheduled")
        loops[key(nest.loop_var)] = nest.extent
        nest = nest.body
    if not isinstance(nest, SBlockRealize) or not _is_true(nest.predicate):
        raise NotStagesError("its loops are not nested around one unconditional computation")
    block = nest.block
    if len(block.alloc_buffers) or len(block.match_buffers):
        raise _not_stages(block, "has buffers of its own")
    if not {str(name) for name in block.annotations} <= _DESCRIBE:
        raise _not_stages(block, "is annotated")
    axes: dict[int, Axis] = {}
    reduced: list[Axis] = []
    for axis, value in zip(block.iter_vars, nest.iter_values, strict=True):
        if isinstance(value, tvm.ir.Var) and key(value) in loops:
            extent = loops.pop(key(value))
        elif is_integer(value, 0):
            extent = tirx.const(1, value.ty.dtype)
        else:
            raise _not_stages(block, "has an axis that is not a loop variable")
        if axis.iter_type == _SPATIAL:
            axes[key(axis.var)] = Axis(axis.var, extent)
        elif axis.iter_type == _REDUCED:
            reduced.append(Axis(axis.var, extent))
        else:
            raise _not_stages(block, "has an axis of another kind")
    if loops:
        raise _not_stages(block, "is in a loop that it does not use")
    return _stores(block, axes, reduced)


def _stores(block: Any, axes: dict[int, Axis], reduced: list[Axis]) -> list[Stage]:
    """Return a stage for each buffer that a block writes."""
    stores: list[Any] = []
    values: dict[Any, Any] = {}
    for statement in block.body.seq if isinstance(block.body, tirx.SeqStmt) else [block.body]:
        if isinstance(statement, tirx.Bind) and not stores:
            values[statement.var] = substitute(statement.value, values)
        elif isinstance(statement, tirx.BufferStore):
            stores.append(statement)
        else:
            raise _not_stages(block, "has statements other than stores")
    inits = block.init.seq if isinstance(block.init, tirx.SeqStmt) else [block.init]
    if block.init is None:
        inits = [None] * len(stores)
    if len(inits) != len(stores) or (block.init is None) != (not reduced):
        raise _not_stages(block, "does not initialize exactly the buffers that it reduces")
    written = {key(store.buffer) for store in stores}
    stages = []
    for store, init in zip(stores, inits, strict=True):
        if init is not None and not tvm_ffi.structural_equal(init.indices, store.indices):
            raise _not_stages(block, "initializes other elements than it updates")
        if init is not None and not init.buffer.same_as(store.buffer):
            raise _not_stages(block, "initializes other buffers than it updates")
        value = substitute(store.value, values)
        other_buffers = written - {key(store.buffer)}
        if any(key(load.source) in other_buffers for load in loads(value)):
            raise _not_stages(block, "computes a buffer from another one that it writes")
        stages.append(_stage(block, store, value, init, dict(axes), reduced))
    return stages


def _stage(
    block: Any, store: Any, value: Any, init: Any, axes: dict[int, Axis], reduced: list[Axis]
) -> Stage:
    ordered = []
    for index, extent in zip(store.indices, store.buffer.ty.shape, strict=True):
        if isinstance(index, tvm.ir.Var) and key(index) in axes:
            axis = axes.pop(key(index))
        elif is_integer(index, 0):
            axis = Axis(tirx.Var("z", index.ty), tirx.const(1, index.ty.dtype))
        else:
            raise _not_stages(block, "writes elements in another order than its axes")
        if not _equal(axis.extent, extent):
            raise _not_stages(block, "writes only a part of a buffer")
        ordered.append(axis)
    if not all(is_integer(axis.extent, 1) for axis in axes.values()):
        raise _not_stages(block, "writes elements more than once")
    zeros = {axis.var: tirx.const(0, axis.var.ty.dtype) for axis in axes.values()}
    # Stages do not share variables.
    fresh = [
        Axis(tirx.Var(axis.var.name, axis.var.ty), axis.extent) for axis in (*ordered, *reduced)
    ]
    zeros |= {old.var: new.var for old, new in zip((*ordered, *reduced), fresh, strict=True)}
    initial = None if init is None else substitute(init.value, zeros)
    value = substitute(value, zeros)
    own_loads = [load for load in loads(value) if load.source.same_as(store.buffer)]
    spatial = fresh[: len(ordered)]
    if not reduced:
        if own_loads:
            raise _not_stages(block, "reads the buffer that it writes")
    elif not all(all(map(is_index_of, load.indices, spatial)) for load in own_loads):
        raise _not_stages(block, "reads other elements of the buffer that it reduces")
    return Stage(store.buffer, spatial, fresh[len(ordered) :], value, initial)


def _check_order(stages: Stages) -> None:
    """Raise NotStagesError if a buffer is read before it is written, or written twice."""
    computed: set[int] = set()
    written = {key(stage.buffer) for stage in stages.stages}
    if len(written) != len(stages.stages):
        raise NotStagesError("a buffer is written twice")
    if not stages.own.keys() <= written:
        raise NotStagesError("a local buffer is never written")
    for stage in stages.stages:
        own = key(stage.buffer)
        for load in (*loads(stage.value), *loads(stage.init)):
            read = key(load.source)
            if read in written and read not in computed and read != own:
                raise NotStagesError(f"{load.source.name} is read before it is written")
        computed.add(own)


def _is_true(predicate: Any) -> bool:
    return isinstance(predicate, tirx.IntImm) and bool(predicate.value)


def _equal(a: Any, b: Any) -> bool:
    return bool(tvm_ffi.structural_equal(a, b)) or (
        isinstance(a, tirx.IntImm) and isinstance(b, tirx.IntImm) and int(a.value) == int(b.value)
    )
