# SPDX-License-Identifier: Apache-2.0
"""From a model for one device to what each rank of a mesh runs of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import tvm
from tvm import relax

from tvm_ipc import arguments
from tvm_ipc.calibration import Calibration
from tvm_ipc.comm import Mesh
from tvm_ipc.contract import MAX_WORKERS
from tvm_ipc.parallel.activations import with_activations
from tvm_ipc.parallel.cut import notes_of
from tvm_ipc.parallel.layout import Layout, lay_out
from tvm_ipc.parallel.meet import with_meetings
from tvm_ipc.parallel.parallelized import Parallelized
from tvm_ipc.parallel.parameters import Functions, Parameters, parameters_of, uses_of
from tvm_ipc.parallel.pipelined import check_unplaced, pipelined
from tvm_ipc.parallel.plan import PIPELINE, read_plan
from tvm_ipc.parallel.products import with_batches
from tvm_ipc.parallel.repeats import with_repeats
from tvm_ipc.parallel.stages import check_stages
from tvm_ipc.transform import LowerPlacements, collect_report
from tvm_ipc.transform.placements.dist import with_places
from tvm_ipc.transform.placements.function import mesh_of_function
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
) -> Parallelized:
    """Return what each rank runs of a model whose weights are parameters.

    Where what an operator needs is not what there is, a collective stands between, the one that
    moves the fewest bytes. Results are what every rank has.

    Parameters
    ----------
    mod : functions that are written for one device.
    plan : for names of parameters, or patterns of them, a placement, or a style such as "colwise"
        of weights whose first axis is that of outputs; by axes of the mesh if it has several. Other
        parameters are replicated. A model of transformers stands for the plan that it has. Of what
        is "auto" the division is found that is predicted to take least.
    mesh : the ranks; a number is the mesh of the program if that has as many, else one with one
        axis, "tp".
    names : of parameters of the functions, if plans know them by other names: what
        `ExportedProgram.graph_signature.inputs_to_parameters` says of a model of PyTorch.
    caches : names of inputs, or patterns of them, such as keys and values of earlier tokens: a rank
        keeps those of the heads that it has, and of results that are made of them. All of them
        where weights are not divided by heads.
    calibration : of the machine and as many workers, from which times are predicted where a plan is
        to be found; without one they are predicted by round figures.
    stages : along the axis "pp" of a mesh ranks have different layers: for each stage but the first
        a pattern of weights with which it begins, such as "layers.16". Stages send to the next one,
        and results are on the ranks of those that make them. None finds stages that are even.

    Raises
    ------
    ValueError
        The plan names what there is not, or divides what cannot be divided.
    TransformError
        The program cannot be run by all ranks.
    """
    arguments.instance("parallelize: mod", mod, tvm.IRModule, "an IRModule")
    if calibration is not None:
        wanted = "a Calibration, or None"
        arguments.instance("parallelize: calibration", calibration, Calibration, wanted)
    functions = _functions(mod, mesh)
    said = {name: mesh_of_function(name, one) for name, one in functions.items()}
    mesh = _mesh(mesh, said)
    begins = check_stages(stages, mesh)
    params = parameters_of(functions, names)
    shapes = {name: one.shape for name, one in params.items()}
    planned = read_plan(plan, mesh, shapes, uses_of(functions, params))
    layout = lay_out(functions, params, mesh, planned, caches, calibration)

    placed = {
        name: _placed(name, function, layout, params, said[name] is not None)
        for name, function in functions.items()
    }
    for_all = _with_functions(mod, placed)
    with collect_report() as report:
        for_one = LowerPlacements().apply(for_all)
    decisions = [*layout.decisions, *report.decisions]
    notes = list(layout.notes)
    cut = layout.cut(params)
    if PIPELINE in mesh.axes:
        check_unplaced(placed, mesh)
        of_stages = pipelined(for_one, params, mesh, begins, calibration)
        for_one = of_stages.module
        decisions += of_stages.decisions
        notes += of_stages.notes
        cut = {name: replace(one, ranks=of_stages.ranks[name]) for name, one in cut.items()}

    for decision in decisions:
        note(decision)
    notes += notes_of(one for name, one in cut.items() if name not in layout.idle)
    return Parallelized(for_one, for_all, mesh, cut, tuple(decisions), tuple(notes))


def _functions(mod: tvm.IRModule, mesh: Mesh | int) -> dict[str, relax.Function]:
    """Return functions with operators that can be divided, and places for TVM's annotations."""
    known = mesh if isinstance(mesh, Mesh) else None
    return {
        str(name.name_hint): with_places(
            str(name.name_hint), with_repeats(with_batches(function)), known
        )
        for name, function in mod.functions_items()
        if isinstance(function, relax.Function)
    }


def _mesh(given: Mesh | int, said: Mapping[str, Mesh | None]) -> Mesh:
    """Return the mesh; of a number of ranks the one of the program, if that has as many."""
    if isinstance(given, Mesh):
        mesh = given
    else:
        wanted = f"a Mesh, or a number of ranks, 1 to {MAX_WORKERS}"
        workers = arguments.integer("parallelize: mesh", given, wanted, 1, MAX_WORKERS)
        known = next((one for one in said.values() if one is not None), None)
        same = known is not None and len(known.ranks) == workers
        mesh = known if known is not None and same else Mesh({"tp": workers})
    for name, one in said.items():
        if one is not None and one != mesh:
            raise ValueError(
                f"parallelize: function {name!r} places tensors on {one}, and mesh is {mesh}"
            )
    return mesh


def _placed(
    name: str, function: relax.Function, layout: Layout, params: Parameters, is_placed: bool
) -> relax.Function:
    """Return a function for all ranks, with a place wherever something has to be moved."""
    function = layout.caches.with_results(function)
    its_params = set(function.params)
    names = {
        var: one.name
        for one in params.values()
        for var in one.variables
        if var in its_params and one.name in layout.placements
    }
    lie = {var: layout.placements[one] for var, one in names.items()}
    styles = {var: layout.styles[one] for var, one in names.items() if one in layout.styles}
    function = with_activations(name, function, layout.mesh, lie, styles)
    return with_meetings(function, layout.mesh, lie) if lie or is_placed else function


def _with_functions(mod: tvm.IRModule, functions: Functions) -> tvm.IRModule:
    changed = {
        name: functions.get(str(name.name_hint), function)
        for name, function in mod.functions_items()
    }
    return tvm.IRModule(changed, attrs=mod.attrs, global_infos=mod.global_infos)
