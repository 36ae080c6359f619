# SPDX-License-Identifier: Apache-2.0
"""Work that a signal handler's exception does not cut in two."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from tvm_ipc.runtime.defer_sigint import defer_sigint


@pytest.mark.parametrize("interrupts", [1, 3])
def test_an_interrupt_comes_after_the_end_of_the_work(interrupts: int) -> None:
    main = threading.main_thread().ident
    assert main is not None
    done, hurried = [], []

    def work() -> None:
        for _ in range(interrupts):
            signal.pthread_kill(main, signal.SIGINT)
            time.sleep(0.1)
        done.append(True)

    with pytest.raises(KeyboardInterrupt):
        defer_sigint(work, lambda: hurried.append(True))
    assert done == [True]
    assert hurried


def test_what_the_work_returns_and_raises_comes_home() -> None:
    assert defer_sigint(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        defer_sigint(lambda: 1 // 0)
