# SPDX-License-Identifier: Apache-2.0
"""The session as its users see it: values, modules, options, and several at once."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm_ffi import Shape

import tvm_ipc
from tests.runtime.disco_kinds import RANKS, call, errors_at_sync, on_workers
from tests.runtime.disco_programs import Transposes, build
from tests.runtime.places import ON_GPUS
from tvm_ipc.errors import SessionClosedError
from tvm_ipc.packed_functions import backends_of
from tvm_ipc.runtime.oversized_calls_and_tensors import SENT_IN_COMMAND
from tvm_ipc.runtime.references import DModule

PLACES = pytest.mark.parametrize("threads", [True, False], ids=["threads", "processes"])

# ---- values ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype",
    [
        *("float16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool"),
        *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
    ],
    ids=lambda dtype: np.dtype(dtype).name,
)
def test_put_and_get(dtype: Any, trio: tvm_ipc.Session) -> None:
    array = np.arange(-6, 6).reshape(3, 4).astype(dtype)
    reference = trio.put(array)
    for rank in range(RANKS):
        value = trio.get(reference, rank)
        assert isinstance(value, np.ndarray)
        np.testing.assert_array_equal(value, array, strict=True)


@pytest.mark.parametrize("bytes_more", [-1, 0, 1])
@pytest.mark.parametrize("dtype", ["uint8", "float16", "int64"])
def test_put_of_sizes_around_that_of_a_command(
    dtype: str, bytes_more: int, trio: tvm_ipc.Session
) -> None:
    array = np.arange(SENT_IN_COMMAND // np.dtype(dtype).itemsize + bytes_more).astype(dtype)
    reference = trio.put(array)
    for rank in range(RANKS):
        np.testing.assert_array_equal(trio.get(reference, rank), array, strict=True)


def test_put_of_the_other_byte_order(trio: tvm_ipc.Session) -> None:
    array = np.arange(6, dtype=">i8").reshape(2, 3).T
    np.testing.assert_array_equal(trio.get(trio.put(array)), array.astype("i8"), strict=True)


def test_masked_elements_are_refused(trio: tvm_ipc.Session) -> None:
    """What is under a mask is no number of the array."""
    with pytest.raises(ValueError, match="put: array has masked elements"):
        trio.put(np.ma.array([1.0, 2.0], mask=[False, True]))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_references_are_not_copied(duplicate: Any, trio: tvm_ipc.Session) -> None:
    """A copy would name a register that is freed with the original, and of no session."""
    for reference in (trio.put([1.0]), trio.get_global_func("runtime.disco.worker_rank")):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            duplicate(reference)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24.0).reshape(4, 6).T,
        np.arange(24.0).reshape(4, 6)[::2, ::3],
        np.array(3.5),
        np.zeros((0, 4)),
        np.broadcast_to(np.arange(3.0), (2, 3)),
        np.arange(5.0)[::-1],
        np.ma.array([1.0, 2.0]),
    ],
    ids=["transposed", "sliced", "no_axes", "empty", "broadcast", "reversed", "unmasked"],
)
def test_put_of_arrays_in_any_form(array: Any, trio: tvm_ipc.Session) -> None:
    reference = trio.put(array)
    for rank in range(RANKS):
        np.testing.assert_array_equal(trio.get(reference, rank), array, strict=True)


def test_put_of_a_tensor(trio: tvm_ipc.Session) -> None:
    array = np.arange(6, dtype="float32")
    np.testing.assert_array_equal(trio.get(trio.put(tvm.runtime.tensor(array)), 1), array)


def test_put_keeps_what_the_array_was(trio: tvm_ipc.Session) -> None:
    array = np.zeros(1000)
    call(trio, "tests.sleep_on", 0, 0.05)
    reference = trio.put(array)
    array[:] = 1
    np.testing.assert_array_equal(trio.get(reference, 2), np.zeros(1000))


def test_get_gives_a_copy(trio: tvm_ipc.Session) -> None:
    reference = trio.put(np.zeros(3))
    for rank in range(RANKS):
        trio.get(reference, rank)[:] = 1
        np.testing.assert_array_equal(trio.get(reference, rank), np.zeros(3))


def test_get_of_a_rank_that_is_not_there(trio: tvm_ipc.Session) -> None:
    reference = trio.put(np.zeros(3))
    for rank in (-1, RANKS):
        with pytest.raises(ValueError, match=f"rank is the rank of a worker, 0 to 2, not {rank}"):
            trio.get(reference, rank)
        with pytest.raises(ValueError, match="worker_id is the rank of a worker"):
            reference.debug_copy_from(rank, np.zeros(3))


@pytest.mark.parametrize(
    "array",
    [np.arange(6.0).reshape(2, 3), np.arange(6.0)[::2], np.array(3.5), tvm.runtime.tensor([1.0])],
    ids=["array", "strided", "no_axes", "tensor"],
)
def test_array_as_an_argument_is_put(array: Any, trio: tvm_ipc.Session) -> None:
    result = call(trio, "tests.plus_one", array)
    for rank in range(RANKS):
        expected = (array if isinstance(array, np.ndarray) else array.numpy()) + 1
        np.testing.assert_array_equal(trio.get(result, rank), expected, strict=True)


def test_numbers_as_arguments(trio: tvm_ipc.Session) -> None:
    for number, kind in [(np.int32(3), int), (np.float32(0.5), float), (np.True_, bool)]:
        value = call(trio, "tests.echo", number).debug_get_from_remote(1)
        assert value == number
        assert type(value) is kind
    assert str(call(trio, "tests.echo", np.float16).debug_get_from_remote(0)) == "float16"


def test_lists_are_put_and_scattered(trio: tvm_ipc.Session) -> None:
    assert trio.get(trio.put([[1, 2], [3, 4]]), 2).tolist() == [[1, 2], [3, 4]]
    assert trio.get(trio.put(7), 1).tolist() == 7
    assert trio.get(trio.broadcast((1.5, 2)), 1).tolist() == [1.5, 2]
    parts = trio.scatter([[1, 2], [3, 4], [5, 6]])
    assert [trio.get(parts, rank).tolist() for rank in range(3)] == [[1, 2], [3, 4], [5, 6]]


def test_reference_is_no_array(trio: tvm_ipc.Session) -> None:
    """NumPy would make an array of one object of it."""
    x = trio.put(np.ones(2))
    for use in (np.asarray, np.array, np.sum, lambda r: np.ones(2) + r, lambda r: np.array([r])):
        with pytest.raises(TypeError, match=r"session\.get\(reference, rank\)"):
            use(x)
    with pytest.raises(AttributeError, match=r"'numpy'.*session\.get\(reference, rank\)"):
        x.numpy()
    with pytest.raises(AttributeError, match=r"'main'.*module\[name\] is one of its functions"):
        DModule.of(x).main  # noqa: B018


def test_texts_say_what_things_are() -> None:
    with tvm_ipc.Session(4, num_groups=2, threads=True) as session:
        x = session.put([1])
        function = session.get_global_func("runtime.disco.worker_rank")
        assert repr(session) == "<tvm_ipc.Session: 4 threads in 2 groups, open>"
        assert repr(function()) == f"<DRef: a value on the workers of {session!r}>"
        assert repr(function) == f"<DPackedFunc: a function on the workers of {session!r}>"
    assert repr(session) == "<tvm_ipc.Session: 4 threads in 2 groups, closed>"
    with pytest.raises(SessionClosedError), session:
        pass
    assert repr(x).endswith("closed>>")
    assert repr(tvm_ipc.Session.__new__(tvm_ipc.Session)) == "<tvm_ipc.Session: no workers, closed>"


def test_get_of_what_is_no_tensor(trio: tvm_ipc.Session) -> None:
    with pytest.raises(TypeError, match="rank 1 holds a int, not a tensor; debug_get_from_remote"):
        trio.get(call(trio, "tests.next_int", 1), 1)


def test_large_values(trio: tvm_ipc.Session) -> None:
    array = np.random.default_rng(0).random(3_000_000)
    reference = trio.put(array)
    np.testing.assert_array_equal(trio.get(reference, 2), array)
    shares = trio.scatter(array.reshape(RANKS, -1))
    for rank in range(RANKS):
        np.testing.assert_array_equal(trio.get(shares, rank), array.reshape(RANKS, -1)[rank])


def test_large_arguments(trio: tvm_ipc.Session) -> None:
    data = np.random.default_rng(0).bytes(5_000_000)
    for value in on_workers(call(trio, "tests.reversed_bytes", data), RANKS):
        assert bytes(value) == data[::-1]
    text = "x" * 1_000_000
    assert on_workers(call(trio, "tests.with_rank", text), RANKS)[2] == f"{text} on rank 2"


@pytest.mark.parametrize("rank", range(RANKS))
def test_copy_to_one_rank(rank: int, trio: tvm_ipc.Session) -> None:
    place = trio.put(np.zeros(4, "float32"))
    place.debug_copy_from(rank, np.ones(4, "float32"))
    place.debug_copy_from(rank, tvm.runtime.tensor(np.full(4, 2, "float32")))
    for other in range(RANKS):
        np.testing.assert_array_equal(trio.get(place, other), np.full(4, 2.0 * (other == rank)))


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("array", [np.zeros(5, "float32"), np.zeros(4, "int32")], ids=str)
def test_copy_of_what_does_not_fit(array: Any, rank: int, trio: tvm_ipc.Session) -> None:
    place = trio.put(np.zeros(4, "float32"))
    place.debug_copy_from(rank, array)
    ((where, kind, message),) = errors_at_sync(trio)
    assert where == rank
    assert kind in ("ValueError", "MismatchError")
    assert f"{array.size} x {array.dtype}" in message
    assert "4 x float32" in message
    np.testing.assert_array_equal(trio.get(place, rank), np.zeros(4))


def test_copy_to_where_no_tensor_is(trio: tvm_ipc.Session) -> None:
    place = trio.empty((4,), "float32", worker0_only=True, in_group=False)
    place.debug_copy_from(1, np.zeros(4, "float32"))
    ((rank, kind, message),) = errors_at_sync(trio)
    assert (rank, kind) == (1, "ValueError")
    assert "it has no tensor there" in message


def test_copy_from_worker_0_of_what_does_not_fit(trio: tvm_ipc.Session) -> None:
    trio.copy_from_worker_0(tvm.runtime.empty((5,), "float32"), trio.put(np.zeros(4, "float32")))
    ((rank, _, message),) = errors_at_sync(trio)
    assert rank == 0
    assert "5 x float32" in message
    assert "4 x float32" in message


@pytest.mark.parametrize("rows", [0, 2, 4])
def test_scatter_of_another_number_of_rows(rows: int, trio: tvm_ipc.Session) -> None:
    with pytest.raises(ValueError, match=rf"shape \({rows}, 2\), but the session has 3 w"):
        trio.scatter(np.zeros((rows, 2)))


def test_arrays_of_the_controller_with_groups(shared_session: Callable[..., Any]) -> None:
    """Only worker 0 gets them, so groups cannot each take theirs from their own first worker."""
    session = shared_session("ipc_threads", 4, 2)
    array = np.arange(4.0).reshape(4, 1)
    np.testing.assert_array_equal(on_workers(session.put(array), 4), [array] * 4)
    shares = session.scatter(array, in_group=False)
    np.testing.assert_array_equal(on_workers(shares, 4), array)
    session.broadcast(array, in_group=True)
    ((rank, kind, message),) = errors_at_sync(session)
    assert (rank, kind) == (2, "ValueError")
    assert "broadcast: the root has nothing to send" in message


# ---- functions and modules ------------------------------------------------------------------


@pytest.mark.slow
def test_calls_without_waiting(trio: tvm_ipc.Session) -> None:
    """Thousands of commands, whose results and whose ends also travel, fill no pipe for ever."""
    place = trio.put(np.zeros(1, "int64"))
    add, shape = trio.get_global_func("tests.add_one_to"), Shape(range(200))
    for _ in range(3000):
        add(place)
        trio.get_global_func("tests.with_two_more")(shape)
    assert [int(value[0]) for value in on_workers(place, RANKS)] == [3000] * RANKS


def test_values_are_freed_on_the_workers(trio: tvm_ipc.Session) -> None:
    alive = trio.get_global_func("tests.tracked_alive")
    before = on_workers(alive(), RANKS)
    kept = [call(trio, "tests.tracked") for _ in range(10)]
    assert on_workers(alive(), RANKS) == [count + 10 for count in before]
    del kept[2:]
    gc.collect()
    trio.sync()
    assert on_workers(alive(), RANKS) == [count + 2 for count in before]
    kept.clear()
    gc.collect()
    trio.sync()
    assert on_workers(alive(), RANKS) == before


def test_references_outlive_their_session() -> None:
    for threads in (True, False):
        with tvm_ipc.Session(2, threads=threads) as session:
            kept = [session.put(np.zeros(3)), session.get_global_func("runtime.disco.worker_rank")]
        with pytest.raises(SessionClosedError, match="the session is closed"):
            kept[1]()
        with pytest.raises(SessionClosedError):
            kept[0].debug_get_from_remote(0)
        kept.clear()
        gc.collect()


@pytest.fixture(scope="module")
def executable() -> Any:
    return build(Transposes)


@pytest.mark.parametrize("form", ["path", "text", "executable"])
def test_vm_module(form: str, executable: Any, tmp_path: Path, trio: tvm_ipc.Session) -> None:
    path = tmp_path / "module.so"
    executable.export_library(str(path))
    module = trio.load_vm_module({"path": path, "text": str(path)}.get(form, executable))
    array = np.arange(128, dtype="float32").reshape(8, 16)
    result = module["from_wide"](trio.put(array))
    np.testing.assert_array_equal(on_workers(result, RANKS), [array.T] * RANKS)
    np.testing.assert_array_equal(trio.get(module["from_tall"](result), 1), array)


def test_vm_module_by_a_relative_path(
    executable: Any, tmp_path: Path, trio: tvm_ipc.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    executable.export_library(str(tmp_path / "module.so"))
    monkeypatch.chdir(tmp_path)  # the workers stay where they were
    module = trio.load_vm_module("module.so", tvm.cpu())
    array = np.ones((8, 16), "float32")
    np.testing.assert_array_equal(trio.get(module["from_wide"](trio.put(array)), 2), array.T)


@PLACES
def test_python_module_beside_the_program(
    threads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers find modules where the controller does, also without an installation."""
    name = f"module_of_a_user_{threads}"
    (tmp_path / f"{name}.py").write_text(
        f"import tvm_ffi\ntvm_ffi.register_global_func('tests.{name}', lambda x: 10 * x)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with tvm_ipc.Session(2, threads=threads) as session:
        session.import_python_module(name)
        assert on_workers(call(session, f"tests.{name}", 4), 2) == [40, 40]


# ---- options --------------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "groups"), [(4, 3), (2, 4)])
def test_groups_of_unequal_size(workers: int, groups: int) -> None:
    message = f"num_workers {workers} cannot be divided into num_groups {groups}"
    with pytest.raises(ValueError, match=message):
        tvm_ipc.Session(workers, num_groups=groups)


@pytest.mark.parametrize("num_workers", [1, 2, 7, 16 if ON_GPUS else 64])
def test_world_sizes(num_workers: int) -> None:
    with tvm_ipc.Session(num_workers, threads=True) as session:
        assert session.num_workers == num_workers
        ranks = on_workers(call(session, "runtime.disco.worker_rank"), num_workers)
        assert ranks == list(range(num_workers))
        total = session.empty((1,), "int64")
        session.allreduce(session.scatter(np.arange(num_workers).reshape(-1, 1)), total)
        assert session.get(total, num_workers - 1)[0] == num_workers * (num_workers - 1) // 2


def test_two_process_workers_by_default() -> None:
    with tvm_ipc.Session() as session:
        assert session.num_workers == len(session.pids) == len(set(session.pids)) == 2
        assert session.pids[0] == os.getpid()


def test_threads_are_of_this_process() -> None:
    with tvm_ipc.Session(3, threads=True) as session:
        assert session.pids == (os.getpid(),) * 3


@pytest.mark.parametrize("compiler", [False, True], ids=["runtime", "compiler"])
def test_compiler_in_the_workers(compiler: bool) -> None:
    with tvm_ipc.Session(2, compiler=compiler) as session:
        session.import_python_module("tests.runtime.worker_functions")
        runtime_only = call(session, "tests.environment", "TVM_USE_RUNTIME_LIB")
        assert runtime_only.debug_get_from_remote(1) == ("0" if compiler else "1")
        session.get_global_func("relax.transform.FoldConstant")
        if compiler:
            session.sync()
        else:
            # The controller, where worker 0 is, has the compiler anyway.
            ((rank, _, message),) = errors_at_sync(session)
            assert rank == 1
            assert "tvm_ipc.Session(..., compiler=True)" in message


def test_threads_of_kernels_do_not_exceed_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TVM_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    with tvm_ipc.Session(2) as session:
        session.import_python_module("tests.runtime.worker_functions")
        for name in ("TVM_NUM_THREADS", "OMP_NUM_THREADS"):
            value = call(session, "tests.environment", name).debug_get_from_remote(1)
            assert value == str(max(1, cores // 2))


@pytest.mark.skipif(ON_GPUS, reason="names the backends of CPUs")
def test_backend_is_running_already(trio: tvm_ipc.Session) -> None:
    """Programs that begin with `init_ccl`, as TVM's do, go on; other names are refused."""
    trio.init_ccl(tvm.get_global_func("runtime.disco.compiled_ccl")(), 0, 1, 2)
    tvm_ipc.init_ccl(trio)
    with pytest.raises(ValueError, match=r"init_ccl: ccl is one of 'auto', 'shm'.*, not 'gloo'"):
        trio.init_ccl("gloo", 0, 1, 2)
    with pytest.raises(ValueError, match="init_ccl: device is one of 'cpu', not 'cuda'"):
        tvm_ipc.init_ccl(trio, device="cuda")


@pytest.mark.parametrize("backend", ["auto", *backends_of("cuda" if ON_GPUS else "cpu")])
def test_backend_is_named(backend: str) -> None:
    with tvm_ipc.Session(2, threads=True, backend=backend) as session:
        x = session.put(np.ones(3, "float32"))
        session.allreduce(x, x)
        np.testing.assert_array_equal(session.get(x), [2, 2, 2])
        session.init_ccl(backend)


@pytest.mark.parametrize("backend", ["gloo", "", None, 3, "SHM"])
def test_backends_that_are_not_there_are_refused(backend: object) -> None:
    with pytest.raises((ValueError, TypeError), match="Session: backend is one of 'auto', 'shm'"):
        tvm_ipc.Session(2, threads=True, backend=backend)  # type: ignore[arg-type]


# ---- several at once ------------------------------------------------------------------------


def test_several_at_once() -> None:
    threads = not ON_GPUS  # of which one session is at work at a time there: docs/gpus.md
    with (
        tvm_ipc.Session(2, threads=threads) as first,
        tvm_ipc.Session(3) as second,
        tvm_ipc.Session(4, num_groups=2, threads=threads) as third,
    ):
        sessions = (first, second, third)
        values = [session.put(np.full(1000, float(i))) for i, session in enumerate(sessions)]
        for _ in range(5):
            for session, value in zip(sessions, values, strict=True):
                session.allreduce(value, value, in_group=True)
        for i, (session, value) in enumerate(zip(sessions, values, strict=True)):
            size = (2, 3, 2)[i]
            assert session.get(value, session.num_workers - 1)[0] == i * size**5


def test_one_ends_while_another_goes_on() -> None:
    with tvm_ipc.Session(2) as stays:
        x = stays.put(np.ones(3))
        for threads in (True, False):
            with tvm_ipc.Session(2, threads=threads) as goes:
                goes.put(np.ones(3))
            stays.allreduce(x, x)
        np.testing.assert_array_equal(stays.get(x, 1), np.full(3, 4))


def test_session_of_another_thread() -> None:
    results: list[Any] = []

    def use() -> None:
        with tvm_ipc.Session(2, threads=not ON_GPUS) as session:  # see above
            x = session.put(np.ones(3))
            session.allreduce(x, x)
            results.append(session.get(x))

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    np.testing.assert_array_equal(results, np.full((3, 3), 2))
