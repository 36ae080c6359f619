# SPDX-License-Identifier: Apache-2.0
"""The collectives that compiled programs call, with the effects that passes rely on."""

from __future__ import annotations

from typing import Final

from tvm_ipc.packed_functions.constants_shared_with_native_library import (
    BACKENDS,
    IPC_MEMORY,
    CollectiveFlag,
    ReduceKind,
    Team,
)
from tvm_ipc.packed_functions.function_signature_and_effects import Function, Registered, Sync

DISCO: Final = "runtime.disco."
CUDA_IPC: Final = f"{DISCO}cuda_ipc."

ALLREDUCE: Final = Function(
    "tvm_ipc.allreduce",
    "(send: Tensor, kind: ReduceKind, team: Team, strategy: AllReduceStrategy, "
    "flags: CollectiveFlag, recv: Tensor)",
    "all-reduce with all options of a compiler",
    reads=("send",),
    writes=("recv",),
    scopes={"send": IPC_MEMORY},
    peers_read=("send",),
    replicated=("recv",),
    sync=Sync.BARRIER,
)

CUSTOM_ALLREDUCE: Final = Function(
    f"{CUDA_IPC}custom_allreduce",
    "(send: Tensor, strategy: AllReduceStrategy, recv: Tensor)",
    "sum over all workers, an error in sessions with groups; never writes into send",
    reads=("send",),
    writes=("recv",),
    scopes={"send": IPC_MEMORY},
    peers_read=("send",),
    replicated=("recv",),
    sync=Sync.BARRIER,
    general_form=ALLREDUCE.name,
    defaults={"kind": ReduceKind.SUM, "team": Team.WORLD, "flags": CollectiveFlag.NONE},
)

ALLREDUCE_RMS_NORM: Final = Function(
    "tvm_ipc.allreduce_rms_norm",
    "(send: Tensor, residual: Tensor, weight: Tensor, epsilon: float, team: Team, "
    "strategy: AllReduceStrategy, flags: CollectiveFlag, residual_out: Tensor, norm_out: Tensor)",
    "residual_out = residual + the sum of all sends, and norm_out = RMSNorm of its rows",
    reads=("send", "residual", "weight"),
    writes=("residual_out", "norm_out"),
    scopes={"send": IPC_MEMORY},
    peers_read=("send",),
    replicated=("residual_out", "norm_out"),
    sync=Sync.BARRIER,
)

ALLREDUCE_LAYER_NORM: Final = Function(
    "tvm_ipc.allreduce_layer_norm",
    "(send: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, epsilon: float, team: Team, "
    "strategy: AllReduceStrategy, flags: CollectiveFlag, residual_out: Tensor, norm_out: Tensor)",
    "residual_out = residual + the sum of all sends, and norm_out = LayerNorm of its rows",
    reads=("send", "residual", "weight", "bias"),
    writes=("residual_out", "norm_out"),
    scopes={"send": IPC_MEMORY},
    peers_read=("send",),
    replicated=("residual_out", "norm_out"),
    sync=Sync.BARRIER,
)

REDUCE_SCATTER: Final = Function(
    "tvm_ipc.reduce_scatter",
    "(send: Tensor, kind: ReduceKind, team: Team, flags: CollectiveFlag, recv: Tensor)",
    "each rank's slice of the result of an all-reduce, with the same bits",
    reads=("send",),
    writes=("recv",),
    scopes={"send": IPC_MEMORY},
    peers_read=("send",),
    sync=Sync.BARRIER,
)

REDUCE: Final = Function(
    "tvm_ipc.reduce",
    "(send: Tensor, kind: ReduceKind, root: int, team: Team, flags: CollectiveFlag, "
    "recv: Tensor | None)",
    "the result of an all-reduce, with the same bits, on the rank with index root in the team",
    reads=("send",),
    writes=("recv",),
    scopes={"send": IPC_MEMORY},
    peers_read=("send",),
    sync=Sync.BARRIER,
)

ALL_TO_ALL: Final = Function(
    "tvm_ipc.all_to_all",
    "(send: Tensor, parts: Shape, team: Team, flags: CollectiveFlag, recv: Tensor)",
    "part j of send on rank i becomes part i of recv on rank j; parts has the number of elements "
    "of each, rank after rank, and is empty if all are equal",
    reads=("send",),
    writes=("recv",),
    scopes={"send": IPC_MEMORY},
    peers_read=("send",),
    sync=Sync.BARRIER,
)

ALLGATHER: Final = Function(
    "tvm_ipc.allgather",
    "(send: Tensor, team: Team, flags: CollectiveFlag, recv: Tensor)",
    "flat concatenation of send of all ranks of a team, in the order of the team",
    reads=("send",),
    writes=("recv",),
    scopes={"send": IPC_MEMORY},
    peers_read=("send",),
    replicated=("recv",),
    sync=Sync.BARRIER,
)

GATHER: Final = Function(
    "tvm_ipc.gather",
    "(send: Tensor, root: int, team: Team, flags: CollectiveFlag, recv: Tensor | None)",
    "the result of an allgather, on the rank with index root in the team",
    reads=("send",),
    writes=("recv",),
    scopes={"send": IPC_MEMORY},
    peers_read=("send",),
    sync=Sync.PARTIAL,
)

BROADCAST: Final = Function(
    "tvm_ipc.broadcast",
    "(send: Tensor | None, root: int, team: Team, flags: CollectiveFlag, recv: Tensor)",
    "copy of send of the rank with index root in the team",
    reads=("send",),
    writes=("recv",),
    scopes={"send": IPC_MEMORY},
    peers_read=("send",),
    replicated=("recv",),
    sync=Sync.PARTIAL,
)

SCATTER: Final = Function(
    "tvm_ipc.scatter",
    "(send: Tensor | None, root: int, team: Team, flags: CollectiveFlag, recv: Tensor)",
    "equal flat chunks of send of the rank with index root in the team, in the team's order",
    reads=("send",),
    writes=("recv",),
    scopes={"send": IPC_MEMORY},
    peers_read=("send",),
    sync=Sync.PARTIAL,
)

PERMUTE: Final = Function(
    "tvm_ipc.permute",
    "(send: Tensor, sources: Shape, team: Team, flags: CollectiveFlag, recv: Tensor)",
    "send of another rank of the team: sources has, at this rank's index, the index of the rank to "
    "receive from, or -1 for zeros",
    reads=("send",),
    writes=("recv",),
    scopes={"send": IPC_MEMORY},
    peers_read=("send",),
    sync=Sync.PARTIAL,
)


def _of_backend(prefix: str, registered: Registered) -> tuple[Function, ...]:
    """Return the collectives of a backend, or of Disco under Disco's names."""
    of_disco = prefix == DISCO
    kind = "ReduceKindInShape" if of_disco else "ReduceKind"
    team = "InGroup" if of_disco else "Team"
    root_only = "Tensor" if of_disco else "Tensor | None"
    return (
        Function(
            f"{prefix}allreduce",
            f"(send: Tensor, kind: {kind}, team: {team}, recv: Tensor)",
            "reduction over all ranks; all of them get the same bits",
            reads=("send",),
            writes=("recv",),
            peers_read=("send",),
            replicated=("recv",),
            sync=Sync.BARRIER,
            registered=registered,
        ),
        Function(
            f"{prefix}allgather",
            f"(send: Tensor, team: {team}, recv: Tensor)",
            "flat concatenation in rank order",
            reads=("send",),
            writes=("recv",),
            peers_read=("send",),
            replicated=("recv",),
            sync=Sync.BARRIER,
            registered=registered,
        ),
        Function(
            f"{prefix}broadcast_from_worker0",
            f"(send: {root_only}, team: {team}, recv: Tensor)",
            "copy of the first rank's send to every recv",
            reads=("send",),
            writes=("recv",),
            peers_read=("send",),
            replicated=("recv",),
            sync=Sync.PARTIAL,
            registered=registered,
        ),
        Function(
            f"{prefix}scatter_from_worker0",
            f"(send: Tensor | None, team: {team}, recv: Tensor)",
            "equal flat chunks of the first rank's send",
            reads=("send",),
            writes=("recv",),
            peers_read=("send",),
            sync=Sync.PARTIAL,
            registered=registered,
        ),
        Function(
            f"{prefix}gather_to_worker0",
            f"(send: Tensor, team: {team}, recv: Tensor | None)",
            "flat concatenation on the first rank",
            reads=("send",),
            writes=("recv",),
            peers_read=("send",),
            sync=Sync.PARTIAL,
            registered=registered,
        ),
        Function(
            f"{prefix}recv_from_worker0",
            "(recv: Tensor)",
            "receive from worker 0",
            writes=("recv",),
            sync=Sync.P2P,
            registered=registered,
        ),
        Function(
            f"{prefix}send_to_next_group",
            "(send: Tensor)",
            "send to the worker with the same index in the next group",
            reads=("send",),
            sync=Sync.P2P,
            registered=registered,
        ),
        Function(
            f"{prefix}recv_from_prev_group",
            "(recv: Tensor)",
            "receive from the worker with the same index in the previous group",
            writes=("recv",),
            sync=Sync.P2P,
            registered=registered,
        ),
        Function(
            f"{prefix}send_to_worker",
            "(send: Tensor, receiver: int)",
            "send to a worker by its rank",
            reads=("send",),
            sync=Sync.P2P,
            registered=registered,
        ),
        Function(
            f"{prefix}recv_from_worker",
            "(recv: Tensor, sender: int)",
            "receive from a worker by its rank",
            writes=("recv",),
            sync=Sync.P2P,
            registered=registered,
        ),
    )


BACKEND_COLLECTIVES: Final = tuple(
    function for name in BACKENDS for function in _of_backend(f"{DISCO}{name}.", Registered.NATIVE)
)

#: The functions that `LegalizeOps` emits for `R.ccl.*`. They call the session's backend.
DISCO_COLLECTIVES: Final = _of_backend(DISCO, Registered.UPSTREAM)
_DISCO: Final = {function.name.removeprefix(DISCO): function for function in DISCO_COLLECTIVES}
DISCO_ALLREDUCE: Final = _DISCO["allreduce"]
DISCO_ALLGATHER: Final = _DISCO["allgather"]

COLLECTIVES: Final = (
    ALLREDUCE,
    CUSTOM_ALLREDUCE,
    ALLREDUCE_RMS_NORM,
    ALLREDUCE_LAYER_NORM,
    REDUCE_SCATTER,
    REDUCE,
    ALL_TO_ALL,
    ALLGATHER,
    GATHER,
    BROADCAST,
    SCATTER,
    PERMUTE,
    *DISCO_COLLECTIVES,
    *BACKEND_COLLECTIVES,
)
