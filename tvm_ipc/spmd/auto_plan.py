# SPDX-License-Identifier: Apache-2.0
"""Automatic sharding, `plan="auto"`: the cheapest plan by predicted time, with an explanation."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass

from tvm import relax

from tvm_ipc import arguments
from tvm_ipc.calibration import Calibration
from tvm_ipc.comm import Mesh, Placement, Replica, Shard
from tvm_ipc.comm.extent_arithmetic import constant
from tvm_ipc.comm.placements import Placements
from tvm_ipc.spmd.axis_relation_graph import Axes
from tvm_ipc.spmd.op_costs import Costs, Seconds, nominal, shape_of
from tvm_ipc.spmd.plan_parser import PIPELINE
from tvm_ipc.spmd.plan_search import FoundPlan, Search, Weight
from tvm_ipc.spmd.rules.axis_label_rule import Choice
from tvm_ipc.spmd.sharded_call_costs import CallCosts
from tvm_ipc.spmd.weight_divisions_from_heads_and_slices import shard_axes_jointly


@dataclass(frozen=True, eq=False)
class Program:
    """A program for which a plan is searched.

    Attributes
    ----------
    functions : the functions whose times are added.
    weights : the variables of each weight that may be sharded.
    fixed : the placements of other parameters; those without one are replicated.
    caches : parameters that are sharded like the heads that they are computed from.
    axes : the axes of the program.
    choices : by variable of a call and index of the axis of the mesh, the label that annotations
        shard.
    """

    functions: Sequence[relax.Function]
    weights: Mapping[str, Sequence[relax.Var]]
    fixed: Mapping[relax.Var, Placements]
    caches: Set[relax.Var]
    axes: Axes
    choices: Mapping[relax.Var, Mapping[int, Choice]]


def find_plan(
    program: Program, mesh: Mesh, axis: str, calibration: Calibration | None
) -> tuple[dict[str, Placements], list[str]]:
    """Return the placements of the weights that are sharded, and an explanation as notes.

    Along other axes of the mesh weights are replicated. The ranks along those axes share the work
    equally under every plan, so the search ignores them.

    Parameters
    ----------
    program : the program with the weights.
    mesh : the mesh of the ranks.
    axis : the axis of the mesh along which weights are sharded.
    calibration : measured times for as many workers as the axis has; None uses nominal figures.
    """
    order = list(mesh.axes)
    index, workers = order.index(axis), mesh.extent(axis)
    _check_calibration(axis, workers, calibration)
    candidates = _candidate_placements(program, workers)
    weights = {
        var: Weight(name, _shape(var), int(shape_of(var.ty).bytes), candidates[name])
        for name, variables in program.weights.items()
        for var in variables
    }
    calibration = nominal(workers) if calibration is None else calibration
    search = Search(
        program.functions,
        weights,
        {var: placements[index] for var, placements in program.fixed.items()},
        CallCosts(Mesh({axis: workers}), Costs(calibration)),
        _CacheFollower(program),
        {var: by_axis[index] for var, by_axis in program.choices.items() if index in by_axis},
    )
    best = search.best()
    plain: dict[str, Placements] = {
        name: tuple(Shard(shard.axis) if k == index else Replica() for k in range(len(order)))
        for name, shard in best.placements.items()
    }
    return plain, _explain(best, search, calibration)


class _CacheFollower:
    """Decides whether a tensor stays in its placement because it is a cache, or updates one."""

    def __init__(self, program: Program) -> None:
        self.axes, self.caches = program.axes, program.caches
        self.nodes = {
            program.axes.of((var, (), axis))
            for var in program.caches
            for axis in range(int(var.ty.ndim))
        }

    def __call__(self, var: relax.Expr, placement: Placement) -> bool:
        if var in self.caches:
            return True
        if not isinstance(placement, Shard):
            return False
        return self.axes.of((var, (), placement.axis)) in self.nodes


def _candidate_placements(program: Program, workers: int) -> dict[str, tuple[Placement, ...]]:
    """Return the placements to try for each weight.

    Vectors stay replicated: to take the shard of one that an operator needs is free.
    """
    shapes = {name: _shape(variables[0]) for name, variables in program.weights.items()}
    shardable = [
        (name, axis)
        for name, shape in shapes.items()
        for axis, extent in enumerate(shape)
        if len(shape) > 1 and extent >= workers > 1
    ]
    shards = shard_axes_jointly(program.axes, workers, shardable, shapes)
    candidates: dict[str, list[Placement]] = {name: [Replica()] for name in program.weights}
    for (name, _), shard in shards.items():
        candidates[name].append(shard)
    return {name: tuple(placements) for name, placements in candidates.items()}


def _shape(var: relax.Var) -> tuple[int, ...]:
    return tuple(constant(extent) or 0 for extent in var.ty.shape.values)


def _explain(best: FoundPlan, search: Search, calibration: Calibration) -> list[str]:
    source = f"from the calibration of {calibration.machine}"
    if calibration is nominal(calibration.workers):
        source = "from nominal figures, since there is no calibration"
    replicated = _milliseconds(search.replicated_seconds)
    if best.placements:
        return [
            f"automatic sharding: {_describe(best)}, {replicated} with all weights replicated; "
            f"predicted {source}"
        ]
    sharded = search.best_sharded()
    alternative = "no weight has an axis that several ranks could share"
    if sharded is not None:
        alternative = f"the best plan with sharded weights takes {_describe(sharded)}"
    return [
        "automatic sharding: no weight is sharded, which is predicted to be fastest: "
        f"{replicated}, and {alternative}; predicted {source}"
    ]


def _describe(plan: FoundPlan) -> str:
    seconds: Seconds = plan.seconds
    collectives = arguments.counted(plan.collectives, "collective")
    return (
        f"{_milliseconds(seconds.total)} for a call of each function, of which "
        f"{_milliseconds(seconds.communicating)} are {collectives}"
    )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _check_calibration(axis: str, workers: int, calibration: Calibration | None) -> None:
    """Raise an error unless the calibration is for the number of workers along the axis."""
    if calibration is not None and calibration.workers != workers:
        raise ValueError(
            "parallelize: calibration: it was measured with "
            f"{arguments.counted(calibration.workers, 'worker')}, but the mesh has {workers} along "
            f"{axis!r}; measure again with `tvm-ipc bench --calibrate`"
        )


def choose_mesh_axis(mesh: Mesh, of_inputs: Collection[str]) -> str | None:
    """Return the axis of the mesh along which to shard weights, or None if only "pp" is left.

    Parameters
    ----------
    mesh : the mesh of the ranks.
    of_inputs : the axes along which the plan shards inputs.
    """
    if len(mesh.axes) == 1 and PIPELINE not in mesh.axes:
        return next(iter(mesh.axes))
    free = [axis for axis in mesh.axes if axis != PIPELINE and axis not in of_inputs]
    if len(free) > 1 or (not free and of_inputs):
        raise ValueError(
            f"parallelize: plan: 'auto' shards weights along one axis, and {mesh} has "
            f"{', '.join(map(repr, free)) or 'none'} along which the plan shards no input; shard "
            "the batch of inputs along the other axes, such as {'ids': {'dp': comm.Shard(0)}, "
            "'*': 'auto'}, or merge these axes into one"
        )
    return free[0] if free else None
