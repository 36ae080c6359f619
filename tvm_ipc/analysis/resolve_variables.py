# SPDX-License-Identifier: Apache-2.0
"""Find the values of variables, and the variables of values.

p = (x, y)              values_of(function)[p] is (x, y)
q = p                   expanded(q, values) is (x, y)
z = f(x, q[1])          variables_of(z's value) yields x and q
if c: y = g(z)          body_bindings(function) leaves the binding of y out
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tvm import relax

from tvm_ipc.analysis.ffi_arrays import as_list
from tvm_ipc.analysis.walk_and_rewrite_bindings import walk

#: The value of each variable, in the order of the program.
Values = Mapping[relax.Var, Any]


def values_of(function: relax.Function) -> dict[relax.Var, Any]:
    """Return the value of each variable that a function binds."""
    return {binding.var: value for binding, value in walk(function) if binding is not None}


def body_bindings(function: relax.Function) -> list[relax.Binding]:
    """Return the bindings of a function without those in branches and local functions."""
    blocks = as_list(function.body.blocks)
    return [binding for block in blocks for binding in as_list(block.bindings)]


def variables_of(expr: relax.Expr) -> Iterator[relax.Var]:
    """Yield the variables that an expression uses, once for each use."""
    if isinstance(expr, relax.Var):
        yield expr
    elif isinstance(expr, relax.Call):
        for argument in as_list(expr.args):
            yield from variables_of(argument)
    elif isinstance(expr, relax.Tuple):
        for field in as_list(expr.fields):
            yield from variables_of(field)
    elif isinstance(expr, relax.TupleGetItem):
        yield from variables_of(expr.tuple_value)


def expanded(expr: relax.Expr, values: Values) -> relax.Expr:
    """Return an expression in which variables of tuples, and of variables, are replaced by them."""
    value = values.get(expr) if isinstance(expr, relax.Var) else None
    if isinstance(value, (relax.Tuple, relax.Var)):
        return expanded(value, values)
    if isinstance(expr, relax.Tuple):
        return relax.Tuple([expanded(field, values) for field in expr.fields])
    return expr


def fields_of(expr: relax.Expr, values: Values) -> list[relax.Expr]:
    """Return the fields of a tuple, as they stand in it, and [expr] for what is no tuple.

    Unlike `expanded`, a field that is a variable stays one: what it is bound to may be a
    DataflowVar, which nothing outside of its block may use.
    """
    value = expr
    while isinstance(value, relax.Var) and value in values:
        value = values[value]
    return as_list(value.fields) if isinstance(value, relax.Tuple) else [expr]


def leaves_of(expr: relax.Expr) -> list[relax.Expr]:
    """Return the fields of a tuple, and of the tuples in it; an expression that is none itself."""
    if isinstance(expr, relax.Tuple):
        return [leaf for field in expr.fields for leaf in leaves_of(field)]
    return [expr]
