# SPDX-License-Identifier: Apache-2.0
"""Disco's collectives through sessions and compiled programs, on CPU workers.

The cases of TVM's own tests/python/disco/test_ccl.py, for sessions of the user's and of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm.runtime.vm import VirtualMachine

import tvm_ipc
from tests.runtime.disco_kinds import KINDS, on_workers, open_session
from tests.runtime.disco_programs import MLP, Collectives, ShardedMLP, attention, build
from tests.runtime.places import PREFIX
from tests.runtime.tensors_of_ranks import put_each

OPERATIONS = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "avg": lambda a, b: (a + b) * np.float32(0.5),
}
A = np.arange(12, dtype="float32").reshape(3, 4)
B = np.arange(1, -11, -1, dtype="float32").reshape(3, 4)
C = np.arange(30, dtype="float32").reshape(5, 6)
D = np.arange(1, -29, -1, dtype="float32").reshape(5, 6)


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest, shared_session: Callable[..., Any]) -> Any:
    """Two workers."""
    return shared_session(request.param, 2)


@pytest.fixture(params=KINDS)
def two_pairs(request: pytest.FixtureRequest, shared_session: Callable[..., Any]) -> Any:
    """Four workers in two groups."""
    return shared_session(request.param, 4, 2)


def place(session: Any, arrays: dict[int, np.ndarray[Any, Any]], **where: Any) -> Any:
    """A reference to tensors with these values on these workers."""
    return put_each(session, arrays, **where)


def check(reference: Any, expected: dict[int, np.ndarray[Any, Any]]) -> None:
    """What these workers hold; the shapes must be equal too."""
    for rank, value in zip(expected, on_workers(reference, list(expected)), strict=True):
        np.testing.assert_array_equal(value, expected[rank], strict=True)


@pytest.mark.parametrize("kind", KINDS)
def test_init(kind: str) -> None:
    opened = open_session(kind, 2)
    ranks = on_workers(opened.session.get_global_func("runtime.disco.worker_rank")(), 2)
    assert ranks == [0, 1]
    opened.end()


def test_init_with_device_ids_clears_the_memory_as_disco_does() -> None:
    session = tvm.runtime.disco.ThreadedSession(2)
    tvm_ipc.init_ccl(session, "shm", device_ids=[0, 0])
    session._clear_ipc_memory_pool()  # what Session.init_ccl does next
    session._sync_all()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_allreduce(pair: Any, operation: str) -> None:
    source, target = place(pair, {0: A, 1: B}), pair.empty((3, 4), "float32")
    pair.allreduce(source, target, op=operation)
    expected = OPERATIONS[operation](A, B)
    check(target, {0: expected, 1: expected})
    check(source, {0: A, 1: B})


def test_allreduce_into_itself(pair: Any) -> None:
    source = place(pair, {0: A, 1: B})
    pair.allreduce(source, source)
    check(source, {0: A + B, 1: A + B})


def test_unknown_reduction(pair: Any) -> None:
    source = place(pair, {0: A, 1: B})
    with pytest.raises(ValueError, match="median"):
        pair.allreduce(source, source, op="median")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_group_allreduce(two_pairs: Any, operation: str) -> None:
    first, second = place(two_pairs, {0: A, 1: B}), place(two_pairs, {2: C, 3: D})
    # All workers do both, each group on values of its own.
    for rank in (2, 3):
        first.debug_copy_from(rank, A)
    for rank in (0, 1):
        second.debug_copy_from(rank, C)
    first_out = two_pairs.empty((3, 4), "float32")
    second_out = two_pairs.empty((5, 6), "float32")
    two_pairs.allreduce(first, first_out, op=operation, in_group=True)
    two_pairs.allreduce(second, second_out, op=operation, in_group=True)
    reduce = OPERATIONS[operation]
    check(first_out, {0: reduce(A, B), 1: reduce(A, B), 2: reduce(A, A)})
    check(second_out, {2: reduce(C, D), 3: reduce(C, D), 0: reduce(C, C)})


def test_allreduce_over_all_groups(two_pairs: Any) -> None:
    source = place(two_pairs, {rank: A + rank for rank in range(4)})
    target = two_pairs.empty((3, 4), "float32")
    two_pairs.allreduce(source, target, in_group=False)
    check(target, dict.fromkeys(range(4), 4 * A + 6))


def test_allgather(pair: Any) -> None:
    array = np.arange(36, dtype="float32")
    source = place(pair, {0: array[:18].reshape(3, 3, 2), 1: array[18:].reshape(3, 3, 2)})
    target = pair.empty((3, 4, 3), "float32")
    pair.allgather(source, target)
    check(target, dict.fromkeys(range(2), array.reshape(3, 4, 3)))


def test_group_allgather(two_pairs: Any) -> None:
    array = np.arange(48, dtype="float32")
    halves = {0: array[:24], 1: array[24:], 2: -array[:24], 3: -array[24:]}
    source = place(two_pairs, {r: half.reshape(2, 4, 3) for r, half in halves.items()})
    target = two_pairs.empty((2, 6, 4), "float32")
    two_pairs.allgather(source, target, in_group=True)
    whole = array.reshape(2, 6, 4)
    check(target, {0: whole, 1: whole, 2: -whole, 3: -whole})


def test_allgather_over_all_groups(two_pairs: Any) -> None:
    array = np.arange(48, dtype="float32").reshape(4, 12)
    source = place(two_pairs, dict(enumerate(array)))
    target = two_pairs.empty((48,), "float32")
    two_pairs.allgather(source, target, in_group=False)
    check(target, dict.fromkeys(range(4), array.reshape(48)))


@pytest.mark.parametrize("explicit", [True, False], ids=["explicit_output", "implicit_output"])
def test_broadcast(pair: Any, explicit: bool) -> None:
    if explicit:
        source = place(pair, {0: A}, worker0_only=True)
        target = pair.empty((3, 4), "float32")
        pair.broadcast_from_worker0(source, target)
    else:
        target = pair.broadcast(A)
    check(target, {0: A, 1: A})


def test_broadcast_into_a_given_output(pair: Any) -> None:
    target = pair.empty((3, 4), "float32")
    assert pair.broadcast(tvm.runtime.tensor(A), target).same_as(target)
    check(target, {0: A, 1: A})


def test_group_broadcast(two_pairs: Any) -> None:
    source = place(two_pairs, {0: A, 2: -A}, worker0_only=True, in_group=True)
    target = two_pairs.empty((3, 4), "float32")
    two_pairs.broadcast_from_worker0(source, target)
    check(target, {0: A, 1: A, 2: -A, 3: -A})


def test_broadcast_over_all_groups(two_pairs: Any) -> None:
    check(two_pairs.broadcast(A, in_group=False), dict.fromkeys(range(4), A))


@pytest.mark.parametrize("explicit", [True, False], ids=["explicit_output", "implicit_output"])
def test_scatter(pair: Any, explicit: bool, capfd: pytest.CaptureFixture[str]) -> None:
    array = np.arange(36, dtype="float32").reshape(2, 6, 3)
    if explicit:
        source = place(pair, {0: array}, worker0_only=True)
        target = pair.empty((6, 3), "float32")
        pair.scatter_from_worker0(source, target)
    else:
        target = pair.scatter(array)
    check(target, {0: array[0], 1: array[1]})
    assert capfd.readouterr().err == ""


def test_group_scatter(two_pairs: Any, capfd: pytest.CaptureFixture[str]) -> None:
    array = np.arange(36, dtype="float32").reshape(2, 6, 3)
    source = place(two_pairs, {0: array, 2: -array}, worker0_only=True, in_group=True)
    target = two_pairs.empty((6, 3), "float32")
    two_pairs.scatter_from_worker0(source, target)
    check(target, {0: array[0], 1: array[1], 2: -array[0], 3: -array[1]})
    assert capfd.readouterr().err == ""


def test_scatter_over_all_groups(two_pairs: Any) -> None:
    array = np.arange(24, dtype="float32").reshape(4, 6)
    check(two_pairs.scatter(array, in_group=False), dict(enumerate(array)))


def test_scatter_divides_the_elements_not_the_first_axis(
    pair: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    array = np.arange(36, dtype="float32").reshape(3, 4, 3)
    source = place(pair, {0: array}, worker0_only=True)
    target = pair.empty((3, 3, 2), "float32")
    pair.scatter_from_worker0(source, target)
    halves = array.reshape(2, 3, 3, 2)
    check(target, {0: halves[0], 1: halves[1]})
    assert capfd.readouterr().err == ""


def test_gather(pair: Any, capfd: pytest.CaptureFixture[str]) -> None:
    array = np.arange(36, dtype="float32")
    source = place(pair, {0: array[:18].reshape(3, 3, 2), 1: array[18:].reshape(3, 3, 2)})
    target = pair.empty((3, 4, 3), "float32", worker0_only=True)
    pair.gather_to_worker0(source, target)
    check(target, {0: array.reshape(3, 4, 3)})
    assert capfd.readouterr().err == ""


def test_group_gather(two_pairs: Any, capfd: pytest.CaptureFixture[str]) -> None:
    array = np.arange(36, dtype="float32")
    halves = {0: array[:18], 1: array[18:], 2: -array[:18], 3: -array[18:]}
    source = place(two_pairs, {r: half.reshape(3, 3, 2) for r, half in halves.items()})
    target = two_pairs.empty((3, 4, 3), "float32", worker0_only=True, in_group=True)
    two_pairs.gather_to_worker0(source, target)
    check(target, {0: array.reshape(3, 4, 3), 2: -array.reshape(3, 4, 3)})
    assert capfd.readouterr().err == ""


def test_gather_over_all_groups(two_pairs: Any) -> None:
    array = np.arange(24, dtype="float32").reshape(4, 6)
    source = place(two_pairs, dict(enumerate(array)))
    target = two_pairs.empty((4, 6), "float32", worker0_only=True, in_group=False)
    two_pairs.gather_to_worker0(source, target, in_group=False)
    check(target, {0: array})


def test_send_to_next_group(two_pairs: Any) -> None:
    array = place(two_pairs, {0: A, 1: B})
    exercise = f"{PREFIX}test_send_to_next_group_recv_from_prev_group"
    two_pairs.get_global_func(exercise)(array)
    check(array, {0: A, 1: B, 2: A, 3: B})


def test_worker_2_sends_to_worker_0(two_pairs: Any) -> None:
    array = place(two_pairs, {2: B})
    two_pairs.get_global_func(PREFIX + "test_worker2_sends_to_worker0")(array)
    check(array, {0: B, 2: B})


def test_send_and_receive_through_discos_functions(two_pairs: Any) -> None:
    array = place(two_pairs, {rank: A + rank for rank in range(4)})
    call_on = two_pairs.get_global_func("tests.call_on")
    call_on(3, "runtime.disco.send_to_worker", array, 1)
    call_on(1, "runtime.disco.recv_from_worker", array, 3)
    check(array, {0: A, 1: A + 3, 2: A + 2, 3: A + 3})


def test_receive_from_worker_0(pair: Any) -> None:
    array = place(pair, {0: A, 1: B})
    pair.get_global_func("tests.call_elsewhere")(
        0, "runtime.disco.send_to_worker", "runtime.disco.recv_from_worker0", 2, array, 1, array
    )
    check(array, {0: A, 1: A})


def test_one_worker_alone(shared_session: Callable[..., Any]) -> None:
    for kind in KINDS:
        session = shared_session(kind, 1)
        check(session.broadcast(A), {0: A})
        check(session.scatter(A[None]), {0: A})
        source, target = place(session, {0: B}), session.empty((3, 4), "float32")
        for collective in ("allreduce", "allgather", "gather_to_worker0"):
            getattr(session, collective)(source, target)
            check(target, {0: B})


# ---- programs of the Relax VM ---------------------------------------------------------------


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Any], str]:
    """Compile a module once and return the path of the library."""
    directory = tmp_path_factory.mktemp("programs")

    def compiled(name: str, module: Any) -> str:
        path: Path = directory / f"{name}.so"
        if not path.exists():
            build(module).export_library(str(path))
        return str(path)

    return compiled


def from_worker_0(session: Any, reference: Any, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    received = tvm.runtime.empty(shape, "float32")
    session.copy_from_worker_0(received, reference)
    session.sync_worker_0()
    return np.array(received.numpy())


def random(*shape: int) -> np.ndarray[Any, Any]:
    generator = np.random.default_rng(sum(shape))
    return generator.standard_normal(shape, dtype="float32")


def gelu(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    from math import erf

    return x * 0.5 * (1 + np.vectorize(erf)(x / np.sqrt(2)))


@pytest.fixture(scope="module")
def mlp_weights() -> tuple[np.ndarray[Any, Any], ...]:
    return random(32, 64), random(64, 64), random(64, 64) / 8


@pytest.fixture(scope="module")
def mlp_on_one_worker(mlp_weights: tuple[np.ndarray[Any, Any], ...]) -> np.ndarray[Any, Any]:
    vm = VirtualMachine(build(MLP), device=tvm.cpu())
    return np.array(vm["main"](*map(tvm.runtime.tensor, mlp_weights)).numpy())


def test_mlp_on_one_worker_is_what_numpy_says(
    mlp_weights: tuple[np.ndarray[Any, Any], ...], mlp_on_one_worker: np.ndarray[Any, Any]
) -> None:
    x, w1, w2 = (array.astype("float64") for array in mlp_weights)
    np.testing.assert_allclose(mlp_on_one_worker, gelu(x @ w1) @ w2, rtol=1e-4, atol=1e-4)


def test_mlp_on_two_workers(
    pair: Any,
    library: Callable[..., str],
    mlp_weights: tuple[np.ndarray[Any, Any], ...],
    mlp_on_one_worker: np.ndarray[Any, Any],
) -> None:
    x, w1, w2 = mlp_weights
    module = pair.load_vm_module(library("sharded_mlp", ShardedMLP))
    # Only the first worker has the input; what the other one passes does not matter.
    inputs = place(pair, {0: x, 1: np.full_like(x, np.nan)})
    left = place(pair, {0: w1[:, :32], 1: w1[:, 32:]})
    right = place(pair, {0: w2[:32], 1: w2[32:]})
    result = from_worker_0(pair, module["main"](inputs, left, right), (32, 64))
    np.testing.assert_allclose(result, mlp_on_one_worker, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def attention_weights() -> tuple[np.ndarray[Any, Any], ...]:
    return (random(1, 10, 32), random(32, 64), random(64, 32).T, random(32, 64) / 2, random(64, 32))


@pytest.fixture(scope="module")
def attention_on_one_worker(
    attention_weights: tuple[np.ndarray[Any, Any], ...],
) -> np.ndarray[Any, Any]:
    vm = VirtualMachine(build(attention(heads=4, workers=1)), device=tvm.cpu())
    inputs = (tvm.runtime.tensor(np.ascontiguousarray(w)) for w in attention_weights)
    return np.array(vm["main"](*inputs).numpy())


def test_attention_on_one_worker_is_what_numpy_says(
    attention_weights: tuple[np.ndarray[Any, Any], ...],
    attention_on_one_worker: np.ndarray[Any, Any],
) -> None:
    x, wq, wk, wv, wo = (array.astype("float64") for array in attention_weights)
    q, k, v = ((x @ w).reshape(1, 10, 4, 16).transpose(0, 2, 1, 3) for w in (wq, wk, wv))
    scores = np.exp(q @ k.transpose(0, 1, 3, 2) / 4)
    weights = scores / scores.sum(axis=-1, keepdims=True)
    expected = (weights @ v).transpose(0, 2, 1, 3).reshape(1, 10, 64) @ wo
    np.testing.assert_allclose(attention_on_one_worker, expected, rtol=1e-3, atol=1e-3)


def test_attention_on_two_workers(
    pair: Any,
    library: Callable[..., str],
    attention_weights: tuple[np.ndarray[Any, Any], ...],
    attention_on_one_worker: np.ndarray[Any, Any],
) -> None:
    x, *projections, wo = attention_weights
    module = pair.load_vm_module(library("sharded_attention", attention(heads=4, workers=2)))
    inputs = [place(pair, {0: x, 1: np.zeros_like(x)})]
    inputs += [place(pair, dict(enumerate(np.split(w, 2, axis=1)))) for w in projections]
    inputs += [place(pair, dict(enumerate(np.split(wo, 2, axis=0))))]
    result = from_worker_0(pair, module["main"](*inputs), x.shape)
    np.testing.assert_allclose(result, attention_on_one_worker, rtol=1e-3, atol=1e-3)


def test_every_collective_operator(pair: Any, library: Callable[..., str]) -> None:
    x = {0: random(4, 6), 1: random(6, 4).reshape(4, 6)}
    module = pair.load_vm_module(library("collectives", Collectives))
    results = module["main"](place(pair, x))
    for rank in range(2):
        largest, rows, first, share = (t.numpy() for t in results.debug_get_from_remote(rank))
        np.testing.assert_array_equal(largest, np.maximum(x[0], x[1]))
        np.testing.assert_array_equal(rows, np.concatenate([x[0], x[1]]))
        np.testing.assert_array_equal(first, x[0])
        np.testing.assert_array_equal(share, x[0][2 * rank : 2 * rank + 2])
