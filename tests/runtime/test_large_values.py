# SPDX-License-Identifier: Apache-2.0
"""Large arrays are read where they lie, and fetched into the memory in which they stay."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import ml_dtypes  # noqa: F401  makes bfloat16 known to NumPy
import numpy as np
import pytest

import tvm_ipc


@pytest.fixture(scope="module", params=[False, True], ids=["processes", "threads"])
def session(request: pytest.FixtureRequest) -> Iterator[tvm_ipc.Session]:
    with tvm_ipc.Session(3, threads=request.param, timeout=60) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _many_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("session_argument_conversion", "value_transfer"):
        monkeypatch.setattr(f"tvm_ipc.runtime.{module}.READ_IN_PLACE", 100)
    monkeypatch.setattr("tvm_ipc.runtime.value_transfer.FETCHED_SEPARATELY", 100)


def arrays() -> Iterator[np.ndarray[Any, Any]]:
    plain = np.random.default_rng(0).integers(-99, 99, (3, 40, 50))
    for dtype in ("float32", "bfloat16", "int64", "uint8", "float8_e4m3fn", ">f4"):
        yield plain.astype(dtype)
    yield plain > 0
    yield plain[:, ::-2].T.reshape(3, 50, 20)[..., ::3]
    fixed = plain.astype("float16")
    fixed.flags.writeable = False
    yield fixed


def same(found: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> None:
    np.testing.assert_array_equal(found, wanted.astype(wanted.dtype.newbyteorder("=")), strict=True)
    assert found.flags.writeable and found.flags.owndata


def test_there_and_back(session: tvm_ipc.Session) -> None:
    for array in arrays():
        everywhere, divided = session.put(array), session.scatter(array)
        at_two = session.empty(array.shape, array.dtype.newbyteorder("="))
        at_two.debug_copy_from(2, array)
        in_team = session.broadcast(array, team=session.team([1, 2]))
        for rank in range(3):
            same(session.get(everywhere, rank), array)
            same(session.get(divided, rank), array[rank])
        same(session.get(at_two, 2), array)
        same(session.get(in_team, 1), array)
        same(everywhere.debug_get_from_remote(2).numpy(), array)


def test_what_is_changed_afterwards(session: tvm_ipc.Session) -> None:
    array = np.zeros((3, 5000))
    put, divided = session.put(array), session.scatter(array)
    array[:] = 1
    assert not session.get(put, 2).any() and not session.get(divided, 1).any()
    found = session.get(put, 0)
    found[:] = 2
    assert not session.get(put, 0).any()


def test_arrays_are_not_kept(session: tvm_ipc.Session) -> None:
    array = np.zeros((3, 5000))
    there = session.put(array), session.scatter(array)
    fetched = session.get(there[0], 2)
    gone = weakref.ref(array), weakref.ref(fetched)
    del array, fetched
    session.sync()
    assert [one() for one in gone] == [None, None]


def test_a_message_that_waits_is_not_met(session: tvm_ipc.Session) -> None:
    """A rank has sent to worker 0, which has yet to receive it."""
    function = session.get_global_func("tvm_ipc.worker.call_in_team")
    send = session.get_global_func("runtime.disco.shm.send_to_worker")
    receive = session.get_global_func("runtime.disco.shm.recv_from_worker")
    value, other = session.put(np.full(50, 3.0)), session.put(np.full(50, 4.0))
    into = session.empty((50,), "float64")
    one, zero = session.team([1]), session.team([0])
    function(send, one.id, value, 0)
    assert (session.get(other, 1) == 4).all()
    function(receive, zero.id, into, 1)
    assert (session.get(into, 0) == 3).all()
