# SPDX-License-Identifier: Apache-2.0
"""Random chains of collectives of `tvm_ipc.comm`, from a seed, and what they give in NumPy."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx

from tests.collective_results import Array, results_of
from tvm_ipc import comm
from tvm_ipc.comm import KINDS, Mesh, Teams

#: What each rank has; None where nobody defined it.
Arrays = list["Array | None"]
#: How what ranks have becomes what they get.
Run = Callable[[list[Arrays]], Arrays]

COLUMNS = 12
LARGEST = 1 << 24  #: of a number: floats are exact up to here
MOST = 400_000  #: elements of a tensor
#: Rows, from none to more than staging buffers hold.
ROWS = (0, 1, 7, 5000)


class Value:
    """A tensor of the program, and how what all ranks have of it is computed."""

    def __init__(self, var: relax.Var, arrays: Callable[[int], Arrays], bound: int) -> None:
        self.var, self.bound = var, bound
        self._arrays = arrays
        self._known: dict[int, Arrays] = {}
        self.scattered: dict[int, tuple[Any, Teams]] = {}  #: by axis: the extent of the whole

    @property
    def dims(self) -> list[Any]:
        return list(self.var.ty.shape.ty.values)

    @property
    def rank(self) -> int:
        return len(self.dims)

    def arrays(self, rows: int) -> Arrays:
        """What the ranks have."""
        if rows not in self._known:
            self._known[rows] = self._arrays(rows)
        return self._known[rows]

    def forget(self) -> None:
        self._known.clear()


def in_teams(teams: Teams, run: Callable[[list[Array]], Any], arrays: Arrays) -> Arrays:
    """What ranks get of what all ranks of their team have."""
    found: Arrays = [None] * len(arrays)
    for team in teams:
        given = [arrays[rank] for rank in team]
        if any(one is None for one in given):
            continue
        for rank, result in zip(team, run([one for one in given if one is not None]), strict=True):
            found[rank] = result
    return found


class Program:
    """A function `main` of two tensors, drawn from a seed."""

    def __init__(self, seed: int, world: int, steps: int) -> None:
        self.rng = rng = random.Random(seed)
        self.seed, self.world = seed, world
        self.mesh = _mesh(rng, world)
        self.dtype = rng.choice(("float32", "int32", "float32"))
        self.symbolic = rng.random() < 0.5
        self.kinds: set[str] = set()
        self.builder = relax.BlockBuilder()
        self.n = tirx.Var("n", "int64")
        # The extents of static shapes, which ranks may divide or not.
        self.rows = rng.choice((world, 2 * world, 7, 13, 4096, 5000))
        extents = [self.n if self.symbolic else self.rows, COLUMNS]
        ty = relax.TensorType(extents, self.dtype)
        parameters = [relax.Var(name, ty) for name in ("x", "y")]
        self.round, self.now = 0, 0
        self.values = [
            Value(var, lambda rows, k=k: self.argument(k, rows), 5)
            for k, var in enumerate(parameters)
        ]
        self.parameters = list(self.values)
        if not self.symbolic and rng.random() < 0.5:
            given = self.argument(2, self.rows)[0]
            constant = relax.const(given, self.dtype)
            self.values.append(Value(constant, lambda _: [given] * world, 5))
        first = len(self.values)
        with self.builder.function("main", parameters):
            with self.builder.dataflow():
                while len(self.values) < steps + first:
                    self._step()
                self.results = self._results(first)
                out = self.builder.emit_output(relax.Tuple([one.var for one in self.results]))
            self.builder.emit_func_output(out)
        self.module = self.builder.get()

    def argument(self, which: int, rows: int) -> Arrays:
        """What the ranks give."""
        source = np.random.default_rng([self.seed, self.round, which, rows])
        shape = (self.world, rows, COLUMNS)
        return list(source.integers(-5, 6, shape).astype(self.dtype))

    def again(self, round_: int, rows: int) -> None:
        """Have other arguments, and so other results."""
        self.round, self.now = round_, rows
        for value in self.values:
            value.forget()

    def _results(self, first: int) -> list[Value]:
        used = {id(arg) for value in self.values for arg in getattr(value, "of", ())}
        unused = [value for value in self.values[first:] if id(value) not in used]
        return unused[-8:] if self.rng.random() < 0.8 else unused[-1:]

    def _emit(self, expr: relax.Expr, of: list[Value], run: Run, bound: int) -> Value | None:
        var = self.builder.emit(expr)
        value = Value(var, lambda rows: run([one.arrays(rows) for one in of]), bound)
        value.of = of  # type: ignore[attr-defined]
        self.values.append(value)
        return value

    def _step(self) -> None:
        # Mostly what was just made, so that programs are chains.
        x = self.values[-1] if self.rng.random() < 0.6 else self.rng.choice(self.values)
        (self._collective if self.rng.random() < 0.6 else self._compute)(x)

    def _compute(self, x: Value) -> None:
        same = [v for v in self.values if tvm_equal(v.dims, x.dims)]
        y = self.rng.choice(same)
        kind = self.rng.randrange(5)
        if kind == 0 and x.bound + y.bound < LARGEST:
            add = relax.op.add(x.var, y.var)
            self._emit(add, [x, y], each(lambda a, b: a + b), x.bound + y.bound)
        elif kind == 1:
            least = relax.op.minimum(x.var, y.var)
            self._emit(least, [x, y], each(np.minimum), max(x.bound, y.bound))
        elif kind == 2:
            self._emit(relax.op.negative(x.var), [x], each(lambda a: -a), x.bound)
        elif kind == 3 and x.rank == 2:
            self._emit(relax.op.permute_dims(x.var), [x], each(lambda a: a.T), x.bound)
        elif kind == 4 and not self.symbolic and x.rank == 2:
            shape = [int(one) for one in reversed(x.dims)]
            self._emit(
                relax.op.reshape(x.var, shape), [x], each(lambda a: a.reshape(shape)), x.bound
            )

    def _collective(self, x: Value) -> None:
        rng, axes = self.rng, list(self.mesh.axes)
        name = rng.choice(list(KINDS))
        if rng.random() < 0.2:
            teams: Teams = (tuple(range(self.world)),)
            given: dict[str, Any] = {"team": "world", "workers": self.world}
        else:
            teams = self.mesh.teams(*rng.sample(axes, rng.randint(1, len(axes))))
            given = {"team": teams}
        if self._make(name, x, teams, given):
            self.kinds.add(name)

    def _make(self, name: str, x: Value, teams: Teams, given: dict[str, Any]) -> bool:
        """Emit a collective of a kind, if there is one of this tensor; return whether."""
        rng, n, kind = self.rng, len(teams[0]), KINDS[name]
        if name == "send_recv" and n == 1:
            return False
        on_two_axes = kind.splits and kind.concatenates
        split = rng.randrange(x.rank)
        concat = rng.randrange(x.rank) if on_two_axes else split
        root = rng.randrange(n)
        how = rng.choice(("max", "min", "sum")) if x.bound * n < LARGEST else "max"
        bound = x.bound * n if how == "sum" and kind.reduces else x.bound
        grows = n if kind.concatenates and not kind.splits else 1
        if grows * prod(self.number(one, max(ROWS)) for one in x.dims) > MOST:
            return False
        whole = self._whole(x, concat, teams) if kind.concatenates else None
        if on_two_axes and (split == concat or (whole is None and not divides(n, x.dims[split]))):
            return False
        source, target = rng.sample(range(n), 2) if n > 1 else (0, 0)
        pairs = [[source, target]]
        if name == "permute":
            receivers = rng.sample(range(n), rng.randint(0, n))
            pairs = [[rng.randrange(n), receiver] for receiver in receivers]
        options = {
            "reduction": how,
            "root": root,
            "axis": split,
            "split_axis": split,
            "concat_axis": concat,
            "uneven": not divides(n, x.dims[split]) or rng.random() < 0.3,
            "extent": whole,
            "pairs": pairs,
            "source": source,
            "target": target,
            **given,
        }
        parameters = inspect.signature(getattr(comm, name)).parameters
        options = {key: option for key, option in options.items() if key in parameters}

        def run(xs: list[Array]) -> list[Array | None]:
            extent = None if whole is None else self.number(whole, self.now)
            return results_of(name, xs, **{**options, "extent": extent})

        call = getattr(comm, name)(x.var, **options)
        made = self._emit(call, [x], lambda of: in_teams(teams, run, of[0]), bound)
        if made is not None and kind.splits and not kind.concatenates:
            made.scattered[split] = (x.dims[split], teams)
        return made is not None

    def _whole(self, x: Value, axis: int, teams: Teams) -> Any:
        """Draw the extent of the parts together, None if it is that of all of them."""
        extent, size = x.dims[axis], len(teams[0])
        found, of = x.scattered.get(axis, (None, None))
        if found is not None and of == teams and self.rng.random() < 0.8:
            return found
        if isinstance(extent, tirx.IntImm) and int(extent) > 0 and self.rng.random() < 0.4:
            return int(extent) * size - self.rng.randrange(size)
        return None

    def number(self, extent: Any, rows: int) -> int:
        """Return an extent where the number of rows is known."""
        if isinstance(extent, int):
            return extent
        analyzer = tvm.sym.Analyzer()
        analyzer.bind(self.n, tirx.IntImm("int64", rows))
        return int(analyzer.simplify(extent))


def divides(n: int, extent: Any) -> bool:
    return bool(tvm.sym.Analyzer().can_prove_equal(tirx.floormod(extent, n), 0))


def tvm_equal(one: list[Any], other: list[Any]) -> bool:
    analyzer = tvm.sym.Analyzer()
    return len(one) == len(other) and all(
        analyzer.can_prove_equal(a, b) for a, b in zip(one, other, strict=True)
    )


def each(function: Callable[..., Array]) -> Run:
    """What each rank computes alone."""

    def run(of: list[Arrays]) -> Arrays:
        return [
            None if any(one is None for one in given) else function(*given)
            for given in zip(*of, strict=True)
        ]

    return run


def _mesh(rng: random.Random, world: int) -> Mesh:
    """Draw a mesh with one to three axes."""
    extents = rng.choice(
        [
            (a, b, world // a // b)
            for a in range(1, world + 1)
            for b in range(1, world + 1)
            if world % (a * b) == 0
        ]
    )
    axes = [one for one in extents if one > 1] or [1]
    ranks = rng.sample(range(world), world) if rng.random() < 0.5 else None
    return Mesh({f"a{k}": extent for k, extent in enumerate(axes)}, ranks)
