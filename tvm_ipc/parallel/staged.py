# SPDX-License-Identifier: Apache-2.0
"""A function for each stage of a pipeline, and one that calls that of the rank which runs it.

Before, what each rank would run of all stages:
    def main(x, w1, w2):
        y = R.matmul(x, w1)
        z = R.matmul(y, w2)
        return z

After, with a rank in each of two stages:
    def main_stage_0(x, w1):
        y = R.matmul(x, w1)
        sent = R.comm.send_recv(y, 0, 1, team=[[0, 1]])
        return (sent,)
    def main_stage_1(x, w2):
        y = R.comm.send_recv(R.zeros(y.shape), 0, 1, team=[[0, 1]])
        z = R.matmul(y, w2)
        return (z,)
    def main(x: R.Any, w1: R.Any, w2: R.Any):
        rank = R.call_packed("runtime.disco.worker_rank")
        if rank == 0:
            _ = main_stage_0(x, w1)
            result = R.null_value()
        else:
            result = main_stage_1(x, w2)[0]
        return result

What a stage sends is what the next one uses or sends on, in the order in which it is made. A rank
looks at none of the parameters that its stage has no use for, so it need not have them; of
a result that another stage makes it has nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import tvm
from tvm import relax, tirx
from tvm.relax.utils import copy_with_new_vars

from tvm_ipc.comm.operator import dtype_of, extents
from tvm_ipc.comm.operators import send_recv
from tvm_ipc.contract.programs import RUN_BY, WORKER_RANK
from tvm_ipc.errors import TransformError
from tvm_ipc.parallel.line import Line
from tvm_ipc.parallel.uses import variables_of
from tvm_ipc.transform.ir.rewrite import typed

_RANK: Final = tvm.ir.PrimType("int64")


@dataclass(frozen=True)
class Staged:
    """A function that is divided into stages.

    Attributes
    ----------
    functions : that of the whole, which calls the others, is the last one.
    params : of each stage, the parameters that it is given, inputs too.
    sent : by each stage but the last, to the next one.
    """

    functions: Mapping[tvm.ir.GlobalVar, relax.Function]
    params: Sequence[Sequence[relax.Var]]
    sent: Sequence[Sequence[relax.Var]]


def staged(line: Line, begins: Sequence[int], ranks: Sequence[Sequence[int]]) -> Staged:
    """Return a function divided into stages.

    Parameters
    ----------
    line : the function as one rank would run it.
    begins : the places in the line with which stages begin, but for the first one.
    ranks : of each stage; those at the same place of two stages send to each other.
    """
    bounds = list(pairwise([0, *begins, len(line.places)]))
    made: list[_Stage] = []
    sent: Sequence[relax.Var] = ()
    for k, (begin, end) in reversed(list(enumerate(bounds))):
        made.insert(0, _Stage(line, ranks, k, begin, end, sent))
        sent = made[0].received
    functions = {}
    for k, one in enumerate(made):
        var = tvm.ir.GlobalVar(f"{line.name}_stage_{k}")
        functions[typed(var, one.function.ty)] = one.function
    calling = _calling(line, made, ranks, list(functions))
    functions[typed(tvm.ir.GlobalVar(line.name), calling.ty)] = calling
    return Staged(functions, [one.params for one in made], [one.received for one in made[1:]])


class _Stage:
    """What the ranks of a stage run.

    Attributes
    ----------
    params : of the whole function, those that it is given.
    received : what the stage before makes, or has received, and this one or a later one uses.
    results : of the whole function, those that it makes.
    function : which returns the results, and what is left of what it sends.
    """

    def __init__(
        self,
        line: Line,
        ranks: Sequence[Sequence[int]],
        stage: int,
        begin: int,
        end: int,
        sent: Sequence[relax.Var],
    ) -> None:
        last = stage == len(ranks) - 1
        self.results = [
            one for one in _leaves(line.result) if _is_made(line, one, begin, end, last)
        ]
        needed = {*(x for one in self.results for x in variables_of(one)), *sent}
        within: list[relax.Binding] = []
        for one in reversed(line.bindings):
            place = line.places.get(one.var)
            if one.var in needed and (place is None or begin <= place < end):
                within.append(one)
                needed.update(variables_of(one.value))
        self.received = [x for x in line.live[begin] if x in needed]
        types = [one.var.ty for one in within] + [x.ty for x in self.received]
        self.params = _with_symbols(line.function.params, needed, types)

        bindings: list[relax.Binding] = []
        for x in self.received:
            bindings.append(relax.VarBinding(x, _received(x, ranks[stage - 1], ranks[stage])))
        bindings += within[::-1]
        fields = list(self.results)
        for x in sent:
            gone = relax.DataflowVar(f"{x.name}_sent", x.ty)
            team = list(zip(ranks[stage], ranks[stage + 1], strict=True))
            bindings.append(relax.VarBinding(gone, send_recv(x, 0, 1, team=team)))
            fields.append(gone)
        if not fields:
            raise TransformError(
                f"parallelize: function {line.name!r}: stage {stage} makes nothing that a later "
                "stage or a result uses; let it have other layers, with stages="
            )
        builder = relax.BlockBuilder()
        out = relax.Var("out", relax.TupleType([field.ty for field in fields]))
        bindings.append(relax.VarBinding(out, relax.Tuple(fields)))
        body = builder.normalize(relax.SeqExpr([relax.DataflowBlock(bindings)], out))
        attributes = line.function.attrs
        plain = relax.Function(self.params, body, out.ty, is_pure=False, attrs=attributes)
        own = copy_with_new_vars(plain).without_attr("num_input")
        own = own.with_attr("global_symbol", f"{line.name}_stage_{stage}")
        self.function = own.with_attr(RUN_BY, sorted(ranks[stage]))


def _leaves(result: relax.Expr) -> list[relax.Expr]:
    if isinstance(result, relax.Tuple):
        return [leaf for field in result.fields for leaf in _leaves(field)]
    return [result]


def _is_made(line: Line, result: relax.Expr, begin: int, end: int, last: bool) -> bool:
    """Whether a stage makes a result; the last one has those that need no stage."""
    places = [line.places[var] for var in variables_of(result) if var in line.places]
    return begin <= max(places) < end if places else last


def _received(x: relax.Var, sending: Sequence[int], receiving: Sequence[int]) -> relax.Call:
    """Return what a rank receives; what it gives for it is sent to nobody."""
    nothing = relax.op.zeros(relax.ShapeExpr(extents(x.ty)), dtype_of(x.ty))
    nothing = relax.BlockBuilder().normalize(nothing)
    return send_recv(nothing, 0, 1, team=list(zip(sending, receiving, strict=True)))


def _with_symbols(
    params: Sequence[relax.Var], needed: set[relax.Var], types: Iterable[Any]
) -> list[relax.Var]:
    """Return parameters that are needed, and inputs that say what symbols are."""
    chosen = {x for x in params if x in needed}
    wanted = {symbol for ty in (*types, *(x.ty for x in chosen)) for symbol in _symbols(ty)}
    said = {symbol for x in chosen for symbol in _says(x.ty)}
    for x in params:
        fresh = (_says(x.ty) & wanted) - said
        if fresh:
            chosen.add(x)
            said |= fresh
    return [x for x in params if x in chosen]


def _dims(ty: Any) -> list[Any]:
    if isinstance(ty, relax.TupleType):
        return [extent for field in ty.fields for extent in _dims(field)]
    if isinstance(ty, relax.TensorType):
        return extents(ty) or []
    return list(ty.values or ()) if isinstance(ty, relax.ShapeType) else []


def _says(ty: Any) -> set[tirx.Var]:
    """Return the symbols that a parameter of a type says."""
    return {extent for extent in _dims(ty) if isinstance(extent, tirx.Var)}


def _symbols(ty: Any) -> set[tirx.Var]:
    return {var for extent in _dims(ty) for var in tirx.analysis.undefined_vars(extent)}


# ---- the function that calls them ------------------------------------------------------------


def _calling(
    line: Line, stages: Sequence[_Stage], ranks: Sequence[Sequence[int]], known: Sequence[Any]
) -> relax.Function:
    params = [relax.Var(str(x.name), relax.AnyType()) for x in line.function.params]
    own = dict(zip(line.function.params, params, strict=True))
    rank = relax.Var("rank", _RANK)
    packed = relax.ExternFunc(WORKER_RANK.name)
    asked = relax.VarBinding(rank, relax.Call(packed, [], ty_args=[_RANK]))

    chosen: relax.SeqExpr | None = None
    for stage, var, of in reversed(list(zip(stages, known, ranks, strict=True))):
        branch = _branch(line, stage, var, own)
        if chosen is None:
            chosen = branch
        else:
            result = relax.Var("result")
            choice = relax.If(_among(rank, of), branch, chosen)
            chosen = relax.SeqExpr([relax.BindingBlock([relax.VarBinding(result, choice)])], result)
    assert chosen is not None
    blocks = [relax.BindingBlock([asked]), *chosen.blocks]
    body = relax.BlockBuilder().normalize(relax.SeqExpr(blocks, chosen.body))
    return relax.Function(params, body, is_pure=False, attrs=line.function.attrs)


def _branch(
    line: Line, stage: _Stage, function: tvm.ir.GlobalVar, own: Mapping[relax.Var, relax.Var]
) -> relax.SeqExpr:
    bindings: list[relax.Binding] = []
    given = []
    for x, theirs in zip(stage.params, copy_with_new_vars(stage.function).params, strict=True):
        cast = relax.Var(str(x.name), theirs.ty)
        bindings.append(relax.MatchCast(cast, own[x], theirs.ty))
        given.append(cast)
    made = relax.Var("made")
    call = relax.Call(function, given)
    bindings.append(relax.VarBinding(made, call))
    places = iter(range(len(stage.results)))
    known = set(stage.results)

    def rebuilt(result: relax.Expr) -> relax.Expr:
        if isinstance(result, relax.Tuple):
            return relax.Tuple([rebuilt(field) for field in result.fields])
        value = relax.TupleGetItem(made, next(places)) if result in known else relax.op.null_value()
        var = relax.Var("field", relax.AnyType())
        bindings.append(relax.VarBinding(var, value))
        return var

    result = relax.Var("result", _opaque(line.result))
    bindings.append(relax.VarBinding(result, rebuilt(line.result)))
    return relax.SeqExpr([relax.BindingBlock(bindings)], result)


def _opaque(result: relax.Expr) -> Any:
    if isinstance(result, relax.Tuple):
        return relax.TupleType([_opaque(field) for field in result.fields])
    return relax.AnyType()


def _among(rank: relax.Var, ranks: Sequence[int]) -> relax.Expr:
    """Return whether a rank is one of some."""
    runs: list[list[int]] = []
    for one in sorted(ranks):
        if runs and runs[-1][1] == one - 1:
            runs[-1][1] = one
        else:
            runs.append([one, one])
    tests = [tirx.And(rank >= first, rank <= last) for first, last in runs]
    found = tests[0]
    for one in tests[1:]:
        found = tirx.Or(found, one)
    return found
