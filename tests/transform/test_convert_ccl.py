# SPDX-License-Identifier: Apache-2.0
"""TVM's collective operators and ours, one made from the other."""

from __future__ import annotations

import pytest
import tvm
from tvm.script import ir as I
from tvm.script import relax as R

from tvm_ipc import comm
from tvm_ipc.transform import ConvertFromCCL, ConvertToCCL, collect_report


@I.ir_module
class TVMs:
    @R.function
    def main(x: R.Tensor((6, 4), "float32"), c: R.Tensor((), "bool")):
        with R.dataflow():
            a = R.ccl.allreduce(x, op_type="max", in_group=False)
            b = R.ccl.allreduce(a, op_type="sum", in_group=True)
            d = R.ccl.allgather(b, 4, in_group=False)
            e = R.ccl.broadcast_from_worker0(d)
            f = R.ccl.scatter_from_worker0(e, 2, axis=1)
            R.output(f)
        if c:
            y = R.ccl.allgather(f, 2, in_group=True)
        else:
            y = R.concat((f, f), axis=0)
        return y


@I.ir_module
class Ours:
    @R.function
    def main(x: R.Tensor((6, 4), "float32"), c: R.Tensor((), "bool")):
        with R.dataflow():
            a = R.comm.allreduce(x, "max")
            b = R.comm.allreduce(a, team="group")
            d = R.comm.allgather(b, workers=4)
            e = R.comm.broadcast(d)
            f = R.comm.scatter(e, axis=1, workers=2)
            R.output(f)
        if c:
            y = R.comm.allgather(f, team="group", workers=2)
        else:
            y = R.concat((f, f), axis=0)
        return y


def test_from_tvm() -> None:
    tvm.ir.assert_structural_equal(ConvertFromCCL()(TVMs), Ours)


def test_to_tvm() -> None:
    tvm.ir.assert_structural_equal(ConvertToCCL()(Ours), TVMs)


def test_a_module_without_them_stays_the_object_it_was() -> None:
    assert ConvertFromCCL()(Ours).same_as(Ours)
    assert ConvertToCCL()(TVMs).same_as(TVMs)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda x: comm.allreduce(x, team=[[0, 1]]), "no other teams"),
        (lambda x: comm.allreduce(x, backend="shm"), "it is for the backend shm"),
        (lambda x: comm.allgather(x, axis=1, workers=2), "concatenates along axis 0, not 1"),
        (lambda x: comm.allgather(x, extent=3, workers=2), "R.ccl has no uneven shards"),
        (lambda x: comm.broadcast(x, 1), "a broadcast only from worker 0 to all workers"),
        (lambda x: comm.scatter(x, team="group", workers=2), "a scatter only from worker 0"),
        (lambda x: comm.reduce_scatter(x, workers=2), "R.ccl has no reduce_scatter"),
        (lambda x: comm.permute(x, [], workers=2), "R.ccl has no permute"),
    ],
)
def test_what_tvm_lacks_stays_and_is_reported(make, reason) -> None:
    builder = tvm.relax.BlockBuilder()
    x = tvm.relax.Var("x", tvm.relax.TensorType((2, 4), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(make(x))
        builder.emit_func_output(out)
    mod = builder.get()
    with collect_report() as report:
        assert ConvertToCCL()(mod).same_as(mod)
    (decision,) = report.decisions
    assert decision.verdict == "skipped"
    assert reason in decision.reason
