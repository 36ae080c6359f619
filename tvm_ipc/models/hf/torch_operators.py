# SPDX-License-Identifier: Apache-2.0
"""Converters from PyTorch operators to Relax, where those of TVM's importer differ from PyTorch.

- TVM's importer makes the results of matmuls and convolutions float32, so half of a bfloat16 model
  would compute in float32. PyTorch accumulates in float32 and rounds once.
- TVM has no kernels for norms and cumulative sums of bfloat16, or wrong ones.
- If an extent of `x` is symbolic, TVM's importer does not know that `x[:, -1:]` has the extent 1,
  nor that `x[:, :n]` has the extent n for an n within bounds.
- TVM's `take` reads outside the table if an index is out of bounds. The converters here clip or
  wrap indices.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from tvm import relax, tirx

from tvm_ipc.tvm_private_names import torch_converter


def _operands(node: Any, importer: Any) -> list[Any]:
    return [importer.env.get(argument, argument) for argument in node.args]


def _matmul(node: Any, importer: Any) -> relax.Var:
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
    for name, term in (("alpha", "product"), ("beta", "bias")):
        factor = node.kwargs.get(name, 1)
        if factor != 1:
            raise NotImplementedError(f"addmm with {name}={factor}, which scales the {term}")
    return importer.block_builder.emit(relax.op.add(product, bias))


def _convolution(node: Any, importer: Any) -> relax.Var:
    """Accumulate 16-bit types in float32, and round once, after the bias."""
    x, weight, bias, strides, padding, dilation, is_transposed, output_padding, groups = _operands(
        node, importer
    )
    dtype = str(x.ty.dtype)
    wide = "float32" if dtype in ("float16", "bfloat16") else dtype
    space = "DHW"[5 - x.ty.ndim :]
    options = {
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
        name, options["output_padding"] = f"{name}_transpose", output_padding
    emit = importer.block_builder.emit
    result = emit(getattr(relax.op.nn, name)(x, weight, **options))
    if bias is not None:
        channels = emit(relax.op.reshape(bias, (1, -1, *(1 for _ in space))))
        result = emit(relax.op.add(result, _cast(importer, channels, wide)))
    return _cast(importer, result, dtype)


def _cast(importer: Any, x: Any, dtype: str) -> Any:
    if str(x.ty.dtype) == dtype:
        return x
    return importer.block_builder.emit(relax.op.astype(x, dtype))


def _embedding(node: Any, importer: Any) -> relax.Var:
    table, ids = _operands(node, importer)[:2]
    return importer.block_builder.emit(relax.op.take(table, ids, axis=0, mode="clip"))


def _index(node: Any, importer: Any) -> relax.Var:
    """Take along one axis. Negative indices count from the end, as in PyTorch."""
    table, indices = _operands(node, importer)[:2]
    indexed = [
        (axis, importer.env.get(index, index))
        for axis, index in enumerate(indices)
        if index is not None
    ]
    if len(indexed) != 1 or str(indexed[0][1].ty.dtype) == "bool":
        return torch_converter(importer, "index")(node)
    ((axis, index),) = indexed
    return importer.block_builder.emit(relax.op.take(table, index, axis=axis, mode="wrap"))


def _index_put(node: Any, importer: Any) -> relax.Var:
    """Write rows along any one axis, as models do with KV caches of a fixed length."""
    x, indices, values, *accumulate = _operands(node, importer)
    indexed = [
        (axis, importer.env[index]) for axis, index in enumerate(indices) if index is not None
    ]
    is_row = (
        len(indexed) == 1 and indexed[0][1].ty.ndim == 1 and str(indexed[0][1].ty.dtype) != "bool"
    )
    extents = x.ty.shape
    if (
        not is_row
        or (accumulate and accumulate[0])
        or not isinstance(extents[indexed[0][0]], tirx.IntImm)
    ):
        return torch_converter(importer, "index_put")(node)
    emit = importer.block_builder.emit
    ((axis, index),) = indexed
    extent = relax.const(int(extents[axis]), str(index.ty.dtype))
    positions = emit(relax.op.expand_dims(emit(relax.op.floor_mod(index, extent)), 1))
    shape = [index.ty.shape[0] if k == axis else size for k, size in enumerate(extents)]
    rows = emit(relax.op.broadcast_to(values, shape))
    order = [axis, *(k for k in range(len(extents)) if k != axis)]
    # scatter_nd writes along the first axis.
    x, rows = (emit(relax.op.permute_dims(tensor, order)) for tensor in (x, rows))
    result = emit(relax.op.scatter_nd(x, positions, rows, "update"))
    return emit(relax.op.permute_dims(result, [order.index(k) for k in range(len(order))]))


def _layer_norm(node: Any, importer: Any) -> relax.Var:
    """Compute in float32 if the model is bfloat16, as PyTorch does: TVM has no bfloat16 kernel."""
    x, shape, *rest = _operands(node, importer)
    gamma, beta, epsilon = (*rest, *(None, None, 1e-5)[len(rest) :])[:3]
    dtype = str(x.ty.dtype)
    if dtype == "bfloat16":
        x, gamma, beta = (
            None if operand is None else _cast(importer, operand, "float32")
            for operand in (x, gamma, beta)
        )
    result = torch_converter(importer, "layer_norm")(x, gamma, beta, epsilon, tuple(shape))
    return _cast(importer, result, dtype)


def _in_float32(operator: str) -> Any:
    """Return a converter that runs TVM's own with bfloat16 operands in float32."""

    def convert(node: Any, importer: Any) -> relax.Var:
        operands = {operand: importer.env[operand] for operand in node.all_input_nodes}
        narrow = {
            operand: x
            for operand, x in operands.items()
            if isinstance(x.ty, relax.TensorType) and str(x.ty.dtype) == "bfloat16"
        }
        if not narrow:
            return torch_converter(importer, operator)(node)
        importer.env.update(
            (operand, _cast(importer, x, "float32")) for operand, x in narrow.items()
        )
        try:
            result = torch_converter(importer, operator)(node)
        finally:
            importer.env.update(narrow)
        expected = node.meta["val"]
        expected = expected[0] if isinstance(expected, tuple) else expected
        return _cast(importer, result, str(expected.dtype).removeprefix("torch."))

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
    return torch_converter(importer, "slice")(node)


def _is_inside(node: Any, axis: int, start: Any, end: Any) -> bool:
    """Return whether PyTorch proved that a slice with a symbolic end is within its operand."""
    if not isinstance(start, int) or start < 0:
        return False
    symbols = [getattr(end, "meta", {}).get("val"), node.meta["val"].shape[axis]]
    if not all(isinstance(symbol, torch.SymInt) for symbol in symbols):
        return False
    end_expr, extent = (symbol.node.expr for symbol in symbols)
    return bool(extent + start == end_expr)


#: The end of slices without an end.
_END: Final = (1 << 63) - 1
#: For `from_exported_program(..., custom_convert_map=OPERATORS)`.
OPERATORS: Final = {
    **dict.fromkeys(("matmul.default", "mm.default", "bmm.default"), _matmul),
    "linear.default": _linear,
    "addmm.default": _addmm,
    "convolution.default": _convolution,
    "embedding.default": _embedding,
    "index.Tensor": _index,
    "index_put.default": _index_put,
    **dict.fromkeys(("layer_norm.default", "native_layer_norm.default"), _layer_norm),
    "_native_batch_norm_legit_no_training.default": _in_float32("batch_norm"),
    "cumsum.default": _in_float32("cumsum"),
    "var.correction": _in_float32("var"),
    "pow.Tensor_Scalar": _in_float32("pow"),
    "slice.Tensor": _slice,
}
