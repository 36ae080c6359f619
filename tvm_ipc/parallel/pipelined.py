# SPDX-License-Identifier: Apache-2.0
"""What ranks run that have different layers: stages of a pipeline, which send to the next one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tvm
from tvm import relax

from tvm_ipc.calibration import Calibration
from tvm_ipc.comm import Mesh, Replica
from tvm_ipc.comm.operator import NAME as COLLECTIVE
from tvm_ipc.comm.place_operator import NAME as PLACE
from tvm_ipc.comm.placements import placements_of
from tvm_ipc.errors import TransformError
from tvm_ipc.parallel.costs import Costs, nominal, shape_of
from tvm_ipc.parallel.cut import said_ranks
from tvm_ipc.parallel.line import Line
from tvm_ipc.parallel.parameters import Functions, Parameters
from tvm_ipc.parallel.plan import PIPELINE
from tvm_ipc.parallel.staged import Staged, staged
from tvm_ipc.parallel.stages import find_stages, stages_of
from tvm_ipc.transform.ir.rewrite import calls
from tvm_ipc.transform.report import Decision


@dataclass(frozen=True)
class Pipelined:
    """A module that is divided into stages.

    Attributes
    ----------
    module : what each rank runs.
    ranks : of each parameter, those that have it, by the names that plans know.
    decisions : what is sent.
    notes : where stages begin.
    """

    module: tvm.IRModule
    ranks: dict[str, tuple[int, ...]]
    decisions: list[Decision]
    notes: list[str]


def pipelined(
    mod: tvm.IRModule,
    params: Parameters,
    mesh: Mesh,
    patterns: Sequence[str] | None,
    calibration: Calibration | None,
) -> Pipelined:
    """Return what the ranks of a mesh with a pipeline run.

    Parameters
    ----------
    mod : what a rank would run that has all layers.
    params : of its functions.
    mesh : with an axis "pp".
    patterns : of the weights with which stages but the first begin; None finds even ones.
    calibration : by which they are even.
    """
    ranks = stages_of(mesh)
    lines = _lines(mod, params)
    costs = Costs(nominal(len(ranks[0])) if calibration is None else calibration)
    found = find_stages(lines, len(ranks), patterns, costs)
    divided = {
        line.name: staged(line, begins, ranks)
        for line, begins in zip(lines, found.begins, strict=True)
    }
    functions = {
        var: function
        for var, function in mod.functions_items()
        if str(var.name_hint) not in divided
    }
    for one in divided.values():
        functions.update(one.functions)
    has = _stages_with(divided, params)
    decisions = [
        Decision(
            "parallelize",
            name,
            f"send_recv of {x.name} along {PIPELINE!r}",
            "inserted",
            f"stage {k} makes it and stage {k + 1} uses it, {shape_of(x.ty).bytes:.0f} bytes",
        )
        for name, one in divided.items()
        for k, sent in enumerate(one.sent)
        for x in sent
    ]
    notes = []
    for k, (of, seconds) in enumerate(zip(ranks, found.seconds, strict=True)):
        begins = f"begins with {found.names[k - 1]}, " if k else ""
        weights = sum(
            1 for name, stages in has.items() if k in stages and not params[name].is_input
        )
        notes.append(
            f"stage {k} on {said_ranks(of)}: {begins}{weights} weights, {seconds * 1e3:.3g} ms "
            "predicted for a call of each function"
        )
    return Pipelined(
        tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos),
        {name: tuple(sorted(r for k in stages for r in ranks[k])) for name, stages in has.items()},
        decisions,
        notes,
    )


def check_unplaced(functions: Functions, mesh: Mesh) -> None:
    """Refuse functions that divide something among the stages of a pipeline."""
    at = list(mesh.axes).index(PIPELINE)
    for name, function in functions.items():
        for call in calls(function):
            if not isinstance(call.op, tvm.ir.Op) or str(call.op.name) != PLACE:
                continue
            if placements_of(mesh, call.attrs.placements)[at] != Replica():
                raise TransformError(
                    f"parallelize: function {name!r} divides {call.args[0]} along {PIPELINE!r}, "
                    "whose ranks have different layers; divide it along another axis"
                )


def _lines(mod: tvm.IRModule, params: Parameters) -> list[Line]:
    """Return the functions that are given weights."""
    names = {one.parameter: name for name, one in params.items() if not one.is_input}
    found = []
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
            found.append(Line(str(var.name_hint), function, weights))
    return found


def _check_teams(name: str, function: relax.Function) -> None:
    for call in calls(function):
        op = str(call.op.name) if isinstance(call.op, tvm.ir.Op) else ""
        named = op == COLLECTIVE and isinstance(call.attrs.team, str)
        if named or op.startswith("relax.ccl."):
            raise TransformError(
                f"parallelize: function {name!r} has a collective of all ranks, {call}, and those "
                "of other stages do not come to it; give it the teams of an axis, mesh.teams(...)"
            )


def _stages_with(divided: dict[str, Staged], params: Parameters) -> dict[str, set[int]]:
    """Return which stages have a use for each parameter."""
    names = {one.parameter: name for name, one in params.items()}
    found: dict[str, set[int]] = {name: set() for name in params}
    for one in divided.values():
        for k, used in enumerate(one.params):
            for x in used:
                if str(x.name) in names:
                    found[names[str(x.name)]].add(k)
    return found
