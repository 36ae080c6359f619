# SPDX-License-Identifier: Apache-2.0
"""Where parameters meet what a program is given: the products, tables and norms of a model.

w = R.permute_dims(weight)      still of weights alone
y = R.matmul(x, w)              here the weight meets x
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tvm import relax

from tvm_ipc.parallel.styles import Use
from tvm_ipc.transform.ir.rewrite import walk
from tvm_ipc.transform.rules.operation import short_name


@dataclass(frozen=True)
class Meeting:
    """A call that is given something of a parameter, and something of what the program is given.

    Attributes
    ----------
    binding : of the call.
    call : itself.
    place : of the parameter among its arguments.
    """

    binding: relax.Binding
    call: relax.Call
    place: int


def meetings_of(
    function: relax.Function, params: Iterable[relax.Var]
) -> dict[relax.Var, list[Meeting]]:
    """Return where parameters meet other values, in the order of the program."""
    #: Of what is made of one parameter alone, that one.
    made_of: dict[relax.Var, relax.Var] = {param: param for param in params}
    found: dict[relax.Var, list[Meeting]] = {param: [] for param in made_of}
    for binding, value in walk(function):
        if binding is None:
            continue
        if isinstance(value, relax.Var) and value in made_of:
            made_of[binding.var] = made_of[value]
        if not isinstance(value, relax.Call):
            continue
        variables = [list(variables_of(argument)) for argument in value.args]
        params_of = {made_of.get(one) for each in variables for one in each}
        if len(params_of) == 1 and None not in params_of:
            made_of[binding.var] = params_of.pop()
            continue
        for place, each in enumerate(variables):
            for param in {made_of[one] for one in each if one in made_of}:
                found[param].append(Meeting(binding, value, place))
    return found


def variables_of(expr: relax.Expr) -> Iterator[relax.Var]:
    """Yield the variables that a value, or an argument of a call, uses, as often as it does."""
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


def use_of(meetings: Iterable[Meeting]) -> Use:
    """Return what a program does with a parameter.

    What it takes of a stack of matrices, such as those of experts, are matrices, and not rows.
    """
    takes = [
        short_name(one.call) == "take" and one.place == 0 and int(one.call.args[0].ty.ndim) < 3
        for one in meetings
    ]
    return Use(table=any(takes), matrix=not all(takes) or not takes)


def unused(functions: Iterable[relax.Function], params: Iterable[relax.Var]) -> set[relax.Var]:
    """Return the parameters that no binding and no result uses."""
    left = set(params)
    for function in functions:
        for _, value in walk(function):
            used = value.cond if isinstance(value, relax.If) else value
            left.difference_update(variables_of(used))
    return left
