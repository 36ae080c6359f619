# SPDX-License-Identifier: Apache-2.0
"""Marks for streams: what the cost model decides, what cannot be honoured, and the schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tvm
from tvm import relax, tirx
from tvm.relax import op

import tvm_ipc
from tests.made_up_calibration import calibration
from tvm_ipc.analysis.walk_and_rewrite_bindings import calls
from tvm_ipc.calibration import COLLECTIVES, Times
from tvm_ipc.comm import Mesh, Partial, Replica, Shard, place
from tvm_ipc.spmd import LowerPlacements
from tvm_ipc.transform import collect_report
from tvm_ipc.transform.overlap.stream_cost_model import (
    ChunkCollective,
    ChunkMatmul,
    MarkedWork,
    choose_mark,
    predict_marked,
    predict_whole,
)

MESH = Mesh({"d": 2})
ALL = {"d": Replica()}
N = tirx.Var("n", "int64")


def gathered_matmul(
    shape: tuple[Any, ...] = (4, 2, 64, 32), *, force: bool = False, stream: int = 0
) -> tvm.IRModule:
    """A gather along axis 1 and a matmul, marked along axis 0."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    w = relax.Var("w", relax.TensorType((32, 64), "float32"))
    with builder.function("main", [x, w]):
        with builder.dataflow():
            whole = builder.emit(place(builder.emit(place(x, MESH, {"d": Shard(1)})), MESH, ALL))
            y = builder.emit(op.matmul(whole, w))
            out = builder.emit_output(place(y, MESH, ALL, stream=stream, force=force), "out")
        builder.emit_func_output(out)
    return builder.get()


def summed_matmul(
    body: Callable[..., Any] | None = None, *, shape: tuple[Any, ...] = (4, 6, 32)
) -> tvm.IRModule:
    """A matmul whose results ranks sum, marked along axis 0."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    w = relax.Var("w", relax.TensorType((32, 16), "float32"))
    with builder.function("main", [x, w]):
        with builder.dataflow():
            parts = builder.emit(place(x, MESH, {"d": Shard(len(shape) - 1)}))
            rows = builder.emit(place(w, MESH, {"d": Shard(0)}))
            y = builder.emit(op.matmul(parts, rows))
            if body is not None:
                y = builder.emit(body(builder.emit, y))
            out = builder.emit_output(place(y, MESH, ALL, stream=0), "out")
        builder.emit_func_output(out)
    return builder.get()


def link(bandwidth: float, **changes: Any) -> Any:
    """A calibration over a link, with the time of a matmul in proportion to its size."""
    cheap = Times(((1, 10**9),), (1e-9, 1e-9))
    fields = {
        "bandwidth": bandwidth,
        "matmul": Times(((1, 10**6), (1, 2), (1, 2)), (1e-9,) * 4 + (1e-3,) * 4),
        "collectives": dict.fromkeys(COLLECTIVES, cheap),
        "reduce": cheap,
        "chunk": 1e-9,
        "hide": 1e-9,
    }
    return calibration(**{**fields, **changes})


def decision(mod: tvm.IRModule, measured: Any = None, **options: Any) -> tuple[str, str, str]:
    """The verdict and the reason of the mark, and the program of a rank."""
    with collect_report() as report:
        after = LowerPlacements(calibration=measured, **options)(mod)
    (mark,) = [one for one in report.decisions if one.subject.startswith("stream=")]
    return mark.verdict, mark.reason, after.script()


# ---- the cost model -----------------------------------------------------------------------------


def test_a_mark_that_does_not_pay_is_left_out_with_the_loss() -> None:
    slow_chunks = calibration(chunk=1e-2)
    verdict, reason, program = decision(gathered_matmul(), slow_chunks)
    assert verdict == "left out"
    assert reason.startswith("it would be ") and "% slower: " in reason
    assert reason.endswith(" without chunks; place(..., force=True) keeps the chunks")
    assert "tvm_ipc.start" not in program
    assert program.count("R.matmul") == program.count('kind="allgather"') == 1


def test_all_matmuls_of_a_gather_count() -> None:
    """Of two matmuls that share a gather, one is marked; both are computed in chunks."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 2, 64, 32), "float32"))
    w = relax.Var("w", relax.TensorType((32, 64), "float32"))
    with builder.function("main", [x, w]):
        with builder.dataflow():
            whole = builder.emit(place(builder.emit(place(x, MESH, {"d": Shard(1)})), MESH, ALL))
            y = builder.emit(op.matmul(whole, w))
            out = builder.emit_output(place(y, MESH, ALL, stream=0), "out")
            other = builder.emit_output(op.matmul(whole, builder.emit(op.negative(w))))
        builder.emit_func_output(relax.Tuple([out, other]))
    module = builder.get()
    assert decision(module)[0] == "in 4 chunks"
    verdict, reason, _ = decision(module, calibration(chunk=1e-2))
    assert verdict == "left out"
    milliseconds = float(reason.partition("slower: ")[2].partition(" ms")[0])
    assert milliseconds > 2 * 4 * 10, "a chunk of each matmul takes 10 ms more"


def test_a_mark_with_force_is_kept() -> None:
    verdict, reason, program = decision(gathered_matmul(force=True), calibration(chunk=1e-2))
    assert verdict == "in 4 chunks"
    assert "; force=True, although it would be " in reason
    assert program.count("tvm_ipc.start") == 4


def test_a_small_gain_does_not_pay() -> None:
    work = MarkedWork(
        2, 2, 2, (ChunkMatmul(500, 1, 1, 1000, 1),), (ChunkCollective("allgather", 50.0),)
    )
    measured = link(1e6, matmul=Times(((1, 1000), (1, 2), (1, 2)), (1e-6,) * 4 + (1e-3,) * 4))
    whole, chunked = predict_whole(work, measured), predict_marked(work, measured)
    assert 0.9 * whole < chunked < whole
    choice = choose_mark(work, measured)
    assert not choice.keeps
    assert "% faster, less than 10%: " in choice.reason


def test_the_gain_is_predicted() -> None:
    """Transfers of 1 ms behind matmuls of 1 ms: only one transfer and one matmul do not overlap."""
    work = MarkedWork(
        *(2, 4, 4, (ChunkMatmul(1000, 1, 1, 4000, 1, stage=1),)),
        (ChunkCollective("allgather", 1000.0),),
    )
    measured = link(1e6, matmul=Times(((1, 1000), (1, 2), (1, 2)), (1e-6,) * 4 + (1e-3,) * 4))
    assert predict_whole(work, measured) == pytest.approx(8e-3, rel=0.01)
    assert predict_marked(work, measured) == pytest.approx(5e-3, rel=0.01)
    choice = choose_mark(work, measured)
    assert choice.keeps
    assert choice.reason == "5 ms predicted, 8 ms without chunks"


def test_the_second_half_of_an_allreduce_does_not_overlap() -> None:
    """4 matmuls of 1 ms hide first halves of 0.5 ms, but for that of the last chunk."""
    work = MarkedWork(
        *(2, 4, 4, (ChunkMatmul(1000, 1, 1, 4000, 1),)), (ChunkCollective("allreduce", 500.0),)
    )
    measured = link(1e6, matmul=Times(((1, 1000), (1, 2), (1, 2)), (1e-6,) * 4 + (1e-3,) * 4))
    assert predict_whole(work, measured) == pytest.approx(8e-3, rel=0.01)
    assert predict_marked(work, measured) == pytest.approx(6.5e-3, rel=0.01)


@pytest.mark.parametrize("kind", ["allgather", "reduce_scatter"])
def test_a_ring_is_predicted(kind: str) -> None:
    """Of 4 ranks: 4 matmuls of 1 ms and 3 transfers of 1 ms."""
    work = MarkedWork(
        *(4, 4, 2, (ChunkMatmul(1000, 1, 1, 4000, 1),), (ChunkCollective(kind, 1000.0),)),
        ring=True,
    )
    measured = link(
        1e6, workers=4, matmul=Times(((1, 1000), (1, 2), (1, 2)), (1e-6,) * 4 + (1e-3,) * 4)
    )
    assert predict_whole(work, measured) == pytest.approx(7e-3, rel=0.01)
    assert predict_marked(work, measured) == pytest.approx(4e-3, rel=0.01)


def test_reading_in_place_that_is_faster_is_preferred() -> None:
    """A mark is left to `OverlapCommunication` if that gains more."""
    as_long = Times(((1, 4096), (32, 33), (64, 65)), (6e-6,) * 4 + (26e-3,) * 4)
    processor = dict.fromkeys(COLLECTIVES, Times(((1, 10**9),), (1e-3, 1e-3)))
    measured = link(1e7, matmul=as_long, collectives=processor)
    module = gathered_matmul((4, 2, 512, 32))
    with collect_report() as report:
        tvm_ipc.get_pipeline("llvm", 2, overlap=measured, blas=False)(module)
    mark = next(one for one in report.decisions if one.subject.startswith("stream="))
    site = next(one for one in report.decisions if one.pass_name == "OverlapCommunication")
    assert mark.verdict == "left out"
    assert mark.reason.startswith("OverlapCommunication would be "), mark.reason
    assert site.verdict.startswith("in ")


@pytest.mark.parametrize(
    ("module", "measured", "reason"),
    [
        (gathered_matmul, {"workers": 4}, "the team has 2 ranks, the calibration 4 workers"),
        (lambda: gathered_matmul((4, 2, N, 32)), {}, "an extent is only known when the program"),
    ],
)
def test_a_mark_whose_time_is_unknown_is_kept(
    module: Callable[[], tvm.IRModule], measured: dict[str, Any], reason: str
) -> None:
    verdict, found, _ = decision(module(), calibration(chunk=1.0, **measured))
    assert verdict == "in 4 chunks"
    assert f"; no time can be predicted: {reason}" in found


def test_force_needs_a_stream() -> None:
    x = relax.Var("x", relax.TensorType((4, 8), "float32"))
    with pytest.raises(ValueError, match="place: force is True, but stream is None"):
        place(x, MESH, ALL, force=True)


def test_force_is_printed_and_parsed() -> None:
    module = gathered_matmul(force=True)
    parsed = tvm.script.from_source(module.script())
    tvm.ir.assert_structural_equal(parsed, module)
    with pytest.raises(ValueError, match="StructuralEqual"):
        tvm.ir.assert_structural_equal(gathered_matmul(), module)


# ---- what cannot be honoured --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (
            lambda: summed_matmul(lambda emit, y: op.cumsum(emit(place(y, MESH, ALL)), 0)),
            "R.cumsum cannot be computed in chunks along axis 0: it needs all of that axis",
        ),
        (lambda: summed_matmul(shape=(N, 6, 32)), "the number of chunks is n"),
    ],
)
def test_what_is_left_out(module: Callable[[], tvm.IRModule], reason: str) -> None:
    verdict, found, program = decision(module())
    assert verdict == "left out"
    assert reason in found
    assert "tvm_ipc.start" not in program


def test_a_mark_without_a_collective_is_left_out() -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 8), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit(op.exp(x))
            out = builder.emit_output(place(y, MESH, ALL, stream=0))
        builder.emit_func_output(out)
    verdict, reason, _ = decision(builder.get())
    assert verdict == "left out"
    assert "no collective computes it" in reason


# ---- schedules ----------------------------------------------------------------------------------


def events(mod: tvm.IRModule) -> list[str]:
    """Matmuls, requests and waits of a program, in order."""
    found = []
    for call in calls(mod["main"]):
        name = str(getattr(call.op, "global_symbol", getattr(call.op, "name", "")))
        if name == "tvm_ipc.start":
            found.append(f"start {str(call.args[0].value).removeprefix('tvm_ipc.')}")
        elif name in ("relax.matmul", "tvm_ipc.wait"):
            found.append(name.rpartition(".")[2])
    return found


@pytest.mark.parametrize("streams", [1, 2, 3, 9])
def test_results_are_summed_while_later_ones_are_computed(streams: int) -> None:
    program, started = [], 0
    for chunk in range(4):
        while started < min(chunk + streams, 4):
            program += ["matmul", "start allreduce"]
            started += 1
        program.append("wait")
    assert events(LowerPlacements(streams=streams)(summed_matmul())) == program


def test_a_region_ends_at_another_mark() -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 2, 8), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            first = builder.emit(place(place(x, MESH, {"d": Shard(1)}), MESH, ALL, stream=0))
            second = builder.emit(op.exp(first))
            mine = builder.emit(place(second, MESH, {"d": Shard(1)}))
            out = builder.emit_output(place(builder.emit(op.exp(mine)), MESH, ALL, stream=0))
        builder.emit_func_output(out)
    after = LowerPlacements()(builder.get())
    assert events(after).count("start allgather") == 8


def test_the_ring_sends_to_the_next_rank() -> None:
    after = LowerPlacements()(gathered_matmul((2, 4, 64, 32), stream=1))
    assert events(after) == ["start permute", "matmul", "wait", "matmul"]


def test_a_partial_result_stays_partial() -> None:
    """A placement that moves nothing leaves the sum to a later one."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 2, 8), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            parts = builder.emit(op.sum(builder.emit(place(x, MESH, {"d": Shard(1)})), 1))
            marked = builder.emit(place(parts, MESH, {"d": Partial("sum")}, stream=0))
            out = builder.emit_output(place(marked, MESH, ALL))
        builder.emit_func_output(out)
    verdict, reason, _ = decision(builder.get())
    assert verdict == "left out"
    assert "no collective computes it" in reason
