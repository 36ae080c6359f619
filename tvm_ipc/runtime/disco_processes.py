# SPDX-License-Identifier: Apache-2.0
"""The worker processes of Disco's `ProcessSession`, with pipes that can always be written to."""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import tvm_ffi

from tvm_ipc.errors import IPCError
from tvm_ipc.runtime import error_output

_process_pool: Any = importlib.import_module("tvm.runtime.disco.process_pool")
_keep_from_children = tvm_ffi.get_global_func("tvm_ipc.keep_from_children")
_close_kept = tvm_ffi.get_global_func("tvm_ipc.close_kept")
_watch_pipe = tvm_ffi.get_global_func("tvm_ipc.pipes.watch")
_close_pipe = tvm_ffi.get_global_func("tvm_ipc.pipes.close")
_serve_parent = tvm_ffi.get_global_func("tvm_ipc.worker.serve_parent")


class Worker(_process_pool.DiscoPopenWorker):  # type: ignore[misc]
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
        """The number of the process; 0 before it has one."""
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


def start_workers(num_workers: int, num_groups: int, entrypoint: str) -> list[Worker]:
    """Start the workers of a session before Disco waits for the first of them.

    An error in the middle of Disco's constructor would leave it waiting for worker 0.
    """
    workers = [Worker(i, num_workers, num_groups, entrypoint) for i in range(1, num_workers)]
    try:
        for worker in workers:
            worker.start()
    except BaseException as error:
        for worker in workers:
            worker.close()
        if isinstance(error, OSError):
            raise IPCError(f"the session cannot start its workers: {error}") from error
        raise
    return workers


def serving(native: Any) -> Callable[..., None]:
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
