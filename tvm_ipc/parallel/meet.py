# SPDX-License-Identifier: Apache-2.0
"""Places in a program where what operators need is not what there is.

Before, where `w` is divided by its columns and `y` has to be sorted along them:
    y = R.matmul(x, w)
    z = R.sort(y, axis=-1)

After:
    y = R.matmul(x, w)
    lv = R.comm.place(y, mesh, {"tp": comm.Replica()})
    z = R.sort(lv, axis=-1)

An operator gets its operands as its rule says. Where that leaves a choice, the one that moves the
fewest bytes is taken; an operator without a rule gets all of its operands. Symbolic extents count
as 128 there. A partial sum that is used twice is reduced where it is made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import tvm
from tvm import relax

from tvm_ipc.comm import Mesh, Partial, Replica, place
from tvm_ipc.comm.place_operator import NAME
from tvm_ipc.comm.placements import Placements, placements_of
from tvm_ipc.parallel.cheapest import cheapest, rule_for
from tvm_ipc.parallel.uses import variables_of
from tvm_ipc.transform.ir.rewrite import begin_with, rewrite, typed, walk, with_value
from tvm_ipc.transform.rules.composed import composed
from tvm_ipc.transform.rules.operation import short_name
from tvm_ipc.transform.rules.rule import Refusal, decide

#: The operator that says where a tensor lies.
PLACE: Final = tvm.ir.Op.get(NAME)
#: Of a tensor its placements, of a tuple those of its fields, of other values None.
Where = Any


def with_meetings(
    function: relax.Function, mesh: Mesh, params: Mapping[relax.Var, Placements]
) -> relax.Function:
    """Return a function for all ranks that says where tensors lie, wherever that changes.

    Parameters
    ----------
    function : for all ranks; it may say of some tensors where they lie.
    mesh : of its ranks.
    params : where parameters lie.
    """
    return _Meeting(function, mesh, params).function


def where_tensors_lie(
    function: relax.Function, mesh: Mesh, params: Mapping[relax.Var, Placements]
) -> Mapping[relax.Var, Where]:
    """Return where tensors lie that the bindings of a function make, None for replicas."""
    return _Meeting(function, mesh, params).where


class _Meeting:
    def __init__(
        self, function: relax.Function, mesh: Mesh, params: Mapping[relax.Var, Placements]
    ) -> None:
        self.mesh = mesh
        self.replicas: Placements = (Replica(),) * len(mesh.axes)
        self.builder = relax.BlockBuilder()
        # A parameter lies where the first place on it says.
        self.where: dict[relax.Var, Where] = dict(params)
        for _, value in walk(function):
            if isinstance(value, relax.Call) and value.op.same_as(PLACE):
                placements = placements_of(mesh, value.attrs.placements)
                if value.args[0] in set(function.params):
                    self.where.setdefault(value.args[0], placements)
        #: What stands for a variable, once it is placed elsewhere: by its block and placements.
        self.moved: dict[tuple[relax.Var, int, Placements], relax.Var] = {}
        self.uses = Counter(x for _, value in walk(function) for x in variables_of(value))
        blocks = function.body.blocks
        self.blocks = {one.var: k for k, block in enumerate(blocks) for one in block.bindings[:]}
        self.dataflow = [isinstance(block, relax.DataflowBlock) for block in blocks]
        self.block = 0
        self.before: list[relax.Binding] = []  #: what stands before the binding at hand
        changed = rewrite(function, self._change)
        first = [
            relax.VarBinding(
                relax.Var(f"{param.name}_placed", param.ty), self._place(param, placed)
            )
            for param, placed in params.items()
        ]
        self.function = begin_with(changed, first) if first else changed

    # ---- bindings ---------------------------------------------------------------------------

    def _change(self, binding: relax.Binding, value: relax.Expr) -> list[relax.Binding] | None:
        var = binding.var
        if var not in self.blocks:  # within an if, or a function
            return None
        self.block, self.before = self.blocks[var], []
        if isinstance(binding, relax.MatchCast):
            whole = self._moved_to(value, self.replicas) if isinstance(value, relax.Var) else value
            new = binding if whole is value else with_value(binding, whole)
            return [*self.before, new] if self.before or new is not binding else None
        if isinstance(value, relax.Call) and value.op.same_as(PLACE):
            self.where[var] = placements_of(self.mesh, value.attrs.placements)
            return None
        if not isinstance(value, relax.Call):
            self.where[var] = self._where(value)
            return None
        changed = self._bound(var, value)
        if self.uses[var] > 1 and any(isinstance(one, Partial) for one in self.where[var] or ()):
            part = self._fresh(f"{var.name}_part", var.ty)
            self.where[part] = self.where[var]
            self.before.append(relax.VarBinding(part, changed))
            self.where[var] = tuple(
                Replica() if isinstance(one, Partial) else one for one in self.where[var]
            )
            changed = self._place(part, self.where[var])
        if changed is value:
            return None
        return [*self.before, with_value(binding, changed)]

    def _bound(self, var: relax.Var, call: relax.Call) -> relax.Expr:
        """Return what a variable is bound to instead of a call, and note where it lies."""
        operands = list(tensors_among(call.args))
        found = [self._where(x) for x in operands]
        if all(one == self.replicas for one in found):
            self.where[var] = None
            return call
        rule = rule_for(call, var.ty)
        decided = None
        if rule is not None:
            try:
                decided = decide(self.mesh, rule, [str(x) for x in operands], found)
            except Refusal:
                made = composed(short_name(call), call, self._compute)
                if made is not None:
                    self.where[var] = self._where(made)
                    return made
                decided = cheapest(self.mesh, rule, operands, found, var.ty)
        targets = decided.operands if decided else [self.replicas] * len(operands)
        if decided is None:
            self.where[var] = None
        elif isinstance(var.ty, relax.TensorType):
            self.where[var] = decided.results[0]
        else:
            self.where[var] = decided.results
        if short_name(call) in ("shape_of", "size"):
            return call
        moved = [
            x if one in (target, self.replicas) else self._moved_to(x, target)
            for x, one, target in zip(operands, found, targets, strict=True)
        ]
        if all(one is x for one, x in zip(moved, operands, strict=True)):
            return call
        given = iter(moved)
        arguments = [_rebuilt(x, given) for x in call.args]
        return typed(
            relax.Call(call.op, arguments, call.attrs, list(call.ty_args), call.span), call.ty
        )

    def _compute(self, call: relax.Call) -> relax.Var:
        """Return a variable that is bound to one more call, before the binding at hand."""
        call = self.builder.normalize(call)
        var = self._fresh(short_name(call).replace(".", "_"), call.ty)
        self.before.append(relax.VarBinding(var, self._bound(var, call)))
        return var

    # ---- where tensors lie ------------------------------------------------------------------

    def _where(self, expr: relax.Expr) -> Where:
        if isinstance(expr, relax.Tuple):
            return tuple(map(self._where, expr.fields))
        found = self.where.get(expr) if isinstance(expr, relax.Var) else None
        if isinstance(expr, relax.TupleGetItem):
            fields = self._where(expr.tuple_value)
            found = fields[int(expr.index)] if fields else None
        return self.replicas if found is None and isinstance(expr.ty, relax.TensorType) else found

    def _moved_to(self, x: relax.Expr, target: Placements) -> relax.Expr:
        """Return a variable that is placed elsewhere, which is done once in a block."""
        if self._where(x) == target:
            return x
        key = (x, self.block, target)
        if key not in self.moved:
            if not isinstance(x, relax.Var):  # a field of a tuple
                field = self._fresh("field", x.ty)
                self.where[field] = self._where(x)
                self.before.append(relax.VarBinding(field, x))
                x = field
            moved = self._fresh(f"{x.name}_moved", x.ty)
            self.before.append(relax.VarBinding(moved, self._place(x, target)))
            self.where[moved] = target
            self.moved[key] = moved
        return self.moved[key]

    def _place(self, x: relax.Var, target: Placements) -> relax.Call:
        return typed(place(x, self.mesh, dict(zip(self.mesh.axes, target, strict=True))), x.ty)

    def _fresh(self, name: str, ty: relax.Type) -> relax.Var:
        return (relax.DataflowVar if self.dataflow[self.block] else relax.Var)(name, ty)


def tensors_among(arguments: Sequence[relax.Expr]) -> Iterator[relax.Expr]:
    """Yield the tensors among arguments, also those in tuples."""
    for argument in arguments:
        if isinstance(argument, relax.Tuple):
            yield from tensors_among(argument.fields)
        elif isinstance(argument.ty, relax.TupleType):
            for k in range(len(argument.ty.fields)):
                yield from tensors_among([relax.TupleGetItem(argument, k)])
        elif isinstance(argument.ty, relax.TensorType):
            yield argument


def _rebuilt(argument: relax.Expr, given: Iterator[relax.Expr]) -> relax.Expr:
    if isinstance(argument, relax.Tuple):
        fields = [_rebuilt(field, given) for field in argument.fields]
        return relax.Tuple(fields)
    if isinstance(argument.ty, relax.TupleType):
        fields = [
            next(given) if isinstance(ty, relax.TensorType) else relax.TupleGetItem(argument, k)
            for k, ty in enumerate(argument.ty.fields)
        ]
        return relax.Tuple(fields)
    return next(given) if isinstance(argument.ty, relax.TensorType) else argument
