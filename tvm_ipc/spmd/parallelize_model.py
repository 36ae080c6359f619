# SPDX-License-Identifier: Apache-2.0
"""`parallelize`, which turns a model for one device into a program for each rank of a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import tvm
from tvm import relax

from tvm_ipc import arguments
from tvm_ipc.analysis.walk_and_rewrite_bindings import change_functions
from tvm_ipc.calibration import Calibration
from tvm_ipc.comm import Mesh
from tvm_ipc.packed_functions import MAX_WORKERS
from tvm_ipc.spmd.canonicalize_attention import canonicalize_attention
from tvm_ipc.spmd.combine_placement_sources import ShardingPlan, make_sharding_plan
from tvm_ipc.spmd.extents_known_on_ranks import with_multiples_of_ranks
from tvm_ipc.spmd.insert_reshards import insert_reshards
from tvm_ipc.spmd.lower_placements import LowerPlacements
from tvm_ipc.spmd.model_parameters_and_uses import Functions, Parameters, parameters_of
from tvm_ipc.spmd.parallelize_result import Parallelized
from tvm_ipc.spmd.parameter_shard_spec import notes_of
from tvm_ipc.spmd.pipeline_parallelism.choose_stages import check_stages
from tvm_ipc.spmd.pipeline_parallelism.lower_pipeline import check_unplaced, lower_pipeline
from tvm_ipc.spmd.place_activations_by_style import place_activations
from tvm_ipc.spmd.placements.convert_dist_annotations import convert_dist_annotations
from tvm_ipc.spmd.placements.place_calls import mesh_of_function
from tvm_ipc.spmd.plan_parser import PIPELINE, read_plan
from tvm_ipc.spmd.rules.operator_rule_table import use_primfuncs
from tvm_ipc.spmd.tuple_parameters import with_separate_fields, with_tuples
from tvm_ipc.transform import collect_report
from tvm_ipc.transform.report import note


def parallelize(
    mod: tvm.IRModule,
    plan: Any,
    mesh: Mesh | int,
    *,
    names: Mapping[str, str] | None = None,
    caches: Sequence[str] = (),
    calibration: Calibration | None = None,
    stages: Sequence[str] | None = None,
    reproducible: bool = False,
) -> Parallelized:
    """Shard a model for one device over the ranks of a mesh, as a plan specifies.

    Collectives are inserted wherever an operator needs an operand in another placement. If several
    placements are possible, the one that moves the fewest bytes is chosen. Results are replicated,
    except where `R.comm.place`, `caches` or `stages` determine something else.

    Parameters
    ----------
    mod : a module for one device, whose weights are parameters of its functions.
    plan : a mapping from parameter names or patterns to placements, or to styles such as "colwise"
        (shard output features) and "rowwise" (shard input features). On a mesh with several axes,
        each value is a mapping from axes to placements or styles, such as {"tp": "colwise"}. For a
        style, the matmul that uses a weight determines which axis of the weight is sharded.
        `R.comm.place` in the program shards further parameters. Others are replicated. If you pass
        a transformers model, its own plan is used. "auto", for a pattern or as the plan, selects
        automatic sharding.
    mesh : the mesh of the ranks, or the number of ranks. If you pass a number and the functions
        place tensors on a mesh, that mesh is used, and must have this many ranks. If they place
        none, the mesh has the single axis "tp".
    names : a mapping from parameters of the functions to their names in plans, such as
        `ExportedProgram.graph_signature.inputs_to_parameters` of a PyTorch model.
    caches : names or patterns of inputs that are computed in earlier calls, such as the keys and
        values of earlier tokens. If weights are sharded by heads, each rank has only its own heads
        of these inputs, and of the results that are computed from them.
    calibration : measured times that automatic sharding uses. They must have been measured with as
        many workers as there are ranks along the sharded axis of the mesh. The times are also used
        to balance `stages`. If None, nominal figures are used.
    stages : the pipeline stages, for a mesh with the axis "pp", along which ranks have different
        layers. For each stage except the first, pass a pattern of the weights that the stage begins
        with, such as "layers.16". Results are on the ranks of the stage that computes them. If
        None, the stages are chosen so that their predicted times are balanced.
    reproducible : whether results of matmuls are summed over ranks before any other operator, which
        `get_pipeline(..., reproducible=True)` needs.

    Returns
    -------
    Parallelized
        The program of each rank, with the shards of its parameters.

    Raises
    ------
    ValueError
        A pattern of the plan matches no parameter, or a parameter cannot be sharded in that way.
    TransformError
        The program cannot be lowered to per-rank programs.

    Examples
    --------
    >>> import tvm
    >>> import tvm_ipc
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class MLP:
    ...     @R.function
    ...     def main(
    ...         x: R.Tensor((5, 8), "float32"),
    ...         up: R.Tensor((8, 6), "float32"),
    ...         down: R.Tensor((6, 8), "float32"),
    ...     ):
    ...         R.func_attr({"num_input": 1})  # up and down are weights
    ...         return R.matmul(R.nn.relu(R.matmul(x, up)), down)
    ... ''')
    >>> plan = {"up": tvm_ipc.comm.Shard(1), "down": tvm_ipc.comm.Shard(0)}
    >>> parallel = tvm_ipc.parallelize(mod, plan, 2)
    >>> print(parallel)
    on Mesh({'tp': 2}), 192 bytes of parameters on each rank, of 384
      up (8, 6) float32: S[1] along 'tp', 96 bytes on each rank
      down (6, 8) float32: S[0] along 'tp', 96 bytes on each rank
      allreduce of gv2 along 'tp': it is a result, and results without R.comm.place are replicated
    """
    arguments.instance("parallelize: mod", mod, tvm.IRModule, "an IRModule")
    arguments.flag("parallelize: reproducible", reproducible)
    with use_primfuncs(mod):
        return _parallelized(mod, plan, mesh, names, caches, calibration, stages, reproducible)


def _parallelized(
    mod: tvm.IRModule,
    plan: Any,
    mesh: Mesh | int,
    names: Mapping[str, str] | None,
    caches: Sequence[str],
    calibration: Calibration | None,
    stages: Sequence[str] | None,
    reproducible: bool,
) -> Parallelized:
    if calibration is not None:
        expected = "a Calibration, or None"
        arguments.instance("parallelize: calibration", calibration, Calibration, expected)
    functions: Functions = _functions(mod, mesh)
    own_meshes = {name: mesh_of_function(name, func) for name, func in functions.items()}
    mesh = _mesh(mesh, own_meshes)
    begins = check_stages(stages, mesh)
    originals = functions
    if PIPELINE not in mesh.axes:
        functions = {name: with_separate_fields(each) for name, each in functions.items()}

    def make_plan(functions: Functions) -> tuple[Parameters, ShardingPlan]:
        params = parameters_of(functions, names)
        shapes = {name: param.shape for name, param in params.items()}
        planned = read_plan(plan, mesh, shapes, lambda name: params[name].use)
        return params, make_sharding_plan(functions, params, mesh, planned, caches, calibration)

    params, sharding = make_plan(functions)
    known = with_multiples_of_ranks(
        functions,
        mesh,
        sharding.placements_of_variables(params),
        sharding.derived_variables(params),
    )
    if known is not functions:
        functions = known
        params, sharding = make_plan(functions)

    placed = {
        name: _placed(name, function, sharding, params, own_meshes[name] is not None, reproducible)
        for name, function in functions.items()
    }
    for_all = _with_functions(mod, placed)
    with collect_report() as report:
        for_one = LowerPlacements().apply(for_all)
    decisions = [*sharding.decisions, *report.decisions]
    notes = list(sharding.notes)
    specs = sharding.shards(params)
    if PIPELINE in mesh.axes:
        check_unplaced(placed, mesh)
        pipeline = lower_pipeline(for_one, params, mesh, begins, calibration)
        for_one = pipeline.module
        decisions += pipeline.decisions
        notes += pipeline.notes
        specs = {name: replace(spec, ranks=pipeline.ranks[name]) for name, spec in specs.items()}
    else:
        for_one = change_functions(
            for_one, lambda name, function: with_tuples(function, originals[name])
        )
    for decision in decisions:
        note(decision)
    notes += notes_of(spec for name, spec in specs.items() if name not in sharding.idle)
    return Parallelized(for_one, for_all, mesh, specs, tuple(decisions), tuple(notes))


def _functions(mod: tvm.IRModule, mesh: Mesh | int) -> dict[str, relax.Function]:
    """Return the functions in canonical form, with TVM's annotations replaced by `R.comm.place`."""
    named_mesh = mesh if isinstance(mesh, Mesh) else None
    return {
        str(name.name_hint): convert_dist_annotations(
            str(name.name_hint), canonicalize_attention(function), named_mesh
        )
        for name, function in mod.functions_items()
        if isinstance(function, relax.Function)
    }


def _mesh(mesh: Mesh | int, own_meshes: Mapping[str, Mesh | None]) -> Mesh:
    """Return the mesh that the argument `mesh` specifies.

    If `mesh` is a number, the result is the mesh of the functions, which must have that many ranks.
    If the functions have no mesh, it has the single axis "tp".
    """
    if not isinstance(mesh, Mesh):
        expected = f"a Mesh, or a number of ranks, 1 to {MAX_WORKERS}"
        workers = arguments.integer("parallelize: mesh", mesh, expected, 1, MAX_WORKERS)
        own = next((own for own in own_meshes.values() if own is not None), None)
        mesh = own if own is not None and len(own.ranks) == workers else Mesh({"tp": workers})
    for name, own in own_meshes.items():
        if own is not None and own != mesh:
            raise ValueError(
                f"parallelize: function {name!r} places tensors on {own}, and mesh is {mesh}; pass "
                "the mesh of the function"
            )
    return mesh


def _placed(
    name: str,
    function: relax.Function,
    sharding: ShardingPlan,
    params: Parameters,
    has_placements: bool,
    reproducible: bool,
) -> relax.Function:
    """Return a function for all ranks, with `R.comm.place` wherever a placement changes."""
    if len(sharding.mesh.ranks) == 1 and not has_placements and PIPELINE not in sharding.mesh.axes:
        return function  # no placement of one rank differs from another
    function = sharding.caches.with_placed_results(function)
    function_params = set(function.params)
    names = {
        var: param.name
        for param in params.values()
        for var in param.variables
        if var in function_params and param.name in sharding.placements
    }
    placements = {var: sharding.placements[name] for var, name in names.items()}
    styles = {var: sharding.styles[name] for var, name in names.items() if name in sharding.styles}
    function = place_activations(name, function, sharding.mesh, placements, styles)
    if not placements and not has_placements:
        return function
    flow = sharding.flows.get(name)
    return insert_reshards(function, sharding.mesh, placements, flow, reduces_at_once=reproducible)


def _with_functions(mod: tvm.IRModule, functions: Functions) -> tvm.IRModule:
    changed = {
        name: functions.get(str(name.name_hint), function)
        for name, function in mod.functions_items()
    }
    return tvm.IRModule(changed, attrs=mod.attrs, global_infos=mod.global_infos)
