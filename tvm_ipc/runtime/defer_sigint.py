# SPDX-License-Identifier: Apache-2.0
"""Run a function that Ctrl-C must not interrupt.

Python runs signal handlers in the main thread, where their exceptions may be raised at any line.
Functions that start or end processes, threads, files and folders therefore run in a thread of
their own, and the main thread waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

Result = TypeVar("Result")


def defer_sigint(
    function: Callable[[], Result], hurry: Callable[[], None] = lambda: None
) -> Result:
    """Call a function, and return its result or raise its exception.

    If a signal handler raises an exception meanwhile, `hurry` is called, which makes the function
    return soon. The handler's exception is raised after that.
    """
    if threading.current_thread() is not threading.main_thread():
        return function()
    future: Future[Result] = Future()
    thread = threading.Thread(target=_run, args=(function, future), name="tvm_ipc")
    started = False
    interruption: BaseException | None = None
    while True:
        try:
            if not started:
                started = True
                thread.start()
            if interruption is not None:
                hurry()
            # Not Thread.join: before Python 3.13, a thread whose join was interrupted is taken for
            # ended.
            wait([future])
            break
        except BaseException as error:
            if future.cancel():  # the function has not started, and will not
                if isinstance(error, RuntimeError):  # no new threads at interpreter shutdown
                    return function()
                raise
            interruption = interruption or error
    if interruption is not None:
        raise interruption
    return future.result()


def _run(function: Callable[[], Result], future: Future[Result]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)
