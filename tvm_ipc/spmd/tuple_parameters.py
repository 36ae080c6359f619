# SPDX-License-Identifier: Apache-2.0
"""Parameters that are tuples of tensors, as one parameter for each tensor, and back.

    def main(x, weights: R.Tuple(R.Tensor, R.Tensor))       with_separate_fields
    def main(x, "weights.0", "weights.1")                   with_tuples

Plans name the tensors "weights.0" and "weights.1", in the order of the fields.
"""

from __future__ import annotations

from collections.abc import Iterator

import tvm
from tvm import relax

from tvm_ipc.analysis.resolve_variables import leaves_of
from tvm_ipc.analysis.walk_and_rewrite_bindings import begin_with


def has_tuples_of_tensors(function: relax.Function) -> bool:
    """Return whether a parameter of a function is a tuple of tensors."""
    return any(_is_tuple_of_tensors(param.ty) for param in function.params)


def with_separate_fields(function: relax.Function) -> relax.Function:
    """Return the function with a parameter for each tensor in a tuple.

    A function without tuples of tensors is returned as it is.
    """
    if not has_tuples_of_tensors(function):
        return function
    params: list[relax.Var] = []
    inputs = 0
    counted = _number_of_inputs(function)
    tuples = []
    builder = relax.BlockBuilder()
    for k, param in enumerate(function.params):
        fields = [param]
        if _is_tuple_of_tensors(param.ty):
            value = _fields(str(param.name), param.ty)
            fields = leaves_of(value)
            tuples.append(relax.VarBinding(param, builder.normalize(value)))
        params += fields
        inputs += len(fields) if k < counted else 0
    attrs = dict(function.attrs or {})
    if "num_input" in attrs:
        attrs["num_input"] = inputs
    body = begin_with(function, tuples).body
    separate = relax.Function(
        params, body, function.ret_ty, function.is_pure, _attrs(attrs), function.span
    )
    # Uses of a field become uses of its parameter.
    (canonical,) = relax.transform.CanonicalizeBindings()(
        tvm.IRModule({"main": separate})
    ).functions.values()
    return canonical


def with_tuples(function: relax.Function, original: relax.Function) -> relax.Function:
    """Return a function with separate fields with the tuples of the original function.

    Parameters
    ----------
    function : the function, whose parameters may have other types than those of the original.
    original : the function before `with_separate_fields`.
    """
    if not has_tuples_of_tensors(original):
        return function
    fields = iter(function.params)
    params: list[relax.Var] = []
    first: list[relax.Binding] = []
    builder = relax.BlockBuilder()
    for param in original.params:
        if not _is_tuple_of_tensors(param.ty):
            params.append(next(fields))
            continue
        of_param = list(_take(fields, param.ty))
        whole = relax.Var(str(param.name), _type_of(iter(of_param), param.ty))
        params.append(whole)
        values = leaves_of(_items(whole, builder))
        first += [
            relax.VarBinding(field, value) for field, value in zip(of_param, values, strict=True)
        ]
    joined = begin_with(function, first)
    attrs = dict(function.attrs or {})
    if "num_input" in attrs:
        attrs["num_input"] = _number_of_inputs(original)
    return relax.Function(
        params, joined.body, function.ret_ty, function.is_pure, _attrs(attrs), function.span
    )


def _is_tuple_of_tensors(ty: relax.Type) -> bool:
    return isinstance(ty, relax.TupleType) and all(
        isinstance(field, relax.TensorType) or _is_tuple_of_tensors(field) for field in ty.fields
    )


def _number_of_inputs(function: relax.Function) -> int:
    attributes = function.attrs or {}
    return int(attributes["num_input"]) if "num_input" in attributes else 0


def _attrs(attrs: dict[str, object]) -> tvm.ir.DictAttrs | None:
    return tvm.ir.make_node("ir.DictAttrs", **attrs) if attrs else None


def _fields(name: str, ty: relax.Type) -> relax.Expr:
    """Return the tuple of the parameters for the tensors in a type."""
    if isinstance(ty, relax.TupleType):
        return relax.Tuple([_fields(f"{name}.{k}", field) for k, field in enumerate(ty.fields)])
    return relax.Var(name, ty)


def _items(value: relax.Expr, builder: relax.BlockBuilder) -> relax.Expr:
    """Return the tuple of the tensors in a value."""
    if not isinstance(value.ty, relax.TupleType):
        return value
    items = [builder.normalize(relax.TupleGetItem(value, k)) for k in range(len(value.ty.fields))]
    return relax.Tuple([_items(item, builder) for item in items])


def _take(fields: Iterator[relax.Var], ty: relax.Type) -> Iterator[relax.Var]:
    """Yield the next fields, one for each tensor in a type."""
    if isinstance(ty, relax.TupleType):
        for field in ty.fields:
            yield from _take(fields, field)
    else:
        yield next(fields)


def _type_of(fields: Iterator[relax.Var], ty: relax.Type) -> relax.Type:
    """Return the type of a tuple of fields that has the form of another type."""
    if isinstance(ty, relax.TupleType):
        return relax.TupleType([_type_of(fields, field) for field in ty.fields])
    return next(fields).ty
