# SPDX-License-Identifier: Apache-2.0
"""The collectives that compiled programs call, with all that passes ask about them."""

from __future__ import annotations

from typing import Final

from tvm_ipc.contract.function import Function, Meeting, Registered
from tvm_ipc.contract.values import BACKENDS, IPC_MEMORY, CollectiveFlag, ReduceKind, Team

DISCO: Final = "runtime.disco."
CUDA_IPC: Final = f"{DISCO}cuda_ipc."

ALLREDUCE: Final = Function(
    "tvm_ipc.allreduce",
    "(send: Tensor, kind: ReduceKind, team: Team, strategy: AllReduceStrategy, "
    "flags: CollectiveFlag, recv: Tensor)",
    "all-reduce with everything a compiler can say about it",
    reads=("send",),
    writes=("recv",),
    scopes={"send": IPC_MEMORY},
    peers_read=("send",),
    same=("recv",),
    meets=Meeting.ALL,
)

CUSTOM_ALLREDUCE: Final = Function(
    f"{CUDA_IPC}custom_allreduce",
    "(send: Tensor, strategy: AllReduceStrategy, recv: Tensor)",
    "sum over all workers, refused where there are groups; never writes into send",
    reads=("send",),
    writes=("recv",),
    scopes={"send": IPC_MEMORY},
    peers_read=("send",),
    same=("recv",),
    meets=Meeting.ALL,
    general=ALLREDUCE.name,
    given={"kind": ReduceKind.SUM, "team": Team.WORLD, "flags": CollectiveFlag.NONE},
)

ALLREDUCE_RMS_NORM: Final = Function(
    "tvm_ipc.allreduce_rms_norm",
    "(send: Tensor, residual: Tensor, weight: Tensor, epsilon: float, team: Team, "
    "strategy: AllReduceStrategy, flags: CollectiveFlag, residual_out: Tensor, norm_out: Tensor)",
    "residual_out = residual + the sum of all sends, and norm_out = its rows as RMSNorm has them",
    reads=("send", "residual", "weight"),
    writes=("residual_out", "norm_out"),
    scopes={"send": IPC_MEMORY},
    peers_read=("send",),
    same=("residual_out", "norm_out"),
    meets=Meeting.ALL,
)

ALLREDUCE_LAYER_NORM: Final = Function(
    "tvm_ipc.allreduce_layer_norm",
    "(send: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, epsilon: float, team: Team, "
    "strategy: AllReduceStrategy, flags: CollectiveFlag, residual_out: Tensor, norm_out: Tensor)",
    "residual_out = residual + the sum of all sends, and norm_out = its rows as LayerNorm has them",
    reads=("send", "residual", "weight", "bias"),
    writes=("residual_out", "norm_out"),
    scopes={"send": IPC_MEMORY},
    peers_read=("send",),
    same=("residual_out", "norm_out"),
    meets=Meeting.ALL,
)

REDUCE_SCATTER: Final = Function(
    "tvm_ipc.reduce_scatter",
    "(send: Tensor, kind: ReduceKind, team: Team, flags: CollectiveFlag, recv: Tensor)",
    "each rank's part of what an all-reduce would give, with the same bits",
    reads=("send",),
    writes=("recv",),
    scopes={"send": IPC_MEMORY},
    peers_read=("send",),
    meets=Meeting.ALL,
)

REDUCE: Final = Function(
    "tvm_ipc.reduce",
    "(send: Tensor, kind: ReduceKind, root: int, team: Team, flags: CollectiveFlag, "
    "recv: Tensor | None)",
    "what an all-reduce would give, with the same bits, on the rank at the place root of the team",
    reads=("send",),
    writes=("recv",),
    scopes={"send": IPC_MEMORY},
    peers_read=("send",),
    meets=Meeting.ALL,
)

ALL_TO_ALL: Final = Function(
    "tvm_ipc.all_to_all",
    "(send: Tensor, parts: Shape, team: Team, flags: CollectiveFlag, recv: Tensor)",
    "part j of what rank i sends is part i of what rank j receives; parts has the elements of "
    "each, rank after rank, or none where all are equal",
    reads=("send",),
    writes=("recv",),
    scopes={"send": IPC_MEMORY},
    peers_read=("send",),
    meets=Meeting.ALL,
)

ALLGATHER: Final = Function(
    "tvm_ipc.allgather",
    "(send: Tensor, team: Team, flags: CollectiveFlag, recv: Tensor)",
    "flat concatenation of what the ranks of a team send, in the order of the team",
    reads=("send",),
    writes=("recv",),
    scopes={"send": IPC_MEMORY},
    peers_read=("send",),
    same=("recv",),
    meets=Meeting.ALL,
)

GATHER: Final = Function(
    "tvm_ipc.gather",
    "(send: Tensor, root: int, team: Team, flags: CollectiveFlag, recv: Tensor | None)",
    "what an allgather would give, on the rank at the place root of the team",
    reads=("send",),
    writes=("recv",),
    scopes={"send": IPC_MEMORY},
    peers_read=("send",),
    meets=Meeting.SOME,
)

BROADCAST: Final = Function(
    "tvm_ipc.broadcast",
    "(send: Tensor | None, root: int, team: Team, flags: CollectiveFlag, recv: Tensor)",
    "copy of what the rank at the place root of the team sends",
    reads=("send",),
    writes=("recv",),
    scopes={"send": IPC_MEMORY},
    peers_read=("send",),
    same=("recv",),
    meets=Meeting.SOME,
)

SCATTER: Final = Function(
    "tvm_ipc.scatter",
    "(send: Tensor | None, root: int, team: Team, flags: CollectiveFlag, recv: Tensor)",
    "equal flat chunks of what the rank at the place root of the team sends, in the team's order",
    reads=("send",),
    writes=("recv",),
    scopes={"send": IPC_MEMORY},
    peers_read=("send",),
    meets=Meeting.SOME,
)

PERMUTE: Final = Function(
    "tvm_ipc.permute",
    "(send: Tensor, sources: Shape, team: Team, flags: CollectiveFlag, recv: Tensor)",
    "what the rank sends from which this one receives: its place stands in sources at the place of "
    "this one, and for -1 there are zeros",
    reads=("send",),
    writes=("recv",),
    scopes={"send": IPC_MEMORY},
    peers_read=("send",),
    meets=Meeting.SOME,
)


def _of_backend(prefix: str, registered: Registered) -> tuple[Function, ...]:
    """Return the collectives that each backend has, and Disco under its own names."""
    disco = prefix == DISCO
    kind = "ReduceKindInShape" if disco else "ReduceKind"
    team = "InGroup" if disco else "Team"
    of_root = "Tensor" if disco else "Tensor | None"
    return (
        Function(
            f"{prefix}allreduce",
            f"(send: Tensor, kind: {kind}, team: {team}, recv: Tensor)",
            "reduction over all ranks; all of them get the same bits",
            reads=("send",),
            writes=("recv",),
            peers_read=("send",),
            same=("recv",),
            meets=Meeting.ALL,
            registered=registered,
        ),
        Function(
            f"{prefix}allgather",
            f"(send: Tensor, team: {team}, recv: Tensor)",
            "flat concatenation in rank order",
            reads=("send",),
            writes=("recv",),
            peers_read=("send",),
            same=("recv",),
            meets=Meeting.ALL,
            registered=registered,
        ),
        Function(
            f"{prefix}broadcast_from_worker0",
            f"(send: {of_root}, team: {team}, recv: Tensor)",
            "copy of the first rank's send to every recv",
            reads=("send",),
            writes=("recv",),
            peers_read=("send",),
            same=("recv",),
            meets=Meeting.SOME,
            registered=registered,
        ),
        Function(
            f"{prefix}scatter_from_worker0",
            f"(send: Tensor | None, team: {team}, recv: Tensor)",
            "equal flat chunks of the first rank's send",
            reads=("send",),
            writes=("recv",),
            peers_read=("send",),
            meets=Meeting.SOME,
            registered=registered,
        ),
        Function(
            f"{prefix}gather_to_worker0",
            f"(send: Tensor, team: {team}, recv: Tensor | None)",
            "flat concatenation on the first rank",
            reads=("send",),
            writes=("recv",),
            peers_read=("send",),
            meets=Meeting.SOME,
            registered=registered,
        ),
        Function(
            f"{prefix}recv_from_worker0",
            "(recv: Tensor)",
            "receive from worker 0",
            writes=("recv",),
            meets=Meeting.PAIR,
            registered=registered,
        ),
        Function(
            f"{prefix}send_to_next_group",
            "(send: Tensor)",
            "to the same place a group later",
            reads=("send",),
            meets=Meeting.PAIR,
            registered=registered,
        ),
        Function(
            f"{prefix}recv_from_prev_group",
            "(recv: Tensor)",
            "from the same place a group before",
            writes=("recv",),
            meets=Meeting.PAIR,
            registered=registered,
        ),
        Function(
            f"{prefix}send_to_worker",
            "(send: Tensor, receiver: int)",
            "to a worker by its id",
            reads=("send",),
            meets=Meeting.PAIR,
            registered=registered,
        ),
        Function(
            f"{prefix}recv_from_worker",
            "(recv: Tensor, sender: int)",
            "from a worker by its id",
            writes=("recv",),
            meets=Meeting.PAIR,
            registered=registered,
        ),
    )


BACKEND_COLLECTIVES: Final = tuple(
    one for name in BACKENDS for one in _of_backend(f"{DISCO}{name}.", Registered.NATIVE)
)

#: What `LegalizeOps` makes of `R.ccl.*`: they call those of the session's backend.
DISCO_COLLECTIVES: Final = _of_backend(DISCO, Registered.UPSTREAM)
_DISCO: Final = {one.name.removeprefix(DISCO): one for one in DISCO_COLLECTIVES}
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
