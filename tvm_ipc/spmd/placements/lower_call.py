# SPDX-License-Identifier: Apache-2.0
"""Lowering of the calls of a global program to calls with the shards of one rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

import numpy as np
import tvm
from tvm import relax

from tvm_ipc.arguments import counted
from tvm_ipc.comm.collective_relax_op import NAME as COLLECTIVE
from tvm_ipc.comm.collective_relax_op import dtype_of, extents
from tvm_ipc.comm.expert_ops import RAGGED_OPERATORS
from tvm_ipc.comm.extent_arithmetic import constant, format_extent
from tvm_ipc.comm.placements import format_placements
from tvm_ipc.errors import TransformError
from tvm_ipc.spmd.placements.placed_tensor import (
    PlacedTensor,
    local_extents,
    local_type,
    sharded_axes,
    uneven,
)
from tvm_ipc.spmd.placements.relax_vars_to_rank_values import RankValue, RankValues, name_of
from tvm_ipc.spmd.rules.axis_label_rule import (
    LocalCall,
    Refusal,
    ResolvedPlacements,
    Rule,
    resolve_placements,
)
from tvm_ipc.spmd.rules.decompose_along_sharded_axis import decompose
from tvm_ipc.spmd.rules.operation import (
    OPERATORS,
    Operation,
    callee_of,
    format_callee,
    operation_of,
    replace_tensors,
    short_name,
    tensors_among,
)
from tvm_ipc.spmd.rules.operator_rule_table import called_primfunc, has_declared_rule, rule_of

#: The tensors among the arguments of a call, including those in tuples: names and values.
_Operands: TypeAlias = Sequence[tuple[str, PlacedTensor]]
#: The neutral element of each reduction.
_NEUTRAL: Final = {"sum": 0, "prod": 1, "max": -np.inf, "min": np.inf}


def lower_call(values: RankValues, var: relax.Var, call: relax.Call) -> RankValue:
    """Return the value of a call on one rank."""
    name = short_name(call)
    if name.startswith("ccl.") or name == COLLECTIVE.removeprefix("relax."):
        raise values.error(
            f"{var.name} is R.{name}, which is for one rank, but a function with R.comm.place is "
            "for all ranks; place the result with R.comm.place instead"
        )
    if OPERATORS + name in RAGGED_OPERATORS and int(call.attrs.workers) != 1:
        raise values.error(
            f"{var.name} is R.{name}, with workers={call.attrs.workers}, for one rank, but a "
            "function with R.comm.place is for all ranks; leave out workers and team, and place "
            "the experts of R.comm.moe with R.comm.place"
        )
    values.select_for(tensors_among(call.args))
    operands = [(name_of(x), values.tensor(x)) for x in tensors_among(call.args)]
    if all(x.replicated for _, x in operands):
        arguments = [values.whole(x, f"{var.name}: {format_callee(call)}") for x in call.args]
        return values.uniform(with_arguments(call, arguments))
    if name in ("shape_of", "size"):
        return values.uniform(_of_shape(name, operands[0][1].whole))
    try:
        return _by_rule(values, var, call, operands)
    except Refusal as refusal:
        result = decompose(name, call, lambda step: _emit_global(values, step))
        if result is None:
            raise _refused(values, var, call, operands, refusal) from None
        return values.lookup(result)


def _emit_global(values: RankValues, call: relax.Call) -> relax.Var:
    """Add a call to the global program, lower it, and return its variable."""
    call = values.builder.normalize(call)
    var = relax.Var(short_name(call).replace(".", "_"), call.ty)
    values[var] = values.bound(lower_call(values, var, call), str(var.name))
    return var


def _by_rule(
    values: RankValues, var: relax.Var, call: relax.Call, operands: _Operands
) -> RankValue:
    operation = operation_of(call, var.ty)
    rule = None if operation is None else rule_of(operation)
    if operation is None or rule is None:
        raise Refusal("it has no sharding rule")
    mesh = values.mesh
    names, tensors = [name for name, _ in operands], [x for _, x in operands]
    resolved = resolve_placements(mesh, rule, names, [x.placements for x in tensors])
    moved = []
    for k, (name, x) in enumerate(operands):
        target = resolved.operands[k]
        why = f"{format_callee(call)} needs it {format_placements(mesh, target)}"
        x = values.moves.move(x, target, name, "inserted", why)
        moved.append(_filled(values, format_callee(call), rule, k, x, name))
    whole_types = operation.results
    dims = [
        local_extents(mesh, extents(ty) or [], placements)
        for ty, placements in zip(whole_types, resolved.results, strict=True)
    ]
    local_tensors = map(values.as_argument, moved)
    arguments = [
        replace_tensors(x, local_tensors, lambda other: values.whole(other, "a call"))
        for x in call.args
    ]
    lowered = with_arguments(call, arguments)
    if callee_of(call) is not None and rule.local is None:
        lowered = _with_local_types(values, lowered, resolved, operation, tensors)
    if rule.local is not None:
        choices = zip(resolved.choices, mesh.axes.items(), strict=True)
        axes = {choice[0]: (choice[1], *axis) for choice, axis in choices if choice is not None}
        local_call = LocalCall(
            lowered,
            tuple(dims),
            {label: workers for label, (_, _, workers) in axes.items()},
            {label: division for label, (division, _, _) in axes.items()},
            {label: mesh.teams(name) for label, (_, name, _) in axes.items()},
            values.builder,
            lambda label: values.moves.rank(axes[label][1]),
            lambda kind, label, why: values.moves.report(kind, names[0], axes[label][1], why),
        )
        lowered = rule.local(local_call)
    zeros = [
        _zeros(rule, labels, sharded_axes(mesh, placements), moved)
        for labels, placements in zip(rule.results, resolved.results, strict=True)
    ]
    if isinstance(var.ty, relax.TensorType):
        return values.moves.placed(lowered, var.ty, resolved.results[0], zeros[0])
    result = values.builder.emit(lowered, str(var.name))
    fields = []
    for k, (whole, placements) in enumerate(zip(whole_types, resolved.results, strict=True)):
        field = values.builder.emit(relax.TupleGetItem(result, k), f"{var.name}_{k}")
        fields.append(values.moves.placed(field, whole, placements, zeros[k]))
    return tuple(fields)


def _zeros(
    rule: Rule, labels: Sequence[int | None], axes: Iterable[int], moved: Sequence[PlacedTensor]
) -> frozenset[int]:
    """Return the axes of a result whose padding is zero."""
    zero_axes = set()
    for axis in axes:
        label = labels[axis]
        operand_zeros = [
            label in operand_labels and operand_labels.index(label) in x.zeros
            for operand_labels, x in zip(rule.operands, moved, strict=True)
        ]
        if rule.preserves_zeros(operand_zeros):
            zero_axes.add(axis)
    return frozenset(zero_axes)


def _filled(
    values: RankValues, callee: str, rule: Rule, operand: int, x: PlacedTensor, subject: str
) -> PlacedTensor:
    """Return an operand whose padding has values that do not change the result."""
    padded = uneven(values.mesh, x.placements, x.whole)
    labels = rule.operands[operand]
    for axis in sorted(padded):
        label = labels[axis]
        reduction = None if label is None else rule.reduced.get(label)
        if reduction is not None:
            neutral = _neutral(reduction, dtype_of(x.whole))
            why = f"{callee} {'sums' if reduction == 'sum' else 'reduces'} over it"
        elif operand in rule.padding:
            neutral, why = rule.padding[operand], f"{callee} reads the padding too"
        else:
            continue
        if neutral != 0 or axis not in x.zeros:
            x = values.moves.fill(x, frozenset({axis}), neutral, subject, why)
    return x


def _neutral(reduction: str, dtype: str) -> float:
    if "float" in dtype or reduction in ("sum", "prod"):
        return _NEUTRAL[reduction]
    limits = np.iinfo(dtype)
    return int(limits.min if reduction == "max" else limits.max)


def _with_local_types(
    values: RankValues,
    call: relax.Call,
    resolved: ResolvedPlacements,
    operation: Operation,
    operands: Sequence[PlacedTensor],
) -> relax.Call:
    """Return a call of a function with the types of the rank's results."""
    mesh = values.mesh
    operand_types, whole_types = [x.whole for x in operands], operation.results
    placements = (*resolved.operands, *resolved.results)
    of_rank = [
        local_type(mesh, whole, placement)
        for whole, placement in zip((*operand_types, *whole_types), placements, strict=True)
    ]
    callee = callee_of(call)
    if isinstance(callee, tvm.ir.GlobalVar):
        if len(call.args) > 2:
            raise Refusal("it takes symbolic values, and their values for shards are unknown")
        try:
            _check_takes(values.module, callee, of_rank)
        except Refusal:
            function = None if has_declared_rule(operation) else called_primfunc(operation)
            if function is None:
                raise
            shapes = [extents(ty) or [] for ty in of_rank]
            callee = values.primfunc_of_rank(str(callee.name_hint), function, shapes)
            call = with_arguments(call, [callee, *call.args[1:]])
    types = of_rank[len(operand_types) :]
    ty = types[0] if isinstance(call.ty_args[0], relax.TensorType) else relax.TupleType(types)
    return relax.Call(call.op, call.args, call.attrs, [ty], call.span)


def _check_takes(
    module: tvm.IRModule, callee: tvm.ir.GlobalVar, types: Sequence[relax.TensorType]
) -> None:
    """Raise `Refusal` unless a PrimFunc accepts the extents of the rank's shards."""
    function = module[callee]
    buffers = (
        [p.ty.shape for p in function.params if isinstance(p.ty, tvm.tirx.BufferType)]
        if isinstance(function, tvm.tirx.PrimFunc)
        else []
    )
    if len(buffers) != len(types):
        tensors = counted(len(buffers), "tensor")
        raise Refusal(f"it takes {tensors}, but the call has {len(types)}")
    for shape, ty in zip(buffers, types, strict=True):
        for expected, extent in zip(shape, extents(ty) or [], strict=False):
            number = constant(expected)
            if number is not None and number != constant(extent):
                raise Refusal(
                    f"it is compiled for an extent of {number}, and a rank has "
                    f"{format_extent(extent)}: make that extent symbolic"
                )


def _of_shape(name: str, whole: relax.TensorType) -> relax.Expr:
    """Return the value of `shape_of` or `size`, which is that of the whole tensor."""
    dims = extents(whole)
    assert dims is not None, "only tensors of known shape are sharded"
    if name == "shape_of":
        return relax.ShapeExpr(dims)
    size = dims[0] if dims else 1
    for extent in dims[1:]:
        size = size * extent
    return relax.op.reshape(relax.op.shape_to_tensor(relax.ShapeExpr([size])), ())


def _refused(
    values: RankValues, var: relax.Var, call: relax.Call, operands: _Operands, refusal: Refusal
) -> TransformError:
    placements = [
        f"{name} is {format_placements(values.mesh, x.placements)}"
        for name, x in operands
        if not x.replicated
    ]
    return values.error(
        f"{var.name} is {format_callee(call)}: {refusal}; found: "
        f"{'; '.join(placements) or 'all operands are replicated'}; place "
        "the operands before it with R.comm.place, for example as comm.Replica()"
    )


def with_arguments(call: relax.Call, arguments: Sequence[relax.Expr]) -> relax.Call:
    """Return a call with other arguments."""
    return relax.Call(call.op, arguments, call.attrs, list(call.ty_args), call.span)
