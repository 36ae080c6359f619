# SPDX-License-Identifier: Apache-2.0
"""Calls that set the stream of a rank, and let streams wait: what they become, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from tvm import relax

from tvm_ipc import comm
from tvm_ipc.comm.stream_call_builders import fork, join
from tvm_ipc.packed_functions import MAX_STREAMS


def text(call: relax.Call) -> tuple[str, int]:
    (number,) = call.args
    return str(call.op.global_symbol).removeprefix("tvm_ipc."), int(number.value)


def test_calls() -> None:
    assert text(comm.set_stream(3)) == ("set_stream", 3)
    assert text(comm.wait_stream(MAX_STREAMS - 1)) == ("wait_stream", 63)


@pytest.mark.parametrize("name", ["set_stream", "wait_stream"])
@pytest.mark.parametrize(
    ("stream", "error"), [(-1, ValueError), (MAX_STREAMS, ValueError), ("1", TypeError)]
)
def test_other_numbers_are_refused(name: str, stream: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"{name}: stream is the number of a stream, 0 to 63, not"):
        getattr(comm, name)(stream)


def test_a_fork_and_a_join_of_one_stream_are_nothing() -> None:
    assert fork(1) == join(1) == []
    assert [*map(text, fork(3))] == [
        *(("set_stream", 1), ("wait_stream", 0), ("set_stream", 2), ("wait_stream", 0)),
        ("set_stream", 0),
    ]
    assert [*map(text, join(3))] == [("set_stream", 0), ("wait_stream", 1), ("wait_stream", 2)]
