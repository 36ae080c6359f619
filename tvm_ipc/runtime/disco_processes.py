# SPDX-License-Identifier: Apache-2.0
"""Start the worker processes of Disco's `ProcessSession`, with pipes that outlive them."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable
from typing import Any, Final

import tvm_ffi

from tvm_ipc.errors import IPCError
from tvm_ipc.runtime.print_to_stderr_and_unraised_errors import print_err
from tvm_ipc.runtime.start_child_process import (
    ChildProcess,
    import_path,
    passed,
    python_with_path,
)

#: Runs a module like `python -m`, after the controller's import path has been set.
_MAIN: Final = """
import runpy
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
_process_pool: Any = importlib.import_module("tvm.runtime.disco.process_pool")
_keep_from_children = tvm_ffi.get_global_func("tvm_ipc.keep_from_children")
_close_kept = tvm_ffi.get_global_func("tvm_ipc.close_kept")
_watch_pipe = tvm_ffi.get_global_func("tvm_ipc.pipes.watch")
_close_pipe = tvm_ffi.get_global_func("tvm_ipc.pipes.close")
_serve_parent = tvm_ffi.get_global_func("tvm_ipc.worker.serve_parent")


class Worker(_process_pool.DiscoPopenWorker):  # type: ignore[misc]
    """A worker process with Disco's interface, whose pipes stay writable after its end."""

    _pipes: tuple[int, int] | None = None
    _owner = 0

    def start(self) -> tuple[int, int]:
        """Start the process once; return the descriptors to read from it and to write to it."""
        if self._pipes is not None:
            return self._pipes
        with contextlib.ExitStack() as undo:
            reply_read, reply_write = _pipe(undo)
            command_read, command_write = _pipe(undo)
            numbers = (self.worker_id, self.num_workers, self.num_groups, command_read, reply_write)
            with passed(import_path()) as path:
                self._proc = ChildProcess(
                    python_with_path(path, _MAIN, self.entrypoint, *numbers),
                    pass_fds=(command_read, reply_write, path),
                )
            self._owner = os.getpid()
            _watch_pipe(self._proc.pid, command_read, command_write)
            undo.pop_all()
        os.close(reply_write)
        _keep_from_children(reply_read)
        self._pipes = (reply_read, command_write)
        return self._pipes

    def exit_code(self) -> int | None:
        """Return the exit code of the process; None while it runs."""
        process: ChildProcess | None = self._proc
        return None if process is None else process.poll()

    @property
    def pid(self) -> int:
        """The process id; 0 before the start."""
        return 0 if self._proc is None else self._proc.pid

    def kill(self) -> None:
        """Kill the process and its children; in a fork of the controller, do nothing."""
        if self._proc is None or self._owner != os.getpid():
            return
        with contextlib.suppress(ImportError):  # psutil is optional for TVM too
            _process_pool._kill_child_processes(self._proc.pid)
        self._proc.kill()
        self.join(timeout=1.0)

    def __del__(self) -> None:
        """Kill the process when nothing refers to this object any more."""
        with contextlib.suppress(Exception):  # modules are empty at interpreter shutdown
            self.kill()

    def close(self) -> None:
        """Kill the process, and close the pipes."""
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

    After an error in Disco's constructor, Disco would wait for worker 0 indefinitely.
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
