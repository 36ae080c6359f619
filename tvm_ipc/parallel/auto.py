# SPDX-License-Identifier: Apache-2.0
"""plan="auto": which weights are divided how is found, and explained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from tvm import relax

from tvm_ipc.calibration import Calibration
from tvm_ipc.comm import Mesh, Placement, Replica, Shard
from tvm_ipc.comm.operator import constant
from tvm_ipc.comm.placements import Placements
from tvm_ipc.parallel.axes import Axes
from tvm_ipc.parallel.costs import Costs, Seconds, nominal, shape_of
from tvm_ipc.parallel.divisions import divided_somehow
from tvm_ipc.parallel.outcomes import Outcomes
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
    program: Program, mesh: Mesh, calibration: Calibration | None
) -> tuple[dict[str, Placements], list[str]]:
    """Return where weights lie that are to be divided, and why, in sentences.

    Parameters
    ----------
    program : whose weights these are.
    mesh : with one axis.
    calibration : what the machine needs for what; None takes round figures.
    """
    _check(mesh, calibration)
    (workers,) = mesh.axes.values()
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
        {var: placements[0] for var, placements in program.fixed.items()},
        Outcomes(mesh, Costs(used)),
        _Follow(program),
    )
    best = search.best()
    plain: dict[str, Placements] = {
        name: (Shard(one.axis),) for name, one in best.placements.items()
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


def _check(mesh: Mesh, calibration: Calibration | None) -> None:
    """Check that a plan can be found for a mesh."""
    if len(mesh.axes) > 1:
        raise ValueError(
            f"parallelize: plan: 'auto' is for a mesh with one axis, and not {mesh}; find a plan "
            "on one axis, and write its placements for that: {name: {'tp': cut.placements[0]}}"
        )
    if calibration is not None and calibration.workers != len(mesh.ranks):
        raise ValueError(
            f"parallelize: calibration: it was measured with {calibration.workers} workers, and "
            f"the mesh has {len(mesh.ranks)}; measure again with `tvm-ipc bench --calibrate`"
        )
