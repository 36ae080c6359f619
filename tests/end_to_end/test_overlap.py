# SPDX-License-Identifier: Apache-2.0
"""Products in chunks beside what they communicate: values are those of the plain program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tvm import relax

import tvm_ipc
from tests.end_to_end.compare_with_numpy import Each, compare_with_numpy, compiled
from tests.end_to_end.host_programs import packed_names
from tests.end_to_end.overlap_cases import Case
from tests.runtime.tensors_of_ranks import put_each
from tvm_ipc import comm
from tvm_ipc.transform import verify_cross_rank_safety


def check(
    case: Case,
    chunks: int,
    sizes: tuple[int, ...] = (),
    before_each: Callable[[Any, int], None] = lambda session, number: None,
    **options: Any,
) -> None:
    """The program in chunks gives every rank what NumPy gives, buffers full of NaN or not."""
    program = compiled(case.module(), case.ranks, overlap=chunks, **options)
    examples = (case.example(k, rows) for k, rows in enumerate(sizes or (case.rows,) * 5))
    compare_with_numpy(program, case.ranks, examples, before_each)


GATHER = Case("allgather", 2, 32, 32, 16)
SCATTER = replace(GATHER, kind="reduce_scatter")
CASES = {
    "plain": GATHER,
    "ccl": replace(GATHER, ccl=True),
    "bias": replace(GATHER, bias=True),
    "shared": replace(GATHER, products=3, bias=True),
    "three": replace(GATHER, ranks=3, rows=21),
    "four": replace(GATHER, ranks=4, rows=16, products=2),
    "one row": replace(GATHER, ranks=3, rows=1, inner=64),
    "odd": replace(GATHER, rows=37, inner=33, columns=17),
    "batched": replace(GATHER, rows=6, after=(5,)),
    "chunk, rank, row": replace(GATHER, rows=4, blocks=(8,), bias=True),
    "chunk, rank, row of four": replace(GATHER, ranks=4, rows=3, blocks=(4,)),
    "no rows": replace(GATHER, rows=0),
    "int8": replace(GATHER, dtype="int8", rows=64, inner=64, columns=64),
    "float16": replace(GATHER, dtype="float16"),
    "scatter": SCATTER,
    "scatter three": replace(SCATTER, ranks=3, rows=21),
    "scatter four": replace(SCATTER, ranks=4, rows=5),
    "scatter max": replace(SCATTER, reduction="max"),
    "scatter avg": replace(SCATTER, reduction="avg"),
    "scatter tree_sum": replace(SCATTER, ranks=4, rows=5, reduction="tree_sum"),
    "scatter blocks": replace(SCATTER, rows=4, blocks=(3,)),
    "scatter batched": replace(SCATTER, ranks=3, rows=2, after=(5,)),
    "scatter no rows": replace(SCATTER, rows=0),
    "scatter one row": replace(SCATTER, ranks=4, rows=1),
    "scatter float16": replace(SCATTER, dtype="float16"),
    "float16 in wider numbers": replace(GATHER, dtype="float16", wider=True),
    "scatter float16 in wider numbers": replace(SCATTER, dtype="float16", wider=True),
    "all-reduce": replace(GATHER, kind="allreduce"),
    "all-reduce in wider numbers": replace(GATHER, kind="allreduce", dtype="float16", wider=True),
    "all-reduce avg": replace(GATHER, kind="allreduce", ranks=4, reduction="avg"),
    "all-reduce of three": replace(GATHER, kind="allreduce", ranks=3, rows=33),
    "all-reduce of one block": replace(GATHER, kind="allreduce", ranks=4, blocks=(1,), rows=16),
    "all-reduce of one row": replace(GATHER, kind="allreduce", ranks=4, rows=1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_rank_gets_what_numpy_gives(name: str) -> None:
    for chunks in (1, 3):
        check(CASES[name], chunks, blas=False)
    check(CASES[name], 8)


@pytest.mark.parametrize("kind", ["allgather", "reduce_scatter"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_one_program_for_any_number_of_rows(kind: str, ranks: int) -> None:
    case = replace(GATHER, kind=kind, ranks=ranks, symbolic=True, products=1, bias=True)
    for chunks in (1, 4):
        check(case, chunks, sizes=(5, 0, 1, 2, 3, 16, 17, 31, 64, 100))


@pytest.mark.parametrize("kind", ["allgather", "reduce_scatter", "allreduce"])
def test_on_a_slow_link_with_jitter(kind: str) -> None:
    def slow(session: Any, _number: int) -> None:
        session.emulate_link(latency=1e-4, bandwidth=1e8, jitter=1e-3)

    check(replace(GATHER, kind=kind, ranks=3, rows=33), 3, before_each=slow)


@pytest.mark.parametrize(
    ("case", "chunks"),
    [
        (Case("allgather", 2, 32, 32, 16), 8),
        (Case("allgather", 4, 16, 32, 16), 8),
        (Case("reduce_scatter", 4, 16, 32, 16), 8),
        (Case("allgather", 2, 512, 1024, 1024), 1),
        (Case("allgather", 2, 512, 1024, 1024), 8),
        (Case("reduce_scatter", 4, 256, 1024, 1024), 1),
        (Case("reduce_scatter", 4, 256, 1024, 1024), 8),
        (Case("allgather", 3, 1364, 1024, 640), 4),
        (Case("allgather", 2, 4091, 1024, 640), 4),
    ],
    ids=lambda one: str(one) if isinstance(one, int) else f"{one.kind} of {one.ranks} x {one.rows}",
)
def test_shapes_that_others_test(case: Case, chunks: int) -> None:
    check(case, chunks, sizes=(case.rows,), blas=True)


MESH = comm.Mesh({"dp": 2, "tp": 2})


@pytest.mark.parametrize("kind", ["allgather", "reduce_scatter", "allreduce"])
def test_in_two_teams_at_once(kind: str) -> None:
    case = replace(GATHER, kind=kind, rows=33, team=MESH.teams("tp"))
    first, weights, biases, wanted = {}, {}, {}, {}
    for team, ranks in enumerate(MESH.teams("tp")):
        xs, (w, b), results = case.example(team, case.rows)
        first.update(zip(ranks, xs, strict=True))
        wanted.update(zip(ranks, results, strict=True))
        weights.update(dict.fromkeys(ranks, w))
        biases.update(dict.fromkeys(ranks, b))
    example = first, [Each(weights), Each(biases)], wanted
    compare_with_numpy(compiled(case.module(), 4, overlap=2), 4, [example] * 8)


def lowered(case: Case, chunks: int) -> tuple[Counter[str], list[Any]]:
    """How often packed functions are called, and what was decided."""
    pipeline = tvm_ipc.get_pipeline("llvm", case.ranks, overlap=chunks, blas=False)
    with tvm_ipc.transform.collect_report() as report:
        module = pipeline(case.module())
    assert verify_cross_rank_safety(module) == []
    return Counter(packed_names(module)), report.decisions


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("chunks", [1, 2])
def test_nothing_is_gathered_and_nothing_copied(ranks: int, chunks: int) -> None:
    case = replace(GATHER, ranks=ranks, bias=True)
    called, decisions = lowered(case, chunks)
    assert called["tvm_ipc.expose"] == chunks
    assert called["tvm_ipc.peer_view"] == (ranks - 1) * chunks
    assert called["tvm_ipc.release"] == 1
    assert not {"tvm_ipc.assemble", "tvm_ipc.allgather", "runtime.disco.allgather"} & {*called}
    verdicts = [(one.pass_name, one.verdict) for one in decisions]
    parts = 1 + (ranks - 1) * chunks
    assert ("ElideConcatCopies", f"{parts} of {parts} slices in place") in verdicts


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_are_of_what_each_rank_shows(ranks: int) -> None:
    called, _ = lowered(replace(SCATTER, ranks=ranks), 2)
    assert called["tvm_ipc.expose"] == called["tvm_ipc.peer_view"] == 2 * (ranks - 1)
    assert called["tvm_ipc.reduce_slices"] == 2
    assert called["tvm_ipc.release"] == 1
    assert not {"tvm_ipc.assemble", "tvm_ipc.reduce_scatter"} & {*called}


def test_what_is_rounded_is_shown() -> None:
    """Half of the bytes of the products, which are wider."""
    called, _ = lowered(replace(SCATTER, dtype="float16", wider=True), 2)
    assert called["tvm_ipc.expose"] == 2
    assert called["tvm_ipc.reduce_scatter"] == 0


def test_of_an_allreduce_sums_are_shown_too() -> None:
    called, _ = lowered(replace(GATHER, kind="allreduce", ranks=3, rows=33), 1)
    assert called["tvm_ipc.expose"] == 3
    assert called["tvm_ipc.peer_view"] == 4
    assert called["tvm_ipc.reduce_slices"] == 1
    assert called["tvm_ipc.release"] == 2  # products, before sums are shown


def test_in_a_branch_and_in_wider_numbers() -> None:
    """Products of float16 in float32, in one branch of an if; the other multiplies on its own."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((33, 32), "float16"))
    w = relax.Var("w", relax.TensorType((32, 16), "float16"))
    c = relax.Var("c", relax.TensorType((), "bool"))
    branches = []
    for scale in (1.0, 2.0):
        inner = relax.BlockBuilder()
        with inner.function(f"branch_{scale:.0f}", [x, w]):
            with inner.dataflow():
                whole = inner.emit(comm.allgather(x, workers=2))
                y = inner.emit(relax.op.matmul(whole, w, out_dtype="float32"))
                out = inner.emit_output(relax.op.multiply(y, relax.const(scale)))
            inner.emit_func_output(out)
        branches.append(inner.get()[f"branch_{scale:.0f}"].body)
    with builder.function("main", [x, w, c]):
        builder.emit_func_output(builder.emit(relax.If(c, *branches)))
    with tvm_ipc.transform.collect_report() as report:
        program = compiled(builder.get(), 2, overlap=2)
    verdicts = [one.verdict for one in report.decisions if one.pass_name == "OverlapCommunication"]
    assert verdicts == ["in 2 chunks"] * 2
    xs, (w, _), _ = GATHER.example(0, 33)
    product = np.concatenate(xs) @ w
    halves = [one.astype("float16") for one in xs]
    examples = [
        (halves, [w.astype("float16"), np.array(c)], [product if c else 2 * product] * 2)
        for c in (True, False, True)
    ]
    compare_with_numpy(program, 2, examples)


def test_sums_have_the_bits_that_they_had() -> None:
    """Of numbers whose sums round; kernels of TVM multiply row by row."""
    case = replace(SCATTER, ranks=3, rows=32)
    found = []
    drawn = np.random.default_rng(0)
    xs = drawn.standard_normal((3, 96, case.inner), "float32")
    w = drawn.standard_normal((case.inner, case.columns), "float32")
    with tvm_ipc.Session(3, threads=True, timeout=60) as session:
        x, weight, bias = put_each(session, xs), session.put(w), session.put(w[0])
        for chunks in (0, 1, 2, 8):
            program = compiled(case.module(), 3, overlap=chunks, blas=False)
            out = session.load_vm_module(program)["main"](x, weight, bias)
            found.append([session.get(out, rank) for rank in range(3)])
    for one in found[1:]:
        np.testing.assert_array_equal(one, found[0])
