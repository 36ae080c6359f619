# SPDX-License-Identifier: Apache-2.0
"""From a model for one device to what each rank of a mesh runs of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final

import tvm
from tvm import relax, tirx

from tvm_ipc import arguments
from tvm_ipc.calibration import Calibration
from tvm_ipc.comm import Mesh, Replica, Shard
from tvm_ipc.comm.operator import constant, dtype_of, extents, same_extents
from tvm_ipc.comm.place_operator import NAME as PLACE
from tvm_ipc.comm.placements import Placements, placements_of, show
from tvm_ipc.contract import MAX_WORKERS
from tvm_ipc.parallel.activations import with_activations
from tvm_ipc.parallel.auto import Program, find_plan
from tvm_ipc.parallel.axes import Axes
from tvm_ipc.parallel.caches import Caches, names_of_caches
from tvm_ipc.parallel.cut import Cut, notes_of
from tvm_ipc.parallel.divisions import decisions_of, divided_by_use
from tvm_ipc.parallel.meet import with_meetings
from tvm_ipc.parallel.plan import Planned, read_plan
from tvm_ipc.parallel.products import with_batches
from tvm_ipc.parallel.repeats import with_repeats
from tvm_ipc.parallel.styles import Use
from tvm_ipc.parallel.uses import Meeting, meetings_of, unused, use_of
from tvm_ipc.transform import LowerPlacements, collect_report
from tvm_ipc.transform.ir.rewrite import calls
from tvm_ipc.transform.placements.dist import with_places
from tvm_ipc.transform.placements.function import mesh_of_function
from tvm_ipc.transform.report import Decision, note

_PLACE: Final = tvm.ir.Op.get(PLACE)


@dataclass(frozen=True)
class Parallelized:
    """A model for the ranks of a mesh.

    Attributes
    ----------
    module : what one rank runs.
    placed : the same for all ranks, with places; `LowerPlacements` makes `module` of it.
    mesh : of the ranks.
    cut : how each parameter is divided, by the names that plans know.
    decisions : which collectives were inserted, and what for.
    notes : what else there is to know of the plan: how it was found, and what is not divided.
    """

    module: tvm.IRModule
    placed: tvm.IRModule
    mesh: Mesh
    cut: Mapping[str, Cut]
    decisions: tuple[Decision, ...]
    notes: tuple[str, ...] = ()

    @property
    def bytes_per_rank(self) -> int:
        """How many bytes of parameters a rank has, without those of symbolic extents."""
        return sum(one.bytes_per_rank or 0 for one in self.cut.values())

    @property
    def collectives(self) -> Mapping[str, int]:
        """How many collectives of each kind the functions have, `take_part` left out."""
        kinds = Counter(one.subject.split(" of ")[0] for one in self.decisions if _moves(one))
        return dict(kinds)

    def __str__(self) -> str:
        whole = sum(one.bytes or 0 for one in self.cut.values())
        lines = [
            f"on {self.mesh}, {self.bytes_per_rank} bytes of parameters on each rank, of {whole}"
        ]
        lines += [f"  {one}" for one in self.notes]
        for one in self.cut.values():
            known = one.bytes_per_rank
            lines.append(f"  {one}" if known is None else f"  {one}, {known} bytes on each rank")
        lines += [f"  {one.subject}: {one.reason}" for one in self.decisions if _moves(one)]
        return "\n".join(lines)


def _moves(decision: Decision) -> bool:
    return " along " in decision.subject and not decision.subject.startswith("take_part")


def parallelize(
    mod: tvm.IRModule,
    plan: Any,
    mesh: Mesh | int,
    *,
    names: Mapping[str, str] | None = None,
    caches: Sequence[str] = (),
    calibration: Calibration | None = None,
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

    Raises
    ------
    ValueError
        The plan names what there is not, or divides what cannot be divided.
    TransformError
        The program cannot be run by all ranks.
    """
    arguments.instance("parallelize: mod", mod, tvm.IRModule, "an IRModule")
    mod = _as_it_is_divided(mod)
    whole = [one for one in mod.functions.values() if isinstance(one, relax.Function)]
    known = mesh if isinstance(mesh, Mesh) else None
    functions = {
        global_var: with_places(str(global_var.name_hint), function, known)
        for global_var, function in mod.functions_items()
        if isinstance(function, relax.Function)
    }
    said = {one: mesh_of_function(str(one.name_hint), f) for one, f in functions.items()}
    mesh = _mesh(mesh, [one for one in said.values() if one is not None])
    if calibration is not None:
        wanted = "a Calibration, or None"
        arguments.instance("parallelize: calibration", calibration, Calibration, wanted)
    replicas: Placements = (Replica(),) * len(mesh.axes)
    params = _params(mod, names)
    shapes = {name: one.shape for name, one in params.items()}
    planned = read_plan(plan, mesh, shapes, _uses(mod, params))
    for global_var, of_function in said.items():
        if of_function is not None and of_function != mesh:
            raise ValueError(
                f"parallelize: function {global_var.name_hint!r} places tensors on {of_function}, "
                f"and mesh is {mesh}"
            )
    idle = _idle(whole, params, planned)
    kept = _caches(caches, params, planned.placements)
    weights = {x: name for name, one in params.items() if not one.is_input for x in one.variables}
    axes = Axes(whole, weights)
    of_weights = {
        name: one for name, one in planned.placements.items() if not params[name].is_input
    }
    by_program = _placed_in_program(mesh, functions, params)
    lying, divided = divided_by_use(axes, mesh, of_weights, shapes)
    notes: list[str] = []
    to_find = [name for name in planned.wanted if not (params[name].is_input or name in by_program)]
    if to_find:
        lies = {**by_program, **planned.placements, **lying}
        found, notes = find_plan(
            Program(
                list(functions.values()),
                {name: params[name].variables for name in to_find},
                {x: one for name, one in lies.items() for x in params[name].variables},
                {x for name in kept for x in params[name].variables},
                axes,
            ),
            mesh,
            calibration,
        )
        lying, divided = divided_by_use(axes, mesh, of_weights | found, shapes)
    for name, placements in planned.placements.items():
        for index, placement in enumerate(placements):
            if params[name].is_input and isinstance(placement, Shard):
                for var in params[name].variables:
                    node = axes.of((var, (), placement.axis))
                    divided[index].setdefault(node, placement.division)
    follow = Caches(axes, mesh, divided, {name: params[name].variables for name in kept})
    by_plan = {
        **by_program,
        **planned.placements,
        **lying,
        **follow.placements,
    }
    placed = dict(mod.functions_items())
    for global_var, function in functions.items():
        name = str(global_var.name_hint)
        function = follow.with_results(function)
        its_params = set(function.params)
        name_of = {
            param: one.name
            for one in params.values()
            for param in one.variables
            if one.name in by_plan and param in its_params
        }
        lie = {param: by_plan[one] for param, one in name_of.items()}
        styles = {
            param: planned.styles[one] for param, one in name_of.items() if one in planned.styles
        }
        function = with_activations(name, function, mesh, lie, styles)
        if lie or said[global_var] is not None:
            function = with_meetings(function, mesh, lie)
        placed[global_var] = function
    result = tvm.IRModule(placed, attrs=mod.attrs, global_infos=mod.global_infos)
    with collect_report() as report:
        module = LowerPlacements().apply(result)
    decisions = [*decisions_of(mesh, lying), *report.decisions]
    for decision in decisions:
        note(decision)
    cut = {
        name: Cut(
            name,
            one.parameter,
            one.shape,
            one.dtype,
            mesh,
            by_plan.get(name, replicas),
            one.is_input,
        )
        for name, one in params.items()
        if not one.is_input or name in by_plan
    }
    notes += [f"{name} is used by no function: its place means nothing" for name in idle]
    notes += notes_of(one for one in cut.values() if one.name not in idle)
    return Parallelized(module, result, mesh, cut, tuple(decisions), tuple(notes))


def _as_it_is_divided(mod: tvm.IRModule) -> tvm.IRModule:
    """Return the module with operators that can be divided, where several spell one."""
    changed = {}
    for name, function in mod.functions_items():
        is_relax = isinstance(function, relax.Function)
        changed[name] = with_repeats(with_batches(function)) if is_relax else function
    return tvm.IRModule(changed, attrs=mod.attrs, global_infos=mod.global_infos)


def _idle(
    functions: Sequence[relax.Function], params: Mapping[str, _Param], planned: Planned
) -> list[str]:
    """Return weights that nothing uses; refuse a plan that names one instead of its twin.

    Of weights that share their memory, such as a table of words and the product with it at the end,
    exporters leave one in the program, and the parameter of the other.
    """
    weights = {name: one for name, one in params.items() if not one.is_input}
    left = unused(functions, [x for one in weights.values() for x in one.variables])
    idle = [name for name, one in weights.items() if left.issuperset(one.variables)]
    for name in idle:
        if all(isinstance(x, Replica) for x in planned.placements.get(name, ())):
            continue
        one = weights[name]
        twins = [
            twin
            for twin, other in weights.items()
            if twin not in idle and (other.shape, other.dtype) == (one.shape, one.dtype)
        ]
        known = {*planned.placements, *planned.wanted}
        if twins and not known.intersection(twins):
            raise ValueError(
                f"parallelize: plan: {name!r} is used by no function, so its place means nothing; "
                f"if it shares its memory with {twins[0]!r}, say where that lies"
            )
    return idle


def _caches(
    given: object, params: Mapping[str, _Param], planned: Mapping[str, Placements]
) -> list[str]:
    found = names_of_caches(given, [name for name, one in params.items() if one.is_input])
    both = [name for name in found if name in planned]
    if both:
        raise ValueError(f"parallelize: {both[0]!r} is in caches and in the plan; leave one out")
    return found


@dataclass
class _Param:
    """A parameter of one function or several."""

    name: str
    parameter: str
    shape: tuple[Any, ...]
    dtype: str
    is_input: bool
    variables: list[relax.Var]


def _mesh(given: Mesh | int, said: Sequence[Mesh]) -> Mesh:
    """Return a mesh; of a number of ranks the one of the program, if that has as many."""
    if isinstance(given, Mesh):
        return given
    wanted = f"a Mesh, or a number of ranks, 1 to {MAX_WORKERS}"
    workers = arguments.integer("parallelize: mesh", given, wanted, 1, MAX_WORKERS)
    if said and len(said[0].ranks) == workers:
        return said[0]
    return Mesh({"tp": workers})


def _placed_in_program(
    mesh: Mesh, functions: Mapping[Any, relax.Function], params: Mapping[str, _Param]
) -> dict[str, Placements]:
    """Return where parameters lie of which functions say it themselves."""
    name_of = {param: one.name for one in params.values() for param in one.variables}
    found: dict[str, tuple[Placements, str]] = {}
    for global_var, function in functions.items():
        function_name = str(global_var.name_hint)
        seen = set()
        for call in calls(function):
            name = name_of.get(call.args[0]) if call.op.same_as(_PLACE) else None
            if name is None or name in seen:  # the first place on it says where it lies
                continue
            seen.add(name)
            placements = placements_of(mesh, call.attrs.placements)
            other, where = found.setdefault(name, (placements, function_name))
            if other != placements:
                raise ValueError(
                    f"parallelize: function {where!r} places {name!r} on {show(mesh, other)}, and "
                    f"function {function_name!r} on {show(mesh, placements)}; place it alike"
                )
    return {name: placements for name, (placements, _) in found.items()}


def _params(mod: tvm.IRModule, names: Any) -> dict[str, _Param]:
    """Return the parameters of functions by the names that plans know them by."""
    if names is None:
        names = {}
    arguments.instance(
        "parallelize: names", names, Mapping, "names by those of parameters, or None"
    )
    found: dict[str, _Param] = {}
    known = set()
    for global_var, function in mod.functions_items():
        if not isinstance(function, relax.Function):
            continue
        attributes = function.attrs or {}
        if "params" in attributes:
            raise ValueError(
                f"parallelize: function {global_var.name_hint!r} has weights as an attribute, "
                "which every rank would have whole; take them out first: mod, weights = "
                "tvm.relax.frontend.detach_params(mod)"
            )
        inputs = int(attributes["num_input"]) if "num_input" in attributes else 0
        for k, param in enumerate(function.params):
            ty, parameter = param.ty, str(param.name)
            known.add(parameter)
            shape = extents(ty) if isinstance(ty, relax.TensorType) else None
            if shape is None:
                continue
            name = names.get(parameter, parameter)
            arguments.text("parallelize: names, of a parameter", name)
            is_input = k < inputs or any(constant(extent) is None for extent in shape)
            one = _Param(name, parameter, _numbers(shape), dtype_of(ty), is_input, [param])
            other = found.setdefault(name, one)
            if other is one:
                continue
            alike = other.dtype == one.dtype and same_extents(other.shape, one.shape)
            if not (alike or one.is_input or other.is_input):
                raise ValueError(
                    f"parallelize: {name!r} is {other.shape} {other.dtype} in one function, and "
                    f"{one.shape} {one.dtype} in another"
                )
            if other.is_input and len(one.shape) == len(other.shape):
                other.shape = tuple(map(_either, other.shape, one.shape))
            other.variables.append(param)
    unknown = [one for one in names if one not in known]
    if unknown:
        near = get_close_matches(str(unknown[0]), sorted(known))
        hint = f"near it are {', '.join(map(repr, near))}" if near else "no name is near it"
        raise ValueError(f"parallelize: names: there is no parameter {unknown[0]!r}; {hint}")
    return found


def _uses(mod: tvm.IRModule, params: Mapping[str, _Param]) -> Callable[[str], Use]:
    """Return what functions do with each parameter."""
    variables = {one for param in params.values() for one in param.variables}
    found: dict[relax.Var, list[Meeting]] = {}
    for _, function in mod.functions_items():
        if isinstance(function, relax.Function):
            found |= meetings_of(function, [one for one in function.params if one in variables])
    return lambda name: use_of(one for var in params[name].variables for one in found[var])


def _either(one: Any, other: Any) -> Any:
    """Return an extent of inputs of one name, symbolic where functions differ in it."""
    return one if same_extents([one], [other]) else tirx.Var("n", "int64")


def _numbers(shape: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(one if constant(one) is None else constant(one) for one in shape)
