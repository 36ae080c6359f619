# SPDX-License-Identifier: Apache-2.0
"""Random programs of matmuls beside the collectives of several teams, from a seed.

A program has one to four chains, each over the whole session or over the teams of a mesh:

    gather      allgather, then one to three matmuls, each with or without an epilogue
    scatter     a matmul, then reduce_scatter; sum is the same with allreduce
    both        allgather, a matmul, then reduce_scatter or allreduce: two sites of one matmul
    mlp         allgather, a matmul, relu, another matmul, then reduce_scatter or allreduce

Chains are interleaved. A chain begins with a parameter, or with a result of an earlier chain. The
rows of a parameter are constant, `n`, or an expression such as `n * chunks`, of which each chunk is
a variable.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx

from tests.collective_results import call_and_results
from tests.end_to_end.random_comm import LARGEST, Arrays, Value, each, in_teams
from tvm_ipc import comm

KINDS = ("gather", "scatter", "sum", "both", "mlp")
#: Values of the symbolic extent, with which each program runs.
SIZES = (0, 1, 3, 16, 17)
#: Rows of 64 bytes, and others, of which chunks have to have several.
COLUMNS = (16, 5, 32, 7)
MOST_ROWS = 600
DTYPE = "float32"


class OverlapProgram:
    """A function `main` of tensors and a shape that gives the symbolic extent."""

    def __init__(self, seed: int, world: int) -> None:
        self.rng = rng = random.Random(f"{seed} {world}")
        self.seed, self.world = seed, world
        self.chunks = rng.choice((1, 1, 2, 3, 4))
        self.n = tirx.Var("n", "int64")
        self.symbolic = rng.random() < 0.7
        self.made_of: set[str] = set()
        self.teams = [("world", (tuple(range(world)),))]
        for size in range(2, world):
            if world % size == 0:
                mesh = comm.Mesh({"a": world // size, "b": size}, rng.sample(range(world), world))
                self.teams += [("a", mesh.teams("a")), ("b", mesh.teams("b"))]
        self.builder = relax.BlockBuilder()
        self.parameters: list[Value] = []
        self.results: list[Value] = []
        with self.builder.function("main"):
            with self.builder.dataflow():
                chains = [self._chain() for _ in range(rng.choice((1, 2, 3, 4)))]
                while chains:  # any of them goes on
                    chain = rng.choice(chains)
                    if next(chain, "end") == "end":
                        chains.remove(chain)
                out = self.builder.emit_output(relax.Tuple([one.var for one in self.results]))
            told = relax.Var("told", relax.ShapeType([self.n]))
            self.builder.emit_func_output(out, [*(one.var for one in self.parameters), told])
        self.module = self.builder.get()

    def number(self, extent: Any, n: int) -> int:
        """Return an extent where `n` is known."""
        analyzer = tvm.sym.Analyzer()
        analyzer.bind(self.n, tirx.IntImm("int64", n))
        return int(analyzer.simplify(extent))

    def forget(self) -> None:
        """Compute results again, of what parameters have then."""
        for value in (*self.parameters, *self.results):
            value.forget()

    # ---- operands -------------------------------------------------------------------------

    def _parameter(self, shape: list[Any], *, same: bool) -> Value:
        """Return a new parameter; a weight is the same on each rank."""
        number = len(self.parameters)

        def arrays(n: int) -> Arrays:
            source = np.random.default_rng([self.seed, number, n])
            dims = [self.number(one, n) for one in shape]
            drawn = [
                source.integers(-2, 3, dims).astype(DTYPE) for _ in range(1 if same else self.world)
            ]
            return [*drawn] * self.world if same else [*drawn]

        extents = [tirx.IntImm("int64", one) if isinstance(one, int) else one for one in shape]
        var = relax.Var(f"p{number}", relax.TensorType(extents, DTYPE))
        value = Value(var, arrays, 2)
        self.parameters.append(value)
        return value

    def _rows(self, size: int) -> Any:
        n, k, rng = self.n, self.chunks, self.rng
        if not self.symbolic or rng.random() < 0.2:
            return rng.choice((1, 2, 5, 16, 24, k, 16 * k))
        return rng.choice(
            [n, n * k, n * k, n * size, n * (k * size), n + 1, tirx.floordiv(n * 2 + 1, 2), n * 16]
        )

    def _input(self, size: int) -> Value:
        rng = self.rng
        small = [
            one
            for one in self.results
            if one.bound * 64 * self.world < LARGEST
            and self.number(one.dims[-2], max(SIZES)) * self.world < MOST_ROWS
        ]
        if small and rng.random() < 0.4:
            self.made_of.add("result")
            return rng.choice(small)
        rows = self._rows(size)
        self.made_of.add("constant" if isinstance(rows, int) else str(rows))
        batch = [2] if rng.random() < 0.2 else []
        return self._parameter([*batch, rows, rng.choice(COLUMNS)], same=False)

    # ---- operators ------------------------------------------------------------------------

    def _emit(
        self, call: relax.Expr, of: list[Value], run: Callable[[list[Arrays]], Arrays], bound: int
    ) -> Value:
        var = self.builder.emit(call)
        return Value(var, lambda n: run([one.arrays(n) for one in of]), bound)

    def _matmul(self, x: Value) -> Value:
        inner = int(x.dims[-1])
        w = self._parameter([inner, self.rng.choice(COLUMNS)], same=True)
        bound = x.bound * w.bound * inner
        y = self._emit(relax.op.matmul(x.var, w.var), [x, w], each(np.matmul), bound)
        how = self.rng.randrange(4)
        if how == 0:
            b = self._parameter([int(y.dims[-1])], same=True)
            y = self._emit(relax.op.add(y.var, b.var), [y, b], each(np.add), y.bound + b.bound)
        if how <= 1:
            y = self._relu(y)
        return y

    def _relu(self, x: Value) -> Value:
        relu = each(lambda a: np.maximum(a, 0))
        return self._emit(relax.op.nn.relu(x.var), [x], relu, x.bound)

    def _chain(self) -> Iterator[None]:
        rng = self.rng
        kind = rng.choice(KINDS)
        name, teams = rng.choice(self.teams)
        size = len(teams[0])
        x = self._input(size)
        axis = x.rank - 2
        given: dict[str, Any] = {"team": "world"} if name == "world" else {"team": teams}
        workers = {"workers": size} if name == "world" else {}
        self.made_of |= {kind, "whole session" if name == "world" else "named ranks"}

        def together(x: Value, bound: int, name: str, *args: Any, **options: Any) -> Value:
            make, run = call_and_results(name, *args, **given, **options)
            return self._emit(make(x.var), [x], lambda of: in_teams(teams, run, of[0]), bound)

        def gathered(x: Value) -> Value:
            return together(x, x.bound, "allgather", axis=axis, **workers)

        def reduced(x: Value, scatters: bool) -> Value:
            how = rng.choice(("sum", "sum", "max"))
            bound = x.bound * size if how == "sum" else x.bound
            if not scatters:
                return together(x, bound, "allreduce", how)
            uneven = not self._divides(size, x.dims[axis])
            return together(x, bound, "reduce_scatter", how, axis=axis, uneven=uneven, **workers)

        if kind == "gather":
            whole = gathered(x)
            for _ in range(rng.choice((1, 1, 2, 3))):
                yield
                self.results.append(self._matmul(whole))
            return
        scatters = kind == "scatter" or (kind != "sum" and rng.random() < 0.6)
        y = gathered(x) if kind in ("both", "mlp") else x
        yield
        y = self._matmul(y)
        if kind == "mlp":
            yield
            y = self._matmul(self._relu(y))
        yield
        self.results.append(reduced(y, scatters))

    def _divides(self, size: int, extent: Any) -> bool:
        return bool(tvm.sym.Analyzer().can_prove_equal(tirx.floormod(extent, size), 0))
