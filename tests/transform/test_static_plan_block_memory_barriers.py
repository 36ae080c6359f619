# SPDX-License-Identifier: Apache-2.0
"""StaticPlanBlockMemory: exit barriers left out where a proof and the memory allow it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import tvm_ipc
from tests.transform.memory_programs import compiled, left_out, prepared, storages
from tests.transform.script_forms import alloc, alloc_in, alloc_storage
from tvm_ipc.transform import IPCAllReduceRewrite, StaticPlanBlockMemory, collect_report

LEFT_OUT, KEPT = "left out", "kept"
NO_PATH = "not every path to the end of the function synchronizes all ranks again"


def plan(module: tvm.IRModule, budget: int | None = None) -> tuple[tvm.IRModule, list[str]]:
    """Return the planned module and what became of each barrier of `main`, in order."""
    with collect_report() as report:
        planned = StaticPlanBlockMemory(packed=True, barrier_budget=budget)(module)
    relax.analysis.well_formed(planned)
    decided = [one for one in report.decisions if one.function == "main"]
    verdicts = [one.verdict.removeprefix("barrier ") for one in decided]
    assert verdicts == [LEFT_OUT if free else KEPT for free in left_out(planned)]
    return planned, verdicts


def reasons(module: tvm.IRModule, budget: int | None = None) -> list[str]:
    with collect_report() as report:
        StaticPlanBlockMemory(packed=True, barrier_budget=budget)(module)
    return [one.reason for one in report.decisions if one.function == "main"]


def rewritten(module: tvm.IRModule, num_groups: int = 1) -> tvm.IRModule:
    return prepared(module, IPCAllReduceRewrite(1, num_groups=num_groups))


@pytest.fixture(scope="module")
def on_workers() -> Iterator[Callable[..., list[np.ndarray]]]:
    """Run `main` on so many workers, who all get the same arguments; return what each gives."""
    sessions: dict[int, Any] = {}

    def run(workers: int, module: tvm.IRModule, *arguments: np.ndarray) -> list[np.ndarray]:
        if workers not in sessions:
            sessions[workers] = tvm_ipc.Session(num_workers=workers, timeout=60)
        session = sessions[workers]
        main = session.load_vm_module(compiled(module))["main"]
        references = [session.put(argument) for argument in arguments]
        for _ in range(20):
            result = main(*references)
        return [session.get(result, rank=rank) for rank in range(workers)]

    yield run
    for session in sessions.values():
        session.close()


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).random(shape, "float32")


@I.ir_module
class Chain:
    """Four products, each summed over the workers."""

    @R.function
    def main(x: R.Tensor((32, 64), "float32"), w: R.Tensor((64, 64), "float32")):
        with R.dataflow():
            a = R.ccl.allreduce(R.matmul(x, w), "sum", False)
            b = R.ccl.allreduce(R.matmul(a, w), "sum", False)
            c = R.ccl.allreduce(R.matmul(b, w), "sum", False)
            d = R.ccl.allreduce(R.matmul(c, w), "sum", False)
            R.output(d)
        return d


def chain_of(x: np.ndarray, w: np.ndarray, workers: int) -> np.ndarray:
    for _ in range(4):
        x = workers * (x @ w)
    return x


def test_a_chain_alternates_between_two_buffers_and_keeps_its_last_barrier():
    @I.ir_module
    class Before:
        @T.prim_func(s_tir=True)
        def f(a: T.handle, b: T.handle):
            T.evaluate(0)

        @R.function(pure=False)
        def main(x: R.Tensor((64,), "float32"), y: R.Tensor((64,), "float32")):
            cls = Before
            s = alloc(64, scope="ipc_memory")
            cls.f(x, s)
            R.call_packed("runtime.disco.cuda_ipc.custom_allreduce", s, 1, y, ty_args=[R.Tuple()])
            t = alloc(64, scope="ipc_memory")
            cls.f(y, t)
            R.call_packed("runtime.disco.cuda_ipc.custom_allreduce", t, 1, y, ty_args=[R.Tuple()])
            return y

    @I.ir_module
    class Expected:
        @T.prim_func(s_tir=True)
        def f(a: T.handle, b: T.handle):
            T.evaluate(0)

        @R.function(pure=False)
        def main(x: R.Tensor((64,), "float32"), y: R.Tensor((64,), "float32")):
            cls = Expected
            storage = alloc_storage(512, "ipc_memory")
            s = alloc_in(storage, 0, 64)
            cls.f(x, s)
            R.call_packed("tvm_ipc.allreduce", s, 0, 1, 1, 1, y, ty_args=[R.Tuple()])
            t = alloc_in(storage, 256, 64)
            cls.f(y, t)
            R.call_packed("runtime.disco.cuda_ipc.custom_allreduce", t, 1, y, ty_args=[R.Tuple()])
            R.memory.kill_storage(storage)
            return y

    planned, verdicts = plan(Before)
    tvm.ir.assert_structural_equal(planned, Expected)
    assert verdicts == [LEFT_OUT, KEPT]


@pytest.mark.parametrize(
    ("budget", "buffers", "verdicts"),
    [
        (None, 2, [LEFT_OUT, LEFT_OUT, LEFT_OUT, KEPT]),
        (8192, 2, [LEFT_OUT, LEFT_OUT, LEFT_OUT, KEPT]),
        (8191, 1, [KEPT] * 4),
        (0, 1, [KEPT] * 4),
    ],
)
def test_the_budget_decides(budget, buffers, verdicts, on_workers):
    planned, decided = plan(rewritten(Chain), budget)
    assert storages(planned)["ipc_memory"] == [buffers * 8192]
    assert decided == verdicts
    x, w = random(32, 64), random(64, 64) / 64
    for workers in (2, 3):
        for result in on_workers(workers, planned, x, w):
            np.testing.assert_allclose(result, chain_of(x, w, workers), rtol=1e-4)


def test_what_the_budget_does_not_allow_is_said():
    assert reasons(rewritten(Chain), 0) == [
        "without it ipc_memory would need more than 8192 bytes"
    ] * 3 + [NO_PATH]


def test_a_barrier_that_costs_nothing_needs_no_budget(on_workers):
    @I.ir_module
    class Model:
        @R.function
        def main(x: R.Tensor((32, 64), "float32"), w: R.Tensor((64, 64), "float32")):
            with R.dataflow():
                one = R.matmul(x, w)
                two = R.matmul(one, w)  # both inputs are live at once in any case
                a = R.ccl.allreduce(one, "sum", False)
                b = R.ccl.allreduce(two, "sum", False)
                c = R.add(a, b)
                R.output(c)
            return c

    planned, verdicts = plan(rewritten(Model), 0)
    assert verdicts == [LEFT_OUT, KEPT]
    assert storages(planned)["ipc_memory"] == [16384]
    x, w = random(32, 64), random(64, 64) / 64
    for result in on_workers(2, planned, x, w):
        np.testing.assert_allclose(result, 2 * (x @ w + x @ w @ w), rtol=1e-4)


def test_small_inputs_come_first_where_the_budget_is_not_enough_for_all():
    @I.ir_module
    class Model:
        @R.function
        def main(x: R.Tensor((64, 64), "float32"), y: R.Tensor((16, 64), "float32")):
            with R.dataflow():
                a = R.ccl.allreduce(R.nn.relu(x), "sum", False)
                b = R.ccl.allreduce(R.nn.relu(a), "sum", False)
                c = R.ccl.allreduce(R.nn.relu(y), "sum", False)
                d = R.ccl.allreduce(R.nn.relu(c), "sum", False)
                e = R.ccl.allreduce(R.nn.relu(d), "sum", False)
                out = (b, e)
                R.output(out)
            return out

    module = rewritten(Model)
    # 16 KB twice and 4 KB three times: the small ones fit below the large ones, side by side.
    planned, verdicts = plan(module, 0)
    assert verdicts == [KEPT, KEPT, LEFT_OUT, LEFT_OUT, KEPT]
    assert storages(planned)["ipc_memory"] == [16384]
    planned, verdicts = plan(module, 4096)
    assert verdicts == [KEPT, LEFT_OUT, LEFT_OUT, LEFT_OUT, KEPT]
    assert storages(planned)["ipc_memory"] == [20480]
    planned, verdicts = plan(module)
    assert verdicts == [LEFT_OUT] * 4 + [KEPT]
    assert storages(planned)["ipc_memory"] == [32768]


def test_symbolic_inputs(on_workers):
    @I.ir_module
    class Model:
        @R.function
        def main(x: R.Tensor(("n", 64), "float32"), w: R.Tensor((64, 64), "float32")):
            with R.dataflow():
                a = R.ccl.allreduce(R.matmul(x, w), "sum", False)
                b = R.ccl.allreduce(R.matmul(a, w), "sum", False)
                c = R.ccl.allreduce(R.matmul(b, w), "sum", False)
                d = R.ccl.allreduce(R.matmul(c, w), "sum", False)
                R.output(d)
            return d

    module = rewritten(Model)
    assert plan(module, 0)[1] == [KEPT] * 4
    assert plan(module, 1 << 40)[1] == [KEPT] * 4  # how many bytes are not known
    planned, verdicts = plan(module)
    assert verdicts == [LEFT_OUT] * 3 + [KEPT]
    w = random(64, 64) / 64
    for rows in (0, 1, 50):
        x = random(rows, 64)
        for workers in (2, 3):
            for result in on_workers(workers, planned, x, w):
                np.testing.assert_allclose(result, chain_of(x, w, workers), rtol=1e-4)


def test_all_paths_must_meet(on_workers):
    @I.ir_module
    class Both:
        @R.function
        def main(c: R.Tensor((), "bool"), x: R.Tensor((32, 64), "float32")):
            a = R.ccl.allreduce(R.nn.relu(x), "sum", False)
            if c:
                d = R.ccl.allreduce(R.nn.relu(a), "sum", False)
                y = R.add(d, d)
            else:
                y = R.ccl.allreduce(R.add(a, x), "sum", False)
            return y

    @I.ir_module
    class One:
        @R.function
        def main(c: R.Tensor((), "bool"), x: R.Tensor((32, 64), "float32")):
            a = R.ccl.allreduce(R.nn.relu(x), "sum", False)
            if c:
                d = R.ccl.allreduce(R.nn.relu(a), "sum", False)
                y = R.add(d, d)
            else:
                y = R.add(a, x)
            return y

    planned, verdicts = plan(rewritten(Both))
    assert verdicts == [LEFT_OUT, KEPT, KEPT]
    assert reasons(rewritten(Both))[0] == (
        "nothing overwrites its input before the if that binds y, where all workers wait for each "
        "other, and every path through the function gets there"
    )
    x = random(32, 64)
    for choice, expected in ((True, 8 * x), (False, 6 * x)):
        for result in on_workers(2, planned, np.array(choice), x):
            np.testing.assert_allclose(result, expected, rtol=1e-4)
    assert plan(rewritten(One))[1] == [KEPT, KEPT]
    assert reasons(rewritten(One)) == [NO_PATH] * 2


def test_in_a_branch_the_meeting_may_come_after_it(on_workers):
    @I.ir_module
    class Model:
        @R.function
        def main(c: R.Tensor((), "bool"), x: R.Tensor((32, 64), "float32")):
            if c:
                a = R.ccl.allreduce(R.nn.relu(x), "sum", False)
                y = R.nn.relu(a)
            else:
                y = R.add(x, x)
            z = R.nn.relu(y)
            return R.ccl.allreduce(R.add(z, z), "sum", False)

    planned, verdicts = plan(rewritten(Model))
    assert verdicts == [LEFT_OUT, KEPT]
    x = random(32, 64)
    for result in on_workers(2, planned, np.array(True), x):
        np.testing.assert_allclose(result, 8 * x, rtol=1e-4)


@I.ir_module
class Calls:
    """`meets` passes a meeting, `may_meet` on one path, `loops` calls itself."""

    @R.function(private=True)
    def meets(x: R.Tensor((32, 64), "float32")) -> R.Tensor((32, 64), "float32"):
        return R.ccl.allreduce(R.nn.relu(x), "sum", False)

    @R.function(private=True)
    def may_meet(c: R.Tensor((), "bool"), x: R.Tensor((32, 64), "float32")) -> R.Tensor(
        (32, 64), "float32"
    ):
        if c:
            y = R.ccl.allreduce(R.nn.relu(x), "sum", False)
        else:
            y = R.nn.relu(x)
        return y

    @R.function(private=True)
    def loops(c: R.Tensor((), "bool"), x: R.Tensor((32, 64), "float32")) -> R.Tensor(
        (32, 64), "float32"
    ):
        if c:
            y = Calls.loops(c, x)
        else:
            y = R.ccl.allreduce(R.nn.relu(x), "sum", False)
        return y

    @R.function
    def main(c: R.Tensor((), "bool"), x: R.Tensor((32, 64), "float32")):
        cls = Calls
        a = R.ccl.allreduce(R.nn.relu(x), "sum", False)
        b = cls.meets(a)
        d = R.ccl.allreduce(R.nn.relu(b), "sum", False)
        e = cls.may_meet(c, d)
        return e

    @R.function
    def recursive(c: R.Tensor((), "bool"), x: R.Tensor((32, 64), "float32")):
        a = R.ccl.allreduce(R.nn.relu(x), "sum", False)
        return Calls.loops(c, a)


def test_a_call_is_a_meeting_if_all_paths_of_the_function_are(on_workers):
    module = rewritten(Calls)
    planned, verdicts = plan(module)
    assert verdicts == [LEFT_OUT, KEPT]
    # Whatever comes after the call, the function's own all-reduce is its last meeting.
    assert left_out(planned, "meets") == [False]
    assert left_out(planned, "may_meet") == [False]
    x = random(32, 64)
    for result in on_workers(2, planned, np.array(True), x):
        np.testing.assert_allclose(result, 16 * x, rtol=1e-4)


def test_recursion_proves_nothing():
    planned, _ = plan(rewritten(Calls))
    assert left_out(planned, "recursive") == [False]


def test_groups_and_everybody():
    @I.ir_module
    class Model:
        @R.function
        def main(x: R.Tensor((32, 64), "float32")):
            a = R.ccl.allreduce(R.nn.relu(x), "sum", True)
            b = R.ccl.allreduce(R.nn.relu(a), "sum", False)
            c = R.ccl.allreduce(R.nn.relu(b), "sum", True)
            d = R.ccl.allreduce(R.nn.relu(c), "sum", True)
            return R.ccl.allgather(R.nn.relu(d), 2, True)

    module = rewritten(Model, num_groups=2)
    # That of everybody is followed by meetings of the groups alone.
    assert plan(module)[1] == [LEFT_OUT, KEPT, LEFT_OUT, LEFT_OUT]
    assert NO_PATH in reasons(module)[1]


def test_a_group_whose_members_do_not_meet_again_is_told_from_everybody():
    @I.ir_module
    class Model:
        @R.function
        def main(x: R.Tensor((32, 64), "float32")):
            return R.ccl.allreduce(R.nn.relu(x), "sum", True)

    assert "synchronizes its group again" in reasons(rewritten(Model, num_groups=2))[0]
    assert "synchronizes all ranks again" in reasons(rewritten(Model))[0]


def test_a_broadcast_is_no_meeting_but_an_ordinary_allreduce_is():
    @I.ir_module
    class Broadcast:
        @R.function
        def main(x: R.Tensor((32, 64), "float32")):
            a = R.ccl.allreduce(R.nn.relu(x), "sum", False)
            return R.ccl.broadcast_from_worker0(a)

    @I.ir_module
    class Ordinary:
        @R.function
        def main(x: R.Tensor((32, 64), "float32")):
            a = R.ccl.allreduce(R.nn.relu(x), "sum", False)
            return R.ccl.allgather(a, 2, False)

    assert plan(rewritten(Broadcast))[1] == [KEPT]
    assert plan(rewritten(Ordinary))[1] == [LEFT_OUT]


def test_an_input_that_is_read_again_may_be_and_one_that_is_written_may_not():
    @I.ir_module
    class Reads:
        @R.function
        def main(x: R.Tensor((32, 64), "float32")):
            with R.dataflow():
                part = R.nn.relu(x)
                a = R.ccl.allreduce(part, "sum", False)
                b = R.add(a, part)
                c = R.ccl.allreduce(R.nn.relu(b), "sum", False)
                R.output(c)
            return c

    assert plan(rewritten(Reads))[1] == [LEFT_OUT, KEPT]

    @I.ir_module
    class Writes:
        @T.prim_func(s_tir=True)
        def double(a: T.Buffer((64,), "float32")):
            for i in range(64):
                with T.sblock("double"):
                    vi = T.axis.remap("S", [i])
                    a[vi] = a[vi] * T.float32(2)

        @T.prim_func(s_tir=True)
        def copy(a: T.Buffer((64,), "float32"), b: T.Buffer((64,), "float32")):
            for i in range(64):
                with T.sblock("copy"):
                    vi = T.axis.remap("S", [i])
                    b[vi] = a[vi]

        @R.function(pure=False)
        def main(x: R.Tensor((64,), "float32"), y: R.Tensor((64,), "float32")):
            cls = Writes
            s = alloc(64, scope="ipc_memory")
            cls.copy(x, s)
            R.call_packed("runtime.disco.cuda_ipc.custom_allreduce", s, 1, y, ty_args=[R.Tuple()])
            cls.double(s)
            R.call_packed("runtime.disco.cuda_ipc.custom_allreduce", s, 1, y, ty_args=[R.Tuple()])
            cls.copy(s, y)
            R.call_packed("runtime.disco.cuda_ipc.custom_allreduce", s, 1, y, ty_args=[R.Tuple()])
            return y

    _, verdicts = plan(Writes)
    assert verdicts == [KEPT, LEFT_OUT, KEPT]
    assert "may write to its input before its team synchronizes again" in reasons(Writes)[0]


def written(when: str) -> tvm.IRModule:
    """Two all-reduces, and something that writes the input of the first."""

    @I.ir_module
    class Kernels:
        @T.prim_func(s_tir=True)
        def double(a: T.Buffer((64,), "float32")):
            for i in range(64):
                with T.sblock("double"):
                    vi = T.axis.remap("S", [i])
                    a[vi] = a[vi] * T.float32(2)

    builder = relax.BlockBuilder(Kernels)
    double = Kernels.get_global_var("double")
    nothing = [tvm.ir.TupleType([])]
    allreduce, one = (
        relax.ExternFunc("runtime.disco.cuda_ipc.custom_allreduce"),
        relax.prim_value(1),
    )
    x = relax.Var("x", relax.TensorType((64,), "float32"))
    with builder.function("main", [x], pure=False):
        s, t = (builder.emit(allocated("ipc_memory"), name) for name in "st")
        builder.emit(relax.Call(allreduce, [s, one, x], ty_args=nothing))
        if when == "before the next, by a kernel":
            builder.emit(relax.Call(double, [s], ty_args=nothing))
        if when == "before the next, by a kernel of a dynamic shape":
            builder.emit(relax.op.vm.call_tir_dyn(double, relax.Tuple([s])))
        builder.emit(
            relax.Call(allreduce, [t, one, s if when == "by the next" else x], ty_args=nothing)
        )
        if when == "after the next":
            builder.emit(relax.Call(double, [s], ty_args=nothing))
        builder.emit_func_output(x)
    return builder.get()


@pytest.mark.parametrize(
    ("when", "verdict"),
    [
        ("before the next, by a kernel", KEPT),
        ("before the next, by a kernel of a dynamic shape", KEPT),
        ("by the next", KEPT),
        ("after the next", LEFT_OUT),
        ("never", LEFT_OUT),
    ],
)
def test_an_input_that_is_written_before_the_next_meeting_has_returned_keeps_its_barrier(
    when, verdict
):
    assert plan(written(when))[1] == [verdict, KEPT]
    assert ("may write to its input" in reasons(written(when))[0]) == (verdict == KEPT)


def test_the_report_says_until_when_peers_may_read():
    with collect_report() as report:
        StaticPlanBlockMemory(packed=True)(written("never"))
    (found,) = report.plans
    assert [(one.name, one.last, one.peers_until) for one in found.tensors] == [
        ("s", 2, 3),
        ("t", 3, None),
    ]


def allocated(scope: str) -> relax.Call:
    arguments = [
        relax.ShapeExpr([64]),
        tvm.ir.GenericConst(tvm.DataType("float32"), relax.AnyType()),
        relax.prim_value(0),
        tvm.ir.StringImm(scope),
    ]
    return relax.Call(tvm.ir.Op.get("relax.builtin.alloc_tensor"), arguments)


def allreduces(*, kept: bool, in_place: bool, returned: bool) -> tvm.IRModule:
    """Two all-reduces, of which the first could do without its barrier but for one thing."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((64,), "float32"))
    with builder.function("main", [x], pure=False):
        s = builder.emit(allocated("ipc_memory"), "s")
        nothing = [tvm.ir.TupleType([])]
        allreduce = relax.ExternFunc("runtime.disco.cuda_ipc.custom_allreduce")
        one = relax.prim_value(1)
        builder.emit(relax.Call(allreduce, [s, one, s if in_place else x], ty_args=nothing))
        if kept:
            builder.emit(relax.op.call_builtin_with_ctx("keep", [s], ty_args=nothing))
        builder.emit(relax.Call(allreduce, [x, one, x], ty_args=nothing))
        builder.emit_func_output(s if returned else x)
    return builder.get()


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("in_place", "it runs in place"),
        ("returned", "its input is returned"),
        ("kept", "its input escapes: it is passed to the operator relax.call_builtin_with_ctx"),
    ],
)
def test_kept_because_of_the_input(what, reason):
    given = {"kept": False, "in_place": False, "returned": False}
    assert plan(allreduces(**given))[1] == [LEFT_OUT, KEPT]
    module = allreduces(**{**given, what: True})
    assert plan(module)[1] == [KEPT, KEPT]
    assert reasons(module) == [reason, "its input is memory of the caller or a constant"]


def test_a_promise_that_the_plan_cannot_hold_is_taken_back():
    planned, _ = plan(rewritten(Chain))
    assert left_out(planned) == [True, True, True, False]

    @I.ir_module
    class Promised:
        @R.function(pure=False)
        def main(x: R.Tensor((64,), "float32")):
            s = alloc(64, scope="ipc_memory")
            R.call_packed("tvm_ipc.allreduce", s, 0, 0, 1, 1, x, ty_args=[R.Tuple()])
            return x

    assert left_out(Promised) == [True]
    assert plan(Promised)[1] == [KEPT]
    # Without an allocation that it plans the promise is somebody else's.
    assert left_out(StaticPlanBlockMemory(packed=True)(planned)) == [
        True,
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"packed": 64}, TypeError, "packed is True or False, not 64"),
        ({"alignment": 48}, ValueError, r"power of two, at most 2\*\*30, not 48"),
        ({"alignment": "64"}, TypeError, r"a power of two, at most 2\*\*30, not '64'"),
        ({"barrier_budget": -1}, ValueError, r"0 or more and below 2\*\*63, or None, not -1"),
        ({"barrier_budget": 0.5}, TypeError, r"0 or more and below 2\*\*63, or None, not 0.5"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        StaticPlanBlockMemory(**options)
