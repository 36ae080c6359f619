# SPDX-License-Identifier: Apache-2.0
"""Operators of PyTorch in Relax where TVM's importer has others than models want.

TVM makes the results of all products and convolutions float32, so that a model in bfloat16
would be half in float32; PyTorch sums in float32 and rounds once. Norms and running sums of
bfloat16 are not to be had of TVM, or wrong. Of `x[:, -1:]` it does not see that the extent is
1, where that of `x` is symbolic, nor of `x[:, :n]` that it is n, where n is at most that of
`x`. Rows of a table are taken by TVM wherever an index points, outside of the table too; here
they are not.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from tvm import relax, tirx


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


def _convolution(node: Any, importer: Any) -> relax.Var:
    """Summed in float32 where numbers have 16 bits, and rounded once, after the bias."""
    x, weight, bias, strides, padding, dilation, is_transposed, output_padding, groups = _operands(
        node, importer
    )
    dtype = str(x.ty.dtype)
    wide = "float32" if dtype in ("float16", "bfloat16") else dtype
    space = "DHW"[5 - x.ty.ndim :]
    given = {
        "strides": strides,
        "padding": padding,
        "dilation": dilation,
        "groups": groups,
        "data_layout": f"NC{space}",
        "kernel_layout": f"{'IO' if is_transposed else 'OI'}{space}",
        "out_dtype": wide,
    }
    name = f"conv{len(space)}d"
    if is_transposed:
        name, given["output_padding"] = f"{name}_transpose", output_padding
    emit = importer.block_builder.emit
    made = emit(getattr(relax.op.nn, name)(x, weight, **given))
    if bias is not None:
        each = emit(relax.op.reshape(bias, (1, -1, *(1 for _ in space))))
        made = emit(relax.op.add(made, _as(importer, each, wide)))
    return _as(importer, made, dtype)


def _as(importer: Any, x: Any, dtype: str) -> Any:
    same = str(x.ty.dtype) == dtype
    return x if same else importer.block_builder.emit(relax.op.astype(x, dtype))


def _embedding(node: Any, importer: Any) -> relax.Var:
    table, ids = _operands(node, importer)[:2]
    return importer.block_builder.emit(relax.op.take(table, ids, axis=0, mode="clip"))


def _index(node: Any, importer: Any) -> relax.Var:
    """With one index from the end where it is negative, as in PyTorch, and in the table always."""
    table, indices = _operands(node, importer)[:2]
    given = [
        (axis, importer.env.get(one, one)) for axis, one in enumerate(indices) if one is not None
    ]
    if len(given) != 1 or str(given[0][1].ty.dtype) == "bool":
        return importer._index_tensor(node)
    ((axis, index),) = given
    return importer.block_builder.emit(relax.op.take(table, index, axis=axis, mode="wrap"))


def _index_put(node: Any, importer: Any) -> relax.Var:
    """Along one axis, whatever it is: keys and values go so into caches of a fixed length."""
    x, indices, values, *more = _operands(node, importer)
    given = [(axis, importer.env[one]) for axis, one in enumerate(indices) if one is not None]
    is_row = len(given) == 1 and given[0][1].ty.ndim == 1 and str(given[0][1].ty.dtype) != "bool"
    extents = x.ty.shape
    if not is_row or (more and more[0]) or not isinstance(extents[given[0][0]], tirx.IntImm):
        return importer._index_put(node)
    emit = importer.block_builder.emit
    ((axis, index),) = given
    extent = relax.const(int(extents[axis]), str(index.ty.dtype))
    places = emit(relax.op.expand_dims(emit(relax.op.floor_mod(index, extent)), 1))
    shape = [index.ty.shape[0] if k == axis else one for k, one in enumerate(extents)]
    rows = emit(relax.op.broadcast_to(values, shape))
    order = [axis, *(k for k in range(len(extents)) if k != axis)]
    turned = (emit(relax.op.permute_dims(one, order)) for one in (x, rows))
    made = emit(relax.op.scatter_nd(next(turned), places, next(turned), "update"))
    return emit(relax.op.permute_dims(made, [order.index(k) for k in range(len(order))]))


def _layer_norm(node: Any, importer: Any) -> relax.Var:
    """In float32 where the model is in bfloat16, of which TVM has no kernel; so is PyTorch's."""
    x, shape, *rest = _operands(node, importer)
    gamma, beta, epsilon = (*rest, *(None, None, 1e-5)[len(rest) :])[:3]
    dtype = str(x.ty.dtype)
    if dtype == "bfloat16":
        x, gamma, beta = (
            None if one is None else _as(importer, one, "float32") for one in (x, gamma, beta)
        )
    return _as(importer, importer._layer_norm_impl(x, gamma, beta, epsilon, tuple(shape)), dtype)


def _in_float32(method: str) -> Any:
    """Return what TVM's importer does, in float32 where the model is in bfloat16, rounded once."""

    def convert(node: Any, importer: Any) -> relax.Var:
        operands = {one: importer.env[one] for one in node.all_input_nodes}
        narrow = {
            one: x
            for one, x in operands.items()
            if isinstance(x.ty, relax.TensorType) and str(x.ty.dtype) == "bfloat16"
        }
        if not narrow:
            return getattr(importer, method)(node)
        importer.env.update((one, _as(importer, x, "float32")) for one, x in narrow.items())
        try:
            made = getattr(importer, method)(node)
        finally:
            importer.env.update(narrow)
        said = node.meta["val"]
        said = said[0] if isinstance(said, tuple) else said
        return _as(importer, made, str(said.dtype).removeprefix("torch."))

    return convert


def _slice(node: Any, importer: Any) -> relax.Var:
    x = importer.env[node.args[0]]
    axis = int(node.args[1] if len(node.args) > 1 else 0) % x.ty.ndim
    start, *rest = (*node.args[2:], None, None, None)[:3]
    start = 0 if start is None else start
    to_the_end = rest[0] is None or (isinstance(rest[0], int) and rest[0] >= _END)
    if start == -1 and to_the_end and rest[1] in (None, 1):
        extent = x.ty.shape[axis]
        last = relax.op.strided_slice(x, [axis], [extent - 1], [extent], [1], assume_inbound=True)
        return importer.block_builder.emit(last)
    if rest[1] in (None, 1) and _is_inside(node, axis, start, rest[0]):
        end = importer.env[rest[0]]
        first = relax.op.strided_slice(x, [axis], [start], [end], [1], assume_inbound=True)
        return importer.block_builder.emit(first)
    return importer._slice(node)


def _is_inside(node: Any, axis: int, start: Any, end: Any) -> bool:
    """Return whether PyTorch knows that a slice ends, at a symbolic place, before its operand."""
    if not isinstance(start, int) or start < 0:
        return False
    symbols = [getattr(end, "meta", {}).get("val"), node.meta["val"].shape[axis]]
    if not all(isinstance(one, torch.SymInt) for one in symbols):
        return False
    ends, extent = (one.node.expr for one in symbols)
    return bool(extent + start == ends)


#: What slices to the end say of it.
_END: Final = (1 << 63) - 1
#: For `from_exported_program(..., custom_convert_map=OPERATORS)`.
OPERATORS: Final = {
    **dict.fromkeys(("matmul.default", "mm.default", "bmm.default"), _product),
    "linear.default": _linear,
    "addmm.default": _addmm,
    "convolution.default": _convolution,
    "embedding.default": _embedding,
    "index.Tensor": _index,
    "index_put.default": _index_put,
    **dict.fromkeys(("layer_norm.default", "native_layer_norm.default"), _layer_norm),
    "_native_batch_norm_legit_no_training.default": _in_float32("_batch_norm_legit_no_training"),
    "cumsum.default": _in_float32("_cumsum"),
    "var.correction": _in_float32("_var"),
    "pow.Tensor_Scalar": _in_float32("_pow"),
    "slice.Tensor": _slice,
}
