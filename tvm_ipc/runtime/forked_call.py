# SPDX-License-Identifier: Apache-2.0
"""Call a function in a fork of this process, while this process continues.

The fork has all modules that this process has imported, so it starts at once. It is for processes
of `subprocess_call`, which have one thread and no session.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


@contextlib.contextmanager
def call_in_fork(function: Callable[[], bytes]) -> Iterator[Callable[[], bytes | None]]:
    """Start a function in a fork, and yield a function that waits for its result.

    The result is None if the function raised an exception, or if the fork was killed or could not
    start; then the caller has to call the function itself. The fork ends with this process, and
    with the `with` block.

    Examples
    --------
    >>> from tvm_ipc.runtime.forked_call import call_in_fork
    >>> with call_in_fork(lambda: b"done") as result:
    ...     pass  # something that takes as long
    ...     result()
    b'done'
    """
    parent = os.getpid()
    read, write = os.pipe()
    try:
        pid = os.fork()
    except OSError:
        os.close(read)
        os.close(write)
        yield lambda: None
        return
    if pid == 0:
        _run(function, parent, read, write)
    os.close(write)
    is_running = True

    def result() -> bytes | None:
        nonlocal is_running
        chunks = []
        while chunk := os.read(read, 1 << 20):
            chunks.append(chunk)
        is_running = False
        _, status = os.waitpid(pid, 0)
        return b"".join(chunks) if status == 0 else None

    try:
        yield result
    finally:
        os.close(read)
        if is_running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _run(function: Callable[[], bytes], parent: int, read: int, write: int) -> None:
    """Write the result of a function to a pipe, and end the fork."""
    status = 1
    try:
        os.close(read)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:  # it may have ended before the line above
            data = memoryview(function())
            while data:
                data = data[os.write(write, data) :]
            status = 0
    finally:
        os._exit(status)
