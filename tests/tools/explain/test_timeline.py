# SPDX-License-Identifier: Apache-2.0
"""What goes on beside what: found in programs, and drawn."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import tvm
from tvm import relax, te
from tvm.script import ir as I
from tvm.script import relax as R

from tests.tools.explain.plans import explanation_of, overlapping_plan, small_plan
from tvm_ipc import comm  # noqa: F401 - R.comm
from tvm_ipc.tools.demo import default_model
from tvm_ipc.tools.explain import html_page, text_report
from tvm_ipc.tools.explain.memory_plan_chart_layout import condense
from tvm_ipc.tools.explain.summary_sentences import collectives_summary, upstream_caveat
from tvm_ipc.tools.explain.transfer_tracks_and_overlap import (
    is_matmul,
    list_names,
    overlap_summary,
    overlapping,
    tracks,
)
from tvm_ipc.tools.inspection.explain_decisions_and_memory import Question, explain
from tvm_ipc.transform.report import Event, FunctionPlan, Transfer


def plan_of(mod: tvm.IRModule, function: str = "main", **options: object) -> FunctionPlan:
    question = Question("here", "llvm", 2, "auto", {})
    explanation = explain(mod, question, blas=False, **options)
    return next(plan for plan in explanation.report.plans if plan.function == function)


def test_lanes_are_as_few_as_transfers_are_at_once() -> None:
    plan = overlapping_plan()
    shown, posted, called = plan.transfers
    assert tracks(plan) == [[shown, called], [posted]]
    assert tracks(small_plan()) == []


def test_what_goes_on_beside_a_transfer() -> None:
    plan = overlapping_plan()
    assert [overlapping(plan, one) for one in plan.transfers] == [
        ["blas.matmul", "blas.matmul", "silu"],
        ["silu"],
        [],
    ]
    assert overlap_summary(plan).startswith("2 of 3 transfers overlap with computation.")
    assert overlap_summary(replace(plan, transfers=plan.transfers[2:])).startswith(
        "No transfer overlaps with computation."
    )
    assert overlap_summary(small_plan()) == ""


def test_names_that_repeat_are_counted() -> None:
    assert list_names(["f", "g", "f"]) == "2 x f, g"
    assert list_names([f"f{k}" for k in range(9)]) == "f0, f1, f2, f3, f4, f5 and 3 more"


def test_events_that_move_or_compute_are_kept() -> None:
    plan = overlapping_plan()
    events = [part for event in plan.events for part in (Event("x = params[0]"), event)]

    def moved(transfer: Transfer) -> Transfer:
        return replace(
            transfer,
            first=2 * transfer.first + 1,
            last=2 * transfer.last + 1,
            starts=tuple(2 * event + 1 for event in transfer.starts),
            waits=tuple(2 * event + 1 for event in transfer.waits),
        )

    wide = replace(
        plan,
        events=tuple(events),
        tensors=tuple(replace(t, first=2 * t.first + 1, last=2 * t.last + 1) for t in plan.tensors),
        transfers=tuple(map(moved, plan.transfers)),
    )
    assert condense(wide) == plan
    # What nothing else needs.
    assert len(condense(replace(plan, tensors=())).events) == 10


def test_terminal_shows_what_is_on_its_way() -> None:
    lines = text_report.render(explanation_of(overlapping_plan())).splitlines()
    at = next(k for k, line in enumerate(lines) if "2 of 3 transfers" in line)
    drawn = [line[2:] for line in lines[at + 1 : at + 4]]
    # Six columns for an event, the last one of them empty where something ends.
    assert drawn == [
        f">>>>>->>>>>{'-' * 7}?????{'-' * 24}{' ' * 7}#####",
        f"{'':30}>>>>>-------------?????",
        f"{'':12}xxxxx       xxxxx       .....",
    ]
    assert "# transfer that the program waits for   - transfer during kernels" in lines[at + 4]
    assert "> data is ready for peers   ? waits for peers" in lines[at + 5]
    assert max(map(len, lines)) < 80


def test_collectives_are_counted_by_how_they_go_on() -> None:
    plan = overlapping_plan()
    assert collectives_summary(plan) == "11 events, 3 collectives, 1 asynchronous and 1 in chunks."
    assert collectives_summary(
        replace(plan, transfers=plan.transfers[:1], events=plan.events[:8])
    ) == ("8 events, 1 collective, 1 in chunks.")


def test_memory_of_upstream_is_told_where_it_is_too_little() -> None:
    plan = overlapping_plan()
    words = (
        "TVM's plan is invalid here: it reuses memory that asynchronous collectives and peers may"
    )
    assert words in " ".join(text_report.render(explanation_of(plan)).split())
    assert "reuses memory that asynchronous collectives and peers may" in html_page.render(
        explanation_of(plan)
    )
    assert upstream_caveat(explanation_of(replace(plan, transfers=plan.transfers[:1]))).endswith(
        "it reuses memory that peers may still read."
    )
    assert upstream_caveat(explanation_of(replace(plan, transfers=plan.transfers[2:]))) == ""


def test_terminal_shows_long_programs_in_pieces() -> None:
    plan = overlapping_plan()
    kernels = (Event("f(x)", computes="f"),) * 100
    many = replace(plan, events=plan.events + kernels, transfers=plan.transfers[:1])
    lines = text_report.render(explanation_of(many)).splitlines()
    first = lines.index("  events 0 to 71 of 109")
    assert lines[first + 1] == "  >>-?---"
    assert lines[first + 2] == f"    x x.   {'.' * 63}"
    assert lines[first + 3 : first + 6] == ["  events 72 to 108 of 109", "", f"  {'.' * 37}"]


def test_page_shows_what_is_on_its_way() -> None:
    html = html_page.render(explanation_of(overlapping_plan()))
    (strip,) = re.findall(r'<svg class="tracks".*?</svg>', html, re.DOTALL)
    looks = re.findall(r'class="(act [^"]*|begins|waits)"', strip)
    assert looks == [
        *("act beside", "begins", "begins", "waits"),
        *("act called", "act beside", "begins", "waits"),
        *("act product", "act product", "act other"),
    ]
    assert "2 chunks of x: exposed to peers at event 0, 1" in strip
    assert "the program waits for data of peers at event 3" in strip
    assert "meanwhile: 2 x blas.matmul, silu" in strip
    assert "3 transfers</summary>" in html
    assert "transfer during kernels</li>" in html


def test_page_without_communication_has_no_lanes() -> None:
    html = html_page.render(explanation_of(replace(overlapping_plan(), transfers=())))
    assert 'class="tracks"' not in html
    assert "transfers" not in html


def test_what_comes_from_the_module_is_escaped() -> None:
    evil = "<b a=''>"
    plan = overlapping_plan()
    plan = replace(
        plan,
        events=tuple(replace(event, computes=evil) for event in plan.events),
        transfers=tuple(replace(one, what=evil) for one in plan.transfers),
    )
    assert "<b a" not in html_page.render(explanation_of(plan))


@I.ir_module
class Independent:
    @R.function
    def main(x: R.Tensor((8, 8), "float32"), w: R.Tensor((8, 8), "float32")):
        with R.dataflow():
            a = R.matmul(x, w)
            total = R.comm.allreduce(a, "sum")
            b = R.matmul(x, x)
            c = R.nn.gelu(b)
            d = R.multiply(total, b)
            e = R.comm.allgather(d, axis=0, workers=2)
            R.output(e, c)
        return e, c


def test_posted_collective_goes_on_beside_kernels() -> None:
    plan = plan_of(Independent, async_collectives=True)
    posted, called = plan.transfers
    assert (posted.what, posted.how) == ("allreduce of a", "posted")
    assert "tvm_ipc.start" in plan.events[posted.first].text
    assert posted.waits == (posted.last,)
    assert "tvm_ipc.wait" in plan.events[posted.last].text
    assert overlapping(plan, posted) == ["matmul", "gelu"]
    assert (called.how, called.first) == ("called", called.last)
    assert overlapping(plan, called) == []
    # Views and allocations take no time; what is returned is copied.
    assert [one.computes for one in plan.events if one.computes] == [
        *("matmul", "matmul", "gelu", "multiply", "reshape"),
    ]


def test_called_collectives_go_on_beside_nothing() -> None:
    plan = plan_of(Independent)
    assert [(one.how, overlapping(plan, one)) for one in plan.transfers] == [("called", [])] * 2


def packed(name: str, *operands: object, ty: object = None) -> relax.Expr:
    given = [relax.prim_value(one) if isinstance(one, int) else one for one in operands]
    types = [relax.AnyType() if ty is None else ty]
    return relax.Call(relax.ExternFunc(f"tvm_ipc.{name}"), given, ty_args=types)


NOTHING = relax.TupleType([])


def test_chunks_that_are_hidden_together_are_one_transfer() -> None:
    """Rows of two ranks are multiplied chunk by chunk, and then what one of them is, again."""
    builder = relax.BlockBuilder()
    rows, shape = relax.TensorType((16, 16), "float32"), relax.ShapeExpr([16, 16])
    a, b = (te.placeholder((16, 16), "float32") for _ in range(2))
    k = te.reduce_axis((0, 16))
    product = te.compute((16, 16), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k))
    kernel = te.create_prim_func([a, b, product]).with_attr("global_symbol", "matmul")
    matmul = builder.add_func(kernel, "matmul")
    x, w = relax.Var("x", relax.TensorType((32, 16), "float32")), relax.Var("w", rows)

    def multiply(left: relax.Expr) -> None:
        out = builder.emit(relax.op.builtin.alloc_tensor(shape, "float32", 0, "global"))
        builder.emit(relax.Call(matmul, [left, w, out], ty_args=[NOTHING]))

    with builder.function("main", [x, w], pure=False):
        chunks = [builder.emit(packed("view", x, at, shape, ty=rows)) for at in (0, 1024)]
        shown = [builder.emit(packed("expose", chunk, 0)) for chunk in chunks]
        for shift in (0, 1):
            for one in shown:
                multiply(builder.emit(packed("peer_view", one, shift, shape, ty=rows)))
        builder.emit(packed("release", 0, *shown, ty=NOTHING))
        again = builder.emit(packed("expose", x, 0))
        builder.emit(packed("release", 0, again, ty=NOTHING))
        builder.emit_func_output(x)
    plan = plan_of(builder.get())
    both, last = plan.transfers
    assert (both.what, both.how) == ("2 chunks of x", "shown")
    assert (last.what, last.how) == ("1 chunk of x", "shown")

    def events(word: str) -> tuple[int, ...]:
        return tuple(i for i, event in enumerate(plan.events) if f"tvm_ipc.{word}(" in event.text)

    shows, hides = events("expose"), events("release")
    assert both.starts == shows[:2]
    assert both.waits == events("peer_view")[2:]  # its own chunks are there
    assert (both.first, both.last) == (shows[0], hides[0])
    assert (last.first, last.last, last.waits) == (shows[2], hides[1], ())
    assert overlapping(plan, both) == ["copy", *["matmul"] * 4]
    assert overlapping(plan, last) == []
    assert "2 collectives, 2 in chunks" in collectives_summary(plan)


@pytest.mark.parametrize("through", ["a variable", "a tuple", "a branch"])
def test_wait_is_found_through(through: str) -> None:
    """A work that is waited for under another name ends there."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((8,), "float32"))
    choice = relax.Var("choice", relax.TensorType((), "bool"))

    with builder.function("main", [x, choice], pure=False):
        send = builder.emit(relax.op.add(x, x))
        shape = relax.ShapeExpr([8])
        recv = builder.emit(relax.op.builtin.alloc_tensor(shape, "float32", 0, "global"))
        name = tvm.ir.StringImm("tvm_ipc.allreduce")
        work = builder.emit(packed("start", name, send, 0, 0, 3, 0, recv))
        if through == "a variable":
            work = builder.emit(work)
        if through == "a tuple":
            pair = builder.emit(relax.Tuple([x, work]))
            work = builder.emit(relax.TupleGetItem(pair, 1))
        y = builder.emit(relax.op.multiply(x, x))
        if through == "a branch":

            def branch() -> relax.Expr:
                waited = relax.Var("waited", NOTHING)
                wait = relax.VarBinding(waited, packed("wait", work, ty=NOTHING))
                return relax.SeqExpr([relax.BindingBlock([wait])], waited)

            builder.emit(relax.If(choice, branch(), branch()))
        else:
            builder.emit(packed("wait", work, ty=NOTHING))
        out = builder.emit(relax.op.add(recv, y))
        builder.emit_func_output(out)
    plan = plan_of(builder.get())
    (transfer,) = plan.transfers
    waits = [k for k, event in enumerate(plan.events) if "tvm_ipc.wait" in event.text]
    assert len(waits) == (2 if through == "a branch" else 1)
    assert transfer.waits == tuple(waits)
    assert transfer.last == waits[-1]
    assert overlapping(plan, transfer) == ["multiply"]


def test_prefill_of_the_demo_gathers_and_scatters() -> None:
    plan = plan_of(default_model(2, sequence_parallel=True), "prefill")
    kinds = [one.what.split()[0] for one in plan.transfers]
    assert kinds == [*["allgather", "reduce_scatter"] * 8, "broadcast", "allgather"]


@pytest.mark.parametrize("chunks", [1, 2])
def test_prefill_of_the_demo_goes_on_beside_its_communication(chunks: int) -> None:
    plan = plan_of(default_model(2, sequence_parallel=True), "prefill", overlap=chunks)
    shown = [one for one in plan.transfers if one.how == "shown"]
    assert len(shown) == 16
    for gather, scatter in zip(shown[::2], shown[1::2], strict=True):
        assert len(gather.starts) == chunks
        products = [one for one in overlapping(plan, gather) if is_matmul(one)]
        assert len(products) >= 2 * chunks - 1
        assert any(map(is_matmul, overlapping(plan, scatter)))
    assert [one.what.split()[0] for one in plan.transfers if one.how == "called"] == [
        *("broadcast", "allgather"),
    ]
