# SPDX-License-Identifier: Apache-2.0
"""What the ranks along an axis of a mesh have of a tensor.

    Replica()           all of it, the same on each rank           printed as "R"
    Shard(0)            a part each, along axis 0                  "S[0]"
    Shard(0, "8/2+4/2") likewise, of 8 indices and of the next 4   "S[0: 8/2+4/2]"
    Partial("sum")      a tensor each, whose sum is the tensor     "P[sum]"

Parts along an axis that the ranks do not divide have the extent of the largest one, with zeros
beyond the end, as those of uneven collectives. Other ways to divide an axis are in `division`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import tvm_ffi

from tvm_ipc import arguments
from tvm_ipc.comm.division import Division
from tvm_ipc.comm.mesh import Mesh
from tvm_ipc.contract import REDUCED_TYPES, ReduceKind

#: Reductions that may be done later.
PARTIAL_REDUCTIONS: Final = ("sum", "prod", "min", "max")


@dataclass(frozen=True)
class Replica:
    """Every rank has the tensor."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Shard:
    """Every rank has a part along an axis of the tensor.

    Parameters
    ----------
    axis : of the tensor.
    division : how it is divided, a `Division` or its text; None for consecutive parts.
    """

    axis: int
    division: Division | None = None

    def __post_init__(self) -> None:
        axis = arguments.integer("Shard: axis", self.axis, "an axis of the tensor, from 0 on")
        object.__setattr__(self, "axis", axis)
        given: Any = self.division
        if isinstance(given, str):
            object.__setattr__(self, "division", Division.of("Shard: division", given))
        elif given is not None:
            wanted = "a Division, its text, or None"
            arguments.instance("Shard: division", given, Division, wanted)

    def __str__(self) -> str:
        return f"S[{self.axis}]" if self.division is None else f"S[{self.axis}: {self.division}]"


@dataclass(frozen=True)
class Partial:
    """Every rank has a tensor, and what a reduction makes of them is the tensor."""

    reduction: str = "sum"

    def __post_init__(self) -> None:
        arguments.one_of("Partial: reduction", self.reduction, PARTIAL_REDUCTIONS)

    def __str__(self) -> str:
        return f"P[{self.reduction}]"


Placement: TypeAlias = Replica | Shard | Partial
#: By the axes of a mesh, in their order.
Placements: TypeAlias = tuple[Placement, ...]

_TEXT: Final = re.compile(
    r"R|S\[(?P<axis>\d+)(?:: *(?P<division>[^\]]+))?\]|P\[(?P<reduction>\w+)\]"
)
_WANTED: Final = "placements by axes of the mesh, such as {'tp': comm.Shard(0)}"


def placement_of(name: str, given: Any) -> Placement:
    """Return a placement that is given as it is, or as it is printed."""
    if isinstance(given, (Replica, Shard, Partial)):
        return given
    found = _TEXT.fullmatch(given) if isinstance(given, str) else None
    if found is None:
        wanted = "comm.Replica(), comm.Shard(axis) or comm.Partial(reduction)"
        raise (arguments.wrong_value if isinstance(given, str) else arguments.wrong_type)(
            name, wanted, given
        )
    if found["axis"] is not None:
        text = found["division"]
        return Shard(int(found["axis"]), Division.of(name, text) if text else None)
    return Replica() if found["reduction"] is None else Partial(found["reduction"])


def placements_of(mesh: Mesh, given: Any) -> Placements:
    """Return placements by the axes of a mesh, which are given by name, or all in their order.

    Along axes that are not named a tensor is replicated.
    """
    if isinstance(given, Mapping):
        unknown = [name for name in given if name not in mesh.axes]
        if unknown:
            raise ValueError(
                f"place: placements is by axes of the mesh, {', '.join(map(repr, mesh.axes))}, and "
                f"not by {unknown[0]!r}: {arguments.show(given)}"
            )
        listed = [given.get(name, Replica()) for name in mesh.axes]
    elif isinstance(given, (list, tuple, tvm_ffi.Array)):
        listed = list(given)
        if len(listed) != len(mesh.axes):
            raise ValueError(
                f"place: placements is one for each axis of {mesh}, not {arguments.show(given)}"
            )
    else:
        raise arguments.wrong_type("place: placements", _WANTED, given)
    return tuple(
        along(f"place: placements, along {name!r}", one, workers)
        for (name, workers), one in zip(mesh.axes.items(), listed, strict=True)
    )


def along(name: str, given: Any, workers: int) -> Placement:
    """Return a placement along an axis of a mesh with some ranks, in the one way to say it."""
    placement = placement_of(name, given)
    if not isinstance(placement, Shard) or placement.division is None:
        return placement
    why_not = placement.division.why_not(None, workers)
    if why_not:
        raise ValueError(f"{name}: {why_not}")
    return Shard(placement.axis) if placement.division.is_plain(workers) else placement


def show(mesh: Mesh, placements: Sequence[Placement]) -> str:
    """Return placements as messages show them."""
    shown = [f"{one} along {name!r}" for name, one in zip(mesh.axes, placements, strict=True)]
    return ", ".join(shown)


def reduces(reduction: str, dtype: str) -> bool:
    """Whether the runtime has a reduction of tensors of a type."""
    return dtype in REDUCED_TYPES and ReduceKind[reduction.upper()].takes(dtype)
