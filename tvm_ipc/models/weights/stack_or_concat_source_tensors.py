# SPDX-License-Identifier: Apache-2.0
"""Parameters that are fused from several tensors of a source, such as experts in one tensor.

    names = {"experts.up": stack([f"experts.{k}.up.weight" for k in range(8)])}

Each rank reads its slices of the tensors directly into its shard of the fused parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tvm_ipc import arguments
from tvm_ipc.models.weights.in_memory_weight_sources import HostTensor
from tvm_ipc.models.weights.tensor_in_file import FileTensor


@dataclass(frozen=True)
class Fused:
    """The names of tensors that form one parameter; call `stack` or `concat` to get one.

    Attributes
    ----------
    parts : the names, in order.
    axis : the axis along which the tensors are stacked or concatenated.
    new : True if the axis is a new one, as in `stack`.
    """

    parts: tuple[Name, ...]
    axis: int
    new: bool


#: The name of a parameter in a source: that of one tensor, or of several fused ones.
Name: TypeAlias = "str | Fused"


@dataclass(frozen=True)
class Piece:
    """A tensor of a source, and the box of the parameter that it fills.

    Attributes
    ----------
    begin : the first index of the box, along each axis of the parameter.
    shape : the shape of the box: that of the tensor, with ones for the new axes.
    tensor : the tensor.
    """

    begin: tuple[int, ...]
    shape: tuple[int, ...]
    tensor: FileTensor | HostTensor


@dataclass(frozen=True)
class SourceTensor:
    """A parameter as its source stores it.

    Attributes
    ----------
    dtype : the element type.
    shape : the shape.
    pieces : the tensors that fill it.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def stack(names: Sequence[Name], axis: int = 0) -> Fused:
    """Return the name of a parameter whose tensors are stacked along a new axis.

    Parameters
    ----------
    names : the names of the tensors in order, at least one; each may be fused itself.
    axis : the new axis, from 0 on.

    Returns
    -------
    Fused
        The name, for the `names` of `load_weights`.

    Examples
    --------
    >>> import numpy as np
    >>> import tvm_ipc
    >>> from tvm_ipc import comm, models
    >>> shards = {
    ...     "experts": tvm_ipc.spmd.ShardSpec(
    ...         "experts", "experts", (2, 3), "float32", comm.Mesh({"tp": 2}), (comm.Shard(0),)
    ...     )
    ... }
    >>> source = {"expert.0": np.zeros(3, "float32"), "expert.1": np.ones(3, "float32")}
    >>> names = {"experts": models.stack(["expert.0", "expert.1"])}
    >>> with tvm_ipc.Session(2) as session:
    ...     weights = tvm_ipc.load_weights(session, source, shards, names=names)
    ...     session.get(weights["experts"], rank=1).tolist()
    [[1.0, 1.0, 1.0]]
    """
    return _fuse("stack", names, axis, new=True)


def concat(names: Sequence[Name], axis: int = 0) -> Fused:
    """Return the name of a parameter whose tensors are concatenated along an axis.

    Parameters
    ----------
    names : the names of the tensors in order, at least one; each may be fused itself.
    axis : the axis, from 0 on.

    Returns
    -------
    Fused
        The name, for the `names` of `load_weights`.

    Examples
    --------
    >>> from tvm_ipc import models
    >>> names = {"qkv.weight": models.concat(["q.weight", "k.weight", "v.weight"])}
    """
    return _fuse("concat", names, axis, new=False)


def _fuse(where: str, names: Any, axis: Any, *, new: bool) -> Fused:
    wanted = "names of weights, at least one, or what stack and concat return"
    if isinstance(names, (str, bytes, Mapping)) or not isinstance(names, Sequence):
        raise arguments.wrong_type(f"{where}: names", wanted, names)
    for name in names:
        if not isinstance(name, Fused):
            arguments.text(f"{where}: names, one", name)
    if not names:
        raise arguments.wrong_value(f"{where}: names", wanted, names)
    axis = arguments.integer(f"{where}: axis", axis, "the number of an axis, 0 or more")
    return Fused(tuple(names), axis, new)


def leaf_names(name: Name) -> Iterator[str]:
    """Yield the names of all tensors of a name."""
    if isinstance(name, str):
        yield name
    else:
        for part in name.parts:
            yield from leaf_names(part)


def resolve(name: Name, tensors: Mapping[str, FileTensor | HostTensor]) -> SourceTensor:
    """Return the parameter of a name; raise ValueError if its tensors cannot be fused."""
    if isinstance(name, str):
        tensor = tensors[name]
        piece = Piece((0,) * len(tensor.shape), tensor.shape, tensor)
        return SourceTensor(tensor.dtype, tensor.shape, (piece,))
    parts = [resolve(part, tensors) for part in name.parts]
    axis, first = name.axis, parts[0]
    if axis >= len(first.shape) + name.new:
        raise ValueError(f"their shape is {first.shape}, which has no axis {axis}")
    for part in parts:
        if part.dtype != first.dtype:
            raise ValueError(f"some are {first.dtype}, and others {part.dtype}")
        extents = part.shape if name.new else part.shape[:axis] + part.shape[axis + 1 :]
        expected = first.shape if name.new else first.shape[:axis] + first.shape[axis + 1 :]
        if extents != expected:
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
    return SourceTensor(first.dtype, tuple(shape), tuple(pieces))
