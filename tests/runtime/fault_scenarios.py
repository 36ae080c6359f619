# SPDX-License-Identifier: Apache-2.0
"""What test_faults.py does to sessions, each scenario in an interpreter of its own.

    python fault_scenarios.py SCENARIO ROUNDS SEED

An abort or a hang of the controller is then an exit code or a time limit of the test.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tvm_ffi import Shape, get_global_func, register_global_func

import tvm_ipc
from tests.runtime import places
from tvm_ipc.errors import DeadlineError, IPCError, SessionClosedError, WorkerDiedError

#: A death is to be known within this time; the test machine may be busy.
NOTICED_SECONDS = 2.0
KILLERS_SLACK_SECONDS = 3.0


@register_global_func("tests.reduce_for_ever", override=True)
def reduce_for_ever(elements: int) -> None:
    x = places.tensor(np.ones(elements, "float32"))
    allreduce = get_global_func("runtime.disco.cuda_ipc.custom_allreduce")
    while True:
        allreduce(x, 3, x)


@register_global_func("tests.ignore", override=True)
def ignore(*_arguments: Any) -> None:
    pass


@register_global_func("tests.sleep_on", override=True)
def sleep_on(rank: int, seconds: float) -> None:
    if get_global_func("runtime.disco.worker_rank")() == rank:
        time.sleep(seconds)


def open_session(workers: int, **options: Any) -> tvm_ipc.Session:
    session = tvm_ipc.Session(workers, **options)
    session.import_python_module("tests.runtime.fault_scenarios")
    session.sync()
    return session


def reduce_once(session: tvm_ipc.Session) -> None:
    x = session.put(np.arange(1000, dtype="float32"))
    y = session.empty((1000,), "float32")
    session.allreduce(x, y)
    expected = session.num_workers * np.arange(1000, dtype="float32")
    for rank in range(session.num_workers):
        np.testing.assert_array_equal(session.get(y, rank), expected)


# ---- what must not be left behind ----------------------------------------------------------


def children() -> set[int]:
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[1]) == os.getpid():
                found.add(int(stat.parent.name))
    return found


def resources() -> dict[str, int]:
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return {
        "processes": len(children()),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "shared mappings": maps.count("memfd:tvm_ipc"),
    }


@contextlib.contextmanager
def nothing_left() -> Any:
    # Whatever is made once and kept is made now.
    with tvm_ipc.Session(2) as session:
        reduce_once(session)
    with tvm_ipc.Session(2, threads=True) as session:
        reduce_once(session)
    del session
    before = at_rest()
    yield
    end = time.monotonic() + 30
    while more_than(before, after := resources()) and time.monotonic() < end:
        time.sleep(0.05)
    assert not more_than(before, after), f"left behind: {before} became {after}"


def at_rest() -> dict[str, int]:
    """Resources without what is about to go: a thread that was joined is there for a moment."""
    seen = []
    for _ in range(10):
        seen.append(resources())
        time.sleep(0.05)
    return {name: min(one[name] for one in seen) for name in seen[0]}


def more_than(before: dict[str, int], after: dict[str, int]) -> bool:
    return any(after[name] > before[name] for name in before)


# ---- deaths --------------------------------------------------------------------------------


def waiting_for_collectives(session: tvm_ipc.Session, chance: random.Random) -> None:
    elements = chance.choice((1, 100, 5000, 200_000))
    session.get_global_func("tests.reduce_for_ever")(elements)
    session.sync()


def waiting_for_a_sleeper(session: tvm_ipc.Session, chance: random.Random) -> None:
    while True:
        session.get_global_func("tests.sleep_on")(chance.randrange(session.num_workers), 0.1)
        reduce_once(session)


def moving_values(session: tvm_ipc.Session, chance: random.Random) -> None:
    while True:
        x = session.put(np.ones(chance.choice((10, 100_000)), "float32"))
        session.get(x, chance.randrange(session.num_workers))


def sending_without_waiting(session: tvm_ipc.Session, chance: random.Random) -> None:
    while True:
        session.empty((3,), "float32")


LOADS = (waiting_for_collectives, waiting_for_a_sleeper, moving_values, sending_without_waiting)


def kill(rounds: int, chance: random.Random) -> None:
    """A worker is killed while everybody is busy: one exception, in time, that names it."""
    for number in range(rounds):
        workers = chance.choice((2, 2, 3, 4))
        session = open_session(workers)
        victim = chance.randrange(1, workers)
        killed = []

        def murder(pid: int = session.pids[victim], killed: list[float] = killed) -> None:
            killed.append(time.monotonic())
            os.kill(pid, signal.SIGKILL)

        timer = threading.Timer(chance.uniform(0, 0.3), murder)
        timer.start()
        load = LOADS[number % len(LOADS)]
        try:
            load(session, chance)
            raise AssertionError(f"{load.__name__}: the death went unnoticed")
        except WorkerDiedError as error:
            assert killed, error
            took = time.monotonic() - killed[0]
            assert error.ranks == (victim,), error
            assert f"rank {victim} (pid {session.pids[victim]}" in str(error), error
            assert took < NOTICED_SECONDS + KILLERS_SLACK_SECONDS, f"noticed after {took:.1f} s"
        assert not session.usable
        with contextlib.suppress(SessionClosedError):
            session.sync()
            raise AssertionError("a broken session took a command")
        session.close()
        timer.join()


def kill_at_the_ends(rounds: int, chance: random.Random) -> None:
    """A worker is killed during the start or the end of a session: an error, or nothing."""
    for number in range(rounds):
        stop = threading.Event()

        def murder(stop: threading.Event = stop, late: bool = bool(number % 2)) -> None:
            if not late:
                while not (pids := sorted(children())) and not stop.is_set():
                    time.sleep(0.001)
                time.sleep(chance.uniform(0, 0.4))
                for pid in pids[:1]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

        thread = threading.Thread(target=murder)
        thread.start()
        try:
            session = tvm_ipc.Session(2)
            if number % 2:
                reduce_once(session)
                os.kill(session.pids[1], signal.SIGKILL)
                time.sleep(chance.choice((0, 0, 0.002, 0.05)))
            session.close()
        except IPCError as error:
            assert "1" in str(error), error
        finally:
            stop.set()
            thread.join()
            session = None


def controller(rounds: int, chance: random.Random) -> None:
    """Says who its workers are and works until it is killed."""
    session = open_session(4)
    print(json.dumps(session.pids[1:]), flush=True)
    LOADS[rounds % len(LOADS)](session, chance)


# ---- ranks that do not answer --------------------------------------------------------------


def stop(rounds: int, chance: random.Random) -> None:
    """A stopped worker: an error after the deadline that names it; the end takes it along."""
    for _ in range(rounds):
        session = open_session(3, timeout=1.0)
        os.kill(session.pids[2], signal.SIGSTOP)
        start = time.monotonic()
        try:
            reduce_once(session)
            raise AssertionError("a stopped rank took part")
        except DeadlineError as error:
            assert f"rank 2 (pid {session.pids[2]})" in str(error), error
            assert time.monotonic() - start < 1.0 + 2.0 + KILLERS_SLACK_SECONDS
        session.close()


LONG: dict[str, Callable[[tvm_ipc.Session], Any]] = {
    "str": lambda s: s.get_global_func("tests.ignore")("\N{GRINNING FACE}" * 40_000),
    "bytes": lambda s: s.get_global_func("tests.ignore")(b"x" * 200_000),
    "bytearray": lambda s: s.get_global_func("tests.ignore")(bytearray(200_000)),
    "Shape": lambda s: s.get_global_func("tests.ignore")(Shape([1] * 20_000)),
    "many": lambda s: s.get_global_func("tests.ignore")(*range(20_000)),
    "references": lambda s: s.get_global_func("tests.ignore")(*[s.empty((1,), "int8")] * 5000),
    # More than half a page each, so that only one of them goes into a page of the pipe.
    "pages": lambda s: [s.get_global_func("tests.ignore")("x" * 2100) for _ in range(100)],
    "array": lambda s: s.get_global_func("tests.ignore")(np.ones(100_000)),
    "frees": lambda s: [s.empty((1,), "int8") for _ in range(5000)],
}


def stop_with_long_commands(rounds: int, chance: random.Random) -> None:
    """Whatever is sent to a stopped worker, nobody waits longer than the deadline."""
    make_pipe = os.pipe

    def small_pipe() -> tuple[int, int]:
        """What the system gives to a user who has many."""
        ends = make_pipe()
        fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, 4096)
        return ends

    for number in range(rounds):
        os.pipe = small_pipe if number % 2 else make_pipe
        sessions = {what: open_session(2, timeout=1.0) for what in LONG}
        os.pipe = make_pipe
        ended = []

        def work(what: str, ended: list[str] = ended, sessions: Any = sessions) -> None:
            session = sessions[what]
            LONG[what](session)  # it works
            session.sync()
            os.kill(session.pids[1], signal.SIGSTOP)
            try:
                LONG[what](session)
                session.sync()
            except DeadlineError as error:
                assert f"rank 1 (pid {session.pids[1]})" in str(error), error
                ended.append(what)

        threads = [threading.Thread(target=work, args=(what,), daemon=True) for what in LONG]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(ended) == sorted(LONG), sorted(set(LONG) - set(ended))
        for session in sessions.values():
            session.close()


def pause(rounds: int, chance: random.Random) -> None:
    """A worker that stops for a while, shorter than the deadline, is waited for."""
    session = open_session(3, timeout=30)
    for _ in range(rounds):
        rank = chance.choice((1, 2))
        os.kill(session.pids[rank], signal.SIGSTOP)
        timer = threading.Timer(
            chance.uniform(0, 0.3), os.kill, (session.pids[rank], signal.SIGCONT)
        )
        timer.start()
        reduce_once(session)
        timer.join()
    session.close()


# ---- many ----------------------------------------------------------------------------------


def sessions(rounds: int, chance: random.Random) -> None:
    """Sessions one after the other, and two at once; errors in between."""
    for number in range(rounds):
        threads = number % 10 != 0
        with tvm_ipc.Session(chance.choice((1, 2, 3)), threads=threads) as session:
            if number % 7 == 0:
                session.get_global_func("tests.no_such_function")
                with contextlib.suppress(IPCError):
                    session.sync()
                    raise AssertionError("a missing function went unnoticed")
            reduce_once(session)
            if number % 50 == 0:
                with tvm_ipc.Session(2, threads=True) as other:
                    reduce_once(other)
                    reduce_once(session)


SCENARIOS: dict[str, Callable[[int, random.Random], None]] = {
    scenario.__name__: scenario
    for scenario in (kill, kill_at_the_ends, stop, stop_with_long_commands, pause, sessions)
}

if __name__ == "__main__":
    name, rounds_text, seed_text = sys.argv[1:]
    randomness = random.Random(int(seed_text))
    if name == "controller":
        controller(int(rounds_text), randomness)
    with nothing_left():
        SCENARIOS[name](int(rounds_text), randomness)
    print("done")
