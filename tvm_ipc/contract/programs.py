# SPDX-License-Identifier: Apache-2.0
"""What compiled programs call: each function once, with all that passes ask about it."""

from __future__ import annotations

from typing import Final

from tvm_ipc.contract.function import ANY, RESULT, Function, Meeting, Registered
from tvm_ipc.contract.values import BACKENDS, IPC_MEMORY, CollectiveFlag, ReduceKind, Team

DISCO: Final = "runtime.disco."
_CUDA_IPC: Final = f"{DISCO}cuda_ipc."

# ---- collectives ------------------------------------------------------------------------------

ALLREDUCE: Final = Function(
    "tvm_ipc.allreduce",
    "(send: Tensor, kind: ReduceKind, team: Team, strategy: AllReduceStrategy, "
    "flags: CollectiveFlag, recv: Tensor)",
    "all-reduce with everything a compiler can say about it",
    reads=("send",),
    writes=("recv",),
    scopes={"send": IPC_MEMORY},
    peers_read=("send",),
    meets=Meeting.ALL,
)

CUSTOM_ALLREDUCE: Final = Function(
    f"{_CUDA_IPC}custom_allreduce",
    "(send: Tensor, strategy: AllReduceStrategy, recv: Tensor)",
    "sum over all workers, refused where there are groups; never writes into send",
    reads=("send",),
    writes=("recv",),
    scopes={"send": IPC_MEMORY},
    peers_read=("send",),
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
(DISCO_ALLREDUCE,) = (one for one in DISCO_COLLECTIVES if one.name == f"{DISCO}allreduce")

TEAM: Final = Function(
    "tvm_ipc.team",
    "(ranks: Shape, copy: int) -> int",
    "id of the team of these ranks, in this order; every rank and call gets the same. Another copy "
    "is another team of the same ranks",
)

PLACE_IN_TEAM: Final = Function(
    "tvm_ipc.place_in_team",
    "(team: Team, recv: Tensor)",
    "the caller's place in a team, as one int64, which kernels compute with",
    writes=("recv",),
)

# ---- works ------------------------------------------------------------------------------------

POST: Final = Function(
    "tvm_ipc.post",
    "(function: str, *arguments: Any) -> Any",
    "work: a thread of the rank calls one of the collectives above with the arguments, when it has "
    "done all that was posted before, and with teams of its own of the same ranks",
    reads=("arguments",),
    writes=("arguments",),
    result_of="arguments",
    posts="function",
    registered=Registered.UNTYPED,
)

WAIT: Final = Function(
    "tvm_ipc.wait",
    "(work: Any)",
    "returns when a work has ended; an error if it failed, whose cause its rank has told",
    reads=("work",),
    writes=("work",),
)

# ---- memory -----------------------------------------------------------------------------------

ALLOC_STORAGE: Final = Function(
    f"{_CUDA_IPC}alloc_storage",
    "(shape: Shape, dtype: dtype) -> Storage",
    "storage in memory that peers map, for vm.builtin.alloc_tensor",
    scopes={RESULT: IPC_MEMORY},
)

ALLOC_TENSOR: Final = Function(
    "tvm_ipc.alloc_tensor",
    "(storage: Storage, offset: int, shape: Shape, dtype: dtype) -> Tensor",
    "tensor in a storage, its data pointer moved by offset bytes",
    result_of="storage",
)

VIEW: Final = Function(
    "tvm_ipc.view",
    "(tensor: Tensor, offset: int, shape: Shape) -> Tensor",
    "part of a tensor from a byte on, its data pointer moved; it keeps the tensor",
    result_of="tensor",
)

COPY: Final = Function(
    "tvm_ipc.copy",
    "(source: Tensor, target: Tensor)",
    "copy between memory scopes and devices; equal types and sizes",
    reads=("source",),
    writes=("target",),
    scopes={"source": ANY, "target": ANY},
)

CLEAR: Final = Function(
    f"{_CUDA_IPC}cuda_ipc_memory_allocator_clear",
    "()",
    "returns the arena's unused pages to the system",
)

ARENA_OFFSET: Final = Function(
    "tvm_ipc.arena_offset", "(tensor: Tensor) -> int", "place in the arena, -1 outside"
)

# ---- what a program was compiled for ------------------------------------------------------------

#: The function of a compiled module that asks for the workers that it was compiled for.
MODULE_CHECK: Final = "tvm_ipc_require_workers"

REQUIRE_WORKERS: Final = Function(
    "tvm_ipc.require_workers",
    "(workers: int, groups: int)",
    "an error in a session of another size: the caller was compiled for this one",
)

REQUIRE_BOUNDS: Final = Function(
    "tvm_ipc.require_bounds",
    "(what: str, value: int, least: int, most: int)",
    "an error where a value is not in bounds: the memory plan of the caller relies on them",
)

WORKER_RANK: Final = Function(
    f"{DISCO}worker_rank", "() -> int", "the caller's rank", registered=Registered.UPSTREAM
)

WORKER_ID: Final = Function(
    f"{DISCO}worker_id", "() -> Shape", "the caller's rank", registered=Registered.UPSTREAM
)

# ---- arithmetic ---------------------------------------------------------------------------------

MATMUL: Final = Function(
    "tvm_ipc.blas.matmul",
    "(a_axes: int, b_axes: int, steps: int, a: Tensor, b: Tensor, *operands: Tensor, out: Tensor)",
    "product of a and b, their axes permuted first, and an epilogue; pack_digits of axes and of "
    "Epilogue, 0 for none",
    reads=("a", "b", "operands"),
    writes=("out",),
    registered=Registered.UNTYPED,
)

PROGRAM_FUNCTIONS: Final = (
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
    TEAM,
    PLACE_IN_TEAM,
    POST,
    WAIT,
    ALLOC_STORAGE,
    ALLOC_TENSOR,
    VIEW,
    COPY,
    CLEAR,
    ARENA_OFFSET,
    REQUIRE_WORKERS,
    REQUIRE_BOUNDS,
    WORKER_RANK,
    WORKER_ID,
    MATMUL,
)

#: By name. A call of what is not here may do anything to what it is given.
PROGRAMS: Final[dict[str, Function]] = {one.name: one for one in PROGRAM_FUNCTIONS}


def find(name: str) -> Function | None:
    """Return what a packed function does that programs call, None where that is not known.

    The collectives of another backend do what Disco's do.
    """
    known = PROGRAMS.get(name)
    if known is not None or not name.startswith(DISCO):
        return known
    _backend, _, rest = name.removeprefix(DISCO).partition(".")
    return PROGRAMS.get(DISCO + rest)
