# SPDX-License-Identifier: Apache-2.0
"""AsyncCollectives: what goes on beside a program, what does not, and that results are right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

import tvm_ipc
from tests.transform.script_forms import alloc
from tvm_ipc import comm
from tvm_ipc.analysis.collective_calls import match_collective, match_start
from tvm_ipc.analysis.walk_and_rewrite_bindings import calls
from tvm_ipc.packed_functions import IPC_MEMORY, AllReduceStrategy
from tvm_ipc.transform import (
    AsyncCollectives,
    IPCAllReduceRewrite,
    collect_report,
    verify_cross_rank_safety,
)

COUNT = 4096


class Program:
    """Builds a function in destination-passing style."""

    def __init__(self) -> None:
        self.builder = relax.BlockBuilder()
        self.x = relax.Var("x", relax.TensorType((COUNT,), "float32"))

    def tensor(self, scope: str = "global") -> Any:
        shape = relax.ShapeExpr([COUNT])
        return self.builder.emit(relax.op.builtin.alloc_tensor(shape, "float32", 0, scope))

    def packed(self, name: str, *operands: Any) -> None:
        types = [relax.TupleType([])]
        self.builder.emit(relax.Call(relax.ExternFunc(name), list(operands), ty_args=types))

    def copy(self, source: Any, target: Any) -> Any:
        self.packed("tvm_ipc.copy", source, target)
        return target

    def sum(self, send: Any, recv: Any) -> Any:
        in_group = relax.prim_value(False)
        self.packed("runtime.disco.allreduce", send, relax.ShapeExpr([0]), in_group, recv)
        return recv


def posted(body: Any) -> tuple[list[str], list[tuple[str, str]]]:
    """The packed functions that are called, in their order, and what is reported."""
    program = Program()
    with program.builder.function("main", [program.x], pure=False):
        program.builder.emit_func_output(body(program))
    module = program.builder.get()
    with collect_report() as report:
        after = AsyncCollectives()(module)
    relax.analysis.well_formed(after)  # raises
    assert [h for h in verify_cross_rank_safety(after) if not h.unknown] == []
    names = [
        str(call.op.global_symbol).rpartition(".")[2]
        for call in calls(after["main"])
        if isinstance(call.op, relax.ExternFunc)
    ]
    return names, [(one.verdict, one.reason) for one in report.decisions]


def test_what_does_not_need_it_goes_on_meanwhile() -> None:
    def body(p: Program) -> Any:
        send, recv, other = p.copy(p.x, p.tensor()), p.tensor(), p.tensor()
        p.sum(send, recv)
        p.copy(p.x, other)
        p.copy(p.x, other)
        return p.copy(recv, p.tensor())

    names, decisions = posted(body)
    assert names == ["copy", "start", "copy", "copy", "wait", "copy"]
    assert decisions == [("asynchronous", "it overlaps with 2 calls")]


def test_a_result_that_is_used_at_once() -> None:
    def body(p: Program) -> Any:
        send, recv = p.copy(p.x, p.tensor()), p.tensor()
        p.sum(send, recv)
        return p.copy(recv, p.tensor())

    assert posted(body) == (
        ["copy", "allreduce", "copy"],
        [("skipped", "the next call needs it")],
    )


def test_an_input_may_be_read_but_not_written_meanwhile() -> None:
    def body(p: Program) -> Any:
        send, recv = p.copy(p.x, p.tensor()), p.tensor()
        p.sum(send, recv)
        p.copy(send, p.tensor())
        p.copy(p.x, send)
        return recv

    assert posted(body)[0] == ["copy", "start", "copy", "wait", "copy"]


def test_calls_keep_their_order() -> None:
    """Also what may meet other ranks in a way that is not known here."""

    def body(p: Program) -> Any:
        send, recv, other = p.copy(p.x, p.tensor()), p.tensor(), p.tensor()
        p.packed("somebody.sends", p.x)
        p.sum(send, recv)
        p.packed("somebody.receives", other)
        p.packed("somebody.computes", other)
        p.sum(other, p.copy(recv, p.tensor()))
        return other

    names, _ = posted(body)
    assert names == ["copy", "sends", "start", "receives", "computes", "wait", "copy", "allreduce"]


def test_a_sum_with_its_norm() -> None:
    def body(p: Program) -> Any:
        send, added, norm = p.copy(p.x, p.tensor()), p.tensor(), p.tensor()
        numbers = [relax.prim_value(number) for number in (1e-5, 0, AllReduceStrategy.DEFAULT, 0)]
        p.packed("tvm_ipc.allreduce_rms_norm", send, p.x, p.x, *numbers, added, norm)
        p.copy(send, p.tensor())
        p.copy(norm, p.tensor())
        return added

    names, decisions = posted(body)
    assert names == ["copy", "start", "copy", "wait", "copy"]
    assert decisions == [("asynchronous", "it overlaps with 1 call")]


def test_a_result_that_is_returned_is_waited_for() -> None:
    def body(p: Program) -> Any:
        send, recv = p.copy(p.x, p.tensor()), p.tensor()
        p.sum(send, recv)
        p.copy(p.x, p.tensor())
        return recv

    assert posted(body)[0] == ["copy", "start", "copy", "wait"]


def test_two_at_once() -> None:
    def body(p: Program) -> Any:
        send, first, second = p.copy(p.x, p.tensor()), p.tensor(), p.tensor()
        other = p.copy(p.x, p.tensor())
        p.sum(send, first)
        p.sum(other, second)
        p.copy(p.x, p.tensor())
        p.copy(second, p.tensor())
        return p.copy(first, p.tensor())

    names = posted(body)[0]
    assert names == ["copy", "copy", "start", "start", "copy", "wait", "copy", "wait", "copy"]


def test_another_name_of_the_result() -> None:
    def body(p: Program) -> Any:
        send, recv = p.copy(p.x, p.tensor()), p.tensor()
        same = p.builder.emit(relax.op.reshape(recv, (COUNT // 2, 2)))
        p.sum(send, recv)
        p.copy(p.x, p.tensor())
        p.copy(same, p.tensor())
        p.copy(p.x, p.tensor())
        return recv

    assert posted(body)[0] == ["copy", "start", "copy", "wait", "copy", "copy"]


def test_a_view_of_the_result_is_not_a_use_of_it() -> None:
    """An all-gather of rows is followed by one: (ranks, rows, ...) becomes (ranks * rows, ...)."""

    def body(p: Program) -> Any:
        recv = p.tensor()
        p.sum(p.x, recv)
        same = p.builder.emit(relax.op.reshape(recv, (COUNT // 2, 2)))
        ty = relax.TensorType((COUNT // 2,), "float32")
        half = p.builder.emit(comm.view(recv, COUNT // 2, [COUNT // 2]))
        assert half.ty == ty
        p.copy(p.x, p.tensor())
        p.copy(half, p.builder.emit(comm.view(p.tensor(), 0, [COUNT // 2])))
        return same

    assert posted(body)[0] == ["start", "view", "copy", "view", "wait", "copy"]


def test_a_function_that_is_not_known_may_write_the_input() -> None:
    def body(p: Program) -> Any:
        send, recv = p.copy(p.x, p.tensor()), p.tensor()
        p.sum(send, recv)
        p.copy(p.x, p.tensor())
        p.packed("somebody.else", send)
        return recv

    assert posted(body)[0] == ["copy", "start", "copy", "wait", "else"]


def test_an_output_that_a_local_function_captures() -> None:
    @I.ir_module
    class Captured:
        @R.function(pure=False)
        def main(x: R.Tensor((8,), "float32")) -> R.Tensor((8,), "float32"):
            recv = alloc(8)
            other = alloc(8)

            @R.function(pure=False)
            def look(y: R.Tensor((8,), "float32")) -> R.Tensor((8,), "float32"):
                R.call_packed("tvm_ipc.copy", recv, y, ty_args=(R.Tuple,))
                return y

            disco = "runtime.disco.allreduce"
            R.call_packed(disco, x, R.shape([0]), False, recv, ty_args=(R.Tuple,))
            R.call_packed("tvm_ipc.copy", x, x, ty_args=(R.Tuple,))
            z: R.Tensor((8,), "float32") = look(other)
            return z

    with collect_report() as report:
        tvm.ir.assert_structural_equal(AsyncCollectives()(Captured), Captured)
    reasons = [one.reason for one in report.decisions if "allreduce" in one.subject]
    assert reasons == ["its output may be used at any time: a local function captures it"]


def test_without_an_exit_barrier() -> None:
    """The sum after it is what says that peers have read its input; as a work it would not."""

    def body(p: Program) -> Any:
        send, recv = p.copy(p.x, p.tensor(IPC_MEMORY)), p.tensor()
        numbers = [relax.prim_value(number) for number in (0, 0, 3, 1)]
        p.packed("tvm_ipc.allreduce", send, *numbers, recv)
        p.sum(p.tensor(), p.tensor())
        p.copy(p.x, p.tensor())
        return p.copy(send, p.tensor())

    names, decisions = posted(body)
    assert "post" not in names
    reason = "inputs without an exit barrier rely on later barriers of the program"
    assert decisions == [("skipped", reason)] * 2


def test_an_output_of_the_caller() -> None:
    def body(p: Program) -> Any:
        p.sum(p.copy(p.x, p.tensor()), p.x)
        return p.copy(p.tensor(), p.tensor())

    assert posted(body)[1] == [("skipped", "its output is not allocated in this function")]


def strategies(module: tvm.IRModule) -> list[tuple[str, int]]:
    """Of each all-reduce, posted or not, the function that it calls, and how its data moves."""
    found = []
    for call in calls(module["main"]):
        one = match_start(call) or match_collective(call)
        if one is not None and "strategy" in one.numbers:
            found.append((one.function.name, one.numbers["strategy"]))
    return found


@pytest.mark.parametrize("chosen", list(AllReduceStrategy))
def test_a_strategy_that_the_program_chose_is_kept(chosen: AllReduceStrategy) -> None:
    """And "auto" leaves it to the pipeline."""
    program = Program()
    with program.builder.function("main", [program.x], pure=False):
        send, recv = program.copy(program.x, program.tensor()), program.tensor()
        numbers = [relax.prim_value(number) for number in (0, 0, chosen, 0)]
        program.packed("tvm_ipc.allreduce", send, *numbers, recv)
        program.copy(program.x, program.tensor())
        program.builder.emit_func_output(recv)
    posted = AsyncCollectives()(program.builder.get())
    assert strategies(posted) == [("tvm_ipc.allreduce", chosen)]
    assert any(match_start(call) for call in calls(posted["main"]))
    after = IPCAllReduceRewrite("twoshot")(posted)
    wanted = AllReduceStrategy.TWOSHOT if chosen == AllReduceStrategy.AUTO else chosen
    assert strategies(after) == [("tvm_ipc.allreduce", wanted)]


@I.ir_module
class Branches:
    """Each branch has a sum beside a product; the sums are of other things than the products."""

    @R.function
    def main(
        x: R.Tensor((8, 16), "float32"),
        w: R.Tensor((16, 16), "float32"),
        v: R.Tensor((16, 16), "float32"),
        c: R.Tensor((), "bool"),
    ):
        a = R.matmul(x, w)
        s = R.ccl.allreduce(a, "sum", in_group=False)
        b = R.matmul(x, v)
        d = R.matmul(b, v)
        o = R.add(s, d)
        if c:
            t = R.ccl.allreduce(o, "max", in_group=False)
            e = R.matmul(d, v)
            f = R.matmul(e, w)
            r = R.subtract(f, t)
        else:
            r = R.ccl.allreduce(o, "min", in_group=False)
        return r


@pytest.mark.parametrize("posts", [False, True])
@pytest.mark.parametrize("strategy", ["auto", "oneshot", "twoshot", "default"])
def test_the_strategy_is_that_of_the_pipeline(strategy: str, posts: bool) -> None:
    pipeline = tvm_ipc.get_pipeline("llvm", 2, strategy, blas=False, async_collectives=posts)
    found = strategies(pipeline(Branches))
    assert [number for _, number in found] == [AllReduceStrategy.of(strategy)] * 3


@pytest.mark.parametrize("posts", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_results_are_the_same(ranks: int, posts: bool) -> None:
    pipeline = tvm_ipc.get_pipeline("llvm", ranks, blas=False, async_collectives=posts)
    with collect_report() as report:
        program = tvm.compile(Branches, "llvm", relax_pipeline=pipeline)
    verdicts = [one.verdict for one in report.decisions if one.pass_name == "AsyncCollectives"]
    assert verdicts == (["asynchronous", "asynchronous", "skipped"] if posts else [])
    shapes = ((8, 16), (16, 16), (16, 16))
    with tvm_ipc.Session(ranks, threads=True, timeout=60) as session:
        main = session.load_vm_module(program)["main"]
        buffers = [session.empty(shape, "float32") for shape in shapes]
        for repetition in range(4):
            drawn = np.random.default_rng(repetition)
            given = [
                [drawn.integers(0, 3, shape).astype("float32") for shape in shapes]
                for _ in range(ranks)
            ]
            for rank, arrays in enumerate(given):
                for buffer, array in zip(buffers, arrays, strict=True):
                    buffer.debug_copy_from(rank, array)
            total = sum(x @ w for x, w, _ in given)
            sums = [total + x @ v @ v for x, _, v in given]
            for condition in (True, False):
                out = main(*buffers, session.put(np.array(condition)))
                for rank, (x, w, v) in enumerate(given):
                    most = np.max(sums, axis=0) if condition else np.min(sums, axis=0)
                    wanted = x @ v @ v @ v @ w - most if condition else most
                    np.testing.assert_array_equal(session.get(out, rank=rank), wanted)
