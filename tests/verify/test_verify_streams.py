# SPDX-License-Identifier: Apache-2.0
"""The check of streams: what two of them use is ordered by waits, and all are joined at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tests.transform.script_forms import alloc
from tests.verify.test_verify_requests import COUNT, Program
from tvm_ipc.errors import TransformError
from tvm_ipc.packed_functions import IPC_MEMORY
from tvm_ipc.transform import VerifyCrossRankSafety, verify_cross_rank_safety
from tvm_ipc.verify.hazard_types_and_messages import HazardKind

UNORDERED, REUSED, STREAM = HazardKind.UNORDERED, HazardKind.REUSED, HazardKind.STREAM


class Streams(Program):
    """A lowered function, statement by statement, that uses several streams."""

    def on(self, stream: int) -> None:
        self.packed("tvm_ipc.set_stream", stream)

    def after(self, stream: int) -> None:
        self.packed("tvm_ipc.wait_stream", stream)

    def kill(self, tensor: Any) -> None:
        self.builder.emit(relax.Call(tvm.ir.Op.get("relax.memory.kill_tensor"), [tensor]))


def check(body: Callable[[Streams], Any]) -> list[HazardKind]:
    hazards = Streams().hazards(body)
    assert not any(hazard.unknown for hazard in hazards)
    return [hazard.kind for hazard in hazards]


def side_by_side(p: Streams, leave_out: str = "") -> Any:
    """Two copies on two streams, and a third one after both."""

    def do(name: str, call: Callable[[int], None], stream: int) -> None:
        if name != leave_out:
            call(stream)

    a, b, c = p.tensor(), p.tensor(), p.tensor()
    p.copy(p.x, a)
    do("on 1", p.on, 1)
    do("fork", p.after, 0)
    p.copy(a, b)
    do("on 0", p.on, 0)
    p.copy(a, c)
    do("join", p.after, 1)
    p.copy(b, c)
    return c


def test_two_streams_with_a_fork_and_a_join_are_safe() -> None:
    assert check(side_by_side) == []


@pytest.mark.parametrize(
    ("leave_out", "found"),
    [
        ("fork", [UNORDERED]),  # stream 1 reads a
        ("join", [UNORDERED, STREAM]),  # stream 0 reads b
        ("on 1", []),  # all of it is on stream 0
        ("on 0", [STREAM]),
    ],
)
def test_each_call_is_needed(leave_out: str, found: list[HazardKind]) -> None:
    assert check(lambda p: side_by_side(p, leave_out)) == found


def test_messages() -> None:
    def body(p: Streams) -> Any:
        a, b = p.tensor(), p.tensor()
        p.copy(p.x, a)
        p.on(1)
        p.after(0)
        p.copy(a, b)
        p.on(0)
        p.copy(b, a)
        return a

    assert sorted(map(str, Streams().hazards(body))) == [
        "function 'main', `gv7 = tvm_ipc.copy(gv1, gv)`: gv1 is used on two streams in no order; "
        "`gv5 = tvm_ipc.copy(gv, gv1)` uses it on stream 1, and this call on stream 0; call "
        "tvm_ipc.wait_stream(1) on this stream first",
        "function 'main', `return = gv`: stream 1 is current or running where it must not be; call "
        "tvm_ipc.wait_stream(1) on stream 0 first",
    ]


def test_reads_on_two_streams_need_no_order() -> None:
    def body(p: Streams) -> Any:
        a, b = p.tensor(), p.tensor()
        p.on(1)
        p.after(0)
        p.copy(p.x, a)
        p.on(0)
        p.copy(p.x, b)
        p.after(1)
        return a

    assert check(body) == []


def test_what_the_caller_wrote_is_on_stream_0() -> None:
    def body(p: Streams) -> Any:
        a = p.tensor()
        p.on(1)
        p.copy(p.x, a)
        p.on(0)
        p.after(1)
        return a

    (hazard,) = Streams().hazards(body)
    assert hazard.kind is UNORDERED
    assert hazard.related.startswith("the caller uses it on stream 0, and this call on stream 1")


def test_order_goes_from_stream_to_stream() -> None:
    def body(p: Streams, last: int = 2) -> Any:
        a, b = p.tensor(), p.tensor()
        p.on(1)
        p.after(0)
        p.copy(p.x, a)
        p.on(2)
        p.after(1)
        p.copy(a, b)
        p.on(0)
        p.after(last)
        return a  # stream 2 has waited for stream 1

    assert check(body) == []
    assert UNORDERED not in check(lambda p: body(p, 1))
    assert check(lambda p: body(p, 1)) == [STREAM]


def test_a_wait_orders_nothing_that_comes_later() -> None:
    def body(p: Streams) -> Any:
        a = p.tensor()
        p.on(1)
        p.after(0)
        p.on(0)
        p.after(1)
        p.on(1)
        p.copy(p.x, a)
        p.on(0)
        return a

    assert check(body) == [UNORDERED, STREAM]


# ---- requests -------------------------------------------------------------------------------


def pipelined(p: Streams, streams: int = 2, slot_of: Callable[[int], int] = lambda k: k % 2) -> Any:
    """Sums into two slots, which are copied to the result on the stream of the slot."""
    results = [p.tensor() for _ in range(4)]
    slots = [p.tensor(), p.tensor()]
    for k in range(1, streams):
        p.on(k)
        p.after(0)
    works = []
    for k, result in enumerate(results):
        for ahead in range(len(works), min(k + 2, 4)):
            p.on(slot_of(ahead) % streams)
            works.append(p.post(p.x, slots[ahead % 2]))
        p.on(slot_of(k) % streams)
        p.wait(works[k])
        p.copy(slots[k % 2], result)
    p.on(0)
    for k in range(1, streams):
        p.after(k)
    return relax.Tuple(results)


@pytest.mark.parametrize("streams", [1, 2])
def test_chunks_on_their_streams_are_safe(streams: int) -> None:
    assert check(lambda p: pipelined(p, streams)) == []


def test_a_slot_on_another_stream_is_not() -> None:
    """A request is started while another stream may read the slot that it receives into."""
    found = Streams().hazards(lambda p: pipelined(p, 2, lambda k: k % 2 if k < 2 else (k + 1) % 2))
    assert {hazard.kind for hazard in found} == {UNORDERED}
    assert any("this call on the stream of requests" in hazard.related for hazard in found)


def test_a_wait_for_a_request_orders_one_stream() -> None:
    def body(p: Streams) -> Any:
        a, b = p.tensor(), p.tensor()
        work = p.post(p.x, a)
        p.on(1)
        p.after(0)
        p.wait(work)
        p.on(0)
        p.copy(a, b)
        p.after(1)
        return b

    (hazard,) = Streams().hazards(body)
    assert hazard.kind is UNORDERED
    assert hazard.related.endswith("wait for the request on this stream first")


# ---- other ranks ----------------------------------------------------------------------------


@pytest.mark.parametrize("waits", [False, True])
def test_a_view_of_a_peer_is_read_on_another_stream(waits: bool) -> None:
    """The stream on which a program looks at a peer's tensor waits for the copy of it."""

    def body(p: Streams) -> Any:
        a, b = p.tensor(IPC_MEMORY), p.tensor()
        p.copy(p.x, a)
        exposed = p.packed("tvm_ipc.expose", a, 0, ty=relax.AnyType())
        p.on(1)
        p.after(0)
        shape = relax.ShapeExpr([COUNT])
        theirs = p.packed("tvm_ipc.peer_view", exposed, 1, shape, ty=a.ty)
        p.on(0)
        if waits:
            p.after(1)
        p.copy(theirs, b)
        if not waits:
            p.after(1)
        p.packed("tvm_ipc.release", 0, exposed)
        return b

    assert check(body) == ([] if waits else [UNORDERED])


@pytest.mark.parametrize("waits", [False, True])
def test_a_barrier_is_on_a_stream(waits: bool) -> None:
    """Peers have read an input when the stream of a later barrier goes on."""

    def body(p: Streams) -> Any:
        a, b, c = p.tensor(IPC_MEMORY), p.tensor(IPC_MEMORY), p.tensor()
        p.copy(p.x, a)
        p.packed("tvm_ipc.allreduce", a, 0, 0, 3, 1, c)  # without its exit barrier
        p.on(1)
        p.after(0)
        p.copy(p.x, b)
        p.packed("tvm_ipc.allreduce", b, 0, 0, 3, 0, c)
        p.on(0)
        if waits:
            p.after(1)
        p.copy(p.x, a)
        if not waits:
            p.after(1)
        return a

    assert check(body) == ([] if waits else [UNORDERED])


# ---- allocations ----------------------------------------------------------------------------


def reuse(p: Streams, *, kill: bool, same: bool = False) -> Any:
    """A tensor is freed while stream 1 uses it, and another one is allocated for stream 0."""
    c = p.tensor()
    p.on(1)
    p.after(0)
    a = p.tensor()
    p.copy(p.x, a)
    p.copy(a, c)
    if not same:
        p.on(0)
    b = p.tensor()
    p.copy(p.x, b)
    p.on(0)
    p.after(1)
    if kill:
        p.kill(a)
    return relax.Tuple([b, c])


def test_freed_memory_is_not_used_on_another_stream() -> None:
    (hazard,) = Streams().hazards(lambda p: reuse(p, kill=False))
    assert hazard.kind is REUSED
    assert hazard.memory == "gv7"
    assert "uses gv3 on stream 1, and its memory is freed in between; call " in hazard.related
    assert hazard.related.endswith("on this stream first, or keep gv3 until then")
    assert check(lambda p: reuse(p, kill=True)) == []
    assert check(lambda p: reuse(p, kill=False, same=True)) == []


@I.ir_module
class WithWorkspace:
    """Kernels with memory of their own, which they get from the same pool."""

    @T.prim_func(private=True)
    def twice(a: T.Buffer((4,), "float32"), b: T.Buffer((4,), "float32")):
        c = T.alloc_buffer((4,))
        for i in range(4):
            c[i] = a[i] * T.float32(2)
        for i in range(4):
            b[i] = c[i]

    @R.function(pure=False)
    def main(x: R.Tensor((4,), "float32")):
        cls = WithWorkspace
        y = alloc(4)
        z = alloc(4)
        R.call_packed("tvm_ipc.set_stream", 1, ty_args=(R.Tuple,))
        R.call_packed("tvm_ipc.wait_stream", 0, ty_args=(R.Tuple,))
        _ = cls.twice(x, y)
        R.call_packed("tvm_ipc.set_stream", 0, ty_args=(R.Tuple,))
        _1 = cls.twice(x, z)
        R.call_packed("tvm_ipc.wait_stream", 1, ty_args=(R.Tuple,))
        return (y, z)


def test_kernels_with_a_workspace_do_not_run_side_by_side() -> None:
    with pytest.raises(TransformError, match="the memory that twice allocates is in memory that a"):
        VerifyCrossRankSafety()(WithWorkspace)


# ---- branches and functions -----------------------------------------------------------------


@I.ir_module
class Branches:
    @R.function(pure=False)
    def main(x: R.Tensor((4,), "float32"), c: R.Tensor((), "bool")):
        if c:
            R.call_packed("tvm_ipc.set_stream", 1, ty_args=(R.Tuple,))
            y = x
        else:
            y = x
        R.call_packed("tvm_ipc.set_stream", 0, ty_args=(R.Tuple,))
        return y


def test_branches_end_on_the_same_stream() -> None:
    (hazard,) = verify_cross_rank_safety(Branches)
    assert hazard.kind is STREAM
    assert hazard.related == "both branches must end on the same stream"


@I.ir_module
class Functions:
    """`join` uses several streams, and is called twice."""

    @R.function(private=True, pure=False)
    def join(x: R.Tensor((4,), "float32"), y: R.Tensor((4,), "float32")):
        R.call_packed("tvm_ipc.set_stream", 1, ty_args=(R.Tuple,))
        R.call_packed("tvm_ipc.wait_stream", 0, ty_args=(R.Tuple,))
        R.call_packed("tvm_ipc.copy", x, y, ty_args=(R.Tuple,))
        R.call_packed("tvm_ipc.set_stream", 0, ty_args=(R.Tuple,))
        R.call_packed("tvm_ipc.wait_stream", 1, ty_args=(R.Tuple,))
        return R.tuple()

    @R.function(pure=False)
    def main(x: R.Tensor((4,), "float32")):
        cls = Functions
        y = alloc(4)
        _ = cls.join(x, y)
        R.call_packed("tvm_ipc.set_stream", 1, ty_args=(R.Tuple,))
        R.call_packed("tvm_ipc.wait_stream", 0, ty_args=(R.Tuple,))
        _1 = cls.join(x, y)
        R.call_packed("tvm_ipc.set_stream", 0, ty_args=(R.Tuple,))
        R.call_packed("tvm_ipc.wait_stream", 1, ty_args=(R.Tuple,))
        return y


def test_a_function_with_streams_is_called_on_stream_0() -> None:
    (hazard,) = verify_cross_rank_safety(Functions)
    assert (hazard.kind, hazard.memory) == (STREAM, "stream 1")
    assert hazard.related == "join uses several streams, so it must be called on stream 0"


def test_disjoint_slices_are_no_hazard() -> None:
    def body(p: Streams, second: int = COUNT // 2) -> Any:
        out = p.tensor()
        ty = relax.TensorType((COUNT // 2,), "float32")

        def part(start: int) -> Any:
            shape = relax.ShapeExpr([COUNT // 2])
            return p.packed("tvm_ipc.own_slice", out, 0, 0, 0, 4 * start, shape, ty=ty)

        p.on(1)
        p.after(0)
        p.copy(p.x, part(0))
        p.on(0)
        p.copy(p.x, part(second))
        p.after(1)
        return out

    assert check(body) == []
    assert check(lambda p: body(p, COUNT // 4)) == [UNORDERED]
