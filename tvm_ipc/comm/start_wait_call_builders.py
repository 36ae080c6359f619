# SPDX-License-Identifier: Apache-2.0
"""Functions for programs that schedule asynchronous collectives explicitly.

    request = comm.start(comm.allgather(x, workers=2), out)   # runs while the program goes on
    ...                                                      # does not use x and out
    comm.wait(request)                                       # now out has the rows of all ranks

The functions return calls of packed functions, for functions that are not pure. The program
allocates outputs beforehand.
"""

from __future__ import annotations

from typing import Any

from tvm import relax, tirx

from tvm_ipc import arguments
from tvm_ipc.comm.collective_attrs import CollectiveAttrs, kind_of
from tvm_ipc.comm.collective_relax_op import infer, is_collective
from tvm_ipc.comm.extent_arithmetic import format_extent
from tvm_ipc.comm.legalize import packed_arguments
from tvm_ipc.comm.packed_call_builder_helpers import (
    count,
    extents_of,
    number,
    packed_call,
    product,
    slice_type,
    tensor_of,
)
from tvm_ipc.packed_functions.program_function_declarations import START, VIEW, WAIT
from tvm_ipc.tvm_moved_names import Analyzer, StringImm

_OUT = "an allocated tensor for the result of the collective"


def start(collective: relax.Call, out: relax.Expr) -> relax.Call:
    """Return a call that starts a collective and returns a request for `wait`.

    Parameters
    ----------
    collective : a collective with equal shards along axis 0, as the functions of this package
        return it.
    out : the tensor that receives the result.

    Returns
    -------
    relax.Call
        The call; its value is the request.

    Raises
    ------
    TypeError
        `collective` is no collective of this package.
    ValueError
        The collective is `take_shard`, which does not communicate. Or it has uneven shards or an
        axis other than 0, or `out` has another type than its result.

    Examples
    --------
    >>> import tvm
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class Model:
    ...     @R.function(pure=False)
    ...     def main(x: R.Tensor((4,), "float32"), out: R.Tensor((8,), "float32")):
    ...         request = R.comm.start(R.comm.allgather(x, workers=2), out)
    ...         y = R.exp(x)  # runs while the data travel
    ...         R.comm.wait(request)
    ...         return (y, out)
    ... ''')
    >>> "tvm_ipc.start" in mod.script()
    True
    """
    wanted = "a collective of tvm_ipc.comm that communicates"
    if not is_collective(collective):
        raise arguments.wrong_type("start: collective", wanted, collective)
    attrs = CollectiveAttrs.of(collective)
    kind = kind_of(attrs)
    if not kind.communicates:
        raise arguments.wrong_value("start: collective", wanted, collective)
    if attrs.scale is not None:
        raise ValueError(
            f"start: {kind.name}: scale is {attrs.scale}; expected None; multiply the tensor before"
        )
    if attrs.root_rank is not None:
        raise ValueError(
            f"start: {kind.name}: the root, rank {attrs.root_rank}, is not in the team; expected a "
            "root in the team, for example of a team to which that rank is added"
        )
    if attrs.uneven or attrs.split_axis or attrs.concat_axis:
        raise ValueError(
            f"start: {kind.name}: the collective has uneven shards or an axis other than 0; "
            "expected equal shards along axis 0; transpose or pad before start and after wait"
        )
    if not isinstance(out, relax.Expr):
        raise arguments.wrong_type("start: out", _OUT, out)
    result = infer(collective)
    if isinstance(out.ty, relax.TensorType) and not _fits(result, out.ty):
        raise ValueError(f"start: out has the type {out.ty}; expected {_OUT}, of type {result}")
    tensor, *operands = collective.args
    name = StringImm(kind.function.name)
    args = [name, *packed_arguments(tensor, operands, attrs), out]
    return packed_call(START.name, args, relax.AnyType())


def wait(request: relax.Expr) -> relax.Call:
    """Return a call that waits until the request of `start` has completed.

    Parameters
    ----------
    request : the result of `start`.

    Returns
    -------
    relax.Call
        The call; afterwards the output has the result, and operands may be written.

    Examples
    --------
    >>> import tvm
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class Model:
    ...     @R.function(pure=False)
    ...     def main(x: R.Tensor((4,), "float32"), out: R.Tensor((8,), "float32")):
    ...         request = R.comm.start(R.comm.allgather(x, workers=2), out)
    ...         y = R.exp(x)  # runs while the data travel
    ...         R.comm.wait(request)
    ...         return (y, out)
    ... ''')
    >>> mod.script().count("tvm_ipc.wait")
    1
    """
    if not isinstance(request, relax.Expr):
        raise arguments.wrong_type("wait: request", "the result of start", request)
    return packed_call(WAIT.name, [request], relax.TupleType([]))


def view(tensor: relax.Expr, start: Any, shape: Any) -> relax.Call:
    """Return a call whose value is a view of a slice of a tensor.

    Parameters
    ----------
    tensor : a contiguous tensor of a known type.
    start : the offset of the slice, in elements in memory order.
    shape : the shape of the slice.

    Returns
    -------
    relax.Call
        The call, with the type of the slice.

    Raises
    ------
    ValueError
        The slice ends after the tensor.

    Examples
    --------
    The second half of a tensor, without a copy:

    >>> import tvm
    >>> main = tvm.script.from_source('''
    ... @R.function(pure=False)
    ... def main(x: R.Tensor((4, 8), "float32")):
    ...     return R.comm.view(x, 16, (2, 8))
    ... ''')
    >>> main.ret_ty
    R.Tensor((2, 8), dtype="float32")
    """
    tensor_ty, item = tensor_of("view: tensor", tensor)
    first = number("view: start", "an offset in elements, from 0 on", start)
    extents = extents_of("view: shape", shape)
    whole, end = count(tensor_ty), first + product(extents)
    if whole is not None and Analyzer().can_prove(tirx.GT(end, whole)):
        raise ValueError(
            f"view: the slice ends after {format_extent(end)} elements, but the tensor, of type "
            f"{tensor.ty}, has {format_extent(whole)}"
        )
    ty = slice_type(tensor_ty, extents)
    return packed_call(VIEW.name, [tensor, first * item, relax.ShapeExpr(extents)], ty)


def _fits(result: relax.TensorType, out: relax.TensorType) -> bool:
    """Return whether a tensor may receive a result: same element type and number of elements.

    Unknown types and numbers fit.
    """
    if None not in (result.dtype, out.dtype) and result.dtype != out.dtype:
        return False
    sizes = [count(ty) for ty in (result, out)]
    if any(size is None for size in sizes):
        return True
    return not Analyzer().can_prove(tirx.NE(*sizes))
