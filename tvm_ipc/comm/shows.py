# SPDX-License-Identifier: Apache-2.0
"""What programs are written with whose ranks read each other's tensors where they lie.

    shown = comm.show(x)                                   # from now on peers may read x
    rows = comm.peer(shown, 1, (3, 8), "float32")          # what the next rank has shown
    ...                                                    # reads rows, and leaves x alone
    comm.hide(shown)                                       # all ranks meet; x is its rank's again

Ranks of a team have places in it. `shift` says whose tensor or part is meant: that of the rank so
many places after this one, in a ring, or before it where it is negative. These are calls of packed
functions, in functions that are not pure. Numbers of elements are counted as they lie in memory.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from tvm_ipc import arguments
from tvm_ipc.comm.attributes import REDUCTIONS
from tvm_ipc.comm.packed import (
    extents_of,
    listed,
    number,
    packed,
    part_type,
    product,
    team_of,
    tensor_of,
)
from tvm_ipc.contract import ReduceKind
from tvm_ipc.contract.programs import HIDE, JOIN, PART, PEER, REDUCE_PARTS, SHOW

_SHOWN = "what show returned"
_SHIFT = "how many places after this rank, before it where negative"
_START = "the number of an element, from 0 on"
_OUT = "a tensor of a known type, allocated before"


def show(tensor: relax.Expr, *, team: Any = "world") -> relax.Call:
    """Return a call that lets the team read a tensor; its value is what `peer` and `hide` take.

    It waits for nobody. All ranks of the team show as many tensors of equal types in the same
    order. Until it is hidden the tensor may be read, and not written.
    """
    tensor_of("show: tensor", tensor)
    return packed(SHOW.name, [tensor, team_of("show", team)], relax.AnyType())


def peer(shown: relax.Expr, shift: Any, shape: Any, dtype: str) -> relax.Call:
    """Return a call whose value is what another rank has shown, in its memory, once it has.

    It may be read, and not written, until it is hidden.

    Parameters
    ----------
    shown : what this rank has shown in return.
    shift : whose, see above; 0 is the own tensor.
    shape : of the result, with as many elements as were shown.
    dtype : of what was shown.
    """
    if not isinstance(shown, relax.Expr):
        raise arguments.wrong_type("peer: shown", _SHOWN, shown)
    places = number("peer: shift", _SHIFT, shift, -(2**63))
    extents = extents_of("peer: shape", shape)
    ty = relax.TensorType(extents, _dtype("peer: dtype", dtype))
    return packed(PEER.name, [shown, places, relax.ShapeExpr(extents)], ty)


def hide(shown: Any, *, team: Any = "world") -> relax.Call:
    """Return a call in which the team meets; then nobody reads what was shown any more.

    Parameters
    ----------
    shown : what `show` returned, or several of it.
    """
    given = [shown] if isinstance(shown, relax.Var) else listed("hide: shown", _SHOWN, shown)
    wanted = f"{_SHOWN}, or a list of that"
    if not given:
        raise arguments.wrong_value("hide: shown", wanted, shown)
    if not all(isinstance(one, relax.Expr) for one in given):
        raise arguments.wrong_type("hide: shown", wanted, shown)
    return packed(HIDE.name, [team_of("hide", team), *given], relax.TupleType([]))


def part(
    tensor: relax.Expr,
    shift: Any,
    shape: Any,
    *,
    stride: Any = None,
    start: Any = 0,
    team: Any = "world",
) -> relax.Call:
    """Return a call whose value is the part of a tensor that belongs to a rank, in the same memory.

    Parameters
    ----------
    tensor : contiguous, of a type that is known, with parts of the ranks in the order of places.
    shift : whose part, see above.
    shape : of the part.
    stride : how many elements the parts of two ranks are apart; as many as the shape has if None.
    start : where the part of the first rank begins. Kernels that TVM compiles expect that parts
        begin at a multiple of 64 bytes.
    """
    tensor_ty, item = tensor_of("part: tensor", tensor)
    places = number("part: shift", _SHIFT, shift, -(2**63))
    extents = extents_of("part: shape", shape)
    apart = product(extents) if stride is None else number("part: stride", _START, stride)
    first = number("part: start", _START, start)
    numbers = [places, apart * item, first * item, relax.ShapeExpr(extents)]
    given = [tensor, team_of("part", team), *numbers]
    return packed(PART.name, given, part_type(tensor_ty, extents))


def reduce_parts(
    parts: Any, out: relax.Expr, reduction: str = "sum", *, team: Any = "world"
) -> relax.Call:
    """Return a call that reduces what the ranks of a team have, with the bits of `allreduce`.

    It waits for nobody.

    Parameters
    ----------
    parts : part k is that of the rank k places before this one: the own one is the first.
    out : where the result goes; it is none of the parts.
    """
    wanted = "a tensor of each rank of the team"
    given = _tensors("reduce_parts: parts", wanted, parts)
    arguments.one_of("reduce_parts: reduction", reduction, REDUCTIONS)
    if not isinstance(out, relax.Expr):
        raise arguments.wrong_type("reduce_parts: out", _OUT, out)
    kind = int(ReduceKind[reduction.upper()])
    operands = [kind, team_of("reduce_parts", team), *given, out]
    return packed(REDUCE_PARTS.name, operands, relax.TupleType([]))


def join(parts: Any, places: Any, out: relax.Expr, *, team: Any = "world") -> relax.Call:
    """Return a call that copies parts to where `part` finds them, but for those that lie there.

    Parameters
    ----------
    parts : tensors.
    places : shift, stride and start of each, as `part` takes them.
    out : what they are copied to.
    """
    given = _tensors("join: parts", "tensors", parts)
    if not isinstance(out, relax.Expr):
        raise arguments.wrong_type("join: out", _OUT, out)
    _, item = tensor_of("join: out", out)
    wanted = f"shift, stride and start of each of {len(given)} parts"
    try:
        numbers = [n for place in listed("", wanted, places) for n in _place(wanted, place, item)]
    except (TypeError, ValueError) as error:
        raise type(error)(f"join: places is {wanted}, not {arguments.show(places)}") from None
    if len(numbers) != 3 * len(given):
        raise arguments.wrong_value("join: places", wanted, places)
    operands = [team_of("join", team), relax.ShapeExpr(numbers), *given, out]
    return packed(JOIN.name, operands, relax.TupleType([]))


def _place(wanted: str, place: Any, item: int) -> list[Any]:
    """Return shift, stride and start of a part in bytes."""
    shift, stride, start = listed("", wanted, place)
    apart, first = (number("", wanted, one) * item for one in (stride, start))
    return [number("", wanted, shift, -(2**63)), apart, first]


def _tensors(name: str, wanted: str, given: Any) -> list[relax.Expr]:
    found = listed(name, wanted, given)
    if not found:
        raise arguments.wrong_value(name, wanted, given)
    if not all(isinstance(one, relax.Expr) for one in found):
        raise arguments.wrong_type(name, wanted, given)
    return found


def _dtype(name: str, dtype: Any) -> str:
    text = arguments.word(name, dtype, "the name of a type of elements")
    try:
        return str(tvm.DataType(text))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: there is no type of elements {dtype!r}") from error
