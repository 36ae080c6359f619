# SPDX-License-Identifier: Apache-2.0
"""Sessions as users see them, and how they start.

`commands` beside this file says how a command gets to the workers and an error comes home,
`values` what can be done with values, `collectives` what workers do among themselves,
`ending` how a session ends.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

import tvm_ffi
from tvm.runtime import disco

from tvm_ipc import arguments
from tvm_ipc.contract import BACKENDS, MAX_WORKERS, MODULE_CHECK, backend_of_nodes
from tvm_ipc.errors import IPCError
from tvm_ipc.runtime import config, devices, disco_sessions, log, pools
from tvm_ipc.runtime.collectives import CollectiveSession
from tvm_ipc.runtime.commands import keys
from tvm_ipc.runtime.compiled import library_of
from tvm_ipc.runtime.ending import EndingSession, end_unfinished
from tvm_ipc.runtime.folder import remove_orphans
from tvm_ipc.runtime.joining import wait_until_joined
from tvm_ipc.runtime.pools import Hosts, PoolOfNodes, Wanted
from tvm_ipc.runtime.processes import ProcessPool
from tvm_ipc.runtime.references import DModule
from tvm_ipc.runtime.shipping import ship
from tvm_ipc.runtime.uninterrupted import uninterrupted

_log: Final = logging.getLogger("tvm_ipc.session")
_api: Any = disco._ffi_api
_native = tvm_ffi.get_global_func
_open = _native("tvm_ipc.session.open")
_native_info = _native("tvm_ipc.native_info")

#: Bytes of commands on their way to workers that are threads; their queues have no end.
_ROOM: Final = 32 << 10


class Session(CollectiveSession, EndingSession):
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
    arena_limit : the most memory of a worker that others map, in bytes or as "512M"; by default
        `TVM_IPC_ARENA_LIMIT`, or half the machine's memory divided by the workers, and on a GPU
        what the backend takes at the start.
    hosts : the names of machines, this one first, over which the workers are divided in order; or
        how many nodes this machine is to be, which then share nothing but the network. They start
        through MPI, which `pip install 'tvm-ipc[mpi]'` brings. In a program that `tvm-ipc node`
        runs, "allocation" is all nodes that the launcher gave.
    order : how sums across nodes are added: "nodes" adds the sums of nodes, in their order; "flat"
        adds what all workers have in their order, which gives the bits of one machine, and moves
        more data. On one machine both are the same.
    device : what the workers compute on, which is where their tensors are: "cpu", or "cuda", an
        NVIDIA GPU.
    device_ids : the number of the device of each worker, on its machine; by default 0, 1, 2, ... on
        each machine, a GPU for each worker. Workers share a GPU whose number is there more than
        once, which NCCL refuses. Workers on CPUs use none of it.
    backend : what moves data between the workers: "auto" is the best for the device that works here
        (the log says which, and why); or one by its name, which `tvm_ipc.contract.BACKENDS` lists.
    """

    #: Its workers, if they are on several nodes.
    _nodes: PoolOfNodes | None = None

    def __init__(
        self,
        num_workers: int = 2,
        *,
        num_groups: int = 1,
        threads: bool = False,
        compiler: bool = False,
        timeout: float | None = None,
        arena_limit: int | str | None = None,
        device: str = "cpu",
        device_ids: Sequence[int] | None = None,
        backend: str = "auto",
        hosts: int | str | Sequence[str] | None = None,
        order: str = "nodes",
    ) -> None:
        num_workers, num_groups = arguments.workers(
            "Session", "num_workers", num_workers, num_groups, MAX_WORKERS
        )
        threads = arguments.flag("Session: threads", threads)
        compiler = arguments.flag("Session: compiler", compiler)
        flat = arguments.one_of("Session: order", order, ("nodes", "flat")) == "flat"
        where: Hosts | None = None
        if hosts is not None:
            where = pools.beyond("Session: hosts", hosts, num_workers)
            backend = _backend_of_nodes(threads, device, backend)
        machines = None if where is None else where.machines(num_workers)
        placed = devices.place(
            "Session", num_workers, device, device_ids, backend, machines=machines
        )
        self._backend = placed.backend
        self._device = placed.device
        self._workers = f"{num_workers} {'threads' if threads else 'processes'}"
        if num_groups > 1:
            self._workers += f" in {num_groups} groups"
        self._workers += devices.describe(placed)
        self._workers += f" on {where}" if where is not None else ""
        settings = config.Config.from_environment(timeout=timeout, arena_limit=arena_limit)
        log.start()
        self._prepare(settings.timeout)
        shape = (num_workers, num_groups)
        processes = not threads

        def start() -> None:
            try:
                if where is None:
                    self._start(shape, processes, compiler, placed, settings)
                else:
                    check = self._check_usable
                    wanted = Wanted(shape, placed.backend, settings, compiler, flat, check)
                    self._start_on_nodes(where, wanted, placed)
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
        placed: devices.Placement,
        settings: config.Config,
    ) -> None:
        end_unfinished()
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
        self._log_start(*shape, threads_each, placed, settings)
        if self._pool is None:
            self.__init_handle_by_constructor__(_api.SessionThreaded, *shape)
        else:
            self.__init_handle_by_constructor__(
                _api.SessionProcess, *shape, "tvm_ipc.create_process_pool", self._pool.key
            )
        self._made = True
        limits = settings.timeout, settings.arena_limit or 0, self._room
        self._join(
            lambda: _open(self, placed.backend, placed.otherwise, placed.ids, *limits), threads_each
        )

    def _start_on_nodes(self, hosts: Hosts, wanted: Wanted, placed: devices.Placement) -> None:
        end_unfinished()
        remove_orphans()
        _log.info("%s: starts agents on %s", self._name, hosts)
        self._pool = self._nodes = pool = hosts.start(wanted)
        self._room = pool.room()
        self._log_start(*wanted.shape, pool.threads, placed, wanted.settings)
        make = "tvm_ipc.create_process_pool"
        self.__init_handle_by_constructor__(_api.SessionProcess, *wanted.shape, make, pool.key)
        self._made = True
        limits = wanted.settings.timeout, self._room
        self._join(lambda: pool.open(self, placed.ids, *limits), pool.threads)

    def _join(self, invite: Callable[[], None], threads_each: int) -> None:
        """Invite the workers, and wait for them."""
        try:
            invite()
        except (RuntimeError, MemoryError) as error:
            if "Write Error" not in str(error):  # else a worker has ended; the wait says which
                raise IPCError(f"the session cannot start: {error}") from error
        nodes = self._nodes
        where = (lambda _: "") if nodes is None else (lambda rank: f" of {nodes.where(rank)}")
        changed = wait_until_joined(self, self._name, self._lost_processes, where)
        self._backend = changed or self._backend
        self._start_commands()
        self._get_cached_method("tvm_ipc.worker.set_threads")(threads_each)
        self.sync()
        if self._backend == "cuda":
            self._tell_way()
        _log.info("%s: all workers are ready", self._name)

    def _tell_way(self) -> None:
        """Say how workers on GPUs reach each other's memory, in the log and from now on."""
        arena = json.loads(
            self._get_cached_method("tvm_ipc.arena_stats")().debug_get_from_remote(0)
        )
        self._workers += f", memory by {arena['way']}"
        limit = arena["limit"]
        _log.info("%s: memory by %s, %d bytes of each worker", self._name, arena["way"], limit)
        for reason in arena["why"].splitlines():
            _log.info("%s: not by %s", self._name, reason)

    def _log_start(
        self,
        num_workers: int,
        num_groups: int,
        threads_each: int,
        placed: devices.Placement,
        settings: config.Config,
    ) -> None:
        if not _log.isEnabledFor(logging.INFO):
            return
        kind = "processes" if self._pool else "threads"
        division = f"{num_workers} workers, {kind}, groups: {num_groups}"
        _log.info("%s: starts %s, threads in each: %d", self._name, division, threads_each)
        where = devices.describe(placed) or " on this machine's CPUs"
        chosen = f"{placed.backend}: {placed.reason}; workers{where}"
        _log.info("%s: backend %s", self._name, chosen)
        if placed.device == "cpu":
            wanted, used = settings.instruction_set, json.loads(_native_info())["instruction_set"]
            why = "the best of this processor" if wanted == "auto" else "as TVM_IPC_ISA says"
            _log.info("%s: reductions use %s: %s", self._name, used, why)
        arena = f"{settings.arena_limit} bytes" if settings.arena_limit else "the default"
        _log.info("%s: deadline %g s, arena limit %s", self._name, self.timeout, arena)

    def _lost_processes(self) -> dict[int, int]:
        self._check_usable()
        if self._pool is None:
            return {}
        self._pool.check()
        return self._pool.ended()

    def import_python_module(self, module_name: str) -> None:
        """Import a Python module in every worker, to register the functions it defines."""
        wanted = "the name of a module as in an import statement"
        arguments.text("import_python_module: module_name", module_name, wanted)
        self._get_cached_method("runtime.disco._import_python_module")(module_name)

    def load_vm_module(self, path: Any, device: Any = None) -> DModule:
        """Load a compiled module in every worker; nodes that do not have the file are sent it.

        One that `get_pipeline` compiled with collectives for another number of workers, or of
        groups, is an error.

        Parameters
        ----------
        path : of a library that `export_library` wrote, or a compiled executable itself.
        device : by default the worker's own.
        """
        self._check_usable()
        device = self._on_device("load_vm_module: device", device)
        library = library_of(path, lambda: self._folder.path() / f"module-{next(keys)}.so")
        _log.debug("%s: loads %s", self._name, library)
        if self._nodes is None:
            load = self._get_cached_method("runtime.disco.load_vm_module")
            module = DModule.of(load(str(library), device))
        else:
            digest = ship(self, library, self._nodes.first_ranks)
            load = self._get_cached_method("tvm_ipc.worker.load_library")
            module = DModule.of(load(str(library), digest, device))
        check = self._get_cached_method("tvm_ipc.worker.call_if_present")
        check(module, MODULE_CHECK)
        return module

    def init_ccl(self, ccl: str, *device_ids: int) -> None:
        """Accept the backend that this session runs, as programs that begin with this call name it.

        There is nothing left to do. Any other backend is refused.
        """
        known = ("auto", *BACKENDS)
        if arguments.one_of("init_ccl: ccl", ccl, known) not in ("auto", self._backend):
            raise ValueError(
                f"init_ccl: ccl is {ccl!r}, and this session was opened with the backend "
                f"{self._backend!r}: open one with Session(..., device={BACKENDS[ccl]!r}, "
                f"backend={ccl!r})"
            )
        devices.numbers("init_ccl: device_ids", device_ids, "numbers of devices")

    @property
    def nodes(self) -> tuple[dict[str, Any], ...]:
        """The nodes of a session with `hosts`: "host", "address", "cores" and "ranks" of each."""
        return getattr(self._pool, "facts", ())

    @property
    def backend(self) -> str:
        """What moves data between its workers: one of `tvm_ipc.contract.BACKENDS`."""
        return self._backend

    @property
    def device(self) -> str:
        """What its workers compute on: "cpu" or "cuda"."""
        return self._device

    def __repr__(self) -> str:
        known = self.__dict__
        state = "open"
        if known.get("_closed", True):
            state = "closed"
        elif known.get("_why_unusable"):
            state = "not usable"
        return f"<tvm_ipc.Session: {known.get('_workers', 'no workers')}, {state}>"


def _backend_of_nodes(threads: bool, device: object, backend: str) -> str:
    """Return the backend that is meant between nodes; an error where nodes cannot have it."""
    if threads:
        raise ValueError("Session: threads are of one process, and cannot be on several hosts")
    kind = arguments.one_of("Session: device", device, dict.fromkeys(BACKENDS.values()))
    between = backend_of_nodes(kind)
    if backend == kind == "cuda":
        raise ValueError(
            f"Session: backend {backend!r} cannot have hosts: its workers read each other's "
            f"memory, as only those of one machine can; with hosts, workers on GPUs have "
            f"{between!r}"
        )
    return between if backend == "auto" else backend


def init_ccl(
    session: disco.Session,
    ccl: str = "auto",
    device_ids: Sequence[int] | None = None,
    device: str | None = None,
) -> None:
    """Start a collective backend in a Disco session that the user made.

    Parameters
    ----------
    session : of `tvm.runtime.disco`.
    ccl : one of `tvm_ipc.contract.BACKENDS`; "auto", the best for the device that works here; or a
        backend that another library has registered.
    device_ids : the device of each worker, as in `Session`.
    device : what the workers compute on, "cpu" or "cuda"; by default that of the backend, and
        "cpu" for "auto".
    """
    if isinstance(session, Session):
        if device is not None:
            arguments.one_of("init_ccl: device", device, (session.device,))
        session.init_ccl(ccl, *(device_ids or ()))
    else:
        disco_sessions.init_ccl(session, ccl, device_ids, device)
