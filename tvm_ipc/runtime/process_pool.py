# SPDX-License-Identifier: Apache-2.0
"""Start, watch and end the worker processes of a session on this machine."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import select
import subprocess
from collections.abc import Callable, Iterable
from typing import Any

import tvm_ffi

from tvm_ipc.runtime.start_child_process import (
    WORKER_PROGRAM,
    ChildProcess,
    end_within,
    import_path,
    passed,
    start_python,
)
from tvm_ipc.runtime.worker_pool_interface import Pool

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


def start_worker(
    program: str, *arguments: object, path: int, **options: Any
) -> tuple[ChildProcess, int, int, int]:
    """Start a process with one pipe from it and one pipe to it.

    Returns the process, the descriptor to read from it, both ends of the pipe to it, first the end
    that it reads from. The other end of the first pipe is closed.

    Parameters
    ----------
    program : a program text. Its last arguments are its own ends of the pipes.
    path, options : as for `start_python`.
    """
    with contextlib.ExitStack() as undo:
        reply_read, reply_write = _pipe(undo)
        command_read, command_write = _pipe(undo)
        process = start_python(
            program,
            *arguments,
            command_read,
            reply_write,
            path=path,
            files=(command_read, reply_write),
            **options,
        )
        undo.pop_all()
    os.close(reply_write)
    _keep_from_children(reply_read)
    return process, reply_read, command_read, command_write


def _pipe(undo: contextlib.ExitStack) -> tuple[int, int]:
    ends = os.pipe()
    for end in ends:
        undo.callback(os.close, end)
    return ends


class ProcessPool(Pool):
    """Workers 1 to n - 1 of one session; worker 0 is a thread of the controller.

    Disco calls the global function `tvm_ipc.create_process_pool` with `key`. The workers have
    been started by then, because an error in Disco's constructor would wait for worker 0
    indefinitely.
    """

    def __init__(self, num_workers: int, num_groups: int, environment: dict[str, str]) -> None:
        self.key = new_key()
        self.processes: dict[int, ChildProcess] = {}
        #: The descriptors to read from each worker and to write to it.
        self._pipes: dict[int, tuple[int, int]] = {}
        # Opened in advance: the process may be out of descriptors when `mute` is called.
        self._null_device = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        offer(self)
        try:
            with passed(import_path()) as path:
                for worker_id in range(1, num_workers):
                    process, reply_read, command_read, command_write = start_worker(
                        WORKER_PROGRAM,
                        worker_id,
                        num_workers,
                        num_groups,
                        path=path,
                        env=environment,
                    )
                    os.close(command_read)
                    _keep_from_children(command_write)
                    self.processes[worker_id] = process
                    self._pipes[worker_id] = (reply_read, command_write)
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

    def hung_up(self) -> bool:
        """Return whether the process at the other end of a pipe has ended."""
        return any_hung_up(command_write for _, command_write in self._pipes.values())

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
        end_within(seconds, self.processes.values())

    def mute(self) -> None:
        """Discard what Disco still writes: a write to a dead worker's pipe would throw."""
        for _, command_write in self._pipes.values():
            os.dup2(self._null_device, command_write, inheritable=False)

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
