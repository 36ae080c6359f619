# SPDX-License-Identifier: Apache-2.0
"""Insertion of `R.comm.place` wherever an operator needs an operand in another placement.

Before, with the columns of `w` sharded, and a sort of `y` along them:
    y = R.matmul(x, w)
    z = R.sort(y, axis=-1)

After:
    y = R.matmul(x, w)
    lv = R.comm.place(y, mesh, {"tp": comm.Replica()})
    z = R.sort(lv, axis=-1)

Operands get the placements that the rule of the operator needs. Among several possibilities the one
that moves the fewest bytes is chosen, with 128 for symbolic extents. The operands of an operator
without a rule are replicated. A partial sum with several uses is reduced where it is computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Final

import numpy as np
import tvm
from tvm import relax

from tvm_ipc.analysis.ffi_arrays import as_list
from tvm_ipc.analysis.walk_and_rewrite_bindings import begin_with, rewrite, typed, walk, with_value
from tvm_ipc.comm import Mesh, Partial, Replica, Shard, place
from tvm_ipc.comm.collective_relax_op import dtype_of, extents
from tvm_ipc.comm.extent_arithmetic import constant, item_bytes
from tvm_ipc.comm.place_op import NAME, is_place
from tvm_ipc.comm.placements import Placements, placements_of
from tvm_ipc.spmd.parameter_uses import variables_of
from tvm_ipc.spmd.placements.placed_tensor import is_whole
from tvm_ipc.spmd.rules.axis_label_rule import (
    Choice,
    Refusal,
    ResolvedPlacements,
    Rule,
    placements_for_choices,
    resolve_placements,
)
from tvm_ipc.spmd.rules.decompose_along_sharded_axis import decompose
from tvm_ipc.spmd.rules.operation import operation_of, short_name
from tvm_ipc.spmd.rules.operator_rule_table import rule_of

#: The operator that specifies the placement of a tensor.
PLACE: Final = tvm.ir.Op.get(NAME)
#: The number that is assumed for a symbolic extent.
TYPICAL: Final = 128
#: The placements of a tensor, a tuple of those of its fields, or None for other values.
PlacementsOfVariable = Any


def insert_reshards(
    function: relax.Function, mesh: Mesh, params: Mapping[relax.Var, Placements]
) -> relax.Function:
    """Return the function with `R.comm.place` wherever the placement of a tensor changes.

    Parameters
    ----------
    function : a function of a global program, which may have `R.comm.place` already.
    mesh : the mesh of its ranks.
    params : the placements of its parameters.
    """
    return _ReshardInserter(function, mesh, params).function


def placements_of_tensors(
    function: relax.Function, mesh: Mesh, params: Mapping[relax.Var, Placements]
) -> Mapping[relax.Var, PlacementsOfVariable]:
    """Return the placements of the variables of a function; None stands for replicated tensors."""
    return _ReshardInserter(function, mesh, params).placements


class _ReshardInserter:
    """Rewrites one function; `placements` has those of its variables before the rewrite."""

    def __init__(
        self, function: relax.Function, mesh: Mesh, params: Mapping[relax.Var, Placements]
    ) -> None:
        self.mesh = mesh
        self.replicas: Placements = (Replica(),) * len(mesh.axes)
        self.builder = relax.BlockBuilder()
        # A parameter has the placement of the first `R.comm.place` on it.
        self.placements: dict[relax.Var, PlacementsOfVariable] = dict(params)
        for _, value in walk(function):
            if is_place(value) and not value.attrs.inserted:
                placements = placements_of(mesh, value.attrs.placements)
                if value.args[0] in set(function.params):
                    self.placements.setdefault(value.args[0], placements)
        #: Resharded copies, by variable, block and placements.
        self.moved: dict[tuple[relax.Var, int, Placements], relax.Var] = {}
        self.uses = Counter(x for _, value in walk(function) for x in variables_of(value))
        blocks = function.body.blocks
        self.blocks = {
            binding.var: k for k, block in enumerate(blocks) for binding in as_list(block.bindings)
        }
        self.dataflow = [isinstance(block, relax.DataflowBlock) for block in blocks]
        self.block = 0
        #: Bindings to insert before the current one.
        self.before: list[relax.Binding] = []
        changed = rewrite(function, self._change)
        first = [
            relax.VarBinding(
                relax.Var(f"{param.name}_placed", param.ty),
                self._place(param, placed, inserted=False),
            )
            for param, placed in params.items()
        ]
        self.function = begin_with(changed, first) if first else changed

    # ---- bindings ---------------------------------------------------------------------------

    def _change(self, binding: relax.Binding, value: relax.Expr) -> list[relax.Binding] | None:
        var = binding.var
        if var not in self.blocks:  # in a branch, or a nested function
            return None
        self.block, self.before = self.blocks[var], []
        if isinstance(binding, relax.MatchCast):
            whole = self._moved_to(value, self.replicas) if isinstance(value, relax.Var) else value
            new = binding if whole is value else with_value(binding, whole)
            return [*self.before, new] if self.before or new is not binding else None
        if is_place(value):
            self.placements[var] = placements_of(self.mesh, value.attrs.placements)
            return None
        if not isinstance(value, relax.Call):
            self.placements[var] = self._placements_of(value)
            return None
        changed = self._resharded(var, value)
        current = self.placements[var]
        if self.uses[var] > 1 and any(isinstance(each, Partial) for each in current or ()):
            partial = self._fresh(f"{var.name}_part", var.ty)
            self.placements[partial] = current
            self.before.append(relax.VarBinding(partial, changed))
            reduced = tuple(Replica() if isinstance(each, Partial) else each for each in current)
            self.placements[var] = reduced
            changed = self._place(partial, reduced)
        if changed is value:
            return None
        return [*self.before, with_value(binding, changed)]

    def _resharded(self, var: relax.Var, call: relax.Call) -> relax.Expr:
        """Return a call with resharded operands, and record the placements of its result."""
        operands = list(tensors_among(call.args))
        current = [self._placements_of(x) for x in operands]
        if all(placements == self.replicas for placements in current):
            self.placements[var] = None
            return call
        rule = rule_for(call, var.ty)
        resolved = None
        if rule is not None:
            try:
                resolved = resolve_placements(self.mesh, rule, [str(x) for x in operands], current)
            except Refusal:
                result = decompose(short_name(call), call, self._emit)
                if result is not None:
                    self.placements[var] = self._placements_of(result)
                    return result
                resolved = cheapest(self.mesh, rule, operands, current, var.ty)
        targets = resolved.operands if resolved else [self.replicas] * len(operands)
        if resolved is None:
            self.placements[var] = None
        elif isinstance(var.ty, relax.TensorType):
            self.placements[var] = resolved.results[0]
        else:
            self.placements[var] = resolved.results
        if short_name(call) in ("shape_of", "size"):
            return call
        moved = [
            x if placements in (target, self.replicas) else self._moved_to(x, target)
            for x, placements, target in zip(operands, current, targets, strict=True)
        ]
        if all(new is old for new, old in zip(moved, operands, strict=True)):
            return call
        tensors = iter(moved)
        arguments = [_replace_tensors(x, tensors) for x in call.args]
        return typed(
            relax.Call(call.op, arguments, call.attrs, list(call.ty_args), call.span), call.ty
        )

    def _emit(self, call: relax.Call) -> relax.Var:
        """Bind one more call before the current binding, and return its variable."""
        call = self.builder.normalize(call)
        var = self._fresh(short_name(call).replace(".", "_"), call.ty)
        self.before.append(relax.VarBinding(var, self._resharded(var, call)))
        return var

    # ---- placements -------------------------------------------------------------------------

    def _placements_of(self, expr: relax.Expr) -> PlacementsOfVariable:
        if isinstance(expr, relax.Tuple):
            return tuple(map(self._placements_of, expr.fields))
        placements = self.placements.get(expr) if isinstance(expr, relax.Var) else None
        if isinstance(expr, relax.TupleGetItem):
            fields = self._placements_of(expr.tuple_value)
            placements = fields[int(expr.index)] if fields else None
        if placements is None and isinstance(expr.ty, relax.TensorType):
            return self.replicas
        return placements

    def _moved_to(self, x: relax.Expr, target: Placements) -> relax.Expr:
        """Return the tensor in the target placement, which is inserted once in each block."""
        if self._placements_of(x) == target:
            return x
        key = (x, self.block, target)
        if key not in self.moved:
            if not isinstance(x, relax.Var):  # a field of a tuple
                field = self._fresh("field", x.ty)
                self.placements[field] = self._placements_of(x)
                self.before.append(relax.VarBinding(field, x))
                x = field
            moved = self._fresh(f"{x.name}_moved", x.ty)
            self.before.append(relax.VarBinding(moved, self._place(x, target)))
            self.placements[moved] = target
            self.moved[key] = moved
        return self.moved[key]

    def _place(self, x: relax.Var, target: Placements, inserted: bool = True) -> relax.Call:
        placements = dict(zip(self.mesh.axes, target, strict=True))
        return typed(place(x, self.mesh, placements, inserted=inserted), x.ty)

    def _fresh(self, name: str, ty: relax.Type) -> relax.Var:
        return (relax.DataflowVar if self.dataflow[self.block] else relax.Var)(name, ty)


def tensors_among(arguments: Sequence[relax.Expr]) -> Iterator[relax.Expr]:
    """Yield the tensors among arguments, including those in tuples."""
    for argument in arguments:
        if isinstance(argument, relax.Tuple):
            yield from tensors_among(argument.fields)
        elif isinstance(argument.ty, relax.TupleType):
            for k in range(len(argument.ty.fields)):
                yield from tensors_among([relax.TupleGetItem(argument, k)])
        elif isinstance(argument.ty, relax.TensorType):
            yield argument


def _replace_tensors(argument: relax.Expr, tensors: Iterator[relax.Expr]) -> relax.Expr:
    if isinstance(argument, relax.Tuple):
        fields = [_replace_tensors(field, tensors) for field in argument.fields]
        return relax.Tuple(fields)
    if isinstance(argument.ty, relax.TupleType):
        fields = [
            next(tensors) if isinstance(ty, relax.TensorType) else relax.TupleGetItem(argument, k)
            for k, ty in enumerate(argument.ty.fields)
        ]
        return relax.Tuple(fields)
    return next(tensors) if isinstance(argument.ty, relax.TensorType) else argument


# ---- the placements that move the fewest bytes ----


def rule_for(call: relax.Call, ty: relax.Type) -> Rule | None:
    """Return the rule of a call with a result of a type, or None if there is none."""
    try:
        operation = operation_of(call, ty)
        return None if operation is None else rule_of(operation)
    except Refusal:
        return None


def cheapest(
    mesh: Mesh,
    rule: Rule,
    operands: Sequence[relax.Expr],
    current: Sequence[Placements],
    result_type: relax.Type,
) -> ResolvedPlacements:
    """Return the placements of operands and results that move the fewest bytes.

    Parameters
    ----------
    mesh : the mesh of the ranks.
    rule : the rule of the operator.
    operands : its operands.
    current : the placements that the operands have.
    result_type : the type of its result.
    """
    replicas: Placements = (Replica(),) * len(mesh.axes)
    names = [str(x) for x in operands]
    choices: list[list[Choice]] = []
    for index, workers in enumerate(mesh.axes.values()):
        sharded = rule.sharded_labels([placements[index] for placements in current], workers)
        allowed: list[Choice] = [
            (label, division)
            for label, division in sharded
            if label is not None and not rule.why_not(label, workers, division)
        ]
        choices.append([*allowed, None])
    best: tuple[float, ResolvedPlacements] | None = None
    for of_mesh_axes in product(*choices):
        try:
            resolved = placements_for_choices(mesh, rule, names, current, of_mesh_axes)
        except Refusal:
            continue
        moves = zip(operands, current, resolved.operands, strict=True)
        cost = sum(_bytes(x.ty) * _share(mesh, a, b) for x, a, b in moves)
        results = result_type.fields if isinstance(result_type, relax.TupleType) else [result_type]
        cost += sum(
            _bytes(ty) * _share(mesh, placed, replicas)
            for ty, placed in zip(results, resolved.results, strict=True)
            if any(isinstance(placement, Partial) for placement in placed)
        )
        if best is None or cost < best[0]:
            best = cost, resolved
    assert best is not None, "every operator supports replicated operands"
    return best[1]


def _share(mesh: Mesh, source: Placements, target: Placements) -> float:
    """Return the fraction of a tensor that a rank receives when its placement changes."""
    total = 0.0
    for workers, before, after in zip(mesh.axes.values(), source, target, strict=True):
        if before == after or is_whole(before):
            continue
        share = (workers - 1) / workers
        if isinstance(before, Partial) and isinstance(after, Replica):
            share *= 2
        elif isinstance(before, Shard) and isinstance(after, Shard):
            share /= workers
        total += share
    return total


def _bytes(ty: relax.TensorType) -> float:
    dims = [constant(extent) for extent in extents(ty) or []]
    count = np.prod([TYPICAL if number is None else number for number in dims], dtype=float)
    return float(count) * item_bytes(tvm.DataType(dtype_of(ty) or "float32"))
