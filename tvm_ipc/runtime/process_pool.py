# SPDX-License-Identifier: Apache-2.0
"""Start, watch and end the worker processes of a session on this machine."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import select
import subprocess
import time
from collections.abc import Callable, Iterable
from typing import Any

import tvm_ffi

from tvm_ipc.runtime.start_child_process import (
    OWN_GROUP,
    ChildProcess,
    import_path,
    passed,
    python_with_path,
)
from tvm_ipc.runtime.worker_pool_interface import Pool

_MAIN = """
from tvm_ipc.runtime.worker import main
main(*map(int, sys.argv[1:]))
"""
_keep_from_children = tvm_ffi.get_global_func("tvm_ipc.keep_from_children")
_close_kept = tvm_ffi.get_global_func("tvm_ipc.close_kept")
_keys = itertools.count()
_pools: dict[str, Pool] = {}


def offer(pool: Pool) -> None:
    """Register a pool, so that Disco finds it by its key."""
    _pools[pool.key] = pool


def withdraw(pool: Pool) -> bool:
    """Unregister a pool; return whether it was registered."""
    return _pools.pop(pool.key, None) is not None


def new_key() -> str:
    """Return a key that no other pool of this process has."""
    return f"pool-{next(_keys)}"


def any_hung_up(descriptors: Iterable[int]) -> bool:
    """Return whether the other end of a pipe or connection that this process writes to is closed.

    The system reports this as soon as a write fails, and before the exit code of a process.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLRDHUP)  # POLLERR and POLLHUP are always reported
    return bool(poll.poll(0))


class ProcessPool(Pool):
    """Workers 1 to n - 1 of one session; worker 0 is a thread of the controller.

    Disco calls the global function `tvm_ipc.create_process_pool` with `key`. The workers have
    been started by then, because an error in Disco's constructor would wait for worker 0
    indefinitely.
    """

    def __init__(self, num_workers: int, num_groups: int, environment: dict[str, str]) -> None:
        self.key = new_key()
        self.processes: dict[int, ChildProcess] = {}
        self._environment = environment
        #: The descriptors to read from each worker and to write to it.
        self._pipes: dict[int, tuple[int, int]] = {}
        # Opened in advance: the process may be out of descriptors when `mute` is called.
        self._null_device = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        offer(self)
        try:
            with passed(import_path()) as path:
                for worker_id in range(1, num_workers):
                    self._start(worker_id, num_workers, num_groups, path)
        except BaseException:
            self.kill()
            self.join(0.0)
            self.forget()
            raise

    def room(self) -> int:
        """Return how many bytes a worker may leave unread before a write to it waits.

        This is half the capacity of its pipe, because a message that does not fit into the rest of
        a page of the pipe takes another page.
        """
        sizes = [fcntl.fcntl(write, fcntl.F_GETPIPE_SZ) for _, write in self._pipes.values()]
        return min(sizes, default=64 << 10) // 2

    def pipes(self, worker_id: int) -> tuple[int, int]:
        """Return the descriptors to read from a worker and to write to it."""
        return self._pipes[worker_id]

    def _start(self, worker_id: int, num_workers: int, num_groups: int, path: int) -> None:
        reply_read, reply_write = os.pipe()
        try:
            command_read, command_write = os.pipe()
        except OSError:
            os.close(reply_read)
            os.close(reply_write)
            raise
        self._pipes[worker_id] = (reply_read, command_write)
        for descriptor in self._pipes[worker_id]:
            _keep_from_children(descriptor)
        arguments = (worker_id, num_workers, num_groups, command_read, reply_write)
        try:
            self.processes[worker_id] = ChildProcess(
                python_with_path(path, _MAIN, *arguments),
                env=self._environment,
                pass_fds=(command_read, reply_write, path),
                stdin=subprocess.DEVNULL,
                **OWN_GROUP,
            )
        finally:
            os.close(command_read)
            os.close(reply_write)

    def check(self) -> None:
        """Do nothing: workers need no other process."""

    def hung_up(self) -> bool:
        """Return whether the process at the other end of a pipe has ended."""
        return any_hung_up(command_write for _, command_write in self._pipes.values())

    def alarming(self) -> bool:
        """Return False: workers need no other process."""
        return False

    def cause(self) -> tuple[str, tuple[int, ...]] | None:
        """Return None: only exit codes exist."""
        return None

    def ended(self, wait: Iterable[int] = ()) -> dict[int, int]:
        """Return the exit codes of the workers that have ended; wait for some ranks, briefly."""
        for rank in wait:
            with contextlib.suppress(KeyError, subprocess.TimeoutExpired):
                self.processes[rank].wait(1.0)
        codes = {rank: process.poll() for rank, process in self.processes.items()}
        return {rank: code for rank, code in codes.items() if code is not None}

    def kill(self) -> None:
        """Kill the workers that still run."""
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    def join(self, seconds: float) -> None:
        """Wait for all workers to end; kill those that take longer."""
        deadline = time.monotonic() + seconds
        for process in self.processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def mute(self) -> None:
        """Discard what Disco still writes: a write to a dead worker's pipe would throw."""
        for _, command_write in self._pipes.values():
            os.dup2(self._null_device, command_write, inheritable=False)

    def finish(self, seconds: float | None = None) -> None:
        """Do nothing: there are no other processes."""

    def forget(self) -> None:
        """Close the pipes; Disco calls this when its session object ends."""
        if not withdraw(self):
            return
        os.close(self._null_device)
        for pipe in self._pipes.values():
            for descriptor in pipe:
                _close_kept(descriptor)
        self._pipes.clear()


@tvm_ffi.register_global_func("tvm_ipc.create_process_pool")  # type: ignore[untyped-decorator]
def _create_process_pool(num_workers: int, num_groups: int, key: str) -> Callable[[int], Any]:
    pool = _pools[key]

    def serve(worker_id: int) -> Any:
        if worker_id == 0:
            pool.forget()
            return None
        return tvm_ffi.Shape(pool.pipes(worker_id))

    return serve
