# SPDX-License-Identifier: Apache-2.0
"""The pass `FuseAllReduceEpilogue`, which fuses all-reduces with a residual addition and a norm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import tvm
from tvm import relax

from tvm_ipc import arguments
from tvm_ipc.analysis.collective_calls import name_of, running_ranks
from tvm_ipc.analysis.matching_collectives_across_branches import differing, matching_collectives
from tvm_ipc.analysis.program_order import Step, linearize
from tvm_ipc.analysis.uses import Uses, binds
from tvm_ipc.analysis.views_and_writes_of_calls import operator_of
from tvm_ipc.analysis.walk_and_rewrite_bindings import (
    Edits,
    belongs_to_others,
    calls,
    change_functions,
)
from tvm_ipc.comm.collective_attrs import CollectiveAttrs
from tvm_ipc.comm.collective_relax_op import dtype_of, is_collective, same_extents
from tvm_ipc.comm.legalize import team_argument
from tvm_ipc.packed_functions import MAX_WORKERS, AllReduceStrategy, CollectiveFlag
from tvm_ipc.packed_functions.collective_declarations import (
    ALLREDUCE_LAYER_NORM,
    ALLREDUCE_RMS_NORM,
)
from tvm_ipc.transform.module_pass import ModulePass, module_pass, option
from tvm_ipc.transform.report import Decision, note
from tvm_ipc.tvm_moved_names import GenericConst

_NAME: Final = "FuseAllReduceEpilogue"
_NORMS: Final = {
    "relax.nn.rms_norm": ALLREDUCE_RMS_NORM,
    "relax.nn.layer_norm": ALLREDUCE_LAYER_NORM,
}
_FLOATS: Final = ("float16", "bfloat16", "float32")
_TARGETS: Final = ("llvm", "c", "cuda")


@module_pass
class FuseAllReduceEpilogue(ModulePass):
    """Fuse an all-reduce with the addition of a residual and the norm that follow it.

    Before:

        total = R.ccl.allreduce(partial, "sum", in_group=False)
        x = R.add(residual, total)
        y = R.nn.rms_norm(x, weight, axes=[-1], epsilon=1e-5)

    After:

        fused = R.call_dps_packed(
            "tvm_ipc.allreduce_rms_norm", (partial, residual, weight, 1e-5, 0, 3, 0),
            out_ty=[R.Tensor((n, 64), "float32"), R.Tensor((n, 64), "float32")])
        x = fused[0]
        y = fused[1]

    A row is added and normalized while it is in the cache, so memory is read and written once. The
    new residual is bit for bit the same. The norm is computed in float32 and rounded once, at the
    end. It may be a LayerNorm, with an optional cast to float32 before it and an optional cast
    after it. The new residual may have other uses; an all-reduce whose result has other uses is
    skipped.

    The pass runs before `LegalizeOps`, while all of these are operators.

    Parameters
    ----------
    allreduce_strategy : the algorithm of the all-reduce; the result is bit for bit the same.
    num_groups : the number of groups of the session, or None if it is unknown. The results do not
        depend on it. With 1, an all-reduce in the group becomes one over all workers.
    world_size : the number of workers of the session, None if it is unknown. All-reduces over teams
        that leave out workers are skipped.

    Examples
    --------
    >>> import tvm
    >>> from tvm_ipc.transform import FuseAllReduceEpilogue
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class Model:
    ...     @R.function
    ...     def main(
    ...         partial: R.Tensor((4, 64), "float32"),
    ...         residual: R.Tensor((4, 64), "float32"),
    ...         weight: R.Tensor((64,), "float32"),
    ...     ):
    ...         total = R.ccl.allreduce(partial, "sum", in_group=False)
    ...         x = R.add(residual, total)
    ...         y = R.nn.rms_norm(x, weight, axes=[-1])
    ...         return (x, y)
    ... ''')
    >>> "tvm_ipc.allreduce_rms_norm" in FuseAllReduceEpilogue()(mod).script()
    True
    """

    allreduce_strategy: AllReduceStrategy | int | str = option(
        lambda _, value: AllReduceStrategy.of(value), default="auto"
    )
    num_groups: int | None = option(
        arguments.integer, "a number of groups, 1 or more, or None", 1, default=None, kw_only=True
    )
    world_size: int | None = option(
        arguments.integer,
        f"a number of workers, 1 to {MAX_WORKERS}, or None",
        1,
        MAX_WORKERS,
        default=None,
        kw_only=True,
    )

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module with calls of the fused function."""
        strategy = AllReduceStrategy.of(self.allreduce_strategy)

        def fused(name: str, function: relax.Function) -> relax.Function:
            return _fuse(name, function, strategy, self.num_groups, self.world_size)

        return change_functions(mod, fused)


def _fuse(
    name: str,
    function: relax.Function,
    strategy: AllReduceStrategy,
    num_groups: int | None,
    world_size: int | None,
) -> relax.Function:
    """Return the function with fused calls, or the same function if there are none."""
    if belongs_to_others(function) or not any(map(_is_allreduce, calls(function))):
        return function
    program = linearize(name, function)
    matching, uses = matching_collectives(program), Uses(program)
    skipped: set[Any] = set()
    while True:
        decisions: list[Decision] = []
        result, fused = _attempt(uses, strategy, num_groups, world_size, skipped, decisions)
        # Matching calls in different branches must become calls of the same function.
        mismatched = differing(matching, fused)
        if not mismatched:
            break
        skipped |= mismatched
    for decision in decisions:
        note(decision)
    return result


def _attempt(
    uses: Uses,
    strategy: AllReduceStrategy,
    num_groups: int | None,
    world_size: int | None,
    skipped: set[Any],
    decisions: list[Decision],
) -> tuple[relax.Function, dict[Any, Any]]:
    """Return the function with fused calls, and the fused function of each all-reduce."""
    name, edits = uses.program.name, Edits()
    ranks = running_ranks(uses.program.function, world_size)
    targets: dict[Any, Any] = {}
    builder = relax.BlockBuilder()
    for step in uses.bound.values():
        value = step.value
        if not _is_allreduce(value) or not isinstance(step.binding, relax.VarBinding):
            continue
        subject = f"allreduce of {name_of(value.args[0])} ({_reduction_of(value)})"
        try:
            if step.var in skipped:
                raise _CannotFuseError("the matching call in another branch cannot be fused")
            epilogue = _find_epilogue(step, uses, edits, ranks)
        except _CannotFuseError as error:
            decisions.append(Decision(_NAME, name, subject, "skipped", str(error)))
            continue
        target = _NORMS[operator_of(epilogue.norm.value)]
        reason = f"with {name_of(epilogue.addition.var)} and its norm, in {target.name}"
        decisions.append(Decision(_NAME, name, subject, "fused", reason))
        norm = epilogue.norm.value
        shapes = [str(weight.ty.shape) for weight in epilogue.weights]
        targets[step.var] = (target.name, float(norm.attrs.epsilon), *shapes)
        fused_bindings = [epilogue.allreduce, epilogue.addition, epilogue.norm, *epilogue.casts]
        for bound in fused_bindings:
            edits.replace(bound.var, [])
        other_users = [
            user for user in uses.users[epilogue.addition.var] if user not in fused_bindings
        ]
        call = _call(builder, epilogue, strategy, num_groups)
        new_bindings = _bind_results(epilogue, call, keep_sum=bool(other_users))
        edits.insert_after(epilogue.insertion_point.var, new_bindings)
    return edits.apply(uses.program.function), targets


def _call(
    builder: relax.BlockBuilder,
    epilogue: _Epilogue,
    strategy: AllReduceStrategy,
    num_groups: int | None,
) -> relax.Expr:
    """Return the fused call."""
    allreduce, norm = epilogue.allreduce.value, epilogue.norm.value
    tensors = [allreduce.args[0], epilogue.residual, *epilogue.weights]
    args = [
        *tensors,
        relax.prim_value(float(norm.attrs.epsilon)),
        _team(allreduce, num_groups),
        relax.prim_value(int(strategy)),
        relax.prim_value(int(CollectiveFlag.NONE)),
    ]
    out = [epilogue.addition.var.ty, epilogue.result.ty]
    call = relax.op.call_dps_packed(_NORMS[operator_of(norm)].name, relax.Tuple(args), out_ty=out)
    return builder.normalize(call)


def _team(allreduce: relax.Call, num_groups: int | None) -> relax.Expr:
    if is_collective(allreduce):
        team = CollectiveAttrs.of(allreduce).team
    else:
        team = "group" if getattr(allreduce.attrs, "in_group", False) else "world"
    return team_argument("world" if isinstance(team, str) and num_groups == 1 else team)


def _bind_results(epilogue: _Epilogue, call: relax.Expr, *, keep_sum: bool) -> list[relax.Binding]:
    """Return the bindings of the fused call and of its results, with their variables."""
    var = (relax.DataflowVar if epilogue.norm.in_dataflow else relax.Var)(
        f"{name_of(epilogue.result)}_fused", call.ty
    )
    bindings = [relax.VarBinding(var, call)]
    if keep_sum:
        summed = epilogue.addition.binding
        bindings.append(relax.VarBinding(summed.var, relax.TupleGetItem(var, 0), summed.span))
    bindings.append(relax.VarBinding(epilogue.result, relax.TupleGetItem(var, 1)))
    return bindings


# ---- analysis ------------------------------------------------------------------------------


@dataclass(eq=False)
class _Epilogue:
    """An all-reduce with the epilogue that can be fused into it.

    total = R.ccl.allreduce(partial, "sum")
    x = R.add(residual, total)                  or R.add(total, residual)
    wide = R.astype(x, "float32")               optional
    y = R.nn.rms_norm(wide, weight, axes=[-1])
    z = R.astype(y, "bfloat16")                 optional
    """

    allreduce: Step
    addition: Step
    norm: Step
    residual: Any
    weights: list[Any]  #: the weight of the norm, and the bias of a LayerNorm
    casts: list[Step]  #: the cast before the norm if it has no other use, and that after it
    result: Any  #: the variable of the normalized tensor
    insertion_point: Step  #: the binding after which the fused call is inserted


class _CannotFuseError(Exception):
    """Raised for an all-reduce that cannot be fused; the message is the reason."""


def _find_epilogue(
    allreduce: Step, uses: Uses, edits: Edits, ranks: Sequence[int] | None
) -> _Epilogue:
    """Return the epilogue of an all-reduce; raise the reason if it cannot be fused."""
    total = allreduce.var
    if is_collective(allreduce.value):
        attrs = CollectiveAttrs.of(allreduce.value)
        if attrs.scale is not None:
            raise _CannotFuseError("its sum is scaled; multiply the tensor before instead")
        if attrs.ranks_outside(ranks):
            raise _CannotFuseError("its teams leave out ranks, which have no norm of their own")
    reduction = _reduction_of(allreduce.value)
    if reduction == "tree_sum":
        raise _CannotFuseError("it is a tree_sum, but the fused kernels add in rank order")
    if reduction != "sum":
        raise _CannotFuseError("it is not a sum")
    addition = _only_user(total, uses)
    if not addition.shares_block(allreduce) or not binds(addition, "relax.add"):
        raise _CannotFuseError("its result is not added to a residual")
    if edits.replaces(addition.var):
        raise _CannotFuseError("it is the residual of another sum")
    left, right = addition.value.args
    residual = right if _same(left, total) else left
    _check_tensor("the sum", total)
    _check_residual(residual, total)
    norm, cast = _find_norm(addition, uses)
    casts = []
    if cast is not None and len(uses.users[cast.var]) == 1:
        casts.append(cast)
    weights = list(norm.value.args[1:])
    for weight in weights:
        _check_weight(weight, total)
    result = norm.var
    users = uses.users[result]
    if len(users) == 1 and users[0].shares_block(norm):
        (last,) = users
        if binds(last, "relax.astype") and _dtype(last.var) in _FLOATS:
            casts.append(last)
            result = last.var
    _check_tensor("the norm", result)
    step = _find_insertion_point(addition, weights, [cast] if cast in casts else [], uses)
    if uses.written(allreduce.entry, norm.entry):
        raise _CannotFuseError("a call before the norm may write into its inputs")
    return _Epilogue(allreduce, addition, norm, residual, weights, casts, result, step)


def _only_user(total: Any, uses: Uses) -> Step:
    users = uses.users[total]
    if len(users) != 1 or users[0].binding is None:
        raise _CannotFuseError("the addition is not the only use of its result")
    return users[0]


def _find_norm(addition: Step, uses: Uses) -> tuple[Step, Step | None]:
    """Return the norm of a sum, and the cast before the norm."""
    reason = "its sum with the residual is not normalized"
    for user in uses.users[addition.var]:
        cast = None
        candidates = [user]
        if user.shares_block(addition) and binds(user, "relax.astype"):
            if _dtype(user.var) != "float32":
                continue
            cast = user
            candidates = uses.users[user.var]
        for norm in candidates:
            if not norm.shares_block(addition) or not binds(norm, *_NORMS):
                continue
            value = norm.value
            if not _same(value.args[0], (cast or addition).var):
                continue  # the sum is the weight of the norm
            reason = _norm_refusal(value, addition.var)
            if not reason:
                return norm, cast
    raise _CannotFuseError(reason)


def _norm_refusal(norm: relax.Call, x: Any) -> str:
    axes = [int(axis) % int(x.ty.ndim) for axis in norm.attrs.axes]
    if axes != [int(x.ty.ndim) - 1]:
        over = f"axis {axes[0]}" if len(axes) == 1 else f"the axes {axes}"
        return f"the norm is over {over}; expected the last axis"
    if operator_of(norm) == "relax.nn.layer_norm" and not (norm.attrs.center and norm.attrs.scale):
        return "the norm has no bias or no weight"
    return ""


def _check_tensor(description: str, tensor: Any) -> None:
    ty = tensor.ty
    if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
        raise _CannotFuseError(f"the shape of {description} is unknown")
    if int(ty.ndim) == 0:
        raise _CannotFuseError(f"{description} has no axis")
    if _dtype(tensor) not in _FLOATS:
        raise _CannotFuseError(
            f"{description} is {_dtype(tensor) or 'of unknown type'}, for which there is no kernel"
        )
    if ty.vdevice is not None and str(ty.vdevice.target.kind.name) not in _TARGETS:
        raise _CannotFuseError(f"{description} is on the device {ty.vdevice.target.kind.name}")


def _check_residual(residual: Any, total: Any) -> None:
    if not isinstance(residual, relax.Var | GenericConst):
        raise _CannotFuseError("the residual is not a tensor")
    _check_tensor("the residual", residual)
    if not same_extents(residual.ty.shape.values, total.ty.shape.values):
        raise _CannotFuseError(
            f"the residual of shape {residual.ty.shape} is broadcast to that of the sum, "
            f"{total.ty.shape}"
        )


def _check_weight(weight: Any, total: Any) -> None:
    _check_tensor("a weight of the norm", weight)
    if not same_extents(weight.ty.shape.values, list(total.ty.shape.values)[-1:]):
        raise _CannotFuseError(
            f"a weight of the norm has the shape {weight.ty.shape}; expected that of a row"
        )


def _find_insertion_point(
    addition: Step, weights: list[Any], removed: list[Step], uses: Uses
) -> Step:
    """Return the binding after which all inputs of the fused call are bound."""
    latest = addition
    for weight in weights:
        if _same(weight, addition.var):
            raise _CannotFuseError("the sum is a weight of its own norm")
        step = uses.binding_of(weight)
        if step is not None and step.entry > latest.entry:
            latest = step
    users = [user for user in uses.users[addition.var] if user not in removed]
    if any(user.entry <= latest.entry for user in users):
        raise _CannotFuseError("the sum is used before a weight of the norm is bound")
    return latest


def _is_allreduce(value: Any) -> bool:
    """Return whether a value is a call of an all-reduce operator."""
    if is_collective(value):
        return str(value.attrs.kind) == "allreduce"
    return operator_of(value) == "relax.ccl.allreduce"


def _reduction_of(allreduce: relax.Call) -> str:
    """Return the name of the reduction of an all-reduce."""
    attrs = allreduce.attrs
    return str(attrs.reduction if is_collective(allreduce) else attrs.op_type)


def _same(expr: Any, variable: Any) -> bool:
    return isinstance(expr, relax.Var) and bool(expr.same_as(variable))


def _dtype(tensor: Any) -> str:
    return dtype_of(tensor.ty) if isinstance(tensor.ty, relax.TensorType) else ""
