# SPDX-License-Identifier: Apache-2.0
"""Where a tensor of a global-view program lies: the Relax operator `relax.comm.place`.

    y = comm.place(x, mesh, {"tp": comm.Shard(0)})

In a global view the operator is the identity: it says what each rank of the mesh has of `y`.
`tvm_ipc.transform.LowerPlacements` makes of such a program what one rank runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import tvm
import tvm_ffi
from tvm import relax
from tvm_ffi.dataclasses import py_class

from tvm_ipc import arguments
from tvm_ipc.comm.mesh import Mesh
from tvm_ipc.comm.placements import Partial, Placements, Shard, placements_of, reduces

NAME: Final = "relax.comm.place"
_MESH: Final = "a Mesh, or names and extents of its axes, such as [['dp', 2], ['tp', 4]]"


@py_class("tvm_ipc.PlaceAttrs")
class PlaceAttrs(tvm.ir.Attrs):  # type: ignore[misc]
    """Where a tensor lies, in plain values.

    Attributes
    ----------
    mesh : names and extents of the axes of the mesh, in their order.
    placements : one for each of them, as `str` of a placement gives it.
    ranks : the ranks in the order of the mesh, None where they are in their own order.
    stream : the axis of the tensor along which streams may work on it, None for none.
    """

    mesh: tvm_ffi.Array[Any]
    placements: tvm_ffi.Array[str]
    ranks: tvm_ffi.Array[int] | None = None
    stream: int | None = None


def place(
    x: relax.Expr,
    mesh: Any,
    placements: Any,
    *,
    ranks: Any = None,
    stream: int | None = None,
) -> relax.Call:
    """Return the tensor, and say what each rank has of it.

    Parameters
    ----------
    x : the tensor.
    mesh : a `Mesh`, or, as programs are printed, names and extents of its axes.
    placements : for axes of the mesh by name, `Replica()`, `Shard(axis)` or `Partial(reduction)`;
        replicated along the others. Or one for each axis of the mesh, in their order.
    ranks : of a mesh that is given by names and extents: see `Mesh`.
    stream : the first axis of a product of what is gathered: its chunks along that are gathered
        and multiplied one after the other, the later ones while others are multiplied.
    """
    if not isinstance(x, relax.Expr):
        raise arguments.wrong_type("place: x", "an expression of a tensor", x)
    if isinstance(mesh, Mesh):
        if ranks is not None:
            raise arguments.wrong_value("place: ranks", "None beside a Mesh, which has them", ranks)
    else:
        mesh = _mesh(mesh, ranks)
    in_order = mesh.ranks == tuple(range(len(mesh.ranks)))
    if stream is not None:
        stream = arguments.integer("place: stream", stream, "an axis of x, from 0 on, or None")
    attrs = PlaceAttrs(
        mesh=[[name, extent] for name, extent in mesh.axes.items()],
        placements=[str(one) for one in placements_of(mesh, placements)],
        ranks=None if in_order else list(mesh.ranks),
        stream=stream,
    )
    return relax.Call(tvm.ir.Op.get(NAME), [x], attrs)


def _mesh(given: Any, ranks: Any) -> Mesh:
    if isinstance(given, Mapping):
        given = list(given.items())
    lists = (list, tuple, tvm_ffi.Array)
    if not isinstance(given, lists):
        raise arguments.wrong_type("place: mesh", _MESH, given)
    if not all(isinstance(axis, lists) and len(axis) == 2 for axis in given):
        raise arguments.wrong_value("place: mesh", _MESH, given)
    names = [name for name, _ in given]
    if any(not isinstance(name, str) for name in names) or len(set(names)) != len(names):
        raise arguments.wrong_value("place: mesh", f"{_MESH}, each name once", given)
    return Mesh(dict(map(tuple, given)), ranks)


def mesh_of(attrs: PlaceAttrs) -> Mesh:
    """Return the mesh of a place."""
    return _mesh(attrs.mesh, attrs.ranks)


def infer(call: relax.Call, _builder: relax.BlockBuilder | None = None) -> relax.TensorType:
    """Return the type of the tensor; raise ValueError where a rule is broken."""
    attrs = call.attrs
    mesh = mesh_of(attrs)
    placements = placements_of(mesh, attrs.placements)
    if len(call.args) != 1 or not isinstance(call.args[0].ty, relax.TensorType):
        raise ValueError(f"place: x is one tensor, not {[str(x.ty) for x in call.args]}")
    ty = call.args[0].ty
    ndim = int(ty.ndim)
    named = [("stream", attrs.stream)] if attrs.stream is not None else []
    sharded = _sharded(mesh, placements)
    for what, axis in [*((f"S[{axis}]", axis) for axis in sharded), *named]:
        if axis < 0 or axis >= ndim >= 0:
            raise ValueError(f"place: {what}: there is no axis {axis} in {ty}")
    reductions = {one.reduction for one in placements if isinstance(one, Partial)}
    if len(reductions) > 1:
        both = " and ".join(sorted(reductions))
        raise ValueError(f"place: partial results are of one reduction, not of {both}")
    for reduction in reductions:
        _check_reduced(reduction, ty)
    return ty


def _sharded(mesh: Mesh, placements: Placements) -> list[int]:
    """Return the axes of the tensor that are divided, each of which is divided once."""
    by_axis: dict[int, str] = {}
    for name, one in zip(mesh.axes, placements, strict=True):
        if not isinstance(one, Shard):
            continue
        if one.axis in by_axis:
            raise ValueError(
                f"place: axis {one.axis} is sharded along {by_axis[one.axis]!r} and {name!r}; an "
                "axis of a tensor is divided once: give a mesh on which these are one axis"
            )
        by_axis[one.axis] = name
    return list(by_axis)


def _check_reduced(reduction: str, ty: relax.TensorType) -> None:
    if ty.dtype is None:
        return
    dtype = str(ty.dtype.dtype)
    if not reduces(reduction, dtype):
        raise ValueError(f"place: the runtime has no {reduction} of {dtype}")


def _no_gradient(*_: Any) -> Any:
    raise ValueError(f"{NAME} has no gradient; differentiate the program before it is placed")


tvm.ir.register_op_attr(NAME, "FInferType", infer)
tvm.ir.register_op_attr(NAME, "FPurity", True)
tvm.ir.register_op_attr(NAME, "FPrimalGradient", _no_gradient)
tvm.ir.Op.get(NAME).set_attrs_type_key("tvm_ipc.PlaceAttrs")
