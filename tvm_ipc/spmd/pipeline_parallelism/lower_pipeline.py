# SPDX-License-Identifier: Apache-2.0
"""Lowering of a module to pipeline stages, which run different layers on different ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tvm
from tvm import relax

from tvm_ipc.analysis.views_and_writes_of_calls import operator_of
from tvm_ipc.analysis.walk_and_rewrite_bindings import calls
from tvm_ipc.arguments import counted
from tvm_ipc.calibration import Calibration
from tvm_ipc.comm import Mesh, Replica
from tvm_ipc.comm.collective_attrs import CollectiveAttrs
from tvm_ipc.comm.collective_relax_op import is_collective
from tvm_ipc.comm.expert_ops import RAGGED_OPERATORS
from tvm_ipc.comm.placements import placements_of
from tvm_ipc.errors import TransformError
from tvm_ipc.spmd.model_parameters_and_uses import Functions, Parameters
from tvm_ipc.spmd.op_costs import Costs, nominal, shape_of
from tvm_ipc.spmd.parameter_shard_spec import format_ranks
from tvm_ipc.spmd.pipeline_parallelism.choose_stages import choose_stages, stages_of
from tvm_ipc.spmd.pipeline_parallelism.split_into_stages import SplitStages, split_stages
from tvm_ipc.spmd.pipeline_split_point_analysis import OpOrder
from tvm_ipc.spmd.placements.place_calls import place_calls
from tvm_ipc.spmd.plan_parser import PIPELINE
from tvm_ipc.transform.report import Decision


@dataclass(frozen=True, eq=False)
class LoweredPipeline:
    """A module that is split into stages.

    Attributes
    ----------
    module : the module that each rank runs.
    ranks : the ranks that have each parameter, by the names that plans use.
    decisions : the sends between stages.
    notes : descriptions of the stages.
    """

    module: tvm.IRModule
    ranks: dict[str, tuple[int, ...]]
    decisions: list[Decision]
    notes: list[str]


def lower_pipeline(
    mod: tvm.IRModule,
    params: Parameters,
    mesh: Mesh,
    patterns: Sequence[str] | None,
    calibration: Calibration | None,
) -> LoweredPipeline:
    """Return the module for the ranks of a mesh with the axis "pp".

    Parameters
    ----------
    mod : the per-rank module with all layers.
    params : the parameters of its functions.
    mesh : a mesh with the axis "pp".
    patterns : the weights with which each stage but the first begins; None balances the stages.
    calibration : measured times for the balance; None uses nominal figures.
    """
    ranks = stages_of(mesh)
    lines = _lines(mod, params)
    costs = Costs(nominal(len(ranks[0])) if calibration is None else calibration)
    stages = choose_stages(lines, len(ranks), patterns, costs)
    split = {
        line.name: split_stages(line, begins, ranks)
        for line, begins in zip(lines, stages.begins, strict=True)
    }
    functions = {
        var: function for var, function in mod.functions_items() if str(var.name_hint) not in split
    }
    for split_function in split.values():
        functions.update(split_function.functions)
    stages_of_param = _stages_of_params(split, params)
    decisions = [
        Decision(
            "parallelize",
            name,
            f"send_recv of {x.name} along {PIPELINE!r}",
            "inserted",
            f"stage {k} computes it and stage {k + 1} uses it, {shape_of(x.ty).bytes:.0f} bytes",
        )
        for name, split_function in split.items()
        for k, sent in enumerate(split_function.sent)
        for x in sent
    ]
    notes = []
    for k, (of_stage, seconds) in enumerate(zip(ranks, stages.seconds, strict=True)):
        begins = f"begins with {stages.names[k - 1]}, " if k else ""
        weights = [name for name, used_by in stages_of_param.items() if k in used_by]
        count = sum(not params[name].is_input for name in weights)
        notes.append(
            f"stage {k} on {format_ranks(of_stage)}: {begins}{counted(count, 'weight')}, "
            f"{seconds * 1e3:.3g} ms predicted for a call of each function"
        )
    ranks_of_param = {
        name: tuple(sorted(rank for k in used_by for rank in ranks[k]))
        for name, used_by in stages_of_param.items()
    }
    lowered = tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)
    return LoweredPipeline(lowered, ranks_of_param, decisions, notes)


def check_unplaced(functions: Functions, mesh: Mesh) -> None:
    """Raise an error for functions that shard a tensor along the axis "pp"."""
    index = list(mesh.axes).index(PIPELINE)
    for name, function in functions.items():
        for call in place_calls(function):
            if placements_of(mesh, call.attrs.placements)[index] != Replica():
                raise TransformError(
                    f"parallelize: function {name!r} shards {call.args[0]} along {PIPELINE!r}, "
                    "whose ranks have different layers; shard it along another axis"
                )


def _lines(mod: tvm.IRModule, params: Parameters) -> list[OpOrder]:
    """Return the operators of the functions that use weights."""
    names = {param.parameter: name for name, param in params.items() if not param.is_input}
    lines = []
    for var, function in mod.functions_items():
        if not isinstance(function, relax.Function):
            continue
        weights = {
            x: names[str(x.name)]
            for x in function.params
            if str(x.name) in names and isinstance(x.ty, relax.TensorType)
        }
        if weights:
            _check_teams(str(var.name_hint), function)
            lines.append(OpOrder(str(var.name_hint), function, weights))
    return lines


def _check_teams(name: str, function: relax.Function) -> None:
    """Raise an error for a collective of all ranks, which only one stage would reach."""
    for call in calls(function):
        op = operator_of(call)
        if is_collective(call):
            team = CollectiveAttrs.of(call).team
        else:
            is_ragged = op in RAGGED_OPERATORS and int(call.attrs.workers) > 1
            team = call.attrs.team if is_ragged else None
        if isinstance(team, str) or op.startswith("relax.ccl."):
            raise TransformError(
                f"parallelize: function {name!r} has a collective of all ranks, {call}, which the "
                "ranks of other stages do not run; pass the teams of an axis, mesh.teams(...)"
            )


def _stages_of_params(split: dict[str, SplitStages], params: Parameters) -> dict[str, set[int]]:
    """Return the stages that use each parameter."""
    names = {param.parameter: name for name, param in params.items()}
    stages: dict[str, set[int]] = {name: set() for name in params}
    for split_function in split.values():
        for k, used in enumerate(split_function.params):
            for x in used:
                if str(x.name) in names:
                    stages[names[str(x.name)]].add(k)
    return stages
