# SPDX-License-Identifier: Apache-2.0
"""Start, watch and end the worker processes of a session on this machine."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import subprocess
import time
from collections.abc import Iterable, Mapping
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
_offer = tvm_ffi.get_global_func("tvm_ipc.pool.offer")
_hung_up = tvm_ffi.get_global_func("tvm_ipc.pool.hung_up")
_mute = tvm_ffi.get_global_func("tvm_ipc.pool.mute")
_close = tvm_ffi.get_global_func("tvm_ipc.pool.close")
_keys = itertools.count()


class PoolWithPipes(Pool):
    """A pool with pipes to its workers, for which Disco asks by the key of the pool.

    The native library owns the pipes: Disco closes them in a destructor, where a Python exception
    would end the program.
    """

    def __init__(self) -> None:
        self.key = f"pool-{next(_keys)}"

    def offer(self, pipes: Mapping[int, tuple[int, int]]) -> None:
        """Hand over the descriptors to read from each worker and to write to it.

        The keys are the worker ids 1 to n. After an OSError, the caller still owns the descriptors.
        """
        ends = tvm_ffi.Shape([end for worker_id in sorted(pipes) for end in pipes[worker_id]])
        # Opened in advance: the process may be out of descriptors when `mute` is called.
        null_device = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        _offer(self.key, null_device, ends)

    def hung_up(self) -> bool:
        """Return whether a worker has closed its end of a pipe, as the end of its process does."""
        return bool(_hung_up(self.key))

    def mute(self) -> None:
        """Disconnect, and discard what Disco still writes: a failed write would end the program."""
        _mute(self.key)

    def forget(self) -> bool:
        """Close the pipes unless Disco destroyed its session; return whether they were open."""
        return bool(_close(self.key))


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


class ProcessPool(PoolWithPipes):
    """Workers 1 to n - 1 of one session; worker 0 is a thread of the controller.

    They are started before Disco's session. If its constructor failed, it would wait for worker 0
    indefinitely.
    """

    def __init__(self, num_workers: int, num_groups: int, environment: dict[str, str]) -> None:
        super().__init__()
        self.processes: dict[int, ChildProcess] = {}
        pipes: dict[int, tuple[int, int]] = {}
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
                    pipes[worker_id] = (reply_read, command_write)
            sizes = [fcntl.fcntl(write, fcntl.F_GETPIPE_SZ) for _, write in pipes.values()]
            self._smallest_pipe = min(sizes, default=64 << 10)
            self.offer(pipes)
        except BaseException:
            self.kill()
            self.join(0.0)
            if not self.forget():  # they were not handed over
                for pipe in pipes.values():
                    for descriptor in pipe:
                        _close_kept(descriptor)
            raise

    def room(self) -> int:
        """Return how many bytes a worker may leave unread before a write to it waits.

        This is half the capacity of its pipe, because a message that does not fit into the rest of
        a page of the pipe takes another page.
        """
        return self._smallest_pipe // 2

    def ended(self, wait: Iterable[int] = ()) -> dict[int, int]:
        """Return the exit codes of the workers that have ended; wait a second for some ranks."""
        end = time.monotonic() + 1.0
        for rank in wait:
            with contextlib.suppress(KeyError, subprocess.TimeoutExpired):
                self.processes[rank].wait(max(0.0, end - time.monotonic()))
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
