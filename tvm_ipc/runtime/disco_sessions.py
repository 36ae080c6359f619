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
import ctypes
import importlib
import itertools
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import tvm_ffi
from tvm.runtime import disco

from tvm_ipc import arguments
from tvm_ipc.contract import SHM
from tvm_ipc.errors import (
    IPCError,
    RankError,
    SessionClosedError,
    WorkerDiedError,
    WorkerError,
    causes,
)
from tvm_ipc.runtime import error_output
from tvm_ipc.runtime.joining import wait_until_joined
from tvm_ipc.runtime.own_worker import refuse_own_worker

_log: Final = logging.getLogger("tvm_ipc.session")
_process_pool: Any = importlib.import_module("tvm.runtime.disco.process_pool")
_keep_from_children = tvm_ffi.get_global_func("tvm_ipc.keep_from_children")
_close_kept = tvm_ffi.get_global_func("tvm_ipc.close_kept")
_watch_pipe = tvm_ffi.get_global_func("tvm_ipc.pipes.watch")
_close_pipe = tvm_ffi.get_global_func("tvm_ipc.pipes.close")
_session_of = tvm_ffi.get_global_func("tvm_ipc.session.of")
_open = tvm_ffi.get_global_func("tvm_ipc.session.open")
_abort = tvm_ffi.get_global_func("tvm_ipc.session.abort")
_close = tvm_ffi.get_global_func("tvm_ipc.session.close")
_get_function = tvm_ffi.get_global_func("tvm_ipc.session.get_function")
_put = tvm_ffi.get_global_func("tvm_ipc.session.put")
_recover = tvm_ffi.get_global_func("tvm_ipc.session.recover")
_report = tvm_ffi.get_global_func("tvm_ipc.session.report")
_wait_left = tvm_ffi.get_global_func("tvm_ipc.session.wait_left")
_serve_parent = tvm_ffi.get_global_func("tvm_ipc.worker.serve_parent")

_CONSTRUCTORS: Final = ("SessionThreaded", "SessionProcess", "SocketSession")
_GUARD: Final = "tvm_ipc.worker.guard"
_LOOKUP: Final = "tvm_ipc.worker.get_global_func"
_COPY_FROM_HOST: Final = "tvm_ipc.worker.copy_from_host"
_COPY_TO_HOST: Final = "tvm_ipc.worker.copy_to_host"
_DONE: Final = "tvm_ipc.worker.done"
_FUNCTIONS: Final = (_GUARD, _LOOKUP, _COPY_FROM_HOST, _COPY_TO_HOST, _DONE)
#: How long the system may take to tell of the end of a process whose pipe has ended.
_DEATH_SECONDS: Final = 2.0
#: How long workers may take to end, and how often Ctrl-C is looked for meanwhile.
_LEAVE_SECONDS: Final = 5.0
_SLICE_SECONDS: Final = 0.1


class _Worker(_process_pool.DiscoPopenWorker):  # type: ignore[misc]
    """A worker process as Disco starts it, with pipes that outlive it."""

    _pipes: tuple[int, int] | None = None
    _owner = 0

    def start(self) -> tuple[int, int]:
        """Start the process, once; return the descriptors to read from it and to write to it."""
        if self._pipes is not None:
            return self._pipes
        with contextlib.ExitStack() as undo:
            reply_read, reply_write = _pipe(undo)
            command_read, command_write = _pipe(undo)
            numbers = (self.worker_id, self.num_workers, self.num_groups, command_read, reply_write)
            self._proc = subprocess.Popen(
                [sys.executable, "-m", self.entrypoint, *map(str, numbers)],
                pass_fds=(command_read, reply_write),
            )
            self._owner = os.getpid()
            _watch_pipe(self._proc.pid, command_read, command_write)
            undo.pop_all()
        os.close(reply_write)
        _keep_from_children(reply_read)
        self._pipes = (reply_read, command_write)
        return self._pipes

    def exit_code(self) -> int | None:
        """Return how the process ended; None while it runs."""
        return None if self._proc is None else self._proc.poll()

    @property
    def pid(self) -> int:
        return 0 if self._proc is None else self._proc.pid

    def kill(self) -> None:
        """End the process and what it started; not that of a process this one was forked from."""
        if self._proc is None or self._owner != os.getpid():
            return
        with contextlib.suppress(ImportError):  # of psutil, which TVM does without too
            _process_pool._kill_child_processes(self._proc.pid)
        self._proc.kill()
        self.join(timeout=1.0)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the interpreter's end modules are empty
            self.kill()

    def close(self) -> None:
        """End the process and close the pipes."""
        with contextlib.suppress(Exception):  # Disco calls this in a destructor
            self.kill()
        if self._pipes is not None:
            reply_read, command_write = self._pipes
            self._pipes = None
            _close_kept(reply_read)
            _close_pipe(command_write)


def _pipe(undo: contextlib.ExitStack) -> tuple[int, int]:
    ends = os.pipe()
    for end in ends:
        undo.callback(os.close, end)
    return ends


class _State:
    """What is known of a session of Disco."""

    def __init__(self, workers: list[_Worker]) -> None:
        self.workers = workers
        self.owner = os.getpid()
        self.shut_down = False
        #: Functions that every worker has; empty before `init_ccl`. The first catches what others
        #: raise, and reports it to the session's hub.
        self.functions: dict[str, Any] = {}
        self._tickets = itertools.count(1)

    def exit_codes(self) -> dict[int, int]:
        """Return how those worker processes ended that did."""
        codes = {worker.worker_id: worker.exit_code() for worker in self.workers}
        return {rank: code for rank, code in codes.items() if code is not None}

    def check(self, wait: float = 0.0) -> None:
        """Raise if the session was shut down, or a worker process has died."""
        if self.shut_down:
            raise SessionClosedError("the session was shut down")
        if self.owner != os.getpid():
            raise SessionClosedError(
                f"the session is of process {self.owner}, from which this one was forked; open "
                "one here"
            )
        end = time.monotonic() + wait
        while not (codes := self.exit_codes()):
            if time.monotonic() >= end:
                return
            time.sleep(0.01)
        who = ", ".join(
            f"rank {rank} (pid {self.workers[rank - 1].pid}, exit code {code})"
            for rank, code in codes.items()
        )
        raise WorkerDiedError(
            f"{who} died; the session is no longer usable: shut it down and open a new one; the "
            "worker's own output may say more",
            tuple(codes),
        )

    def guard(self, session: Any) -> None:
        """From now on, report what functions raise; the workers have joined."""
        for name in _FUNCTIONS:
            self.functions[name] = _get_function(session, name)

    def call(self, session: Any, function: Any, *args: Any) -> Any:
        """Call a function on every worker, where an error of it is reported."""
        return _native["SessionCallPacked"](session, 0, 0, self.functions[_GUARD], function, *args)

    def wait(self, session: Any, rank: int, native: Any, *args: Any) -> Any:
        """Call a native function that waits for a worker; raise what the worker reported till then.

        If there is anything, everybody comes to rest, and what others reported is raised with it.
        """
        wanted = f"the rank of a worker, 0 to {session.num_workers - 1}"
        arguments.integer("worker_id", rank, wanted, 0, session.num_workers - 1)
        result, errors = self._heard_after(session, rank, native, *args)
        if not errors:
            return result
        for rank in range(session.num_workers):
            sync = _native["SessionSyncWorker"]
            _, errors = self._heard_after(session, rank, sync, session, rank)
        _recover(session)
        # What was looked up since the error was skipped: it is no function.
        getattr(session, "_cache", {}).clear()
        raise WorkerError(causes(RankError(**error) for error in errors))

    def _heard_after(self, session: Any, rank: int, native: Any, *args: Any) -> tuple[Any, Any]:
        """Call a native function that waits for a worker; return its result, and all errors so far.

        The result comes over Disco's pipe and errors over the hub, where they may be later. A
        ticket that the worker reads before it answers comes over the hub too, behind its errors.
        """
        if not self.functions:
            return self._answer(native, *args), []
        ticket = next(self._tickets)
        done = self.functions[_DONE]
        _native["SessionCallPacked"](session, 0, 0, done, ticket)
        result = self._answer(native, *args)
        while True:  # what it waits for has been sent
            report = json.loads(_report(session))
            if report["done"][rank] >= ticket or rank in report["dead"] + report["left"]:
                return result, report["errors"]
            time.sleep(0.0005)

    def _answer(self, native: Any, *args: Any) -> Any:
        """Call a native function that waits for an answer of a worker, which may die."""
        try:
            result = native(*args)
        except RuntimeError:
            if self.workers:
                self.check(_DEATH_SECONDS)  # the cause, if it is one
            raise
        self.check()  # else what came was not what was asked for
        return result


#: Every session that was made here, by its address. One that is gone is forgotten when its
#: address, or its pool of processes, is.
_states: dict[int, _State] = {}
_making = threading.local()
#: Disco's own functions, by the names of those that took their place.
_native: dict[str, Any] = {}


def mend() -> None:
    """Put what is here in the place of Disco's own; repeated calls do nothing."""
    if _native:
        return
    api: Any = importlib.import_module("tvm.runtime.disco._ffi_api")
    for functions in (_CONSTRUCTORS, _MENDED):
        for name in functions:
            _native[name] = getattr(api, name)
    for name in _CONSTRUCTORS:
        setattr(api, name, _remembering(_native[name]))
    for name, function in _MENDED.items():
        setattr(api, name, function)
    _replace("runtime.disco.create_process_pool", _create_process_pool)
    _replace("runtime.disco.shm.init_ccl", start_shm)
    main_loop = "runtime.disco.WorkerProcess"
    _replace(main_loop, _serving(tvm_ffi.get_global_func(main_loop)))
    disco.Session.init_ccl = _init_ccl
    os.register_at_fork(after_in_child=_disown)


def check(session: disco.Session) -> None:
    """Raise if the session was shut down, or a worker process has died."""
    state = _states.get(_address(session))
    if state is not None:
        state.check()


def start_shm(session: disco.Session, device_ids: tvm_ffi.Shape) -> None:
    """Start the backend `shm` in a session of Disco, and wait until every worker has joined."""
    _log.info("a session of Disco gets the backend %s: it is the only one in this version", SHM)
    state = _states.setdefault(_address(session), _State([]))
    _open(session, device_ids, 0.0, 0, 0)
    try:
        wait_until_joined(session, "a session of Disco", state.exit_codes)
    except BaseException:
        _abort(session)
        _close(session)
        raise
    state.guard(session)


def _replace(name: str, function: Callable[..., Any]) -> None:
    tvm_ffi.register_global_func(name, function, override=True)


def _address(session: Any) -> int:
    address: int = session.__chandle__()
    return address


def _remembering(native: Any) -> Any:
    """Return a constructor that notes what it made."""

    def construct(*args: Any) -> Any:
        _making.workers = []
        session = native(*args)
        _states[_address(session)] = _State(_making.workers)
        return session

    return tvm_ffi.convert(construct)


def _known(session: Any) -> _State:
    """Return what is known of a session; raise if it cannot be used."""
    refuse_own_worker(session)
    state = _states.get(_address(session)) or _State([])
    state.check()
    return state


def _get_global_func(session: Any, name: str) -> Any:
    state = _known(session)
    if not state.functions:
        return _native["SessionGetGlobalFunc"](session, name)
    return state.call(session, state.functions[_LOOKUP], name)


def _call_packed(session: Any, code: int, register: int, function: Any, *args: Any) -> Any:
    state = _known(session)
    if not state.functions:
        return _native["SessionCallPacked"](session, code, register, function, *args)
    return state.call(session, function, *args)


def _copy_to_worker_0(session: Any, host: Any, remote: Any) -> None:
    state = _known(session)
    if not state.functions:
        _native["SessionCopyToWorker0"](session, host, remote)
    else:
        state.call(session, state.functions[_COPY_FROM_HOST], _put(session, host), 0, remote)


def _copy_from_worker_0(session: Any, host: Any, remote: Any) -> None:
    state = _known(session)
    if not state.functions:
        _native["SessionCopyFromWorker0"](session, host, remote)
    else:
        state.call(session, state.functions[_COPY_TO_HOST], _put(session, host), remote)


def _sync_worker(session: Any, worker: int) -> None:
    state = _known(session)
    state.wait(session, worker, _native["SessionSyncWorker"], session, worker)


def _get_from_remote(reference: Any, worker: int) -> Any:
    session = _session_of(reference)
    if session is None:
        return _native["DRefDebugGetFromRemote"](reference, worker)
    state = _known(session)
    return state.wait(session, worker, _native["DRefDebugGetFromRemote"], reference, worker)


def _copy_from(reference: Any, worker: int, value: Any) -> None:
    session = _session_of(reference)
    if session is None:
        _native["DRefDebugCopyFrom"](reference, worker, value)
        return
    state = _known(session)
    state.wait(session, worker, _native["DRefDebugCopyFrom"], reference, worker, value)


def _shutdown(session: Any) -> None:
    refuse_own_worker(session)
    state = _states.get(_address(session)) or _State([])
    if not state.shut_down and state.owner == os.getpid():
        state.shut_down = True
        _native["SessionShutdown"](session)
        if state.functions:
            _wait_until_left(session)


def _wait_until_left(session: Any) -> None:
    """Wait for worker 0 above all: a thread in a Python function would abort a program that ends.

    After a death it hears of that first.
    """
    end = time.monotonic() + _LEAVE_SECONDS
    with contextlib.suppress(RuntimeError):  # not open
        while not _wait_left(session, _SLICE_SECONDS) and time.monotonic() < end:
            pass


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
    """Start the workers of a session before Disco waits for the first of them.

    An error in the middle of Disco's constructor would leave it waiting for worker 0.
    """
    workers = [_Worker(i, num_workers, num_groups, entrypoint) for i in range(1, num_workers)]
    try:
        for worker in workers:
            worker.start()
    except BaseException as error:
        for worker in workers:
            worker.close()
        if isinstance(error, OSError):
            raise IPCError(f"the session cannot start its workers: {error}") from error
        raise
    _making.workers = workers

    def serve(worker_id: int) -> Any:
        if worker_id != 0:
            return tvm_ffi.Shape(workers[worker_id - 1].start())
        for worker in workers:
            worker.close()
        for address in [a for a, state in _states.items() if state.workers is workers]:
            del _states[address]
        return None

    return serve


def _serving(native: Any) -> Callable[..., None]:
    """Return a worker's main loop whose pipes no other process has."""

    def serve(
        worker_id: int, num_workers: int, num_groups: int, read_fd: int, write_fd: int
    ) -> None:
        process = os.getpid()
        _serve_parent(read_fd, write_fd)
        native(worker_id, num_workers, num_groups, read_fd, write_fd)
        if os.getpid() != process:  # the loop ended since its pipes lead nowhere here
            error_output.say(
                f"tvm_ipc: process {os.getpid()}, forked in a function of worker {worker_id}, came "
                "back from the function and ends here: it is no worker; end it with os._exit\n"
            )
            os._exit(1)

    return serve


def _init_ccl(session: disco.Session, ccl: str, *device_ids: int) -> None:
    """Initialize a backend for collectives, by the name that `compiled_ccl` returns."""
    from tvm_ipc.runtime.session import init_ccl

    init_ccl(session, ccl, device_ids or None)


def _disown() -> None:
    """Keep a process that was forked away from the sessions of its parent.

    A destructor would wait for threads that are not here.
    """
    keep = ctypes.CDLL(tvm_ffi.libinfo.find_libtvm_ffi()).TVMFFIObjectIncRef
    for address, state in _states.items():
        if state.workers:
            keep(ctypes.c_void_p(address))
