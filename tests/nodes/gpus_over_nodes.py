# SPDX-License-Identifier: Apache-2.0
"""What test_gpus_over_nodes.py does with sessions on GPUs of two nodes, each scenario in a process.

The nodes are on this machine, its GPUs and NCCL are doubles. python gpus_over_nodes.py SCENARIO
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tvm_ipc
from tvm_ipc.errors import IPCError, WorkerDiedError, WorkerError

HERE = Path(__file__).resolve().parent
SECONDS = 60


def open_session(workers: int, **options: Any) -> tvm_ipc.Session:
    settings: dict[str, Any] = {"hosts": 2, "device": "cuda", "timeout": SECONDS, **options}
    session = tvm_ipc.Session(workers, **settings)
    session.import_python_module("tests.runtime.collective_worker")
    session.import_python_module("tests.nodes.node_functions")
    return session


def run(session: tvm_ipc.Session, plan: str, groups: int = 1, in_group: bool = False) -> None:
    session.get_global_func("tests.run_collectives")(
        groups, in_group, f"tests.nodes.cases_on_gpus.{plan}"
    )


def adds(session: Any) -> None:
    """An all-reduce over all nodes, which all workers must have right."""
    workers = session.num_workers
    rows = np.arange(workers * 700, dtype="float32").reshape(workers, 700)
    given, total = session.scatter(rows, in_group=False), session.empty((700,), "float32")
    session.allreduce(given, total, in_group=False)
    for rank in range(workers):
        np.testing.assert_array_equal(session.get(total, rank), rows.sum(axis=0))


def check_values(session: Any) -> None:
    rows = np.arange(4 * 100_000, dtype="float32").reshape(4, -1)
    parts, whole = session.scatter(rows, in_group=False), session.put(rows)
    for rank in range(4):
        np.testing.assert_array_equal(session.get(parts, rank), rows[rank])
        np.testing.assert_array_equal(session.get(whole, rank), rows)
    parts.debug_copy_from(3, rows[0])
    np.testing.assert_array_equal(session.get(parts, 3), rows[0])
    device = session.get_global_func("tvm_ipc.worker.device")()
    found = [str(device.debug_get_from_remote(rank)) for rank in range(4)]
    assert found == [f"cuda:{rank}" for rank in range(4)], found


def check_teams(session: Any) -> None:
    """Groups, which are nodes; along both axes of a mesh; and teams that the controller makes."""
    run(session, "few_on_gpus", 2, True)
    both = session.get_global_func("tests.collectives_in_two_teams")
    for posts in (False, True):
        both(posts, "tests.nodes.cases_on_gpus.few_on_gpus")
    session.sync()
    rows = np.arange(4 * 500, dtype="float32").reshape(4, 500)
    given = session.scatter(rows, in_group=False)
    team = session.team([3, 0, 2])
    gathered, total = session.empty((1500,), "float32"), session.empty((500,), "float32")
    session.allgather(given, gathered, team=team)
    session.allreduce(given, total, team=team)
    for rank in team.ranks:
        np.testing.assert_array_equal(session.get(gathered, rank), rows[[3, 0, 2]].reshape(-1))
        np.testing.assert_array_equal(session.get(total, rank), rows[[3, 0, 2]].sum(axis=0))


def check_errors(session: Any) -> None:
    """What goes wrong ends the waits of both nodes, on the host and on devices; then it goes on."""
    x = session.empty((4,), "float32")
    fail = session.get_global_func("tests.nodes.fail_on")
    for rank in (3, 0):
        fail(rank)
        session.allreduce(x, x, in_group=False)  # in which the others wait
        with pytest.raises(WorkerError, match=f"rank {rank} was told to") as raised:
            session.sync()
        assert [error.rank for error in raised.value.errors] == [rank]
        adds(session)
    session.get_global_func("tests.nodes.nccl_fails_on")(3)
    session.allreduce(x, x, in_group=False)  # in which the devices of the others wait then
    with pytest.raises(WorkerError, match=r"rank 3: .*ncclAllReduce was told to fail") as raised:
        session.sync()
    assert [error.rank for error in raised.value.errors] == [3]
    adds(session)
    differ = session.get_global_func("tests.nodes.reduce_or_gather")
    differ(2)  # ranks of one node call one, and those of the other one another
    said = (
        r"the nodes disagree: rank \d of node \S+ \(ranks \d to \d\) called \w+.*; rank \d of node"
    )
    with pytest.raises(WorkerError, match=said) as mismatch:
        session.sync()
    assert {error.kind for error in mismatch.value.errors} == {"MismatchError"}
    text = str(mismatch.value)
    assert "node 0 (ranks 0 to 1)" in text and "node 1 (ranks 2 to 3)" in text, text
    assert "called allreduce" in text and "called allgather" in text, text
    adds(session)
    send = session.get_global_func("tests.nodes.send_other")
    send(1, 2)  # what it receives is another one, which NCCL would write beyond a buffer
    with pytest.raises(WorkerError, match="rank 1 called send of 8 x float32 to rank 2, which"):
        session.sync()
    adds(session)
    run(session, "few_on_gpus")
    session.sync()


def four() -> None:
    """Two workers on each of two nodes, each of which is a group."""
    with open_session(4, num_groups=2) as session:
        assert session.backend == "nccl" and session.device == "cuda"
        said = "4 processes in 2 groups on cuda 0, 1, 2, 3 on 2 nodes of this machine"
        assert repr(session) == f"<tvm_ipc.Session: {said}, open>", repr(session)
        check_values(session)
        run(session, "all_on_gpus")
        session.sync()
        check_teams(session)
        check_errors(session)


def two() -> None:
    """One worker on each node, where all sums have one answer; weights; and a death."""
    session: Any = open_session(2)
    run(session, "all_on_gpus")
    session.sync()
    check_files(session)
    session.get_global_func("tests.nodes.reduce_for_ever")()
    threading.Timer(0.5, os.kill, (session.pids[1], signal.SIGKILL)).start()
    with pytest.raises(WorkerDiedError, match=r"worker 1 of node 1 \(") as died:
        session.sync()
    assert died.value.ranks == (1,)
    session.close()


def check_files(session: Any) -> None:
    """Worker 0 reads what the other node does not have, and sends each worker its part."""
    from tests.models.weights import weight_files
    from tvm_ipc.runtime.send_library_to_nodes import distribute_module

    arrays = {
        "w": np.arange(35000, dtype="float32").reshape(500, 70),
        "n": np.array(3, "int32"),
    }
    cuts = weight_files.cuts_of(arrays, 2)
    session.import_python_module("tvm_ipc.models.weights.worker")
    session.get_global_func("tests.nodes.has_no_files")(1)
    with tempfile.TemporaryDirectory() as folder:
        path = weight_files.write(Path(folder, "model.safetensors"), arrays)
        weights = tvm_ipc.load_weights(session, path, cuts)
        for name, cut in cuts.items():
            for rank in range(2):
                found = session.get(weights[name], rank)
                np.testing.assert_array_equal(found, cut.shard(arrays[name], rank), strict=True)
        library = Path(folder, "library.so")
        library.write_bytes(os.urandom(1 << 20))
        digest = distribute_module(session, library, (0, 1))
        has = session.get_global_func("tvm_ipc.worker.has_library")(str(library), digest)
        assert has.debug_get_from_remote(1), "it was not kept, or not as it was sent"


def refused() -> None:
    """What cannot be is said before anything starts, or by the worker whose node it is."""
    for backend, error, said in (
        ("cuda", ValueError, "backend 'cuda' cannot have hosts: .* workers on GPUs have 'nccl'"),
        ("mpi", ValueError, "backend 'mpi' is for workers on device 'cpu', and device is 'cuda'"),
    ):
        with pytest.raises(error, match=said):
            tvm_ipc.Session(2, hosts=2, device="cuda", backend=backend)
    with pytest.raises(IPCError, match="NCCL wants a device for each worker, and two would share"):
        tvm_ipc.Session(2, hosts=2, device="cuda", device_ids=[1, 1])
    with pytest.raises(ValueError, match="2 and 3, of one machine, would share cuda:7; give other"):
        tvm_ipc.Session(4, hosts=["localhost", "b"], device="cuda", device_ids=[0, 1, 7, 7])
    with pytest.raises(ValueError, match="but this machine has 4 GPUs"):
        tvm_ipc.Session(2, hosts=["localhost", "b"], device="cuda", device_ids=[5, 0])
    # As if the other node were another machine, whose GPUs nobody can look at from here.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tvm_ipc.nodes.session_hosts_argument.Hosts.machines", lambda *_: [0, 1])
        begun = time.monotonic()
        with pytest.raises(
            IPCError, match=r"worker 1 of node 1 \(.*\): there is no device cuda:9"
        ) as raised:
            open_session(2, device_ids=[0, 9])
        assert time.monotonic() < begun + SECONDS, raised.value


SCENARIOS: dict[str, Callable[[], None]] = {one.__name__: one for one in (four, two, refused)}

if __name__ == "__main__":
    SCENARIOS[sys.argv[1]]()
    print("done")
