# SPDX-License-Identifier: Apache-2.0
"""Modules of Relax functions, built from Python functions that return their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tvm
from tvm import relax


def one_function(
    make: Callable[..., relax.Expr],
    params: Mapping[str, Any],
    *,
    dtype: str = "float32",
    num_input: int | None = None,
) -> tvm.IRModule:
    """Return a module whose `main` returns what `make(emit, *params)` returns.

    Each parameter has a name, and a type or a shape.
    """
    return functions({"main": (make, params)}, dtype, {"main": num_input})


def functions(
    made: Mapping[str, tuple[Callable[..., relax.Expr], Mapping[str, Any]]],
    dtype: str = "float32",
    inputs: Mapping[str, int | None] | None = None,
) -> tvm.IRModule:
    """Return a module of several such functions; `inputs` has the numbers of their inputs."""
    builder = relax.BlockBuilder()
    for function, (make, params) in made.items():
        variables = [
            relax.Var(name, ty if isinstance(ty, relax.Type) else relax.TensorType(ty, dtype))
            for name, ty in params.items()
        ]
        num_input = (inputs or {}).get(function)
        attrs = None if num_input is None else {"num_input": num_input}
        with builder.function(function, variables, attrs=attrs):
            with builder.dataflow():
                result = builder.emit_output(make(builder.emit, *variables))
            builder.emit_func_output(result)
    return builder.get()
