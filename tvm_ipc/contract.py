# SPDX-License-Identifier: Apache-2.0
"""What compiled programs and the runtime agree on: names, signatures, scopes, strategies.

Every packed function that the native library registers is listed here once, with its
signature. Passes emit calls to these names and know nothing else about the runtime; a test
compares the table with what the library registers. This module imports nothing of ours.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum, IntFlag
from typing import Final, NamedTuple, SupportsIndex

#: The memory scope of a buffer that peers map directly. Upstream's name.
IPC_MEMORY: Final = "ipc_memory"

#: Name of the collective backend between workers on CPUs of one machine.
SHM: Final = "shm"

#: The function of a compiled module that asks for the workers that it was compiled for.
REQUIRE_WORKERS: Final = "tvm_ipc_require_workers"

#: The most workers that one session can have.
MAX_WORKERS: Final = 64


class AllReduceStrategy(IntEnum):
    """How an all-reduce moves its data. Upstream's numbers; the result has the same bits."""

    RING = 0  #: what the ordinary all-reduce would choose
    ONESHOT = 1  #: every rank reads the whole input of every rank
    TWOSHOT = 2  #: every rank reduces one slice, then gathers the others' slices
    AUTO = 3  #: chosen by size and number of ranks

    @classmethod
    def of(cls, given: object) -> AllReduceStrategy:
        """Return the strategy with a number or a name, such as "oneshot"."""
        names = {strategy.name.lower(): strategy for strategy in cls}
        if isinstance(given, str) and given in names:
            return names[given]
        if isinstance(given, SupportsIndex) and not isinstance(given, bool):
            for strategy in cls:
                if strategy == given.__index__():
                    return strategy
        known = ", ".join(f"{one.name.lower()!r} ({int(one)})" for one in cls)
        raise ValueError(f"there is no all-reduce strategy {given!r}; there are {known}")


class ReduceKind(IntEnum):
    """The reduction of an all-reduce. Upstream's numbers."""

    SUM = 0
    PROD = 1
    MIN = 2
    MAX = 3
    AVG = 4


class AllReduceFlag(IntFlag):
    """What a compiler may promise about one all-reduce."""

    NONE = 0
    #: The input is not written again before this rank's next collective over the same ranks, so
    #: the collective may leave out the barrier that protects it from slower peers.
    NO_EXIT_BARRIER = 1


class Epilogue(IntEnum):
    """What may follow a matrix product. ADD and MULTIPLY take an operand that broadcasts."""

    ADD = 1
    MULTIPLY = 2
    RELU = 3  #: of NaN it is 0, as in TVM's kernels
    GELU = 4
    GELU_TANH = 5
    SILU = 6


#: The most steps of an epilogue.
MAX_STEPS: Final = 8


def pack_digits(digits: Iterable[int]) -> int:
    """Put a list of small numbers into one, a hexadecimal digit each, the first one lowest."""
    return sum(digit << (4 * place) for place, digit in enumerate(digits))


class Function(NamedTuple):
    """A packed function: its name, its signature, and what it does in one line."""

    name: str
    signature: str
    summary: str


_CUDA_IPC = "runtime.disco.cuda_ipc."
_SHM = f"runtime.disco.{SHM}."

#: Functions under upstream's names, called by programs that upstream's passes lowered.
UPSTREAM_FUNCTIONS: Final = (
    Function("runtime.disco.compiled_ccl", "() -> str", "name of the default backend"),
    Function(
        _CUDA_IPC + "alloc_storage",
        "(shape: Shape, dtype: dtype) -> Storage",
        "storage in memory that peers map, for vm.builtin.alloc_tensor",
    ),
    Function(
        _CUDA_IPC + "custom_allreduce",
        "(send: Tensor, strategy: int, recv: Tensor)",
        "sum over all workers, refused where there are groups; never writes into send",
    ),
    Function(
        _CUDA_IPC + "cuda_ipc_memory_allocator_clear",
        "()",
        "returns the arena's unused pages to the system",
    ),
)

#: The collective backend `shm`, in the form that Disco's own functions dispatch to.
SHM_FUNCTIONS: Final = (
    Function(
        _SHM + "init_ccl",
        "(session: Session, device_ids: Shape)",
        "controller: start, and wait for the workers; registered from Python",
    ),
    Function(
        _SHM + "init_ccl_per_worker",
        "(device_ids: Shape, invitation: bytes)",
        "worker: join the group that the invitation names",
    ),
    Function(
        _SHM + "allreduce",
        "(send: Tensor, kind: int, in_group: bool, recv: Tensor)",
        "reduction over all ranks, kind as in ReduceKind",
    ),
    Function(
        _SHM + "allgather",
        "(send: Tensor, in_group: bool, recv: Tensor)",
        "flat concatenation in rank order",
    ),
    Function(
        _SHM + "broadcast_from_worker0",
        "(send: Tensor | None, in_group: bool, recv: Tensor)",
        "copy of the first rank's send to every recv",
    ),
    Function(
        _SHM + "scatter_from_worker0",
        "(send: Tensor | None, in_group: bool, recv: Tensor)",
        "equal flat chunks of the first rank's send",
    ),
    Function(
        _SHM + "gather_to_worker0",
        "(send: Tensor, in_group: bool, recv: Tensor | None)",
        "flat concatenation on the first rank",
    ),
    Function(_SHM + "recv_from_worker0", "(recv: Tensor)", "receive from worker 0"),
    Function(_SHM + "send_to_next_group", "(send: Tensor)", "to the same place a group later"),
    Function(_SHM + "recv_from_prev_group", "(recv: Tensor)", "from the same place a group before"),
    Function(_SHM + "send_to_worker", "(send: Tensor, receiver: int)", "to a worker by its id"),
    Function(_SHM + "recv_from_worker", "(recv: Tensor, sender: int)", "from a worker by its id"),
    Function(_SHM + "sync_worker", "()", "nothing is in flight when a CPU collective returns"),
    Function(
        _SHM + "test_send_to_next_group_recv_from_prev_group",
        "(buffer: Tensor)",
        "exercise that TVM's own tests call",
    ),
    Function(
        _SHM + "test_worker2_sends_to_worker0",
        "(buffer: Tensor)",
        "exercise that TVM's own tests call",
    ),
)

#: What our own passes and sessions call beyond upstream's functions.
OWN_FUNCTIONS: Final = (
    Function(
        "tvm_ipc.allreduce",
        "(send: Tensor, kind: int, in_group: bool, strategy: int, flags: int, recv: Tensor)",
        "all-reduce with everything a compiler can say about it",
    ),
    Function(
        "tvm_ipc.require_workers",
        "(workers: int, groups: int)",
        "an error in a session of another size: the caller was compiled for this one",
    ),
    Function(
        "tvm_ipc.alloc_tensor",
        "(storage: Storage, offset: int, shape: Shape, dtype: dtype) -> Tensor",
        "tensor in a storage, its data pointer moved by offset bytes",
    ),
    Function(
        "tvm_ipc.require_bounds",
        "(what: str, value: int, least: int, most: int)",
        "an error where a value is not in bounds: the memory plan of the caller relies on them",
    ),
    Function(
        "tvm_ipc.copy",
        "(source: Tensor, target: Tensor)",
        "copy between memory scopes and devices; equal types and sizes",
    ),
    Function(
        "tvm_ipc.blas.matmul",
        "(a_axes: int, b_axes: int, steps: int, a: Tensor, b: Tensor, *operands: Tensor, "
        "out: Tensor)",
        "product of a and b, their axes permuted first, and an epilogue; pack_digits of axes and "
        "of Epilogue, 0 for none",
    ),
    Function("tvm_ipc.blas.info", "() -> str", "JSON: the BLAS, which is loaded for it"),
    Function("tvm_ipc.blas.use_kernels", "(name: str)", "for tests: kernels beside the BLAS"),
    Function("tvm_ipc.blas.find", "() -> str", "path of the BLAS; registered from Python"),
    Function("tvm_ipc.arena_stats", "() -> str", "JSON: this worker's arena, in bytes"),
    Function("tvm_ipc.arena_offset", "(tensor: Tensor) -> int", "place in the arena, -1 outside"),
    Function("tvm_ipc.native_info", "() -> str", "JSON: what the native library found here"),
    Function(
        "tvm_ipc.configure",
        "(timeout: float, arena_limit: int, instruction_set: str)",
        "what sessions of this process use that name nothing else",
    ),
    Function(
        "tvm_ipc.session.open",
        "(session: Session, device_ids: Shape, timeout: float, arena_limit: int, room: int)",
        "controller: make the group and invite the workers; 0 means the configured value; "
        "at most `room` bytes of commands are sent before workers read",
    ),
    Function(
        "tvm_ipc.session.wait_joined",
        "(session: Session, seconds: float) -> bool",
        "controller: whether every worker joined",
    ),
    Function(
        "tvm_ipc.session.send",
        "(session: Session, 0, 0, func: DRef, *args) -> DRef | int",
        "controller: call func on every worker; without room for it, the number of its bytes",
    ),
    Function(
        "tvm_ipc.session.send_ticket",
        "(session: Session, done: DRef, ticket: int)",
        "controller: let every worker call tvm_ipc.worker.done",
    ),
    Function(
        "tvm_ipc.session.get_function",
        "(session: Session, name: str) -> DRef",
        "controller: a function that every worker has",
    ),
    Function(
        "tvm_ipc.session.wait",
        "(session: Session, ticket: int, seconds: float) -> int",
        "controller: 0 every worker passed, 1 not yet, 2 something to report",
    ),
    Function(
        "tvm_ipc.session.report",
        "(session: Session) -> str",
        "controller: JSON of joined, dead and failed ranks and of their errors",
    ),
    Function(
        "tvm_ipc.session.expect",
        "(session: Session, key: int) -> Function",
        "controller: a function that takes the value which tvm_ipc.worker.fetch sends",
    ),
    Function(
        "tvm_ipc.session.recover",
        "(session: Session)",
        "controller: forget errors and make the group usable again; every worker is idle",
    ),
    Function(
        "tvm_ipc.session.abort",
        "(session: Session)",
        "controller: end every wait of the workers",
    ),
    Function("tvm_ipc.session.close", "(session: Session)", "controller: forget the group"),
    Function(
        "tvm_ipc.session.wait_left",
        "(session: Session, seconds: float) -> bool",
        "controller: whether every worker left",
    ),
    Function(
        "tvm_ipc.session.put",
        "(session: Session, value: Any) -> int",
        "controller: leave a value for worker 0",
    ),
    Function(
        "tvm_ipc.session.fail_at_exit",
        "()",
        "controller: the program ends with exit code 1 where it would end with 0",
    ),
    Function(
        "tvm_ipc.worker.guard",
        "(func: Function, *args) -> Any",
        "worker: call func; an exception is sent to the controller instead of escaping",
    ),
    Function("tvm_ipc.worker.done", "(ticket: int)", "worker: tell the controller it got here"),
    Function(
        "tvm_ipc.worker.fetch",
        "(value: Any, rank: int, key: int)",
        "worker: send a value to the controller, if this is the rank",
    ),
    Function(
        "tvm_ipc.worker.copy_from_host",
        "(key: int, receiver: int, target: Tensor | None)",
        "worker: copy the tensor that session.put left into the receiver's target",
    ),
    Function(
        "tvm_ipc.worker.copy_to_host",
        "(key: int, source: Tensor | None)",
        "worker 0: copy source into the tensor that session.put left",
    ),
    Function(
        "tvm_ipc.worker.get_global_func",
        "(name: str) -> Function",
        "worker: a global function, or an error that says how to make it known",
    ),
    Function(
        "tvm_ipc.worker.find_function",
        "(name: str) -> Function",
        "worker: a global function; one that is missing fails when it is called",
    ),
    Function(
        "tvm_ipc.worker.append",
        "(values: Array | None, *args) -> Array",
        "worker: gather the arguments of a command that is too long to be sent at once",
    ),
    Function(
        "tvm_ipc.worker.join_pieces",
        "(kind: str, pieces: Array) -> str | bytes | Shape",
        "worker: one long argument out of its bytes",
    ),
    Function(
        "tvm_ipc.worker.call_with_list",
        "(func: Function, args: Array) -> Any",
        "worker: call func with arguments that were gathered",
    ),
    Function(
        "tvm_ipc.worker.set_threads",
        "(threads: int)",
        "worker: how many threads TVM's kernels may use here, on any core",
    ),
    Function(
        "tvm_ipc.worker.get_function",
        "(module: Module, name: str) -> Function",
        "worker: a function of a module, or an error that names it",
    ),
    Function(
        "tvm_ipc.worker.call_if_present",
        "(module: Module, name: str)",
        "worker: call a function without parameters of a module, if that has it",
    ),
    Function(
        "tvm_ipc.worker.serve_parent",
        "(read_fd: int, write_fd: int)",
        "worker: this process serves the one that started it, through these pipes alone",
    ),
    Function(
        "tvm_ipc.session.rank_here",
        "(session: Session | None) -> int",
        "controller: the rank of the calling thread, if it is a worker of the session; else -1",
    ),
    Function(
        "tvm_ipc.session.of",
        "(reference: DRef) -> Session | None",
        "controller: the session of a reference of Disco's",
    ),
    Function(
        "tvm_ipc.keep_from_children",
        "(file: int)",
        "a descriptor leads nowhere in processes that are forked off this one",
    ),
    Function("tvm_ipc.close_kept", "(file: int)", "close such a descriptor"),
    Function(
        "tvm_ipc.pipes.watch",
        "(pid: int, reading_end: int, writing_end: int)",
        "controller: a worker's pipe that can be written to when the worker has ended",
    ),
    Function("tvm_ipc.pipes.close", "(writing_end: int)", "controller: close such a pipe"),
    Function(
        "tvm_ipc.create_process_pool",
        "(num_workers: int, num_groups: int, key: str) -> Function",
        "controller: starts the processes of a tvm_ipc.Session; registered from Python",
    ),
)

FUNCTIONS: Final = UPSTREAM_FUNCTIONS + SHM_FUNCTIONS + OWN_FUNCTIONS
