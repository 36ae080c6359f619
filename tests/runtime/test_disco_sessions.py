# SPDX-License-Identifier: Apache-2.0
"""What Disco's sessions promise without a collective: values, functions, VM modules, callbacks.

The cases of TVM's own tests/python/disco/test_session.py and test_callback.py, for sessions of
the user's and of ours, and over sockets between two nodes that are both this machine.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm.runtime import disco
from tvm_ffi import Shape
from tvm_ffi.core import String

import tvm_ipc
from tests.runtime.disco_kinds import (
    KINDS,
    Opened,
    helpers_importable,
    on_workers,
    open_session,
)
from tests.runtime.disco_programs import Slices, Transposes
from tests.runtime.tensors_of_ranks import put_each

WORKERS = 4
NODE = """
import sys, time
import tvm
serve = tvm.get_global_func("runtime.disco.RemoteSocketSession")
for attempt in range(200):
    try:
        serve("localhost", {port}, {workers})
        break
    except Exception as error:
        if "onnect" not in str(error):
            raise
        time.sleep(0.1)  # the controller does not listen yet
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def socket_session() -> Iterator[Any]:
    """Two workers here, two of another node, which is this machine too."""
    port = free_port()
    code = NODE.format(port=port, workers=WORKERS // 2)
    with helpers_importable(), subprocess.Popen([sys.executable, "-c", code]) as node:
        try:
            opened = Opened(start_socket_session(port))
            yield opened.session
            opened.end()
            assert node.wait(20) == 0
        finally:
            node.kill()


def start_socket_session(port: int) -> Any:
    session = disco.SocketSession(2, WORKERS // 2, 1, "localhost", port)
    tvm_ipc.init_ccl(session)
    return session


@pytest.fixture(params=[*KINDS, "socket"])
def session(request: pytest.FixtureRequest, shared_session: Callable[..., Any]) -> Any:
    if request.param == "socket":
        return request.getfixturevalue("socket_session")
    return shared_session(request.param, WORKERS)


def call(session: Any, name: str, *args: Any) -> list[Any]:
    """What each worker returns."""
    return on_workers(session.get_global_func(f"tests.{name}")(*args), WORKERS)


def test_int(session: Any) -> None:
    assert call(session, "next_int", 1) == [2] * WORKERS
    assert call(session, "next_int", 2**62) == [2**62 + 1] * WORKERS


def test_float(session: Any) -> None:
    assert call(session, "half_more", 1.5) == [2.0] * WORKERS


def test_none(session: Any) -> None:
    assert call(session, "is_none", None) == [True] * WORKERS


def test_string(session: Any) -> None:
    expected = [f"worker on rank {rank}" for rank in range(WORKERS)]
    assert call(session, "with_rank", "worker") == expected
    assert call(session, "with_rank", String("worker")) == expected


def test_bytes(session: Any) -> None:
    values = call(session, "reversed_bytes", b"\x00\xff" * 7)
    assert [bytes(value) for value in values] == [b"\xff\x00" * 7] * WORKERS


def test_shape(session: Any) -> None:
    shapes = call(session, "with_two_more", Shape([1, 2, 3]))
    assert all(isinstance(shape, Shape) for shape in shapes)
    assert [list(shape) for shape in shapes] == [[1, 2, 3, 4, 5]] * WORKERS


def test_tensor_to_and_from_worker_0(session: Any) -> None:
    array = np.arange(6, dtype="float32").reshape(2, 3)
    sent = session.empty((2, 3), "float32")
    session.copy_to_worker_0(tvm.runtime.tensor(array), sent)
    result = session.get_global_func("tests.plus_one")(sent)
    received = tvm.runtime.empty((2, 3), "float32")
    session.copy_from_worker_0(received, result)
    session.sync_worker_0()
    np.testing.assert_array_equal(received.numpy(), array + 1)


def test_copy_to_worker_0_makes_the_tensor_there_only(session: Any) -> None:
    array = np.arange(6, dtype="float32").reshape(2, 3)
    made = session.copy_to_worker_0(tvm.runtime.tensor(array))
    np.testing.assert_array_equal(on_workers(made, 1)[0], array)
    assert call(session, "is_none", made) == [False] + [True] * (WORKERS - 1)


@pytest.mark.parametrize("kind", KINDS)  # between nodes Disco carries no tensors
def test_tensor_of_each_worker(kind: str, shared_session: Callable[..., Any]) -> None:
    session = shared_session(kind, WORKERS)
    place = put_each(session, [np.full(4, rank, "int32") for rank in range(WORKERS)])
    for rank, value in enumerate(on_workers(place, WORKERS)):
        np.testing.assert_array_equal(value, np.full(4, rank))


@pytest.mark.parametrize("kind", ["ipc_threads", "ipc_processes"])  # Disco: tensors only
def test_values_within_values(kind: str, shared_session: Callable[..., Any]) -> None:
    session = shared_session(kind, WORKERS)
    place = session.broadcast(np.ones(2))
    for value in on_workers(session.get_global_func("tests.mixture")(place), WORKERS):
        tensor, text, number, real, nothing, shape, (flag, raw) = value
        np.testing.assert_array_equal(tensor.numpy(), np.ones(2))
        assert (text, number, real, nothing) == ("text", 7, 1.5, None)
        assert (list(shape), bool(flag), bytes(raw)) == ([1, 2], True, b"raw")


# ---- programs of the Relax VM ---------------------------------------------------------------


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], str]:
    """Compile a module once and return the path of the library."""
    directory = tmp_path_factory.mktemp("programs")

    def compiled(module: Any, name: str) -> str:
        path: Path = directory / f"{name}.so"
        if not path.exists():
            tvm.compile(module, target="llvm").export_library(str(path))
        return str(path)

    return compiled


def gathered(session: Any, reference: Any, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """The tensors of all workers; Disco itself carries none from one node to another."""
    whole = (WORKERS, *shape)
    place = session.empty(whole, "float32", worker0_only=True)
    session.gather_to_worker0(reference, place)
    received = tvm.runtime.empty(whole, "float32")
    session.copy_from_worker_0(received, place)
    session.sync_worker_0()
    return np.array(received.numpy())


@pytest.mark.slow
def test_one_function_of_a_vm_module(session: Any, library: Callable[..., str]) -> None:
    array = np.arange(128, dtype="float32").reshape(8, 16)
    module = session.load_vm_module(library(Transposes, "transposes"), device=tvm.cpu())
    place = session.scatter(np.stack([array + rank for rank in range(WORKERS)]))
    results = gathered(session, module["from_wide"](place), (16, 8))
    np.testing.assert_array_equal(results, [array.T + rank for rank in range(WORKERS)])


def test_two_functions_of_a_vm_module(session: Any, library: Callable[..., str]) -> None:
    array = np.arange(128, dtype="float32").reshape(8, 16)
    module = session.load_vm_module(library(Transposes, "transposes"))
    place = session.broadcast(array)
    once = module["from_wide"](place)
    twice = module["from_tall"](once)
    np.testing.assert_array_equal(gathered(session, once, (16, 8)), [array.T] * WORKERS)
    np.testing.assert_array_equal(gathered(session, twice, (8, 16)), [array] * WORKERS)


@pytest.mark.parametrize("kind", KINDS)
def test_callback_from_a_vm_program(
    kind: str, shared_session: Callable[..., Any], library: Callable[..., str]
) -> None:
    session = shared_session(kind, 2)
    rank = session.get_global_func("runtime.disco.worker_rank")()
    fetch = session.get_global_func("tests.parameters_by_name")()
    load = session.load_vm_module(library(Slices, "slices"))["load"]
    parts = load(rank, fetch)
    whole_a = np.arange(16, dtype="int32").reshape(4, 4)
    whole_b = np.arange(4, dtype="float32").reshape(2, 2)
    for worker in range(2):
        a, b = parts.debug_get_from_remote(worker)
        np.testing.assert_array_equal(a.numpy(), whole_a[2 * worker : 2 * worker + 2])
        np.testing.assert_array_equal(b.numpy(), whole_b[:, worker : worker + 1])


# ---- making and ending them -----------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_number_of_workers(kind: str, num_workers: int, shared_session: Callable[..., Any]) -> None:
    session = shared_session(kind, num_workers)
    assert session.num_workers == num_workers
    sizes = on_workers(session.get_global_func("runtime.disco.world_size")(), num_workers)
    assert sizes == [num_workers] * num_workers


@pytest.mark.parametrize("place", ["threads", "processes"])
def test_where_workers_run(place: str, shared_session: Callable[..., Any]) -> None:
    for maker in ("disco", "ipc"):
        session = shared_session(f"{maker}_{place}", 4)
        pids = on_workers(session.get_global_func("tests.process_id")(), 4)
        assert len(set(pids)) == (1 if place == "threads" else 4)


def test_socket_nodes_are_two_processes_with_their_own_workers(socket_session: Any) -> None:
    pids = call(socket_session, "process_id")
    assert len(set(pids)) == 4
    assert call(socket_session, "with_rank", "x") == [f"x on rank {rank}" for rank in range(4)]


def test_worker_on_another_machine_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    """The invitation is one that a controller elsewhere would send."""
    session = disco.ThreadedSession(2)
    join = session.get_global_func("runtime.disco.shm.init_ccl_per_worker")
    join(Shape([0, 1]), b"tvm_ipc.name\n" + bytes(16) + b"\nboot-id another-host")
    session._sync_all()
    told = capfd.readouterr().err
    for rank in range(2):
        assert (
            f"rank {rank} could not join its session: rank {rank} runs on another machine" in told
        )
    assert "than the controller (boot-id another-host)" in told
    assert "connects workers of one machine only" in told
    assert "by tvm_ipc.Session(..., hosts=[...])" in told
    # The workers live on, and may join a session that is here.
    tvm_ipc.init_ccl(session)
    np.testing.assert_array_equal(on_workers(session.broadcast(np.ones(3)), 2), np.ones((2, 3)))


def test_invitation_that_is_none(capfd: pytest.CaptureFixture[str]) -> None:
    session = disco.ThreadedSession(1)
    session.get_global_func("runtime.disco.shm.init_ccl_per_worker")(Shape([0]), b"hello")
    session._sync_all()
    assert "not an invitation of this library: 5 bytes" in capfd.readouterr().err


@pytest.mark.parametrize("maker", ["threads", "processes"])
def test_initialising_twice_is_refused(maker: str, shared_session: Callable[..., Any]) -> None:
    session = shared_session(f"disco_{maker}", 2)
    with pytest.raises(RuntimeError, match="the session has been initialised already"):
        tvm_ipc.init_ccl(session)
    assert call_two(session) == [2, 2]


def test_unknown_backend_is_refused() -> None:
    session = disco.ThreadedSession(1)
    with pytest.raises(ValueError, match=r"ccl is one of 'auto', 'shm', .*, not 'gloo'"):
        tvm_ipc.init_ccl(session, "gloo")


def test_threads_open_sessions_at_the_same_time(run_python: Callable[..., str]) -> None:
    """The list of sessions changes while another thread looks for those that were destroyed."""
    code = """
import sys, threading
from tvm.runtime import disco
import tvm_ipc
tvm_ipc.runtime.ready()
sys.setswitchinterval(1e-6)
failed = []

def work():
    try:
        for _ in range(100):
            disco.ThreadedSession(1)
    except BaseException as error:
        failed.append(error)

threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(failed)
"""
    assert run_python(code).strip() == "[]"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_sessions_made_and_ended_in_a_row(kind: str) -> None:
    rounds = 10 if kind.endswith("threads") else 2
    for _ in range(rounds):
        opened = open_session(kind, 2)
        assert call_two(opened.session) == [2, 2]
        opened.end()


def call_two(session: Any) -> list[Any]:
    return on_workers(session.get_global_func("tests.next_int")(1), 2)
