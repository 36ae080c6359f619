# SPDX-License-Identifier: Apache-2.0
"""What programs are written with that say themselves when communication happens.

    work = comm.post(comm.allgather(x, workers=2), out)     # goes on beside the program
    ...                                                     # leaves x and out alone
    comm.wait(work)                                         # now out has the rows of all

These are calls of packed functions, in functions that are not pure: outputs are allocated before.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tvm
from tvm import relax, tirx

from tvm_ipc import arguments
from tvm_ipc.comm.attributes import CollectiveAttrs, kind_of
from tvm_ipc.comm.kinds import KINDS
from tvm_ipc.comm.legalize import packed_arguments
from tvm_ipc.comm.operator import constant, infer
from tvm_ipc.contract.programs import POST, VIEW, WAIT

_OUT = "the tensor that the collective writes, allocated before"


def post(collective: relax.Call, out: relax.Expr) -> relax.Call:
    """Return a call that posts a collective, whose result goes to a tensor; its value is the work.

    Parameters
    ----------
    collective : of even parts along axis 0, as the functions of this package return it.
    out : where its result goes.
    """
    wanted = "a collective of tvm_ipc.comm that ranks do together"
    attrs = getattr(collective, "attrs", None)
    if not isinstance(collective, relax.Call) or not isinstance(attrs, CollectiveAttrs):
        raise arguments.wrong_type("post: collective", wanted, collective)
    kind = kind_of(attrs)
    if kind is KINDS["take_part"]:
        raise arguments.wrong_value("post: collective", wanted, collective)
    if attrs.uneven or attrs.split_axis or attrs.concat_axis:
        raise ValueError(
            f"post: {kind.name}: a work divides and joins evenly along axis 0, as memory lies; "
            "transpose or pad before, and after the wait"
        )
    if not isinstance(out, relax.Expr):
        raise arguments.wrong_type("post: out", _OUT, out)
    result = infer(collective)
    if isinstance(out.ty, relax.TensorType) and not _fits(result, out.ty):
        raise ValueError(f"post: out is {_OUT}, of type {result}, not {out.ty}")
    tensor, *operands = collective.args
    name = tvm.ir.StringImm(kind.function.name)
    given = [name, *packed_arguments(tensor, operands, attrs), out]
    return _packed(POST.name, given, relax.AnyType())


def wait(work: relax.Expr) -> relax.Call:
    """Return a call that waits until a work has ended."""
    if not isinstance(work, relax.Expr):
        raise arguments.wrong_type("wait: work", "what post returned", work)
    return _packed(WAIT.name, [work], relax.TupleType([]))


def view(tensor: relax.Expr, start: Any, shape: Any) -> relax.Call:
    """Return a call whose value is a part of a tensor, in the same memory.

    Parameters
    ----------
    tensor : contiguous, of a type that is known.
    start : the first element of the part, in the order in which elements lie in memory.
    shape : of the part.
    """
    known = isinstance(tensor, relax.Expr) and isinstance(tensor.ty, relax.TensorType)
    if not known or tensor.ty.dtype is None:
        raise arguments.wrong_type("view: tensor", "a tensor of a known type", tensor)
    dtype = tensor.ty.dtype.dtype
    first = _number("view: start", "the number of an element, from 0 on", start)
    wanted = "extents from 0 on"
    if isinstance(shape, (str, bytes, dict, set)) or not hasattr(shape, "__iter__"):
        raise arguments.wrong_type("view: shape", wanted, shape)
    try:
        extents = [_number("view: shape", wanted, extent) for extent in shape]
    except (TypeError, ValueError) as error:
        raise type(error)(f"view: shape is {wanted}, not {arguments.show(shape)}") from None
    whole, end = _count(tensor.ty), first + _product(extents)
    if whole is not None and tvm.sym.Analyzer().can_prove(tirx.GT(end, whole)):
        past, there = map(_text, (end, whole))
        raise ValueError(
            f"view: it ends after {past} elements, and the tensor, of type {tensor.ty}, has {there}"
        )
    offset = first * ((int(dtype.bits) * int(dtype.lanes) + 7) // 8)
    offset = relax.prim_value(offset) if isinstance(offset, int) else offset
    ty = relax.TensorType(extents, str(dtype), tensor.ty.vdevice)
    return _packed(VIEW.name, [tensor, offset, relax.ShapeExpr(extents)], ty)


def _number(name: str, wanted: str, given: Any) -> Any:
    symbolic = isinstance(given, relax.Expr) and tvm.ir.is_prim_expr(given)
    return given if symbolic else arguments.integer(name, given, wanted)


def _fits(result: relax.TensorType, out: relax.TensorType) -> bool:
    """Whether a result may go to a tensor: as many elements, of one type, as far as is known."""
    if None not in (result.dtype, out.dtype) and result.dtype != out.dtype:
        return False
    sizes = [_count(ty) for ty in (result, out)]
    if any(size is None for size in sizes):
        return True
    return not tvm.sym.Analyzer().can_prove(tirx.NE(*sizes))


def _count(ty: relax.TensorType) -> Any:
    """Return how many elements a tensor has, None where that is not known."""
    return _product(ty.shape.values) if isinstance(ty.shape, relax.ShapeExpr) else None


def _text(size: Any) -> str:
    number = constant(size)
    return str(size) if number is None else str(number)


def _product(extents: Iterable[Any]) -> Any:
    size: Any = tirx.IntImm("int64", 1)
    for extent in extents:
        size = size * extent
    return size


def _packed(name: str, given: list[relax.Expr], ty: Any) -> relax.Call:
    return relax.Call(relax.ExternFunc(name), given, ty_args=[ty])
