# SPDX-License-Identifier: Apache-2.0
"""Where the parameters of a model lie, and who says so.

program      places on a parameter itself
plan         placements and styles by patterns of names
use          heads and pieces of an axis that the plan divides, as the program uses them
costs        weights that the plan leaves to be found
caches       inputs that lie as the heads do which they are made of
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvm import relax

from tvm_ipc.calibration import Calibration
from tvm_ipc.comm import Mesh, Replica, Shard
from tvm_ipc.comm.placements import Placements
from tvm_ipc.parallel.auto import Program, axis_to_find, find_plan
from tvm_ipc.parallel.axes import Axes
from tvm_ipc.parallel.caches import Caches, names_of_caches
from tvm_ipc.parallel.cut import Cut
from tvm_ipc.parallel.divisions import decisions_of, divided_by_use
from tvm_ipc.parallel.parameters import Functions, Parameters, idle_weights, placed_in_program
from tvm_ipc.parallel.plan import Planned
from tvm_ipc.parallel.styles import Style
from tvm_ipc.transform.report import Decision


@dataclass(frozen=True)
class Layout:
    """Where parameters lie.

    Attributes
    ----------
    mesh : of the placements.
    placements : of parameters; others are replicated, and so are inputs that are not named.
    styles : of parameters, by the axes of the mesh along which they have one.
    caches : inputs among them that results are made of, which lie alike.
    decisions : why weights are not divided into consecutive parts.
    notes : how the plan was found, and which weights are idle.
    idle : weights that no function uses.
    """

    mesh: Mesh
    placements: Mapping[str, Placements]
    styles: Mapping[str, Mapping[str, Style]]
    caches: Caches
    decisions: list[Decision]
    notes: list[str]
    idle: list[str]

    def cut(self, params: Parameters) -> dict[str, Cut]:
        """Return how weights are divided, and inputs of which it is said."""
        replicas: Placements = (Replica(),) * len(self.mesh.axes)
        return {
            name: Cut(
                name,
                one.parameter,
                one.shape,
                one.dtype,
                self.mesh,
                self.placements.get(name, replicas),
                one.is_input,
            )
            for name, one in params.items()
            if not one.is_input or name in self.placements
        }


def lay_out(
    functions: Functions,
    params: Parameters,
    mesh: Mesh,
    planned: Planned,
    caches: object,
    calibration: Calibration | None,
) -> Layout:
    """Return where parameters lie.

    Parameters
    ----------
    functions : of the model.
    params : theirs.
    mesh : of the ranks.
    planned : what the plan says.
    caches : patterns of inputs that lie as the heads do which they are made of.
    calibration : by which it is predicted what costs least, where the plan is to be found.
    """
    by_program = placed_in_program(mesh, functions, params)
    idle = idle_weights(functions, params)
    _check_twins(idle, functions, params, planned)
    followers = _caches(caches, params, planned)

    variables = {name: one.variables for name, one in params.items()}
    shapes = {name: one.shape for name, one in params.items()}
    weights = [name for name, one in params.items() if not one.is_input]
    axes = Axes(functions.values(), {var: name for name in weights for var in variables[name]})

    of_weights = {name: one for name, one in planned.placements.items() if name in weights}
    as_used, divided = divided_by_use(axes, mesh, of_weights, shapes)
    notes: list[str] = []
    to_find = [name for name in planned.wanted if name in weights and name not in by_program]
    axis = axis_to_find(mesh, _axes_of_inputs(mesh, params, planned)) if to_find else None
    if axis is not None:
        fixed = {**by_program, **planned.placements, **as_used}
        program = Program(
            list(functions.values()),
            {name: variables[name] for name in to_find},
            {var: placements for name, placements in fixed.items() for var in variables[name]},
            {var for name in followers for var in variables[name]},
            axes,
        )
        found, notes = find_plan(program, mesh, axis, calibration)
        as_used, divided = divided_by_use(axes, mesh, of_weights | found, shapes)

    for name, placements in planned.placements.items():
        for along, one in zip(divided, placements, strict=True):
            if params[name].is_input and isinstance(one, Shard):
                for var in variables[name]:
                    along.setdefault(axes.of((var, (), one.axis)), one.division)
    made_alike = Caches(axes, mesh, divided, {name: variables[name] for name in followers})
    return Layout(
        mesh,
        {**by_program, **planned.placements, **as_used, **made_alike.placements},
        planned.styles,
        made_alike,
        list(decisions_of(mesh, as_used)),
        [*notes, *(f"{name} is used by no function: its place means nothing" for name in idle)],
        idle,
    )


def _check_twins(
    idle: Sequence[str], functions: Functions, params: Parameters, planned: Planned
) -> None:
    """Refuse a plan that names a weight that nothing uses instead of its twin.

    Of weights that share their memory, such as a table of words and the product with it at the end,
    exporters leave one in the program, and the parameter of the other, both of one function.
    """
    known = {*planned.placements, *planned.wanted}
    beside: dict[relax.Var, set[relax.Var]] = {}
    for function in functions.values() if idle else ():
        its_params = set(function.params)
        beside.update(dict.fromkeys(its_params, its_params))
    for name in idle:
        one = params[name]
        twins = [
            twin
            for twin, other in params.items()
            if not other.is_input
            and twin not in idle
            and (other.shape, other.dtype) == (one.shape, one.dtype)
            and any(beside[var].intersection(other.variables) for var in one.variables)
        ]
        divided = any(isinstance(x, Shard) for x in planned.placements.get(name, ()))
        if divided and twins and not known.intersection(twins):
            raise ValueError(
                f"parallelize: plan: {name!r} is used by no function, so its place means nothing; "
                f"if it shares its memory with {twins[0]!r}, say where that lies"
            )


def _axes_of_inputs(mesh: Mesh, params: Parameters, planned: Planned) -> set[str]:
    """Return the axes along which a plan divides inputs."""
    return {
        axis
        for name, placements in planned.placements.items()
        for axis, one in zip(mesh.axes, placements, strict=True)
        if params[name].is_input and isinstance(one, Shard)
    }


def _caches(given: object, params: Parameters, planned: Planned) -> list[str]:
    found = names_of_caches(given, [name for name, one in params.items() if one.is_input])
    both = [name for name in found if name in planned.placements]
    if both:
        raise ValueError(f"parallelize: {both[0]!r} is in caches and in the plan; leave one out")
    return found
