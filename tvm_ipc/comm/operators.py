# SPDX-License-Identifier: Apache-2.0
"""The collectives as functions, each of which makes the one operator.

`team` is "world", "group", one team of ranks, or the teams into which ranks are divided, as
`Mesh.teams` gives them. What "world" and "group" are is known when a session runs the program, so
where parts are divided or joined, `workers` says how many ranks they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tvm import relax

from tvm_ipc import arguments
from tvm_ipc.comm.attributes import KNOWN_BACKENDS, REDUCTIONS, CollectiveAttrs, teams_of
from tvm_ipc.comm.extents import is_integer
from tvm_ipc.comm.operator import make
from tvm_ipc.contract import MAX_WORKERS


def allreduce(
    x: relax.Expr, reduction: str = "sum", *, team: Any = "world", backend: str = "auto"
) -> relax.Call:
    """Return the reduction of the tensors of all ranks, with the same bits on each of them."""
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
    """Return the rank's part, along an axis, of what an all-reduce would give.

    Parameters
    ----------
    uneven : whether the extent need not be a multiple of the ranks. Each part then has as many
        rows as the largest one, and what is beyond the end is 0.
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
    """Return on the root what an all-reduce would give, and on other ranks nothing defined."""
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
    """Return the tensors of all ranks, one after the other along an axis.

    Parameters
    ----------
    extent : of the result along the axis, if parts are uneven; what is beyond it is left out.
    """
    uneven, operands = _whole("allgather", extent)
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
    """Return on the root what `allgather` would give, and on other ranks nothing defined."""
    uneven, operands = _whole("gather", extent)
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
    """Return the tensor of the root."""
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
    """Return the rank's part, along an axis, of the tensor of the root; see `reduce_scatter`."""
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


def take_part(
    x: relax.Expr,
    *,
    axis: int = 0,
    team: Any = "world",
    workers: int | None = None,
    uneven: bool = False,
    backend: str = "auto",
) -> relax.Call:
    """Return the rank's part, along an axis, of its own tensor; see `reduce_scatter`.

    Where all ranks have the same tensor that is what `scatter` gives, and nobody waits.
    """
    return _collective(
        "take_part",
        x,
        (),
        team,
        workers,
        split_axis=_axis("take_part: axis", axis),
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
    """Return what all ranks have for this one: parts along one axis, joined along another one.

    Parameters
    ----------
    extent : as in `allgather`; parts along `split_axis` may be uneven then, too.
    """
    uneven, operands = _whole("all_to_all", extent)
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
    """Return the tensor of the rank that sends to this one, zeros where none does.

    Parameters
    ----------
    pairs : places in the team: the one that sends, and the one that receives.
    """
    wanted = "pairs of places in the team, such as [[0, 1], [1, 0]]"
    if isinstance(pairs, (str, bytes, dict)) or not isinstance(pairs, Iterable):
        raise arguments.wrong_type("permute: pairs", wanted, pairs)
    try:
        most = MAX_WORKERS - 1
        listed = [list(arguments.integers("permute: pairs", one, wanted, 0, most)) for one in pairs]
    except (TypeError, ValueError) as error:
        raise type(error)(f"permute: pairs is {wanted}, not {arguments.show(pairs)}") from None
    return _collective("permute", x, (), team, workers, pairs=listed, backend=backend)


def send_recv(
    x: relax.Expr,
    source: int,
    target: int,
    *,
    team: Any = "world",
    workers: int | None = None,
    backend: str = "auto",
) -> relax.Call:
    """Return the tensor of one place on another one, and zeros on the others."""
    wanted = "a place in the team, from 0 on"
    pairs = [
        [
            arguments.integer("send_recv: source", source, wanted, 0, MAX_WORKERS - 1),
            arguments.integer("send_recv: target", target, wanted, 0, MAX_WORKERS - 1),
        ]
    ]
    return _collective("send_recv", x, (), team, workers, pairs=pairs, backend=backend)


def _whole(kind: str, extent: Any) -> tuple[bool, tuple[Any, ...]]:
    """Return whether parts are uneven, and what says how long they are together."""
    if extent is None:
        return False, ()
    wanted = "the extent of the whole, a number or a symbolic int64"
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
    wanted = f"how many ranks a team has, 1 to {MAX_WORKERS}, or None"
    if workers is not None:
        workers = arguments.integer(f"{kind}: workers", workers, wanted, 1, MAX_WORKERS)
    if isinstance(team, str):
        count = workers or 0
    else:
        teams = teams_of(kind, team)
        count = len(teams[0])
        if workers not in (None, count):
            raise ValueError(f"{kind}: workers is {workers}, and a team has {count} ranks")
        team = [list(one) for one in teams]
    if "reduction" in attributes:
        arguments.one_of(f"{kind}: reduction", attributes["reduction"], REDUCTIONS)
    if "uneven" in attributes:
        arguments.flag(f"{kind}: uneven", attributes["uneven"])
    arguments.one_of(f"{kind}: backend", backend, KNOWN_BACKENDS)
    attrs = CollectiveAttrs(kind, team=team, workers=count, backend=backend, **attributes)
    return make(x, operands, attrs)
