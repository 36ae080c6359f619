# SPDX-License-Identifier: Apache-2.0
"""The functions that sessions and workers call; compiled programs must not call them.

A declaration is followed by an indented summary. A line that is indented twice continues the
declaration. BACKEND stands for the name of each backend.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from tvm_ipc.packed_functions.constants_shared_with_native_library import BACKENDS
from tvm_ipc.packed_functions.function_signature_and_effects import Function, Registered

#: Registered by the native library.
_NATIVE: Final = """
runtime.disco.compiled_ccl() -> str
    name of the default backend
runtime.disco.BACKEND.init_ccl_per_worker(device_ids: Shape, invitation: bytes)
    worker: join the session that the invitation names
runtime.disco.BACKEND.sync_worker()
    wait until all operations that were started here are done
runtime.disco.BACKEND.test_send_to_next_group_recv_from_prev_group(buffer: Tensor)
    exercise for TVM's own tests
runtime.disco.BACKEND.test_worker2_sends_to_worker0(buffer: Tensor)
    exercise for TVM's own tests
tvm_ipc.blas.info() -> str
    JSON: the BLAS, which is loaded first
tvm_ipc.blas.use_kernels(name: str)
    for tests: select kernels other than the BLAS's
tvm_ipc.arena_stats() -> str
    JSON: this worker's arena, in bytes; on GPUs also how others map it, and the reason
tvm_ipc.bytes_received() -> int
    bytes that the collectives of this worker have received from others, on CPUs
tvm_ipc.refusal(backend: str, device_ids: Shape) -> str
    controller: the reason why a backend cannot connect workers on these devices, or nothing
tvm_ipc.use_library(backend: str, path: str)
    set the file of the library that a backend loads on demand; empty: the system's
tvm_ipc.nccl.info() -> str
    JSON: the NCCL of this process, or why there is none
tvm_ipc.native_info() -> str
    JSON: the instruction sets and system calls that the native library may use
tvm_ipc.cuda.info() -> str
    JSON: the CUDA driver and devices of this process
tvm_ipc.cuda.probe(devices: Shape) -> str
    JSON: how pairs of devices share memory
tvm_ipc.numbers() -> str
    JSON: the numbers of packed_functions.constants_shared_with_native_library, for a test
tvm_ipc.configure(timeout: float, arena_limit: int, instruction_set: str)
    set the defaults of the sessions of this process
tvm_ipc.session.open(session: Session, backend: str, otherwise: str, device_ids: Shape, timeout:
        float, arena_limit: int, room: int)
    controller: open the session server and invite the workers, which use the backend
    `otherwise` if the first one cannot connect them; 0 means the configured value; at most
    `room` bytes of commands are sent before workers read
tvm_ipc.session.open_nodes(session: Session, backend: str, device_ids: Shape, timeout: float,
        room: int, nodes: Array[str], ranks: Shape, invitations: Array[bytes], links: Shape)
    controller: open a session on several nodes, whose session servers are open, and invite the
    workers; `ranks` is the number of ranks of each node, `links` the connection to its session
    server
tvm_ipc.node.open(backend: str, nodes: Array[str], ranks: Shape, node: int, timeout: float,
        arena_limit: int, instruction_set: str, flat: bool) -> Object
    agent: open the session server of its node
tvm_ipc.node.invitation(node: Object) -> bytes
    agent: the invitation of its workers
tvm_ipc.node.attach(node: Object, link: int)
    agent: use an authenticated connection to the controller's session server
tvm_ipc.node.close(node: Object)
    agent: close its session server
tvm_ipc.node.ring(node: Object) -> Object
    agent: the ring through which ranks and the engine exchange messages
tvm_ipc.node.serve_mpi(wire: Object, library: str, handles: Shape, sizes: Shape, any_tag: int)
    agent: transfer the messages of the ranks by MPI, until it is stopped; `library` is the
    loaded MPI library, `handles` are two communicators and MPI_BYTE, `sizes` the bytes of a
    request and a status
tvm_ipc.node.stop(wire: Object)
    agent: stop tvm_ipc.node.serve_mpi
tvm_ipc.node.largest_tag() -> int
    agent: the largest tag of a message
tvm_ipc.session.wait_joined(session: Session, seconds: float) -> bool
    controller: wait until every worker has joined; return whether they have
tvm_ipc.session.send(session: Session, kind: int, register: int, func: DRef, *args: Any) -> DRef
        | int
    controller: call func on every worker; the size of the command if it does not fit
tvm_ipc.session.send_ticket(session: Session, done: DRef, ticket: int)
    controller: make every worker call tvm_ipc.worker.done
tvm_ipc.session.get_function(session: Session, name: str) -> DRef
    controller: a function that every worker has
tvm_ipc.session.wait(session: Session, ticket: int, seconds: float) -> int
    controller: wait for a ticket; return a Progress
tvm_ipc.session.report(session: Session) -> str
    controller: JSON of joined, dead and failed ranks and of their errors
tvm_ipc.session.expect(session: Session, key: int) -> Function
    controller: a function that returns the value which tvm_ipc.worker.fetch sends
tvm_ipc.session.team(session: Session, ranks: Shape, copy: int) -> int
    controller: the id that tvm_ipc.team returns in the workers
tvm_ipc.session.recover(session: Session)
    controller: discard errors and make the session usable again; every worker is idle
tvm_ipc.session.abort(session: Session)
    controller: end all waits of the workers
tvm_ipc.session.close(session: Session)
    controller: close the session server
tvm_ipc.session.wait_left(session: Session, seconds: float) -> bool
    controller: wait until every worker has left; return whether they have
tvm_ipc.session.put(session: Session, value: Any) -> int
    controller: store a value for worker 0; return its key
tvm_ipc.session.fail_at_exit()
    controller: make the program exit with code 1 where it would exit with 0
tvm_ipc.worker.guard(func: Function, *args: Any) -> Any
    worker: call func; an exception is sent to the controller instead of escaping
tvm_ipc.worker.done(ticket: int)
    worker: report a ticket to the controller
tvm_ipc.worker.fetch(value: Any, rank: int, key: int)
    worker: send a value to the controller, if this is the rank
tvm_ipc.worker.fetch_limited(value: Any, rank: int, key: int, most: int)
    worker: the same; of a tensor above a size, send only its shape and type
tvm_ipc.worker.tensor_of_bytes(bytes: bytes, shape: Shape, dtype: dtype) -> Tensor
    worker: a tensor on the worker's device that has these bytes
tvm_ipc.worker.take_from_host(key: int, otherwise: Any) -> Any
    worker: the tensor that session.put stored, in worker 0; `otherwise` in other workers
tvm_ipc.worker.copy_from_host(key: int, receiver: int, target: Tensor | None)
    worker: copy the tensor that session.put stored into the receiver's target
tvm_ipc.worker.copy_to_host(key: int, source: Tensor | None)
    worker 0: copy source into the tensor that session.put stored
tvm_ipc.worker.get_global_func(name: str) -> Function
    worker: a global function; the error for a missing one explains how to register it
tvm_ipc.worker.find_function(name: str) -> Function
    worker: a global function; a missing one fails when it is called
tvm_ipc.worker.append(values: Array[Any] | None, *args: Any) -> Array[Any]
    worker: collect the arguments of a command that is too long to be sent at once
tvm_ipc.worker.concat_chunks(kind: str, pieces: Array[Any]) -> Any
    worker: build one long argument, a str, bytes or Shape, from its bytes
tvm_ipc.worker.call_with_list(func: Function, args: Array[Any]) -> Any
    worker: call func with collected arguments
tvm_ipc.worker.call_in_team(func: Function, team: int, *args: Any) -> Any
    worker: call func in the members of a user-created team, and nothing in other workers
tvm_ipc.worker.empty_result(collective: str, source: Tensor | None, parts: Shape, root: int,
        team: int) -> Tensor | None
    worker: allocate the result of a collective, whose shape follows from its input; only for
    the member with index `root` if that is not -1; `parts` as in tvm_ipc.all_to_all
tvm_ipc.worker.rank() -> int
    worker: the rank that the calling thread acts for
tvm_ipc.worker.device() -> Device
    worker: the device of that rank, where its tensors are allocated
tvm_ipc.worker.share_rank() -> Function
    worker: a function that lets the calling thread act for the rank (true), or stop (false)
tvm_ipc.worker.emulate_link(latency: float, bandwidth: float, jitter: float)
    worker: delay received data as a link would; seconds, and bytes per second
tvm_ipc.worker.set_threads(threads: int)
    worker: set the number of threads that TVM's kernels may use, on any core
tvm_ipc.worker.get_function(module: Module, name: str) -> Function
    worker: a function of a module; the error for a missing one names it
tvm_ipc.worker.call_if_present(module: Module, name: str)
    worker: call a function of a module without arguments, if the module has it
tvm_ipc.worker.serve_parent(read_fd: int, write_fd: int)
    worker: serve the parent process through these pipes, which no child inherits
tvm_ipc.session.rank_here(session: Session | None) -> int
    controller: the rank of the calling thread, if it is a worker of the session; else -1
tvm_ipc.session.of(reference: DRef) -> Object
    controller: the session of a reference of Disco's, or None
tvm_ipc.session.weak_reference(session: Session) -> Function
    controller: a function that returns whether the session still exists; called with True, it
    also prevents that the session is ever destroyed, for forked children
tvm_ipc.call_without_sigpipe(function: Function, *args: Any) -> Any
    controller: call a function whose writes to a pipe or socket without a reader raise no
    SIGPIPE; it starts no process
tvm_ipc.keep_from_children(file: int)
    make a descriptor point to /dev/null in processes that are forked from this one
tvm_ipc.close_kept(file: int)
    close a descriptor of tvm_ipc.keep_from_children
tvm_ipc.create_process_pool(num_workers: int, num_groups: int, key: str) -> Function
    controller: serve the worker processes of a tvm_ipc.Session to Disco, by the key of their pool
tvm_ipc.pool.offer(key: str, null_device: int, descriptors: Shape)
    controller: own the descriptors of a pool: /dev/null, and pairs to read from and to write to
    each worker
tvm_ipc.pool.hung_up(key: str) -> bool
    controller: whether a worker of the pool has closed its end of a pipe
tvm_ipc.pool.mute(key: str)
    controller: discard what is still written to the workers of a pool
tvm_ipc.pool.close(key: str) -> bool
    controller: close the descriptors of a pool, unless Disco has destroyed its session; return
    whether they were open
tvm_ipc.pool.retry_in_destructor(pool: Function) -> Function
    controller: a pool that Disco calls in its destructor, where no error may be raised: the pool is
    called again after one
tvm_ipc.pipes.watch(pid: int, reading_end: int, writing_end: int, reply: int)
    controller: keep a worker's pipe writable after the worker has ended, and own its descriptors
    and the one to read from the worker
tvm_ipc.pipes.close(writing_end: int)
    controller: close the descriptors of tvm_ipc.pipes.watch, once
"""

#: Registered by modules of the package.
_PYTHON: Final = """
runtime.disco.BACKEND.init_ccl(session: Session, device_ids: Shape)
    controller: start the backend, and wait for the workers
tvm_ipc.blas.find() -> str
    path of the BLAS
tvm_ipc.cuda.bring_up() -> int
    worker: load TVM's GPU library; return the number of CUDA's queues if threads may capture
    collectives in graphs, else 0
tvm_ipc.worker.has_library(path: str, digest: str) -> bool
    worker: whether its node has a library, at this path or among those that were sent
tvm_ipc.worker.keep_library(path: str, digest: str, contents: Tensor)
    worker: write a library that was sent, if its node lacks it
tvm_ipc.worker.load_library(path: str, digest: str, device: Device | None) -> Module
    worker: load a library that its node has
"""


def _declared(table: str, registered: Registered) -> Iterator[Function]:
    """Yield the functions that a table declares."""
    for declaration, summary in re.findall(r"^(\S.*(?:\n {8}.*)*)\n((?: {4}.*\n)+)", table, re.M):
        name, parenthesis, signature = " ".join(declaration.split()).partition("(")
        for backend in BACKENDS if "BACKEND" in name else ("",):
            yield Function(
                name.replace("BACKEND", backend),
                parenthesis + signature,
                " ".join(summary.split()),
                registered=Registered.UNTYPED if "*" in signature else registered,
            )


SESSION_FUNCTIONS: Final = (
    *_declared(_NATIVE, Registered.NATIVE),
    *_declared(_PYTHON, Registered.PYTHON),
)
