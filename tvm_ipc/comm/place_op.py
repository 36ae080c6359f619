# SPDX-License-Identifier: Apache-2.0
"""The placement operator `relax.comm.place`, which distributes tensors of global-view programs.

    y = comm.place(x, mesh, {"tp": comm.Shard(0)})

In the global view the operator is the identity; it specifies which part of `y` each rank of the
mesh has. `tvm_ipc.spmd.LowerPlacements` turns a global-view program into the program of a rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import tvm
import tvm_ffi
from tvm import relax

from tvm_ipc import arguments
from tvm_ipc.comm.default_free_attrs import attributes_of, without_defaults
from tvm_ipc.comm.mesh import Mesh
from tvm_ipc.comm.placements import Partial, Placements, Shard, placements_of, reduces

NAME: Final = "relax.comm.place"
_MESH: Final = "a Mesh, or names and extents of its axes, such as [['dp', 2], ['tp', 4]]"


@dataclass(frozen=True, eq=False)
class PlaceAttrs:
    """Attributes of the operator `relax.comm.place`, in plain values.

    `PlaceAttrs.of(call)` returns those of a call. The call itself has only the attributes that
    differ from their defaults, in the `tvm.ir.DictAttrs` that `call.attrs` is.

    Attributes
    ----------
    mesh : names and extents of the axes of the mesh, in order.
    placements : the `str` of a placement for each axis of the mesh.
    ranks : the ranks in row-major order of the mesh, None if they are 0, 1, 2 and so on.
    stream : the axis of the tensor along which it is computed in chunks, None for none.
    force : whether it is computed in chunks even if that is predicted to be slower.
    inserted : whether a planner inserted the operator. It moves data then, and does not specify the
        layout of a parameter or a result of the function.

    Examples
    --------
    >>> from tvm import relax
    >>> from tvm.script import relax as R
    >>> from tvm_ipc import comm
    >>> x = relax.Var("x", R.Tensor((4, 8), "float32"))
    >>> call = comm.place(x, comm.Mesh({"tp": 2}), {"tp": comm.Shard(0)})
    >>> call
    R.comm.place(x, mesh=[["tp", 2]], placements=["S[0]"])
    >>> comm.PlaceAttrs.of(call).inserted
    False
    """

    mesh: Any
    placements: Any
    ranks: Any = None
    stream: int | None = None
    inserted: bool = False
    force: bool = False

    @classmethod
    def of(cls, call: relax.Call) -> PlaceAttrs:
        """Return the attributes of a call of the operator.

        Parameters
        ----------
        call : a call of `relax.comm.place`.

        Returns
        -------
        PlaceAttrs
            All attributes, with the defaults of those that the call does not have.

        Raises
        ------
        ValueError
            The call has an attribute that placements do not have, or lacks one without default.

        Examples
        --------
        >>> from tvm import relax
        >>> from tvm.script import relax as R
        >>> from tvm_ipc import comm
        >>> x = relax.Var("x", R.Tensor((4, 8), "float32"))
        >>> call = comm.place(x, comm.Mesh({"tp": 2}), {"tp": comm.Shard(0)})
        >>> list(comm.PlaceAttrs.of(call).placements)
        ['S[0]']
        """
        return attributes_of(cls, "place", call.attrs)


def place(
    x: relax.Expr,
    mesh: Any,
    placements: Any,
    *,
    ranks: Any = None,
    stream: int | None = None,
    force: bool = False,
    inserted: bool = False,
) -> relax.Call:
    """Return the tensor, distributed over the ranks of a mesh as the placements specify.

    Parameters
    ----------
    x : the tensor.
    mesh : a `Mesh`, or names and extents of its axes, which is the form in which programs are
        printed.
    placements : a mapping from names of axes of the mesh to `Replica()`, `Shard(axis)` or
        `Partial(reduction)`; the tensor is replicated along axes that are not named. Or a list
        with a placement for each axis of the mesh.
    ranks : the ranks of a mesh that is given by names and extents, as in `Mesh`.
    stream : the axis along which the tensor, and the operators and collectives before it, are
        computed in chunks: each chunk is computed while others are communicated. None for no
        chunks.
    force : whether the tensor is computed in chunks even if a calibration predicts that this is
        slower. It needs `stream`.
    inserted : whether a planner inserts the operator. A parameter or a result has the layout that
        the first operator without this flag specifies; `parallelize` sets it.

    Returns
    -------
    relax.Call
        The call, with the type of `x`: programs for all ranks have whole tensors.

    Raises
    ------
    ValueError
        The mesh lacks an axis that the placements name, a placement has the wrong form, or `force`
        is passed without `stream`. An axis
        that `x` lacks is an error when the program is built.

    Examples
    --------
    >>> import tvm
    >>> from tvm_ipc.spmd import LowerPlacements
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class Model:
    ...     @R.function
    ...     def main(x: R.Tensor((4, 8), "float32")):
    ...         return R.exp(R.comm.place(x, [["tp", 2]], ["S[0]"]))
    ... ''')
    >>> mod["main"].ret_ty
    R.Tensor((4, 8), dtype="float32")

    Each rank runs this program on its shard:

    >>> LowerPlacements()(mod)["main"].params[0].ty
    R.Tensor((2, 8), dtype="float32")
    """
    if not isinstance(x, relax.Expr):
        raise arguments.wrong_type("place: x", "an expression of a tensor", x)
    if isinstance(mesh, Mesh):
        if ranks is not None:
            wanted = "None if mesh is a Mesh, which has its own ranks"
            raise arguments.wrong_value("place: ranks", wanted, ranks)
    else:
        mesh = _mesh(mesh, ranks)
    in_order = mesh.ranks == tuple(range(len(mesh.ranks)))
    if stream is not None:
        stream = arguments.integer("place: stream", stream, "an axis of x, from 0 on, or None")
    if arguments.flag("place: force", force) and stream is None:
        raise ValueError("place: force is True, but stream is None; pass the axis of chunks")
    attrs = PlaceAttrs(
        mesh=[[name, extent] for name, extent in mesh.axes.items()],
        placements=[str(placement) for placement in placements_of(mesh, placements)],
        ranks=None if in_order else list(mesh.ranks),
        stream=stream,
        inserted=arguments.flag("place: inserted", inserted),
        force=force,
    )
    return relax.Call(tvm.ir.Op.get(NAME), [x], without_defaults(attrs))


def _mesh(axes: Any, ranks: Any) -> Mesh:
    """Return the mesh with these names and extents of axes."""
    if isinstance(axes, Mapping):
        axes = list(axes.items())
    lists = (list, tuple, tvm_ffi.Array)
    if not isinstance(axes, lists):
        raise arguments.wrong_type("place: mesh", _MESH, axes)
    if not all(isinstance(axis, lists) and len(axis) == 2 for axis in axes):
        raise arguments.wrong_value("place: mesh", _MESH, axes)
    names = [name for name, _ in axes]
    if any(not isinstance(name, str) for name in names) or len(set(names)) != len(names):
        raise arguments.wrong_value("place: mesh", f"{_MESH}, each name once", axes)
    return Mesh(dict(map(tuple, axes)), ranks)


def is_place(value: Any) -> bool:
    """Return whether an expression is a call of `relax.comm.place`."""
    return type(value) is relax.Call and bool(value.op.same_as(_OP))


def mesh_of(call: relax.Call) -> Mesh:
    """Return the mesh of a placement operator."""
    attrs = PlaceAttrs.of(call)
    return _mesh(attrs.mesh, attrs.ranks)


def infer(call: relax.Call, _builder: relax.BlockBuilder | None = None) -> relax.TensorType:
    """Return the type of the tensor; raise ValueError if the placements do not fit it."""
    attrs = PlaceAttrs.of(call)
    mesh = mesh_of(call)
    placements = placements_of(mesh, attrs.placements)
    if len(call.args) != 1 or not isinstance(call.args[0].ty, relax.TensorType):
        types = [str(arg.ty) for arg in call.args]
        raise ValueError(f"place: the arguments have the types {types}; expected one tensor")
    ty = call.args[0].ty
    ndim = int(ty.ndim)
    axes = [(f"S[{axis}]", axis) for axis in _sharded_axes(mesh, placements)]
    if attrs.stream is not None:
        axes.append(("stream", attrs.stream))
    for source, axis in axes:
        if axis < 0 or axis >= ndim >= 0:
            raise ValueError(f"place: {source}: there is no axis {axis} in {ty}")
    reductions = {placement.reduction for placement in placements if isinstance(placement, Partial)}
    if len(reductions) > 1:
        raise ValueError(
            f"place: partial results have the reductions {' and '.join(sorted(reductions))}; "
            "expected the same reduction along all axes of the mesh"
        )
    for reduction in reductions:
        _check_reduction(reduction, ty)
    return ty


def _sharded_axes(mesh: Mesh, placements: Placements) -> list[int]:
    """Return the axes of the tensor that are sharded; raise ValueError if one is sharded twice."""
    mesh_axes: dict[int, str] = {}
    for name, placement in zip(mesh.axes, placements, strict=True):
        if not isinstance(placement, Shard):
            continue
        axis = placement.axis
        if axis in mesh_axes:
            raise ValueError(
                f"place: axis {axis} is sharded along {mesh_axes[axis]!r} and {name!r}; an axis of "
                "a tensor can be sharded once: use a mesh in which these two axes are one"
            )
        mesh_axes[axis] = name
    return list(mesh_axes)


def _check_reduction(reduction: str, ty: relax.TensorType) -> None:
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
_OP: Final = tvm.ir.Op.get(NAME)
_OP.set_attrs_type_key("ir.DictAttrs")
