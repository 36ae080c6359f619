# SPDX-License-Identifier: Apache-2.0
"""Operators of PyTorch in Relax where TVM's importer has others than models want.

TVM makes the results of all products float32, so that a model in bfloat16 would be half in float32;
PyTorch sums in float32 and rounds once. Of `x[:, -1:]` TVM does not see that the extent is 1, where
that of `x` is symbolic. Rows of a table are taken by TVM wherever an index points; here it is
clipped.
"""

from __future__ import annotations

from typing import Any, Final

from tvm import relax


def _operands(node: Any, importer: Any) -> list[Any]:
    return [importer.env.get(one, one) for one in node.args]


def _product(node: Any, importer: Any) -> relax.Var:
    a, b = _operands(node, importer)
    return importer.block_builder.emit(relax.op.matmul(a, b))


def _linear(node: Any, importer: Any) -> relax.Var:
    x, weight, *bias = _operands(node, importer)
    transposed = importer.block_builder.emit(relax.op.permute_dims(weight))
    product = importer.block_builder.emit(relax.op.matmul(x, transposed))
    if not bias or bias[0] is None:
        return product
    return importer.block_builder.emit(relax.op.add(product, bias[0]))


def _addmm(node: Any, importer: Any) -> relax.Var:
    bias, a, b = _operands(node, importer)
    product = importer.block_builder.emit(relax.op.matmul(a, b))
    for name, which in (("alpha", "product"), ("beta", "bias")):
        factor = node.kwargs.get(name, 1)
        if factor != 1:
            raise NotImplementedError(f"addmm with {name}={factor}, a factor of its {which}")
    return importer.block_builder.emit(relax.op.add(product, bias))


def _embedding(node: Any, importer: Any) -> relax.Var:
    table, ids = _operands(node, importer)[:2]
    return importer.block_builder.emit(relax.op.take(table, ids, axis=0, mode="clip"))


def _layer_norm(node: Any, importer: Any) -> relax.Var:
    """In float32 where the model is in bfloat16, of which TVM has no kernel; so does PyTorch."""
    x, shape, *rest = _operands(node, importer)
    gamma, beta, epsilon = (*rest, *(None, None, 1e-5)[len(rest) :])[:3]
    dtype = str(x.ty.dtype)
    emit = importer.block_builder.emit
    if dtype == "bfloat16":
        x, gamma, beta = (
            None if one is None else emit(relax.op.astype(one, "float32"))
            for one in (x, gamma, beta)
        )
    y = importer._layer_norm_impl(x, gamma, beta, epsilon, tuple(shape))
    return emit(relax.op.astype(y, dtype)) if dtype == "bfloat16" else y


def _power(node: Any, importer: Any) -> relax.Var:
    """In float32 where the model is in bfloat16, of which TVM has no kernel."""
    x, exponent = _operands(node, importer)
    dtype = str(x.ty.dtype)
    emit = importer.block_builder.emit
    if dtype != "bfloat16":
        return emit(relax.op.power(x, relax.const(exponent, dtype)))
    wide = emit(relax.op.astype(x, "float32"))
    made = emit(relax.op.power(wide, relax.const(exponent, "float32")))
    return emit(relax.op.astype(made, dtype))


def _slice(node: Any, importer: Any) -> relax.Var:
    x = importer.env[node.args[0]]
    axis = int(node.args[1] if len(node.args) > 1 else 0) % x.ty.ndim
    start, *rest = (*node.args[2:], None, None, None)[:3] if len(node.args) > 2 else (0, None, None)
    to_the_end = rest[0] is None or (isinstance(rest[0], int) and rest[0] >= _END)
    if start == -1 and to_the_end and rest[1] in (None, 1):
        extent = x.ty.shape[axis]
        last = relax.op.strided_slice(x, [axis], [extent - 1], [extent], [1], assume_inbound=True)
        return importer.block_builder.emit(last)
    return importer._slice(node)


#: What slices to the end say of it.
_END: Final = (1 << 63) - 1
#: For `from_exported_program(..., custom_convert_map=OPERATORS)`.
OPERATORS: Final = {
    **dict.fromkeys(("matmul.default", "mm.default", "bmm.default"), _product),
    "linear.default": _linear,
    "addmm.default": _addmm,
    "embedding.default": _embedding,
    **dict.fromkeys(("layer_norm.default", "native_layer_norm.default"), _layer_norm),
    "pow.Tensor_Scalar": _power,
    "slice.Tensor": _slice,
}
