# SPDX-License-Identifier: Apache-2.0
"""`tvm_ipc.Session(hosts=)`: two nodes on this machine that share nothing but the network."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tvm_ipc
from tests.nodes.node_processes import SECONDS
from tvm_ipc import packed_functions
from tvm_ipc.errors import IPCError, SessionClosedError, WorkerDiedError, WorkerError
from tvm_ipc.nodes.find_mpi_installation import Mpi
from tvm_ipc.nodes.session_server_in_node_agent import ranks_of_nodes

Started = Callable[[], dict[int, str]]


@pytest.fixture(scope="module")
def session(mpi: Mpi) -> Iterator[tvm_ipc.Session]:
    """Each node is a group."""
    with tvm_ipc.Session(4, num_groups=2, hosts=2, timeout=SECONDS) as opened:
        opened.import_python_module("tests.nodes.node_functions")
        yield opened


def until_error(session: tvm_ipc.Session) -> IPCError:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        try:
            session.sync()
        except IPCError as error:
            return error
        time.sleep(0.01)
    pytest.fail("nobody hears of it")


def agent_of(session: Any, node: int) -> int:
    return int(session._dispatcher.pool.nodes[node].facts["process"])


def launcher_of(session: Any) -> int:
    return int(session._dispatcher.pool._launcher.process.pid)


def test_what_a_session_does(session: tvm_ipc.Session) -> None:
    assert repr(session) == (
        "<tvm_ipc.Session: 4 processes in 2 groups on 2 nodes of this machine, open>"
    )
    assert session.pids[0] == os.getpid() and len(set(session.pids)) == 4
    made = session.get_global_func("tests.nodes.rank_as_tensor")(300000)
    for rank in range(4):
        value = session.get(made, rank)
        assert value.shape == (300000,) and (value == rank).all()
    number = session.get_global_func("tvm_ipc.worker.rank")()
    assert [number.debug_get_from_remote(rank) for rank in range(4)] == [0, 1, 2, 3]
    add = session.get_global_func("tests.nodes.fail_on")
    nothing = add(-1)
    assert [nothing.debug_get_from_remote(rank) for rank in range(4)] == [None] * 4
    # Far more commands than the connections hold.
    for _ in range(5000):
        add(-1)
    session.sync()
    with pytest.raises(WorkerError, match="no global function xxx"):  # longer than they hold
        session.get_global_func("tvm_ipc.worker.get_global_func")("x" * (1 << 20))
        session.sync()


def check_groups(session: tvm_ipc.Session) -> None:
    x = session.get_global_func("tests.nodes.rank_as_tensor")(8)
    total = session.empty((8,), "float32")
    session.allreduce(x, total)
    assert [session.get(total, rank)[7] for rank in range(4)] == [1, 1, 5, 5]


def test_values_go_to_all_nodes_and_come_from_them(session: tvm_ipc.Session) -> None:
    assert session.backend == packed_functions.backend_of_nodes()
    rows = np.arange(4 * 300000, dtype="float32").reshape(4, -1)
    parts, whole = session.scatter(rows, in_group=False), session.put(rows[1])
    total = session.empty(rows.shape[1:], "float32")
    session.allreduce(parts, total, in_group=False)
    for rank in range(4):
        assert (session.get(parts, rank) == rows[rank]).all()
        assert (session.get(whole, rank) == rows[1]).all()
        assert (session.get(total, rank) == rows.sum(0)).all()
    whole.debug_copy_from(3, rows[2])
    assert (session.get(whole, 3) == rows[2]).all() and (session.get(whole, 2) == rows[1]).all()


@pytest.mark.parametrize("rank", [0, 1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "int64"])
def test_large_tensors_come_by_themselves(
    session: tvm_ipc.Session, monkeypatch: pytest.MonkeyPatch, dtype: str, rank: int
) -> None:
    monkeypatch.setattr("tvm_ipc.runtime.value_transfer.FETCHED_SEPARATELY", 1000)
    random = np.random.default_rng(rank)
    for shape in ((0, 7), (1000,), (1001,), (3, 5, 67), (251,), (125, 8)):
        array = random.integers(0, 99, shape).astype(dtype)
        reference = session.empty(shape, dtype)
        reference.debug_copy_from(rank, array)
        for got in (
            session.get(reference, rank),
            reference.debug_get_from_remote(rank).numpy(),
        ):
            assert got.dtype == array.dtype and got.shape == shape
            assert got.tobytes() == array.tobytes()


def grown(what: Callable[[], Any]) -> tuple[int, Any]:
    """How many MB more this process had meanwhile, and what came of it."""

    def peak() -> int:
        (found,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        return int(found) >> 10

    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    result = what()
    return peak() - before, result


def test_large_values_take_no_memory_but_their_own(session: tvm_ipc.Session) -> None:
    array = np.zeros((4, 24 << 20), "uint8")
    array[3] = 7
    more, there = grown(lambda: session.put(array))
    assert more < 96 + 32
    more, found = grown(lambda: session.get(there, 3))
    assert more < 96 + 32 and (found == array).all()
    more, there = grown(lambda: session.scatter(array, in_group=False))
    assert more < 24 + 32 and (session.get(there, 3) == 7).all()


def test_what_comes_is_of_one_moment(
    session: tvm_ipc.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread changes a tensor that is on its way."""
    monkeypatch.setattr("tvm_ipc.runtime.value_transfer.FETCHED_SEPARATELY", 1000)
    made = session.put(np.zeros(50000, "float32"))
    fill = session.get_global_func("tests.nodes.add_one")
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            fill(made)

    other = threading.Thread(target=change)
    other.start()
    try:
        for _ in range(10):
            value = session.get(made, 3)
            assert (value == value[0]).all()
    finally:
        stop.set()
        other.join()
        session.sync()


def test_an_error_on_another_node_and_what_comes_after(session: tvm_ipc.Session) -> None:
    check_groups(session)
    fail = session.get_global_func("tests.nodes.fail_on")
    for rank in (3, 0):
        fail(rank)
        with pytest.raises(WorkerError, match=f"rank {rank} was told to") as raised:
            session.sync()
        assert [error.rank for error in raised.value.errors] == [rank]
        assert "node_functions.py" in raised.value.errors[0].traceback
        check_groups(session)
    x = session.empty((1 << 20,), "float32")
    fail(2)
    session.allreduce(x, x, in_group=False)  # which the others wait in
    with pytest.raises(WorkerError, match="rank 2 was told to"):
        session.sync()
    x.debug_copy_from(0, np.ones(1 << 20, "float32"))
    session.broadcast_from_worker0(x, x, in_group=False)
    assert (session.get(x, 3) == 1).all()


@pytest.mark.parametrize("who", ["worker", "agent", "launcher"])
def test_a_death_ends_waits_and_names_the_node(who: str, mpi: Mpi, started: Started) -> None:
    session: Any = tvm_ipc.Session(4, num_groups=2, hosts=2, timeout=SECONDS)
    try:
        session.import_python_module("tests.nodes.node_functions")
        session.sync()
        # Worker 0, a thread of ours, waits in a collective for worker 1.
        x = session.empty((8,), "float32")
        session.get_global_func("tests.nodes.stay_on")(1)
        session.allreduce(x, x)
        process, said, ranks = {
            "worker": (session.pids[3], r"worker 3 of node 1 \(.*\) died of SIGKILL;", (3,)),
            "agent": (agent_of(session, 0), r"the agent of node 0 \(.*workers \[0, 1\];", (0, 1)),
            "launcher": (launcher_of(session), "ended with SIGKILL", ()),
        }[who]
        threading.Timer(0.3, os.kill, (process, signal.SIGKILL)).start()
        error = until_error(session)
        assert isinstance(error, WorkerDiedError) and error.ranks == ranks
        assert re.search(said, str(error)), error
        with pytest.raises(SessionClosedError, match="not usable any more"):
            session.sync()
    finally:
        session.close()


PROGRAM = """
import gc, os, sys
import tvm_ipc
session = tvm_ipc.Session(2, hosts=2, timeout=60)
session.import_python_module("tests.nodes.node_functions")
session.sync()
print("started", flush=True)
if sys.argv[1] == "interrupt":
    session.get_global_func("tests.nodes.stay_on")(1)
    session.sync()
elif sys.argv[1] == "forget":
    if os.fork() == 0:
        sys.stdin.read()  # holds what it inherited
        os._exit(0)
    del session
    gc.collect()
    print("forgotten", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["exit", "forget", "interrupt"])
def test_the_end_of_a_program_is_the_end_of_all(how: str, mpi: Mpi, started: Started) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "started\n", program.communicate()
        if how == "interrupt":
            time.sleep(0.3)
            program.send_signal(signal.SIGINT)
        end = time.monotonic() + SECONDS
        while how == "forget" and len(started()) > 2:  # the program, and what it forked
            assert time.monotonic() < end
            time.sleep(0.05)
        said, errors = program.communicate(timeout=SECONDS)
    assert program.returncode == (-signal.SIGINT if how == "interrupt" else 0), errors
    assert said == ("forgotten\n" if how == "forget" else "")
    assert ("KeyboardInterrupt" in errors) == (how == "interrupt"), errors
    assert "terminate" not in errors and "Fatal" not in errors


@pytest.mark.parametrize(
    ("workers", "nodes", "ranks"),
    [
        (2, 2, [[], [1]]),
        (4, 2, [[1], [2, 3]]),
        (5, 3, [[1], [2, 3], [4]]),
        (64, 2, [list(range(1, 32)), list(range(32, 64))]),
    ],
)
def test_ranks_of_nodes_are_neighbours(workers: int, nodes: int, ranks: list[list[int]]) -> None:
    assert ranks_of_nodes(workers, nodes) == ranks
