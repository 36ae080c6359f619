# SPDX-License-Identifier: Apache-2.0
"""Axes that `comm.place` marks for streams: chunks are gathered while others are multiplied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tvm
from tvm import relax, tirx
from tvm.relax import op
from tvm.script import ir as I
from tvm.script import relax as R

import tvm_ipc
from tests.transform.loads import power
from tests.transform.script_forms import alloc
from tvm_ipc import comm  # noqa: F401 - R.comm
from tvm_ipc.analysis.walk_and_rewrite_bindings import calls
from tvm_ipc.comm import Mesh, Replica, Shard, place
from tvm_ipc.spmd import LowerPlacements
from tvm_ipc.transform import collect_report, verify_cross_rank_safety

MESH = Mesh({"d": 2})
ROWS = {"d": Shard(1)}
ALL = {"d": Replica()}


@I.ir_module
class Before:
    """The chunks are axis 0, the ranks axis 1; every rank has the weight and the bias."""

    @R.function
    def main(
        x: R.Tensor((3, 2, 8, 32), "float32"),
        weight: R.Tensor((16, 32), "float32"),
        bias: R.Tensor((16,), "float32"),
    ):
        with R.dataflow():
            mine = R.comm.place(x, MESH, ROWS)
            whole = R.comm.place(mine, MESH, ALL)
            y = R.add(R.matmul(whole, R.permute_dims(weight)), bias)
            out = R.comm.place(y, MESH, ALL, stream=0)
            R.output(out)
        return out


@I.ir_module
class Expected:
    """What one rank runs with 2 streams."""

    @R.function(pure=False)
    def main(
        x: R.Tensor((3, 1, 8, 32), "float32"),
        weight: R.Tensor((16, 32), "float32"),
        bias: R.Tensor((16,), "float32"),
    ):
        with R.dataflow():
            gathered = alloc(2, 2, 8, 32)
            R.output(gathered)
        rows = R.comm.view(gathered, 0, (1, 2, 8, 32))
        mine = R.comm.view(x, 0, (1, 8, 32))
        work = R.comm.start(R.comm.allgather(mine, team=[0, 1]), rows)
        rows1 = R.comm.view(gathered, 512, (1, 2, 8, 32))
        mine1 = R.comm.view(x, 256, (1, 8, 32))
        work1 = R.comm.start(R.comm.allgather(mine1, team=[0, 1]), rows1)
        _ = R.comm.wait(work)
        with R.dataflow():
            t = R.permute_dims(weight)
            h = R.matmul(rows, t)
            part = R.add(h, bias)
            R.output(part)
        rows2 = R.comm.view(gathered, 0, (1, 2, 8, 32))
        mine2 = R.comm.view(x, 512, (1, 8, 32))
        work2 = R.comm.start(R.comm.allgather(mine2, team=[0, 1]), rows2)
        _1 = R.comm.wait(work1)
        with R.dataflow():
            t1 = R.permute_dims(weight)
            h1 = R.matmul(rows1, t1)
            part1 = R.add(h1, bias)
            R.output(part1)
        _2 = R.comm.wait(work2)
        with R.dataflow():
            t2 = R.permute_dims(weight)
            h2 = R.matmul(rows2, t2)
            part2 = R.add(h2, bias)
            y = R.call_dps_packed(
                "tvm_ipc.assemble",
                (
                    R.shape([2, 0, 1]),
                    R.shape([0, 0, 0, 0, 0, 1024, 0, 0, 2048]),
                    part,
                    part1,
                    part2,
                ),
                out_ty=R.Tensor((3, 2, 8, 16), "float32"),
            )
            R.output(y)
        return y


def test_what_one_rank_runs() -> None:
    with collect_report() as report:
        after = LowerPlacements()(Before)
    tvm.ir.assert_structural_equal(after, Expected)
    assert [(one.subject, one.verdict, one.reason) for one in report.decisions[1:]] == [
        ("stream=0 of out", "in 3 chunks", "their rows are gathered asynchronously, 2 at a time")
    ]
    relax.analysis.well_formed(after)
    tvm.ir.assert_structural_equal(tvm.script.from_source(after.script()), after)


def test_without_streams_the_program_is_as_it_would_be_without_marks() -> None:
    with collect_report() as report:
        after = LowerPlacements(streams=None)(Before)
    said = report.decisions[-1]
    assert (said.verdict, said.reason) == ("left out", "the pass has streams=None")
    kinds = [one.attrs.kind for one in calls(after["main"]) if hasattr(one.attrs, "kind")]
    assert kinds == ["allgather"]


@pytest.mark.parametrize("target", ["llvm", {"kind": "cuda", "arch": "sm_90"}])
def test_the_pipeline_has_streams_on_cpus_and_gpus(target: Any) -> None:
    with collect_report() as report:
        lowered = tvm_ipc.get_pipeline(target, 2)(Before)
    said = [(one.subject, one.verdict) for one in report.decisions]
    assert ("stream=0 of out", "in 3 chunks") in said
    assert "tvm_ipc.start" in lowered.script()


def host_program(chunks: int, streams: int) -> list[str]:
    """For each chunk: slices, the gather, a wait, the slice of the output, the product."""
    program, posted = ["gathered"], 0
    for chunk in range(chunks):
        while posted < min(chunk + streams, chunks):
            program += ["slice of gathered", "slice of x", "start allgather"]
            posted += 1
        program += ["wait", *(["out"] if chunk == 0 else []), "slice of out", "linear"]
    return program


def nodes(mod: tvm.IRModule) -> list[str]:
    """The same of a module whose scopes are not planned yet."""
    found, names = [], {mod["main"].params[0]: "x"}
    for block in mod["main"].body.blocks:
        for binding in block.bindings:
            call = binding.value
            if not isinstance(call, relax.Call):
                continue
            name = str(getattr(call.op, "global_symbol", "")).removeprefix("tvm_ipc.")
            if isinstance(call.op, tvm.ir.Op):
                assert call.op.name == "relax.builtin.alloc_tensor"
                names[binding.var] = "out" if found else "gathered"
                found.append(names[binding.var])
            elif name in ("view", "own_slice"):
                found.append(f"slice of {names[call.args[0]]}")
            elif name == "start":
                found.append(f"start {str(call.args[0].value).removeprefix('tvm_ipc.')}")
            else:
                found.append(name if name == "wait" else "linear")
    return found


def marked(
    shape: Any = (4, 2, 8, 32),
    make: Callable[..., Any] | None = None,
    axis: int = 0,
    rows: Any = ROWS,
) -> tvm.IRModule:
    """A function like `Before`, with something else for the product."""
    params = [
        relax.Var("x", relax.TensorType(shape, "float32")),
        relax.Var("w", relax.TensorType((32, 16), "float32")),
        relax.Var("b", relax.TensorType((16,), "float32")),
    ]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            whole = builder.emit(place(builder.emit(place(params[0], MESH, rows)), MESH, ALL))
            linear = make or (lambda x, w, b: op.add(builder.emit(op.matmul(x, w)), b))
            y = builder.emit(linear(whole, *params[1:]))
            out = builder.emit_output(place(y, MESH, ALL, stream=axis))
        builder.emit_func_output(out)
    return builder.get()


@pytest.mark.parametrize("blas", [False, True])
@pytest.mark.parametrize("streams", [1, 2, 3, 9])
@pytest.mark.parametrize("chunks", [1, 2, 5])
def test_the_host_program(chunks: int, streams: int, blas: bool) -> None:
    found: list[tvm.IRModule] = []

    @tvm.instrument.pass_instrument
    class Keep:
        def run_after_pass(self, mod: tvm.IRModule, info: Any) -> None:
            if str(info.name) == "ElideConcatCopies":
                found.append(mod)

    with tvm.transform.PassContext(instruments=[Keep()]):
        pipeline = tvm_ipc.get_pipeline("llvm", 2, streams=streams, blas=blas)
        pipeline(marked((chunks, 2, 8, 32)))
    (mod,) = found
    assert nodes(mod) == host_program(chunks, min(streams, chunks))
    assert verify_cross_rank_safety(mod) == []


def test_products_of_the_same_place_are_not_one() -> None:
    """Chunks are gathered in turns where others lay: what is equal in words is another product."""
    after = LowerPlacements(streams=1)(Before)
    once = relax.transform.EliminateCommonSubexpr()(after)
    matmuls = [one for one in calls(once["main"]) if one.op.same_as(tvm.ir.Op.get("relax.matmul"))]
    assert len(matmuls) == 3


def test_chunks_that_end_where_kernels_do_not_begin_have_places_of_their_own() -> None:
    after = LowerPlacements(streams=2)(
        marked((3, 2, 1, 3), lambda x, w, b: op.matmul(x, op.zeros((3, 1), "float32")))
    )
    text = after.script()
    assert text.count("R.builtin.alloc_tensor(R.shape([1, 2, 1, 3])") == 2


def test_several_products_of_what_is_gathered() -> None:
    def both(x: Any, w: Any, b: Any) -> Any:
        emit = relax.BlockBuilder.current().emit
        first = emit(op.nn.relu(emit(op.matmul(x, w))))
        second = emit(op.add(emit(op.matmul(x, emit(op.negative(w)))), b))
        return op.multiply(first, second)

    with collect_report() as report:
        after = LowerPlacements()(marked(make=both))
    said = report.decisions[-1]
    assert (said.verdict, said.reason) == (
        "in 4 chunks",
        "asynchronous allgather, 2 chunks at a time",
    )
    assert after.script().count("tvm_ipc.start") == 4


N = tirx.Var("n", "int64")


def unused(x: Any, w: Any, b: Any) -> Any:
    emit = relax.BlockBuilder.current().emit
    return op.add(emit(op.matmul(x, w)), emit(op.sum(x)))


@pytest.mark.parametrize(
    ("mod", "reason"),
    [
        (
            lambda: marked(make=unused),
            "; the preceding all-gather of x cannot be pipelined: an operator other than a matmul",
        ),
        (lambda: marked((0, 2, 8, 32)), "the number of chunks is 0"),
        (lambda: marked((4, 3, 8, 32)), "its shards are uneven"),
    ],
)
def test_what_is_left_out(mod: Callable[[], tvm.IRModule], reason: str) -> None:
    with collect_report() as report:
        after = LowerPlacements()(mod())
    said = report.decisions[-1]
    assert (said.subject, said.verdict) == ("stream=0 of gv", "left out")
    assert reason in said.reason
    assert "tvm_ipc.start" not in after.script()
    assert after["main"].is_pure


@pytest.mark.parametrize(
    ("mod", "chunks", "requests"),
    [
        (lambda: marked(make=lambda x, w, b: op.nn.relu(x)), 4, 4),
        (lambda: marked(axis=1), 2, 1),
        (lambda: marked((4, 8, 2, 32), rows={"d": Shard(2)}), 4, 4),
        (lambda: marked((8, 32), rows={"d": Shard(0)}), 2, 1),
    ],
)
def test_other_operators_and_axes_are_split_too(
    mod: Callable[[], tvm.IRModule], chunks: int, requests: int
) -> None:
    with collect_report() as report:
        after = LowerPlacements()(mod())
    assert report.decisions[-1].verdict == f"in {chunks} chunks"
    assert after.script().count("tvm_ipc.start") == requests


def test_extents_in_the_chunks_may_be_symbolic() -> None:
    text = LowerPlacements()(marked((3, 2, N, 32))).script()
    assert text.count("tvm_ipc.start") == 3
    assert 'R.call_packed("tvm_ipc.view", x, n * ' in text


def test_work_grows_linearly() -> None:
    def layers(count: int) -> tvm.IRModule:
        builder = relax.BlockBuilder()
        x = relax.Var("x", relax.TensorType((2, 2, 8, 32), "float32"))
        w = relax.Var("w", relax.TensorType((32, 32), "float32"))
        with builder.function("main", [x, w]):
            with builder.dataflow():
                y = builder.emit(place(x, MESH, ROWS))
                for _ in range(count):
                    whole = builder.emit(place(y, MESH, ALL))
                    h = builder.emit(place(builder.emit(op.matmul(whole, w)), MESH, ALL, stream=0))
                    y = builder.emit(place(h, MESH, ROWS))
                out = builder.emit_output(place(y, MESH, ALL))
            builder.emit_func_output(out)
        return builder.get()

    modules = {size: layers(size) for size in (8, 16, 32)}
    after = LowerPlacements()(modules[8])
    assert after.script().count("tvm_ipc.start") == 16
    assert power(lambda size: LowerPlacements()(modules[size]), 8) < 1.1
