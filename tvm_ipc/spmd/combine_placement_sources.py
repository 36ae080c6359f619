# SPDX-License-Identifier: Apache-2.0
"""The placements of all parameters of a model, combined from several sources.

program      `R.comm.place` on a parameter
plan         placements and styles for patterns of names
use          how the program uses a sharded axis: heads, and slices of fused weights
costs        automatic sharding of the weights for which the plan requests it
caches       inputs that are sharded like the heads that they are computed from
annotations  `R.comm.place` on other tensors, and on other parameters
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tvm import relax

from tvm_ipc.calibration import Calibration
from tvm_ipc.comm import Mesh, Replica, Shard
from tvm_ipc.comm.placements import Placements, format_placements
from tvm_ipc.spmd.auto_plan import Program, choose_mesh_axis, find_plan
from tvm_ipc.spmd.axis_relation_graph import Axes
from tvm_ipc.spmd.insert_reshards import Flow
from tvm_ipc.spmd.kv_cache_tensor_placements import Caches, names_of_caches
from tvm_ipc.spmd.model_parameters_and_uses import Functions, Parameters, placed_in_program
from tvm_ipc.spmd.parameter_shard_spec import ShardSpec
from tvm_ipc.spmd.plan_parser import Planned
from tvm_ipc.spmd.propagate_annotations import Propagated, propagate_annotations
from tvm_ipc.spmd.weight_divisions_from_heads_and_slices import decisions_of, shard_axes_by_use
from tvm_ipc.spmd.weight_placements_of_styles import Style
from tvm_ipc.transform.report import Decision


@dataclass(frozen=True)
class ShardingPlan:
    """The placements of the parameters of a model.

    Attributes
    ----------
    mesh : the mesh of the placements.
    placements : the placements of parameters; other parameters are replicated.
    styles : the styles of parameters, by axis of the mesh.
    caches : the caches among the inputs, and the results that are computed from them.
    decisions : the reasons why shards of weights are not consecutive blocks.
    notes : how automatic sharding chose, and which weights are idle.
    idle : weights that no function uses.
    flows : the placements that follow from the annotations of each function, by its name.
    derived : the parameters whose placements the program specifies, directly or by annotations of
        other tensors.
    """

    mesh: Mesh
    placements: Mapping[str, Placements]
    styles: Mapping[str, Mapping[str, Style]]
    caches: Caches
    decisions: list[Decision]
    notes: list[str]
    idle: list[str]
    flows: Mapping[str, Flow]
    derived: frozenset[str]

    def placements_of_variables(self, params: Parameters) -> dict[relax.Var, Placements]:
        """Return the placements of the variables of parameters."""
        return {
            var: self.placements[name]
            for name, param in params.items()
            for var in param.variables
            if name in self.placements
        }

    def derived_variables(self, params: Parameters) -> frozenset[relax.Var]:
        """Return the variables of the parameters in `derived`."""
        return frozenset(var for name in self.derived for var in params[name].variables)

    def shards(self, params: Parameters) -> dict[str, ShardSpec]:
        """Return the shards of weights, and of inputs that have a placement."""
        replicas: Placements = (Replica(),) * len(self.mesh.axes)
        return {
            name: ShardSpec(
                name,
                param.parameter,
                param.shape,
                param.dtype,
                self.mesh,
                self.placements.get(name, replicas),
                param.is_input,
            )
            for name, param in params.items()
            if not param.is_input or name in self.placements
        }


def make_sharding_plan(
    functions: Functions,
    params: Parameters,
    mesh: Mesh,
    planned: Planned,
    caches: object,
    calibration: Calibration | None,
) -> ShardingPlan:
    """Return the placements of all parameters.

    Parameters
    ----------
    functions : the functions of the model.
    params : the parameters of the functions.
    mesh : the mesh of the ranks.
    planned : the plan, matched to the parameters.
    caches : patterns of inputs that are sharded like the heads that they are computed from.
    calibration : the measured times that automatic sharding uses.
    """
    by_program = placed_in_program(mesh, functions, params)
    idle = [name for name, param in params.items() if param.use.unused and not param.is_input]
    _check_tied_weights(idle, functions, params, planned)
    cache_names = _cache_names(caches, params, planned)

    variables = {name: param.variables for name, param in params.items()}
    shapes = {name: param.shape for name, param in params.items()}
    weights = [name for name, param in params.items() if not param.is_input]
    axes = Axes(functions.values(), {var: name for name in weights for var in variables[name]})

    of_weights = {name: each for name, each in planned.placements.items() if name in weights}
    by_use, sharded = shard_axes_by_use(axes, mesh, of_weights, shapes)
    notes: list[str] = []
    to_find = [name for name in planned.automatic if name in weights and name not in by_program]
    axis = choose_mesh_axis(mesh, _axes_of_inputs(mesh, params, planned)) if to_find else None
    by_others = {*planned.placements, *by_program, *cache_names, *planned.automatic}
    free = [
        name
        for name, param in params.items()
        if name not in by_others and not param.is_counted_input
    ]

    def propagate(given: Mapping[str, Placements]) -> Propagated:
        return propagate_annotations(
            functions,
            mesh,
            {var: name for name in params for var in variables[name]},
            {name: each for name, each in by_program.items() if name not in given},
            given,
            free,
        )

    given = {**planned.placements, **by_use}
    propagated = propagate(given)
    if axis is not None:
        fixed = {**by_program, **propagated.params, **given}
        program = Program(
            list(functions.values()),
            {name: variables[name] for name in to_find},
            {var: placements for name, placements in fixed.items() for var in variables[name]},
            {var for name in cache_names for var in variables[name]},
            axes,
            {var: by for flow in propagated.flows.values() for var, by in flow.choices.items()},
        )
        chosen, notes = find_plan(program, mesh, axis, calibration)
        by_use, sharded = shard_axes_by_use(axes, mesh, of_weights | chosen, shapes)
        given = {**planned.placements, **by_use}
        propagated = propagate(given)

    for name, placements in {**planned.placements, **propagated.params}.items():
        for divisions, placement in zip(sharded, placements, strict=True):
            if name not in of_weights and isinstance(placement, Shard):
                for key in variables[name] if params[name].is_input else [name]:
                    divisions.setdefault(axes.of((key, (), placement.axis)), placement.division)
    placed_caches = Caches(axes, mesh, sharded, {name: variables[name] for name in cache_names})
    return ShardingPlan(
        mesh,
        {**by_program, **propagated.params, **given, **placed_caches.placements},
        planned.styles,
        placed_caches,
        [*decisions_of(mesh, by_use), *_decisions_of_annotations(mesh, propagated.params)],
        [*notes, *(f"{name} is used by no function: its placement has no effect" for name in idle)],
        idle,
        propagated.flows,
        frozenset(propagated.params) | (by_program.keys() - given.keys()),
    )


def _decisions_of_annotations(mesh: Mesh, placed: Mapping[str, Placements]) -> Iterator[Decision]:
    """Yield the reasons why annotations shard parameters that no plan names."""
    why = "R.comm.place of a tensor that is computed from it, or together with it"
    for name, placements in placed.items():
        outcome = f"sharded {format_placements(mesh, placements)}"
        yield Decision("parallelize", "", name, outcome, f"it follows from {why}")


def _check_tied_weights(
    idle: Sequence[str], functions: Functions, params: Parameters, planned: Planned
) -> None:
    """Raise an error if a plan shards an unused weight, and not the weight it is tied to.

    Of tied weights, such as the input and output embeddings, exporters keep both parameters but
    use only one of them in the function.
    """
    in_plan = {*planned.placements, *planned.automatic}
    params_beside: dict[relax.Var, set[relax.Var]] = {}
    for function in functions.values() if idle else ():
        function_params = set(function.params)
        params_beside.update(dict.fromkeys(function_params, function_params))
    for name in idle:
        unused = params[name]
        tied = [
            used_name
            for used_name, used in params.items()
            if not used.is_input
            and used_name not in idle
            and (used.shape, used.dtype) == (unused.shape, unused.dtype)
            and any(params_beside[var].intersection(used.variables) for var in unused.variables)
        ]
        is_sharded = any(isinstance(x, Shard) for x in planned.placements.get(name, ()))
        if is_sharded and tied and not in_plan.intersection(tied):
            raise ValueError(
                f"parallelize: plan: {name!r} is used by no function, so its placement has no "
                f"effect; if it is tied to {tied[0]!r}, add that to the plan"
            )


def _axes_of_inputs(mesh: Mesh, params: Parameters, planned: Planned) -> set[str]:
    """Return the axes of the mesh along which a plan shards inputs."""
    return {
        axis
        for name, placements in planned.placements.items()
        for axis, placement in zip(mesh.axes, placements, strict=True)
        if params[name].is_input and isinstance(placement, Shard)
    }


def _cache_names(caches: object, params: Parameters, planned: Planned) -> list[str]:
    names = names_of_caches(caches, [name for name, param in params.items() if param.is_input])
    conflicts = [name for name in names if name in planned.placements]
    if conflicts:
        raise ValueError(f"parallelize: {conflicts[0]!r} is in caches and in the plan; remove one")
    return names
