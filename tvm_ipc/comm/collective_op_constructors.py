# SPDX-License-Identifier: Apache-2.0
"""Create calls of `relax.comm.collective` from the arguments of the operator functions.

`OPERATORS` are these functions, such as `allreduce`, which are generated from the entries of the
collectives. `team` is "world", "group", a team of ranks, or several teams of equal size,
as `Mesh.teams` returns them. A program does not contain the number of ranks in "world" or
"group". Pass it as the argument `workers` to collectives that need it, for example because the
shape of their result depends on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from tvm import relax

from tvm_ipc import arguments
from tvm_ipc.comm.collective_attrs import KNOWN_BACKENDS, REDUCTIONS, CollectiveAttrs, teams_of
from tvm_ipc.comm.collective_relax_op import make
from tvm_ipc.comm.extent_arithmetic import constant, is_integer
from tvm_ipc.packed_functions import KINDS, MAX_WORKERS
from tvm_ipc.packed_functions.generate_collective_functions import define_operators


def construct(
    name: str, x: relax.Expr, team: Any, backend: str, workers: int | None = None, **options: Any
) -> relax.Call:
    """Return a collective of a kind; `options` are the other arguments of its function."""
    kind = KINDS[name]
    attributes: dict[str, Any] = {}
    operands: list[Any] = []
    if kind.reduces:
        reduction = options["reduction"]
        attributes["reduction"] = arguments.one_of(f"{name}: reduction", reduction, REDUCTIONS)
        if options["scale"] is not None:
            attributes["scale"] = arguments.finite(f"{name}: scale", options["scale"])
    for attribute, has in (("split_axis", kind.splits), ("concat_axis", kind.concatenates)):
        if has:
            option = attribute if attribute in options else "axis"
            attributes[attribute] = arguments.integer(
                f"{name}: {option}", options[option], "an axis of x, from 0 on", 0, 2**31 - 1
            )
    if "source" in options:
        peers = [_peer(name, option, options[option]) for option in ("source", "target")]
        if any(isinstance(peer, relax.Expr) for peer in peers):
            operands += peers
        else:
            attributes["pairs"] = [peers]
    elif kind.paired:
        attributes["pairs"] = _pairs(name, options["pairs"])
    if "uneven" in options:
        attributes["uneven"] = arguments.flag(f"{name}: uneven", options["uneven"])
    if options.get("extent") is not None:
        attributes["uneven"] = True
        operands.append(_extent(name, options["extent"]))
    if workers is not None:
        wanted = f"the number of ranks in a team, 1 to {MAX_WORKERS}, or None"
        workers = arguments.integer(f"{name}: workers", workers, wanted, 1, MAX_WORKERS)
    if not isinstance(team, str):
        teams = teams_of(name, team)
        if workers not in (None, len(teams[0])):
            raise ValueError(f"{name}: workers is {workers}, but a team has {len(teams[0])} ranks")
        team, workers = [list(ranks) for ranks in teams], len(teams[0])
    if kind.rooted:
        root, outside = _root(name, options["root"], options["root_rank"], team)
        if outside is None:
            operands.insert(0, root)
        else:
            attributes["root_rank"] = outside
    arguments.one_of(f"{name}: backend", backend, KNOWN_BACKENDS)
    attrs = CollectiveAttrs(name, team=team, workers=workers or 0, backend=backend, **attributes)
    return make(x, operands, attrs)


def _root(name: str, root: Any, rank: Any, team: Any) -> tuple[Any, int | None]:
    """Return the index of the root in its team, or its rank if it is not in the team."""
    if rank is None:
        return root, None
    wanted = f"the rank of the root, 0 to {MAX_WORKERS - 1}, or None"
    rank = arguments.integer(f"{name}: root_rank", rank, wanted, 0, MAX_WORKERS - 1)
    if constant(root) != 0:
        raise ValueError(
            f"{name}: root is {root} and root_rank is {rank}; pass one of them: an index in the "
            "team, or a rank"
        )
    if team == "world":
        return rank, None
    if isinstance(team, str) or len(team) > 1:
        raise ValueError(
            f"{name}: root_rank is {rank}, but there are several teams; pass root, an index in each"
        )
    return (team[0].index(rank), None) if rank in team[0] else (0, rank)


def _peer(name: str, option: str, peer: Any) -> Any:
    """Return a sender or receiver: a number, or a symbolic integer."""
    wanted = "an index in the team, from 0 on, a number or a symbolic integer"
    if not isinstance(peer, relax.Expr):
        return arguments.integer(f"{name}: {option}", peer, wanted, 0, MAX_WORKERS - 1)
    if not is_integer(peer):
        raise arguments.wrong_type(f"{name}: {option}", wanted, peer)
    number = constant(peer)
    return peer if number is None else _peer(name, option, number)


def _pairs(name: str, pairs: Any) -> list[list[int]]:
    """Return the pairs of a sender and a receiver."""
    wanted = "pairs of indices in the team, such as [[0, 1], [1, 0]]"
    if isinstance(pairs, (str, bytes, dict)) or not isinstance(pairs, Iterable):
        raise arguments.wrong_type(f"{name}: pairs", wanted, pairs)
    try:
        return [
            list(arguments.integers(f"{name}: pairs", pair, wanted, 0, MAX_WORKERS - 1))
            for pair in pairs
        ]
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: pairs is {wanted}, not {arguments.quote(pairs)}") from None


def _extent(name: str, extent: Any) -> relax.ShapeExpr:
    """Return the operand that specifies the extent of the result."""
    wanted = "the extent of the result, a number or a symbolic int64"
    if not isinstance(extent, relax.Expr):
        extent = arguments.integer(f"{name}: extent", extent, wanted, 0, 2**63 - 1)
    elif not is_integer(extent) or str(extent.ty) != "int64":  # as all extents are
        raise arguments.wrong_type(f"{name}: extent", wanted, extent)
    return relax.ShapeExpr([extent])


#: The operator functions by name; type checkers know them from the stub.
OPERATORS: Final = define_operators(
    {
        "__name__": "tvm_ipc.comm",
        "Any": Any,
        "Sequence": Sequence,
        "construct": construct,
        "relax": relax,
    }
)
