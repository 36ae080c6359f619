# SPDX-License-Identifier: Apache-2.0
"""Start the worker processes of Disco's `ProcessSession`, with pipes that outlive them."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable
from typing import Any, Final

import tvm_ffi

from tvm_ipc.errors import IPCError
from tvm_ipc.runtime.print_to_stderr_and_unraised_errors import print_err
from tvm_ipc.runtime.process_pool import start_worker
from tvm_ipc.runtime.start_child_process import import_path, passed
from tvm_ipc.tvm_private_names import kill_children_of

#: Runs a module like `python -m`, after the controller's import path has been set.
_MAIN: Final = """
import runpy
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
_close_kept = tvm_ffi.get_global_func("tvm_ipc.close_kept")
_watch_pipe = tvm_ffi.get_global_func("tvm_ipc.pipes.watch")
_close_pipe = tvm_ffi.get_global_func("tvm_ipc.pipes.close")
_serve_parent = tvm_ffi.get_global_func("tvm_ipc.worker.serve_parent")


class Worker:
    """A worker process whose pipes stay writable after its end.

    Attributes
    ----------
    worker_id : the number of the worker.
    process : the process.
    pipes : the descriptors to read from it and to write to it; None after `close`.
    """

    def __init__(self, worker_id: int, numbers: tuple[int, int], entrypoint: str) -> None:
        self.worker_id = worker_id
        self._owner = os.getpid()
        with passed(import_path()) as path:
            # As Disco's, it reads from the terminal, and Ctrl-C reaches it.
            self.process, reply_read, command_read, command_write = start_worker(
                _MAIN,
                entrypoint,
                worker_id,
                *numbers,
                path=path,
                own_group=False,
                stdin=None,
            )
        self.pipes: tuple[int, int] | None = (reply_read, command_write)
        try:
            _watch_pipe(self.process.pid, command_read, command_write, reply_read)
        except BaseException:
            self.kill()
            for descriptor in (command_read, command_write, reply_read):
                _close_kept(descriptor)
            raise

    def kill(self) -> None:
        """Kill the process and its children; in a fork of the controller, do nothing."""
        if self._owner != os.getpid():
            return
        with contextlib.suppress(ImportError):  # psutil is optional for TVM too
            kill_children_of(self.process.pid)
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)

    def __del__(self) -> None:
        """Kill the process when nothing refers to this object any more."""
        with contextlib.suppress(Exception):  # modules are empty at interpreter shutdown
            self.kill()

    def close(self) -> None:
        """Kill the process, and close the pipes; after an interrupt, this can be called again."""
        with contextlib.suppress(Exception):  # Disco calls this in a destructor
            self.kill()
        if self.pipes is not None:
            _close_pipe(self.pipes[1])
            self.pipes = None


def start_workers(num_workers: int, num_groups: int, entrypoint: str) -> list[Worker]:
    """Start the workers of a session before Disco waits for the first of them.

    After an error in Disco's constructor, Disco would wait for worker 0 indefinitely.
    """
    workers: list[Worker] = []
    try:
        for worker_id in range(1, num_workers):
            workers.append(Worker(worker_id, (num_workers, num_groups), entrypoint))
    except BaseException as error:
        for worker in workers:
            worker.close()
        if isinstance(error, OSError):
            raise IPCError(f"the session cannot start its workers: {error}") from error
        raise
    return workers


def wrap_main_loop(native: Any) -> Callable[..., None]:
    """Return Disco's main loop of a worker, with pipes that no child process inherits."""

    def serve(
        worker_id: int, num_workers: int, num_groups: int, read_fd: int, write_fd: int
    ) -> None:
        worker_pid = os.getpid()
        _serve_parent(read_fd, write_fd)
        native(worker_id, num_workers, num_groups, read_fd, write_fd)
        if os.getpid() != worker_pid:  # in a fork, the pipes are /dev/null, which ends the loop
            print_err(
                f"tvm_ipc: process {os.getpid()}, forked in a function of worker {worker_id}, came "
                "back from the function and ends here: it is no worker; end it with os._exit\n"
            )
            os._exit(1)

    return serve
