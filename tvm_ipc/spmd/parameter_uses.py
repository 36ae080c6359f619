# SPDX-License-Identifier: Apache-2.0
"""The calls that combine a parameter with other values: matmuls, lookups and norms of a model.

w = R.permute_dims(weight)      not reported: w depends on the weight only
y = R.matmul(x, w)              reported: the call combines the weight with x
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tvm import relax

from tvm_ipc.analysis.walk_and_rewrite_bindings import walk


@dataclass(frozen=True, eq=False)
class OperandUse:
    """A call that combines a parameter with other values.

    Attributes
    ----------
    binding : the binding of the call.
    call : the call.
    position : the index of the argument that depends on the parameter.
    """

    binding: relax.Binding
    call: relax.Call
    position: int


def operand_uses_of(
    function: relax.Function, params: Iterable[relax.Var]
) -> dict[relax.Var, list[OperandUse]]:
    """Return the calls that combine each parameter with other values, in program order."""
    # Variables that depend on one parameter only, with that parameter.
    param_of: dict[relax.Var, relax.Var] = {param: param for param in params}
    uses: dict[relax.Var, list[OperandUse]] = {param: [] for param in param_of}
    for binding, value in walk(function):
        if binding is None:
            continue
        if isinstance(value, relax.Var) and value in param_of:
            param_of[binding.var] = param_of[value]
        if not isinstance(value, relax.Call):
            continue
        variables = [list(variables_of(argument)) for argument in value.args]
        sources = {param_of.get(var) for of_argument in variables for var in of_argument}
        if len(sources) == 1 and None not in sources:
            param_of[binding.var] = sources.pop()
            continue
        for position, of_argument in enumerate(variables):
            for param in {param_of[var] for var in of_argument if var in param_of}:
                uses[param].append(OperandUse(binding, value, position))
    return uses


def variables_of(expr: relax.Expr) -> Iterator[relax.Var]:
    """Yield the variables that an expression uses, once for each use."""
    if isinstance(expr, relax.Var):
        yield expr
    elif isinstance(expr, relax.Call):
        for argument in expr.args:
            yield from variables_of(argument)
    elif isinstance(expr, relax.Tuple):
        for field in expr.fields:
            yield from variables_of(field)
    elif isinstance(expr, relax.TupleGetItem):
        yield from variables_of(expr.tuple_value)


def unused(functions: Iterable[relax.Function], params: Iterable[relax.Var]) -> set[relax.Var]:
    """Return the parameters that no binding uses."""
    remaining = set(params)
    for function in functions:
        for _, value in walk(function):
            used = value.cond if isinstance(value, relax.If) else value
            remaining.difference_update(variables_of(used))
    return remaining
