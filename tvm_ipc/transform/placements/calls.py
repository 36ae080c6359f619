# SPDX-License-Identifier: Apache-2.0
"""What a call of a program for all ranks becomes."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax

from tvm_ipc.comm import Shard
from tvm_ipc.comm.legalize import reshaped
from tvm_ipc.comm.operator import NAME as COLLECTIVE
from tvm_ipc.comm.operator import dtype_of, extents
from tvm_ipc.comm.placements import show
from tvm_ipc.errors import TransformError
from tvm_ipc.transform.placements.operators import DIVISIONS, rule_of, short_name, tensors_of
from tvm_ipc.transform.placements.placed import Placed, divided, local_extents, uneven
from tvm_ipc.transform.placements.reshape import new_axis
from tvm_ipc.transform.placements.rules import Refusal, Rule, decide
from tvm_ipc.transform.placements.values import Found, RankValues, name_of

_RESHAPING = ("reshape", "expand_dims", "squeeze", "flatten")


def lower_call(values: RankValues, var: relax.Var, call: relax.Call) -> Found:
    """Return what the result of a call is for a rank."""
    name = short_name(call)
    if name.startswith("ccl.") or name == COLLECTIVE.removeprefix("relax."):
        raise values.error(
            f"{var.name} is R.{name}, which is for one rank, and a function with a place is "
            "for all of them; say with R.comm.place where the result lies"
        )
    places = tensors_of(call)
    operands = [values.tensor(call.args[k]) for k in places]
    if all(x.replicated for x in operands):
        shown = f"R.{name}" if name else f"{call.op}"
        arguments = [values.whole(x, f"{var.name}: {shown}") for x in call.args]
        return values.classified(_with_arguments(call, arguments))
    names = [name_of(call.args[k]) for k in places]
    try:
        if name in _RESHAPING and extents(var.ty) is not None:
            return _reshape(values, operands[0], var.ty)
        rule = rule_of(call, var.ty)
        if rule is None:
            raise Refusal("it is not known to work on parts of tensors")
        decided = decide(values.mesh, rule, names, [x.placements for x in operands])
    except Refusal as refusal:
        raise _refused(values, var, call, refusal) from None
    for k, target in enumerate(decided.operands):
        why = f"R.{name} needs it {show(values.mesh, target)}"
        moved = values.moves.move(operands[k], target, names[k], "inserted", why)
        operands[k] = _filled(values, name, rule, k, moved, names[k])
    zeros = frozenset(
        axis
        for axis in divided(values.mesh, decided.result)
        if rule.zeros
        and all(
            rule.result[axis] in labels and labels.index(rule.result[axis]) in x.zeros
            for labels, x in zip(rule.operands, operands, strict=True)
        )
    )
    given = dict(zip(places, operands, strict=True))
    arguments = [
        values.as_argument(given[k]) if k in given else values.whole(x, f"R.{name}")
        for k, x in enumerate(call.args)
    ]
    changed = _with_arguments(call, arguments)
    return values.moves.placed(changed, var.ty, decided.result, zeros)


def _filled(
    values: RankValues, name: str, rule: Rule, operand: int, x: Placed, subject: str
) -> Placed:
    """Return an operand that has beyond its ends what does no harm there."""
    ends = uneven(values.mesh, x.placements, x.whole)
    if not ends:
        return x
    summed = frozenset(axis for axis in ends if rule.operands[operand][axis] in rule.summed)
    if dirty := summed - x.zeros:
        x = values.moves.fill(x, dirty, 0, subject, f"R.{name} sums over it")
    if name in DIVISIONS and operand == 1 and "float" not in dtype_of(x.whole):
        x = values.moves.fill(x, ends, 1, subject, "whole numbers are not divided by 0")
    return x


def _reshape(values: RankValues, x: Placed, whole: relax.TensorType) -> Placed:
    before, after = extents(x.whole), extents(whole)
    if before is None or after is None:
        raise Refusal("the shapes are not known")
    placements = list(x.placements)
    zeros = set()
    for axis, workers in divided(values.mesh, x.placements).items():
        target = new_axis(before, after, axis, workers)
        placements[x.placements.index(Shard(axis))] = Shard(target)
        if axis in x.zeros:
            zeros.add(target)
    dims = local_extents(values.mesh, after, tuple(placements))
    call = reshaped(values.builder, values.as_argument(x), dims)
    return values.moves.placed(call, whole, tuple(placements), frozenset(zeros))


def _refused(
    values: RankValues, var: relax.Var, call: relax.Call, refusal: Refusal
) -> TransformError:
    found = []
    for k in tensors_of(call):
        x = values.tensor(call.args[k])
        if not x.replicated:
            found.append(f"{name_of(call.args[k])} is {show(values.mesh, x.placements)}")
    return values.error(
        f"{var.name} is R.{short_name(call)}: {refusal}; found: {'; '.join(found)}; say "
        "before, with R.comm.place, where it can work, such as comm.Replica()"
    )


def _with_arguments(call: relax.Call, arguments: Sequence[relax.Expr]) -> relax.Call:
    return relax.Call(call.op, arguments, call.attrs, list(call.ty_args), call.span)
