# SPDX-License-Identifier: Apache-2.0
"""Programs that post works: what a work reads and writes is left alone until it is waited for."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

import tvm_ipc
from tests.end_to_end.compare_with_numpy import Example, compare_with_numpy, compiled
from tvm_ipc import comm
from tvm_ipc.errors import WorkerError
from tvm_ipc.transform import collect_report

COUNT = 4096


def program(waits: str) -> tvm.IRModule:
    """A sum on its way while the program computes what would fit into the memory of its input."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((COUNT,), "float32"))

    with builder.function("main", [x], pure=False):
        send = builder.emit(relax.op.add(x, x))
        shape = relax.ShapeExpr([COUNT])
        recv = builder.emit(relax.op.builtin.alloc_tensor(shape, "float32", 0, "global"))
        work = builder.emit(comm.start(comm.allreduce(send), recv))
        if waits == "in a tuple":
            work = builder.emit(relax.TupleGetItem(builder.emit(relax.Tuple([work, x])), 0))
        y = x
        for _ in range(4):  # each is dead after the next one
            y = builder.emit(relax.op.multiply(y, x))
        builder.emit(comm.wait(work))
        out = builder.emit(relax.op.add(recv, y))
        builder.emit_func_output(out)
    return builder.get()


@pytest.mark.parametrize("waits", ["directly", "in a tuple"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_memory_of_a_work_is_not_used_before_the_wait(ranks: int, waits: str) -> None:
    with collect_report() as report:
        executable = compiled(program(waits), ranks)
    (plan,) = (plan for plan in report.plans if plan.function == "main")
    work = next(k for k, event in enumerate(plan.events) if "start" in event.text)
    wait = next(k for k, event in enumerate(plan.events) if "tvm_ipc.wait" in event.text)
    of_work = [one for one in plan.tensors if one.first <= work <= one.last]
    assert len(of_work) == 2, plan.tensors
    assert all(one.last >= wait for one in of_work)

    def example(repetition: int) -> Example:
        drawn = np.random.default_rng(repetition).integers(0, 3, (ranks, COUNT))
        xs = drawn.astype("float32")
        return xs, [], 2 * xs.sum(axis=0) + xs**5

    compare_with_numpy(executable, ranks, map(example, range(8)))


def test_programs_that_post_are_for_so_many_workers() -> None:
    session = tvm_ipc.Session(3, threads=True, timeout=60)
    with session, pytest.raises(WorkerError, match="was compiled for 2 workers"):
        session.load_vm_module(compiled(program("directly"), 2))
        session.sync()
