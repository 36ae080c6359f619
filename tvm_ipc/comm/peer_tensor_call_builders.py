# SPDX-License-Identifier: Apache-2.0
"""Functions for programs whose ranks read each other's tensors without a copy.

    exposed = comm.expose(x)                               # from now on peers may read x
    rows = comm.peer_view(exposed, 1, (3, 8), "float32")   # the buffer that the next rank exposes
    ...                                                    # reads rows and does not write x
    comm.release(exposed)                                  # a barrier; peers have read x

`shift` selects a rank of the team: the one `shift` positions after the calling rank in a ring, or
before it if `shift` is negative. The functions return calls of packed functions, for functions that
are not pure. Offsets count elements in memory order.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from tvm_ipc import arguments
from tvm_ipc.comm.collective_attrs import REDUCTIONS
from tvm_ipc.comm.packed_call_builder_helpers import (
    as_list,
    extents_of,
    number,
    packed_call,
    product,
    slice_type,
    team_of,
    tensor_of,
)
from tvm_ipc.packed_functions import ReduceKind
from tvm_ipc.packed_functions.program_function_declarations import (
    ASSEMBLE,
    EXPOSE,
    OWN_SLICE,
    PEER_VIEW,
    REDUCE_SLICES,
    RELEASE,
)

_EXPOSED = "the result of expose"
_SHIFT = "an offset from this rank in its team, negative for ranks before it"
_START = "an offset in elements, from 0 on"
_OUT = "an allocated tensor of a known type"


def expose(tensor: relax.Expr, *, team: Any = "world") -> relax.Call:
    """Return a call that exposes a tensor to the team; its value is for `peer_view` and `release`.

    It does not wait. All ranks of the team must expose the same number of tensors, of equal types
    and in the same order. Until it is released, the tensor may be read but not written.

    Parameters
    ----------
    tensor : the tensor, of a known type.
    team : the ranks, as in `tvm_ipc.comm.allreduce`.

    Returns
    -------
    relax.Call
        The call; pass its value to `peer_view` and `release`.

    Examples
    --------
    Each rank adds its tensor and that of the next rank, which it reads in place.

    >>> import tvm
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class Model:
    ...     @R.function(pure=False)
    ...     def main(x: R.Tensor((4,), "float32")):
    ...         exposed = R.comm.expose(x)
    ...         peer = R.comm.peer_view(exposed, 1, (4,), "float32")
    ...         y = R.add(x, peer)
    ...         R.comm.release(exposed)
    ...         return y
    ... ''')
    >>> mod["main"].ret_ty
    R.Tensor((4,), dtype="float32")
    """
    tensor_of("expose: tensor", tensor)
    return packed_call(EXPOSE.name, [tensor, team_of("expose", team)], relax.AnyType())


def peer_view(exposed: relax.Expr, shift: Any, shape: Any, dtype: str) -> relax.Call:
    """Return a call that waits until another rank has exposed its tensor and returns a view of it.

    The view may be read, but not written, until the peer releases the tensor.

    Parameters
    ----------
    exposed : the result of `expose` for the tensor of this rank at the same point of the program.
    shift : the position of the peer relative to this rank, as in the module's introduction; 0 is
        this rank.
    shape : the shape of the view, with as many elements as the exposed tensor.
    dtype : the element type of the exposed tensor.

    Returns
    -------
    relax.Call
        The call, whose value is the view.

    Examples
    --------
    Each rank adds its tensor and that of the next rank, which it reads in place.

    >>> import tvm
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class Model:
    ...     @R.function(pure=False)
    ...     def main(x: R.Tensor((4,), "float32")):
    ...         exposed = R.comm.expose(x)
    ...         peer = R.comm.peer_view(exposed, 1, (4,), "float32")
    ...         y = R.add(x, peer)
    ...         R.comm.release(exposed)
    ...         return y
    ... ''')
    >>> mod["main"].ret_ty
    R.Tensor((4,), dtype="float32")
    """
    if not isinstance(exposed, relax.Expr):
        raise arguments.wrong_type("peer_view: exposed", _EXPOSED, exposed)
    offset = number("peer_view: shift", _SHIFT, shift, -(2**63))
    extents = extents_of("peer_view: shape", shape)
    ty = relax.TensorType(extents, _dtype("peer_view: dtype", dtype))
    return packed_call(PEER_VIEW.name, [exposed, offset, relax.ShapeExpr(extents)], ty)


def release(exposed: Any, *, team: Any = "world") -> relax.Call:
    """Return a call that is a barrier of the team; after it, peers no longer read the tensors.

    Parameters
    ----------
    exposed : the result of `expose`, or a list of results.
    team : the ranks, as in `tvm_ipc.comm.allreduce`.

    Returns
    -------
    relax.Call
        The call, which has no value.

    Examples
    --------
    After the release, the rank may write to its tensor again.

    >>> import tvm
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class Model:
    ...     @R.function(pure=False)
    ...     def main(x: R.Tensor((4,), "float32")):
    ...         exposed = R.comm.expose(x)
    ...         peer = R.comm.peer_view(exposed, 1, (4,), "float32")
    ...         y = R.add(x, peer)
    ...         R.comm.release(exposed)
    ...         return y
    ... ''')
    >>> mod["main"].ret_ty
    R.Tensor((4,), dtype="float32")
    """
    handles = (
        [exposed]
        if isinstance(exposed, relax.Var)
        else as_list("release: exposed", _EXPOSED, exposed)
    )
    wanted = f"{_EXPOSED}, or a list of such results"
    if not handles:
        raise arguments.wrong_value("release: exposed", wanted, exposed)
    if not all(isinstance(handle, relax.Expr) for handle in handles):
        raise arguments.wrong_type("release: exposed", wanted, exposed)
    return packed_call(RELEASE.name, [team_of("release", team), *handles], relax.TupleType([]))


def own_slice(
    tensor: relax.Expr,
    shift: Any,
    shape: Any,
    *,
    stride: Any = None,
    start: Any = 0,
    team: Any = "world",
) -> relax.Call:
    """Return a call whose value is a view of a rank's slice of a tensor.

    Parameters
    ----------
    tensor : a contiguous tensor of a known type, with the slices of the ranks in team order.
    shift : the position of the slice's rank relative to this rank; 0 is this rank, and positions
        wrap around at the end of the team.
    shape : the shape of the slice.
    stride : the distance between the slices of consecutive ranks, in elements; the size of a slice
        if None.
    start : the offset of the first rank's slice, in elements. Kernels that TVM compiles expect
        slices that begin at a multiple of 64 bytes.
    team : the ranks, as in `tvm_ipc.comm.allreduce`.

    Returns
    -------
    relax.Call
        The call, with the type of the slice.

    Examples
    --------
    Rank r has rows 2r and 2r + 1:

    >>> import tvm
    >>> main = tvm.script.from_source('''
    ... @R.function(pure=False)
    ... def main(x: R.Tensor((4, 8), "float32")):
    ...     return R.comm.own_slice(x, 0, (2, 8))
    ... ''')
    >>> main.ret_ty
    R.Tensor((2, 8), dtype="float32")
    """
    tensor_ty, item = tensor_of("own_slice: tensor", tensor)
    offset = number("own_slice: shift", _SHIFT, shift, -(2**63))
    extents = extents_of("own_slice: shape", shape)
    step = product(extents) if stride is None else number("own_slice: stride", _START, stride)
    first = number("own_slice: start", _START, start)
    numbers = [offset, step * item, first * item, relax.ShapeExpr(extents)]
    operands = [tensor, team_of("own_slice", team), *numbers]
    return packed_call(OWN_SLICE.name, operands, slice_type(tensor_ty, extents))


def reduce_slices(
    slices: Any, out: relax.Expr, reduction: str = "sum", *, team: Any = "world"
) -> relax.Call:
    """Return a call that reduces one slice of each rank, bit for bit as `allreduce` does.

    It does not wait.

    Parameters
    ----------
    slices : one slice of each rank of the team, beginning with this rank's; slice k is that of the
        rank k positions before this rank.
    out : the tensor that receives the result; it may not be one of the slices.
    reduction : "sum", "prod", "min", "max", "avg", "band", "bor", "bxor" or "tree_sum".
    team : the ranks, as in `tvm_ipc.comm.allreduce`.

    Returns
    -------
    relax.Call
        The call, which has no value.

    Examples
    --------
    >>> import tvm
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class Model:
    ...     @R.function(pure=False)
    ...     def main(x: R.Tensor((4,), "float32"), out: R.Tensor((4,), "float32")):
    ...         exposed = R.comm.expose(x)
    ...         peer = R.comm.peer_view(exposed, -1, (4,), "float32")
    ...         R.comm.reduce_slices([x, peer], out)  # for 2 workers
    ...         R.comm.release(exposed)
    ...         return out
    ... ''')
    >>> "tvm_ipc.reduce_slices" in mod.script()
    True
    """
    wanted = "a tensor of each rank of the team"
    tensors = _tensors("reduce_slices: slices", wanted, slices)
    arguments.one_of("reduce_slices: reduction", reduction, REDUCTIONS)
    if not isinstance(out, relax.Expr):
        raise arguments.wrong_type("reduce_slices: out", _OUT, out)
    kind = int(ReduceKind[reduction.upper()])
    operands = [kind, team_of("reduce_slices", team), *tensors, out]
    return packed_call(REDUCE_SLICES.name, operands, relax.TupleType([]))


def assemble(slices: Any, positions: Any, out: relax.Expr, *, team: Any = "world") -> relax.Call:
    """Return a call that copies slices into a tensor, except those that are already in place.

    Parameters
    ----------
    slices : the tensors to copy.
    positions : shift, stride and start of each slice, as in `own_slice`.
    out : the tensor that receives the slices.
    team : the ranks, as in `tvm_ipc.comm.allreduce`.

    Returns
    -------
    relax.Call
        The call, which has no value.

    Raises
    ------
    ValueError
        The number of positions is not that of the slices.

    Examples
    --------
    The slices of this rank and of the next one, in a tensor with the rows of 2 workers:

    >>> import tvm
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class Model:
    ...     @R.function(pure=False)
    ...     def main(
    ...         own: R.Tensor((2, 8), "float32"),
    ...         peer: R.Tensor((2, 8), "float32"),
    ...         out: R.Tensor((4, 8), "float32"),
    ...     ):
    ...         R.comm.assemble([own, peer], [(0, 16, 0), (1, 16, 0)], out)
    ...         return out
    ... ''')
    >>> "tvm_ipc.assemble" in mod.script()
    True
    """
    tensors = _tensors("assemble: slices", "tensors", slices)
    if not isinstance(out, relax.Expr):
        raise arguments.wrong_type("assemble: out", _OUT, out)
    _, item = tensor_of("assemble: out", out)
    wanted = f"shift, stride and start of each of {len(tensors)} slices"
    try:
        numbers = [
            n
            for position in as_list("", wanted, positions)
            for n in _position_in_bytes(wanted, position, item)
        ]
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"assemble: positions is {wanted}, not {arguments.quote(positions)}"
        ) from None
    if len(numbers) != 3 * len(tensors):
        raise arguments.wrong_value("assemble: positions", wanted, positions)
    operands = [team_of("assemble", team), relax.ShapeExpr(numbers), *tensors, out]
    return packed_call(ASSEMBLE.name, operands, relax.TupleType([]))


def _position_in_bytes(wanted: str, position: Any, item: int) -> list[Any]:
    """Return the shift, and stride and start in bytes, of a slice."""
    shift, stride, start = as_list("", wanted, position)
    step, first = (number("", wanted, elements) * item for elements in (stride, start))
    return [number("", wanted, shift, -(2**63)), step, first]


def _tensors(name: str, wanted: str, value: Any) -> list[relax.Expr]:
    """Return a list of tensors; raise an error that begins with `name` for anything else."""
    tensors = as_list(name, wanted, value)
    if not tensors:
        raise arguments.wrong_value(name, wanted, value)
    if not all(isinstance(tensor, relax.Expr) for tensor in tensors):
        raise arguments.wrong_type(name, wanted, value)
    return tensors


def _dtype(name: str, dtype: Any) -> str:
    text = arguments.word(name, dtype, "the name of an element type")
    try:
        return str(tvm.DataType(text))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} is {dtype!r}; expected the name of an element type") from error
