# SPDX-License-Identifier: Apache-2.0
"""Splitting of a function into one function for each pipeline stage, and a dispatcher.

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

A stage sends the values that later stages use, in the order in which they are computed. A rank does
not read parameters that its stage does not use, and returns None for results of other stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import tvm
from tvm import relax, tirx
from tvm.relax.analysis import definable_tir_vars_in_type, tir_vars_in_type
from tvm.relax.utils import copy_with_new_vars

from tvm_ipc.analysis.resolve_variables import leaves_of, variables_of
from tvm_ipc.analysis.walk_and_rewrite_bindings import typed
from tvm_ipc.comm import send_recv
from tvm_ipc.comm.collective_relax_op import dtype_of, extents
from tvm_ipc.errors import TransformError
from tvm_ipc.packed_functions.program_function_declarations import RUN_BY, WORKER_RANK
from tvm_ipc.spmd.pipeline_split_point_analysis import OpOrder

_RANK: Final = tvm.ir.PrimType("int64")


@dataclass(frozen=True, eq=False)
class SplitStages:
    """A function that is split into stages.

    Attributes
    ----------
    functions : the functions of the stages, and the dispatcher as the last one.
    params : for each stage, the parameters that it uses, including inputs.
    sent : for each stage but the last, the values that it sends to the next stage.
    """

    functions: Mapping[tvm.ir.GlobalVar, relax.Function]
    params: Sequence[Sequence[relax.Var]]
    sent: Sequence[Sequence[relax.Var]]


def split_stages(
    line: OpOrder, begins: Sequence[int], ranks: Sequence[Sequence[int]]
) -> SplitStages:
    """Return a function split into stages.

    Parameters
    ----------
    line : the operators of the function.
    begins : the first position of each stage but the first.
    ranks : the ranks of each stage; ranks with the same index in two stages communicate.
    """
    bounds = list(pairwise([0, *begins, len(line.positions)]))
    stages: list[_Stage] = []
    sent: Sequence[relax.Var] = ()
    for k, (begin, end) in reversed(list(enumerate(bounds))):
        stages.insert(0, _Stage(line, ranks, k, begin, end, sent))
        sent = stages[0].received
    functions = {}
    for k, stage in enumerate(stages):
        var = tvm.ir.GlobalVar(f"{line.name}_stage_{k}")
        functions[typed(var, stage.function.ty)] = stage.function
    dispatcher = _dispatcher(line, stages, ranks, list(functions))
    functions[typed(tvm.ir.GlobalVar(line.name), dispatcher.ty)] = dispatcher
    return SplitStages(
        functions, [stage.params for stage in stages], [stage.received for stage in stages[1:]]
    )


class _Stage:
    """The function that the ranks of one stage run.

    Attributes
    ----------
    params : the parameters of the whole function that the stage uses.
    received : the values of earlier stages that this stage or a later one uses.
    results : the results of the whole function that the stage computes.
    function : the function, which returns the results and the operands of its sends.
    """

    def __init__(
        self,
        line: OpOrder,
        ranks: Sequence[Sequence[int]],
        stage: int,
        begin: int,
        end: int,
        sent: Sequence[relax.Var],
    ) -> None:
        last = stage == len(ranks) - 1
        self.results = [
            result
            for result in leaves_of(line.result)
            if _is_computed_by_stage(line, result, begin, end, last)
        ]
        needed = {*(x for result in self.results for x in variables_of(result)), *sent}
        computed: list[relax.Binding] = []
        for binding in reversed(line.bindings):
            position = line.positions.get(binding.var)
            if binding.var in needed and (position is None or begin <= position < end):
                computed.append(binding)
                needed.update(variables_of(binding.value))
        self.received = [x for x in line.live[begin] if x in needed]
        types = [binding.var.ty for binding in computed] + [x.ty for x in self.received]
        self.params = _with_symbols(line.function.params, needed, types)

        bindings: list[relax.Binding] = []
        for x in self.received:
            bindings.append(relax.VarBinding(x, _received(x, ranks[stage - 1], ranks[stage])))
        bindings += computed[::-1]
        fields = list(self.results)
        for x in sent:
            sent_var = relax.DataflowVar(f"{x.name}_sent", x.ty)
            team = list(zip(ranks[stage], ranks[stage + 1], strict=True))
            bindings.append(relax.VarBinding(sent_var, send_recv(x, 0, 1, team=team)))
            fields.append(sent_var)
        if not fields:
            raise TransformError(
                f"parallelize: function {line.name!r}: stage {stage} computes nothing that a later "
                "stage or a result uses; choose other layers with stages="
            )
        builder = relax.BlockBuilder()
        out = relax.Var("out", relax.TupleType([field.ty for field in fields]))
        bindings.append(relax.VarBinding(out, relax.Tuple(fields)))
        body = builder.normalize(relax.SeqExpr([relax.DataflowBlock(bindings)], out))
        attributes = line.function.attrs
        plain = relax.Function(self.params, body, out.ty, is_pure=False, attrs=attributes)
        copied = copy_with_new_vars(plain).without_attr("num_input")
        copied = copied.with_attr("global_symbol", f"{line.name}_stage_{stage}")
        self.function = copied.with_attr(RUN_BY, sorted(ranks[stage]))


def _is_computed_by_stage(
    line: OpOrder, result: relax.Expr, begin: int, end: int, last: bool
) -> bool:
    """Return whether a stage computes a result; the last one has those without a position."""
    positions = [line.positions[var] for var in variables_of(result) if var in line.positions]
    return begin <= max(positions) < end if positions else last


def _received(x: relax.Var, sending: Sequence[int], receiving: Sequence[int]) -> relax.Call:
    """Return the call that receives a value, whose operand on a receiving rank is unused."""
    unused = relax.op.zeros(relax.ShapeExpr(extents(x.ty)), dtype_of(x.ty))
    unused = relax.BlockBuilder().normalize(unused)
    return send_recv(unused, 0, 1, team=list(zip(sending, receiving, strict=True)))


def _with_symbols(
    params: Sequence[relax.Var], needed: set[relax.Var], types: Iterable[Any]
) -> list[relax.Var]:
    """Return the parameters that are needed, and further ones that define the symbols in use."""
    chosen = {x for x in params if x in needed}
    used = {symbol for ty in (*types, *(x.ty for x in chosen)) for symbol in tir_vars_in_type(ty)}
    defined = {symbol for x in chosen for symbol in definable_tir_vars_in_type(x.ty)}
    for x in params:
        new = used.intersection(definable_tir_vars_in_type(x.ty)) - defined
        if new:
            chosen.add(x)
            defined |= new
    return [x for x in params if x in chosen]


# ---- the dispatcher --------------------------------------------------------------------------


def _dispatcher(
    line: OpOrder,
    stages: Sequence[_Stage],
    ranks: Sequence[Sequence[int]],
    stage_functions: Sequence[tvm.ir.GlobalVar],
) -> relax.Function:
    """Return the function that calls the stage of the rank that runs it."""
    params = [relax.Var(str(x.name), relax.AnyType()) for x in line.function.params]
    param_of = dict(zip(line.function.params, params, strict=True))
    rank = relax.Var("rank", _RANK)
    packed = relax.ExternFunc(WORKER_RANK.name)
    rank_binding = relax.VarBinding(rank, relax.Call(packed, [], ty_args=[_RANK]))

    chosen: relax.SeqExpr | None = None
    for stage, function, of_stage in reversed(
        list(zip(stages, stage_functions, ranks, strict=True))
    ):
        branch = _branch(line, stage, function, param_of)
        if chosen is None:
            chosen = branch
        else:
            result = relax.Var("result")
            choice = relax.If(_is_among(rank, of_stage), branch, chosen)
            chosen = relax.SeqExpr([relax.BindingBlock([relax.VarBinding(result, choice)])], result)
    assert chosen is not None
    blocks = [relax.BindingBlock([rank_binding]), *chosen.blocks]
    body = relax.BlockBuilder().normalize(relax.SeqExpr(blocks, chosen.body))
    return relax.Function(params, body, is_pure=False, attrs=line.function.attrs)


def _branch(
    line: OpOrder,
    stage: _Stage,
    function: tvm.ir.GlobalVar,
    param_of: Mapping[relax.Var, relax.Var],
) -> relax.SeqExpr:
    """Return the call of a stage, with its results at their positions among all results."""
    bindings: list[relax.Binding] = []
    arguments = []
    stage_params = copy_with_new_vars(stage.function).params
    for x, stage_param in zip(stage.params, stage_params, strict=True):
        cast = relax.Var(str(x.name), stage_param.ty)
        bindings.append(relax.MatchCast(cast, param_of[x], stage_param.ty))
        arguments.append(cast)
    outputs = relax.Var("made")
    bindings.append(relax.VarBinding(outputs, relax.Call(function, arguments)))
    indices = iter(range(len(stage.results)))
    own_results = set(stage.results)

    def rebuild_result(result: relax.Expr) -> relax.Expr:
        if isinstance(result, relax.Tuple):
            return relax.Tuple([rebuild_result(field) for field in result.fields])
        if result in own_results:
            value = relax.TupleGetItem(outputs, next(indices))
        else:
            value = relax.op.null_value()
        var = relax.Var("field", relax.AnyType())
        bindings.append(relax.VarBinding(var, value))
        return var

    result = relax.Var("result", _any_type(line.result))
    bindings.append(relax.VarBinding(result, rebuild_result(line.result)))
    return relax.SeqExpr([relax.BindingBlock(bindings)], result)


def _any_type(result: relax.Expr) -> Any:
    if isinstance(result, relax.Tuple):
        return relax.TupleType([_any_type(field) for field in result.fields])
    return relax.AnyType()


def _is_among(rank: relax.Var, ranks: Sequence[int]) -> relax.Expr:
    """Return the condition that a rank is one of some ranks, by their consecutive ranges."""
    ranges: list[list[int]] = []
    for each in sorted(ranks):
        if ranges and ranges[-1][1] == each - 1:
            ranges[-1][1] = each
        else:
            ranges.append([each, each])
    first_test, *tests = (tirx.And(rank >= first, rank <= last) for first, last in ranges)
    condition = first_test
    for test in tests:
        condition = tirx.Or(condition, test)
    return condition
