# SPDX-License-Identifier: Apache-2.0
"""Products beside what they communicate where ranks do not divide the rows, or rows are flattened.

As models have them: a batch of rows is a matrix in between, and its length is known when it runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

import tvm_ipc
from tests.collective_results import cut, results_of
from tests.end_to_end.compare_with_numpy import Example, compare_with_numpy, compiled
from tvm_ipc import comm
from tvm_ipc.transform import verify_cross_rank_safety


@dataclass(frozen=True)
class Rows:
    """Rows of a batch that are gathered before a product, or summed after it."""

    kind: str
    ranks: int
    batch: int
    rows: int | None  #: of all ranks; None where it is known when the program runs
    flat: bool = True  #: whether the product is of a matrix
    products: int = 1
    inner: int = 16
    columns: int = 32
    dtype: str = "float32"
    wider: bool = False

    def module(self) -> tvm.IRModule:
        """The program of one rank."""
        n: Any = tirx.Var("n", "int64") if self.rows is None else self.rows
        gathers = self.kind == "allgather"
        part = (n + self.ranks - 1) // self.ranks
        shape = (self.batch, part if gathers else n, self.inner)
        x = relax.Var("x", relax.TensorType(shape, self.dtype))
        weight = relax.TensorType((self.inner, self.columns), self.dtype)
        weights = [relax.Var(f"w{k}", weight) for k in range(self.products)]
        told = [relax.Var("told", relax.ShapeType([n]))] if self.rows is None else []
        builder = relax.BlockBuilder()
        with builder.function("main", [x, *weights, *told]):
            with builder.dataflow():
                whole = x
                if gathers:
                    gathered = comm.allgather(x, axis=1, extent=n, workers=self.ranks)
                    whole = builder.emit(gathered)
                results = []
                for w in weights:
                    y = self.product(builder, whole, w, n)
                    if gathers:
                        y = builder.emit(relax.op.nn.relu(y))
                    elif self.kind == "allreduce":
                        y = builder.emit(comm.allreduce(y))
                    else:
                        scattered = comm.reduce_scatter(y, axis=1, workers=self.ranks, uneven=True)
                        y = builder.emit(scattered)
                    results.append(y)
                out = builder.emit_output(relax.Tuple(results))
            builder.emit_func_output(out)
        return builder.get()

    def product(self, builder: relax.BlockBuilder, x: Any, w: Any, n: Any) -> Any:
        """A product, rounded once; of a matrix if it is flat."""
        if self.flat:
            x = builder.emit(relax.op.reshape(x, (self.batch * n, self.inner)))
        y = builder.emit(relax.op.matmul(x, w, "float32" if self.wider else None))
        if self.wider:
            y = builder.emit(relax.op.astype(y, self.dtype))
        if self.flat:
            y = builder.emit(relax.op.reshape(y, (self.batch, n, self.columns)))
        return y

    def example(self, rows: int) -> Example:
        """What each rank is given, weights, and what each rank gets."""
        drawn = np.random.default_rng(rows)
        ints = lambda *shape: drawn.integers(-4, 5, shape).astype(self.dtype)  # noqa: E731
        weights = [ints(self.inner, self.columns) for _ in range(self.products)]
        told = [tvm.runtime.ShapeTuple([rows])] if self.rows is None else []
        if self.kind == "allgather":
            whole = ints(self.batch, rows, self.inner)
            wanted = [np.maximum(whole @ w, 0) for w in weights]
            return cut(whole, self.ranks, 1), [*weights, *told], [wanted] * self.ranks
        xs = [ints(self.batch, rows, self.inner) for _ in range(self.ranks)]
        sums = [results_of(self.kind, [x @ w for x in xs], axis=1) for w in weights]
        return xs, [*weights, *told], list(map(list, zip(*sums, strict=True)))


def check(case: Rows, chunks: int, sizes: tuple[int, ...], **options: Any) -> list[Any]:
    """Every rank gets what NumPy gives, after a run on NaN; say what was decided."""
    with tvm_ipc.transform.collect_report() as report:
        program = compiled(case.module(), case.ranks, overlap=chunks, **options)
    compare_with_numpy(program, case.ranks, map(case.example, sizes))
    return [one for one in report.decisions if one.pass_name == "OverlapCommunication"]


SUM = Rows("allreduce", 2, 1, None)
SCATTER = replace(SUM, kind="reduce_scatter")
GATHER = replace(SUM, kind="allgather")
#: Rows that ranks divide, or not; fewer than there are ranks; none.
SIZES = (5, 0, 1, 2, 3, 4, 16, 17, 33, 64)
CASES = {
    f"{one.kind} of {one.ranks}, batch of {one.batch}, {'flat' if one.flat else 'stacked'}": one
    for kind in (SUM, SCATTER, GATHER)
    for ranks, batch, flat in ((2, 1, False), (3, 2, True), (2, 3, False), (4, 1, True))
    for one in [replace(kind, ranks=ranks, batch=batch, flat=flat, products=1 + (ranks == 3))]
}


@pytest.mark.parametrize("name", CASES)
def test_one_program_for_any_number_of_rows(name: str) -> None:
    case = CASES[name]
    decisions = check(case, 2, SIZES)
    assert [one.verdict for one in decisions] == ["in 2 chunks"] * len(decisions)
    assert len(decisions) == (1 if case.kind == "allgather" else case.products)


KNOWN = {
    "left over": replace(SUM, ranks=3, batch=2, rows=7),
    "left over in 16 bits": replace(SUM, rows=13, dtype="float16", wider=True),
    "units": replace(SUM, rows=50, inner=5, columns=7),
    "scattered": replace(SCATTER, ranks=3, batch=2, rows=7),
    "scattered in 16 bits": replace(
        SCATTER, ranks=3, rows=7, inner=32, dtype="float16", wider=True
    ),
    "scattered to some": replace(SCATTER, ranks=4, batch=2, rows=5),
    "gathered": replace(GATHER, ranks=3, batch=2, rows=7, products=3),
    "gathered from some": replace(GATHER, ranks=4, rows=5),
}


@pytest.mark.parametrize("name", KNOWN)
def test_rows_that_ranks_do_not_divide(name: str) -> None:
    case = KNOWN[name]
    assert case.rows is not None
    decisions = check(case, 3, (case.rows,))
    assert {one.verdict for one in decisions} <= {"in 3 chunks"}, decisions


@pytest.mark.parametrize("kind", [SUM, SCATTER, GATHER], ids=lambda one: one.kind)
def test_no_size_is_unsafe(kind: Rows) -> None:
    """What offsets of symbolic sizes leave unproved holds for all sizes that are tried."""
    known = tvm_ipc.get_pipeline("llvm", 3, overlap=2)(replace(kind, ranks=3, rows=7).module())
    assert verify_cross_rank_safety(known) == []
    module = tvm_ipc.get_pipeline("llvm", 3, overlap=2)(replace(kind, ranks=3, batch=2).module())
    assert [one for one in verify_cross_rank_safety(module) if not one.unknown] == []
