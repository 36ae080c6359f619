# SPDX-License-Identifier: Apache-2.0
"""Disco's own sessions, initialised by us: errors, deaths and what outlives them reach the program
as exceptions, and never end it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm.runtime import disco

import tvm_ipc
from tests.child_python import output_of_code
from tests.runtime.disco_kinds import on_workers, open_session
from tvm_ipc.errors import SessionClosedError, WorkerError
from tvm_ipc.runtime import disco_session_liveness_and_errors

START = """
import gc, os, signal, time
import numpy as np, tvm
from tvm.runtime import disco

def worker_pids():
    here = str(os.getpid())
    return sorted(int(p) for p in os.listdir("/proc") if p.isdigit() and parent_of(p) == here)

def parent_of(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1]
    except OSError:
        return ""

def start(kind="ProcessSession", workers=2):
    session = getattr(disco, kind)(workers)
    session.init_ccl(tvm.get_global_func("runtime.disco.compiled_ccl")(), *range(workers))
    return session

def message_of(function, *args):
    try:
        function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"
"""


def run(code: str, **environment: str) -> str:
    return output_of_code(START + code, environment=environment)


OUTLIVE = """
def use(end):
    session = start()
    values = [session.broadcast(np.ones(4)) for _ in range(50)]
    session.allreduce(values[0], values[1])
    session._sync_all()
    if end == "shutdown":
        session.shutdown()
    else:
        [pid] = worker_pids()
        os.kill(pid, signal.SIGKILL)
        if end == "noticed":
            print(message_of(session._sync_all))
    return session, values

for end in ("shutdown", "unnoticed", "noticed"):
    for order in (0, 1):  # which goes first, the session or its values
        kept = list(use(end))
        del kept[order]
        gc.collect()
        del kept
        gc.collect()
print("alive")
"""


@pytest.mark.slow
def test_references_outlive_the_workers() -> None:
    """A destructor that writes to a worker that is no more used to abort the program."""
    out = run(OUTLIVE)
    assert out.splitlines()[-1] == "alive"
    assert out.count("WorkerDiedError: rank 1 (pid ") == 2


FLOOD = """
session = start()
values = [session.get_global_func("runtime.disco.worker_rank") for _ in range(3000)]
session._sync_all()
[pid] = worker_pids()
os.kill(pid, signal.SIGKILL)
del values  # 3,000 messages, more than a pipe holds, at once
session.shutdown()
print("alive")
"""


def test_more_than_a_pipe_holds_goes_to_a_dead_worker() -> None:
    assert run(FLOOD) == "alive\n"


DEATH = """
session = start()
session.import_python_module("tests.runtime.worker_functions")
x = session.broadcast(np.ones(4, "float32"))
session._sync_all()
[pid] = worker_pids()
os.kill(pid, signal.SIGKILL)
for _ in range(200):
    said = message_of(session.allreduce, x, x)
    if said != "nothing was raised":
        break
    time.sleep(0.01)
print(said)
print(message_of(session._sync_worker, 0))
print(message_of(x.debug_get_from_remote, 0))
print(message_of(session.import_python_module, "os"))
print(message_of(session.init_ccl, "shm"))
session.shutdown()
print(message_of(session._sync_all))
"""


def test_a_death_is_raised_by_the_next_command() -> None:
    lines = run(DEATH).splitlines()
    died = [line for line in lines if line.startswith("WorkerDiedError: rank 1 (pid ")]
    assert len(died) == 5
    assert all("exit code -9) died; the session is no longer usable" in line for line in died)
    assert lines[-1] == "SessionClosedError: the session was shut down"


WAITING = """
import threading
session = start(workers=3)
session.import_python_module("tests.runtime.fault_scenarios")
session._sync_all()
victim = worker_pids()[0]
threading.Timer(0.3, os.kill, (victim, signal.SIGKILL)).start()
session.get_global_func("tests.reduce_for_ever")(100)
print(message_of(session._sync_worker, WAIT))
session.shutdown()
"""


@pytest.mark.slow
@pytest.mark.parametrize("waits_for", [0, 1, 2])
def test_a_death_is_raised_by_the_wait_for_any_worker(waits_for: int) -> None:
    assert run(WAITING.replace("WAIT", str(waits_for))).startswith("WorkerDiedError: rank ")


FORKED = """
ended = []
for kind in ("ThreadedSession", "ProcessSession"):
    session = start(kind)
    x = session.empty((4,), "float32")
    session._sync_all()
    child = os.fork()
    if child == 0:
        for use in (session._sync_all, lambda: x.debug_get_from_remote(0), session.shutdown):
            print(message_of(use).replace(str(os.getppid()), "PARENT"), flush=True)
        del session, x, use
        ended.clear()  # sessions that were shut down, but not destroyed
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    ended.append(session)
    session.allreduce(x, x)
    session._sync_all()
    session.shutdown()
"""


def test_a_forked_child_has_no_part_in_a_session() -> None:
    """It used to wait for threads that are not there, or to tell of deaths."""
    refused = "SessionClosedError: the session is of process PARENT, from which this one was forked"
    out = run(FORKED).splitlines()
    assert [line.partition(";")[0] for line in out] == [refused, refused, "nothing was raised"] * 2


OWN_FORKED = """
import tvm_ipc
kept = []
for threads in (True, False):
    session = tvm_ipc.Session(2, threads=threads)
    for end in ("open", "closed"):
        if end == "closed":
            session.close()
        kept.append(session)
        child = os.fork()
        if child == 0:
            kept.clear()
            del session
            gc.collect()
            os._exit(0)
        print(threads, end, os.waitpid(child, 0)[1])
"""


def test_a_forked_child_destroys_no_session_of_ours() -> None:
    lines = [f"{threads} {end} 0" for threads in (True, False) for end in ("open", "closed")]
    assert run(OWN_FORKED).splitlines() == lines


# ---- errors ---------------------------------------------------------------------------------


@pytest.fixture(params=["disco_threads", "disco_processes"])
def own(request: pytest.FixtureRequest, shared_session: Callable[..., Any]) -> Any:
    return shared_session(request.param, 2)


def assert_works(session: Any) -> None:
    x = session.broadcast(np.ones(3))
    session.allreduce(x, x)
    np.testing.assert_array_equal(on_workers(x, 2), [[2, 2, 2]] * 2)


def test_what_a_worker_raises_comes_home(own: Any) -> None:
    own.get_global_func("tests.next_int")("no number")
    with pytest.raises(WorkerError, match="ranks 0-1: TypeError"):
        own._sync_all()
    assert_works(own)


def test_an_unknown_function_comes_home(own: Any) -> None:
    own.get_global_func("tests.no_such_function")(1)
    with pytest.raises(WorkerError, match="no global function tests"):
        own.sync_worker_0()
    assert_works(own)


@pytest.mark.parametrize("waits", ["sync", "get", "copy"])
def test_errors_that_come_later_than_the_answer_are_waited_for(
    waits: str, own: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors come over the hub, answers over Disco's pipes."""
    place = own.empty((3,), "float32")
    own._sync_all()
    now, reads = disco_session_liveness_and_errors._report, itertools.count()
    before = now(own)  # as if the hub read nothing until it was asked five times
    monkeypatch.setattr(
        disco_session_liveness_and_errors,
        "_report",
        lambda one: before if next(reads) < 5 else now(one),
    )
    own.get_global_func("tests.next_int")("no number")
    with pytest.raises(WorkerError, match="TypeError"):
        if waits == "sync":
            own._sync_worker(1)
        elif waits == "get":
            place.debug_get_from_remote(1)
        else:
            place.debug_copy_from(1, np.ones(3, "float32"))
    own._sync_all()  # nothing is told twice
    assert_works(own)


@pytest.mark.parametrize("worker", [2, -1, 1.0, "1", True])
def test_workers_that_are_not_there_are_refused(worker: Any, own: Any) -> None:
    """Of a process that is none Disco reads memory that is not its own, or waits for ever."""
    place = own.empty((3,), "float32")
    for use in (
        own._sync_worker,
        place.debug_get_from_remote,
        lambda worker: place.debug_copy_from(worker, np.ones(3, "float32")),
    ):
        with pytest.raises((TypeError, ValueError), match="worker_id is the rank of a worker, 0"):
            use(worker)
    assert_works(own)


def test_ranks_that_disagree_come_home(own: Any) -> None:
    short, long = own.empty((4,), "float32"), own.empty((5,), "float32")
    own.allreduce(short, long)
    with pytest.raises(WorkerError, match="allreduce"):
        short.debug_get_from_remote(1)
    assert_works(own)


def test_copies_of_what_is_not_there_come_home(own: Any) -> None:
    missing = own.get_global_func("tests.no_such_function")(1)
    own.copy_to_worker_0(tvm.runtime.tensor(np.ones(3)), missing)
    own.copy_from_worker_0(tvm.runtime.tensor(np.ones(3)), missing)
    with pytest.raises(WorkerError):
        own._sync_all()
    own.copy_from_worker_0(tvm.runtime.tensor(np.ones(4)), own.empty((5,), "float64"))
    with pytest.raises(WorkerError, match="the controller's array has 4 x float64"):
        own.sync_worker_0()
    assert_works(own)


@pytest.mark.parametrize("kind", ["disco_threads", "disco_processes"])
def test_after_shutdown_nothing_waits_for_ever(kind: str) -> None:
    opened = open_session(kind, 2)
    session = opened.session
    place = session.empty((3,), "float32")
    session.shutdown()
    session.shutdown()
    for use in (
        session._sync_all,
        lambda: place.debug_get_from_remote(1),
        lambda: session.empty((3,), "float32"),
        lambda: session.init_ccl("shm"),
    ):
        with pytest.raises(SessionClosedError, match="the session was shut down"):
            use()


# ---- init_ccl -------------------------------------------------------------------------------

BEGIN = """
import sys
for kind in ("ThreadedSession", "ProcessSession"):
    session = start(kind)
    x = session.broadcast(np.ones(3))
    session.allreduce(x, x)
    print(x.debug_get_from_remote(1).numpy().tolist())
    session.shutdown()
print("tvm.relax" in sys.modules)
"""


@pytest.mark.slow
@pytest.mark.parametrize("runtime_only", ["0", "1"])
def test_programs_may_begin_as_programs_of_tvm_do(runtime_only: str) -> None:
    out = run(BEGIN, TVM_USE_RUNTIME_LIB=runtime_only).splitlines()
    assert out == ["[2.0, 2.0, 2.0]"] * 2 + [str(runtime_only == "0")]


@pytest.mark.parametrize("name", ["rccl", "gloo", ""])
def test_other_backends_are_refused_with_words(name: str) -> None:
    session = disco.ThreadedSession(2)
    for start in (lambda: session.init_ccl(name, 0, 1), lambda: tvm_ipc.init_ccl(session, name)):
        with pytest.raises(ValueError, match=f"init_ccl: ccl is .*, not {name!r}"):
            start()
    session.init_ccl("shm")
    session.shutdown()


def test_backends_of_others_are_started() -> None:
    import tvm_ffi

    seen = []

    @tvm_ffi.register_global_func("runtime.disco.tests_backend.init_ccl", override=True)
    def start(session: Any, device_ids: Any) -> None:
        seen.append(list(device_ids))

    session = disco.ThreadedSession(2)
    session.init_ccl("tests_backend", 3, 4)
    assert seen == [[3, 4]]
    session.shutdown()


def test_a_worker_that_cannot_start_is_told() -> None:
    with pytest.raises(Exception, match="ended with exit code"):
        session = disco.ProcessSession(2, entrypoint="tvm_ipc.no_such_module")
        tvm_ipc.init_ccl(session)


@pytest.mark.slow
def test_descriptors_do_not_pile_up() -> None:
    def used() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    counts = []
    for _ in range(3):
        open_session("disco_processes", 3).end()
        counts.append(used())
    assert counts[2] <= counts[0]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("end", ["pass", "session.shutdown()"])
def test_session_that_outlives_the_modules(end: str, workers: int) -> None:
    """As with a function of the program that is in `sys.excepthook`."""
    code = f"""
import sys
sys.kept = start
session = start(workers={workers})
x = session.broadcast(np.ones(4))
print(*worker_pids())
{end}
"""
    pids = run(code).split()
    assert len(pids) == workers - 1
    assert not [pid for pid in pids if Path("/proc", pid).exists()]
