# SPDX-License-Identifier: Apache-2.0
"""Placements: which part of a tensor each rank along an axis of a mesh has.

    Replica()           the whole tensor on each rank              printed as "R"
    Shard(0)            a shard on each rank, along axis 0         "S[0]"
    Shard(0, "8/2+4/2") shards of 8 indices and of the next 4      "S[0: 8/2+4/2]"
    Partial("sum")      a term on each rank, to be summed          "P[sum]"

If the extent is not a multiple of the ranks, shards have the extent of the largest one, with zeros
beyond the end, as those of uneven collectives. `axis_division` describes other divisions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import tvm_ffi

from tvm_ipc import arguments
from tvm_ipc.comm.axis_block_sharding import Division
from tvm_ipc.comm.mesh import Mesh
from tvm_ipc.packed_functions import REDUCED_TYPES, ReduceKind

#: Reductions that can be deferred.
PARTIAL_REDUCTIONS: Final = ("sum", "prod", "min", "max")


@dataclass(frozen=True)
class Replica:
    """Placement in which every rank has the whole tensor.

    Examples
    --------
    >>> from tvm_ipc import comm
    >>> print(comm.Replica())
    R
    """

    def __str__(self) -> str:
        """Return "R", as programs print the placement."""
        return "R"


@dataclass(frozen=True)
class Shard:
    """Placement in which every rank has a shard along an axis of the tensor.

    Parameters
    ----------
    axis : the axis of the tensor.
    division : a `Division` of the axis or its text; None for consecutive shards.

    Examples
    --------
    >>> from tvm_ipc import comm
    >>> print(comm.Shard(1), comm.Shard(0, "8/2+4/2"))
    S[1] S[0: 8/2+4/2]
    """

    axis: int
    division: Division | None = None

    def __post_init__(self) -> None:
        """Check the axis, and parse a division that is given as text."""
        axis = arguments.integer("Shard: axis", self.axis, "an axis of the tensor, from 0 on")
        object.__setattr__(self, "axis", axis)
        division: Any = self.division
        if isinstance(division, str):
            object.__setattr__(self, "division", Division.of("Shard: division", division))
        elif division is not None:
            wanted = "a Division, its text, or None"
            arguments.instance("Shard: division", division, Division, wanted)

    def __str__(self) -> str:
        """Return "S[axis]" or "S[axis: division]", as programs print the placement."""
        return f"S[{self.axis}]" if self.division is None else f"S[{self.axis}: {self.division}]"


def has_equal_blocks(placement: Shard, extent: int, workers: int) -> bool:
    """Return whether rank r has the r-th of equal blocks of an axis."""
    if extent % workers:
        return False
    if placement.division is None:
        return True
    table = placement.division.table(workers)
    return bool(np.array_equal(table, np.arange(extent).reshape(workers, -1)))


@dataclass(frozen=True)
class Partial:
    """Placement in which the tensor is the reduction of the tensors of the ranks.

    Parameters
    ----------
    reduction : "sum", "prod", "min" or "max".

    Examples
    --------
    >>> from tvm_ipc import comm
    >>> print(comm.Partial("max"))
    P[max]
    """

    reduction: str = "sum"

    def __post_init__(self) -> None:
        """Check that the reduction can be deferred."""
        arguments.one_of("Partial: reduction", self.reduction, PARTIAL_REDUCTIONS)

    def __str__(self) -> str:
        """Return "P[reduction]", as programs print the placement."""
        return f"P[{self.reduction}]"


Placement: TypeAlias = Replica | Shard | Partial
#: A placement for each axis of a mesh, in order.
Placements: TypeAlias = tuple[Placement, ...]

_TEXT: Final = re.compile(
    r"R|S\[(?P<axis>\d+)(?:: *(?P<division>[^\]]+))?\]|P\[(?P<reduction>\w+)\]"
)
_WANTED: Final = "placements by axes of the mesh, such as {'tp': comm.Shard(0)}"


def placement_of(name: str, value: Any) -> Placement:
    """Return a placement, or parse its printed text; raise an error that begins with `name`."""
    if isinstance(value, (Replica, Shard, Partial)):
        return value
    match = _TEXT.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        wanted = "comm.Replica(), comm.Shard(axis) or comm.Partial(reduction)"
        raise (arguments.wrong_value if isinstance(value, str) else arguments.wrong_type)(
            name, wanted, value
        )
    if match["axis"] is not None:
        text = match["division"]
        return Shard(int(match["axis"]), Division.of(name, text) if text else None)
    return Replica() if match["reduction"] is None else Partial(match["reduction"])


def placements_of(mesh: Mesh, placements: Any) -> Placements:
    """Return a placement for each axis of a mesh from a mapping by name or a list.

    A tensor is replicated along axes that a mapping does not name.
    """
    if isinstance(placements, Mapping):
        unknown = [name for name in placements if name not in mesh.axes]
        if unknown:
            raise ValueError(
                f"place: placements is {arguments.quote(placements)}, but the mesh has no axis "
                f"{unknown[0]!r}; its axes are {', '.join(map(repr, mesh.axes))}"
            )
        in_order = [placements.get(name, Replica()) for name in mesh.axes]
    elif isinstance(placements, (list, tuple, tvm_ffi.Array)):
        in_order = list(placements)
        if len(in_order) != len(mesh.axes):
            raise ValueError(
                f"place: placements is {arguments.quote(placements)}; expected one for each axis "
                f"of {mesh}"
            )
    else:
        raise arguments.wrong_type("place: placements", _WANTED, placements)
    return tuple(
        along(f"place: placements, along {name!r}", placement, workers)
        for (name, workers), placement in zip(mesh.axes.items(), in_order, strict=True)
    )


def along(name: str, value: Any, workers: int) -> Placement:
    """Return a placement along an axis of a mesh, in canonical form.

    Parameters
    ----------
    name : the beginning of error messages.
    value : a placement or its text.
    workers : the number of ranks along the axis of the mesh.
    """
    placement = placement_of(name, value)
    if not isinstance(placement, Shard) or placement.division is None:
        return placement
    why_not = placement.division.why_not(None, workers)
    if why_not:
        raise ValueError(f"{name}: {why_not}")
    return Shard(placement.axis) if placement.division.is_plain(workers) else placement


def format_placements(mesh: Mesh, placements: Sequence[Placement]) -> str:
    """Return placements as messages print them."""
    return ", ".join(
        f"{placement} along {name!r}" for name, placement in zip(mesh.axes, placements, strict=True)
    )


def reduces(reduction: str, dtype: str) -> bool:
    """Return whether the runtime has a reduction of tensors of an element type."""
    return dtype in REDUCED_TYPES and ReduceKind[reduction.upper()].takes(dtype)
