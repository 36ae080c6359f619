# SPDX-License-Identifier: Apache-2.0
"""What compiled programs call: each function once, with all that passes ask about it."""

from __future__ import annotations

from typing import Final

from tvm_ipc.contract.collectives import COLLECTIVES, CUDA_IPC, DISCO
from tvm_ipc.contract.function import ANY, RESULT, Function, Meeting, Registered
from tvm_ipc.contract.values import IPC_MEMORY

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
    "work: one of the collectives above is called with the arguments, in a thread of the rank or "
    "on a stream of its GPU, after all that was posted before, in a team of works of these ranks",
    reads=("arguments",),
    writes=("arguments",),
    result_of="arguments",
    posts="function",
    registered=Registered.UNTYPED,
)

WAIT: Final = Function(
    "tvm_ipc.wait",
    "(work: Any)",
    "what follows is done when a work has ended; an error if it failed, whose cause its rank has "
    "told",
    reads=("work",),
    writes=("work",),
)

# ---- shows ------------------------------------------------------------------------------------

SHOW: Final = Function(
    "tvm_ipc.show",
    "(tensor: Tensor, team: Team) -> Any",
    "shown: from now on the ranks of the team may read the tensor; waits for nobody. The n-th one "
    "of a rank belongs to the n-th of each other rank, which has as many bytes",
    reads=("tensor",),
    scopes={"tensor": IPC_MEMORY},
    result_of="tensor",
    shows="tensor",
)

PEER: Final = Function(
    "tvm_ipc.peer",
    "(shown: Any, shift: int, shape: Shape) -> Tensor",
    "what the rank so many places after this one has shown with the same number, in its memory, "
    "when it has; to be read only, until that is hidden",
    reads=("shown",),
    result_of="shown",
)

HIDE: Final = Function(
    "tvm_ipc.hide",
    "(team: Team, *shown: Any)",
    "the ranks of the team meet; then nobody reads any of these any more",
    reads=("shown",),
    writes=("shown",),
    hides="shown",
    meets=Meeting.ALL,
    registered=Registered.UNTYPED,
)

PART: Final = Function(
    "tvm_ipc.part",
    "(tensor: Tensor, team: Team, shift: int, stride: int, offset: int, shape: Shape) -> Tensor",
    "view of a tensor from a byte on: stride times the place in the team of the rank so many "
    "places after this one, and the offset",
    result_of="tensor",
)

REDUCE_PARTS: Final = Function(
    "tvm_ipc.reduce_parts",
    "(kind: ReduceKind, team: Team, *parts: Tensor, recv: Tensor)",
    "reduction of what the ranks of the team have, with the bits of the collectives; part k is "
    "that of the rank k places before this one",
    reads=("parts",),
    writes=("recv",),
    registered=Registered.UNTYPED,
)

JOIN: Final = Function(
    "tvm_ipc.join",
    "(team: Team, places: Shape, *parts: Tensor, recv: Tensor)",
    "copies parts to where `tvm_ipc.part` finds them in recv; places has shift, stride and offset "
    "of each. One that lies there is left alone",
    reads=("parts",),
    writes=("recv",),
    registered=Registered.UNTYPED,
)

#: Kernels that TVM compiles may rely on tensors that begin at multiples of so many bytes.
KERNEL_ALIGNMENT: Final = 64

# ---- memory -----------------------------------------------------------------------------------

ALLOC_STORAGE: Final = Function(
    f"{CUDA_IPC}alloc_storage",
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
    f"{CUDA_IPC}cuda_ipc_memory_allocator_clear",
    "()",
    "returns the arena's unused pages to the system",
)

ARENA_OFFSET: Final = Function(
    "tvm_ipc.arena_offset", "(tensor: Tensor) -> int", "place in the arena, -1 outside"
)

# ---- what a program was compiled for ------------------------------------------------------------

#: The function of a compiled module that asks for the workers that it was compiled for.
MODULE_CHECK: Final = "tvm_ipc_require_workers"

#: The attribute of a function that some ranks alone run, such as a stage of a pipeline: a list of
#: them. Only these need a place in the teams of its collectives.
RUN_BY: Final = "tvm_ipc.run_by"

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
    *COLLECTIVES,
    TEAM,
    PLACE_IN_TEAM,
    POST,
    WAIT,
    SHOW,
    PEER,
    HIDE,
    PART,
    REDUCE_PARTS,
    JOIN,
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
    return None if "." in rest else PROGRAMS.get(DISCO + rest)
