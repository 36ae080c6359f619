# SPDX-License-Identifier: Apache-2.0
"""Communication in Relax programs: meshes of ranks, and collectives as one operator.

    from tvm_ipc import comm

    mesh = comm.Mesh({"pp": 2, "tp": 4})
    y = comm.allgather(x, axis=1, team=mesh.teams("tp"))

The same functions are available in TVMScript as `R.comm.allgather` and so on. Programs are printed
with the operator, `R.comm.collective`, and its attributes except those that have their defaults;
the printed text parses again.

A collective along an axis splits a tensor into shards of equal extent, one for each rank of a team,
or concatenates the shards of all ranks. Uneven shards are for an extent that is not a multiple of
the ranks: each rank has the extent divided by the ranks, rounded up, and the last ranks have the
remainder or nothing. Every shard is padded to the shape of the largest one, so that all ranks run
the same program.

The pass `LegalizeOps` lowers collectives; `get_pipeline` contains it.

`ragged_all_to_all` sends numbers of rows that are known at run time. `moe_dispatch` and
`moe_combine` send the tokens of a mixture of experts with it, and `moe` is the whole feed-forward.

`start`, `wait` and `view` are for programs that schedule communication explicitly. `expose`,
`peer_view` and `release` are for programs whose ranks read each other's tensors without a copy.
`set_stream` and `wait_stream` run kernels on several streams of a GPU.

`comm.place` specifies which part of a tensor each rank of a mesh has. Programs that use it are
written for all ranks together; `tvm_ipc.spmd.LowerPlacements` lowers them to what each rank runs.

Meshes and placements also exist in a process that loads only TVM's runtime
(`tvm_ipc.runtime_only`).
"""

import importlib
import sys
from typing import TYPE_CHECKING, NoReturn

from tvm_ipc.comm.axis_block_sharding import Division
from tvm_ipc.comm.mesh import Mesh, Teams
from tvm_ipc.comm.placements import Partial, Placement, Replica, Shard
from tvm_ipc.packed_functions import KINDS, Kind
from tvm_ipc.tvm_private_names import SCRIPT_MODULES, has_compiler, set_script_namespace

# The rest builds programs, which TVM's runtime without its compiler cannot do.
if has_compiler():
    from tvm_ipc.comm import legalize as _legalize  # noqa: F401 - registers it
    from tvm_ipc.comm.collective_attrs import CollectiveAttrs
    from tvm_ipc.comm.collective_op_constructors import OPERATORS
    from tvm_ipc.comm.collective_relax_op import collective
    from tvm_ipc.comm.expert_ops import (
        DispatchAttrs,
        MoeAttrs,
        expert_matmul,
        moe,
        moe_combine,
        moe_dispatch,
    )
    from tvm_ipc.comm.peer_tensor_call_builders import (
        assemble,
        expose,
        own_slice,
        peer_view,
        reduce_slices,
        release,
    )
    from tvm_ipc.comm.place_op import PlaceAttrs, place
    from tvm_ipc.comm.ragged_all_to_all_op import RaggedAttrs, ragged_all_to_all
    from tvm_ipc.comm.start_wait_call_builders import start, view, wait
    from tvm_ipc.comm.stream_call_builders import set_stream, wait_stream

    if TYPE_CHECKING:
        from tvm_ipc.packed_functions.generated_collective_functions import *  # noqa: F403
    else:
        globals().update(OPERATORS)

    #: TVMScript finds them as `R.comm`: programs import the first module, the parser the second.
    for _script in SCRIPT_MODULES:
        set_script_namespace(importlib.import_module(_script), sys.modules[__name__])
elif not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        raise AttributeError(
            f"tvm_ipc.comm has no {name!r} where TVM's runtime is loaded without its compiler"
        )


__all__ = [
    "KINDS",
    "CollectiveAttrs",
    "DispatchAttrs",
    "Division",
    "Kind",
    "Mesh",
    "MoeAttrs",
    "Partial",
    "PlaceAttrs",
    "Placement",
    "RaggedAttrs",
    "Replica",
    "Shard",
    "Teams",
    "assemble",
    "collective",
    "expert_matmul",
    "expose",
    "moe",
    "moe_combine",
    "moe_dispatch",
    "own_slice",
    "peer_view",
    "place",
    "ragged_all_to_all",
    "reduce_slices",
    "release",
    "set_stream",
    "start",
    "view",
    "wait",
    "wait_stream",
]
__all__ += KINDS
