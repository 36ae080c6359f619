# SPDX-License-Identifier: Apache-2.0
"""The kinds of collectives, and the properties that lowering and type inference need."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Final

from tvm_ipc.packed_functions import Function
from tvm_ipc.packed_functions.collective_declarations import (
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
from tvm_ipc.packed_functions.program_function_declarations import TEAM_INDEX


@dataclass(frozen=True)
class Kind:
    """Properties that all collectives of a kind share.

    Attributes
    ----------
    name : the name in attributes and errors.
    function : the packed function that runs it. For `take_shard`, which does not communicate, the
        function that returns the index of the shard.
    reduces : whether the tensors of the ranks are reduced.
    rooted : whether only one rank, the root, sends or receives.
    splits : whether the tensor is split among the ranks along an axis.
    concatenates : whether the tensors of the ranks are concatenated along an axis.
    paired : whether pairs of ranks specify senders and receivers.

    Examples
    --------
    >>> from tvm_ipc import comm
    >>> comm.KINDS["allgather"].concatenates
    True
    >>> sorted(name for name, kind in comm.KINDS.items() if kind.rooted)
    ['broadcast', 'gather', 'reduce', 'scatter']
    """

    name: str
    function: Function
    _: KW_ONLY
    reduces: bool = False
    rooted: bool = False
    splits: bool = False
    concatenates: bool = False
    paired: bool = False


#: All kinds, by name.
KINDS: Final = {
    kind.name: kind
    for kind in (
        Kind("allreduce", ALLREDUCE, reduces=True),
        Kind("reduce_scatter", REDUCE_SCATTER, reduces=True, splits=True),
        Kind("reduce", REDUCE, reduces=True, rooted=True),
        Kind("allgather", ALLGATHER, concatenates=True),
        Kind("gather", GATHER, rooted=True, concatenates=True),
        Kind("broadcast", BROADCAST, rooted=True),
        Kind("scatter", SCATTER, rooted=True, splits=True),
        Kind("take_shard", TEAM_INDEX, splits=True),
        Kind("all_to_all", ALL_TO_ALL, splits=True, concatenates=True),
        Kind("permute", PERMUTE, paired=True),
        Kind("send_recv", PERMUTE, paired=True),
    )
}
