# SPDX-License-Identifier: Apache-2.0
"""Chunks that are computed on several streams of a GPU: chunk i on stream i % n."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tvm
from tvm import relax, tirx
from tvm.relax import op

import tvm_ipc
from tests.transform.test_pipelined_gather import ALL, MESH, marked
from tvm_ipc import comm
from tvm_ipc.comm import Shard, place
from tvm_ipc.spmd import LowerPlacements
from tvm_ipc.transform import PipelineAllGather, collect_report, verify_cross_rank_safety

TARGET = tvm.target.Target({"kind": "cuda", "arch": "sm_90"}, host="llvm")


def lowered(mod: tvm.IRModule, streams: int, target: Any = TARGET, **options: Any) -> Any:
    """The module whose memory is planned, and the reason of its mark."""
    found: list[tvm.IRModule] = []

    @tvm.instrument.pass_instrument
    class Keep:
        def run_after_pass(self, mod: tvm.IRModule, info: Any) -> None:
            if str(info.name) == "StaticPlanBlockMemory":
                found.append(mod)

    with tvm.transform.PassContext(instruments=[Keep()]), collect_report() as report:
        tvm_ipc.get_pipeline(target, 2, streams=streams, **options)(mod)
    unproved = [one for one in report.decisions if one.verdict == "not proved"]
    assert all(one.subject == "communication" for one in unproved)  # of loops over n chunks
    (mark,) = [one for one in report.decisions if one.subject.startswith("stream=")]
    return found[0], mark.reason


def events(function: relax.Function) -> list[str]:
    """The switches between streams, and what is started, awaited and computed."""
    found = []
    for block in function.body.blocks:
        for binding in block.bindings:
            call = binding.value
            name = str(getattr(getattr(call, "op", None), "global_symbol", ""))
            short = name.removeprefix("tvm_ipc.")
            if short in ("set_stream", "wait_stream"):
                found.append(f"{'on' if short == 'set_stream' else 'after'} {int(call.args[0])}")
            elif short in ("start", "wait"):
                found.append(short)
            elif isinstance(getattr(call, "op", None), tvm.ir.GlobalVar):
                found.append("kernel" if "chunk" not in call.op.name_hint else "call")
    return found


def summed(
    chunks: int = 4,
    make: Callable[..., Any] = op.matmul,
    after: Callable[[Any], Any] = lambda y: y,
) -> tvm.IRModule:
    """A matmul whose result is summed over ranks, marked along axis 0, and what follows it."""
    x = relax.Var("x", relax.TensorType((chunks, 8, 32), "float32"))
    w = relax.Var("w", relax.TensorType((32, 16), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w]):
        with builder.dataflow():
            rows = builder.emit(place(x, MESH, {"d": Shard(2)}))
            y = builder.emit(make(rows, builder.emit(place(w, MESH, {"d": Shard(0)}))))
            out = builder.emit_output(after(place(y, MESH, ALL, stream=0)))
        builder.emit_func_output(out)
    return builder.get()


def test_everything_of_a_chunk_is_on_its_stream() -> None:
    mod, reason = lowered(marked((3, 2, 8, 32)), 2)
    assert reason == "their rows are gathered asynchronously, 2 at a time, computed on 2 streams"
    assert events(mod["main"]) == [
        *("on 1", "after 0", "on 0"),
        *("start", "on 1", "start"),
        *("on 0", "wait", "kernel", "start"),
        *("on 1", "wait", "kernel"),
        *("on 0", "wait", "kernel"),
        *("on 0", "after 1"),
    ]
    assert verify_cross_rank_safety(mod) == []


def test_requests_of_results_start_on_the_stream_of_their_chunk() -> None:
    mod, reason = lowered(summed(), 3)
    assert reason == "asynchronous allreduce, 3 chunks at a time, computed on 3 streams"
    assert events(mod["main"])[5:15] == [
        *("kernel", "start", "on 1", "kernel", "start", "on 2", "kernel", "start"),
        *("on 0", "wait"),
    ]
    assert events(mod["main"])[-3:] == ["on 0", "after 1", "after 2"]


@pytest.mark.parametrize("streams", [1, 2, 5])
@pytest.mark.parametrize("make", [marked, lambda: summed(4)])
def test_there_are_as_many_streams_as_chunks_at_a_time(
    make: Callable[[], tvm.IRModule], streams: int
) -> None:
    mod, _ = lowered(make(), streams)
    used = {event for event in events(mod["main"]) if event.startswith("on")}
    assert used == ({f"on {k}" for k in range(min(streams, 4))} if streams > 1 else set())


@pytest.mark.parametrize("make", [marked, lambda: summed(4), lambda: marked((20, 2, 8, 32))])
def test_programs_of_cpus_have_no_streams(make: Callable[[], tvm.IRModule]) -> None:
    mod, reason = lowered(make(), 3, "llvm")
    assert "_stream" not in mod.script()
    assert "computed on" not in reason


@pytest.mark.parametrize("chunks", [20, tirx.Var("n", "int64")], ids=str)
def test_a_step_of_a_loop_has_streams(chunks: Any) -> None:
    mod, reason = lowered(marked((chunks, 2, 8, 32)), 3)
    assert reason == (
        "their rows are gathered asynchronously, 3 at a time, in a loop, computed on 3 streams"
    )
    (step,) = [
        function
        for variable, function in mod.functions_items()
        if variable.name_hint == "main_lv1_chunk_step"
    ]
    assert events(step) == [
        *("on 1", "after 0", "on 2", "after 0", "on 0"),
        *("on 1", "start", "on 2", "start"),
        *("on 0", "kernel", "start"),
        *("on 1", "wait", "kernel"),
        *("on 2", "wait", "kernel"),
        *("on 0", "after 1", "after 2", "wait"),
    ]
    assert not any(event.startswith("on") for event in events(mod["main"]))


def ring() -> tvm.IRModule:
    x = relax.Var("x", relax.TensorType((16, 32), "float32"))
    w = relax.Var("w", relax.TensorType((32, 16), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w]):
        with builder.dataflow():
            mine = builder.emit(place(x, MESH, {"d": Shard(0)}))
            y = builder.emit(op.matmul(builder.emit(place(mine, MESH, ALL)), w))
            out = builder.emit_output(place(y, MESH, ALL, stream=0))
        builder.emit_func_output(out)
    return builder.get()


def sorted_rows() -> tvm.IRModule:
    return marked(make=lambda x, w, b: op.sort(x, axis=2))


@pytest.mark.parametrize(
    ("mod", "reason"),
    [
        (ring, ", computed on one stream: a ring multiplies one shard at a time"),
        (sorted_rows, ", computed on one stream: the kernels of R.sort may share a workspace"),
        (lambda: summed(70), ", computed on one stream: a rank has 64 streams"),
    ],
)
def test_what_stays_on_one_stream(mod: Callable[[], tvm.IRModule], reason: str) -> None:
    module, said = lowered(mod(), 70)
    assert said.endswith(reason)
    assert not any(event.startswith("on") for event in events(module["main"]))


def test_a_gather_in_a_program_for_one_rank() -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((64, 32), "float32"))
    w = relax.Var("w", relax.TensorType((32, 16), "float32"))
    with builder.function("main", [x, w]):
        with builder.dataflow():
            whole = builder.emit(comm.allgather(x, workers=2))
            out = builder.emit_output(op.matmul(whole, w))
        builder.emit_func_output(out)
    with collect_report() as report:
        after = PipelineAllGather(4, 2, compute_streams=True)(builder.get())
    (said,) = report.decisions
    assert said.reason == "2 at a time, computed on 2 streams"
    assert events(after["main"])[:3] == ["on 1", "after 0", "on 0"]
    plain = PipelineAllGather(4, 2)(builder.get())
    assert "set_stream" not in plain.script()


def test_the_program_is_printed_and_parsed() -> None:
    after = LowerPlacements(compute_streams=True)(marked())
    assert after.script().count("tvm_ipc.set_stream") == 8
    tvm.ir.assert_structural_equal(tvm.script.from_source(after.script()), after)


def test_asynchronous_collectives_are_awaited_before_streams() -> None:
    """A wait orders one stream, so what several streams read is waited for before the fork."""
    x = relax.Var("x", relax.TensorType((4, 8, 32), "float32"))
    w = relax.Var("w", relax.TensorType((32, 16), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w]):
        with builder.dataflow():
            ws = builder.emit(place(builder.emit(op.matmul(w, w_t(builder, w))), MESH, ALL))
            part = builder.emit(place(x, MESH, {"d": Shard(2)}))
            y = builder.emit(op.matmul(part, builder.emit(place(ws, MESH, {"d": Shard(0)}))))
            out = builder.emit_output(place(y, MESH, ALL, stream=0))
        builder.emit_func_output(out)
    mod, reason = lowered(builder.get(), 2, async_collectives=True)
    assert reason.endswith("computed on 2 streams")
    assert verify_cross_rank_safety(mod) == []


def w_t(builder: relax.BlockBuilder, w: relax.Var) -> relax.Var:
    """The transpose of a matrix whose rows are summed over ranks."""
    sharded = builder.emit(place(w, MESH, {"d": Shard(1)}))
    return builder.emit(op.permute_dims(sharded))
