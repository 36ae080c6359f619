# SPDX-License-Identifier: Apache-2.0
"""The operators whose results do not depend on the layout of the work, and why others are refused.

An elementwise operator or a move has no sums. A reduction has a fixed order if the extents that it
sums over are constants, since `ScheduleForCPU(reproducible=True)` derives the order from these. Of
packed functions, the attention of `csrc/blas` adds up keys in one order if it is asked to.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import tvm
import tvm_ffi
from tvm import relax, tirx

from tvm_ipc.analysis.elementwise_ops import BROADCASTING, UNARY
from tvm_ipc.analysis.ffi_arrays import as_list
from tvm_ipc.analysis.views_and_writes_of_calls import VIEWS, name_of_callee
from tvm_ipc.comm.expert_ops import COMBINE, MATMUL, MOE
from tvm_ipc.cpu.kernels.primfunc_stages import NotStagesError, read_stages
from tvm_ipc.packed_functions.function_signature_and_effects import Function
from tvm_ipc.packed_functions.program_function_declarations import (
    ATTENTION,
    ATTENTION_OF_SEQUENCES,
    BATCH_ATTENTION,
)

#: Operators that reshape or permute a tensor.
RESHAPES: Final = ("expand_dims", "flatten", "permute_dims", "reshape", "squeeze")
#: Other operators that move, create, compare or describe elements.
_MOVES: Final = (
    *("concat", "split", "stack", "meshgrid"),
    *("dynamic_strided_slice", "flip", "gather_elements", "gather_nd", "index_tensor"),
    *("scatter_elements", "scatter_nd", "slice_scatter", "strided_slice", "take", "tril", "triu"),
    *("where", "nn.pad", "reverse_sequence", "layout_transform", "index_put"),
    *("broadcast_to", "repeat", "tile"),
    *("arange", "eye", "eye_like", "full", "full_like", "one_hot", "ones", "ones_like"),
    *("zeros", "zeros_like", "null_value"),
    *("argmax", "argmin", "argsort", "bucketize", "max", "min", "nonzero", "sort", "topk"),
    *("unique", "nn.max_pool1d", "nn.max_pool2d", "nn.max_pool3d"),
    *("shape_of", "shape_to_tensor", "size", "tensor_to_shape", "assert_op", "print"),
    *("hint_on_device", "to_vdevice", "memory.view", "memory.ensure_zero_offset"),
)
_WITHOUT_SUMS: Final = frozenset(
    f"relax.{name}"
    for name in (*UNARY, *BROADCASTING, *RESHAPES, *_MOVES, "nn.dropout", "nn.prelu")
)
#: Reductions, with the name of the attribute that has their axes.
_REDUCTIONS: Final = {
    **{f"relax.{name}": "axis" for name in ("mean", "prod", "std", "sum", "variance")},
    **{f"relax.nn.{name}": "axis" for name in ("log_softmax", "softmax")},
    **{
        f"relax.nn.{name}": "axes"
        for name in ("group_norm", "instance_norm", "layer_norm", "rms_norm")
    },
}
_PACKED: Final = frozenset((*VIEWS, BATCH_ATTENTION.name))
#: Packed functions with an argument `reproducible`, which must be 1.
_ATTENTION: Final = {function.name: function for function in (ATTENTION, ATTENTION_OF_SEQUENCES)}
_EXPERTS: Final = (MOE, COMBINE, MATMUL)
#: The floats that matmuls may have.
FLOATS: Final = ("float32", "bfloat16")
#: Floats whose sums and roundings have no fixed order here.
_OTHER_FLOATS: Final = ("float16", "float8", "float6", "float4")


def obstacle(call: relax.Call, mod: tvm.IRModule) -> str:
    """Return why the result of a call depends on the layout of the work, "" if it does not.

    Parameters
    ----------
    call : a call of a Relax function; matmuls and collectives are left to the caller.
    mod : the module, which has the kernels that calls refer to.
    """
    callee = name_of_callee(call.op)
    dtypes = {
        *_dtypes(call.ty),
        *(dtype for one in as_list(call.args) for dtype in _dtypes(one.ty)),
    }
    for dtype in sorted(dtypes):
        if dtype.startswith(_OTHER_FLOATS):
            return wrong_type(dtype)
    if type(call.op) is tvm.ir.GlobalVar or not any("float" in dtype for dtype in dtypes):
        return ""  # the function that is called is checked too; integers are exact
    if callee in _WITHOUT_SUMS:
        return ""
    if callee in _REDUCTIONS:
        return _of_reduction(call, _REDUCTIONS[callee])
    if callee in ("relax.call_tir", "relax.call_tir_inplace"):
        return _of_kernel(mod[call.args[0]])
    packed = call.args[0] if callee.startswith("relax.call_") and len(call.args) else call.op
    if isinstance(packed, relax.ExternFunc):
        name = str(packed.global_symbol)
        if name in _ATTENTION:
            return _of_attention(call, _ATTENTION[name])
        return "" if name in _PACKED else f"the order of sums in {name} is unknown"
    if callee in _EXPERTS:
        return (
            "experts that are sharded over workers sum up in another order than others; load the "
            "model with a plan that shards the features of experts"
        )
    if callee.startswith("relax.nn.attention"):
        return "it was not fused (see the report of FuseAttention), so that its scores are matmuls"
    return "the order of its sums is not fixed"


def _of_attention(call: relax.Call, function: Function) -> str:
    values = as_list(call.args[1].fields)
    (position,) = function.positions(("reproducible",), len(values) + 1)  # one is the result
    if int(values[position].value) == 1:
        return ""
    return "it has no fixed order; use FuseAttention(reproducible=True)"


def wrong_type(dtype: str) -> str:
    """Return the obstacle that an operator computes in an unsupported type."""
    return f"it computes in {dtype}; expected {' or '.join(FLOATS)}"


def _of_reduction(call: relax.Call, attribute: str) -> str:
    ty = call.args[0].ty
    axes = getattr(call.attrs, attribute)
    if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
        return "the shape of its operand is unknown"
    shape = as_list(ty.shape.values)
    if isinstance(axes, int | tirx.IntImm):
        axes = [axes]
    extents = shape if axes is None else [shape[int(axis)] for axis in axes]
    for extent in extents:
        if not isinstance(extent, tirx.IntImm):
            return (
                f"it sums along an axis of symbolic length {extent}, whose order depends on the "
                "length of the input; attention that FuseAttention recognizes has a fixed order"
            )
    return ""


def _of_kernel(kernel: tirx.PrimFunc) -> str:
    if not has_float_arithmetic(kernel):
        return ""
    try:
        stages = read_stages(kernel).stages
    except NotStagesError as reason:
        return f"the order of sums in the kernel is unknown, since {reason}"
    if any(stage.reduced for stage in stages):
        return "it is a kernel with sums, whose order depends on its schedule"
    return ""


def has_float_arithmetic(kernel: tirx.PrimFunc) -> bool:
    """Return whether a kernel computes with floats, rather than moving or comparing them."""
    found: list[Any] = []

    def add(node: Any) -> None:
        if "float" in str(node.ty.dtype):
            found.append(node)

    def add_call(node: Any) -> None:
        moves = ("if_then_else", "reinterpret", "likely", "infinity", "max_value", "min_value")
        is_float = hasattr(node.ty, "dtype") and "float" in str(node.ty.dtype)
        if is_float and name_of_callee(node.op).rpartition(".")[2] not in moves:
            found.append(node)

    arithmetic = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div)
    tvm_ffi.structural_walk(kernel.body, [(arithmetic, add), (tvm.ir.Call, add_call)])
    return bool(found)


def _dtypes(ty: Any) -> Iterator[str]:
    if isinstance(ty, tvm.ir.TupleType):
        for one in as_list(ty.fields):
            yield from _dtypes(one)
    elif isinstance(ty, relax.TensorType) and ty.dtype is not None:
        yield str(ty.dtype)
