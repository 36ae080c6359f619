# SPDX-License-Identifier: Apache-2.0
"""The choice of regions whose chunks are computed on several streams of a GPU."""

from __future__ import annotations

from typing import Final

from tvm_ipc.analysis.elementwise_ops import BROADCASTING, UNARY
from tvm_ipc.analysis.views_and_writes_of_calls import operator_of
from tvm_ipc.packed_functions import MAX_STREAMS
from tvm_ipc.spmd.rules.operation import short_name
from tvm_ipc.spmd.streams.find_marked_region import MarkedRegion
from tvm_ipc.transform.overlap.compute_streams import describe

#: Operators whose kernels use only their operands and results. Kernels of others, such as sorts,
#: may share a workspace of the rank, which kernels on two streams would overwrite.
_WITHOUT_WORKSPACE: Final = frozenset(
    f"relax.{name}"
    for name in (
        *UNARY,
        *BROADCASTING,
        *("matmul", "permute_dims", "reshape", "expand_dims", "squeeze", "broadcast_to"),
        *("strided_slice", "concat", "sum", "max", "min", "prod"),
    )
)


def streams_of(region: MarkedRegion, streams: int) -> tuple[int, str]:
    """Return the number of streams of a GPU on which the chunks of a region are computed.

    The second value continues the description of the schedule in the report. If the chunks stay on
    one stream although they are computed several at a time, it gives the reason.
    """
    operators = [member for member in region.members.values() if member.attrs is None]
    number = min(streams, region.chunks)
    if not operators or number < 2:
        return 1, ""
    if region.ring is not None:
        return 1, ", computed on one stream: a ring multiplies one shard at a time"
    if number > MAX_STREAMS:
        return 1, f", computed on one stream: a rank has {MAX_STREAMS} streams"
    for member in operators:
        if operator_of(member.step.value) not in _WITHOUT_WORKSPACE:
            name = short_name(member.step.value)
            return 1, f", computed on one stream: the kernels of R.{name} may share a workspace"
    return number, describe(number)
