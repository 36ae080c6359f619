# SPDX-License-Identifier: Apache-2.0
"""One session, used by several threads of the controller at once."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tvm_ipc
from tests.runtime import places, worker_functions
from tests.runtime.disco_kinds import KINDS, RANKS, call, on_workers, open_session
from tvm_ipc.errors import IPCError, SessionClosedError, WorkerDiedError, WorkerError

PLACES = pytest.mark.parametrize("threads", [True, False], ids=["threads", "processes"])


def together(*works: Callable[[], Any]) -> list[Any]:
    """What each of them returns, or the exception that ended it, from threads of their own."""
    with ThreadPoolExecutor(len(works)) as pool:
        futures: list[Future[Any]] = [pool.submit(work) for work in works]
    return [future.exception() or future.result() for future in futures]


def apart(work: Callable[[], Any]) -> Any:
    (result,) = together(work)
    if isinstance(result, BaseException):
        raise result
    return result


@pytest.fixture
def rounds(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--fault-rounds"))


def test_each_thread_gets_its_own_numbers(trio: tvm_ipc.Session, rounds: int) -> None:
    """Commands of all kinds, and references that end at any time, in every thread."""

    class Cycle:
        def __init__(self, value: Any) -> None:
            self.value, self.own = value, self

    def work(seed: int) -> None:
        generator = np.random.default_rng(seed)
        for i in range(8 * rounds):
            count = int(generator.integers(1, 3000))
            mine = generator.integers(-99, 99, count).astype("float64")
            x, y = trio.put(mine), trio.empty((count,), "float64")
            trio.allreduce(x, y)
            Cycle(x)  # a garbage collection ends it, in whatever thread that is
            rows = trio.scatter(np.stack([mine + rank for rank in range(RANKS)]))
            long = "\N{GRINNING FACE}" * int(generator.integers(0, 20_000))
            text = call(trio, "tests.with_rank", long)
            rank = i % RANKS
            np.testing.assert_array_equal(trio.get(y, rank), RANKS * mine)
            np.testing.assert_array_equal(trio.get(rows, rank), mine + rank)
            assert text.debug_get_from_remote(rank) == f"{long} on rank {rank}"

    thresholds = gc.get_threshold()
    gc.set_threshold(20)  # often: also while one of them holds a lock of ours
    try:
        assert together(*(lambda seed=seed: work(seed) for seed in range(4))) == [None] * 4
    finally:
        gc.set_threshold(*thresholds)


def test_order_of_one_thread_is_kept(trio: tvm_ipc.Session) -> None:
    def work() -> None:
        place = trio.put(np.zeros(1, "int64"))
        trio.sync()
        for i in range(200):
            call(trio, "tests.add_one_to", place)
            if i % 50 == 0:
                assert int(trio.get(place, 1)[0]) == i + 1
        assert int(trio.get(place, 2)[0]) == 200

    assert together(work, work, work) == [None] * 3


# ---- who hears of an error ------------------------------------------------------------------


def test_error_reaches_every_thread_whose_commands_it_may_have_cost(trio: tvm_ipc.Session) -> None:
    x = trio.put(np.ones(3))
    trio.sync()
    sent, told = threading.Barrier(3), threading.Barrier(3)
    heard: dict[str, list[str]] = {"fails": [], "busy": [], "idle": []}

    def work(name: str, command: Callable[[], Any] | None) -> None:
        for attempt in range(2):
            if attempt == 0 and name == "fails":
                call(trio, "tests.fail_on", 1, "ValueError", "mine")
            if attempt == 0 and command is not None:
                command()
            sent.wait()
            if attempt == 0 and name == "idle":
                told.wait()  # the others have been told by now
            for _ in range(2):
                try:
                    trio.sync()
                except WorkerError as error:
                    heard[name] += [e.message for e in error.errors]
            if attempt == 0 and name != "idle":
                told.wait()

    results = together(
        lambda: work("fails", None),
        lambda: work("busy", lambda: trio.allreduce(x, x)),
        lambda: work("idle", None),
    )
    assert results == [None] * 3
    assert heard == {"fails": ["mine"], "busy": ["mine"], "idle": []}


def test_error_of_a_thread_that_ended_reaches_who_asks_next(trio: tvm_ipc.Session) -> None:
    apart(lambda: call(trio, "tests.fail_on", 2, "ValueError", "left behind") and None)
    with pytest.raises(WorkerError, match="left behind"):
        trio.sync()
    trio.sync()


def test_thread_hears_at_its_next_command(trio: tvm_ipc.Session) -> None:
    """What it made before may be nothing: no command may go on with it."""
    function = trio.get_global_func("tests.next_int")
    trio.sync()
    call(trio, "tests.fail_on", 0, "ValueError", "the cause")
    number = function(1)

    def find() -> None:
        with pytest.raises(WorkerError, match="the cause"):
            trio.sync()

    apart(find)
    with pytest.raises(WorkerError, match="the cause"):
        call(trio, "tests.next_int", number)
    assert function(1).debug_get_from_remote(2) == 2


def test_death_reaches_every_thread(rounds: int) -> None:
    for _ in range(1 + rounds // 10):
        session = tvm_ipc.Session(3)
        session.import_python_module("tests.runtime.worker_functions")
        x = session.put(np.ones(1000))
        session.sync()

        def work(session: tvm_ipc.Session = session, x: Any = x) -> None:
            while True:
                session.allreduce(x, session.empty((1000,), "float64"))
                session.get(x, 2)

        timer = threading.Timer(0.2, os.kill, (session.pids[1], signal.SIGKILL))
        timer.start()
        results = together(work, work, work)
        assert all(isinstance(r, (WorkerDiedError, SessionClosedError)) for r in results), results
        assert any(isinstance(r, WorkerDiedError) for r in results)
        assert all("rank 1 (pid" in str(r) for r in results)
        session.close()


def test_errors_of_all_threads_under_fire(trio: tvm_ipc.Session, rounds: int) -> None:
    """Whoever fails or is skipped hears of it; whoever hears nothing has right numbers."""

    def work(seed: int) -> int:
        generator = np.random.default_rng(seed)
        heard = 0
        for i in range(15 * rounds):
            fails = generator.random() < 0.2
            try:
                x, y = trio.put(np.full(50, float(i))), trio.empty((50,), "float64")
                if fails:
                    call(trio, "tests.fail_on", int(generator.integers(RANKS)), "ValueError", "now")
                trio.allreduce(x, y)
                np.testing.assert_array_equal(trio.get(y, i % RANKS), np.full(50, RANKS * i))
                assert not fails, "its own error was lost"
            except WorkerError as error:
                assert {e.message for e in error.errors} == {"now"}
                heard += 1
        return heard

    for result in together(*(lambda seed=seed: work(seed) for seed in range(3))):
        assert isinstance(result, int), result
        assert result > 0


# ---- the end --------------------------------------------------------------------------------


@PLACES
def test_closed_by_another_thread(threads: bool) -> None:
    session = tvm_ipc.Session(2, threads=threads)
    x = session.put(np.ones(10))

    def work() -> None:
        while True:
            session.allreduce(x, session.empty((10,), "float64"))
            session.get(x, 1)

    def close() -> None:
        time.sleep(0.1)
        session.close()

    *worked, closed = together(work, work, close)
    assert closed is None
    assert all(isinstance(result, SessionClosedError) for result in worked), worked


def test_closed_by_many_threads() -> None:
    session = tvm_ipc.Session(2, threads=True)
    session.empty((3,), "float32")
    assert together(*[session.close] * 4) == [None] * 4


@pytest.mark.slow
def test_interrupt_while_another_thread_recovers() -> None:
    """It holds the lock until every worker rests; the main thread does not wait for that."""
    with tvm_ipc.Session(2, threads=True) as session:
        session.import_python_module("tests.runtime.worker_functions")
        session.sync()
        call(session, "tests.sleep_on", 0, 8.0)
        call(session, "tests.fail_on", 1, "ValueError", "while the other sleeps")

        def recover() -> None:
            with session._dispatcher.lock, pytest.raises(IPCError, match="while the other sleeps"):
                session.sync()

        thread = threading.Thread(target=recover)
        thread.start()
        time.sleep(0.3)
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            session.sync()
        assert thread.is_alive(), "it waited for the other thread"
        thread.join()
        timer.join()
        with pytest.raises(WorkerError, match="while the other sleeps"):
            session.sync()  # some of the commands were this thread's
        session.sync()


# ---- worker 0, a thread of the controller too -----------------------------------------------


def leave(session: Any) -> None:
    with session:
        raise RuntimeError("on the way out")


USES: dict[str, Callable[[Any], object]] = {
    "sync": lambda session: session._sync_all(),
    "shutdown": lambda session: session.shutdown(),
    "call": lambda session: session.get_global_func("tests.next_int")(1),
    "empty": lambda session: session.empty((3,), "float32"),
    "close": lambda session: session.close(),
    "get": lambda session: session.get(session.x),
    "leave": leave,
}


@pytest.mark.parametrize(
    ("kind", "use"),
    [(kind, use) for kind in KINDS for use in USES if "ipc" in kind or use not in list(USES)[4:]],
)
def test_worker_may_not_use_the_session_it_works_for(kind: str, use: str) -> None:
    """Whatever it waited for there would be itself."""
    opened = open_session(kind, 2)
    session = opened.session
    if isinstance(session, tvm_ipc.Session):
        session.x = session.put(np.ones(3))
    worker_functions.in_worker_0[:] = [lambda: USES[use](session)]
    call(session, "tests.run_in_worker_0")
    with pytest.raises(WorkerError, match=r"rank 0: .*cannot use the session of that worker"):
        session._sync_all()
    assert on_workers(call(session, "tests.next_int", 1), 2) == [2, 2]
    opened.end()


@pytest.mark.skipif(places.ON_GPUS, reason="counts threads, and drivers of GPUs have their own")
def test_worker_that_lets_go_of_its_session_last() -> None:
    """It cannot end the session, which the next one that starts does."""
    tvm_ipc.Session(2, threads=True).close()
    before, sent, dropped = threads_here(), threading.Event(), threading.Event()
    opened = [tvm_ipc.Session(2, threads=True)]
    opened[0].import_python_module("tests.runtime.worker_functions")
    opened[0].sync()

    def drop() -> None:
        sent.wait()
        del opened[0]
        gc.collect()
        dropped.set()

    worker_functions.in_worker_0[:] = [drop]
    call(opened[0], "tests.run_in_worker_0")
    sent.set()
    assert dropped.wait(10)
    worker_functions.in_worker_0.clear()
    started = threads_here() - before
    assert len(started) >= 2
    tvm_ipc.Session(2, threads=True).close()
    end = time.monotonic() + 10
    while threads_here() & started and time.monotonic() < end:
        time.sleep(0.01)  # a thread that was joined may be listed a little longer
    assert not threads_here() & started


def threads_here() -> set[str]:
    """The threads of this process, those that have ended and are still listed included."""
    return {entry.name for entry in Path("/proc/self/task").iterdir()}
