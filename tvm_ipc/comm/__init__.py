# SPDX-License-Identifier: Apache-2.0
"""Communication in Relax programs: meshes of ranks, and collectives as one operator.

    from tvm_ipc import comm

    mesh = comm.Mesh({"pp": 2, "tp": 4})
    y = comm.allgather(x, axis=1, team=mesh.teams("tp"))

In TVMScript the same functions are `R.comm.allgather` and so on, once this module is imported. What
is printed is the operator, `R.comm.collective`, with all of its attributes, which parses again.

A collective along an axis divides a tensor into parts of equal extent, one for each rank of a team,
or joins them. Uneven ones are those of an extent that the ranks do not divide: all ranks but the
last have the extent divided by the ranks, rounded up, and the last ones what is left, or nothing.
Their tensors all have the largest part's shape, so that one program serves all ranks.

`LegalizeOps` lowers collectives; `get_pipeline` has it.

`post`, `wait` and `view` are for programs that say themselves when communication happens; `show`,
`peer` and `hide` for those whose ranks read each other's tensors where they lie.

`comm.place` says of a tensor what each rank of a mesh has of it. Programs that have it are written
for all ranks together, and `tvm_ipc.transform.LowerPlacements` makes of them what one rank runs.

Meshes and placements are there in a process with TVM's runtime alone too (`tvm_ipc.runtime_only`).
"""

import sys
from typing import TYPE_CHECKING, NoReturn

import tvm.base

from tvm_ipc.comm.division import Division
from tvm_ipc.comm.mesh import Mesh, Teams
from tvm_ipc.comm.placements import Partial, Placement, Replica, Shard

# The rest is of programs, which a process with TVM's runtime alone cannot have.
if "tvm_compiler" in tvm.base._LOADED_LIBS:
    import tvm.relax.script.parser

    from tvm_ipc.comm import legalize as _legalize  # noqa: F401 - registers it
    from tvm_ipc.comm.attributes import CollectiveAttrs
    from tvm_ipc.comm.kinds import KINDS, Kind
    from tvm_ipc.comm.operator import collective
    from tvm_ipc.comm.operators import (
        all_to_all,
        allgather,
        allreduce,
        broadcast,
        gather,
        permute,
        reduce,
        reduce_scatter,
        scatter,
        send_recv,
        take_part,
    )
    from tvm_ipc.comm.place_operator import PlaceAttrs, place
    from tvm_ipc.comm.shows import hide, join, part, peer, reduce_parts, show
    from tvm_ipc.comm.works import post, view, wait

    #: TVMScript finds them as `R.comm`: the first module is what programs import, the second what
    #: parses texts.
    for _script in (tvm.relax.script, tvm.relax.script.parser):
        setattr(_script, "comm", sys.modules[__name__])  # noqa: B010 - TVM's module declares no such name
elif not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        raise AttributeError(
            f"tvm_ipc.comm has no {name!r} where TVM's runtime is loaded without its compiler"
        )


__all__ = [
    "KINDS",
    "CollectiveAttrs",
    "Division",
    "Kind",
    "Mesh",
    "Partial",
    "PlaceAttrs",
    "Placement",
    "Replica",
    "Shard",
    "Teams",
    "all_to_all",
    "allgather",
    "allreduce",
    "broadcast",
    "collective",
    "gather",
    "hide",
    "join",
    "part",
    "peer",
    "permute",
    "place",
    "post",
    "reduce",
    "reduce_parts",
    "reduce_scatter",
    "scatter",
    "send_recv",
    "show",
    "take_part",
    "view",
    "wait",
]
