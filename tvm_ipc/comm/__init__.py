# SPDX-License-Identifier: Apache-2.0
"""Communication in Relax programs: meshes of ranks, and collectives as one operator.

    from tvm_ipc import comm

    mesh = comm.Mesh({"pp": 2, "tp": 4})
    y = comm.allgather(x, axis=1, team=mesh.teams("tp"))

The same functions are available in TVMScript as `R.comm.allgather` and so on. Programs are printed
with the operator, `R.comm.collective`, and all of its attributes; the printed text parses again.

A collective along an axis splits a tensor into shards of equal extent, one for each rank of a team,
or concatenates the shards of all ranks. Uneven shards are for an extent that is not a multiple of
the ranks: each rank has the extent divided by the ranks, rounded up, and the last ranks have the
remainder or nothing. Every shard is padded to the shape of the largest one, so that all ranks run
the same program.

The pass `LegalizeOps` lowers collectives; `get_pipeline` contains it.

`start`, `wait` and `view` are for programs that schedule communication explicitly. `expose`,
`peer_view` and `release` are for programs whose ranks read each other's tensors without a copy.

`comm.place` specifies which part of a tensor each rank of a mesh has. Programs that use it are
written for all ranks together; `tvm_ipc.spmd.LowerPlacements` lowers them to what each rank runs.

Meshes and placements also exist in a process that loads only TVM's runtime
(`tvm_ipc.runtime_only`).
"""

import sys
from typing import TYPE_CHECKING, NoReturn

import tvm.base

from tvm_ipc.comm.axis_block_sharding import Division
from tvm_ipc.comm.mesh import Mesh, Teams
from tvm_ipc.comm.placements import Partial, Placement, Replica, Shard

# The rest builds programs, which TVM's runtime without its compiler cannot do.
if "tvm_compiler" in tvm.base._LOADED_LIBS:
    import tvm.relax.script.parser

    from tvm_ipc.comm import legalize as _legalize  # noqa: F401 - registers it
    from tvm_ipc.comm.collective_attrs import CollectiveAttrs
    from tvm_ipc.comm.collective_kinds import KINDS, Kind
    from tvm_ipc.comm.collective_op_constructors import (
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
        take_shard,
    )
    from tvm_ipc.comm.collective_relax_op import collective
    from tvm_ipc.comm.peer_tensor_call_builders import (
        assemble,
        expose,
        own_slice,
        peer_view,
        reduce_slices,
        release,
    )
    from tvm_ipc.comm.place_op import PlaceAttrs, place
    from tvm_ipc.comm.start_wait_call_builders import start, view, wait

    #: TVMScript finds them as `R.comm`: programs import the first module, the parser the second.
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
    "assemble",
    "broadcast",
    "collective",
    "expose",
    "gather",
    "own_slice",
    "peer_view",
    "permute",
    "place",
    "reduce",
    "reduce_scatter",
    "reduce_slices",
    "release",
    "scatter",
    "send_recv",
    "start",
    "take_shard",
    "view",
    "wait",
]
