# SPDX-License-Identifier: Apache-2.0
"""Lets one packed function sum over the ranks, add a residual, and normalise the rows of that.

Before:
    total = R.ccl.allreduce(part, "sum", in_group=False)
    x = R.add(residual, total)
    y = R.nn.rms_norm(x, weight, axes=[-1], epsilon=1e-5)

After:
    fused = R.call_dps_packed(
        "tvm_ipc.allreduce_rms_norm", (part, residual, weight, 1e-5, 0, 3, 0),
        out_ty=[R.Tensor((n, 64), "float32"), R.Tensor((n, 64), "float32")])
    x = fused[0]
    y = fused[1]

A row is added and normalised while it is in the cache, so memory is touched once. The new residual
has the bits that it had; the norm is float32 throughout and rounds once, at the end. It may be a
LayerNorm, and casts may stand before it (to float32) and after it. Whatever else uses the new
residual still does; where anything else uses the sum it stays as it is.

Runs while all of these are operators, before `LegalizeOps`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

import tvm
from tvm import relax

from tvm_ipc import arguments
from tvm_ipc.comm.legalize import team_argument
from tvm_ipc.comm.operator import NAME as COLLECTIVE
from tvm_ipc.contract import AllReduceStrategy, CollectiveFlag
from tvm_ipc.transform.epilogue.find import (
    NORMS,
    AllReduceEpilogue,
    CannotFuseError,
    find_epilogue,
    is_allreduce,
    reduction_of,
)
from tvm_ipc.transform.ir.collectives import name_of
from tvm_ipc.transform.ir.rewrite import belongs_to_others, change_functions, rewrite
from tvm_ipc.transform.ir.uses import Place, Uses, operator_of
from tvm_ipc.transform.module_pass import module_pass, option
from tvm_ipc.transform.report import Decision, note

_NAME: Final = "FuseAllReduceEpilogue"


@module_pass
class FuseAllReduceEpilogue:
    """Fuse sums over ranks with the addition of a residual and the norm that follow them.

    Parameters
    ----------
    allreduce_strategy : how the data moves; the result has the same bits.
    num_groups : the number of groups of the session. With one, a sum in the group is one over all.
    """

    allreduce_strategy: AllReduceStrategy | int | str = option(
        lambda _, given: AllReduceStrategy.of(given), default="auto"
    )
    num_groups: int = option(
        arguments.integer, "a number of groups, 1 or more", 1, default=1, kw_only=True
    )

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module with calls of the fused function."""
        strategy = AllReduceStrategy.of(self.allreduce_strategy)

        def fused(name: str, function: relax.Function) -> relax.Function:
            return _fuse(name, function, strategy, self.num_groups)

        return change_functions(mod, fused)


def _fuse(
    name: str, function: relax.Function, strategy: AllReduceStrategy, num_groups: int
) -> relax.Function:
    """Return the function with the fused calls; itself if there are none."""
    if belongs_to_others(function):
        return function
    uses = Uses()
    uses.read(function.body)
    removed: set[Any] = set()
    after: dict[Any, list[relax.Binding]] = defaultdict(list)
    builder = relax.BlockBuilder()
    for place in list(uses.places.values()):
        value = place.binding.value
        if not is_allreduce(value) or not isinstance(place.binding, relax.VarBinding):
            continue
        subject = f"allreduce of {name_of(value.args[0])} ({reduction_of(value)})"
        try:
            epilogue = find_epilogue(place, uses, removed)
        except CannotFuseError as refusal:
            note(Decision(_NAME, name, subject, "left alone", str(refusal)))
            continue
        target = NORMS[operator_of(epilogue.norm.binding.value)]
        reason = f"{name_of(epilogue.addition.binding.var)} and its norm follow: {target.name}"
        note(Decision(_NAME, name, subject, "fused", reason))
        whole = [epilogue.allreduce, epilogue.addition, epilogue.norm, *epilogue.casts]
        gone = {one.binding.var for one in whole}
        removed |= gone
        others = [one for one in uses.users[epilogue.addition.binding.var] if not _binds(one, gone)]
        call = _call(builder, epilogue, strategy, num_groups)
        after[epilogue.at.binding.var] += _bindings(epilogue, call, keep_sum=bool(others))
    if not removed:
        return function

    def change(binding: relax.Binding, _: relax.Expr) -> Sequence[relax.Binding] | None:
        variable = binding.var
        if variable not in removed and variable not in after:
            return None
        return [*([] if variable in removed else [binding]), *after.get(variable, ())]

    return rewrite(function, change)


def _binds(place: Place, variables: set[Any]) -> bool:
    return place.binding is not None and place.binding.var in variables


def _call(
    builder: relax.BlockBuilder,
    epilogue: AllReduceEpilogue,
    strategy: AllReduceStrategy,
    num_groups: int,
) -> relax.Expr:
    """Return the fused call."""
    allreduce, norm = epilogue.allreduce.binding.value, epilogue.norm.binding.value
    tensors = [allreduce.args[0], epilogue.residual, *epilogue.weights]
    given = [
        *tensors,
        relax.prim_value(float(norm.attrs.epsilon)),
        _team(allreduce, num_groups),
        relax.prim_value(int(strategy)),
        relax.prim_value(int(CollectiveFlag.NONE)),
    ]
    out = [epilogue.addition.binding.var.ty, epilogue.result.ty]
    call = relax.op.call_dps_packed(NORMS[operator_of(norm)].name, relax.Tuple(given), out_ty=out)
    return builder.normalize(call)


def _team(allreduce: relax.Call, num_groups: int) -> relax.Expr:
    attrs = allreduce.attrs
    in_group = "group" if getattr(attrs, "in_group", False) else "world"
    team = attrs.team if operator_of(allreduce) == COLLECTIVE else in_group
    return team_argument("world" if isinstance(team, str) and num_groups == 1 else team)


def _bindings(
    epilogue: AllReduceEpilogue, call: relax.Expr, *, keep_sum: bool
) -> list[relax.Binding]:
    """Return the call, and its results under the names that they had."""
    inside = isinstance(epilogue.norm.block, relax.DataflowBlock)
    var = (relax.DataflowVar if inside else relax.Var)(f"{name_of(epilogue.result)}_fused", call.ty)
    bindings = [relax.VarBinding(var, call)]
    if keep_sum:
        summed = epilogue.addition.binding
        bindings.append(relax.VarBinding(summed.var, relax.TupleGetItem(var, 0), summed.span))
    bindings.append(relax.VarBinding(epilogue.result, relax.TupleGetItem(var, 1)))
    return bindings
