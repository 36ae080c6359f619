# SPDX-License-Identifier: Apache-2.0
"""The kinds of collectives: what each of them does to a tensor."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Final

from tvm_ipc.contract import Function
from tvm_ipc.contract.collectives import (
    ALL_TO_ALL,
    ALLGATHER,
    ALLREDUCE,
    BROADCAST,
    GATHER,
    PERMUTE,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
)
from tvm_ipc.contract.programs import PLACE_IN_TEAM


@dataclass(frozen=True)
class Kind:
    """What all collectives of a kind have in common.

    Attributes
    ----------
    name : in attributes and errors.
    function : the packed function that does it; of `take_part`, which needs no other rank, what
        tells which part it is.
    reduces : whether the tensors of the ranks become one by a reduction.
    rooted : whether one rank, the root, is the only one that sends, or that receives.
    splits : whether the tensor is divided among the ranks along an axis.
    joins : whether the tensors of the ranks are put one after the other along an axis.
    paired : whether pairs of ranks say who sends to whom.
    """

    name: str
    function: Function
    _: KW_ONLY
    reduces: bool = False
    rooted: bool = False
    splits: bool = False
    joins: bool = False
    paired: bool = False


#: All kinds, by name.
KINDS: Final = {
    kind.name: kind
    for kind in (
        Kind("allreduce", ALLREDUCE, reduces=True),
        Kind("reduce_scatter", REDUCE_SCATTER, reduces=True, splits=True),
        Kind("reduce", REDUCE, reduces=True, rooted=True),
        Kind("allgather", ALLGATHER, joins=True),
        Kind("gather", GATHER, rooted=True, joins=True),
        Kind("broadcast", BROADCAST, rooted=True),
        Kind("scatter", SCATTER, rooted=True, splits=True),
        Kind("take_part", PLACE_IN_TEAM, splits=True),
        Kind("all_to_all", ALL_TO_ALL, splits=True, joins=True),
        Kind("permute", PERMUTE, paired=True),
        Kind("send_recv", PERMUTE, paired=True),
    )
}
