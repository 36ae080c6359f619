# SPDX-License-Identifier: Apache-2.0
"""Patch Disco's own sessions, so that a program survives the end of its workers.

Disco writes to its workers in destructors too. After `shutdown`, or once a worker has died, such
a write fails, and an error in a destructor ends the program at any later garbage collection. Disco
also waits indefinitely for workers that were shut down, and raises "Check failed" for dead workers.
It catches no exceptions in its workers: an exception ends the worker, and for a worker that is a
thread of the controller, the whole program.

The patch has three parts. The worker processes of a `ProcessSession` get pipes that can always be
written to. The native functions that `tvm.runtime.disco` calls check whether the session still has
its workers. Once a backend of this package runs in a session, an exception of a worker is raised by
the next call that waits for a worker. The API for programs is unchanged.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import tvm_ffi
from tvm.runtime import disco

from tvm_ipc import arguments
from tvm_ipc.packed_functions import BACKENDS
from tvm_ipc.runtime import (
    device_and_backend_assignment,
    disco_session_liveness_and_errors,
    log,
    standard_fd_reservation,
)
from tvm_ipc.runtime.disco_processes import start_workers, wrap_main_loop
from tvm_ipc.runtime.disco_session_liveness_and_errors import (
    COPY_FROM_HOST,
    COPY_TO_HOST,
    LOOKUP,
    originals,
    usable,
)
from tvm_ipc.runtime.refuse_calls_from_own_workers import refuse_reentrant
from tvm_ipc.runtime.wait_workers_joined_or_left import wait_for_exit, wait_for_workers
from tvm_ipc.tvm_private_names import (
    CREATE_PROCESS_POOL,
    DISCO_CALLS,
    DISCO_CONSTRUCTORS,
    DISCO_INIT_CCL,
    WORKER_MAIN_LOOP,
    clear_ipc_memory_pool,
    disco_api,
    replace_global_func,
)

_log: Final = logging.getLogger("tvm_ipc.session")
_native = tvm_ffi.get_global_func
_session_of = _native("tvm_ipc.session.of")
_open = _native("tvm_ipc.session.open")
_abort = _native("tvm_ipc.session.abort")
_close = _native("tvm_ipc.session.close")
_put = _native("tvm_ipc.session.put")
_call_without_sigpipe = _native("tvm_ipc.call_without_sigpipe")
_retry_in_destructor = _native("tvm_ipc.pool.retry_in_destructor")

#: The worker processes that this thread's current call of a constructor of Disco has started.
_constructing = threading.local()


def patch() -> None:
    """Replace functions of Disco by those of this module; repeated calls do nothing."""
    if originals:
        return
    for constructor in DISCO_CONSTRUCTORS.values():
        constructor.set(_wrap_constructor(constructor.get()))
    for name, call in DISCO_CALLS.items():
        # These write to pipes and sockets. (The constructors start processes.)
        originals[name] = functools.partial(_call_without_sigpipe, call.get())
        call.set(_REPLACEMENTS[name])
    replace_global_func(CREATE_PROCESS_POOL, _create_process_pool)
    replace_global_func(WORKER_MAIN_LOOP, wrap_main_loop(_native(WORKER_MAIN_LOOP)))
    for backend in BACKENDS:
        init_ccl = f"runtime.disco.{backend}.init_ccl"
        replace_global_func(init_ccl, functools.partial(_start, backend))
    DISCO_INIT_CCL.set(_init_ccl)
    os.register_at_fork(after_in_child=disco_session_liveness_and_errors.disown)
    atexit.register(disco_session_liveness_and_errors.end_at_exit, _shutdown)


def init_ccl(
    session: disco.Session, ccl: str, device_ids: Sequence[int] | None, device: str | None = None
) -> None:
    """Start a collective backend in a session of Disco; see `session.init_ccl`."""
    arguments.instance(
        "init_ccl: session", session, disco.Session, "a session of tvm.runtime.disco"
    )
    disco_session_liveness_and_errors.state_of(session).check()
    on_nodes = isinstance(session, disco.SocketSession)
    if on_nodes and device_ids is not None:  # the ids on each node
        ids = device_and_backend_assignment.numbers(
            "init_ccl: device_ids", device_ids, "numbers of devices"
        )
    else:
        ids = device_and_backend_assignment.of_workers("init_ccl", session.num_workers, device_ids)
    name = arguments.text("init_ccl: ccl", ccl, "the name of a backend")
    if name not in ("auto", *BACKENDS) and _native(f"runtime.disco.{name}.init_ccl", True):
        disco_api().SessionInitCCL(session, name, ids)  # a backend of another library
        clear_ipc_memory_pool(session)
        return
    if device is None:
        device = BACKENDS.get(name, "cpu")
    checked_ids = ids if on_nodes else device_ids
    workers = len(ids) if on_nodes else session.num_workers
    assignment = device_and_backend_assignment.assign_devices(
        "init_ccl", workers, device, checked_ids, name, "ccl"
    )
    log.start()
    _log.info("a session of Disco gets the backend %s: %s", assignment.backend, assignment.reason)
    _start(assignment.backend, session, assignment.ids, assignment.otherwise)


def _start(
    backend: str, session: disco.Session, device_ids: tvm_ffi.Shape, otherwise: str = ""
) -> None:
    """Start a backend in a session of Disco, and wait until every worker has joined."""
    standard_fd_reservation.fill()
    state = disco_session_liveness_and_errors.kept_state(session)
    _open(session, backend, otherwise, device_ids, 0.0, 0, 0)
    try:
        wait_for_workers(session, "a session of Disco", state.exit_codes)
    except BaseException:
        _abort(session)
        _close(session)
        raise
    state.guard(session)


def _wrap_constructor(native: Any) -> Any:
    """Return a constructor of Disco that also records the session and its worker processes."""

    def construct(*args: Any) -> Any:
        standard_fd_reservation.fill()
        _constructing.workers = None
        session = native(*args)
        disco_session_liveness_and_errors.remember(session, _constructing.workers)
        return session

    return tvm_ffi.convert(construct)


def _get_global_func(session: Any, name: str) -> Any:
    state = usable(session)
    if not state.functions:
        return originals["SessionGetGlobalFunc"](session, name)
    return state.call(session, state.functions[LOOKUP], name)


def _call_packed(session: Any, code: int, register: int, function: Any, *args: Any) -> Any:
    state = usable(session)
    if not state.functions:
        return originals["SessionCallPacked"](session, code, register, function, *args)
    return state.call(session, function, *args)


def _copy(name: str, function: str, *rank: int) -> Callable[..., None]:
    """Return a function that copies between a host array and worker 0."""

    def copy(session: Any, host: Any, remote: Any) -> None:
        state = usable(session)
        if not state.functions:
            originals[name](session, host, remote)
        else:
            state.call(session, state.functions[function], _put(session, host), *rank, remote)

    return copy


def _sync_worker(session: Any, worker: int) -> None:
    state = usable(session)
    state.wait(session, worker, originals["SessionSyncWorker"], session, worker)


def _debug(name: str) -> Callable[..., Any]:
    """Return a function of a reference that waits for a worker."""

    def call(reference: Any, worker: int, *value: Any) -> Any:
        session = _session_of(reference)
        if session is None:
            return originals[name](reference, worker, *value)
        return usable(session).wait(session, worker, originals[name], reference, worker, *value)

    return call


def _shutdown(session: Any) -> None:
    refuse_reentrant(session)
    state = disco_session_liveness_and_errors.state_of(session)
    if not state.shut_down and state.owner == os.getpid():
        state.shut_down = True
        originals["SessionShutdown"](session)
        if state.functions:
            with contextlib.suppress(RuntimeError):  # the session server is not open
                wait_for_exit(session)


_REPLACEMENTS: Final[dict[str, Callable[..., Any]]] = {
    "SessionGetGlobalFunc": _get_global_func,
    "SessionCallPacked": _call_packed,
    "SessionCopyToWorker0": _copy("SessionCopyToWorker0", COPY_FROM_HOST, 0),
    "SessionCopyFromWorker0": _copy("SessionCopyFromWorker0", COPY_TO_HOST),
    "SessionSyncWorker": _sync_worker,
    "DRefDebugGetFromRemote": _debug("DRefDebugGetFromRemote"),
    "DRefDebugCopyFrom": _debug("DRefDebugCopyFrom"),
    "SessionShutdown": _shutdown,
}


def _create_process_pool(num_workers: int, num_groups: int, entrypoint: str) -> Any:
    """Start the workers; return a function that gives Disco their pipes, and ends them for 0."""
    _constructing.workers = workers = start_workers(num_workers, num_groups, entrypoint)

    def serve(worker_id: int) -> Any:
        if worker_id != 0:
            return tvm_ffi.Shape(workers[worker_id - 1].pipes or ())
        for worker in workers:
            worker.close()
        disco_session_liveness_and_errors.forget(workers)
        return None

    return _retry_in_destructor(tvm_ffi.convert(serve))


def _init_ccl(session: disco.Session, ccl: str, *device_ids: int) -> None:
    """Initialize a collective backend; the method `init_ccl` of Disco's sessions."""
    init_ccl(session, ccl, device_ids or None)
