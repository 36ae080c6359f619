# SPDX-License-Identifier: Apache-2.0
"""The result of each kind of collective, computed with NumPy: one row for each kind.

Tests of packed functions, of operators and of random programs compare with these.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvm_ipc.packed_functions import KINDS

Array = np.ndarray[Any, Any]
Arrays = Sequence[Array]


def cut(x: Array, count: int, axis: int = 0) -> list[Array]:
    """Return shards of equal extent; zeros after the end fill the last ones."""
    if x.shape[axis] % count:
        width = [(0, -extent % count if k == axis else 0) for k, extent in enumerate(x.shape)]
        x = np.pad(x, width)
    return np.split(x, count, axis)


def join(shards: Arrays, axis: int = 0, extent: int | None = None) -> Array:
    """Return the concatenation of shards, up to an extent if one is given."""
    whole = np.concatenate(shards, axis)
    return whole if extent is None else whole.take(range(extent), axis)


def reduced(xs: Arrays, reduction: str = "sum") -> Array:
    """Reduce in a wider type; a sum of truth values is whether one is true."""
    dtype = xs[0].dtype
    wide = {"b": "int64", "i": "int64", "u": "uint64"}.get(dtype.kind, "float64")
    functions = {
        **{"sum": np.sum, "prod": np.prod, "min": np.min, "max": np.max, "avg": np.mean},
        "tree_sum": np.sum,
        "band": np.bitwise_and.reduce,
        "bor": np.bitwise_or.reduce,
        "bxor": np.bitwise_xor.reduce,
    }
    return np.asarray(functions[reduction]([x.astype(wide) for x in xs], axis=0)).astype(dtype)


@dataclass(frozen=True)
class Member:
    """A member of a team: its index, what all members send, and the options of the collective."""

    sent: Arrays
    index: int
    reduce: Callable[[Arrays], Array] = reduced
    root: int = 0
    sources: Sequence[int] = ()  #: whom each member receives from, -1 for nobody
    split_axis: int = 0
    concat_axis: int = 0
    extent: int | None = None  #: of concatenated shards, if not all that they have

    def shard(self, whole: Array) -> Array:
        """Return the member's shard."""
        return cut(whole, len(self.sent), self.split_axis)[self.index]

    def joined(self, shards: Arrays) -> Array:
        """Return the concatenation of one shard of each member."""
        return join(shards, self.concat_axis, self.extent)

    def received(self) -> Array:
        """Return the tensor of the member's source; zeros if it has none."""
        source = self.sources[self.index]
        return self.sent[source] if source >= 0 else np.zeros_like(self.sent[self.index])


RESULTS: dict[str, Callable[[Member], Array]] = {
    "allreduce": lambda member: member.reduce(member.sent),
    "reduce_scatter": lambda member: member.shard(member.reduce(member.sent)),
    "reduce": lambda member: member.reduce(member.sent),
    "allgather": lambda member: member.joined(member.sent),
    "gather": lambda member: member.joined(member.sent),
    "broadcast": lambda member: member.sent[member.root],
    "scatter": lambda member: member.shard(member.sent[member.root]),
    "take_shard": lambda member: member.shard(member.sent[member.index]),
    "all_to_all": lambda member: member.joined([member.shard(x) for x in member.sent]),
    "permute": Member.received,
    "send_recv": Member.received,
}


def result_of(name: str, member: Member) -> Array | None:
    """Return a member's result of a collective; None if it has none."""
    if KINDS[name].result_on_root and member.index != member.root:
        return None
    return RESULTS[name](member)


def results_of(name: str, xs: Arrays, **options: Any) -> list[Any]:
    """Return the result of each member of a team.

    The options are those of the function in `tvm_ipc.comm`.
    """
    sources = [-1] * len(xs)
    pairs = options.get("pairs", ())
    if "source" in options:
        pairs = [(options["source"], options["target"])]
    for source, target in pairs:
        sources[target] = source
    axis = options.get("axis", 0)
    given = (
        lambda some: reduced(some, options.get("reduction", "sum")),
        options.get("root", 0),
        sources,
        options.get("split_axis", axis),
        options.get("concat_axis", axis),
        options.get("extent"),
    )
    return [result_of(name, Member(xs, index, *given)) for index in range(len(xs))]


def call_and_results(
    name: str, *args: Any, **options: Any
) -> tuple[Callable[[Any], Any], Callable[[Arrays], list[Any]]]:
    """Return a collective of `tvm_ipc.comm` as a function of its tensor, and its results."""
    from tvm_ipc import comm  # workers without TVM's compiler import this module too

    function = getattr(comm, name)
    given = inspect.signature(function).bind(None, *args, **options).arguments
    del given["x"]
    return lambda x: function(x, **given), lambda xs: results_of(name, xs, **given)
