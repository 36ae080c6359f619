# SPDX-License-Identifier: Apache-2.0
"""The parameters of a model by the names that plans use, and how its functions use them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from tvm import relax, tirx

from tvm_ipc import arguments
from tvm_ipc.comm import Mesh
from tvm_ipc.comm.collective_relax_op import dtype_of, extents, same_extents
from tvm_ipc.comm.extent_arithmetic import constant
from tvm_ipc.comm.placements import Placements, format_placements
from tvm_ipc.spmd.matmul_axes_of_parameters import record_uses
from tvm_ipc.spmd.placements.place_calls import placements_of_params
from tvm_ipc.spmd.weight_placements_of_styles import Use


@dataclass(eq=False)
class Parameter:
    """A parameter of one or several functions.

    Attributes
    ----------
    name : the name of the parameter in plans.
    parameter : its name in the functions.
    shape : the shape of the whole parameter; an extent in which functions differ is symbolic.
    dtype : the type of its elements.
    is_input : whether it is passed with each call; other parameters are weights.
    is_counted_input : whether it is one of the inputs that the attribute `num_input` counts.
    variables : its variable in each function that has it.
    use : how the functions use it.
    """

    name: str
    parameter: str
    shape: tuple[Any, ...]
    dtype: str
    is_input: bool
    is_counted_input: bool
    variables: list[relax.Var]
    use: Use = field(default_factory=lambda: Use(unused=True))


#: The functions of a module, and its parameters, by name.
Functions = Mapping[str, relax.Function]
Parameters = Mapping[str, Parameter]


def parameters_of(functions: Functions, names: Any) -> dict[str, Parameter]:
    """Return the parameters of functions with their uses, by the names that plans use.

    Parameters
    ----------
    functions : the functions of a module.
    names : a mapping from parameters to their names in plans, for those with another name; or None.
    """
    names = {} if names is None else names
    expected = "a mapping from names of parameters to their names in plans, or None"
    arguments.instance("parallelize: names", names, Mapping, expected)
    parameters: dict[str, Parameter] = {}
    for function_name, function in functions.items():
        inputs = _number_of_inputs(function_name, function)
        for k, param in enumerate(function.params):
            dims = extents(param.ty) if isinstance(param.ty, relax.TensorType) else None
            if dims is None:
                continue
            parameter = str(param.name)
            name = names.get(parameter, parameter)
            arguments.text("parallelize: names, of a parameter", name)
            shape = tuple(dim if constant(dim) is None else constant(dim) for dim in dims)
            is_input = k < inputs or any(constant(extent) is None for extent in dims)
            dtype = dtype_of(param.ty)
            new = Parameter(name, parameter, shape, dtype, is_input, k < inputs, [param])
            if name in parameters:
                _unify(parameters[name], new)
            else:
                parameters[name] = new
    param_names = {str(param.name) for function in functions.values() for param in function.params}
    unknown = [name for name in names if name not in param_names]
    if unknown:
        near = get_close_matches(str(unknown[0]), sorted(param_names))
        hint = arguments.similar(near) if near else "no parameter has a similar name"
        raise ValueError(f"parallelize: names: there is no parameter {unknown[0]!r}; {hint}")
    by_kind: dict[bool, dict[relax.Var, Use]] = {False: {}, True: {}}
    for param in parameters.values():
        by_kind[param.is_input].update(dict.fromkeys(param.variables, param.use))
    for function in functions.values():
        for uses in by_kind.values():  # a weight combined with an input is no weight
            record_uses(function, uses)
    return parameters


def _number_of_inputs(name: str, function: relax.Function) -> int:
    attributes = function.attrs or {}
    if "params" in attributes:
        raise ValueError(
            f"parallelize: function {name!r} has weights as an attribute, so every rank would have "
            "all of them; detach them: mod, weights = tvm.relax.frontend.detach_params(mod)"
        )
    return int(attributes["num_input"]) if "num_input" in attributes else 0


def _unify(existing: Parameter, new: Parameter) -> None:
    """Merge the parameter of another function into an existing one with the same name."""
    equal = existing.dtype == new.dtype and same_extents(existing.shape, new.shape)
    if not (equal or new.is_input or existing.is_input):
        raise ValueError(
            f"parallelize: {new.name!r} is {existing.shape} {existing.dtype} in one function, and "
            f"{new.shape} {new.dtype} in another; give weights the same shape and type in all "
            "functions"
        )
    if existing.is_input and len(new.shape) == len(existing.shape):
        existing.shape = tuple(map(_common_extent, existing.shape, new.shape))
    existing.is_counted_input |= new.is_counted_input
    existing.variables += new.variables


def _common_extent(extent: Any, other: Any) -> Any:
    return extent if same_extents([extent], [other]) else tirx.Var("n", "int64")


def placed_in_program(
    mesh: Mesh, functions: Functions, params: Parameters
) -> dict[str, Placements]:
    """Return the placements of parameters that the functions themselves specify."""
    name_of = {var: param.name for param in params.values() for var in param.variables}
    specified: dict[str, tuple[Placements, str]] = {}
    for function_name, function in functions.items():
        for var, placements in placements_of_params(mesh, function).items():
            name = name_of.get(var)
            if name is None:
                continue
            earlier, earlier_function = specified.setdefault(name, (placements, function_name))
            if earlier != placements:
                raise ValueError(
                    f"parallelize: function {earlier_function!r} places {name!r} on "
                    f"{format_placements(mesh, earlier)}, and function {function_name!r} on "
                    f"{format_placements(mesh, placements)}; use the same placement in both"
                )
    return {name: placements for name, (placements, _) in specified.items()}
