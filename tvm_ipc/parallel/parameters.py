# SPDX-License-Identifier: Apache-2.0
"""The parameters of a model, by the names that plans know, and what its functions do with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final

import tvm
from tvm import relax, tirx

from tvm_ipc import arguments
from tvm_ipc.comm import Mesh
from tvm_ipc.comm.extents import constant
from tvm_ipc.comm.operator import dtype_of, extents, same_extents
from tvm_ipc.comm.place_operator import NAME
from tvm_ipc.comm.placements import Placements, placements_of, show
from tvm_ipc.parallel.styles import Use
from tvm_ipc.parallel.uses import Meeting, meetings_of, unused, use_of
from tvm_ipc.transform.ir.rewrite import calls

_PLACE: Final = tvm.ir.Op.get(NAME)


@dataclass
class Parameter:
    """A parameter of one function or several.

    Attributes
    ----------
    name : as plans know it.
    parameter : its name in the functions.
    shape : of the whole; an extent in which functions differ is symbolic.
    dtype : of its elements.
    is_input : whether it is given with each call; the others are weights.
    variables : one of each function that has it.
    """

    name: str
    parameter: str
    shape: tuple[Any, ...]
    dtype: str
    is_input: bool
    variables: list[relax.Var]


#: Functions of a module, and its parameters, by their names.
Functions = Mapping[str, relax.Function]
Parameters = Mapping[str, Parameter]


def parameters_of(functions: Functions, names: Any) -> dict[str, Parameter]:
    """Return the parameters of functions by the names that plans know them by.

    Parameters
    ----------
    functions : of a module.
    names : what plans call parameters that they know by another name; None if there are none.
    """
    names = {} if names is None else names
    wanted = "names by those of parameters, or None"
    arguments.instance("parallelize: names", names, Mapping, wanted)
    found: dict[str, Parameter] = {}
    for function_name, function in functions.items():
        inputs = _number_of_inputs(function_name, function)
        for k, param in enumerate(function.params):
            dims = extents(param.ty) if isinstance(param.ty, relax.TensorType) else None
            if dims is None:
                continue
            parameter = str(param.name)
            name = names.get(parameter, parameter)
            arguments.text("parallelize: names, of a parameter", name)
            shape = tuple(one if constant(one) is None else constant(one) for one in dims)
            is_input = k < inputs or any(constant(extent) is None for extent in dims)
            one = Parameter(name, parameter, shape, dtype_of(param.ty), is_input, [param])
            if name in found:
                _join(found[name], one)
            else:
                found[name] = one
    known = {str(param.name) for function in functions.values() for param in function.params}
    unknown = [one for one in names if one not in known]
    if unknown:
        near = get_close_matches(str(unknown[0]), sorted(known))
        hint = f"near it are {', '.join(map(repr, near))}" if near else "no name is near it"
        raise ValueError(f"parallelize: names: there is no parameter {unknown[0]!r}; {hint}")
    return found


def _number_of_inputs(name: str, function: relax.Function) -> int:
    attributes = function.attrs or {}
    if "params" in attributes:
        raise ValueError(
            f"parallelize: function {name!r} has weights as an attribute, which every rank would "
            "have whole; take them out first: mod, weights = tvm.relax.frontend.detach_params(mod)"
        )
    return int(attributes["num_input"]) if "num_input" in attributes else 0


def _join(known: Parameter, one: Parameter) -> None:
    """Make the parameter of another function the same as a known one."""
    alike = known.dtype == one.dtype and same_extents(known.shape, one.shape)
    if not (alike or one.is_input or known.is_input):
        raise ValueError(
            f"parallelize: {one.name!r} is {known.shape} {known.dtype} in one function, and "
            f"{one.shape} {one.dtype} in another"
        )
    if known.is_input and len(one.shape) == len(known.shape):
        known.shape = tuple(map(_common, known.shape, one.shape))
    known.variables += one.variables


def _common(one: Any, other: Any) -> Any:
    return one if same_extents([one], [other]) else tirx.Var("n", "int64")


def placed_in_program(
    mesh: Mesh, functions: Functions, params: Parameters
) -> dict[str, Placements]:
    """Return where parameters lie of which functions say it themselves."""
    name_of = {var: one.name for one in params.values() for var in one.variables}
    found: dict[str, tuple[Placements, str]] = {}
    for function_name, function in functions.items():
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


def uses_of(functions: Functions, params: Parameters) -> Callable[[str], Use]:
    """Return what functions do with each parameter."""
    variables = {var for one in params.values() for var in one.variables}
    found: dict[relax.Var, list[Meeting]] = {}
    for function in functions.values():
        found |= meetings_of(function, [one for one in function.params if one in variables])
    return lambda name: use_of(one for var in params[name].variables for one in found[var])


def idle_weights(functions: Functions, params: Parameters) -> list[str]:
    """Return weights that no function uses."""
    weights = [one for one in params.values() if not one.is_input]
    left = unused(functions.values(), [var for one in weights for var in one.variables])
    return [one.name for one in weights if left.issuperset(one.variables)]
