# SPDX-License-Identifier: Apache-2.0
"""What test_sessions_on_gpus.py does with sessions on GPUs, each scenario in a process of its own.

python sessions_on_gpus.py SCENARIO WORKERS processes|threads
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tvm.runtime import disco

import tvm_ipc
from tests.runtime.places import BACKEND
from tests.runtime.tensors_of_ranks import assert_each, put_each
from tvm_ipc.errors import DeadlineError, WorkerDiedError, WorkerError
from tvm_ipc.gpu import discovery

GPUS = len(discovery.find().devices)


def open_session(workers: int, threads: bool, **options: Any) -> tvm_ipc.Session:
    ids = [rank % GPUS for rank in range(workers)]
    settings: dict[str, Any] = {"device_ids": ids, "threads": threads, "timeout": 60, **options}
    session = tvm_ipc.Session(workers, device="cuda", **settings)
    for name in ("collective_worker", "worker_functions"):
        session.import_python_module(f"tests.runtime.{name}")
    return session


def adds(session: Any, workers: int) -> None:
    """An all-reduce of what each worker has, which all of them must have right."""
    rows = np.arange(workers * 700, dtype="float32").reshape(workers, 700)
    given, total = session.scatter(rows), session.empty((700,), "float32")
    session.allreduce(given, total)
    for rank in range(workers):
        np.testing.assert_array_equal(
            total.debug_get_from_remote(rank).numpy(), rows.sum(axis=0, dtype="float32")
        )


def collectives(workers: int, threads: bool) -> None:
    """Every collective, with the bits of NumPy, in place and not, of many sizes and types."""
    with open_session(workers, threads) as session:
        run = session.get_global_func("tests.run_collectives")
        for plan, *arguments in (
            ("small_ones",),
            ("storm", 7, 60),
            ("again_and_again", "bfloat16"),
        ):
            run(1, True, plan, *arguments)
            session.sync()


def values(workers: int, threads: bool) -> None:
    """Values go to all workers and to one, come back, and stay what they are."""
    with open_session(workers, threads) as session:
        for array in (np.arange(6.0).reshape(2, 3), np.int8([3]), np.zeros((0, 4), "float32")):
            everywhere = session.put(array)
            assert_each(everywhere, [array] * workers)
        place = put_each(session, [np.full(3, rank, "int32") for rank in range(workers)])
        assert_each(place, [[rank] * 3 for rank in range(workers)])
        device = session.get_global_func("tvm_ipc.worker.device")()
        found = [str(device.debug_get_from_remote(rank)) for rank in range(workers)]
        assert found == [f"cuda:{rank % GPUS}" for rank in range(workers)]
        assert session.device == "cuda"
        on_cpu = session.empty((3,), "int32", device="cpu")
        session.allreduce(on_cpu, place)
        with pytest.raises(WorkerError, match="on the CPU") as error:
            session.sync()
        assert len(error.value.errors) == workers
        adds(session, workers)


def waits(workers: int, threads: bool) -> None:
    """Calls that wait for all of a process's work on GPUs come anywhere between operations."""
    with open_session(workers, threads) as session:
        session.import_python_module("tests.runtime.gpu_operations")
        for seed in range(4):
            session.get_global_func("tests.wait_between")(seed, 6)
            session.sync()
        session.get_global_func("tests.capture")()
        with pytest.raises(WorkerError, match="allreduce: a CUDA graph is being captured, and wo"):
            session.sync()
        adds(session, workers)


def errors(workers: int, threads: bool) -> None:
    """What goes wrong in one worker ends the kernels in which others wait; then it goes on."""
    with open_session(workers, threads) as session:
        x = session.empty((4,), "float32")
        gathered = session.empty((4 * workers,), "float32")
        for _ in range(2):
            call = session.get_global_func("tests.call_unless")
            call(1, "tvm_ipc.allreduce", x, 0, 0, 3, 0, x)  # and rank 1 does nothing at all
            session.get_global_func("tests.fail_on")(1, "ValueError", "it broke")
            with pytest.raises(WorkerError, match="it broke") as error:
                session.sync()
            assert [one.rank for one in error.value.errors] == [1]
            adds(session, workers)
            # Those that read what a kernel left undone do not take it for their own error.
            call(1, "tests.read_a_sum", workers)
            session.get_global_func("tests.fail_on")(1, "ValueError", "it broke")
            with pytest.raises(WorkerError, match="it broke") as error:
                session.sync()
            assert [one.rank for one in error.value.errors] == [1]
            adds(session, workers)
            call = session.get_global_func("tests.call_elsewhere")
            send = (x, 0, 0, 3, 0, x)
            call(0, "tvm_ipc.allreduce", "tvm_ipc.allgather", 6, *send, x, 0, 0, gathered)
            with pytest.raises(WorkerError, match="the ranks disagree: rank 0 called allreduce"):
                session.sync()
            adds(session, workers)


def deadline(workers: int, threads: bool) -> None:
    """A worker that does not come is named when the time is over, and the session goes on."""
    with open_session(workers, threads, timeout=1.5) as session:
        x = session.empty((4,), "float32")
        session.get_global_func("tests.call_unless")(1, "tvm_ipc.allreduce", x, 0, 0, 3, 0, x)
        with pytest.raises(DeadlineError, match=r"waited 1\.5 s for rank 1"):
            session.sync()
        adds(session, workers)
        session.get_global_func("tests.call_unless")(1, "tests.read_a_sum", workers)
        with pytest.raises(DeadlineError, match=r"waited 1\.5 s for rank 1") as error:
            session.sync()
        # Threads wait on the host before; nothing was launched there.
        assert threads or "and raised AssertionError" in str(error.value)
        adds(session, workers)


def death(workers: int, threads: bool) -> None:
    """A worker that is killed while others wait for it in a kernel is an error in time."""
    session = open_session(workers, threads)
    session.import_python_module("tests.runtime.fault_scenarios")
    session.sync()
    threading.Timer(0.3, os.kill, (session.pids[1], signal.SIGKILL)).start()
    session.get_global_func("tests.reduce_for_ever")(1000)
    with pytest.raises(WorkerDiedError) as error:
        session.sync()
    assert error.value.ranks == (1,)
    session.close()
    with open_session(workers, threads) as another:
        adds(another, workers)


def beside(workers: int, threads: bool) -> None:
    """Sessions start and end while one works; what they ask of the driver waits for all of it."""
    session = open_session(workers, threads, timeout=20)
    ones, total = session.put(np.ones(700, "float32")), session.empty((700,), "float32")
    session.sync()
    enough = threading.Event()

    def work() -> None:
        while not enough.is_set():
            for _ in range(20):
                session.allreduce(ones, total)
            session.sync()

    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        others = [GPUS - 1 - rank for rank in range(workers)]
        for _ in range(4):
            open_session(workers, threads, device_ids=others).close()
        enough.set()
        working.result()
    adds(session, workers)
    session.close()


def of_disco(workers: int, threads: bool) -> None:
    """A session that the user made gets the backend by its name, as programs for TVM do."""
    session = (disco.ThreadedSession if threads else disco.ProcessSession)(workers)
    session.init_ccl("cuda", *[rank % GPUS for rank in range(workers)])
    adds(session, workers)
    x = session.empty((9,), "float32")
    custom = session.get_global_func("runtime.disco.cuda_ipc.custom_allreduce")
    session.broadcast(np.ones(9, "float32"), x)
    custom(x, 1, x)
    session.sync_worker_0()
    np.testing.assert_array_equal(x.debug_get_from_remote(workers - 1).numpy(), [workers] * 9)


def request_scenario(
    run: Callable[[tvm_ipc.Session], None], timeout: float = 60
) -> Callable[[int, bool], None]:
    """Return a scenario of requests, with the backend that the environment names."""

    def scenario(workers: int, threads: bool) -> None:
        options = {"timeout": timeout, "backend": BACKEND}
        with open_session(workers, threads, **options) as session:
            session.import_python_module("tests.runtime.gpu_operations")
            run(session)

    return scenario


def request_beside_program(session: tvm_ipc.Session) -> None:
    with tempfile.TemporaryDirectory() as folder:
        session.get_global_func("tests.works.beside")(folder)
        session.sync()


def requests_in_order(session: tvm_ipc.Session) -> None:
    for seed in range(3):
        session.get_global_func("tests.works.in_order")(seed, 3)
        session.sync()


def requests_keep_inputs(session: tvm_ipc.Session) -> None:
    session.get_global_func("tests.works.kept")(6)
    session.sync()


def requests_in_graphs(session: tvm_ipc.Session) -> None:
    for waits in (False, True):
        session.get_global_func("tests.works.captured")(waits)
        refused = (
            f"{'wait' if waits else 'start'}: a CUDA graph is being captured, and requests are "
        )
        with pytest.raises(WorkerError, match=refused):
            session.sync()
    requests_in_order(session)


def request_deadline(session: tvm_ipc.Session) -> None:
    """One that a rank does not post ends at its deadline, and the session goes on."""
    x, y = session.put(np.arange(9.0)), session.empty((9,), "float64")
    post = session.get_global_func("tests.call_unless")
    post(1, "tvm_ipc.start", "tvm_ipc.allreduce", x, 0, 0, 3, 0, y)
    with pytest.raises((WorkerError, DeadlineError), match=r"waited 3 s for rank 1"):
        session.sync()
    requests_in_order(session)


def streams_beside(session: tvm_ipc.Session) -> None:
    """Two streams of a rank run side by side."""
    with tempfile.TemporaryDirectory() as folder:
        session.get_global_func("tests.streams.beside")(folder)
        session.sync()


def streams_in_order(session: tvm_ipc.Session) -> None:
    for seed in range(3):
        session.get_global_func("tests.streams.in_order")(seed, 3)
        session.sync()


def streams_refused(session: tvm_ipc.Session) -> None:
    """After an error, programs begin on stream 0 again."""
    left = session.get_global_func("tests.streams.left")
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: left(False), "a function returned on another stream than the one on which it be"),
        (lambda: left(True), "it broke on stream 2"),
        (
            lambda: session.get_global_func("tvm_ipc.set_stream")(64),
            "set_stream: stream is 64; expected 0 to 63",
        ),
        (
            lambda: session.get_global_func("tvm_ipc.wait_stream")(-1),
            "wait_stream: stream is -1; expected 0 to 63",
        ),
    ]
    for name in ("set_stream", "wait_stream"):
        captured = session.get_global_func("tests.streams.captured")
        refused = f"{name}: a CUDA graph is being captured; keep set_stream and wait_stream out of"
        calls.append((lambda captured=captured, name=name: captured(name), refused))
    for call, message in calls:
        call()
        with pytest.raises(WorkerError, match=message):
            session.sync()
        adds(session, 2)
    streams_in_order(session)


SCENARIOS: dict[str, Callable[[int, bool], None]] = {
    scenario.__name__: scenario
    for scenario in (collectives, values, waits, errors, deadline, death, beside, of_disco)
} | {
    run.__name__: request_scenario(run, 3 if run is request_deadline else 60)
    for run in (
        *(request_beside_program, requests_in_order, requests_keep_inputs),
        *(requests_in_graphs, request_deadline),
        *(streams_beside, streams_in_order, streams_refused),
    )
}

if __name__ == "__main__":
    name, count, kind = sys.argv[1:]
    SCENARIOS[name](int(count), kind == "threads")
    print("done")
