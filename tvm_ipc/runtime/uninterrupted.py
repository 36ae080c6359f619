# SPDX-License-Identifier: Apache-2.0
"""Work that Ctrl-C must not cut in two.

Python runs signal handlers in the main thread, and what they raise is raised there, at any line. So
what makes or ends processes, threads, files and folders runs in a thread of its own, and the main
thread waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

Result = TypeVar("Result")


def uninterrupted(work: Callable[[], Result], hurry: Callable[[], None] = lambda: None) -> Result:
    """Return what the work returns, or raise what it raises.

    If a signal handler raises meanwhile, `hurry` is called, which makes the work end soon, and the
    handler's exception is raised after the work's end.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    future: Future[Result] = Future()
    thread = threading.Thread(target=_run, args=(work, future), name="tvm_ipc")
    begun = False
    interruption: BaseException | None = None
    while True:
        try:
            if not begun:
                begun = True
                thread.start()
            if interruption is not None:
                hurry()
            # Not Thread.join: before Python 3.13 a thread whose join was interrupted counts as
            # ended, though it is not.
            wait([future])
            break
        except BaseException as error:
            if future.cancel():  # the work has not begun, and will not
                if isinstance(error, RuntimeError):  # at its end the interpreter starts no threads
                    return work()
                raise
            interruption = interruption or error
    if interruption is not None:
        raise interruption
    return future.result()


def _run(work: Callable[[], Result], future: Future[Result]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
