# SPDX-License-Identifier: Apache-2.0
"""plan="auto": which weights are divided how is found, and explained."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass

from tvm import relax

from tvm_ipc.calibration import Calibration
from tvm_ipc.comm import Mesh, Placement, Replica, Shard
from tvm_ipc.comm.extents import constant
from tvm_ipc.comm.placements import Placements
from tvm_ipc.parallel.axes import Axes
from tvm_ipc.parallel.costs import Costs, Seconds, nominal, shape_of
from tvm_ipc.parallel.divisions import divided_somehow
from tvm_ipc.parallel.outcomes import Outcomes
from tvm_ipc.parallel.plan import PIPELINE
from tvm_ipc.parallel.search import Found, Search, Weight


@dataclass(frozen=True)
class Program:
    """What a plan is to be found for.

    Attributes
    ----------
    functions : whose times are added.
    weights : the variables of each weight that is to be divided somehow.
    fixed : where other parameters lie; those that are not named are replicated.
    caches : parameters that follow what is made of weights.
    axes : of the program.
    """

    functions: Sequence[relax.Function]
    weights: Mapping[str, Sequence[relax.Var]]
    fixed: Mapping[relax.Var, Placements]
    caches: Set[relax.Var]
    axes: Axes


def find_plan(
    program: Program, mesh: Mesh, axis: str, calibration: Calibration | None
) -> tuple[dict[str, Placements], list[str]]:
    """Return where weights lie that are to be divided, and why, in sentences.

    Along other axes of the mesh weights are replicated. What ranks that differ along these have of
    the work is the same for each plan, so the plan is found for the whole of it.

    Parameters
    ----------
    program : whose weights these are.
    mesh : of the ranks.
    axis : along which weights are divided.
    calibration : what as many workers as the axis has need for what; None takes round figures.
    """
    order = list(mesh.axes)
    at, workers = order.index(axis), mesh.extent(axis)
    _check(axis, workers, calibration)
    ways = _ways(program, workers)
    weights = {
        var: Weight(name, _shape(var), int(shape_of(var.ty).bytes), ways[name])
        for name, variables in program.weights.items()
        for var in variables
    }
    used = nominal(workers) if calibration is None else calibration
    search = Search(
        program.functions,
        weights,
        {var: placements[at] for var, placements in program.fixed.items()},
        Outcomes(Mesh({axis: workers}), Costs(used)),
        _Follow(program),
    )
    best = search.best()
    plain: dict[str, Placements] = {
        name: tuple(Shard(one.axis) if k == at else Replica() for k in range(len(order)))
        for name, one in best.placements.items()
    }
    return plain, _explained(best, search, used)


class _Follow:
    """Which tensors lie as those do that they are made of, without being moved."""

    def __init__(self, program: Program) -> None:
        self.axes, self.caches = program.axes, program.caches
        self.nodes = {
            program.axes.of((var, (), axis))
            for var in program.caches
            for axis in range(int(var.ty.ndim))
        }

    def __call__(self, var: relax.Expr, lies: Placement) -> bool:
        if var in self.caches:
            return True
        return isinstance(lies, Shard) and self.axes.of((var, (), lies.axis)) in self.nodes


def _ways(program: Program, workers: int) -> dict[str, tuple[Placement, ...]]:
    """Return where each weight may lie; vectors are cut as others are divided, which is free."""
    shapes = {name: _shape(variables[0]) for name, variables in program.weights.items()}
    wanted = [
        (name, axis)
        for name, shape in shapes.items()
        for axis, extent in enumerate(shape)
        if len(shape) > 1 and extent >= workers > 1
    ]
    divided = divided_somehow(program.axes, workers, wanted, shapes)
    found: dict[str, list[Placement]] = {name: [Replica()] for name in program.weights}
    for (name, _), one in divided.items():
        found[name].append(one)
    return {name: tuple(ways) for name, ways in found.items()}


def _shape(var: relax.Var) -> tuple[int, ...]:
    return tuple(constant(extent) or 0 for extent in var.ty.shape.values)


def _explained(best: Found, search: Search, calibration: Calibration) -> list[str]:
    whole = f"{_milliseconds(search.whole)} where nothing is divided"
    by = f"by the calibration of {calibration.machine}"
    if calibration is nominal(calibration.workers):
        by = "by round figures, since there is no calibration"
    if best.placements:
        return [f"the plan was found: {_shown(best)}, {whole}; predicted {by}"]
    other = search.best_divided()
    why = "no weight has an axis that several ranks could divide"
    if other is not None:
        why = f"the best plan that divides weights takes {_shown(other)}"
    return [
        "nothing is divided, which is predicted to be cheapest: "
        f"{_milliseconds(search.whole)}, and {why}; predicted {by}"
    ]


def _shown(found: Found) -> str:
    seconds: Seconds = found.seconds
    collectives = f"{found.collectives} collective{'s' * (found.collectives != 1)}"
    return (
        f"{_milliseconds(seconds.total)} for a call of each function, of which "
        f"{_milliseconds(seconds.communicating)} are {collectives}"
    )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _check(axis: str, workers: int, calibration: Calibration | None) -> None:
    """Check that a plan can be found with a calibration."""
    if calibration is not None and calibration.workers != workers:
        raise ValueError(
            f"parallelize: calibration: it was measured with {calibration.workers} workers, and "
            f"the mesh has {workers} along {axis!r}; measure again with `tvm-ipc bench --calibrate`"
        )


def axis_to_find(mesh: Mesh, of_inputs: Collection[str]) -> str | None:
    """Return the axis along which weights are to be divided, None if there is only a pipeline.

    Parameters
    ----------
    mesh : of the ranks.
    of_inputs : axes along which the plan divides inputs.
    """
    if len(mesh.axes) == 1 and PIPELINE not in mesh.axes:
        return next(iter(mesh.axes))
    free = [axis for axis in mesh.axes if axis != PIPELINE and axis not in of_inputs]
    if len(free) > 1 or (not free and of_inputs):
        raise ValueError(
            f"parallelize: plan: 'auto' divides weights along one axis, and {mesh} has "
            f"{', '.join(map(repr, free)) or 'none'} along which the plan divides no input; divide "
            "the batch of inputs along the others, {'ids': {'dp': comm.Shard(0)}, '*': 'auto'}, or "
            "let one axis have all these ranks"
        )
    return free[0] if free else None
