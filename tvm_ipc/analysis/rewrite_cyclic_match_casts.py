# SPDX-License-Identifier: Apache-2.0
"""Rewrite casts whose symbolic extents TVM's CanonicalizeBindings would substitute without end.

Before:
    y = R.match_cast(x, R.Tensor((n, 4), "float32"))  # x: R.Tensor((n // 2 * 2, 4), "float32")

After:
    cast = R.match_cast(x, R.Tensor(dtype="float32", ndim=2))
    y = R.match_cast(cast, R.Tensor((n, 4), "float32"))

CanonicalizeBindings takes the extent of `x` for the definition of `n`, also where `n` is defined
before and the cast only checks it. If the definition contains `n`, the substitution recurses until
the stack overflows. The type of `cast` has no extents to substitute, so `y` is checked at run time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tvm import relax, tirx

from tvm_ipc.analysis.shape_algebra import extents_of
from tvm_ipc.analysis.walk_and_rewrite_bindings import rewrite, walk
from tvm_ipc.comm.extent_arithmetic import constant, simplified


def without_cycles(function: relax.Function) -> relax.Function:
    """Return the function without cyclic casts, which define an extent by itself."""
    defined = {variable for param in function.params for variable in _variables(param.ty)}
    cyclic = set()
    for binding, value in walk(function):
        if isinstance(value, relax.Function):
            for param in value.params:
                defined.update(_variables(param.ty))
        if not isinstance(binding, relax.MatchCast):
            continue
        for new, old in _extents(binding.ty, value.ty):
            if not isinstance(new, tirx.Var) or isinstance(old, tirx.Var):
                continue
            if constant(old) is None and (new in defined or isinstance(simplified(old), tirx.Var)):
                cyclic.add(binding.var)
        defined.update(_variables(binding.ty))
    if not cyclic:
        return function

    def change(binding: relax.Binding, value: relax.Expr) -> list[relax.Binding] | None:
        if binding.var not in cyclic:
            return None
        ty = _without_extents(value.ty)
        cast = type(binding.var)("cast", ty)
        return [
            relax.MatchCast(cast, value, ty, binding.span),
            relax.MatchCast(binding.var, cast, binding.ty, binding.span),
        ]

    return rewrite(function, change)


def _variables(ty: Any) -> Iterator[tirx.Var]:
    """Yield the variables that a type defines."""
    if isinstance(ty, relax.TupleType):
        for field in ty.fields:
            yield from _variables(field)
    yield from (extent for extent in extents_of(ty) or () if isinstance(extent, tirx.Var))


def _extents(new: Any, old: Any) -> Iterator[tuple[Any, Any]]:
    """Yield pairs of the extents of two types."""
    if isinstance(new, relax.TupleType) and isinstance(old, relax.TupleType):
        for new_field, old_field in zip(new.fields, old.fields, strict=False):
            yield from _extents(new_field, old_field)
    yield from zip(extents_of(new) or (), extents_of(old) or (), strict=False)


def _without_extents(ty: Any) -> Any:
    """Return a type of the same rank whose extents are unknown."""
    if isinstance(ty, relax.TupleType):
        return relax.TupleType([_without_extents(field) for field in ty.fields])
    if isinstance(ty, relax.TensorType):
        return relax.TensorType(None, ty.dtype, ty.vdevice, ndim=ty.ndim)
    if isinstance(ty, relax.ShapeType):
        return relax.ShapeType(ndim=ty.ndim)
    return ty
