# SPDX-License-Identifier: Apache-2.0
"""Collectives without a target: the shape, type and numbers of the tensor that they allocate."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm_ffi

import tvm_ipc
from tests.runtime.disco_kinds import RANKS, on_workers, refused
from tvm_ipc.errors import WorkerError

Array = np.ndarray[Any, Any]

DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int64")
#: With a first axis that three workers divide, except for the scalar.
SHAPES = ((), (6,), (6, 5), (3, 2, 2), (0,), (0, 4), (6, 0))


def arrays(shape: tuple[int, ...], dtype: str) -> Array:
    """Return one array for each worker, stacked."""
    random = np.random.default_rng(len(shape))
    return random.integers(0, 4, (RANKS, *shape)).astype(np.dtype(dtype))


def joined(each: Array) -> Array:
    return np.concatenate([np.atleast_1d(one) for one in each])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_values(trio: Any, shape: tuple[int, ...], dtype: str) -> None:
    each = arrays(shape, dtype)
    src = trio.scatter(each)
    total = each.sum(0, dtype=each.dtype)
    expected = {
        "allreduce": [total] * RANKS,
        "allgather": [joined(each)] * RANKS,
    }
    if shape:
        expected["reduce_scatter"] = np.split(total, RANKS)
    if shape and each[0].size % RANKS == 0:
        pieces = [one.reshape(RANKS, -1) for one in each]
        expected["all_to_all"] = [
            np.concatenate([piece[k] for piece in pieces]).reshape(shape) for k in range(RANKS)
        ]
    for name, wanted in expected.items():
        result = getattr(trio, name)(src)
        for rank, right in enumerate(wanted):
            found = trio.get(result, rank)
            assert found.dtype == right.dtype, name
            assert found.shape == right.shape, name
            np.testing.assert_array_equal(found, right, name)
    np.testing.assert_array_equal(on_workers(src, RANKS), each, "the source is as before")


@pytest.mark.parametrize("shape", SHAPES)
def test_values_of_one_worker(trio: Any, shape: tuple[int, ...]) -> None:
    """Only the worker that gets the result has a tensor."""
    each = arrays(shape, "float32")
    src = trio.scatter(each)
    for root, result, right in (
        (0, trio.gather_to_worker0(src), joined(each)),
        (0, trio.reduce(src), each.sum(0)),
        (2, trio.reduce(src, op="max", root=2), each.max(0)),
    ):
        np.testing.assert_array_equal(trio.get(result, root), right)
        assert trio.get(result, root).shape == right.shape
        others = [rank for rank in range(RANKS) if rank != root]
        assert [result.debug_get_from_remote(rank) for rank in others] == [None, None]


def test_unequal_parts(trio: Any) -> None:
    """A worker has what it receives, in one axis."""
    parts = [[1, 1, 2], [3, 0, 1], [1, 2, 1]]
    each = np.arange(12.0).reshape(RANKS, 4)
    result = trio.all_to_all(trio.scatter(each.reshape(RANKS, 2, 2)), parts=parts)
    for receiver in range(RANKS):
        pieces = [
            each[sender, sum(parts[sender][:receiver]) :][: parts[sender][receiver]]
            for sender in range(RANKS)
        ]
        np.testing.assert_array_equal(trio.get(result, receiver), np.concatenate(pieces))
    # All of it is for worker 1, so the others have no element.
    result = trio.all_to_all(trio.put(np.ones((2, 2))), parts=[[0, 4, 0]] * RANKS)
    assert [trio.get(result, rank).shape for rank in range(RANKS)] == [(0,), (12,), (0,)]
    parts[0][0] = 0
    trio.all_to_all(trio.scatter(each), parts=parts)
    refused(trio, "ValueError", "by the parts worker 0 gives 3 and takes 4")


def test_teams(trio: Any) -> None:
    """Workers outside a team take no part, and have no result."""
    each = arrays((4,), "float32")
    src, pair = trio.scatter(each), trio.team([2, 0])
    results = {
        "allreduce": trio.allreduce(src, op="max", team=pair),
        "allgather": trio.allgather(src, team=pair),
        "reduce_scatter": trio.reduce_scatter(src, team=pair),
        "all_to_all": trio.all_to_all(src, parts=[[1, 3], [2, 2]], team=pair),
        "reduce": trio.reduce(src, root=1, team=pair),
        "gather_to_worker0": trio.gather_to_worker0(src, team=pair),
    }
    first, second = each[2], each[0]
    expected: dict[str, tuple[Array | None, Array | None]] = {
        "allreduce": (np.maximum(first, second),) * 2,
        "allgather": (np.concatenate([first, second]),) * 2,
        "reduce_scatter": ((first + second)[:2], (first + second)[2:]),
        "all_to_all": (
            np.concatenate([first[:1], second[:2]]),
            np.concatenate([first[1:], second[2:]]),
        ),
        "reduce": (None, first + second),
        "gather_to_worker0": (np.concatenate([first, second]), None),
    }
    for name, by_index in expected.items():
        for rank, right in zip((2, 0), by_index, strict=True):
            found = results[name].debug_get_from_remote(rank)
            if right is None:
                assert found is None, name
            else:
                np.testing.assert_array_equal(found.numpy(), right, name)
        assert results[name].debug_get_from_remote(1) is None, name


def test_groups(shared_session: Callable[..., Any]) -> None:
    session = shared_session("ipc_threads", 4, 2)
    each = np.arange(16.0).reshape(4, 4)
    src = session.scatter(each, in_group=False)
    in_group, among_all = session.allgather(src), session.allgather(src, in_group=False)
    slices = session.reduce_scatter(src), session.reduce_scatter(src, in_group=False)
    gathered = session.gather_to_worker0(src)
    for rank in range(4):
        own = each[rank // 2 * 2 :][:2]
        np.testing.assert_array_equal(session.get(in_group, rank), own.ravel())
        np.testing.assert_array_equal(session.get(among_all, rank), each.ravel())
        np.testing.assert_array_equal(session.get(slices[0], rank), own.sum(0)[rank % 2 * 2 :][:2])
        np.testing.assert_array_equal(session.get(slices[1], rank), each.sum(0)[rank : rank + 1])
        if rank % 2 == 0:
            np.testing.assert_array_equal(session.get(gathered, rank), own.ravel())
        else:
            assert gathered.debug_get_from_remote(rank) is None


def test_a_target_is_returned(trio: Any) -> None:
    src, dst = trio.put(np.ones(3, "float32")), trio.empty((3,), "float32")
    assert trio.allreduce(src, dst) is dst
    assert trio.all_to_all(src, dst) is dst
    assert trio.reduce(src, dst, root=1) is dst


def test_results_are_sources(trio: Any) -> None:
    """A reduce-scatter and an all-gather are an all-reduce, in shape too."""
    each = arrays((6, 2), "float32")
    src = trio.scatter(each)
    total = trio.allgather(trio.reduce_scatter(src))
    assert trio.get(total, 1).shape == (6, 2)
    np.testing.assert_array_equal(trio.get(total, 1), each.sum(0))


def test_memory_is_that_of_empty(trio: Any) -> None:
    """A result may be a target and a source of any collective, as what `empty` returns."""
    offset = trio.get_global_func("tvm_ipc.arena_offset")
    result, empty = trio.allreduce(trio.put(np.ones(5000))), trio.empty((5000,), "float64")
    for rank in range(RANKS):
        found, right = (
            offset(tensor).debug_get_from_remote(rank) >= 0 for tensor in (result, empty)
        )
        assert found == right
    value = result.debug_get_from_remote(0)
    assert value.device == empty.debug_get_from_remote(0).device


def test_shapes_without_a_result(trio: Any) -> None:
    trio.reduce_scatter(trio.put(np.ones((5, 3))))
    refused(
        trio,
        "ValueError",
        "reduce_scatter: src has a first axis of extent 5, and the result is one of 3 equal slices "
        "of that axis; make it a multiple of 3, or pass dst, a tensor with one slice of the elem",
    )
    trio.reduce_scatter(trio.put(1.0))
    refused(trio, "ValueError", "reduce_scatter: src has no axis, and the result is one of 3")
    dst = trio.empty((5,), "float64")
    trio.reduce_scatter(trio.put(np.ones((5, 3))), dst)  # any slices, in a tensor for them
    np.testing.assert_array_equal(trio.get(dst, 2), [3.0] * 5)
    trio.all_to_all(trio.put(np.ones(7)))
    refused(trio, "ValueError", "all_to_all: 7 elements cannot be divided evenly among 3 workers")
    trio.all_to_all(trio.put(np.ones(3)), parts=[[1, 1], [1, 1]])
    refused(trio, "ValueError", "all_to_all: there are 4 parts; 3 workers have 9")
    most = (1 << 63) - 1  # sums of which would wrap
    trio.all_to_all(trio.put(np.ones(3)), parts=[[most, most, 5], [1, 1, 1], [1, 1, 1]])
    refused(trio, "ValueError", f"the part of worker 0 for worker 0 has {most} elements")


@pytest.mark.parametrize(
    "name",
    ["allreduce", "allgather", "reduce_scatter", "all_to_all", "reduce", "gather_to_worker0"],
)
def test_what_is_refused(trio: Any, name: str) -> None:
    collective = getattr(trio, name)
    source, target = list(inspect.signature(collective).parameters)[:2]
    src = trio.put(np.ones(3))
    for wrong in (None, 3, np.ones(3)):
        with pytest.raises(TypeError, match=f"^{name}: {source}"):
            collective(wrong)
    for wrong in (3, "sum", np.ones(3)):
        with pytest.raises(TypeError, match=f"^{name}: {target}"):
            collective(src, wrong)
    # Worker 1 has nothing to send.
    nothing = trio.gather_to_worker0(src)
    collective(nothing)
    with pytest.raises(WorkerError):
        trio.sync()


def test_the_message_for_a_missing_source(trio: Any) -> None:
    trio.allreduce(trio.gather_to_worker0(trio.put(np.ones(3))))
    with pytest.raises(WorkerError) as error:
        trio.sync()
    messages = [one.message for one in error.value.errors]
    assert any(
        "has no tensor to send, so the shape of the result is unknown" in each for each in messages
    ), messages


def test_sources_on_one_worker_need_a_target() -> None:
    """The other workers do not know the shape."""
    for name in ("broadcast_from_worker0", "scatter_from_worker0"):
        parameters = list(inspect.signature(getattr(tvm_ipc.Session, name)).parameters.values())
        assert parameters[2].default is inspect.Parameter.empty


def test_a_source_whose_shape_the_controller_does_not_know(trio: Any) -> None:
    """The result of a function."""
    empty = trio.get_global_func("runtime.disco.empty")
    x = empty(tvm_ffi.Shape((4,)), tvm_ffi.dtype("float32"), None, False, True)
    assert "a value on the workers" in repr(x)
    assert trio.get(trio.allreduce(x)).shape == (4,)
