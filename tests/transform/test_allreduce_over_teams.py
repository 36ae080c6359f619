# SPDX-License-Identifier: Apache-2.0
"""`IPCAllReduceRewrite` and all-reduces of `tvm_ipc.comm` over teams."""

from __future__ import annotations

from typing import Any

import pytest
import tvm
from tvm import relax

import tvm_ipc
from tvm_ipc import comm
from tvm_ipc.analysis.collective_calls import match_collective, match_start
from tvm_ipc.analysis.walk_and_rewrite_bindings import calls
from tvm_ipc.packed_functions import AllReduceStrategy, ReduceKind
from tvm_ipc.transform import IPCAllReduceRewrite, collect_report

PAIRS = [[0, 1], [2, 3]]


def module(*teams: Any) -> tvm.IRModule:
    """A sum after the other, over these teams."""
    builder = relax.BlockBuilder()
    y = relax.Var("x", relax.TensorType((8, 8), "float32"))
    with builder.function("main", [y]):
        with builder.dataflow():
            for team in teams:
                y = builder.emit(comm.allreduce(builder.emit(relax.op.negative(y)), team=team))
            out = builder.emit_output(relax.op.negative(y))
        builder.emit_func_output(out)
    return builder.get()


@pytest.mark.parametrize("strategy", ["auto", "oneshot", "twoshot", "default"])
def test_the_strategy_is_that_of_all_of_them(strategy: str) -> None:
    pipeline = tvm_ipc.get_pipeline("llvm", 4, allreduce_strategy=strategy, blas=False)
    lowered = pipeline(module(PAIRS, "world"))
    found = [one for one in map(match_collective, calls(lowered["main"])) if one is not None]
    wanted = AllReduceStrategy.of(strategy)
    assert [one.numbers["strategy"] for one in found] == [wanted, wanted]
    assert [one.team for one in found] == [(2, 0, 1, 2, 3), 0]


@pytest.mark.parametrize("team", ["world", "group", PAIRS])
def test_works_that_the_program_posts_get_the_strategy_too(team: Any) -> None:
    ty = relax.TensorType((8, 8), "float32")
    x, out = relax.Var("x", ty), relax.Var("out", ty)
    builder = relax.BlockBuilder()
    with builder.function("main", [x, out], pure=False):
        builder.emit(comm.wait(builder.emit(comm.start(comm.allreduce(x, "max", team=team), out))))
        builder.emit(comm.wait(builder.emit(comm.start(comm.broadcast(x, team=team), out))))
        builder.emit_func_output(out)
    before = builder.get()
    with collect_report() as report:
        after = IPCAllReduceRewrite("oneshot")(before)
    found = [one for one in map(match_start, calls(after["main"])) if one is not None]
    assert [(one.function.name, one.kind) for one in found] == [
        ("tvm_ipc.allreduce", ReduceKind.MAX),
        ("tvm_ipc.broadcast", None),
    ]
    assert found[0].numbers["strategy"] == AllReduceStrategy.ONESHOT
    assert [(one.verdict, one.reason) for one in report.decisions] == [
        ("rewritten", "its strategy is oneshot")
    ]
    tvm.ir.assert_structural_equal(IPCAllReduceRewrite("auto")(before), before)
    tvm.ir.assert_structural_equal(IPCAllReduceRewrite("default")(after), after)


def test_what_is_not_lowered_yet_is_told() -> None:
    mod = module(PAIRS)
    with collect_report() as report:
        tvm.ir.assert_structural_equal(IPCAllReduceRewrite("oneshot")(mod), mod)
    (told,) = [one for one in report.decisions if one.pass_name == "IPCAllReduceRewrite"]
    assert told.verdict == "skipped"
    assert told.reason == "it is not lowered yet; run LegalizeOps before"
