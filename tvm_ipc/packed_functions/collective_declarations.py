# SPDX-License-Identifier: Apache-2.0
"""The collectives: one entry for each kind, and the functions that compiled programs call for them.

An entry of `KINDS` is all that the Python side needs to know of a collective. Its packed functions
and their effects, its operator in `tvm_ipc.comm` and its session method derive from it.
"""

from __future__ import annotations

from typing import Final

from tvm_ipc.packed_functions.collective_kind import DISCO, Kind
from tvm_ipc.packed_functions.constants_shared_with_native_library import (
    BACKENDS,
    IPC_MEMORY,
    CollectiveFlag,
    ReduceKind,
    Team,
)
from tvm_ipc.packed_functions.function_signature_and_effects import Function, Registered, Sync

CUDA_IPC: Final = f"{DISCO}cuda_ipc."

TEAM_INDEX: Final = Function(
    "tvm_ipc.team_index",
    "(team: Team, recv: Tensor)",
    "the caller's index in a team, as one int64 for kernels; the size of the team if it is in none",
    writes=("recv",),
)

_PERMUTE: Final = Kind(
    "permute",
    "the tensor of the rank that sends to this one, or zeros if no rank does",
    pairs=("pairs",),
    sync=Sync.PARTIAL,
    slices_received=lambda ranks: ranks,
    packed_parameters="sources: Shape",
    packed_note="sources has, at each rank's index, the index of the rank to receive from, or -1",
    details="In the example, each rank gets the tensor of the rank before it, in a ring of 2.",
    example="permute(x, [[0, 1], [1, 0]], workers=2)",
)

_ENTRIES: Final = (
    Kind(
        "allreduce",
        "the reduction of the tensors of all ranks, bit for bit the same on each rank",
        noun="all-reduce",
        reduces=True,
        strategies=True,
        replicated=True,
        slices_received=lambda ranks: 2 * (ranks - 1),
        disco="allreduce",
        method_doc="Reduce all workers' `src` into every worker's `dst`, and return it.",
        example='allreduce(x, "sum")',
    ),
    Kind(
        "reduce_scatter",
        "this rank's shard of the result of `allreduce`, with the same bits",
        reduces=True,
        splits=True,
        slices_received=lambda ranks: ranks - 1,
        method_doc="""\
                Reduce all workers' `src`, give each worker's `dst` one slice, and return `dst`.

                The reduction is split into one equal slice for each worker. Worker i gets slice i,
                with the same bits as from `allreduce`. `dst` may be slice i of the worker's own
                `src`. Without `dst`, `src` is split along its first axis, and the extent of that
                axis must be a multiple of the number of workers.""",
        example="reduce_scatter(x, axis=1, workers=2)",
        example_extents="4, 4",
    ),
    Kind(
        "reduce",
        "the result of `allreduce` on the root, with the same bits",
        reduces=True,
        rooted=True,
        slices_received=lambda ranks: 2 * (ranks - 1),
        method_doc="""\
                Reduce all workers' `src` into one worker's `dst`, and return it.

                The result has the same bits as that of `allreduce`. A new tensor is allocated only
                on the root.""",
        example='reduce(x, "max", root=1)',
    ),
    Kind(
        "allgather",
        "the concatenation of the tensors of all ranks, in the order of the team",
        noun="all-gather",
        concatenates=True,
        replicated=True,
        slices_received=lambda ranks: ranks - 1,
        disco="allgather",
        method_doc="""\
                Concatenate all workers' `src` in every worker's `dst`, and return it.

                A new tensor is the concatenation along the first axis.""",
        details="With `extent=7`, two ranks that have 4 rows each get 7 rows: the last row of "
        "the second rank is padding.",
        example="allgather(x, workers=2)",
        example_extents="8, 8",
    ),
    Kind(
        "gather",
        "the result of `allgather` on the root",
        rooted=True,
        concatenates=True,
        sync=Sync.PARTIAL,
        slices_received=lambda ranks: ranks - 1,
        disco="gather_to_worker0",
        method_doc="""\
                Concatenate all workers' `from_array` in the first worker's `to_array`, and return
                it.

                A new tensor is the concatenation along the first axis. Only the first worker has
                it.""",
        method_operands=("from_array", "to_array"),
        example="gather(x, root=0, workers=2)",
        example_extents="8, 8",
    ),
    Kind(
        "broadcast",
        "the tensor of the root",
        rooted=True,
        replicated=True,
        sync=Sync.PARTIAL,
        slices_received=lambda ranks: ranks,
        disco="broadcast_from_worker0",
        method_doc="Copy the first worker's `src` to every worker's `dst`.",
        example="broadcast(x, root=1)",
    ),
    Kind(
        "scatter",
        "this rank's shard of the tensor of the root",
        rooted=True,
        splits=True,
        sync=Sync.PARTIAL,
        slices_received=lambda ranks: 1,
        disco="scatter_from_worker0",
        method_doc="Copy row i of the first worker's `from_array` to worker i's `to_array`.",
        method_operands=("from_array", "to_array"),
        example="scatter(x, root=0, workers=2)",
        example_extents="2, 8",
    ),
    Kind(
        "take_shard",
        "this rank's shard of its own tensor",
        splits=True,
        slices_received=lambda ranks: 0,
        packed=TEAM_INDEX,
        details="If all ranks have the same tensor, the result is that of `scatter`, without "
        "communication.",
        example="take_shard(x, axis=1, workers=4)",
        example_extents="4, 2",
    ),
    Kind(
        "all_to_all",
        "this rank's shard of the tensor of every rank, concatenated in the order of the team",
        splits=True,
        concatenates=True,
        slices_received=lambda ranks: ranks - 1,
        packed_parameters="parts: Shape",
        packed_note="parts has the number of elements that each rank sends to each, sender "
        "after sender, and is empty if all are equal",
        method_doc="""\
                Copy part j of worker i's `src` to part i of worker j's `dst`, and return `dst`.

                `src` and `dst` must not share memory. A new tensor has the shape of `src`; if you
                pass `parts`, it is one-dimensional instead.""",
        details="The tensor of each rank is split along `split_axis`. The shards that a rank "
        "gets are concatenated along `concat_axis`.",
        example="all_to_all(x, split_axis=1, concat_axis=0, workers=2)",
        example_extents="8, 4",
    ),
    _PERMUTE,
    Kind(
        "send_recv",
        "the tensor of the rank `source` on the rank `target`, and zeros on other ranks",
        noun="send-receive pair",
        pairs=("source", "target"),
        slices_received=lambda ranks: ranks,
        packed=_PERMUTE.function,
        example="send_recv(x, source=0, target=1, workers=2)",
    ),
)
#: All kinds, by name.
KINDS: Final = {kind.name: kind for kind in _ENTRIES}

ALLREDUCE: Final = KINDS["allreduce"].function
REDUCE_SCATTER: Final = KINDS["reduce_scatter"].function
ALLGATHER: Final = KINDS["allgather"].function

CUSTOM_ALLREDUCE: Final = Function(
    f"{CUDA_IPC}custom_allreduce",
    "(send: Tensor, strategy: AllReduceStrategy, recv: Tensor)",
    "sum over the workers of the caller's group; never writes into send",
    reads=("send",),
    writes=("recv",),
    scopes={"send": IPC_MEMORY},
    peers_read=("send",),
    replicated=("recv",),
    sync=Sync.BARRIER,
    general_form=ALLREDUCE.name,
    defaults={"kind": ReduceKind.SUM, "team": Team.GROUP, "flags": CollectiveFlag.NONE},
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


RAGGED_ALL_TO_ALL: Final = Function(
    "tvm_ipc.ragged_all_to_all",
    "(send: Tensor, counts: Tensor, team: Team, flags: CollectiveFlag, recv: Tensor, "
    "recv_counts: Tensor)",
    "the rows of all sends that are for this rank, in the order of the team. counts has the same "
    "number of int64 for each rank of the team, whose sum is the number of rows for it; the rows "
    "in send are in that order. recv_counts gets the numbers of each sender. Rows of recv beyond "
    "those are undefined",
    reads=("send", "counts"),
    writes=("recv", "recv_counts"),
    scopes={"send": IPC_MEMORY},
    peers_read=("send",),
    host_reads=("counts",),
    sync=Sync.BARRIER,
)


def _point_to_point(backend: str) -> tuple[Function, ...]:
    """Return the messages between two ranks, of a backend or of Disco itself."""
    prefix = f"{DISCO}{backend}{'.' * bool(backend)}"
    registered = Registered.NATIVE if backend else Registered.UPSTREAM
    return tuple(
        Function(
            f"{prefix}{name}",
            signature,
            summary,
            reads=("send",) if "send: " in signature else (),
            writes=("recv",) if "recv: " in signature else (),
            sync=Sync.P2P,
            registered=registered,
        )
        for name, signature, summary in (
            ("recv_from_worker0", "(recv: Tensor)", "receive from worker 0"),
            (
                "send_to_next_group",
                "(send: Tensor)",
                "send to the worker with the same index in the next group",
            ),
            (
                "recv_from_prev_group",
                "(recv: Tensor)",
                "receive from the worker with the same index in the previous group",
            ),
            ("send_to_worker", "(send: Tensor, receiver: int)", "send to a worker by its rank"),
            (
                "recv_from_worker",
                "(recv: Tensor, sender: int)",
                "receive from a worker by its rank",
            ),
        )
    )


#: Disco's functions, which `LegalizeOps` emits for `R.ccl.*` and which call the session's backend;
#: then those of each backend.
_OF_BACKENDS: Final = tuple(
    function
    for backend in ("", *BACKENDS)
    for function in (
        *(kind.function_of(backend) for kind in KINDS.values() if kind.disco),
        *_point_to_point(backend),
    )
)
DISCO_ALLREDUCE: Final = KINDS["allreduce"].function_of("")
DISCO_ALLGATHER: Final = KINDS["allgather"].function_of("")

COLLECTIVES: Final = (
    *(kind.function for kind in KINDS.values() if kind.packed is None),
    CUSTOM_ALLREDUCE,
    ALLREDUCE_RMS_NORM,
    ALLREDUCE_LAYER_NORM,
    RAGGED_ALL_TO_ALL,
    *_OF_BACKENDS,
)
