# SPDX-License-Identifier: Apache-2.0
"""Start the workers of a session, on this machine or on several nodes."""

from __future__ import annotations

import importlib
import json
import logging
import time
from dataclasses import dataclass
from typing import Any, Final

import tvm_ffi

from tvm_ipc import arguments
from tvm_ipc.errors import IPCError
from tvm_ipc.packed_functions import BACKENDS, MAX_WORKERS, backend_of_nodes
from tvm_ipc.runtime import config, device_and_backend_assignment, startup_hooks
from tvm_ipc.runtime.process_pool import ProcessPool
from tvm_ipc.runtime.scratch_dir import remove_orphans
from tvm_ipc.runtime.send_commands_and_raise_errors import CommandDispatcher
from tvm_ipc.runtime.shutdown import Shutdown, end_unfinished
from tvm_ipc.runtime.wait_workers_joined_or_left import wait_for_workers
from tvm_ipc.runtime.worker_pool_interface import Hosts, Pool, PoolOfNodes, PoolRequest
from tvm_ipc.tvm_private_names import disco_api

_log: Final = logging.getLogger("tvm_ipc.session")
_disco_api: Any = disco_api()
_native_open = tvm_ffi.get_global_func("tvm_ipc.session.open")
_native_info = tvm_ffi.get_global_func("tvm_ipc.native_info")
#: The function that Disco calls for a pool of worker processes.
_POOL_FUNCTION: Final = "tvm_ipc.create_process_pool"
#: Bytes of unread commands for workers that are threads, whose queues are unbounded.
_THREAD_UNREAD_BYTES: Final = 32 << 10


@dataclass(frozen=True)
class StartOptions:
    """The checked arguments of `Session`.

    Attributes
    ----------
    num_workers, num_groups, compiler : as in `Session`.
    processes : whether workers other than worker 0 are processes.
    flat : whether sums across nodes are added in the order of all workers.
    hosts : the nodes of the workers; None for this machine.
    assignment : the devices of the workers, and the backend.
    settings : the timeout and the arena limit, from arguments or the environment.
    """

    num_workers: int
    num_groups: int
    processes: bool
    compiler: bool
    flat: bool
    hosts: Hosts | None
    assignment: device_and_backend_assignment.DeviceAssignment
    settings: config.Config

    @classmethod
    def from_arguments(
        cls,
        *,
        num_workers: object,
        num_groups: object,
        threads: object,
        compiler: object,
        timeout: Any,
        arena_limit: Any,
        device: Any,
        device_ids: Any,
        backend: Any,
        hosts: Any,
        order: object,
    ) -> StartOptions:
        """Check the arguments of `Session`."""
        workers, groups = arguments.workers(
            "Session", "num_workers", num_workers, num_groups, MAX_WORKERS
        )
        threads = arguments.flag("Session: threads", threads)
        compiler = arguments.flag("Session: compiler", compiler)
        flat = arguments.one_of("Session: order", order, ("nodes", "flat")) == "flat"
        node_hosts: Hosts | None = None
        machines: list[int] | None = None
        if hosts is not None:
            reader = importlib.import_module(startup_hooks.hosts_module)
            node_hosts = reader.read("Session: hosts", hosts, workers)
            backend = _backend_between_nodes(threads, device, backend)
            machines = node_hosts.machines(workers)
        assignment = device_and_backend_assignment.assign_devices(
            "Session", workers, device, device_ids, backend, machines=machines
        )
        settings = config.Config.from_environment(timeout=timeout, arena_limit=arena_limit)
        return cls(workers, groups, not threads, compiler, flat, node_hosts, assignment, settings)

    @property
    def shape(self) -> tuple[int, int]:
        """The number of workers and the number of groups."""
        return self.num_workers, self.num_groups

    def describe(self) -> str:
        """Return a phrase for the workers, as `repr` of a session has it."""
        kind = "process" if self.processes else "thread"
        phrase = arguments.counted(self.num_workers, kind)
        phrase += f" in {self.num_groups} groups" if self.num_groups > 1 else ""
        phrase += device_and_backend_assignment.describe(self.assignment)
        return phrase + (f" on {self.hosts}" if self.hosts is not None else "")


def _backend_between_nodes(threads: bool, device: object, backend: str) -> str:
    """Return the backend that connects nodes; raise if nodes cannot have these arguments."""
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


class SessionStart:
    """The start of one session.

    Attributes
    ----------
    backend : the backend of the workers; once they have started, the one that connected them.
    nodes : the worker processes of a session on several nodes.
    memory : after the start, a phrase for how workers on GPUs reach each other's memory; or "".
    """

    def __init__(
        self,
        session: Any,
        options: StartOptions,
        dispatcher: CommandDispatcher,
        shutdown: Shutdown,
    ) -> None:
        self.backend = options.assignment.backend
        self.nodes: PoolOfNodes | None = None
        self.memory = ""
        self._session = session
        self._options = options
        self._dispatcher = dispatcher
        self._shutdown = shutdown

    def run(self) -> None:
        """Start the workers, and wait until all of them have joined the session."""
        dispatcher = self._dispatcher
        try:
            self._run(time.monotonic())
        except BaseException as error:
            dispatcher.unusable_reason = (
                dispatcher.unusable_reason or f"it could not start: {error}"
            )
            self._shutdown.run_now()
            raise

    def interrupt(self) -> None:
        """Make `run` end soon, with an error."""
        self._dispatcher.unusable_reason = "its start was interrupted"

    def _run(self, begin: float) -> None:
        options, dispatcher, session = self._options, self._dispatcher, self._session
        end_unfinished()
        threads_each = config.threads_per_worker(options.num_workers)
        dispatcher.pool = pool = self._start_workers(threads_each)
        remove_orphans()  # while the workers load TVM
        if self.nodes is not None:
            threads_each = self.nodes.threads
        self._log_start(threads_each)
        if pool is None:
            room = _THREAD_UNREAD_BYTES
            create: tuple[Any, ...] = (_disco_api.SessionThreaded, *options.shape)
        else:
            room = pool.room()
            create = (_disco_api.SessionProcess, *options.shape, _POOL_FUNCTION, pool.key)
        dispatcher.max_unread_bytes = room
        session.__init_handle_by_constructor__(*create)
        self._shutdown.disco_started = True
        try:
            self._invite(room)
        except (RuntimeError, MemoryError) as error:
            if pool is None or not pool.hung_up():
                raise IPCError(f"the session cannot start: {error}") from error
            # A worker has ended; the wait below reports which.
            _log.debug("%s: the workers could not be invited", dispatcher.name, exc_info=True)
        self._wait_until_joined(begin)
        dispatcher.start()
        dispatcher.function("tvm_ipc.worker.set_threads")(threads_each)
        dispatcher.sync()
        if self.backend == "cuda":
            self._describe_memory()
        _log.info("%s: all workers are ready", dispatcher.name)

    def _start_workers(self, threads_each: int) -> Pool | None:
        """Start the worker processes; return None if the workers are threads."""
        options, dispatcher = self._options, self._dispatcher
        if options.hosts is not None:
            _log.info("%s: starts agents on %s", dispatcher.name, options.hosts)
            request = PoolRequest(
                options.shape,
                options.assignment.backend,
                options.settings,
                options.compiler,
                options.flat,
                dispatcher.check_usable,
            )
            self.nodes = options.hosts.start(request)
            return self.nodes
        if not options.processes:
            return None
        environment = config.worker_environment(threads_each, options.compiler)
        try:
            return ProcessPool(*options.shape, environment)
        except OSError as error:
            raise IPCError(f"the session cannot start its workers: {error}") from error

    def _invite(self, room: int) -> None:
        """Open the session server, and invite the workers."""
        settings, assignment = self._options.settings, self._options.assignment
        if self.nodes is not None:
            self.nodes.open(self._session, assignment.ids, settings.timeout, room)
            return
        _native_open(
            self._session,
            assignment.backend,
            assignment.otherwise,
            assignment.ids,
            settings.timeout,
            settings.arena_limit or 0,
            room,
        )

    def _wait_until_joined(self, begin: float) -> None:
        """Wait for the workers, and note which backend connects them."""
        nodes = self.nodes
        describe_node = (
            (lambda _: "") if nodes is None else (lambda rank: f" of {nodes.where(rank)}")
        )
        fallback_backend = wait_for_workers(
            self._session, self._dispatcher.name, self._exit_codes, describe_node, begin
        )
        self.backend = fallback_backend or self.backend

    def _exit_codes(self) -> dict[int, int]:
        """Return the exit codes of workers that have ended; raise if the start cannot go on."""
        self._dispatcher.check_usable()
        pool = self._dispatcher.pool
        if pool is None:
            return {}
        pool.check()
        return pool.ended()

    def _describe_memory(self) -> None:
        """Log how workers on GPUs reach each other's memory, and keep a phrase for it."""
        name = self._dispatcher.name
        statistics = self._dispatcher.function("tvm_ipc.arena_stats")()
        arena = json.loads(statistics.debug_get_from_remote(0))
        way, limit = arena["way"], arena["limit"]
        self.memory = f", memory by {way}"
        _log.info("%s: memory by %s, %d bytes of each worker", name, way, limit)
        for reason in arena["why"].splitlines():
            _log.info("%s: not by %s", name, reason)

    def _log_start(self, threads_each: int) -> None:
        if not _log.isEnabledFor(logging.INFO):
            return
        options, name = self._options, self._dispatcher.name
        assignment, settings = options.assignment, options.settings
        kind = "processes" if options.processes else "threads"
        number = arguments.counted(options.num_workers, "worker")
        workers = f"{number}, {kind}, groups: {options.num_groups}"
        _log.info("%s: starts %s, threads in each: %d", name, workers, threads_each)
        location = device_and_backend_assignment.describe(assignment) or " on this machine's CPUs"
        backend = f"{assignment.backend}: {assignment.reason}; workers{location}"
        _log.info("%s: backend %s", name, backend)
        if assignment.device == "cpu":
            instruction_set = json.loads(_native_info())["instruction_set"]
            automatic = settings.instruction_set == "auto"
            reason = "the best of this processor" if automatic else "set by TVM_IPC_ISA"
            _log.info("%s: reductions use %s: %s", name, instruction_set, reason)
        arena = f"{settings.arena_limit} bytes" if settings.arena_limit else "the default"
        _log.info("%s: deadline %g s, arena limit %s", name, settings.timeout, arena)
