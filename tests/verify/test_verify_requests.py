# SPDX-License-Identifier: Apache-2.0
"""The check of works: what they use is left alone until somebody has waited, on every path."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

import tvm_ipc
from tvm_ipc.errors import TransformError
from tvm_ipc.packed_functions import IPC_MEMORY
from tvm_ipc.transform import (
    Hazard,
    VerifyCrossRankSafety,
    collect_report,
    verify_cross_rank_safety,
)
from tvm_ipc.verify.hazard_types_and_messages import HazardKind

COUNT = 4096
UNFINISHED, BUSY = HazardKind.UNFINISHED, HazardKind.BUSY
NEVER_WAITED, WRITE = HazardKind.NEVER_WAITED, HazardKind.WRITE


class Program:
    """Builds a lowered function, statement by statement."""

    def __init__(self) -> None:
        self.builder = relax.BlockBuilder()
        self.x = relax.Var("x", relax.TensorType((COUNT,), "float32"))

    def tensor(self, scope: str = "global") -> Any:
        shape = relax.ShapeExpr([COUNT])
        return self.builder.emit(relax.op.builtin.alloc_tensor(shape, "float32", 0, scope))

    def packed(self, name: str, *operands: Any, ty: Any = None) -> Any:
        arguments = [relax.prim_value(o) if isinstance(o, int) else o for o in operands]
        types = [relax.TupleType([]) if ty is None else ty]
        return self.builder.emit(relax.Call(relax.ExternFunc(name), arguments, ty_args=types))

    def copy(self, source: Any, target: Any) -> None:
        self.packed("tvm_ipc.copy", source, target)

    def post(self, send: Any, recv: Any, flags: int = 0, name: str = "tvm_ipc.allreduce") -> Any:
        text = tvm.ir.StringImm(name)
        return self.packed("tvm_ipc.start", text, send, 0, 0, 3, flags, recv, ty=relax.AnyType())

    def wait(self, work: Any) -> None:
        self.packed("tvm_ipc.wait", work)

    def hazards(self, body: Callable[[Program], Any]) -> list[Hazard]:
        with self.builder.function("main", [self.x], pure=False):
            self.builder.emit_func_output(body(self))
        return verify_cross_rank_safety(self.builder.get())


def check(body: Callable[[Program], Any]) -> list[tuple[HazardKind, bool]]:
    return [(hazard.kind, hazard.unknown) for hazard in Program().hazards(body)]


def pipelined(p: Program, leave_out: int = -1) -> Any:
    """Two works at once, of two buffers; with one of four waits left out."""
    waits = itertools.count()

    def wait(work: Any) -> None:
        if next(waits) != leave_out:
            p.wait(work)

    send = [p.tensor(IPC_MEMORY), p.tensor(IPC_MEMORY)]
    recv = [p.tensor(), p.tensor()]
    out = p.tensor()
    works: list[Any] = [None, None]
    for k in range(4):
        if works[k % 2] is not None:
            wait(works[k % 2])
            p.copy(recv[k % 2], out)
        p.copy(p.x, send[k % 2])
        works[k % 2] = p.post(send[k % 2], recv[k % 2])
    for k in range(2):
        wait(works[k])
        p.copy(recv[k], out)
    return out


def test_a_pipeline_is_safe() -> None:
    assert check(pipelined) == []


@pytest.mark.parametrize("leave_out", range(4))
def test_each_wait_is_missed(leave_out: int) -> None:
    found = {kind for kind, unknown in check(lambda p: pipelined(p, leave_out)) if not unknown}
    assert UNFINISHED in found
    assert NEVER_WAITED in found
    assert (BUSY in found) == (leave_out < 2), "the input is written again"


def test_a_result_is_read_too_early() -> None:
    def body(p: Program) -> Any:
        send, recv, out = p.tensor(), p.tensor(), p.tensor()
        p.copy(p.x, send)
        work = p.post(send, recv)
        p.copy(recv, out)
        p.wait(work)
        return out

    (hazard,) = Program().hazards(body)
    assert hazard.kind is UNFINISHED
    assert not hazard.unknown
    assert "is read before the request that writes it has ended; it was started in `" in str(hazard)
    assert "wait for it first, on every path" in str(hazard)


def test_an_input_is_written_too_early() -> None:
    def body(p: Program) -> Any:
        send, recv = p.tensor(), p.tensor()
        p.copy(p.x, send)
        work = p.post(send, recv)
        p.copy(p.x, send)
        p.wait(work)
        return recv

    assert check(body) == [(BUSY, False)]


@pytest.mark.parametrize("early", [False, True])
def test_another_shape_of_a_result_is_no_look_at_it(early: bool) -> None:
    def body(p: Program) -> Any:
        send, recv, out = p.tensor(), p.tensor(), p.tensor()
        p.copy(p.x, send)
        work = p.post(send, recv)
        seen = p.builder.emit(relax.op.reshape(recv, (COUNT // 2, 2)))
        if early:
            p.copy(seen, out)
        p.wait(work)
        p.copy(seen, out)
        return out

    assert check(body) == ([(UNFINISHED, False)] if early else [])


def test_an_input_may_be_read_meanwhile() -> None:
    def body(p: Program) -> Any:
        send, recv, out = p.tensor(), p.tensor(), p.tensor()
        p.copy(p.x, send)
        work = p.post(send, recv)
        p.copy(send, out)
        p.wait(work)
        return recv

    assert check(body) == []


def test_works_are_done_in_their_order() -> None:
    """So one may read what the one before it writes."""

    def body(p: Program) -> Any:
        send, middle, recv = p.tensor(), p.tensor(), p.tensor()
        p.copy(p.x, send)
        first = p.post(send, middle)
        second = p.post(middle, recv)
        p.wait(second)
        p.wait(first)
        return recv

    assert check(body) == []


def alone(body: Callable[[Program], Any]) -> list[tuple[str, str]]:
    """What is noted of a program in which no overlap is to be had."""
    program = Program()
    with program.builder.function("main", [program.x], pure=False):
        program.builder.emit_func_output(body(program))
    module = program.builder.get()
    with collect_report() as report:
        assert VerifyCrossRankSafety()(module).same_as(module)
    return [(one.verdict, one.reason) for one in report.decisions]


def waited_for(between: Callable[[Program, Any, Any], Any]) -> Callable[[Program], Any]:
    def body(p: Program) -> Any:
        send, recv, other = p.tensor(), p.tensor(), p.tensor()
        p.copy(p.x, send)
        work = p.post(send, recv)
        between(p, send, other)
        p.wait(work)
        p.copy(recv, other)
        return other

    return body


def test_a_work_that_is_waited_for_at_once() -> None:
    (found,) = alone(waited_for(lambda p, send, other: None))
    assert found[0] == "overlap lost"
    assert "= tvm_ipc.wait(gv4)` waits for it, and nothing is computed since `gv4 = " in found[1]
    # Views and memory take no time.
    assert len(alone(waited_for(lambda p, send, other: view(p, send, 0, 8)))) == 1
    assert len(alone(waited_for(lambda p, send, other: p.tensor()))) == 1


def test_a_work_beside_which_something_is_done() -> None:
    assert alone(waited_for(lambda p, send, other: p.copy(send, other))) == []
    assert alone(waited_for(lambda p, send, other: p.packed("unknown", other))) == []
    assert alone(pipelined) == []

    def two(p: Program) -> Any:
        first, second = p.tensor(), p.tensor()
        works = [p.post(p.x, first), p.post(p.x, second)]
        p.wait(works[0])  # the other one goes on
        p.copy(first, p.tensor())
        p.wait(works[1])
        return second

    assert alone(two) == []


def view(p: Program, tensor: Any, begin: int, count: int) -> Any:
    ty = relax.TensorType((count,), "float32")
    return p.packed("tvm_ipc.view", tensor, 4 * begin, relax.ShapeExpr([count]), ty=ty)


@pytest.mark.parametrize("second", [0, COUNT // 4, COUNT // 2])
def test_parts_of_a_tensor_are_told_apart(second: int) -> None:
    """A work writes the first half, and the program the part from `second` on."""

    def body(p: Program) -> Any:
        half = COUNT // 2
        send, out = p.tensor(), p.tensor()
        p.copy(p.x, send)
        work = p.post(view(p, send, 0, half), view(p, out, 0, half))
        p.copy(view(p, p.x, 0, half // 2), view(p, out, second, half // 2))
        p.wait(work)
        p.copy(view(p, p.x, half, half // 2), view(p, out, half, half // 2))
        return out

    assert check(body) == ([] if second == COUNT // 2 else [(BUSY, False)])


def test_a_view_beyond_the_end() -> None:
    def body(p: Program) -> Any:
        return view(p, p.tensor(), COUNT // 2, COUNT // 2 + 1)

    (hazard,) = Program().hazards(body)
    assert hazard.kind is HazardKind.BOUNDS
    assert f"it ends at byte {4 * COUNT + 4} of {4 * COUNT}" in str(hazard)


def test_what_is_written_through_views_is_not_lost() -> None:
    def body(p: Program) -> Any:
        out, other = p.tensor(), p.tensor()
        p.copy(p.x, out)
        p.copy(view(p, p.x, 0, 8), view(p, out, 8, 8))
        p.copy(view(p, p.x, 0, 8), view(p, out, 0, 8))
        p.copy(out, other)
        return other

    assert check(body) == []


def test_no_wait_at_all() -> None:
    def body(p: Program) -> Any:
        send, recv = p.tensor(), p.tensor()
        p.copy(p.x, send)
        p.post(send, recv)
        return p.x

    (hazard,) = Program().hazards(body)
    assert (hazard.kind, hazard.unknown) == (NEVER_WAITED, False)
    assert "the request lv1 is not waited for" in str(hazard) or "the request" in hazard.memory


def test_a_work_that_is_returned_may_be_waited_for_elsewhere() -> None:
    def body(p: Program) -> Any:
        send, recv = p.tensor(), p.tensor()
        p.copy(p.x, send)
        return p.post(send, recv)

    assert check(body) == [(NEVER_WAITED, True)]


def test_a_work_in_a_tuple() -> None:
    def body(p: Program) -> Any:
        send, recv = p.tensor(), p.tensor()
        p.copy(p.x, send)
        pair = p.builder.emit(relax.Tuple([p.post(send, recv), p.x]))
        p.wait(p.builder.emit(relax.TupleGetItem(pair, 0)))
        return recv

    assert check(body) == []


def test_a_work_without_its_barrier_leaves_peers_reading() -> None:
    def body(p: Program, meets: bool) -> Any:
        send, recv = p.tensor(IPC_MEMORY), p.tensor()
        p.copy(p.x, send)
        p.wait(p.post(send, recv, flags=1))
        if meets:
            p.packed("runtime.disco.allgather", p.tensor(), False, p.tensor())
        p.copy(p.x, send)
        return recv

    assert WRITE in {kind for kind, _ in check(lambda p: body(p, False))}
    assert check(lambda p: body(p, True)) == []


def test_a_function_that_is_not_known_uses_all_that_it_is_given() -> None:
    def body(p: Program) -> Any:
        send, recv, out = p.tensor(), p.tensor(), p.tensor()
        p.copy(p.x, send)
        work = p.post(send, recv, name="mine.exchange")
        p.copy(send, out)
        p.wait(work)
        return recv

    assert check(body) == [(UNFINISHED, False)]


@I.ir_module
class Branches:
    """A work of one branch or the other is waited for behind them."""

    @R.function(pure=False)
    def main(x: R.Tensor((4,), "float32"), c: R.Tensor((), "bool")) -> R.Tensor((4,), "float32"):
        y = R.builtin.alloc_tensor(R.shape([4]), R.dtype("float32"), 0, "global")
        if c:
            w: R.Any = R.call_packed(
                "tvm_ipc.start", "tvm_ipc.allreduce", x, 0, 0, 3, 0, y, ty_args=(R.Any,)
            )
        else:
            w: R.Any = R.call_packed(
                "tvm_ipc.start", "tvm_ipc.allreduce", x, 4, 0, 3, 0, y, ty_args=(R.Any,)
            )
        _ = R.call_packed("tvm_ipc.wait", w, ty_args=(R.Tuple,))
        return y


@I.ir_module
class OneBranch:
    """It is waited for on one path alone."""

    @R.function(pure=False)
    def main(x: R.Tensor((4,), "float32"), c: R.Tensor((), "bool")) -> R.Tensor((4,), "float32"):
        y = R.builtin.alloc_tensor(R.shape([4]), R.dtype("float32"), 0, "global")
        w: R.Any = R.call_packed(
            "tvm_ipc.start", "tvm_ipc.allreduce", x, 0, 0, 3, 0, y, ty_args=(R.Any,)
        )
        if c:
            R.call_packed("tvm_ipc.wait", w, ty_args=(R.Tuple,))
        else:
            R.tuple()
        return y


@I.ir_module
class Callees:
    """Works that functions of the module are given, or return."""

    @R.function(private=True, pure=False)
    def finish(w: R.Any, y: R.Tensor((4,), "float32"), z: R.Tensor((4,), "float32")):
        _ = R.comm.wait(w)
        R.call_packed("tvm_ipc.copy", y, z, ty_args=(R.Tuple,))
        return R.tuple()

    @R.function(private=True, pure=False)
    def look(y: R.Tensor((4,), "float32"), z: R.Tensor((4,), "float32")):
        R.call_packed("tvm_ipc.copy", y, z, ty_args=(R.Tuple,))
        return R.tuple()

    @R.function(private=True, pure=False)
    def forget(w: R.Any) -> R.Tuple:
        return R.tuple()

    @R.function(private=True, pure=False)
    def start(x: R.Tensor((4,), "float32"), y: R.Tensor((4,), "float32")) -> R.Any:
        w = R.comm.start(R.comm.allreduce(x), y)
        return w

    @R.function(pure=False)
    def waits(x: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
        cls = Callees
        z = R.builtin.alloc_tensor(R.shape([4]), R.dtype("float32"), 0, "global")
        y = R.builtin.alloc_tensor(R.shape([4]), R.dtype("float32"), 0, "global")
        w = R.comm.start(R.comm.allreduce(x), y)
        _ = cls.finish(w, y, z)
        return z

    @R.function(pure=False)
    def reads(x: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
        cls = Callees
        z = R.builtin.alloc_tensor(R.shape([4]), R.dtype("float32"), 0, "global")
        y = R.builtin.alloc_tensor(R.shape([4]), R.dtype("float32"), 0, "global")
        w = R.comm.start(R.comm.allreduce(x), y)
        _ = cls.look(y, z)
        _1 = R.comm.wait(w)
        return z

    @R.function(pure=False)
    def forgets(x: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
        cls = Callees
        y = R.builtin.alloc_tensor(R.shape([4]), R.dtype("float32"), 0, "global")
        w = R.comm.start(R.comm.allreduce(x), y)
        _ = cls.forget(w)
        return x

    @R.function(pure=False)
    def returned(x: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
        cls = Callees
        z = R.builtin.alloc_tensor(R.shape([4]), R.dtype("float32"), 0, "global")
        y = R.builtin.alloc_tensor(R.shape([4]), R.dtype("float32"), 0, "global")
        w: R.Any = cls.start(x, y)
        R.call_packed("tvm_ipc.copy", y, z, ty_args=(R.Tuple,))
        _1 = R.comm.wait(w)
        return z


@pytest.mark.parametrize(
    ("caller", "callee", "found"),
    [
        ("waits", "finish", []),
        ("reads", "look", [(UNFINISHED, False)]),
        ("forgets", "forget", [(NEVER_WAITED, False)]),
        ("returned", "start", [(UNFINISHED, False)]),
    ],
)
def test_works_in_functions_that_are_called(
    caller: str, callee: str, found: list[tuple[HazardKind, bool]]
) -> None:
    module = tvm.IRModule({callee: Callees[callee], caller: Callees[caller]})
    hazards = verify_cross_rank_safety(module)
    assert [(hazard.kind, hazard.unknown) for hazard in hazards] == found
    if found:
        with pytest.raises(TransformError, match="wait for it first, on every path"):
            VerifyCrossRankSafety()(module)


def test_works_of_branches() -> None:
    # Nobody says that ranks have the same conditions.
    found = [(hazard.kind, hazard.unknown) for hazard in verify_cross_rank_safety(Branches)]
    assert found == [(HazardKind.BRANCHES, True)]
    found = {hazard.kind for hazard in verify_cross_rank_safety(OneBranch)}
    assert found == {UNFINISHED, NEVER_WAITED}


def test_the_pipeline_refuses_a_program_that_does_not_wait() -> None:
    @I.ir_module
    class Early:
        @R.function(pure=False)
        def main(x: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
            y = R.builtin.alloc_tensor(R.shape([4]), R.dtype("float32"), 0, "global")
            w: R.Any = R.call_packed(
                "tvm_ipc.start", "tvm_ipc.allreduce", x, 0, 0, 3, 0, y, ty_args=(R.Any,)
            )
            z = R.add(y, y)
            _ = R.call_packed("tvm_ipc.wait", w, ty_args=(R.Tuple,))
            return z

    with pytest.raises(TransformError, match="read before the request that writes it has ended"):
        tvm_ipc.get_pipeline("llvm", 2)(Early)
