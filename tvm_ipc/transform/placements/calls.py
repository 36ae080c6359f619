# SPDX-License-Identifier: Apache-2.0
"""What a call of a program for all ranks becomes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np
import tvm
from tvm import relax

from tvm_ipc.comm.extents import constant, show_extent
from tvm_ipc.comm.operator import NAME as COLLECTIVE
from tvm_ipc.comm.operator import dtype_of, extents
from tvm_ipc.comm.placements import show
from tvm_ipc.errors import TransformError
from tvm_ipc.transform.placements.placed import Placed, divided, local_extents, local_type, uneven
from tvm_ipc.transform.placements.values import Found, RankValues, name_of
from tvm_ipc.transform.rules.composed import composed
from tvm_ipc.transform.rules.operation import callee_of, operation_of, short_name, shown
from tvm_ipc.transform.rules.rule import Decided, Part, Refusal, Rule, decide
from tvm_ipc.transform.rules.table import rule_of

#: What changes no result of a reduction.
_NEUTRAL: Final = {"sum": 0, "prod": 1, "max": -np.inf, "min": np.inf}
#: Calls that say themselves what they give.
_SAYS_ITS_TYPE: Final = ("call_tir", "call_dps_packed", "call_pure_packed")


def lower_call(values: RankValues, var: relax.Var, call: relax.Call) -> Found:
    """Return what the result of a call is for a rank."""
    name = short_name(call)
    if name.startswith("ccl.") or name == COLLECTIVE.removeprefix("relax."):
        raise values.error(
            f"{var.name} is R.{name}, which is for one rank, and a function with a place is "
            "for all of them; say with R.comm.place where the result lies"
        )
    operands = _Operands(values, call)
    if all(x.replicated for x in operands.found):
        arguments = [values.whole(x, f"{var.name}: {shown(call)}") for x in call.args]
        return values.classified(with_arguments(call, arguments))
    if name in ("shape_of", "size"):
        return values.classified(_of_shape(name, operands.found[0].whole))
    try:
        return _by_rule(values, var, call, operands)
    except Refusal as refusal:
        made = composed(name, call, lambda one: _compute(values, one))
        if made is None:
            raise _refused(values, var, call, operands, refusal) from None
        return values.lookup(made)


def _compute(values: RankValues, call: relax.Call) -> relax.Var:
    """Return a variable of the program for all ranks that is one more call."""
    call = values.builder.normalize(call)
    var = relax.Var(short_name(call).replace(".", "_"), call.ty)
    values[var] = values.bound(lower_call(values, var, call), str(var.name))
    return var


class _Operands:
    """The tensors that a call is given, also those in tuples.

    Attributes
    ----------
    found : what a rank has of them.
    names : what messages call them.
    """

    def __init__(self, values: RankValues, call: relax.Call) -> None:
        self.found: list[Placed] = []
        self.names: list[str] = []
        for argument in call.args:
            for name, x in _tensors(values, argument):
                self.names.append(name)
                self.found.append(x)


def _tensors(values: RankValues, argument: relax.Expr) -> Iterator[tuple[str, Placed]]:
    if isinstance(argument, relax.Tuple):
        for field in argument.fields:
            yield from _tensors(values, field)
    elif isinstance(argument.ty, relax.TupleType):
        name = name_of(argument)
        for k, field in enumerate(values.fields(argument)):
            if isinstance(field, Placed):
                yield f"{name}[{k}]", field
    elif isinstance(argument.ty, relax.TensorType):
        yield name_of(argument), values.tensor(argument)


def _by_rule(values: RankValues, var: relax.Var, call: relax.Call, operands: _Operands) -> Found:
    operation = operation_of(call, var.ty)
    rule = None if operation is None else rule_of(operation)
    if operation is None or rule is None:
        raise Refusal("it is not known to work on parts of tensors")
    mesh = values.mesh
    decided = decide(mesh, rule, operands.names, [x.placements for x in operands.found])
    moved = []
    for k, (name, x) in enumerate(zip(operands.names, operands.found, strict=True)):
        target = decided.operands[k]
        why = f"{shown(call)} needs it {show(mesh, target)}"
        x = values.moves.move(x, target, name, "inserted", why)
        moved.append(_filled(values, shown(call), rule, k, x, name))
    wholes = operation.results
    dims = [
        local_extents(mesh, extents(ty) or [], placements)
        for ty, placements in zip(wholes, decided.results, strict=True)
    ]
    given = iter(moved)
    arguments = [_rebuilt(values, x, given) for x in call.args]
    changed = with_arguments(call, arguments)
    if short_name(call) in _SAYS_ITS_TYPE or callee_of(call) is not None:
        changed = _with_local_types(values, changed, decided, operands, wholes)
    if rule.local is not None:
        choices = zip(decided.choices, mesh.axes.items(), strict=True)
        axes = {choice[0]: (choice[1], *axis) for choice, axis in choices if choice is not None}
        part = Part(
            changed,
            tuple(dims),
            {label: workers for label, (_, _, workers) in axes.items()},
            {label: division for label, (division, _, _) in axes.items()},
            values.builder,
            lambda label: values.moves.rank(axes[label][1]),
        )
        changed = rule.local(part)
    zeros = [
        _zeros(rule, labels, divided(mesh, placements), moved)
        for labels, placements in zip(rule.results, decided.results, strict=True)
    ]
    if isinstance(var.ty, relax.TensorType):
        return values.moves.placed(changed, var.ty, decided.results[0], zeros[0])
    made = values.builder.emit(changed, str(var.name))
    fields = []
    for k, (whole, placements) in enumerate(zip(wholes, decided.results, strict=True)):
        field = values.builder.emit(relax.TupleGetItem(made, k), f"{var.name}_{k}")
        fields.append(values.moves.placed(field, whole, placements, zeros[k]))
    return tuple(fields)


def _rebuilt(values: RankValues, argument: relax.Expr, given: Iterator[Placed]) -> relax.Expr:
    """Return an argument with what the rank has of its tensors."""
    if isinstance(argument, relax.Tuple):
        return relax.Tuple([_rebuilt(values, field, given) for field in argument.fields])
    if isinstance(argument.ty, relax.TupleType):
        fields = values.fields(argument)
        return relax.Tuple(
            [values.as_argument(next(given) if isinstance(x, Placed) else x) for x in fields]
        )
    if isinstance(argument.ty, relax.TensorType):
        return values.as_argument(next(given))
    return values.whole(argument, "a call")


def _zeros(
    rule: Rule, labels: Sequence[int | None], axes: Iterable[int], moved: Sequence[Placed]
) -> frozenset[int]:
    """Return the axes of a result beyond whose end it has zeros."""
    found = set()
    for axis in axes:
        label = labels[axis]
        have = [
            label in of and of.index(label) in x.zeros
            for of, x in zip(rule.operands, moved, strict=True)
        ]
        if rule.zeros(have):
            found.add(axis)
    return frozenset(found)


def _filled(
    values: RankValues, shown: str, rule: Rule, operand: int, x: Placed, subject: str
) -> Placed:
    """Return an operand that has beyond its ends what does no harm there."""
    ends = uneven(values.mesh, x.placements, x.whole)
    labels = rule.operands[operand]
    for axis in sorted(ends):
        label = labels[axis]
        reduction = None if label is None else rule.reduced.get(label)
        if reduction is not None:
            neutral = _neutral(reduction, dtype_of(x.whole))
            why = f"{shown} {'sums' if reduction == 'sum' else 'reduces'} over it"
        elif operand in rule.beyond:
            neutral, why = rule.beyond[operand], f"{shown} takes it there too"
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
    decided: Decided,
    operands: _Operands,
    wholes: Sequence[relax.TensorType],
) -> relax.Call:
    """Return a call of a function with the types of what the rank gets."""
    mesh = values.mesh
    given = [x.whole for x in operands.found]
    placements = (*decided.operands, *decided.results)
    of_rank = [local_type(mesh, *one) for one in zip((*given, *wholes), placements, strict=True)]
    callee = callee_of(call)
    if isinstance(callee, tvm.ir.GlobalVar):
        _check_takes(values.module, callee, of_rank)
        if len(call.args) > 2:
            raise Refusal("it is given symbolic values, and those of parts are not known")
    types = of_rank[len(given) :]
    ty = types[0] if isinstance(call.ty_args[0], relax.TensorType) else relax.TupleType(types)
    return relax.Call(call.op, call.args, call.attrs, [ty], call.span)


def _check_takes(
    module: tvm.IRModule, callee: tvm.ir.GlobalVar, types: Sequence[relax.TensorType]
) -> None:
    """Check that a PrimFunc takes tensors of the extents that a rank has."""
    function = module[callee]
    buffers = (
        [p.ty.shape for p in function.params if isinstance(p.ty, tvm.tirx.BufferType)]
        if isinstance(function, tvm.tirx.PrimFunc)
        else []
    )
    if len(buffers) != len(types):
        raise Refusal(f"it has {len(buffers)} tensors, and is given {len(types)}")
    for shape, ty in zip(buffers, types, strict=True):
        for wanted, extent in zip(shape, extents(ty) or [], strict=False):
            number, found = constant(wanted), constant(extent)
            if number is not None and number != found:
                raise Refusal(
                    f"it is compiled for an extent of {number}, and a rank has "
                    f"{show_extent(extent)}: make that extent symbolic"
                )


def _of_shape(name: str, whole: relax.TensorType) -> relax.Expr:
    """Return what operators say of the shape of a tensor, which is that of all of it."""
    dims = extents(whole)
    assert dims is not None, "only tensors of known shape are divided"
    if name == "shape_of":
        return relax.ShapeExpr(dims)
    size = dims[0] if dims else 1
    for extent in dims[1:]:
        size = size * extent
    return relax.op.reshape(relax.op.shape_to_tensor(relax.ShapeExpr([size])), ())


def _refused(
    values: RankValues, var: relax.Var, call: relax.Call, operands: _Operands, refusal: Refusal
) -> TransformError:
    found = [
        f"{name} is {show(values.mesh, x.placements)}"
        for name, x in zip(operands.names, operands.found, strict=True)
        if not x.replicated
    ]
    return values.error(
        f"{var.name} is {shown(call)}: {refusal}; found: {'; '.join(found)}; say "
        "before, with R.comm.place, where it can work, such as comm.Replica()"
    )


def with_arguments(call: relax.Call, arguments: Sequence[relax.Expr]) -> relax.Call:
    """Return a call with other arguments."""
    return relax.Call(call.op, arguments, call.attrs, list(call.ty_args), call.span)
