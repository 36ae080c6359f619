# SPDX-License-Identifier: Apache-2.0
"""Parameters that are several weights of a source: experts that a program has in one tensor.

    names = {"experts.up": stack([f"experts.{k}.up.weight" for k in range(8)])}

They are joined where they are read, on the ranks, of which each reads its parts of them alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tvm_ipc import arguments
from tvm_ipc.weights.held import Held
from tvm_ipc.weights.stored import Stored


@dataclass(frozen=True)
class Joined:
    """Names of weights that are one parameter; `stack` and `concat` make it.

    Attributes
    ----------
    parts : in their order.
    axis : along which they are joined.
    new : whether that is a new axis, of which each has one index.
    """

    parts: tuple[Name, ...]
    axis: int
    new: bool


#: What the weight of a parameter is called in a source.
Name: TypeAlias = "str | Joined"


@dataclass(frozen=True)
class Piece:
    """A tensor of a source, as a box of a whole.

    Attributes
    ----------
    begin : where the box begins, along each axis of the whole.
    shape : its extents; those of the tensor, and ones.
    tensor : what is there.
    """

    begin: tuple[int, ...]
    shape: tuple[int, ...]
    tensor: Stored | Held


@dataclass(frozen=True)
class Whole:
    """A parameter as its source has it.

    Attributes
    ----------
    dtype : of all of it.
    shape : its extents.
    pieces : that fill it.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def stack(names: Sequence[Name], axis: int = 0) -> Joined:
    """Return the name of weights that are one parameter, each an index of a new axis of it."""
    return _joined("stack", names, axis, new=True)


def concat(names: Sequence[Name], axis: int = 0) -> Joined:
    """Return the name of weights that are one parameter, one after the other along an axis."""
    return _joined("concat", names, axis, new=False)


def _joined(where: str, names: Any, axis: Any, *, new: bool) -> Joined:
    wanted = "names of weights, at least one, or what stack and concat return"
    if isinstance(names, (str, bytes, Mapping)) or not isinstance(names, Sequence):
        raise arguments.wrong_type(f"{where}: names", wanted, names)
    for one in names:
        if not isinstance(one, Joined):
            arguments.text(f"{where}: names, one", one)
    if not names:
        raise arguments.wrong_value(f"{where}: names", wanted, names)
    axis = arguments.integer(f"{where}: axis", axis, "the number of an axis, 0 or more")
    return Joined(tuple(names), axis, new)


def leaves(name: Name) -> Iterator[str]:
    """Yield all names of a name."""
    if isinstance(name, str):
        yield name
    else:
        for part in name.parts:
            yield from leaves(part)


def whole_of(name: Name, tensors: Mapping[str, Stored | Held]) -> Whole:
    """Return what a name means; raise ValueError where weights cannot be joined."""
    if isinstance(name, str):
        one = tensors[name]
        return Whole(one.dtype, one.shape, (Piece((0,) * len(one.shape), one.shape, one),))
    parts = [whole_of(part, tensors) for part in name.parts]
    axis, first = name.axis, parts[0]
    if axis >= len(first.shape) + name.new:
        raise ValueError(f"they are {first.shape}, and have no axis {axis}")
    for part in parts:
        if part.dtype != first.dtype:
            raise ValueError(f"some are {first.dtype}, and others {part.dtype}")
        others = part.shape if name.new else part.shape[:axis] + part.shape[axis + 1 :]
        wanted = first.shape if name.new else first.shape[:axis] + first.shape[axis + 1 :]
        if others != wanted:
            raise ValueError(f"some are {first.shape}, and others {part.shape}")
    pieces = []
    end = 0
    for part in parts:
        for piece in part.pieces:
            begin, shape = list(piece.begin), list(piece.shape)
            if name.new:
                begin.insert(axis, end)
                shape.insert(axis, 1)
            else:
                begin[axis] += end
            pieces.append(Piece(tuple(begin), tuple(shape), piece.tensor))
        end += 1 if name.new else part.shape[axis]
    shape = list(first.shape)
    if name.new:
        shape.insert(axis, end)
    else:
        shape[axis] = end
    return Whole(first.dtype, tuple(shape), tuple(pieces))
