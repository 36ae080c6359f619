# SPDX-License-Identifier: Apache-2.0
"""Sessions as users see them: how they start, what they move, how they end.

`commands` beside this file says how a command gets to the workers and an error comes home,
`values` what can be done with values.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import tvm_ffi
from tvm.runtime import disco

from tvm_ipc import arguments
from tvm_ipc.contract import MAX_WORKERS, MODULE_CHECK, SHM
from tvm_ipc.errors import IPCError, RankError, SessionClosedError
from tvm_ipc.runtime import config, disco_sessions, log, unheard
from tvm_ipc.runtime.commands import SLICE_SECONDS, keys
from tvm_ipc.runtime.folder import Folder, remove_orphans
from tvm_ipc.runtime.joining import wait_until_joined
from tvm_ipc.runtime.own_worker import is_own_worker, refuse_own_worker
from tvm_ipc.runtime.processes import ProcessPool
from tvm_ipc.runtime.references import DModule
from tvm_ipc.runtime.uninterrupted import uninterrupted
from tvm_ipc.runtime.values import ValueSession, as_device

_log: Final = logging.getLogger("tvm_ipc.session")
_api: Any = disco._ffi_api
_native = tvm_ffi.get_global_func
_open = _native("tvm_ipc.session.open")
_report = _native("tvm_ipc.session.report")
_abort = _native("tvm_ipc.session.abort")
_wait_left = _native("tvm_ipc.session.wait_left")
_close = _native("tvm_ipc.session.close")
_native_info = _native("tvm_ipc.native_info")

_LEAVE_SECONDS: Final = 5.0
#: Bytes of commands on their way to workers that are threads; their queues have no end.
_ROOM: Final = 32 << 10
_open_sessions: weakref.WeakSet[Session] = weakref.WeakSet()
#: Sessions that nobody holds, whose end was interrupted, or would wait for the thread it is in.
_unfinished: list[Session] = []


class Session(ValueSession):
    """A Disco session whose workers share memory, and whose errors are Python exceptions.

    All methods of Disco's sessions work. Commands are asynchronous; an error is raised by the
    next `sync`, `get` or `close`, or by leaving the `with` block.

    Any thread may use a session, and each thread's commands keep their order. An error is raised
    in every thread that had commands on their way, since it may have cost any of them, and in the
    one that finds it: in each once, at its next command, `sync`, `get` or `close`.

    Parameters
    ----------
    num_workers : 1 to 64. Worker 0 is a thread of this process.
    num_groups : workers are divided evenly into groups of neighbours.
    threads : make the other workers threads of this process too, instead of processes.
    compiler : give worker processes all of TVM. Without it they load TVM's runtime alone, in half
        the time and memory; functions that need the compiler are missing then.
    timeout : seconds after which a wait for a worker ends in a `DeadlineError`; by default
        `TVM_IPC_TIMEOUT`, or 300.
    arena_limit : the most shared memory of a worker, in bytes or as "512M"; by default
        `TVM_IPC_ARENA_LIMIT`, or half the machine's memory divided by the workers.
    device_ids : the device of each worker, as Disco's `init_ccl` takes them. Workers on CPUs use
        none, so there is nothing to choose yet.
    """

    #: An exception of the program leaves the `with` block.
    _left_by_exception = False

    def __init__(
        self,
        num_workers: int = 2,
        *,
        num_groups: int = 1,
        threads: bool = False,
        compiler: bool = False,
        timeout: float | None = None,
        arena_limit: int | str | None = None,
        device_ids: Sequence[int] | None = None,
    ) -> None:
        num_workers, num_groups = arguments.workers(
            "Session", "num_workers", num_workers, num_groups, MAX_WORKERS
        )
        threads = arguments.flag("Session: threads", threads)
        compiler = arguments.flag("Session: compiler", compiler)
        ids = _device_ids("Session", num_workers, device_ids)
        self._workers = f"{num_workers} {'threads' if threads else 'processes'}"
        if num_groups > 1:
            self._workers += f" in {num_groups} groups"
        settings = config.Config.from_environment(timeout=timeout, arena_limit=arena_limit)
        log.start()
        self._prepare(settings.timeout)
        _open_sessions.add(self)
        shape = (num_workers, num_groups)
        processes = not threads

        def start() -> None:
            try:
                self._start(shape, processes, compiler, ids, settings)
            except BaseException as error:
                self._why_unusable = self._why_unusable or f"it could not start: {error}"
                self._end_now()
                raise

        uninterrupted(start, self._stop_starting)

    def _stop_starting(self) -> None:
        self._why_unusable = "its start was interrupted"

    def _start(
        self,
        shape: tuple[int, int],
        processes: bool,
        compiler: bool,
        ids: tvm_ffi.Shape,
        settings: config.Config,
    ) -> None:
        while _unfinished:
            _unfinished.pop()._end_now()
        remove_orphans()
        threads_each = config.threads_per_worker(shape[0])
        self._room = _ROOM
        if processes:
            environment = config.worker_environment(threads_each, compiler)
            try:
                self._pool = ProcessPool(*shape, environment)
            except OSError as error:
                raise IPCError(f"the session cannot start its workers: {error}") from error
            self._room = self._pool.room()
        self._log_start(*shape, threads_each, settings)
        if self._pool is None:
            self.__init_handle_by_constructor__(_api.SessionThreaded, *shape)
        else:
            self.__init_handle_by_constructor__(
                _api.SessionProcess, *shape, "tvm_ipc.create_process_pool", self._pool.key
            )
        self._made = True
        try:
            _open(self, ids, settings.timeout, settings.arena_limit or 0, self._room)
        except (RuntimeError, MemoryError) as error:
            if "Write Error" not in str(error):  # else a worker has ended; the wait says which
                raise IPCError(f"the session cannot start: {error}") from error
        wait_until_joined(self, self._name, self._lost_processes)
        self._start_commands()
        self._get_cached_method("tvm_ipc.worker.set_threads")(threads_each)
        self.sync()
        _log.info("%s: all workers are ready", self._name)

    def _log_start(
        self, num_workers: int, num_groups: int, threads_each: int, settings: config.Config
    ) -> None:
        if not _log.isEnabledFor(logging.INFO):
            return
        kind = "processes" if self._pool else "threads"
        division = f"{num_workers} workers, {kind}, groups: {num_groups}"
        _log.info("%s: starts %s, threads in each: %d", self._name, division, threads_each)
        machine = json.loads(_native_info())
        wanted = settings.instruction_set
        why = "the best of this processor" if wanted == "auto" else "as TVM_IPC_ISA says"
        _log.info("%s: backend %s: all workers are on this machine", self._name, SHM)
        _log.info("%s: reductions use %s: %s", self._name, machine["instruction_set"], why)
        arena = f"{settings.arena_limit} bytes" if settings.arena_limit else "the default"
        _log.info("%s: deadline %g s, arena limit %s", self._name, self.timeout, arena)

    def _lost_processes(self) -> dict[int, int]:
        self._check_usable()
        return self._pool.ended() if self._pool else {}

    def import_python_module(self, module_name: str) -> None:
        """Import a Python module in every worker, to register the functions it defines."""
        wanted = "the name of a module as in an import statement"
        arguments.text("import_python_module: module_name", module_name, wanted)
        self._get_cached_method("runtime.disco._import_python_module")(module_name)

    def load_vm_module(self, path: Any, device: Any = None) -> DModule:
        """Load a compiled module in every worker.

        One that `get_pipeline` compiled with collectives for another number of workers, or of
        groups, is an error.

        Parameters
        ----------
        path : of a library that `export_library` wrote, or a compiled executable itself.
        device : by default the worker's own.
        """
        self._check_usable()
        device = as_device("load_vm_module: device", device)
        if hasattr(path, "export_library"):
            executable = path
            path = self._folder.path() / f"module-{next(keys)}.so"
            try:
                executable.export_library(str(path))
            except (TypeError, OSError, RuntimeError) as error:
                raise IPCError(_unlinked(error)) from error
        library = _library(path).resolve()
        _log.debug("%s: loads %s", self._name, library)
        load = self._get_cached_method("runtime.disco.load_vm_module")
        module = DModule.of(load(str(library), device))
        check = self._get_cached_method("tvm_ipc.worker.call_if_present")
        check(module, MODULE_CHECK)
        return module

    def init_ccl(self, ccl: str, *device_ids: int) -> None:
        """Accept the backend that this session runs, as programs that begin with this call name it.

        There is nothing left to do. Any other backend is refused.
        """
        arguments.one_of("init_ccl: ccl", ccl, ("auto", SHM))
        _device_numbers("init_ccl: device_ids", device_ids, "numbers of devices")

    def __repr__(self) -> str:
        known = self.__dict__
        state = "open"
        if known.get("_closed", True):
            state = "closed"
        elif known.get("_why_unusable"):
            state = "not usable"
        return f"<tvm_ipc.Session: {known.get('_workers', 'no workers')}, {state}>"

    # ---- end ------------------------------------------------------------------------------

    @property
    def pids(self) -> tuple[int, ...]:
        """The process of each worker."""
        return self._pids

    def shutdown(self) -> None:
        """Same as `close`."""
        self.close()

    def close(self) -> None:
        """End the workers. Raises what they reported since the last sync; ends them all the same.

        Closing twice, or a session that is not usable any more, does nothing more.
        """
        if self._closed:
            return
        refuse_own_worker(self)
        try:
            with contextlib.suppress(SessionClosedError):  # nobody can be waited for any more
                self.sync()
        finally:
            self._end()

    def _prepare(self, timeout: float) -> None:
        super()._prepare(timeout)
        self._folder = Folder()
        #: Whether there is a session of Disco.
        self._made = False
        self._end_lock = threading.RLock()
        self._ended = self._hurried = False

    def _end(self) -> None:
        """End the workers, which are not waited for."""
        refuse_own_worker(self)
        # A signal handler may close the session of a line that holds the lock.
        if self._lock._is_owned():  # type: ignore[attr-defined]
            self._end_now()
        else:
            uninterrupted(self._end_now, self._kill)

    def _kill(self) -> None:
        self._hurried = True
        if self._pool is not None:
            self._pool.kill()

    def _end_now(self) -> None:
        self._closed = True  # whoever waits in another thread, with the lock or without, leaves
        with self._end_lock:
            if self._ended:
                return
            locked = self._lock.acquire(timeout=_LEAVE_SECONDS)
            try:
                self._functions.clear()
                if self._made:
                    self._end_workers()
                elif self._pool is not None:
                    self._pool.kill()
                    self._pool.join(0.0)
                    self._pool.forget()
                self._folder.remove()
                self._ended = True
            finally:
                if locked:
                    self._lock.release()
        _log.info("%s: ended%s", self._name, f": {why}" if (why := self._why_unusable) else "")

    def _end_workers(self) -> None:
        with contextlib.suppress(RuntimeError):  # not open: it did not come that far
            _abort(self)
        with contextlib.suppress(Exception):
            _api.SessionShutdown(self)
        if self._pool is not None:
            seconds = 1.0 if self._left_by_exception else _LEAVE_SECONDS
            self._pool.join(0.0 if self._why_unusable or self._hurried else seconds)
            self._pool.mute()
        with contextlib.suppress(RuntimeError):
            end = time.monotonic() + _LEAVE_SECONDS
            while not (left := _wait_left(self, SLICE_SECONDS)):
                if self._hurried or time.monotonic() > end:
                    break
            if not left:
                # A thread of ours is stuck in a call. To destroy the session would wait for it
                # with Python's lock held, for ever: keep it instead.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
            if not self._why_unusable:  # else it has been raised
                unheard.say_errors(self, _errors(self), fail=not self._left_by_exception)
            if self._unheard is not None:
                unheard.say(self, self._unheard(), fail=not self._left_by_exception)
            _close(self)

    def __enter__(self) -> Session:
        """Return the session."""
        self._check_usable()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close. With an error on its way, which is not replaced, no worker is waited for."""
        if error is None:
            self.close()
        elif not self._closed:
            self._left_by_exception = True
            self._end()

    def __del__(self) -> None:
        if self.__dict__.get("_ended", True):
            return
        if is_own_worker(self):
            _unfinished.append(self)
            return
        try:
            # Not in another thread: this one may hold any lock.
            self._end_now()
        except BaseException:
            _unfinished.append(self)
            raise


def _unlinked(error: Exception) -> str:
    """Say why TVM could not link; it raises a TypeError where it found no compiler at all."""
    text = "the executable could not be linked into a library; TVM needs a C++ compiler for that"
    if not isinstance(error, TypeError):
        why = next((x for x in str(error).splitlines() if x and x != "Compilation error:"), "")
        return f"{text}: {why}; `tvm-ipc doctor` tries the one that it would take"
    return f"{text}: install g++ or clang, or name one in the environment variable CXX"


def init_ccl(
    session: disco.Session, ccl: str = "auto", device_ids: Sequence[int] | None = None
) -> None:
    """Start a collective backend in a Disco session that the user made.

    Parameters
    ----------
    session : of `tvm.runtime.disco`.
    ccl : "shm", workers of one machine over shared memory; "auto", which is that; or a backend that
        another library has registered.
    device_ids : one for each worker; the CPU backend needs none.
    """
    if isinstance(session, Session):
        session.init_ccl(ccl, *(device_ids or ()))
        return
    arguments.instance(
        "init_ccl: session", session, disco.Session, "a session of tvm.runtime.disco"
    )
    disco_sessions.check(session)
    if isinstance(session, disco.SocketSession) and device_ids is not None:  # those of each node
        ids = _device_numbers("init_ccl: device_ids", device_ids, "numbers of devices")
    else:
        ids = _device_ids("init_ccl", session.num_workers, device_ids)
    name = arguments.text("init_ccl: ccl", ccl, "the name of a backend")
    if name not in ("auto", SHM) and _native(f"runtime.disco.{name}.init_ccl", True):
        _api.SessionInitCCL(session, name, ids)  # another library's
        session._clear_ipc_memory_pool()
        return
    arguments.one_of("init_ccl: ccl", name, ("auto", SHM))
    log.start()
    disco_sessions.start_shm(session, ids)


def _errors(session: Session) -> list[RankError]:
    return [RankError(**error) for error in json.loads(_report(session))["errors"]]


def _device_ids(where: str, num_workers: int, device_ids: object) -> tvm_ffi.Shape:
    """Return the device of each worker."""
    if device_ids is None:
        return tvm_ffi.Shape(range(num_workers))
    name, wanted = f"{where}: device_ids", f"{num_workers} numbers of devices, one for each worker"
    ids = _device_numbers(name, device_ids, wanted)
    if len(ids) != num_workers:
        raise arguments.wrong_value(name, wanted, device_ids)
    return ids


def _device_numbers(name: str, value: object, wanted: str) -> tvm_ffi.Shape:
    return tvm_ffi.Shape(arguments.integers(name, value, wanted, 0, (1 << 31) - 1))


def _library(path: object) -> Path:
    """Return the path of a compiled module, if there is one."""
    wanted = "the path of a compiled library, or what tvm.compile returned"
    if hasattr(path, "functions_items"):
        raise TypeError(
            f"load_vm_module: path is {wanted}, not an IRModule, which is not compiled yet; "
            "give it tvm.compile(module, target='llvm')"
        )
    found = arguments.path("load_vm_module: path", path, wanted)
    if not found.is_file():
        raise FileNotFoundError(
            f"load_vm_module: path: there is no compiled module at {str(path)!r}"
        )
    with found.open("rb") as file:
        if found.suffix != ".so" or file.read(4) != b"\x7fELF":
            raise arguments.wrong_value("load_vm_module: path", wanted + ", a file *.so", str(path))
    return found


@atexit.register
def _close_all() -> None:
    # As for a `with` block: if the program ends by an exception, no worker is waited for.
    failed = getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")
    for session in [*_open_sessions, *_unfinished]:
        try:
            if failed or session._closed:
                session._left_by_exception = failed
                session._end()
            else:
                session.close()
        except Exception as error:
            unheard.say(session, error)


def _disown() -> None:
    """Keep a process that the controller forked away from the workers: they are not its own."""
    for session in list(_open_sessions):
        session._closed = session._ended = True
        session._lock = threading.RLock()  # another thread may have held it
        session._folder.disown()
        # Disco's destructor would shut the workers down, and wait for threads that are not here.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))


os.register_at_fork(after_in_child=_disown)
