# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C at every line of a session, each scenario in an interpreter of its own.

    python interrupt_scenarios.py SCENARIO STRIDE

KeyboardInterrupt is raised at the first line of the controller's code that the main thread comes
to, at the second one in the next run, and so on, STRIDE lines at a time. (Python runs signal
handlers, which raise it, in the main thread alone.)
"""

from __future__ import annotations

import contextlib
import dis
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
from tvm.runtime import disco

import tvm_ipc
from tests.runtime.fault_scenarios import at_rest, more_than, nothing_left, reduce_once, resources
from tvm_ipc.errors import IPCError, WorkerError

RUNTIME = str(Path(tvm_ipc.__file__).with_name("runtime"))


class Interrupt:
    """Raises KeyboardInterrupt at one of the lines that run inside the block."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.lines = 0
        self._firsts: dict[CodeType, dict[int, int]] = {}

    def __enter__(self) -> Interrupt:
        sys.settrace(self._enter_frame)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter_frame(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(RUNTIME) else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and not self._leaves_with(frame):
            self.lines += 1
            if self.lines == self.at:
                raise KeyboardInterrupt
        return self._line

    def _leaves_with(self, frame: FrameType) -> bool:
        """Python tells of the line again when a block ends, where no signal handler can run."""
        firsts = self._firsts.get(frame.f_code)
        if firsts is None:
            firsts = self._firsts[frame.f_code] = {}
            for offset, line in dis.findlinestarts(frame.f_code):
                firsts.setdefault(line, offset)
        return frame.f_lasti != firsts.get(frame.f_lineno, frame.f_lasti) and "with " in _source(
            frame.f_code.co_filename, frame.f_lineno
        )


def _source(path: str, line: int) -> str:
    if path not in _sources:
        _sources[path] = Path(path).read_text().splitlines()
    return _sources[path][line - 1]


_sources: dict[str, list[str]] = {}


def interrupted(stride: int, work: Callable[[], None]) -> Iterator[None]:
    """Do the work again and again, interrupted at a later line each time, until it is not."""
    at = 1
    while True:
        with Interrupt(at) as interrupt:
            try:
                work()
                done = True
            except KeyboardInterrupt:
                done = False
        yield
        if done and interrupt.lines < at:
            print(f"{at - 1} lines")
            return
        at += stride


def in_another_thread(work: Callable[[], None]) -> None:
    """No lock may be left locked by the main thread."""
    raised = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it hangs"
    if raised:
        raise raised[0]


# ---- a session that goes on ----------------------------------------------------------------


def goes_on(stride: int, work: Callable[[tvm_ipc.Session], None], **options: Any) -> None:
    with tvm_ipc.Session(2, threads=True, **options) as session:
        session.import_python_module("tests.runtime.worker_functions")
        session.sync()
        for _ in interrupted(stride, lambda: work(session)):
            with contextlib.suppress(WorkerError):  # of the work, if it was not heard in there
                session.sync()
            session.sync()
            in_another_thread(lambda: reduce_once(session))
            reduce_once(session)


def values(stride: int) -> None:
    data = np.arange(6.0).reshape(2, 3)

    def work(session: tvm_ipc.Session) -> None:
        x, y = session.scatter(data), session.empty((3,), "float64")
        session.allreduce(x, y)
        np.testing.assert_array_equal(session.get(y, 1), [3, 5, 7])
        session.get(session.put(data))

    goes_on(stride, work)


def long_commands(stride: int) -> None:
    text = "\N{GRINNING FACE}" * 30_000

    def work(session: tvm_ipc.Session) -> None:
        echo = session.get_global_func("tests.echo")
        assert echo(text).debug_get_from_remote(1) == text
        session.get_global_func("tests.is_none")
        for _ in range(500):
            echo(1)

    # Its thousands of lines are much alike.
    goes_on(37 * stride, work)


def errors(stride: int) -> None:
    """An error is heard once Ctrl-C is over, if not before, or as what Ctrl-C interrupted."""
    with tvm_ipc.Session(2, threads=True) as session:
        session.import_python_module("tests.runtime.worker_functions")
        fail = session.get_global_func("tests.fail_on")
        session.sync()
        state = {}

        def work() -> None:
            state.update(sent=False, heard=False)
            fail(1, "ValueError", "to be heard")
            state["sent"] = True
            try:
                session.sync()
                raise AssertionError("nothing was raised")
            except WorkerError:
                state["heard"] = True
            except KeyboardInterrupt as interrupt:
                state["heard"] = isinstance(interrupt.__context__, WorkerError)
                raise

        for _ in interrupted(stride, work):
            try:
                session.sync()
            except WorkerError as error:
                assert [e.message for e in error.errors] == ["to be heard"]
                state["heard"] = True
            assert state["heard"] or not state["sent"], "the error was lost"
            session.sync()
            in_another_thread(lambda: reduce_once(session))


# ---- sessions that start and end -----------------------------------------------------------


def settles(before: dict[str, int]) -> None:
    end = time.monotonic() + 30
    while more_than(before, after := resources()):
        assert time.monotonic() < end, f"left behind: {before} became {after}"
        time.sleep(0.02)


def starts_and_ends(stride: int, *, threads: bool) -> None:
    def work() -> None:
        session = tvm_ipc.Session(2, threads=threads)
        session.put(np.ones(3))
        session.close()

    before = at_rest()
    for _ in interrupted(stride, work):
        gc.collect()
        settles(before)


def threads(stride: int) -> None:
    starts_and_ends(stride, threads=True)


def processes(stride: int) -> None:
    starts_and_ends(stride, threads=False)


def block(stride: int) -> None:
    def work() -> None:
        with tvm_ipc.Session(2, threads=True) as session:
            session.put(np.ones(3))

    before = at_rest()
    for _ in interrupted(stride, work):
        gc.collect()
        settles(before)


def close(stride: int) -> None:
    """A close that was interrupted says so by `usable`, and can be done again."""

    def opened() -> tvm_ipc.Session:
        session = tvm_ipc.Session(2, threads=True)
        session.put(np.ones(3))
        return session

    before = at_rest()
    now = [opened()]
    for _ in interrupted(stride, lambda: now[0].close()):
        if now[0].usable:
            reduce_once(now[0])
        else:
            with contextlib.suppress(IPCError):
                now[0].sync()
                raise AssertionError("it can still be used")
        now[0].close()
        now[0] = opened()
    now.pop().close()
    settles(before)


def disco_session(stride: int) -> None:
    """The end of a session of Disco: an error in its destructor would end the program."""
    before = at_rest()
    sessions = [disco.ProcessSession(3)]

    def destroy() -> None:
        sessions.pop()
        time.sleep(0)  # a KeyboardInterrupt in the destructor is raised at the latest here

    for _ in interrupted(stride, destroy):
        sessions.append(disco.ProcessSession(3))
    sessions.pop()
    settles(before)


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (values, long_commands, errors, threads, processes, block, close, disco_session)
}

if __name__ == "__main__":
    name, stride_text = sys.argv[1:]
    if name == "disco_session":
        disco.ProcessSession(2).shutdown()  # starts the watch over such workers, which stays
    with nothing_left():
        SCENARIOS[name](int(stride_text))
    print("done")
