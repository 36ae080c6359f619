# SPDX-License-Identifier: Apache-2.0
"""What programs are written with that say themselves when communication happens.

    work = comm.post(comm.allgather(x, workers=2), out)     # goes on beside the program
    ...                                                     # leaves x and out alone
    comm.wait(work)                                         # now out has the rows of all

These are calls of packed functions, in functions that are not pure: outputs are allocated before.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax, tirx

from tvm_ipc import arguments
from tvm_ipc.comm.attributes import CollectiveAttrs, kind_of
from tvm_ipc.comm.extents import show_extent
from tvm_ipc.comm.kinds import KINDS
from tvm_ipc.comm.legalize import packed_arguments
from tvm_ipc.comm.operator import infer
from tvm_ipc.comm.packed import count, extents_of, number, packed, part_type, product, tensor_of
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
    return packed(POST.name, given, relax.AnyType())


def wait(work: relax.Expr) -> relax.Call:
    """Return a call that waits until a work has ended."""
    if not isinstance(work, relax.Expr):
        raise arguments.wrong_type("wait: work", "what post returned", work)
    return packed(WAIT.name, [work], relax.TupleType([]))


def view(tensor: relax.Expr, start: Any, shape: Any) -> relax.Call:
    """Return a call whose value is a part of a tensor, in the same memory.

    Parameters
    ----------
    tensor : contiguous, of a type that is known.
    start : the first element of the part, in the order in which elements lie in memory.
    shape : of the part.
    """
    tensor_ty, item = tensor_of("view: tensor", tensor)
    first = number("view: start", "the number of an element, from 0 on", start)
    extents = extents_of("view: shape", shape)
    whole, end = count(tensor_ty), first + product(extents)
    if whole is not None and tvm.sym.Analyzer().can_prove(tirx.GT(end, whole)):
        past, there = map(show_extent, (end, whole))
        raise ValueError(
            f"view: it ends after {past} elements, and the tensor, of type {tensor.ty}, has {there}"
        )
    ty = part_type(tensor_ty, extents)
    return packed(VIEW.name, [tensor, first * item, relax.ShapeExpr(extents)], ty)


def _fits(result: relax.TensorType, out: relax.TensorType) -> bool:
    """Whether a result may go to a tensor: as many elements, of one type, as far as is known."""
    if None not in (result.dtype, out.dtype) and result.dtype != out.dtype:
        return False
    sizes = [count(ty) for ty in (result, out)]
    if any(size is None for size in sizes):
        return True
    return not tvm.sym.Analyzer().can_prove(tirx.NE(*sizes))
