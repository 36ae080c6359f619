# SPDX-License-Identifier: Apache-2.0
"""Parts of tensors as tensors, which kernels and collectives take like any other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tvm_ffi

import tvm_ipc
from tvm_ipc.errors import WorkerError


@pytest.fixture(scope="module")
def session() -> Iterator[tvm_ipc.Session]:
    with tvm_ipc.Session(2, threads=True, timeout=60) as opened:
        yield opened


def view(session: tvm_ipc.Session, tensor: Any, offset: int, *shape: int) -> Any:
    return session.get_global_func("tvm_ipc.view")(tensor, offset, tvm_ffi.Shape(shape))


def test_a_part_of_a_tensor(session: tvm_ipc.Session) -> None:
    x = session.put(np.arange(24, dtype="int16").reshape(4, 6))
    np.testing.assert_array_equal(session.get(view(session, x, 12, 2, 3)), [[6, 7, 8], [9, 10, 11]])
    np.testing.assert_array_equal(session.get(view(session, x, 46, 1)), [23])
    assert session.get(view(session, x, 48, 0)).shape == (0,)
    part = view(session, view(session, x, 12, 12), 4, 2)
    np.testing.assert_array_equal(session.get(part), [8, 9])


def test_it_is_the_same_memory_and_keeps_it(session: tvm_ipc.Session) -> None:
    x = session.put(np.zeros(8, "float32"))
    part = view(session, x, 8, 4)
    part.debug_copy_from(1, np.arange(4, dtype="float32"))
    np.testing.assert_array_equal(session.get(x, rank=1), [0, 0, 0, 1, 2, 3, 0, 0])
    del x
    np.testing.assert_array_equal(session.get(part, rank=1), [0, 1, 2, 3])


def test_collectives_take_it(session: tvm_ipc.Session) -> None:
    x = session.put(np.arange(8, dtype="float32"))
    y = session.put(np.zeros(8, "float32"))
    session.allreduce(view(session, x, 4, 3), view(session, y, 16, 3))
    np.testing.assert_array_equal(session.get(y), [0, 0, 0, 0, 2, 4, 6, 0])


@pytest.mark.parametrize(
    ("offset", "shape", "message"),
    [
        (4, (8,), "view: 32 bytes at offset 4 do not lie in a tensor of 32 bytes"),
        (-4, (1,), "view: 4 bytes at offset -4 do not lie in a tensor of 32 bytes"),
        (36, (0,), "view: 0 bytes at offset 36 do not lie"),
        (0, (-1,), "view: the shape has no size in bytes; one extent is -1"),
        (0, (1 << 40, 1 << 40), "view: the shape has no size in bytes"),
    ],
)
def test_what_is_no_part(
    offset: int, shape: tuple[int, ...], message: str, session: tvm_ipc.Session
) -> None:
    view(session, session.put(np.zeros(8, "float32")), offset, *shape)
    with pytest.raises(WorkerError, match=re.escape(message)):
        session.sync()
