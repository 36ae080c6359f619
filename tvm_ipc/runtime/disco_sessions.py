# SPDX-License-Identifier: Apache-2.0
"""Disco's own sessions, so that the end of their workers is not the end of the program.

Disco writes to its workers in destructors too. After `shutdown`, or once a worker has died, such
a write fails, and an error in a destructor ends the program, at any later garbage collection. It
also waits for ever for workers that were shut down, and says "Check failed" of those that died.

Disco also catches nothing in its workers: an exception ends them, in a thread of the controller
the whole program.

Here the worker processes of a `ProcessSession` get pipes that can always be written to, the native
functions that `tvm.runtime.disco` calls look whether the session still has its workers, and once
the backend of this package runs in a session, what a worker raises is raised by the next call that
waits for a worker. What a program calls stays as it was.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import tvm_ffi
from tvm.runtime import disco

from tvm_ipc import arguments
from tvm_ipc.contract import BACKENDS
from tvm_ipc.runtime import devices, disco_state, log
from tvm_ipc.runtime.disco_processes import serving, start_workers
from tvm_ipc.runtime.disco_state import originals, usable
from tvm_ipc.runtime.joining import wait_until_joined, wait_until_left
from tvm_ipc.runtime.own_worker import refuse_own_worker

_log: Final = logging.getLogger("tvm_ipc.session")
_native = tvm_ffi.get_global_func
_session_of = _native("tvm_ipc.session.of")
_open = _native("tvm_ipc.session.open")
_abort = _native("tvm_ipc.session.abort")
_close = _native("tvm_ipc.session.close")
_put = _native("tvm_ipc.session.put")

_CONSTRUCTORS: Final = ("SessionThreaded", "SessionProcess", "SocketSession")


#: The worker processes that a thread's call of one of Disco's constructors has started.
_making = threading.local()


def mend() -> None:
    """Put what is here in the place of Disco's own; repeated calls do nothing."""
    if originals:
        return
    api: Any = importlib.import_module("tvm.runtime.disco._ffi_api")
    for functions in (_CONSTRUCTORS, _MENDED):
        for name in functions:
            originals[name] = getattr(api, name)
    for name in _CONSTRUCTORS:
        setattr(api, name, _remembering(originals[name]))
    for name, function in _MENDED.items():
        setattr(api, name, function)
    _replace("runtime.disco.create_process_pool", _create_process_pool)
    for backend in BACKENDS:
        _replace(f"runtime.disco.{backend}.init_ccl", functools.partial(_start, backend))
    main_loop = "runtime.disco.WorkerProcess"
    _replace(main_loop, serving(_native(main_loop)))
    disco.Session.init_ccl = _init_ccl
    os.register_at_fork(after_in_child=disco_state.disown)


def init_ccl(
    session: disco.Session, ccl: str, device_ids: Sequence[int] | None, device: str | None = None
) -> None:
    """Start a collective backend in a session of Disco; `session.init_ccl` says more."""
    arguments.instance(
        "init_ccl: session", session, disco.Session, "a session of tvm.runtime.disco"
    )
    disco_state.state_of(session).check()
    nodes = isinstance(session, disco.SocketSession)
    if nodes and device_ids is not None:  # those of each node
        ids = devices.numbers("init_ccl: device_ids", device_ids, "numbers of devices")
    else:
        ids = devices.of_workers("init_ccl", session.num_workers, device_ids)
    name = arguments.text("init_ccl: ccl", ccl, "the name of a backend")
    if name not in ("auto", *BACKENDS) and _native(f"runtime.disco.{name}.init_ccl", True):
        disco._ffi_api.SessionInitCCL(session, name, ids)  # another library's
        session._clear_ipc_memory_pool()
        return
    if device is None:  # the name of a backend says it
        device = BACKENDS.get(name, "cpu")
    given = ids if nodes else device_ids
    workers = len(ids) if nodes else session.num_workers
    placed = devices.place("init_ccl", workers, device, given, name, "ccl")
    log.start()
    _log.info("a session of Disco gets the backend %s: %s", placed.backend, placed.reason)
    _start(placed.backend, session, placed.ids, placed.otherwise)


def _start(
    backend: str, session: disco.Session, device_ids: tvm_ffi.Shape, otherwise: str = ""
) -> None:
    """Start a backend in a session of Disco, and wait until every worker has joined."""
    state = disco_state.kept_state(session)
    _open(session, backend, otherwise, device_ids, 0.0, 0, 0)
    try:
        wait_until_joined(session, "a session of Disco", state.exit_codes)
    except BaseException:
        _abort(session)
        _close(session)
        raise
    state.guard(session)


def _replace(name: str, function: Callable[..., Any]) -> None:
    tvm_ffi.register_global_func(name, function, override=True)


def _remembering(native: Any) -> Any:
    """Return a constructor that notes what it made."""

    def construct(*args: Any) -> Any:
        _making.workers = []
        session = native(*args)
        disco_state.remember(session, _making.workers)
        return session

    return tvm_ffi.convert(construct)


def _get_global_func(session: Any, name: str) -> Any:
    state = usable(session)
    if not state.functions:
        return originals["SessionGetGlobalFunc"](session, name)
    return state.call(session, state.functions[disco_state.LOOKUP], name)


def _call_packed(session: Any, code: int, register: int, function: Any, *args: Any) -> Any:
    state = usable(session)
    if not state.functions:
        return originals["SessionCallPacked"](session, code, register, function, *args)
    return state.call(session, function, *args)


def _copy_to_worker_0(session: Any, host: Any, remote: Any) -> None:
    state = usable(session)
    if not state.functions:
        originals["SessionCopyToWorker0"](session, host, remote)
    else:
        state.call(
            session, state.functions[disco_state.COPY_FROM_HOST], _put(session, host), 0, remote
        )


def _copy_from_worker_0(session: Any, host: Any, remote: Any) -> None:
    state = usable(session)
    if not state.functions:
        originals["SessionCopyFromWorker0"](session, host, remote)
    else:
        state.call(session, state.functions[disco_state.COPY_TO_HOST], _put(session, host), remote)


def _sync_worker(session: Any, worker: int) -> None:
    state = usable(session)
    state.wait(session, worker, originals["SessionSyncWorker"], session, worker)


def _get_from_remote(reference: Any, worker: int) -> Any:
    session = _session_of(reference)
    if session is None:
        return originals["DRefDebugGetFromRemote"](reference, worker)
    state = usable(session)
    return state.wait(session, worker, originals["DRefDebugGetFromRemote"], reference, worker)


def _copy_from(reference: Any, worker: int, value: Any) -> None:
    session = _session_of(reference)
    if session is None:
        originals["DRefDebugCopyFrom"](reference, worker, value)
        return
    state = usable(session)
    state.wait(session, worker, originals["DRefDebugCopyFrom"], reference, worker, value)


def _shutdown(session: Any) -> None:
    refuse_own_worker(session)
    state = disco_state.state_of(session)
    if not state.shut_down and state.owner == os.getpid():
        state.shut_down = True
        originals["SessionShutdown"](session)
        if state.functions:
            with contextlib.suppress(RuntimeError):  # not open
                wait_until_left(session)


_MENDED: Final[dict[str, Callable[..., Any]]] = {
    "SessionGetGlobalFunc": _get_global_func,
    "SessionCallPacked": _call_packed,
    "SessionCopyToWorker0": _copy_to_worker_0,
    "SessionCopyFromWorker0": _copy_from_worker_0,
    "SessionSyncWorker": _sync_worker,
    "DRefDebugGetFromRemote": _get_from_remote,
    "DRefDebugCopyFrom": _copy_from,
    "SessionShutdown": _shutdown,
}


def _create_process_pool(
    num_workers: int, num_groups: int, entrypoint: str
) -> Callable[[int], Any]:
    """Start the workers; return what tells Disco their pipes, and ends them when it is done."""
    _making.workers = workers = start_workers(num_workers, num_groups, entrypoint)

    def serve(worker_id: int) -> Any:
        if worker_id != 0:
            return tvm_ffi.Shape(workers[worker_id - 1].start())
        for worker in workers:
            worker.close()
        disco_state.forget(workers)
        return None

    return serve


def _init_ccl(session: disco.Session, ccl: str, *device_ids: int) -> None:
    """Initialize a backend for collectives, by the name that `compiled_ccl` returns."""
    init_ccl(session, ccl, device_ids or None)
