# SPDX-License-Identifier: Apache-2.0
"""Barriers of collectives over the teams of divisions: who meets in one has not met in another."""

from __future__ import annotations

from typing import Any

import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

import tvm_ipc
from tvm_ipc import comm
from tvm_ipc.analysis.collective_calls import match_collective
from tvm_ipc.transform import collect_report, verify_cross_rank_safety

ROWS, COLUMNS = ((0, 1), (2, 3)), ((0, 2), (1, 3))
WHOLE = ((0, 1, 2, 3),)
LEFT_OUT, KEPT = "barrier left out", "barrier kept"


def decisions(*teams: Any) -> list[Any]:
    """What is decided of all-reduces, each of what the one before it gives, over these teams."""
    builder = relax.BlockBuilder()
    x = y = relax.Var("x", relax.TensorType((64, 64), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            for team in teams:
                y = builder.emit(comm.allreduce(builder.emit(relax.op.add(y, y)), team=team))
            out = builder.emit_output(relax.op.negative(y))
        builder.emit_func_output(out)
    pipeline = tvm_ipc.get_pipeline("llvm", 4, num_groups=2, barrier_budget=1 << 30, blas=False)
    with collect_report() as report:
        assert verify_cross_rank_safety(pipeline(builder.get())) == []
    return [one for one in report.decisions if one.pass_name == "StaticPlanBlockMemory"]


@pytest.mark.parametrize(
    ("teams", "kept"),
    [
        ([ROWS, ROWS], [1]),
        ([ROWS, COLUMNS], [0, 1]),
        ([ROWS, COLUMNS, ROWS], [1, 2]),
        ([ROWS, COLUMNS, ROWS, COLUMNS], [2, 3]),
        ([ROWS, "world", COLUMNS], [1, 2]),
        ([COLUMNS, ROWS, "world"], [2]),
        (["world", ROWS, COLUMNS], [0, 1, 2]),
        # The runtime has other teams for other orders, and for what is called the group.
        ([ROWS, ((1, 0), (3, 2))], [0, 1]),
        ([ROWS, "group"], [0, 1]),
        # It contains them, which nobody looks for.
        ([ROWS, WHOLE], [0, 1]),
    ],
)
def test_which_meetings_count(teams: list[Any], kept: list[int]) -> None:
    found = [one.verdict for one in decisions(*teams)]
    assert found == [KEPT if k in kept else LEFT_OUT for k in range(len(teams))]


@I.ir_module
class OnBothPaths:
    @R.function
    def main(x: R.Tensor((64, 64), "float32"), c: R.Tensor((), "bool")):
        a = R.comm.allreduce(R.add(x, x), team=[[0, 1], [2, 3]])
        if c:
            b = R.comm.allreduce(R.add(a, x), team=[[0, 1], [2, 3]])
        else:
            b = R.comm.reduce_scatter(R.concat((a, a)), team=[[0, 1], [2, 3]])
        return R.negative(b)


@I.ir_module
class OnOnePath:
    @R.function
    def main(x: R.Tensor((64, 64), "float32"), c: R.Tensor((), "bool")):
        a = R.comm.allreduce(R.add(x, x), team=[[0, 1], [2, 3]])
        if c:
            b = R.comm.allreduce(R.add(a, x), team=[[0, 1], [2, 3]])
        else:
            b = R.comm.reduce_scatter(R.concat((a, a)), team=[[0, 2], [1, 3]])
        return R.negative(b)


@pytest.mark.parametrize(("mod", "verdict"), [(OnBothPaths, LEFT_OUT), (OnOnePath, KEPT)])
def test_each_path_has_to_meet_in_the_same_division(mod: tvm.IRModule, verdict: str) -> None:
    pipeline = tvm_ipc.get_pipeline("llvm", 4, barrier_budget=1 << 30, blas=False)
    with collect_report() as report:
        hazards = verify_cross_rank_safety(pipeline(mod))  # nobody knows that all ranks have one c
        assert [hazard for hazard in hazards if not hazard.unknown] == []
    first, *_ = [
        one.verdict
        for one in report.decisions
        if one.pass_name == "StaticPlanBlockMemory" and one.subject.startswith("allreduce")
    ]
    assert first == verdict, report.decisions


def test_the_report_names_the_teams() -> None:
    first, second = decisions(COLUMNS, COLUMNS)
    assert first.subject.endswith("(sum) in teams such as [0, 2]")
    assert "the allreduce of " in first.reason
    assert first.reason.count("(sum) in teams such as [0, 2]") == 1
    assert second.reason.endswith("path to the end of the function synchronizes its team again")
    assert decisions(WHOLE)[0].subject.endswith("(sum) in the team [0, 1, 2, 3]")


def called(team: relax.Expr) -> Any:
    x = relax.Var("x", relax.TensorType((4,), "float32"))
    given = [x, relax.prim_value(0), team, relax.prim_value(3), relax.prim_value(0), x]
    call = relax.Call(relax.ExternFunc("tvm_ipc.allreduce"), given)
    return match_collective(call)


def test_words_about_large_teams() -> None:
    collective = called(relax.ShapeExpr([64, *range(64)]))
    assert str(collective) == "allreduce of x (sum) in the team [0, 1, 2, 3, 4, 5, 6, 7, ...]"


def test_teams_of_which_nothing_can_be_said() -> None:
    size = tvm.tirx.Var("size", "int64")
    for team in (relax.ShapeExpr([]), relax.ShapeExpr([size, 0, 1])):
        assert called(team) is None
