# SPDX-License-Identifier: Apache-2.0
"""OverlapCommunication: what becomes of a product and its communication, and what is left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tvm
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R

import tvm_ipc
from tests.made_up_calibration import calibration
from tests.transform.script_forms import assemble, expose, own_slice, peer_view, reduce_slices, view
from tvm_ipc import comm  # R.comm
from tvm_ipc.transform import OverlapCommunication
from tvm_ipc.transform.overlap.cost_model import Choice, Workload


def test_rows_that_are_gathered_are_shown() -> None:
    @I.ir_module
    class Before:
        @R.function
        def main(
            x: R.Tensor((32, 16), "float32"),
            w: R.Tensor((16, 16), "float32"),
            b: R.Tensor((16,), "float32"),
        ):
            with R.dataflow():
                whole = R.comm.allgather(x, workers=2)
                h = R.matmul(whole, w)
                z = R.add(h, b)
                R.output(z)
            return z

    @I.ir_module
    class Expected:
        @R.function
        def main(
            x: R.Tensor((32, 16), "float32"),
            w: R.Tensor((16, 16), "float32"),
            b: R.Tensor((16,), "float32"),
        ):
            with R.dataflow():
                x0 = view(x, 0, 16, 16)
                shown0 = expose(x0)
                x1 = view(x, 1024, 16, 16)
                shown1 = expose(x1)
                own = R.matmul(x, w)
                own_z = R.add(own, b)
                rows0 = peer_view(shown0, 1, 16, 16)
                h0 = R.matmul(rows0, w)
                z0 = R.add(h0, b)
                rows1 = peer_view(shown1, 1, 16, 16)
                h1 = R.matmul(rows1, w)
                z1 = R.add(h1, b)
                z = assemble([0, 2048, 0, 1, 2048, 0, 1, 2048, 1024], own_z, z0, z1, shape=(64, 16))
                R.output(z)
            return z

    tvm.ir.assert_structural_equal(OverlapCommunication(chunks=2)(Before), Expected)


def test_sums_that_are_scattered_are_shown() -> None:
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((32, 16), "float32"), w: R.Tensor((16, 16), "float32")):
            with R.dataflow():
                y = R.matmul(x, w)
                z = R.comm.reduce_scatter(y, "sum", workers=2)
                R.output(z)
            return z

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((32, 16), "float32"), w: R.Tensor((16, 16), "float32")):
            with R.dataflow():
                rows = own_slice(x, 1, 1024, 0, 16, 16)
                y0 = R.matmul(rows, w)
                shown = expose(y0)
                mine = own_slice(x, 0, 1024, 0, 16, 16)
                own = R.matmul(mine, w)
                theirs = peer_view(shown, -1, 16, 16)
                total = reduce_slices(own, theirs, shape=(16, 16))
                z = assemble([0, 0, 0], total, shape=(16, 16))
                R.output(z)
            return z

    tvm.ir.assert_structural_equal(OverlapCommunication(chunks=1)(Before), Expected)


def test_rows_that_are_left_over_are_summed_by_all() -> None:
    """Five rows of two ranks, of a batch of one that is a matrix in between."""

    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((1, 5, 16), "float32"), w: R.Tensor((16, 16), "float32")):
            with R.dataflow():
                rows = R.reshape(x, R.shape([5, 16]))
                y = R.matmul(rows, w)
                stacked = R.reshape(y, R.shape([1, 5, 16]))
                z = R.comm.allreduce(stacked, "sum")
                R.output(z)
            return z

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((1, 5, 16), "float32"), w: R.Tensor((16, 16), "float32")):
            with R.dataflow():
                rows = R.reshape(x, R.shape([5, 16]))
                part = own_slice(rows, 1, 128, 0, 2, 16)
                y0 = R.matmul(part, w)
                shown = expose(y0)
                last = view(rows, 256, 1, 16)
                left_over = R.matmul(last, w)
                left_over_shown = expose(left_over)
                mine = own_slice(rows, 0, 128, 0, 2, 16)
                own = R.matmul(mine, w)
                theirs = peer_view(shown, -1, 2, 16)
                total = reduce_slices(own, theirs, shape=(2, 16))
                total_shown = expose(total)
                others = peer_view(left_over_shown, -1, 1, 16)
                rest = reduce_slices(left_over, others, shape=(1, 16))
                their_total = peer_view(total_shown, 1, 2, 16)
                z = assemble(
                    [0, 128, 0, 0, 0, 256, 1, 128, 0], total, rest, their_total, shape=(1, 5, 16)
                )
                R.output(z)
            return z

    tvm.ir.assert_structural_equal(OverlapCommunication(chunks=1, world_size=2)(Before), Expected)


def test_what_is_gathered_ends_before_the_rows_beyond_the_end() -> None:
    """Products of three rows of two ranks, one of a matrix: one row of the four is none."""

    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((1, 2, 16), "float32"), w: R.Tensor((16, 16), "float32")):
            with R.dataflow():
                whole = R.comm.allgather(x, axis=1, extent=3, workers=2)
                rows = R.reshape(whole, R.shape([3, 16]))
                z = R.matmul(rows, w)
                R.output(z)
            return z

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((1, 2, 16), "float32"), w: R.Tensor((16, 16), "float32")):
            with R.dataflow():
                shown = expose(x)
                own = R.matmul(x, w)
                rows = peer_view(shown, 1, 1, 2, 16)
                theirs = R.matmul(rows, w)
                joined = assemble([0, 128, 0, 1, 128, 0], own, theirs, shape=(1, 4, 16))
                z = view(joined, 0, 3, 16)
                R.output(z)
            return z

    tvm.ir.assert_structural_equal(OverlapCommunication(chunks=1)(Before), Expected)


def program(
    build: Callable[[relax.BlockBuilder, Any, Any], Any],
    shape: tuple[Any, ...] = (32, 16),
    weight: tuple[int, ...] = (16, 16),
) -> tvm.IRModule:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    w = relax.Var("w", relax.TensorType(weight, "float32"))
    with builder.function("main", [x, w]):
        with builder.dataflow():
            out = builder.emit_output(build(builder, x, w))
        builder.emit_func_output(out)
    return builder.get()


def gather(builder: relax.BlockBuilder, x: Any, **options: Any) -> Any:
    return builder.emit(comm.allgather(x, workers=options.pop("workers", 2), **options))


def used_twice(builder: relax.BlockBuilder, x: Any, w: Any) -> Any:
    whole = gather(builder, x)
    return builder.emit(
        relax.op.add(builder.emit(relax.op.matmul(whole, w)), builder.emit(relax.op.sum(whole)))
    )


def scattered(
    build: Callable[[relax.BlockBuilder, Any, Any], Any], axis: int = 0
) -> Callable[[relax.BlockBuilder, Any, Any], Any]:
    return lambda builder, x, w: comm.reduce_scatter(build(builder, x, w), axis=axis, workers=2)


LEFT_ALONE: dict[str, tuple[str, tvm.IRModule]] = {
    "one rank": (
        "its team has one rank",
        program(lambda b, x, w: relax.op.matmul(gather(b, x, workers=1), w)),
    ),
    "uneven": (
        "an operator after the matmul does not map the padding, which is zero, to zeros",
        program(
            lambda b, x, w: comm.reduce_scatter(
                b.emit(relax.op.exp(b.emit(relax.op.matmul(x, w)))), workers=2, uneven=True
            ),
            shape=(31, 16),
        ),
    ),
    "fewer rows than ranks": (
        "it has 1 row; expected at least 1 row for each of 2 ranks",
        program(
            lambda b, x, w: comm.allreduce(b.emit(relax.op.matmul(x, w)), team=[[0, 1]]),
            shape=(1, 16),
        ),
    ),
    "columns are reshaped": (
        "an operator other than a matmul uses",
        program(
            lambda b, x, w: relax.op.matmul(b.emit(relax.op.reshape(gather(b, x), (128, 8))), w),
            weight=(8, 16),
        ),
    ),
    "another use": ("an operator other than a matmul uses", program(used_twice)),
    "no use": ("an operator other than a matmul uses", program(lambda b, x, w: gather(b, x))),
    "right operand": (
        "its rows are not those of the matmul's left operand",
        program(lambda b, x, w: relax.op.matmul(w, gather(b, x)), (8, 16)),
    ),
    "summed over": (
        "its axis is the last one",
        program(lambda b, x, w: relax.op.matmul(gather(b, x, axis=1), w), (32, 8)),
    ),
    "ranks of unknown number": (
        "the number of ranks in its team is unknown",
        program(lambda b, x, w: comm.allreduce(b.emit(relax.op.matmul(x, w)))),
    ),
    "no product": (
        "its operand is not the result of a matmul",
        program(scattered(lambda b, x, w: b.emit(relax.op.add(x, x)))),
    ),
    "other rows": (
        "an operator after the matmul also needs other rows",
        program(scattered(lambda b, x, w: b.emit(relax.op.add(b.emit(relax.op.matmul(x, w)), x)))),
    ),
    "not aligned": (
        "a rank has 60 bytes of rows",
        program(
            scattered(lambda b, x, w: b.emit(relax.op.matmul(x, w))), shape=(2, 15), weight=(15, 16)
        ),
    ),
    "another kind": (
        "no rule overlaps all_to_all with a matmul, only allgather, reduce_scatter, allreduce",
        program(lambda b, x, w: relax.op.matmul(b.emit(comm.all_to_all(x, 0, 0, workers=2)), w)),
    ),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_cannot_be_divided_is_left_alone(name: str) -> None:
    reason, before = LEFT_ALONE[name]
    with tvm_ipc.transform.collect_report() as report:
        after = OverlapCommunication(chunks=2)(before)
    tvm.ir.assert_structural_equal(after, before)
    (decision,) = report.decisions
    assert decision.verdict == "skipped"
    assert reason in decision.reason


@pytest.mark.parametrize("blocks", [1, 65])
def test_a_rank_exposes_so_many_tensors_at_most(blocks: int) -> None:
    """64 chunks for each of two peers; blocks of rows do not count."""

    def build(builder: relax.BlockBuilder, x: Any, w: Any) -> Any:
        return comm.reduce_scatter(builder.emit(relax.op.matmul(x, w)), axis=1, workers=3)

    before = program(build, (blocks, 192, 16))
    with tvm_ipc.transform.collect_report() as report:
        after = OverlapCommunication(chunks=64)(before)
    tvm.ir.assert_structural_equal(after, before)
    (decision,) = report.decisions
    assert decision.verdict == "skipped"
    assert "a rank would expose 128 tensors at a time" in decision.reason
    assert "of rows for 3 ranks; the most is 64" in decision.reason


@pytest.mark.parametrize("blocks", [9, None])
def test_a_function_that_must_stay_pure_has_no_loops(blocks: int | None) -> None:
    """The functions of a loop write to their arguments: blocks of a known number are unrolled."""
    number = tirx.Var("n", "int64") if blocks is None else blocks
    build = lambda b, x, w: relax.op.matmul(gather(b, x, axis=1), w)  # noqa: E731
    layer = program(build, (number, 8, 16))
    main = relax.BlockBuilder(layer)
    x = relax.Var("x", relax.TensorType((blocks or 4, 8, 16), "float32"))
    w = relax.Var("w", relax.TensorType((16, 16), "float32"))
    with main.function("caller", [x, w]):
        main.emit_func_output(main.emit(relax.Call(layer.get_global_var("main"), [x, w])))
    with tvm_ipc.transform.collect_report() as report:
        after = OverlapCommunication(chunks=2)(main.get())
    (decision,) = report.decisions
    assert decision.verdict == ("skipped" if blocks is None else "in 2 chunks")
    assert ("must stay pure, since other functions call it" in decision.reason) == (blocks is None)
    assert len(after.functions) == 2
    assert after["main"].is_pure


def test_rows_that_are_matrices_are_predicted_with_all_of_their_rows() -> None:
    """A gather of one matrix of each rank takes as long as one of the matrix's rows."""
    reasons = []
    for shape, axis in (((4, 512, 16), 1), ((4, 1, 512, 16), 1)):
        before = program(lambda b, x, w, at=axis: relax.op.matmul(gather(b, x, axis=at), w), shape)
        with tvm_ipc.transform.collect_report() as report:
            OverlapCommunication(calibration(chunk=1e-2))(before)
        reasons.append(report.decisions[0].reason)
    assert reasons[0].partition(" predicted, ")[2] == reasons[1].partition(" predicted, ")[2] != ""


def test_sites_have_chunks_of_their_own() -> None:
    def two(builder: relax.BlockBuilder, x: Any, w: Any) -> Any:
        first = builder.emit(comm.allgather(x, workers=2), "first")
        h = builder.emit(relax.op.matmul(first, w), "h")
        second = builder.emit(comm.allgather(h, workers=2), "second")
        return relax.op.matmul(second, w)

    before = program(two)
    with tvm_ipc.transform.collect_report() as report:
        OverlapCommunication(chunks=4, sites={"first": 0, "second": 2})(before)
    assert [one.verdict for one in report.decisions] == ["skipped", "in 2 chunks"]
    with pytest.raises(
        ValueError, match="'third' is not the variable of a collective before or after"
    ):
        OverlapCommunication(chunks=4, sites={"third": 2})(before)


def between(kind: str) -> Any:
    """Return a program with a matmul between a gather and a reduction."""

    def build(builder: relax.BlockBuilder, x: Any, w: Any) -> Any:
        whole = builder.emit(comm.allgather(x, workers=2), "whole")
        h = builder.emit(relax.op.matmul(whole, w), "h")
        reduce_scatter = comm.reduce_scatter(h, workers=2)
        return builder.emit(comm.allreduce(h) if kind == "allreduce" else reduce_scatter, "z")

    return program(build)


SITES_OF_ONE_MATMUL: dict[str, tuple[dict[str, int] | None, list[str]]] = {
    "the first one": (None, ["in 2 chunks", "skipped"]),
    "the one that is named": ({"z": 4}, ["skipped", "in 4 chunks"]),
    "the first of two that are named": ({"whole": 1, "z": 4}, ["in 1 chunks", "skipped"]),
    "the one that is wanted": ({"whole": 0}, ["skipped", "in 2 chunks"]),
    "none": ({"whole": 0, "z": 0}, ["skipped", "skipped"]),
}


@pytest.mark.parametrize("kind", ["reduce_scatter", "allreduce"])
@pytest.mark.parametrize("name", SITES_OF_ONE_MATMUL)
def test_a_matmul_between_two_collectives_is_of_one_site(kind: str, name: str) -> None:
    sites, verdicts = SITES_OF_ONE_MATMUL[name]
    with tvm_ipc.transform.collect_report() as report:
        after = OverlapCommunication(chunks=2, sites=sites, world_size=2)(between(kind))
    relax.analysis.well_formed(after)
    assert [one.verdict for one in report.decisions] == verdicts
    reasons = [one.reason for one in report.decisions]
    if verdicts[0].startswith("in "):
        assert reasons[1] == "its matmul is overlapped with the allgather of x instead"
    elif verdicts[1].startswith("in ") and name != "the one that is wanted":
        assert reasons[0] == f"its matmul is overlapped with the {kind} of h instead"


def test_a_matmul_is_of_the_site_that_gains_more(monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds in (0.5, 2.0):

        def choose(workload: Workload, *_: Any, gather: float = seconds) -> Choice:
            return Choice("direct", 2, gather if workload.kind == "allgather" else 1.0, 4.0, "")

        monkeypatch.setattr(tvm_ipc.transform.overlap_communication_with_matmuls, "choose", choose)
        with tvm_ipc.transform.collect_report() as report:
            OverlapCommunication(chunks=2)(between("reduce_scatter"))
        overlapped = [one.subject for one in report.decisions if one.verdict == "in 2 chunks"]
        assert overlapped == ["allgather of x" if seconds < 1 else "reduce_scatter of h"]


def test_what_peers_ask_for_first_is_made_first() -> None:
    """Over a link that is as slow as the product, another order is slower than no chunks at all."""

    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((192, 16), "float32"), w: R.Tensor((16, 16), "float32")):
            with R.dataflow():
                y = R.matmul(x, w)
                z = R.comm.reduce_scatter(y, "sum", workers=3)
                R.output(z)
            return z

    after = tvm.transform.Sequential([OverlapCommunication(chunks=2)])(Before)
    shift = {"tvm_ipc.own_slice": 3, "tvm_ipc.peer_view": 2}  # after the function itself
    order: dict[str, list[int]] = {name: [] for name in shift}
    for binding in after["main"].body.blocks[0].bindings:
        called = binding.value.args[0] if isinstance(binding.value, relax.Call) else None
        if isinstance(called, relax.ExternFunc) and called.global_symbol in shift:
            name = str(called.global_symbol)
            order[name].append(int(binding.value.args[shift[name]].value))
    assert order == {"tvm_ipc.own_slice": [1, 2, 1, 2, 0], "tvm_ipc.peer_view": [-1, -2, -1, -2]}


def test_it_wants_a_calibration_or_a_number() -> None:
    with pytest.raises(
        ValueError, match="expected either a calibration, which determines the number"
    ):
        OverlapCommunication()
    with pytest.raises(ValueError, match="a number of chunks, 0 to 64"):
        OverlapCommunication(chunks=65)


def test_products_are_made_where_all_is_there_that_they_need() -> None:
    """The second product needs what is made of the first one; the third, its bias later."""

    def build(builder: relax.BlockBuilder, x: Any, w: Any) -> Any:
        whole = gather(builder, x)
        one = builder.emit(relax.op.matmul(whole, w))
        other = builder.emit(relax.op.sum(one, axis=0))
        weight = builder.emit(relax.op.multiply(w, other))
        two = builder.emit(relax.op.matmul(whole, weight))
        three = builder.emit(relax.op.matmul(whole, w))
        late = builder.emit(relax.op.sum(two, axis=0))
        three = builder.emit(relax.op.add(three, late))
        return relax.op.add(builder.emit(relax.op.add(one, two)), three)

    after = OverlapCommunication(chunks=2)(program(build))
    relax.analysis.well_formed(after)
    names = [
        str(call.args[0].global_symbol)
        for call in tvm_ipc.analysis.walk_and_rewrite_bindings.calls(after["main"])
        if call.op.name == "relax.call_dps_packed"
    ]
    assert names == ["tvm_ipc.assemble"] * 3
