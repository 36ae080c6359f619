# SPDX-License-Identifier: Apache-2.0
"""Insertion of `R.comm.place` wherever an operator needs an operand in another placement.

Before, with the columns of `w` sharded, and a sort of `y` along them:
    y = R.matmul(x, w)
    z = R.sort(y, axis=-1)

After:
    y = R.matmul(x, w)
    lv = R.comm.place(y, mesh, {"tp": comm.Replica()})
    z = R.sort(lv, axis=-1)

Operands get the placements that the rule of the operator needs. Where the operands leave a choice,
the annotations of the program decide: see `propagate_annotations`. Among several possibilities the
one that moves the fewest bytes is chosen, with 128 for symbolic extents. The operands of an
operator without a rule are replicated. A partial sum with several uses is reduced where it is
computed, and if sums have to be reproducible, so is every other one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import tvm
from tvm import relax

from tvm_ipc.analysis.binding_builders import replace_call
from tvm_ipc.analysis.program_order import Region, Step, linearize
from tvm_ipc.analysis.uses import Uses
from tvm_ipc.analysis.walk_and_rewrite_bindings import begin_with, rewrite, with_value
from tvm_ipc.comm import Mesh, Partial, Placement, Replica, Shard
from tvm_ipc.comm.collective_relax_op import dtype_of, extents
from tvm_ipc.comm.extent_arithmetic import constant, item_bytes
from tvm_ipc.comm.place_op import is_place
from tvm_ipc.comm.placements import Placements, has_equal_blocks, placements_of
from tvm_ipc.errors import TransformError
from tvm_ipc.spmd.op_costs import TYPICAL
from tvm_ipc.spmd.placements.place_calls import place_typed, placements_of_params
from tvm_ipc.spmd.placements.placed_tensor import is_whole
from tvm_ipc.spmd.rules.axis_label_rule import (
    Choice,
    Refusal,
    ResolvedPlacements,
    Rule,
    placements_for_choices,
    resolve_placements,
)
from tvm_ipc.spmd.rules.decompose_along_sharded_axis import DECOMPOSITIONS, decompose
from tvm_ipc.spmd.rules.operation import (
    operation_of,
    replace_tensors,
    short_name,
    tensor_types,
    tensors_among,
)
from tvm_ipc.spmd.rules.operator_rule_table import rule_for

#: The placements of a tensor, a tuple of those of its fields, or None for other values.
PlacementsOfVariable = Any


@dataclass(eq=False)
class Flow:
    """Placements in one function that follow from annotations of the program, by variables.

    Attributes
    ----------
    choices : by index of the axis of the mesh, the label that a call shards if its operands do not
        determine another one.
    results : the placements in which results are used; partial results are reduced to them.
    moved : the placements to which results are moved.
    """

    choices: dict[relax.Var, dict[int, Choice]] = field(default_factory=dict)
    results: dict[relax.Var, Placements] = field(default_factory=dict)
    moved: dict[relax.Var, Placements] = field(default_factory=dict)


def insert_reshards(
    function: relax.Function,
    mesh: Mesh,
    params: Mapping[relax.Var, Placements],
    flow: Flow | None = None,
    *,
    reduces_at_once: bool = False,
) -> relax.Function:
    """Return the function with `R.comm.place` wherever the placement of a tensor changes.

    Parameters
    ----------
    function : a function of a global program, which may have `R.comm.place` already.
    mesh : the mesh of its ranks.
    params : the placements of its parameters.
    flow : the placements that follow from its annotations; None if it has none.
    reduces_at_once : whether partial sums are reduced where they are computed, also if linear
        operators could be computed before.
    """
    return _ReshardInserter(function, mesh, params, flow, reduces_at_once).function


def placements_of_tensors(
    function: relax.Function, mesh: Mesh, params: Mapping[relax.Var, Placements]
) -> Mapping[relax.Var, PlacementsOfVariable]:
    """Return the placements of the variables of a function; None stands for replicated tensors."""
    return _ReshardInserter(function, mesh, params).placements


class _ReshardInserter:
    """Rewrites one function; `placements` has those of its variables before the rewrite."""

    def __init__(
        self,
        function: relax.Function,
        mesh: Mesh,
        params: Mapping[relax.Var, Placements],
        flow: Flow | None = None,
        reduces_at_once: bool = False,
    ) -> None:
        self.mesh = mesh
        self.reduces_at_once = reduces_at_once
        self.flow = Flow() if flow is None else flow
        self.replicas: Placements = (Replica(),) * len(mesh.axes)
        self.builder = relax.BlockBuilder()
        self.placements: dict[relax.Var, PlacementsOfVariable] = {
            **placements_of_params(mesh, function),
            **params,
        }
        #: Resharded copies, by variable, block and placements.
        self.moved: dict[tuple[relax.Var, Region, int, Placements], relax.Var] = {}
        self.uses = Uses(linearize("", function))
        self.step: Step | None = None  #: the current binding
        #: Bindings to insert before the current one.
        self.before: list[relax.Binding] = []
        changed = rewrite(function, self._change)
        first = [
            relax.VarBinding(
                relax.Var(f"{param.name}_placed", param.ty), place_typed(param, mesh, placed)
            )
            for param, placed in params.items()
        ]
        self.function = begin_with(changed, first) if first else changed

    # ---- bindings ---------------------------------------------------------------------------

    def _change(self, binding: relax.Binding, value: relax.Expr) -> list[relax.Binding] | None:
        var = binding.var
        step = self.uses.binding_of(var)
        if step is None:  # in a local function
            return None
        self.step, self.before = step, []
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
        moved = self._target(var, current)
        if moved != current:
            unmoved = self._fresh(f"{var.name}_part", var.ty)
            self.placements[unmoved] = current
            self.before.append(relax.VarBinding(unmoved, changed))
            self.placements[var] = moved
            changed = place_typed(unmoved, self.mesh, moved, inserted=True)
        if changed is value:
            return None
        return [*self.before, with_value(binding, changed)]

    def _target(self, var: relax.Var, current: PlacementsOfVariable) -> PlacementsOfVariable:
        """Return the placements to which a result is moved where it is computed."""
        if not current or not isinstance(var.ty, relax.TensorType):
            return current
        if var in self.flow.moved:
            return self.flow.moved[var]
        if not any(isinstance(each, Partial) for each in current):
            return current
        waits = len(self.uses.users[var]) <= 1 and not self.reduces_at_once
        sharded = {each.axis for each in current if isinstance(each, Shard)}
        target: list[Placement] = []
        for before, wanted in zip(current, self.flow.results.get(var, self.replicas), strict=True):
            after = before
            if isinstance(before, Partial):
                if isinstance(wanted, Shard) and wanted.axis not in sharded:
                    after = wanted
                elif not waits:
                    after = Replica()
            target.append(after)
        return tuple(target)

    def _resharded(self, var: relax.Var, call: relax.Call) -> relax.Expr:
        """Return a call with resharded operands, and record the placements of its result."""
        operands = list(tensors_among(call.args))
        current = [self._placements_of(x) for x in operands]
        preferred = self.flow.choices.get(var, {})
        resolved = resolve(self.mesh, call, var.ty, operands, current, preferred)
        if resolved is None:
            result = decompose(short_name(call), call, self._emit)
            assert result is not None
            self.placements[var] = self._placements_of(result)
            return result
        is_tensor = isinstance(var.ty, relax.TensorType)
        results = resolved.results[0] if is_tensor and resolved.results else resolved.results
        self.placements[var] = results or None
        if short_name(call) in ("shape_of", "size"):
            return call
        targets = resolved.operands
        if self.reduces_at_once and short_name(call) == "matmul":
            self._check_whole_parts(var, operands, resolved)
        free = preferred and not self._follows(call, var.ty, operands, current, resolved)
        moved = [
            x
            if placements == target or (placements == self.replicas and not free)
            else self._moved_to(x, target)
            for x, placements, target in zip(operands, current, targets, strict=True)
        ]
        if all(new is old for new, old in zip(moved, operands, strict=True)):
            return call
        tensors = iter(moved)
        arguments = [replace_tensors(x, tensors) for x in call.args]
        return replace_call(call, call.op, arguments)

    def _check_whole_parts(
        self, var: relax.Var, operands: Sequence[relax.Expr], resolved: ResolvedPlacements
    ) -> None:
        """Raise an error if ranks add up unequal or interleaved parts of the inner dimension."""
        for index, workers in enumerate(self.mesh.axes.values()):
            if not resolved.results or not isinstance(resolved.results[0][index], Partial):
                continue
            for x, placements in zip(operands, resolved.operands, strict=True):
                placement = placements[index]
                if not isinstance(placement, Shard):
                    continue
                extent = constant((extents(x.ty) or [])[placement.axis])
                if extent is None or not has_equal_blocks(placement, extent, workers):
                    raise TransformError(
                        f"parallelize: {var.name} sums along the axis {placement.axis} of {x}, of "
                        f"extent {extent or 'unknown'}, whose placement on {workers} ranks is "
                        f"{placement}; sums are reproducible if each rank has an equal block of "
                        "the axis: change the number of ranks or the plan, or do without "
                        "reproducible=True"
                    )

    def _follows(
        self,
        call: relax.Call,
        result_type: relax.Type,
        operands: Sequence[relax.Expr],
        current: Sequence[Placements],
        resolved: ResolvedPlacements,
    ) -> bool:
        """Return whether moved operands determine those that stay replicated."""
        moves = zip(current, resolved.operands, strict=True)
        stay = [self.replicas if before == self.replicas else after for before, after in moves]
        again = resolve(self.mesh, call, result_type, operands, stay)
        return again is not None and again.operands == resolved.operands

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
        assert self.step is not None
        key = (x, self.step.region, self.step.block, target)
        if key not in self.moved:
            if not isinstance(x, relax.Var):  # a field of a tuple
                field = self._fresh("field", x.ty)
                self.placements[field] = self._placements_of(x)
                self.before.append(relax.VarBinding(field, x))
                x = field
            moved = self._fresh(f"{x.name}_moved", x.ty)
            placed = place_typed(x, self.mesh, target, inserted=True)
            self.before.append(relax.VarBinding(moved, placed))
            self.placements[moved] = target
            self.moved[key] = moved
        return self.moved[key]

    def _fresh(self, name: str, ty: relax.Type) -> relax.Var:
        assert self.step is not None
        dataflow = self.step.in_dataflow
        return (relax.DataflowVar if dataflow else relax.Var)(name, ty)


# ---- the placements that move the fewest bytes ----


def resolve(
    mesh: Mesh,
    call: relax.Call,
    result_type: relax.Type,
    operands: Sequence[relax.Expr],
    current: Sequence[Placements],
    preferred: Mapping[int, Choice] | None = None,
) -> ResolvedPlacements | None:
    """Return the placements that operands are moved to, or None if the call is decomposed.

    If all operands are replicated and no label is preferred, so are all results, and none are
    listed.

    Parameters
    ----------
    mesh : the mesh of the ranks.
    call : the call.
    result_type : the type of its result.
    operands : the tensors among its arguments.
    current : the placements that the operands have.
    preferred : by index of the axis of the mesh, the label to shard if the operands shard none.
    """
    replicas: Placements = (Replica(),) * len(mesh.axes)
    rule = None
    if preferred or any(placements != replicas for placements in current):
        rule = rule_for(operation_of(call, result_type))
    if rule is None:
        return ResolvedPlacements((replicas,) * len(operands), (), ())
    if preferred:
        choices = _preferred_choices(mesh, rule, current, preferred)
        try:
            if choices is not None:
                names = [str(x) for x in operands]
                return placements_for_choices(mesh, rule, names, current, choices)
        except Refusal:
            pass
    return resolve_with_rule(mesh, rule, call, result_type, operands, current)


def _preferred_choices(
    mesh: Mesh, rule: Rule, current: Sequence[Placements], preferred: Mapping[int, Choice]
) -> list[Choice] | None:
    """Return the label to shard along each axis of the mesh, given preferred ones.

    The result is None if operands shard several labels.
    """
    choices: list[Choice] = []
    for index, workers in enumerate(mesh.axes.values()):
        allowed = _sharded_choices(rule, [placements[index] for placements in current], workers)
        if len(allowed) > 1:
            return None
        choices.append(allowed[0] if allowed else preferred.get(index))
    return choices


def _sharded_choices(rule: Rule, current: Sequence[Placement], workers: int) -> list[Choice]:
    """Return the labels that operands shard along an axis of the mesh, and that the rule allows."""
    return [
        (label, division)
        for label, division in rule.sharded_labels(current, workers)
        if label is not None and not rule.why_not(label, workers, division)
    ]


def resolve_with_rule(
    mesh: Mesh,
    rule: Rule,
    call: relax.Call,
    result_type: relax.Type,
    operands: Sequence[relax.Expr],
    current: Sequence[Placements],
) -> ResolvedPlacements | None:
    """Return what `resolve` returns for a call with a rule, given the same arguments."""
    try:
        return resolve_placements(mesh, rule, [str(x) for x in operands], current)
    except Refusal:
        if short_name(call) in DECOMPOSITIONS:
            return None
        return _cheapest(mesh, rule, operands, current, result_type)


def _cheapest(
    mesh: Mesh,
    rule: Rule,
    operands: Sequence[relax.Expr],
    current: Sequence[Placements],
    result_type: relax.Type,
) -> ResolvedPlacements:
    """Return the placements of operands and results that move the fewest bytes."""
    replicas: Placements = (Replica(),) * len(mesh.axes)
    names = [str(x) for x in operands]
    choices: list[list[Choice]] = []
    for index, workers in enumerate(mesh.axes.values()):
        allowed = _sharded_choices(rule, [placements[index] for placements in current], workers)
        choices.append([*allowed, None])
    best: tuple[float, ResolvedPlacements] | None = None
    for of_mesh_axes in product(*choices):
        try:
            resolved = placements_for_choices(mesh, rule, names, current, of_mesh_axes)
        except Refusal:
            continue
        moves = zip(operands, current, resolved.operands, strict=True)
        cost = sum(transfer_bytes(mesh, x.ty, a, b) for x, a, b in moves)
        cost += sum(
            transfer_bytes(mesh, ty, placed, replicas)
            for ty, placed in zip(tensor_types(result_type), resolved.results, strict=True)
            if any(isinstance(placement, Partial) for placement in placed)
        )
        if best is None or cost < best[0]:
            best = cost, resolved
    assert best is not None, "every operator supports replicated operands"
    return best[1]


def transfer_bytes(
    mesh: Mesh, ty: relax.TensorType, source: Placements, target: Placements
) -> float:
    """Return the bytes that a rank receives when a tensor's placement changes."""
    return _bytes(ty) * _share(mesh, source, target)


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
