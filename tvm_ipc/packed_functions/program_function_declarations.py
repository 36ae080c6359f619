# SPDX-License-Identifier: Apache-2.0
"""The functions that compiled programs call, with the effects that passes rely on."""

from __future__ import annotations

from typing import Final

from tvm_ipc.packed_functions.collective_declarations import COLLECTIVES, CUDA_IPC
from tvm_ipc.packed_functions.collective_declarations import TEAM_INDEX as TEAM_INDEX
from tvm_ipc.packed_functions.collective_kind import DISCO
from tvm_ipc.packed_functions.constants_shared_with_native_library import IPC_MEMORY
from tvm_ipc.packed_functions.function_signature_and_effects import (
    ANY,
    RESULT,
    Function,
    Registered,
    Sync,
)

TEAM: Final = Function(
    "tvm_ipc.team",
    "(ranks: Shape, copy: int) -> int",
    "id of the team of these ranks, in this order; all ranks and calls get the same id. "
    "Different copies are different teams of the same ranks",
)

# ---- asynchronous operations ------------------------------------------------------------------

START: Final = Function(
    "tvm_ipc.start",
    "(function: str, *arguments: Any) -> Any",
    "request: a collective is called with the arguments, in a thread of the rank or on a stream of "
    "its GPU, after all operations started before, in a separate team of these ranks",
    reads=("arguments",),
    writes=("arguments",),
    result_of="arguments",
    starts="function",
    registered=Registered.UNTYPED,
)

WAIT: Final = Function(
    "tvm_ipc.wait",
    "(request: Any)",
    "wait for the end of an asynchronous operation; an error if it failed, whose cause its rank "
    "has reported",
    reads=("request",),
    writes=("request",),
)

# ---- streams of a GPU ---------------------------------------------------------------------------

SET_STREAM: Final = Function(
    "tvm_ipc.set_stream",
    "(stream: int)",
    "run kernels and start requests on another stream of this rank's GPU from now on; 0 is the "
    "stream on which the program began",
    sets_stream="stream",
)

WAIT_STREAM: Final = Function(
    "tvm_ipc.wait_stream",
    "(stream: int)",
    "let the current stream wait for everything that is on another stream of this rank so far; the "
    "host does not wait",
    waits_for_stream="stream",
)

# ---- exposed buffers --------------------------------------------------------------------------

EXPOSE: Final = Function(
    "tvm_ipc.expose",
    "(tensor: Tensor, team: Team) -> Any",
    "let the ranks of the team read the tensor from now on, without waiting for them. The n-th "
    "exposed tensor of a rank matches the n-th of each other rank, which has the same size",
    reads=("tensor",),
    scopes={"tensor": IPC_MEMORY},
    result_of="tensor",
    exposes="tensor",
)

PEER_VIEW: Final = Function(
    "tvm_ipc.peer_view",
    "(exposed: Any, shift: int, shape: Shape) -> Tensor",
    "view of the matching tensor of the rank `shift` indices after this one, in that rank's "
    "memory, once it is exposed; read-only, until it is released",
    reads=("exposed",),
    result_of="exposed",
)

RELEASE: Final = Function(
    "tvm_ipc.release",
    "(team: Team, *exposed: Any)",
    "barrier of the team, after which no rank reads any of these tensors",
    reads=("exposed",),
    writes=("exposed",),
    releases="exposed",
    sync=Sync.BARRIER,
    registered=Registered.UNTYPED,
)

OWN_SLICE: Final = Function(
    "tvm_ipc.own_slice",
    "(tensor: Tensor, team: Team, shift: int, stride: int, offset: int, shape: Shape) -> Tensor",
    "view of a tensor from a byte on: `offset` plus `stride` times the team index of the rank "
    "`shift` indices after this one",
    result_of="tensor",
)

REDUCE_SLICES: Final = Function(
    "tvm_ipc.reduce_slices",
    "(kind: ReduceKind, team: Team, *slices: Tensor, recv: Tensor)",
    "reduction of one slice from each rank of the team, with the bits of the collectives; slice k "
    "is that of the rank k indices before this one",
    reads=("slices",),
    writes=("recv",),
    registered=Registered.UNTYPED,
)

ASSEMBLE: Final = Function(
    "tvm_ipc.assemble",
    "(team: Team, positions: Shape, *slices: Tensor, recv: Tensor)",
    "copy slices to where `tvm_ipc.own_slice` finds them in recv; positions has the shift, stride "
    "and offset of each. A slice that is there already is not copied",
    reads=("slices",),
    writes=("recv",),
    registered=Registered.UNTYPED,
)

#: The alignment of tensors, in bytes, that kernels compiled by TVM may rely on.
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
    "view of a tensor from a byte on, its data pointer moved; keeps the tensor alive",
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
    "return the arena's unused pages to the system",
)

ARENA_OFFSET: Final = Function(
    "tvm_ipc.arena_offset", "(tensor: Tensor) -> int", "offset in the arena; -1 for tensors outside"
)

# ---- checks of a compiled program ---------------------------------------------------------------

#: The function of a compiled module that checks for the workers that it was compiled for.
MODULE_CHECK: Final = "tvm_ipc_require_workers"

#: The attribute of a function that only some ranks run, such as a stage of a pipeline: the list of
#: these ranks. Only they must be in the teams of its collectives.
RUN_BY: Final = "tvm_ipc.run_by"

#: The attribute of a private function that lists parameters by name. In every call, the tensors of
#: these parameters alias no other argument.
NO_ALIAS: Final = "tvm_ipc.no_alias"

#: The attribute of a function that only functions of its module call. TVM's last passes give all
#: functions a `global_symbol`, which private ones do not have before.
INTERNAL: Final = "tvm_ipc.internal"

REQUIRE_WORKERS: Final = Function(
    "tvm_ipc.require_workers",
    "(workers: int, groups: int)",
    "raise in a session of another size than the caller was compiled for",
)

REQUIRE_BOUNDS: Final = Function(
    "tvm_ipc.require_bounds",
    "(what: str, value: int, least: int, most: int)",
    "raise if a value is out of the bounds that the memory plan of the caller relies on",
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
    "(a_axes: int, b_axes: int, steps: int, parts: int, a: Tensor, b: Tensor, *operands: Tensor, "
    "out: Tensor)",
    "matmul of a and b, whose axes are permuted first, and an epilogue; axes and steps (numbers of "
    "Epilogue) are packed by pack_digits, 0 for none. parts is 0 for sums in the fastest order, or "
    "a power of two that divides the inner dimension: each part is added up in eight lanes, and "
    "the sums of parts as a balanced binary tree",
    reads=("a", "b", "operands"),
    writes=("out",),
    registered=Registered.UNTYPED,
)

ATTENTION: Final = Function(
    "tvm_ipc.blas.attention",
    "(query_axes: int, key_axes: int, value_axes: int, out_axes: int, scale: float, "
    "softcap: float, causal: int, window: int, reproducible: int, queries: Tensor, keys: Tensor, "
    "values: Tensor, *bias: Tensor, out: Tensor)",
    "softmax(cap(scale * queries keys^T) + bias) values, whose axes are permuted to (batch, heads, "
    "tokens, depth); axes are packed by pack_digits, 0 for none. softcap is 0 for none; causal is "
    "0 for no, 1 if query i is token i, and 2 if the last query is the last token; window is the "
    "number of keys that a causal query attends to, 0 for all; reproducible is 1 if a query must "
    "get the same bits for any number of queries, and 0 for the fastest kernels",
    reads=("queries", "keys", "values", "bias"),
    writes=("out",),
    registered=Registered.UNTYPED,
)

ATTENTION_OF_SEQUENCES: Final = Function(
    "tvm_ipc.blas.attention_of_sequences",
    "(query_axes: int, key_axes: int, value_axes: int, out_axes: int, scale: float, "
    "softcap: float, causal: int, window: int, reproducible: int, queries: Tensor, keys: Tensor, "
    "values: Tensor, *starts: Tensor, out: Tensor)",
    "attention of each of the sequences that follow each other along the axis of tokens, in a "
    "batch of 1; the starts in queries and in keys are two tensors of int32 that end with the "
    "number of tokens",
    reads=("queries", "keys", "values", "starts"),
    writes=("out",),
    registered=Registered.UNTYPED,
)

BATCH_ATTENTION: Final = Function(
    "tvm_ipc.blas.batch_attention",
    "(key_cache: int, value_cache: int, scale: float, softcap: float, positions: Tensor, "
    "caches: Any, queries: Tensor, keys: Tensor, values: Tensor, *mask: Tensor, out: Tensor)",
    "attention of one token of each request: its key and value are written into the caches of the "
    "request, at its position, and all keys up to there are attended to. caches has an array of "
    "caches for each request, of which key_cache and value_cache are indices",
    reads=("positions", "queries", "keys", "values", "mask"),
    writes=("caches", "out"),
    registered=Registered.UNTYPED,
)

#: The collectives, and the functions above.
PROGRAM_FUNCTIONS: Final = (
    *COLLECTIVES,
    *[value for value in tuple(globals().values()) if isinstance(value, Function)],
)

#: The functions by name. A call of any other function may read and write all of its arguments.
PROGRAMS: Final[dict[str, Function]] = {function.name: function for function in PROGRAM_FUNCTIONS}


def find(name: str) -> Function | None:
    """Return the entry of a packed function that programs call; None if its effects are unknown.

    The collectives of other libraries' backends have the effects of Disco's.
    """
    function = PROGRAMS.get(name)
    if function is not None or not name.startswith(DISCO):
        return function
    _backend, _, collective = name.removeprefix(DISCO).partition(".")
    return None if "." in collective else PROGRAMS.get(DISCO + collective)
