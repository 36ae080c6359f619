# SPDX-License-Identifier: Apache-2.0
"""Passes change a collective in a branch only together with those that it may match."""

from __future__ import annotations

from typing import Any

import pytest
import tvm

import tvm_ipc
from tvm_ipc.analysis.matching_collectives_across_branches import matching_collectives
from tvm_ipc.analysis.program_order import linearize
from tvm_ipc.transform import collect_report

PRODUCT = "m = R.matmul(x, w)"
SUM = "a = R.ccl.allreduce(m, 'sum', False)"
NORM = [PRODUCT, SUM, "s = R.add(a, r)", "y = R.nn.rms_norm(s, g, axes=-1)"]
PLAIN = [PRODUCT, SUM, "y = R.add(a, a)"]
ELSEWHERE = ["m = R.add(x, x)", SUM, "y = R.add(a, a)"]
BESIDE = [PRODUCT, SUM, "z = R.matmul(r, w)", "y = R.add(a, z)"]


def module(then: list[str], otherwise: list[str]) -> tvm.IRModule:
    lines = ['q = R.call_packed("runtime.disco.worker_rank", ty_args=(R.Prim("int64"),))']
    lines += ["if q == 0:", *(f"    {one}" for one in then)]
    lines += ["else:", *(f"    {one}" for one in otherwise), "return y"]
    tensor = 'R.Tensor((32, 64), "float32")'
    text = f"""
@I.ir_module
class Module:
    @R.function(pure=False)
    def main(x: {tensor}, w: R.Tensor((64, 64), "float32"), r: {tensor},
        g: R.Tensor((64,), "float32")):
"""
    return tvm.script.from_source(text + "".join(f"        {line}\n" for line in lines))


def verdicts(then: list[str], otherwise: list[str], name: str, **options: Any) -> list[str]:
    """Return what a pass decided. The pipeline refuses what ranks could not do together."""
    with collect_report() as report:
        tvm_ipc.get_pipeline("llvm", 2, blas=False, **options)(module(then, otherwise))
    return [one.verdict for one in report.decisions if one.pass_name == name]


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize(
    ("branches", "name", "options", "both"),
    [
        ((NORM, PLAIN), "FuseAllReduceEpilogue", {}, "fused"),
        ((BESIDE, ELSEWHERE), "AsyncCollectives", {"async_collectives": True}, ""),
        ((PLAIN, ELSEWHERE), "OverlapCommunication", {"overlap": 2}, ""),
    ],
)
def test_a_pass_leaves_alone_what_it_cannot_change_in_both(
    branches: tuple[list[str], list[str]], name: str, options: dict[str, Any], both: str, swap: bool
) -> None:
    then, otherwise = reversed(branches) if swap else branches
    assert verdicts(then, otherwise, name, **options) == ["skipped"] * 2
    if both:
        assert verdicts(branches[0], branches[0], name, **options) == [both] * 2


def test_norms_that_differ_are_not_fused() -> None:
    other = [line.replace("axes=-1", "axes=-1, epsilon=0.5") for line in NORM]
    assert verdicts(NORM, other, "FuseAllReduceEpilogue") == ["skipped"] * 2


def matches(then: list[str], otherwise: list[str]) -> list[Any]:
    function = module(then, otherwise)["main"]
    return sorted(matching_collectives(linearize("main", function)).values())


def test_which_collectives_match() -> None:
    assert matches(NORM, PLAIN) == [("allreduce",)] * 2
    assert matches(NORM, [PRODUCT, "y = R.ccl.broadcast_from_worker0(m)"]) == []
    assert matches(NORM, [PRODUCT, "y = R.add(m, m)"]) == []
