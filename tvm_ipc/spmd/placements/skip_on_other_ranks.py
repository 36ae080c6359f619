# SPDX-License-Identifier: Apache-2.0
"""Skip computation on ranks that do not need its results.

Before, with ranks 0 to 2:

    a = R.matmul(x, w)
    b = R.comm.broadcast(a, root_rank=0, team=[1, 2])

After:

    index = R.call_dps_packed("tvm_ipc.team_index", R.shape([1, 0]), ...)
    needed = R.less(index, 1)            # on rank 0
    if needed:
        a = R.matmul(x, w)
    else:
        a = R.zeros((4, 8), "float32")
    b = R.comm.broadcast(a, root_rank=0, team=[1, 2])

Collectives stay outside of the branches: a rank that is not in their teams does not take part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from tvm import relax

from tvm_ipc.analysis.binding_builders import replace_call
from tvm_ipc.analysis.resolve_variables import body_bindings, variables_of
from tvm_ipc.analysis.walk_and_rewrite_bindings import with_value
from tvm_ipc.comm.collective_attrs import CollectiveAttrs, kind_of
from tvm_ipc.comm.collective_relax_op import dtype_of, extents, is_collective
from tvm_ipc.comm.extent_arithmetic import constant
from tvm_ipc.packed_functions.program_function_declarations import TEAM_INDEX
from tvm_ipc.transform.overlap.pipelined_gather import with_dataflow, without_dataflow

Ranks = frozenset[int]


def skip_on_other_ranks(
    function: relax.Function, ranks: Sequence[int], results: Ranks
) -> relax.Function:
    """Return a per-rank function in which ranks skip what only other ranks need.

    Parameters
    ----------
    function : the function, without branches.
    ranks : all ranks that run it.
    results : the ranks that need the result.
    """
    everyone = frozenset(ranks)
    if not function.is_pure or any(isinstance(b.value, relax.If) for b in body_bindings(function)):
        return function
    plain = without_dataflow(function)
    bindings = body_bindings(plain)
    needed = _needed(bindings, plain.body.body, everyone, results)
    used_by = _last_users(bindings, plain.body.body)
    changed: list[relax.Binding] = []
    conditions: dict[Ranks, relax.Var] = {}
    replacements: dict[relax.Var, relax.Expr] = {}
    positions = {binding.var: k for k, binding in enumerate(bindings)}

    def key(binding: relax.Binding) -> Ranks:
        wanted = needed.get(binding.var, frozenset())
        return wanted if wanted < everyone and _can_be_skipped(binding) else frozenset()

    for wanted, group in groupby(bindings, key):
        part = [
            with_value(binding, _replaced(binding.value, replacements)) if replacements else binding
            for binding in group
        ]
        last = positions[part[-1].var]
        outputs = [binding.var for binding in part if used_by[binding.var] > last]
        computes = any(isinstance(binding.value, relax.Call) for binding in part)
        if not (wanted and outputs and computes and all(map(_has_zeros, outputs))):
            changed += part
            continue
        if wanted not in conditions:
            conditions[wanted] = _append_condition(changed, wanted)
        branch, new = _branch(conditions[wanted], part, outputs)
        changed.append(branch)
        replacements |= new
    if not replacements:
        return function
    result = _replaced(plain.body.body, replacements)
    body = relax.SeqExpr([relax.BindingBlock(changed)], result)
    body = relax.BlockBuilder().normalize(body)
    skipping = relax.Function(
        plain.params, body, plain.ret_ty, plain.is_pure, plain.attrs, plain.span
    )
    return with_dataflow(skipping)


@dataclass(eq=False)
class _Demand:
    """The ranks that need each variable."""

    ranks: dict[relax.Var, Ranks] = field(default_factory=dict)

    def add(self, expr: relax.Expr, ranks: Ranks) -> None:
        for variable in variables_of(expr):
            self.ranks[variable] = self.ranks.get(variable, frozenset()) | ranks


def _needed(
    bindings: Sequence[relax.Binding],
    result: relax.Expr,
    everyone: Ranks,
    results: Ranks,
) -> Mapping[relax.Var, Ranks]:
    """Return the ranks that need each variable."""
    demand = _Demand()
    demand.add(result, results)
    for binding in reversed(bindings):
        value = binding.value
        if isinstance(binding, relax.MatchCast):
            demand.add(value, everyone)  # it may define variables that every rank uses
        elif is_collective(value):
            demand.add(value, _sources(value, everyone))
        else:
            demand.add(value, demand.ranks.get(binding.var, frozenset()))
    return demand.ranks


def _sources(collective: relax.Call, everyone: Ranks) -> Ranks:
    """Return the ranks that read the tensor of a collective."""
    attrs = CollectiveAttrs.of(collective)
    if isinstance(attrs.team, str):
        return everyone
    members = frozenset(int(rank) for team in attrs.team for rank in team)
    if not kind_of(attrs).source_on_root:
        return members if attrs.root_rank is None else members | {attrs.root_rank}
    if attrs.root_rank is not None:
        return frozenset({attrs.root_rank})
    root = constant(collective.args[1])
    return members if root is None else frozenset(int(team[root]) for team in attrs.team)


def _last_users(bindings: Sequence[relax.Binding], result: relax.Expr) -> dict[relax.Var, int]:
    """Return the position of the last binding that uses each variable."""
    users = {binding.var: -1 for binding in bindings}
    for position, binding in enumerate(bindings):
        users.update(dict.fromkeys(variables_of(binding.value), position))
    users.update(dict.fromkeys(variables_of(result), len(bindings)))
    return users


def _can_be_skipped(binding: relax.Binding) -> bool:
    """Return whether a binding computes something, and involves no other rank."""
    if not isinstance(binding, relax.VarBinding) or is_collective(binding.value):
        return False
    return isinstance(binding.value, (relax.Call, relax.Var, relax.Tuple, relax.TupleGetItem))


def _has_zeros(variable: relax.Var) -> bool:
    """Return whether zeros of the type of a variable can be created."""
    ty = variable.ty
    return isinstance(ty, relax.TensorType) and extents(ty) is not None and ty.dtype is not None


def _append_condition(bindings: list[relax.Binding], ranks: Ranks) -> relax.Var:
    """Append bindings of a condition that holds on some ranks, and return its variable."""
    team = relax.ShapeExpr([len(ranks), *sorted(ranks)])
    scalar = relax.TensorType((), "int64")
    call = relax.op.call_dps_packed(TEAM_INDEX.name, [team], out_ty=scalar)
    index = relax.Var("team_index", scalar)
    is_member = relax.Var("is_needed", relax.TensorType((), "bool"))
    bindings.append(relax.VarBinding(index, call))
    compared = relax.op.less(index, relax.const(len(ranks), "int64"))
    bindings.append(relax.VarBinding(is_member, compared))
    return is_member


def _branch(
    condition: relax.Var, part: Sequence[relax.Binding], outputs: Sequence[relax.Var]
) -> tuple[relax.Binding, dict[relax.Var, relax.Expr]]:
    """Return the binding of a branch around a part, and what replaces the outputs of the part."""
    zeros = [
        relax.VarBinding(
            relax.Var(f"no_{x.name}", x.ty),
            relax.op.zeros(relax.ShapeExpr(extents(x.ty)), dtype_of(x.ty)),
        )
        for x in outputs
    ]
    then, otherwise = (
        relax.SeqExpr([relax.BindingBlock(bindings)], _one_or_tuple(results))
        for bindings, results in ((part, outputs), (zeros, [zero.var for zero in zeros]))
    )
    if len(outputs) == 1:
        result = relax.Var(str(outputs[0].name), outputs[0].ty)
        fields: list[relax.Expr] = [result]
    else:
        result = relax.Var("computed", relax.TupleType([x.ty for x in outputs]))
        fields = [relax.TupleGetItem(result, k) for k in range(len(outputs))]
    branch = relax.VarBinding(result, relax.If(condition, then, otherwise))
    return branch, dict(zip(outputs, fields, strict=True))


def _one_or_tuple(variables: Sequence[relax.Var]) -> relax.Expr:
    return variables[0] if len(variables) == 1 else relax.Tuple(list(variables))


def _replaced(expr: relax.Expr, replacements: Mapping[relax.Var, relax.Expr]) -> relax.Expr:
    """Return an expression with other variables."""
    if isinstance(expr, relax.Var):
        return replacements.get(expr, expr)
    if isinstance(expr, relax.Call):
        return replace_call(expr, expr.op, [_replaced(x, replacements) for x in expr.args])
    if isinstance(expr, relax.Tuple):
        return relax.Tuple([_replaced(x, replacements) for x in expr.fields])
    if isinstance(expr, relax.TupleGetItem):
        return relax.TupleGetItem(_replaced(expr.tuple_value, replacements), int(expr.index))
    return expr
