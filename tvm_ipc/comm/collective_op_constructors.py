# SPDX-License-Identifier: Apache-2.0
"""The collectives as functions, each of which returns a call of `relax.comm.collective`.

`team` is "world", "group", a team of ranks, or the teams into which all ranks are split, as
`Mesh.teams` returns them. A program does not contain the number of ranks in "world" or "group".
Pass it as the argument `workers` to collectives that need it, for example because the shape of
their result depends on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tvm import relax

from tvm_ipc import arguments
from tvm_ipc.comm.collective_attrs import KNOWN_BACKENDS, REDUCTIONS, CollectiveAttrs, teams_of
from tvm_ipc.comm.collective_relax_op import make
from tvm_ipc.comm.extent_arithmetic import is_integer
from tvm_ipc.packed_functions import MAX_WORKERS


def allreduce(
    x: relax.Expr, reduction: str = "sum", *, team: Any = "world", backend: str = "auto"
) -> relax.Call:
    """Return the reduction of the tensors of all ranks, bit for bit the same on each rank.

    Parameters
    ----------
    x : the tensor of this rank.
    reduction : "sum", "prod", "min", "max" or "avg".
    team : "world", "group", a team of ranks, or the teams into which the ranks are split, as
        `Mesh.teams` returns them.
    backend : the backend that runs the collective; "auto" is the backend of the session.

    Returns
    -------
    relax.Call
        The call, with the type of `x`.

    Examples
    --------
    >>> import tvm
    >>> main = tvm.script.from_source('''
    ... @R.function
    ... def main(x: R.Tensor((4, 8), "float32")):
    ...     return R.comm.allreduce(x, "sum")
    ... ''')
    >>> main.ret_ty
    R.Tensor((4, 8), dtype="float32")
    """
    return _collective("allreduce", x, (), team, reduction=reduction, backend=backend)


def reduce_scatter(
    x: relax.Expr,
    reduction: str = "sum",
    *,
    axis: int = 0,
    team: Any = "world",
    workers: int | None = None,
    uneven: bool = False,
    backend: str = "auto",
) -> relax.Call:
    """Reduce the tensors of all ranks, and return this rank's shard of the result along an axis.

    Parameters
    ----------
    x : the tensor of this rank.
    reduction : "sum", "prod", "min", "max" or "avg".
    axis : the axis of `x` that is split.
    team : "world", "group", a team of ranks, or the teams into which the ranks are split, as
        `Mesh.teams` returns them.
    workers : the number of ranks in a team; required for "world" and "group".
    uneven : True allows an extent of `axis` that is not a multiple of the number of ranks. All
        shards then have the same extent, rounded up, and what lies beyond the end of `axis` is 0.
    backend : the backend that runs the collective; "auto" is the backend of the session.

    Returns
    -------
    relax.Call
        The call, with the type of a shard.

    Examples
    --------
    >>> import tvm
    >>> main = tvm.script.from_source('''
    ... @R.function
    ... def main(x: R.Tensor((4, 8), "float32")):
    ...     return R.comm.reduce_scatter(x, axis=1, workers=2)
    ... ''')
    >>> main.ret_ty
    R.Tensor((4, 4), dtype="float32")
    """
    return _collective(
        "reduce_scatter",
        x,
        (),
        team,
        workers,
        reduction=reduction,
        split_axis=_axis("reduce_scatter: axis", axis),
        uneven=uneven,
        backend=backend,
    )


def reduce(
    x: relax.Expr,
    reduction: str = "sum",
    root: Any = 0,
    *,
    team: Any = "world",
    backend: str = "auto",
) -> relax.Call:
    """Return, on the root, the reduction of the tensors of all ranks.

    On other ranks the result is undefined.

    Parameters
    ----------
    x : the tensor of this rank.
    reduction : "sum", "prod", "min", "max" or "avg".
    root : the index of the root in its team, a number or a symbolic integer.
    team : "world", "group", a team of ranks, or the teams into which the ranks are split, as
        `Mesh.teams` returns them.
    backend : the backend that runs the collective; "auto" is the backend of the session.

    Returns
    -------
    relax.Call
        The call, with the type of `x` on every rank.

    Examples
    --------
    >>> import tvm
    >>> main = tvm.script.from_source('''
    ... @R.function
    ... def main(x: R.Tensor((4, 8), "float32")):
    ...     return R.comm.reduce(x, "max", root=1)
    ... ''')
    >>> main.ret_ty
    R.Tensor((4, 8), dtype="float32")
    """
    return _collective("reduce", x, (root,), team, reduction=reduction, backend=backend)


def allgather(
    x: relax.Expr,
    *,
    axis: int = 0,
    team: Any = "world",
    workers: int | None = None,
    extent: Any = None,
    backend: str = "auto",
) -> relax.Call:
    """Return the tensors of all ranks, concatenated along an axis.

    Parameters
    ----------
    x : the tensor of this rank.
    axis : the axis along which tensors are concatenated.
    team : "world", "group", a team of ranks, or the teams into which the ranks are split, as
        `Mesh.teams` returns them.
    workers : the number of ranks in a team; required for "world" and "group".
    extent : the extent of the result along the axis, if shards are uneven; rows beyond it are
        dropped.
    backend : the backend that runs the collective; "auto" is the backend of the session.

    Returns
    -------
    relax.Call
        The call, with the type of the concatenation.

    Examples
    --------
    >>> import tvm
    >>> main = tvm.script.from_source('''
    ... @R.function
    ... def main(x: R.Tensor((4, 8), "float32")):
    ...     return R.comm.allgather(x, workers=2)
    ... ''')
    >>> main.ret_ty
    R.Tensor((8, 8), dtype="float32")

    Uneven shards: two ranks have 4 rows each. The last row of the second rank is padding, so the
    result has 7 rows.

    >>> main = tvm.script.from_source('''
    ... @R.function
    ... def main(x: R.Tensor((4, 8), "float32")):
    ...     return R.comm.allgather(x, workers=2, extent=7)
    ... ''')
    >>> main.ret_ty
    R.Tensor((7, 8), dtype="float32")
    """
    uneven, operands = _uneven_extent("allgather", extent)
    return _collective(
        "allgather",
        x,
        operands,
        team,
        workers,
        concat_axis=_axis("allgather: axis", axis),
        uneven=uneven,
        backend=backend,
    )


def gather(
    x: relax.Expr,
    root: Any = 0,
    *,
    axis: int = 0,
    team: Any = "world",
    workers: int | None = None,
    extent: Any = None,
    backend: str = "auto",
) -> relax.Call:
    """Return, on the root, the concatenation of the tensors of all ranks.

    On other ranks the result is undefined.

    Parameters
    ----------
    x : the tensor of this rank.
    root : the index of the root in its team, a number or a symbolic integer.
    axis : the axis along which tensors are concatenated.
    team : "world", "group", a team of ranks, or the teams into which the ranks are split, as
        `Mesh.teams` returns them.
    workers : the number of ranks in a team; required for "world" and "group".
    extent : the extent of the result along the axis, if shards are uneven; rows beyond it are
        dropped.
    backend : the backend that runs the collective; "auto" is the backend of the session.

    Returns
    -------
    relax.Call
        The call, with the type of the concatenation on every rank.

    Examples
    --------
    >>> import tvm
    >>> main = tvm.script.from_source('''
    ... @R.function
    ... def main(x: R.Tensor((4, 8), "float32")):
    ...     return R.comm.gather(x, root=0, workers=2)
    ... ''')
    >>> main.ret_ty
    R.Tensor((8, 8), dtype="float32")
    """
    uneven, operands = _uneven_extent("gather", extent)
    return _collective(
        "gather",
        x,
        (root, *operands),
        team,
        workers,
        concat_axis=_axis("gather: axis", axis),
        uneven=uneven,
        backend=backend,
    )


def broadcast(
    x: relax.Expr, root: Any = 0, *, team: Any = "world", backend: str = "auto"
) -> relax.Call:
    """Return the tensor of the root.

    Parameters
    ----------
    x : the tensor; only the root's is read.
    root : the index of the root in its team, a number or a symbolic integer.
    team : "world", "group", a team of ranks, or the teams into which the ranks are split, as
        `Mesh.teams` returns them.
    backend : the backend that runs the collective; "auto" is the backend of the session.

    Returns
    -------
    relax.Call
        The call, with the type of `x`.

    Examples
    --------
    >>> import tvm
    >>> main = tvm.script.from_source('''
    ... @R.function
    ... def main(x: R.Tensor((4, 8), "float32")):
    ...     return R.comm.broadcast(x, root=1)
    ... ''')
    >>> main.ret_ty
    R.Tensor((4, 8), dtype="float32")
    """
    return _collective("broadcast", x, (root,), team, backend=backend)


def scatter(
    x: relax.Expr,
    root: Any = 0,
    *,
    axis: int = 0,
    team: Any = "world",
    workers: int | None = None,
    uneven: bool = False,
    backend: str = "auto",
) -> relax.Call:
    """Split the root's tensor along an axis, and return this rank's shard.

    Parameters
    ----------
    x : the tensor; only the root's is read.
    root : the index of the root in its team, a number or a symbolic integer.
    axis : the axis of `x` that is split.
    team : "world", "group", a team of ranks, or the teams into which the ranks are split, as
        `Mesh.teams` returns them.
    workers : the number of ranks in a team; required for "world" and "group".
    uneven : True allows an extent of `axis` that is not a multiple of the number of ranks. All
        shards then have the same extent, rounded up, and what lies beyond the end of `axis` is 0.
    backend : the backend that runs the collective; "auto" is the backend of the session.

    Returns
    -------
    relax.Call
        The call, with the type of a shard.

    Examples
    --------
    >>> import tvm
    >>> main = tvm.script.from_source('''
    ... @R.function
    ... def main(x: R.Tensor((4, 8), "float32")):
    ...     return R.comm.scatter(x, root=0, workers=2)
    ... ''')
    >>> main.ret_ty
    R.Tensor((2, 8), dtype="float32")
    """
    return _collective(
        "scatter",
        x,
        (root,),
        team,
        workers,
        split_axis=_axis("scatter: axis", axis),
        uneven=uneven,
        backend=backend,
    )


def take_shard(
    x: relax.Expr,
    *,
    axis: int = 0,
    team: Any = "world",
    workers: int | None = None,
    uneven: bool = False,
    backend: str = "auto",
) -> relax.Call:
    """Split this rank's own tensor along an axis, and return the shard with this rank's index.

    If all ranks have the same tensor, the result is that of `scatter`, without communication.

    Parameters
    ----------
    x : the tensor of this rank.
    axis : the axis of `x` that is split.
    team : "world", "group", a team of ranks, or the teams into which the ranks are split, as
        `Mesh.teams` returns them.
    workers : the number of ranks in a team; required for "world" and "group".
    uneven : True allows an extent of `axis` that is not a multiple of the number of ranks. All
        shards then have the same extent, rounded up, and what lies beyond the end of `axis` is 0.
    backend : the backend that runs the collective; "auto" is the backend of the session.

    Returns
    -------
    relax.Call
        The call, with the type of a shard.

    Examples
    --------
    >>> import tvm
    >>> main = tvm.script.from_source('''
    ... @R.function
    ... def main(x: R.Tensor((4, 8), "float32")):
    ...     return R.comm.take_shard(x, axis=1, workers=4)
    ... ''')
    >>> main.ret_ty
    R.Tensor((4, 2), dtype="float32")
    """
    return _collective(
        "take_shard",
        x,
        (),
        team,
        workers,
        split_axis=_axis("take_shard: axis", axis),
        uneven=uneven,
        backend=backend,
    )


def all_to_all(
    x: relax.Expr,
    split_axis: int = 0,
    concat_axis: int = 0,
    *,
    team: Any = "world",
    workers: int | None = None,
    extent: Any = None,
    backend: str = "auto",
) -> relax.Call:
    """Split the tensor of each rank along an axis, and exchange the shards.

    This rank gets its shard of every rank's tensor. The result is their concatenation along
    `concat_axis`.

    Parameters
    ----------
    x : the tensor of this rank.
    split_axis : the axis that is split among the ranks.
    concat_axis : the axis along which the shards of all ranks are concatenated.
    team : "world", "group", a team of ranks, or the teams into which the ranks are split, as
        `Mesh.teams` returns them.
    workers : the number of ranks in a team; required for "world" and "group".
    extent : the extent of the result along `concat_axis`, as in `allgather`. If it is given, shards
        along `split_axis` may be uneven too.
    backend : the backend that runs the collective; "auto" is the backend of the session.

    Returns
    -------
    relax.Call
        The call, with the type of the concatenated shards.

    Examples
    --------
    >>> import tvm
    >>> main = tvm.script.from_source('''
    ... @R.function
    ... def main(x: R.Tensor((4, 8), "float32")):
    ...     return R.comm.all_to_all(x, split_axis=1, concat_axis=0, workers=2)
    ... ''')
    >>> main.ret_ty
    R.Tensor((8, 4), dtype="float32")
    """
    uneven, operands = _uneven_extent("all_to_all", extent)
    return _collective(
        "all_to_all",
        x,
        operands,
        team,
        workers,
        split_axis=_axis("all_to_all: split_axis", split_axis),
        concat_axis=_axis("all_to_all: concat_axis", concat_axis),
        uneven=uneven,
        backend=backend,
    )


def permute(
    x: relax.Expr,
    pairs: Sequence[Sequence[int]],
    *,
    team: Any = "world",
    workers: int | None = None,
    backend: str = "auto",
) -> relax.Call:
    """Return the tensor of the rank that sends to this one, or zeros if no rank does.

    Parameters
    ----------
    x : the tensor of this rank.
    pairs : pairs of a sender and a receiver, by their indices in the team.
    team : "world", "group", a team of ranks, or the teams into which the ranks are split, as
        `Mesh.teams` returns them.
    workers : the number of ranks in a team; required for "world" and "group".
    backend : the backend that runs the collective; "auto" is the backend of the session.

    Returns
    -------
    relax.Call
        The call, with the type of `x`.

    Examples
    --------
    Each rank receives the tensor of the rank before it, in a ring of 2.

    >>> import tvm
    >>> main = tvm.script.from_source('''
    ... @R.function
    ... def main(x: R.Tensor((4, 8), "float32")):
    ...     return R.comm.permute(x, [[0, 1], [1, 0]], workers=2)
    ... ''')
    >>> main.ret_ty
    R.Tensor((4, 8), dtype="float32")
    """
    wanted = "pairs of indices in the team, such as [[0, 1], [1, 0]]"
    if isinstance(pairs, (str, bytes, dict)) or not isinstance(pairs, Iterable):
        raise arguments.wrong_type("permute: pairs", wanted, pairs)
    try:
        checked = [
            list(arguments.integers("permute: pairs", pair, wanted, 0, MAX_WORKERS - 1))
            for pair in pairs
        ]
    except (TypeError, ValueError) as error:
        raise type(error)(f"permute: pairs is {wanted}, not {arguments.quote(pairs)}") from None
    return _collective("permute", x, (), team, workers, pairs=checked, backend=backend)


def send_recv(
    x: relax.Expr,
    source: int,
    target: int,
    *,
    team: Any = "world",
    workers: int | None = None,
    backend: str = "auto",
) -> relax.Call:
    """On the rank `target`, return the tensor of the rank `source`; on other ranks, zeros.

    Parameters
    ----------
    x : the tensor of this rank.
    source : the index of the sender in its team.
    target : the index of the receiver in its team.
    team : "world", "group", a team of ranks, or the teams into which the ranks are split, as
        `Mesh.teams` returns them.
    workers : the number of ranks in a team; required for "world" and "group".
    backend : the backend that runs the collective; "auto" is the backend of the session.

    Returns
    -------
    relax.Call
        The call, with the type of `x`.

    Examples
    --------
    >>> import tvm
    >>> main = tvm.script.from_source('''
    ... @R.function
    ... def main(x: R.Tensor((4, 8), "float32")):
    ...     return R.comm.send_recv(x, source=0, target=1, workers=2)
    ... ''')
    >>> main.ret_ty
    R.Tensor((4, 8), dtype="float32")
    """
    wanted = "an index in the team, from 0 on"
    pairs = [
        [
            arguments.integer("send_recv: source", source, wanted, 0, MAX_WORKERS - 1),
            arguments.integer("send_recv: target", target, wanted, 0, MAX_WORKERS - 1),
        ]
    ]
    return _collective("send_recv", x, (), team, workers, pairs=pairs, backend=backend)


def _uneven_extent(kind: str, extent: Any) -> tuple[bool, tuple[Any, ...]]:
    """Return whether shards are uneven, and the operands that specify the extent of the result."""
    if extent is None:
        return False, ()
    wanted = "the extent of the result, a number or a symbolic int64"
    if not isinstance(extent, relax.Expr):
        extent = arguments.integer(f"{kind}: extent", extent, wanted, 0, 2**63 - 1)
    elif not is_integer(extent) or str(extent.ty) != "int64":  # as all extents are
        raise arguments.wrong_type(f"{kind}: extent", wanted, extent)
    return True, (relax.ShapeExpr([extent]),)


def _axis(name: str, axis: Any) -> int:
    return arguments.integer(name, axis, "an axis of x, from 0 on", 0, 2**31 - 1)


def _collective(
    kind: str,
    x: relax.Expr,
    operands: Sequence[Any],
    team: Any,
    workers: int | None = None,
    *,
    backend: str,
    **attributes: Any,
) -> relax.Call:
    wanted = f"the number of ranks in a team, 1 to {MAX_WORKERS}, or None"
    if workers is not None:
        workers = arguments.integer(f"{kind}: workers", workers, wanted, 1, MAX_WORKERS)
    if isinstance(team, str):
        count = workers or 0
    else:
        teams = teams_of(kind, team)
        count = len(teams[0])
        if workers not in (None, count):
            raise ValueError(f"{kind}: workers is {workers}, but a team has {count} ranks")
        team = [list(ranks) for ranks in teams]
    if "reduction" in attributes:
        arguments.one_of(f"{kind}: reduction", attributes["reduction"], REDUCTIONS)
    if "uneven" in attributes:
        arguments.flag(f"{kind}: uneven", attributes["uneven"])
    arguments.one_of(f"{kind}: backend", backend, KNOWN_BACKENDS)
    attrs = CollectiveAttrs(kind, team=team, workers=count, backend=backend, **attributes)
    return make(x, operands, attrs)
