# SPDX-License-Identifier: Apache-2.0
"""What sessions and workers call: nothing of it may stand in a compiled program."""

from __future__ import annotations

from typing import Final

from tvm_ipc.contract.collectives import DISCO
from tvm_ipc.contract.function import Function, Registered
from tvm_ipc.contract.values import BACKENDS


def _of_backend(backend: str) -> tuple[Function, ...]:
    prefix = f"{DISCO}{backend}."
    return (
        Function(
            f"{prefix}init_ccl",
            "(session: Session, device_ids: Shape)",
            "controller: start, and wait for the workers",
            registered=Registered.PYTHON,
        ),
        Function(
            f"{prefix}init_ccl_per_worker",
            "(device_ids: Shape, invitation: bytes)",
            "worker: join the group that the invitation names",
        ),
        Function(f"{prefix}sync_worker", "()", "wait until all that was started here is done"),
        Function(
            f"{prefix}test_send_to_next_group_recv_from_prev_group",
            "(buffer: Tensor)",
            "exercise that TVM's own tests call",
        ),
        Function(
            f"{prefix}test_worker2_sends_to_worker0",
            "(buffer: Tensor)",
            "exercise that TVM's own tests call",
        ),
    )


SESSION_FUNCTIONS: Final = (
    Function("runtime.disco.compiled_ccl", "() -> str", "name of the default backend"),
    *(one for backend in BACKENDS for one in _of_backend(backend)),
    Function("tvm_ipc.blas.info", "() -> str", "JSON: the BLAS, which is loaded for it"),
    Function("tvm_ipc.blas.use_kernels", "(name: str)", "for tests: kernels beside the BLAS"),
    Function("tvm_ipc.blas.find", "() -> str", "path of the BLAS", registered=Registered.PYTHON),
    Function(
        "tvm_ipc.arena_stats",
        "() -> str",
        "JSON: this worker's arena, in bytes; on GPUs also how others map it, and why so",
    ),
    Function(
        "tvm_ipc.refusal",
        "(backend: str, device_ids: Shape) -> str",
        "controller: why a backend cannot work between workers on these devices, or nothing",
    ),
    Function(
        "tvm_ipc.cuda.bring_up",
        "()",
        "worker: load TVM's part for GPUs",
        registered=Registered.PYTHON,
    ),
    Function(
        "tvm_ipc.use_library",
        "(backend: str, path: str)",
        "the file of the library that a backend loads when it is needed; empty: the system's",
    ),
    Function("tvm_ipc.nccl.info", "() -> str", "JSON: what NCCL is here, or why there is none"),
    Function("tvm_ipc.native_info", "() -> str", "JSON: what the native library found here"),
    Function("tvm_ipc.cuda.info", "() -> str", "JSON: what of CUDA is here"),
    Function("tvm_ipc.cuda.probe", "(devices: Shape) -> str", "JSON: how pairs share memory"),
    Function("tvm_ipc.numbers", "() -> str", "JSON: what is in contract.values, for a test"),
    Function(
        "tvm_ipc.configure",
        "(timeout: float, arena_limit: int, instruction_set: str)",
        "what sessions of this process use that name nothing else",
    ),
    Function(
        "tvm_ipc.session.open",
        "(session: Session, backend: str, otherwise: str, device_ids: Shape, timeout: float, "
        "arena_limit: int, room: int)",
        "controller: make the group and invite the workers, who go on with the backend `otherwise` "
        "where the first one cannot connect them; 0 means the configured value; "
        "at most `room` bytes of commands are sent before workers read",
    ),
    Function(
        "tvm_ipc.session.open_nodes",
        "(session: Session, backend: str, device_ids: Shape, timeout: float, room: int, "
        "nodes: Array[str], ranks: Shape, invitations: Array[bytes], links: Shape)",
        "controller: make the group of a session of several nodes, whose hubs are open, and invite "
        "the workers; `ranks` is how many each node has, `links` the connection to its hub",
    ),
    Function(
        "tvm_ipc.node.open",
        "(backend: str, nodes: Array[str], ranks: Shape, node: int, timeout: float, "
        "arena_limit: int, instruction_set: str, flat: bool) -> Object",
        "agent: the hub of its node",
    ),
    Function(
        "tvm_ipc.node.invitation", "(node: Object) -> bytes", "agent: what its workers join with"
    ),
    Function(
        "tvm_ipc.node.attach",
        "(node: Object, link: int)",
        "agent: the connection to the controller's hub, proven",
    ),
    Function("tvm_ipc.node.close", "(node: Object)", "agent: close its hub"),
    Function(
        "tvm_ipc.node.wire", "(node: Object) -> Object", "agent: the engine's side of the wire"
    ),
    Function(
        "tvm_ipc.node.serve_mpi",
        "(wire: Object, library: str, handles: Shape, sizes: Shape, any_tag: int)",
        "agent: move the messages that ranks post by MPI, until it is stopped; `library` is loaded "
        "and has MPI's functions, `handles` are of two communicators and MPI_BYTE, `sizes` the "
        "bytes of a request and a status",
    ),
    Function("tvm_ipc.node.stop", "(wire: Object)", "agent: end that"),
    Function("tvm_ipc.node.largest_tag", "() -> int", "agent: the largest tag of a message"),
    Function(
        "tvm_ipc.session.wait_joined",
        "(session: Session, seconds: float) -> bool",
        "controller: whether every worker joined",
    ),
    Function(
        "tvm_ipc.session.send",
        "(session: Session, kind: int, register: int, func: DRef, *args: Any) -> DRef | int",
        "controller: call func on every worker; without room for it, the number of its bytes",
        registered=Registered.UNTYPED,
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
        "controller: a Progress, as far as it got within the time",
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
        "tvm_ipc.session.team",
        "(session: Session, ranks: Shape, copy: int) -> int",
        "controller: what tvm_ipc.team returns in the workers",
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
        "(func: Function, *args: Any) -> Any",
        "worker: call func; an exception is sent to the controller instead of escaping",
        registered=Registered.UNTYPED,
    ),
    Function("tvm_ipc.worker.done", "(ticket: int)", "worker: tell the controller it got here"),
    Function(
        "tvm_ipc.worker.fetch",
        "(value: Any, rank: int, key: int)",
        "worker: send a value to the controller, if this is the rank",
    ),
    Function(
        "tvm_ipc.worker.fetch_limited",
        "(value: Any, rank: int, key: int, most: int)",
        "worker: the same, but of a tensor of more bytes its shape and type alone",
    ),
    Function(
        "tvm_ipc.worker.take_from_host",
        "(key: int, otherwise: Any) -> Any",
        "worker: the tensor that session.put left, in worker 0; in others what is given",
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
        "(values: Array[Any] | None, *args: Any) -> Array[Any]",
        "worker: gather the arguments of a command that is too long to be sent at once",
        registered=Registered.UNTYPED,
    ),
    Function(
        "tvm_ipc.worker.join_pieces",
        "(kind: str, pieces: Array[Any]) -> Any",
        "worker: one long argument, a str, bytes or Shape, out of its bytes",
    ),
    Function(
        "tvm_ipc.worker.call_with_list",
        "(func: Function, args: Array[Any]) -> Any",
        "worker: call func with arguments that were gathered",
    ),
    Function(
        "tvm_ipc.worker.call_in_team",
        "(func: Function, team: int, *args: Any) -> Any",
        "worker: call func in the members of a team that was made, and nothing in others",
        registered=Registered.UNTYPED,
    ),
    Function(
        "tvm_ipc.worker.rank", "() -> int", "worker: the rank that the calling thread acts for"
    ),
    Function(
        "tvm_ipc.worker.device",
        "() -> Device",
        "worker: what that rank computes on, where its tensors are",
    ),
    Function(
        "tvm_ipc.worker.share_rank",
        "() -> Function",
        "worker: a function by which other threads act for its rank (true), and stop it (false)",
    ),
    Function(
        "tvm_ipc.worker.emulate_link",
        "(latency: float, bandwidth: float, jitter: float)",
        "worker: what collectives bring comes as late as over a link; seconds, and bytes a second",
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
        "tvm_ipc.worker.has_library",
        "(path: str, digest: str) -> bool",
        "worker: whether its node has a library, there or among those that were sent",
        registered=Registered.PYTHON,
    ),
    Function(
        "tvm_ipc.worker.keep_library",
        "(path: str, digest: str, contents: Tensor)",
        "worker: write a library whose bytes were sent, if its node lacks it",
        registered=Registered.PYTHON,
    ),
    Function(
        "tvm_ipc.worker.load_library",
        "(path: str, digest: str, device: Device | None) -> Module",
        "worker: load a library that its node has",
        registered=Registered.PYTHON,
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
        "(reference: DRef) -> Object",
        "controller: the session of a reference of Disco's, or None",
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
        "controller: starts the processes of a tvm_ipc.Session",
        registered=Registered.PYTHON,
    ),
)
