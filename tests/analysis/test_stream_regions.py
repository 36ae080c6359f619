# SPDX-License-Identifier: Apache-2.0
"""The parts of a function that run on several streams: where they begin, end, and on which."""

from __future__ import annotations

from typing import Any

import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from tvm_ipc import comm
from tvm_ipc.analysis.program_order import linearize
from tvm_ipc.analysis.stream_regions import find_stream_regions


def regions(calls: str) -> list[tuple[int, int, list[int | None]]]:
    """The first and last event of each region of calls, and the stream of each of its events.

    A number sets the stream, "w" and a number waits for another one, and a letter is a kernel.
    """
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4,), "float32"))
    with builder.function("main", [x], pure=False):
        for call in calls.split():
            if call.isdigit():
                builder.emit(comm.set_stream(int(call)))
            elif call[0] == "w":
                builder.emit(comm.wait_stream(int(call[1:])))
            else:
                builder.emit(relax.op.exp(x))
        builder.emit_func_output(x)
    return found(builder.get()["main"])


def found(function: relax.Function) -> list[tuple[int, int, list[int | None]]]:
    return [
        (one.begin, one.end, [one.stream_of([e]) for e in range(one.begin, one.end + 1)])
        for one in find_stream_regions(linearize("main", function))
    ]


N = None


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ("a 0 w1 a", []),
        ("a 1 w0 a 0 a w1 a", [(1, 6, [1, 1, 1, 0, 0, 0])]),
        ("1 w0 0 w1 a 1 w0 a 0 w1", [(0, 3, [1, 1, 0, 0]), (5, 9, [1, 1, 1, 0, 0])]),
        ("1 w0 2 w1 a 0 w2 a w1", [(0, 8, [1, 1, 2, 2, 2, 0, 0, 0, 0])]),
        ("a 1 w0 a", [(1, 3, [1, 1, 1])]),  # it is not joined
        # Without a wait for stream 0, a stream is beside everything before.
        ("a 1 a 0 w1 a", [(0, 4, [N] * 5)]),
        ("a 1 w0 0 w1 a 1 a 0 w1 a", [(0, 9, [N] * 10)]),
        ("a 1 w0 2 a 0 w1 w2", [(0, 7, [N] * 8)]),
    ],
)
def test_regions(calls: str, expected: list[Any]) -> None:
    assert regions(calls) == expected


@I.ir_module
class Branches:
    @R.function(pure=False)
    def within(x: R.Tensor((4,), "float32"), c: R.Tensor((), "bool")):
        if c:
            R.call_packed("tvm_ipc.set_stream", 1, ty_args=(R.Tuple,))
            R.call_packed("tvm_ipc.wait_stream", 0, ty_args=(R.Tuple,))
            R.call_packed("tvm_ipc.set_stream", 0, ty_args=(R.Tuple,))
            R.call_packed("tvm_ipc.wait_stream", 1, ty_args=(R.Tuple,))
            y = R.exp(x)
        else:
            y = R.exp(x)
        return y

    @R.function(pure=False)
    def around(x: R.Tensor((4,), "float32"), c: R.Tensor((), "bool")):
        R.call_packed("tvm_ipc.set_stream", 1, ty_args=(R.Tuple,))
        R.call_packed("tvm_ipc.wait_stream", 0, ty_args=(R.Tuple,))
        if c:
            R.call_packed("tvm_ipc.set_stream", 0, ty_args=(R.Tuple,))
            y = R.exp(x)
        else:
            y = R.exp(x)
        R.call_packed("tvm_ipc.set_stream", 0, ty_args=(R.Tuple,))
        R.call_packed("tvm_ipc.wait_stream", 1, ty_args=(R.Tuple,))
        return y


def test_branches() -> None:
    ((begin, end, streams),) = found(Branches["within"])
    assert (begin, end, streams) == (1, 4, [1, 1, 0, 0])
    ((begin, end, streams),) = found(Branches["around"])
    assert begin == 0 and set(streams) == {N}
    linear = linearize("around", Branches["around"])
    assert end == linear.body.end  # which stream is current depends on the branch


def test_programs_without_streams_have_no_region() -> None:
    main = tvm.script.from_source("""
@R.function
def main(x: R.Tensor((4,), "float32")):
    return R.exp(x)
""")
    assert find_stream_regions(linearize("main", main)) == []
