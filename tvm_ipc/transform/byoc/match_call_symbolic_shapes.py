# SPDX-License-Identifier: Apache-2.0
"""Matching of the symbolic shapes in a function's signature with the arguments of a call.

For `f(a: R.Tensor(("m", 4)), s: R.Shape(["k"]))` and the call `f(x, R.shape([n + 1]))`, where the
type of `x` is `R.Tensor((2 * n, 4))`, `m` is `2 * n` and `k` is `n + 1`. If the type of an argument
does not determine a symbol, or does not imply the signature, the call needs a `match_cast` before
it, which defines the symbol or checks the shape when the program runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx

from tvm_ipc.analysis.shape_algebra import extents_of
from tvm_ipc.tvm_moved_names import Analyzer


@dataclass(eq=False)
class CallShapes:
    """The symbols of a signature in terms of the caller."""

    values: dict[tvm.ir.Var, Any] = field(default_factory=dict)
    casts: dict[int, Any] = field(default_factory=dict)  #: index of an argument -> its match_cast

    def substitute(self, node: Any) -> Any:
        """Substitute the caller's expressions into a type or an expression of the signature."""
        values = self.values
        return tvm_ffi.structural_map(node, (tvm.ir.Var, lambda var: values.get(var, var)))

    def extent(self, dimension: Any) -> Any:
        """Return a dimension of the signature, simplified."""
        return Analyzer().simplify(self.substitute(dimension))


def match_call(params: Sequence[Any], arguments: Sequence[Any]) -> CallShapes:
    """Match the types of parameters with the types of arguments."""
    shapes = CallShapes()
    for param, argument in zip(params, arguments, strict=True):
        _define(shapes, param, argument)
    analyzer = Analyzer()
    for index, (param, argument) in enumerate(zip(params, arguments, strict=True)):
        if not _implied(shapes, analyzer, param, argument):
            shapes.casts[index] = _cast(shapes, param, argument)
    return shapes


def _define(shapes: CallShapes, param: Any, argument: Any) -> None:
    if isinstance(param, relax.TupleType) and isinstance(argument, relax.TupleType):
        for param_field, argument_field in zip(param.fields, argument.fields, strict=False):
            _define(shapes, param_field, argument_field)
        return
    expected, actual = extents_of(param), extents_of(argument)
    for dimension, extent in zip(expected or (), actual or (), strict=False):
        if isinstance(dimension, tvm.ir.Var):
            shapes.values.setdefault(dimension, extent)


def _implied(shapes: CallShapes, analyzer: Any, param: Any, argument: Any) -> bool:
    """Return whether the type of an argument provably implies that of its parameter."""
    if isinstance(param, relax.TupleType):
        return isinstance(argument, relax.TupleType) and all(
            _implied(shapes, analyzer, param_field, argument_field)
            for param_field, argument_field in zip(param.fields, argument.fields, strict=True)
        )
    if not isinstance(param, relax.TensorType | relax.ShapeType):
        return True
    if type(argument) is not type(param):
        return False
    if param.ndim != -1 and argument.ndim != param.ndim:
        return False
    if isinstance(param, relax.TensorType) and param.dtype and param.dtype != argument.dtype:
        return False
    expected, actual = extents_of(param), extents_of(argument)
    if expected is None:
        return True
    return actual is not None and all(
        analyzer.can_prove_equal(shapes.substitute(dimension), extent)
        for dimension, extent in zip(expected, actual, strict=True)
    )


def _cast(shapes: CallShapes, param: Any, argument: Any) -> Any:
    """Return the type of a parameter in the caller's symbols, with new ones for unknown symbols."""
    if isinstance(param, relax.TupleType):
        argument_fields = (
            argument.fields
            if isinstance(argument, relax.TupleType)
            else [relax.AnyType()] * len(param.fields)
        )
        return relax.TupleType(
            [
                _cast(shapes, param_field, argument_field)
                for param_field, argument_field in zip(param.fields, argument_fields, strict=True)
            ]
        )
    wanted = extents_of(param)
    if wanted is None:
        return param
    for dimension in wanted:
        if isinstance(dimension, tvm.ir.Var) and dimension not in shapes.values:
            shapes.values[dimension] = tirx.Var(dimension.name, dimension.ty)
    extents = [shapes.extent(dimension) for dimension in wanted]
    if isinstance(param, relax.ShapeType):
        return relax.ShapeType(extents)
    return relax.TensorType(relax.ShapeExpr(extents), param.dtype, param.vdevice)
