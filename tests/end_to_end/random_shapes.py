# SPDX-License-Identifier: Apache-2.0
"""Random programs whose tensors have expressions as extents, from a seed.

The sizes at which a program can run are found while it is made: a statement after which there are
none, since an extent would be negative or large, is not made.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.collective_results import results_of
from tests.end_to_end.programs import (
    Arrays,
    Branch,
    Dim,
    Env,
    Function,
    Let,
    Shape,
    Value,
    as_dtype,
    in_teams,
    local,
)

VARIABLES = ("n", "m", "k")
#: Values of the variables; programs run where these are small and large, and nothing.
SIZES = (0, 1, 2, 3, 4, 5, 7, 8, 16, 33)
DTYPES = ("float32", "float16", "int32", "int8", "float64")
COLUMNS = 4
#: No tensor has more rows, or elements.
ROWS, ELEMENTS = 400, 6000
#: At how many sizes a program can run at least.
CHOICES = 12


@dataclass(frozen=True, eq=False)
class Extent(Dim):
    """An expression of shape variables."""

    text: str = ""
    run: Callable[[dict[str, int]], int] = lambda sizes: 0

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __str__(self) -> str:
        return self.text

    def value(self, sizes: dict[str, int]) -> int:
        return self.run(sizes)


@dataclass(frozen=True)
class Loose(Value):
    """A result, of which the program says only how many dimensions it has."""

    @property
    def annotation(self) -> str:
        return f'R.Tensor(dtype="{self.dtype}", ndim={len(self.shape)})'


def _ceildiv(a: int, b: int) -> int:
    """Return the quotient rounded up; TVM's is that of positive divisors alone."""
    if b <= 0:
        raise ZeroDivisionError
    return -(-a // b)


def variable(name: str) -> Extent:
    return Extent(1, (name,), name, lambda sizes: sizes[name])


def number(value: int) -> Extent:
    return Extent(value, (), f"T.int64({value})", lambda sizes: value)


def made(text: str, run: Callable[..., int], *parts: Extent) -> Extent:
    """Return an expression of others; `{}` in the text are those."""
    if not any(part.symbols for part in parts):
        return number(run(*(part.run({}) for part in parts)))
    return Extent(
        1,
        tuple(dict.fromkeys(s for part in parts for s in part.symbols)),
        "(" + text.format(*(part.text for part in parts)) + ")",
        lambda sizes: run(*(part.run(sizes) for part in parts)),
    )


#: Expressions of two others, of one and a small number, and choices between two others.
BINARY: list[tuple[str, Callable[..., int]]] = [
    ("{} + {}", lambda a, b: a + b),
    ("{} - {}", lambda a, b: a - b),
    ("{} * {}", lambda a, b: a * b),
    ("{} * ({} - 1)", lambda a, b: a * (b - 1)),
    ("{} // {}", lambda a, b: a // b),
    ("{} % {}", lambda a, b: a % b),
    ("{} * {} // 8", lambda a, b: a * b // 8),
    ("T.ceildiv({}, {})", _ceildiv),
    ("T.max({}, {})", max),
    ("T.min({}, {})", min),
    ("T.bitwise_and({}, {})", lambda a, b: a & b),
    ("T.bitwise_or({}, {})", lambda a, b: a | b),
    ("T.bitwise_xor({}, {})", lambda a, b: a ^ b),
]
WITH_NUMBER: list[tuple[str, Callable[..., int]]] = [
    ("{} + {}", lambda a, b: a + b),
    ("{} - {}", lambda a, b: a - b),
    ("{} * {}", lambda a, b: a * b),
    ("{} // {}", lambda a, b: a // b),
    ("({0} + {1} - 1) // {1}", lambda a, b: (a + b - 1) // b),
    ("{} % {}", lambda a, b: a % b),
    ("T.max({0} - {1}, {1})", lambda a, b: max(a - b, b)),
    ("T.min({}, {})", min),
    ("T.shift_left({}, {})", lambda a, b: a << b),
    ("T.shift_right({}, {})", lambda a, b: a >> b),
    ("T.bitwise_and({}, {})", lambda a, b: a & b),
    ('T.Cast("int64", T.Cast("int32", {} + {}))', lambda a, b: a + b),
]
CHOICE = ("T.if_then_else({0} > {1}, {2}, {3})", "T.Select({0} > {1}, {2}, {3})")


class Shapes:
    """One program, and sizes at which it runs."""

    def __init__(self, seed: int, size: int, world: int) -> None:
        self.rng = random.Random(seed)
        self.world = world
        self.count = 0
        candidates = list(itertools.product(SIZES, repeat=len(VARIABLES)))
        self.sizes = [dict(zip(VARIABLES, one, strict=True)) for one in candidates]
        self.function = Function(f"p{seed}", [])
        self.function.dataflow = self.rng.random() < 0.6
        rows = [variable(name) for name in VARIABLES]
        parameters = [Value(f"x{i}", (row, Dim(COLUMNS)), "float32") for i, row in enumerate(rows)]
        parameters.append(Value("s", (Dim(1), Dim(COLUMNS)), "float32"))
        flags = [Value(f"c{i}", (), "bool", same=True) for i in range(2)]
        self.function.parameters = [*parameters, *flags]
        if self.rng.random() < 0.15:
            self.function.upper_bound = 40
        values = list(parameters)
        self.steps(values, self.function.body, size, depth=0)
        text = "\n".join(line for one in self.function.body for line in one.lines())
        unused = [
            one for one in values[4:] if len(re.findall(rf"\b{one.name}\b", text)) == 1
        ] or values[-1:]
        self.function.results = [Loose(**vars(one)) for one in unused]

    def chosen_sizes(self, count: int) -> list[dict[str, int]]:
        """Return sizes to run it at, small ones among them."""
        small = [one for one in self.sizes if set(one.values()) <= {0, 1}]
        picked = self.rng.sample(self.sizes, min(count, len(self.sizes)))
        return picked[: count - 1] + (self.rng.sample(small, 1) if small else picked[count - 1 :])

    def arguments(self, sizes: dict[str, int], seed: int) -> list[Arrays]:
        source = np.random.default_rng(seed)
        arguments = []
        for one in self.function.parameters:
            shape = tuple(dim.value(sizes) for dim in one.shape)
            if one.dtype == "bool":
                arguments.append([np.array(source.integers(0, 2) == 1)] * self.world)
            else:
                ranks = range(self.world)
                arguments.append(
                    [as_dtype(source.integers(-4, 5, shape), one.dtype) for _ in ranks]
                )
        return arguments

    # ---- extents --------------------------------------------------------------------------

    def extent(self, depth: int = 2) -> Extent:
        rng = self.rng
        if depth == 0 or rng.random() < 0.15:
            return variable(rng.choice(VARIABLES))
        kind = rng.random()
        if kind < 0.45:
            text, run = rng.choice(WITH_NUMBER)
            return made(text, run, self.extent(depth - 1), number(rng.choice((1, 1, 2, 3, 4))))
        if kind < 0.9:
            text, run = rng.choice(BINARY)
            return made(text, run, self.extent(depth - 1), self.extent(depth - 1))
        parts = [self.extent(depth - 1) for _ in range(4)]
        return made(rng.choice(CHOICE), lambda a, b, c, d: c if a > b else d, *parts)

    def restrict(self, extents: Shape, least: int = 0) -> bool:
        """Keep the sizes at which a tensor can have these extents; say whether enough are left."""

        def fits(sizes: dict[str, int]) -> bool:
            try:
                dims = [dim.value(sizes) for dim in extents]
            except (ZeroDivisionError, ValueError):
                return False
            return (
                min(dims) >= least and max(dims) <= ROWS and int(np.prod(dims)) * 4 <= 4 * ELEMENTS
            )

        if any(not dim.symbols and dim.value({}) < 1 for dim in extents):
            return False  # TVM's reshape takes a constant 0 for something else
        left = [sizes for sizes in self.sizes if fits(sizes)]
        if len(left) < CHOICES:
            return False
        self.sizes = left
        return True

    # ---- statements -----------------------------------------------------------------------

    def steps(self, values: list[Value], body: list[Any], count: int, depth: int) -> None:
        makers: list[tuple[int, Callable[[list[Value], list[Any]], bool]]] = [
            (6, self.broadcast),
            (5, self.slice),
            (4, self.pool),
            (4, self.cast),
            (4, self.permute),
            (3, self.pointwise),
            (3, self.concat),
            (3, self.repeat),
            (3, self.reshape),
            (3, self.matmul),
            (2, self.full),
        ]
        makers += [(4, self.allreduce), (1, self.allgather)] if self.world > 1 else []
        if depth < 2:
            makers.append((2, lambda v, b: self.branch(v, b, depth)))
        weights = [weight for weight, _ in makers]
        done = tries = 0
        while done < count and tries < 30 * count:
            tries += 1
            done += self.rng.choices(makers, weights)[0][1](values, body)

    def name(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def pick(self, values: list[Value], dtypes: tuple[str, ...] = DTYPES) -> Value:
        """Draw a value, mostly a new one; the parameters are of float32."""
        fit = [one for one in values if one.dtype in dtypes]
        return self.rng.choice(fit[-4:] if self.rng.random() < 0.7 else fit)

    def emit(
        self,
        values: list[Value],
        body: list[Any],
        text: str,
        run: Callable[[Env], Arrays],
        shape: Shape,
        dtype: str,
        least: int = 0,
    ) -> bool:
        if not self.restrict(shape, least):
            return False
        value = Value(self.name(), shape, dtype)
        body.append(Let(value.name, text, run))
        values.append(value)
        return True

    def broadcast(self, values: list[Value], body: list[Any]) -> bool:
        rows = self.extent()

        def run(env: Env) -> Arrays:
            shape = (rows.value(env.sizes), COLUMNS)
            return [np.broadcast_to(one, shape).copy() for one in env.arrays["s"]]

        text = f"R.broadcast_to(s, R.shape([{rows}, {COLUMNS}]))"
        return self.emit(values, body, text, run, (rows, Dim(COLUMNS)), "float32")

    def full(self, values: list[Value], body: list[Any]) -> bool:
        rows, columns = self.extent(), self.extent(1)
        dtype = self.rng.choice(DTYPES)

        def run(env: Env) -> Arrays:
            shape = (rows.value(env.sizes), columns.value(env.sizes))
            return [np.full(shape, 2, dtype)] * env.world

        text = f'R.full(R.shape([{rows}, {columns}]), R.const(2, "{dtype}"), dtype="{dtype}")'
        return self.emit(values, body, text, run, (rows, columns), dtype)

    def slice(self, values: list[Value], body: list[Any]) -> bool:
        x = self.pick(values)
        length = _extent(x.shape[0])
        rng = self.rng
        front, back, stride = rng.choice((0, 1, 2)), rng.choice((0, 1, 2)), rng.choice((1, 1, 2, 3))
        if rng.random() < 0.3:  # up to what another expression says
            end = self.extent(1)
            rows = made(f"{{}} - {front}", lambda a: a - front, end)
            rest = made("{} - {}", lambda a, b: a - b, length, end)
            if not self.restrict((rest,)):
                return False
        else:
            end = made(f"{{}} - {back}", lambda a: a - back, length)
            rows = made(f"{{}} - {front}", lambda a: a - front, end)
        if not self.restrict((rows,)):
            return False
        rows = made(f"({{}} + {stride - 1}) // {stride}", lambda a: -(-a // stride), rows)
        text = f"R.strided_slice({x.name}, axes=[0], begin=[{front}], end=[{end}], "
        text += f"strides=[{stride}])"

        def run(env: Env) -> Arrays:
            return [one[front : end.value(env.sizes) : stride] for one in env.arrays[x.name]]

        return self.emit(values, body, text, run, (rows, x.shape[1]), x.dtype)

    def pool(self, values: list[Value], body: list[Any]) -> bool:
        x = self.pick(values, ("float32", "float16"))
        if not self.restrict(x.shape, 2):
            return False
        rows, columns = map(_extent, x.shape)
        half = [
            made("({} - 2) // 2 + 1", lambda a: (a - 2) // 2 + 1, one) for one in (rows, columns)
        ]
        text = (
            f"R.reshape(R.nn.max_pool2d(R.reshape({x.name}, R.shape([1, 1, {rows}, {columns}])), "
            f"pool_size=[2, 2], strides=[2, 2]), R.shape([{half[0]}, {half[1]}]))"
        )

        def pooled(array: Any) -> Any:
            a, b = array.shape[0] // 2, array.shape[1] // 2
            return array[: 2 * a, : 2 * b].reshape(a, 2, b, 2).max(axis=(1, 3))

        return self.emit(values, body, text, local(x.name)(pooled), tuple(half), x.dtype)

    def cast(self, values: list[Value], body: list[Any]) -> bool:
        x = self.pick(values)
        dtype = self.rng.choice(DTYPES)
        text = f'R.astype({clipped(x, 8)}, "{dtype}")'
        run = local(x.name)(lambda a: np.clip(a, -8, 8).astype(dtype))
        return self.emit(values, body, text, run, x.shape, dtype)

    def permute(self, values: list[Value], body: list[Any]) -> bool:
        x = self.pick(values)
        run = local(x.name)(np.transpose)
        return self.emit(values, body, f"R.permute_dims({x.name})", run, x.shape[::-1], x.dtype)

    def pointwise(self, values: list[Value], body: list[Any]) -> bool:
        x = self.pick(values)
        same = [one for one in values if one.shape == x.shape and one.dtype == x.dtype]
        y = self.rng.choice(same)
        text = f"R.maximum({x.name}, R.negative({y.name}))"
        run = local(x.name, y.name)(lambda a, b: np.maximum(a, -b))
        return self.emit(values, body, text, run, x.shape, x.dtype)

    def concat(self, values: list[Value], body: list[Any]) -> bool:
        x = self.pick(values)
        same = [one for one in values if one.shape[1] == x.shape[1] and one.dtype == x.dtype]
        y = self.rng.choice(same)
        rows = made("{} + {}", lambda a, b: a + b, _extent(x.shape[0]), _extent(y.shape[0]))
        text = f"R.concat([{x.name}, {y.name}], axis=0)"
        run = local(x.name, y.name)(lambda a, b: np.concatenate([a, b]))
        return self.emit(values, body, text, run, (rows, x.shape[1]), x.dtype)

    def repeat(self, values: list[Value], body: list[Any]) -> bool:
        x = self.pick(values)
        rows = made("{} * 3", lambda a: a * 3, _extent(x.shape[0]))
        run = local(x.name)(lambda a: np.repeat(a, 3, axis=0))
        text = f"R.repeat({x.name}, 3, axis=0)"
        return self.emit(values, body, text, run, (rows, x.shape[1]), x.dtype)

    def reshape(self, values: list[Value], body: list[Any]) -> bool:
        x = self.pick(values)
        rows, columns = map(_extent, x.shape)
        whole = made("{} * {}", lambda a, b: a * b, rows, columns)
        shape: Shape = self.rng.choice([(columns, rows), (whole, Dim(1)), (Dim(1), whole)])

        def run(env: Env) -> Arrays:
            sizes = [dim.value(env.sizes) for dim in shape]
            return [one.reshape(sizes) for one in env.arrays[x.name]]

        text = f"R.reshape({x.name}, R.shape([{shape[0]}, {shape[1]}]))"
        return self.emit(values, body, text, run, shape, x.dtype)

    def matmul(self, values: list[Value], body: list[Any]) -> bool:
        x = self.pick(values, ("float32", "float64"))
        if not self.restrict(x.shape[1:], 1):
            return False
        same = [one for one in values if one.dtype == x.dtype and one.shape[1] == x.shape[1]]
        y = self.rng.choice([x, *same])
        # Numbers stay small, and every sum exact.
        text = f"R.matmul({clipped(x, 2)}, R.permute_dims({clipped(y, 2)}))"
        run = local(x.name, y.name)(lambda a, b: np.clip(a, -2, 2) @ np.clip(b, -2, 2).T)
        if not self.emit(values, body, text, run, (x.shape[0], y.shape[0]), x.dtype):
            return False
        product = values.pop()
        run = local(product.name)(lambda a: np.clip(a, -8, 8))
        return self.emit(values, body, clipped(product, 8), run, product.shape, product.dtype)

    def allreduce(self, values: list[Value], body: list[Any]) -> bool:
        x = self.pick(values)
        kind = self.rng.choice(("sum", "max", "min") if x.dtype != "int8" else ("max", "min"))
        run = in_teams(
            x.name,
            [range(self.world)],
            lambda arrays: results_of("allreduce", arrays, reduction=kind),
        )
        text = f'R.ccl.allreduce({x.name}, "{kind}")'
        if not self.emit(values, body, text, run, x.shape, x.dtype):
            return False
        return kind != "sum" or self.cast(values[-1:], body) or True

    def allgather(self, values: list[Value], body: list[Any]) -> bool:
        x = self.pick(values)
        world = self.world
        rows = made(f"{{}} * {world}", lambda a: a * world, _extent(x.shape[0]))
        run = in_teams(x.name, [range(world)], lambda arrays: results_of("allgather", arrays))
        text = f"R.ccl.allgather({x.name}, {world})"
        return self.emit(values, body, text, run, (rows, x.shape[1]), x.dtype)

    def branch(self, values: list[Value], body: list[Any], depth: int) -> bool:
        """An `if` in both branches of which a row remains of other tensors."""
        result, branches = self.name(), []
        for _ in range(2):
            inner: list[Any] = []
            known = list(values)
            self.steps(known, inner, self.rng.randint(0, 3), depth + 1)
            last = known[-1]
            if not self.restrict(last.shape, 1):
                last = values[3]
            text = f'R.reshape(R.astype(R.max({last.name}), "float32"), R.shape([1, 1]))'
            run = local(last.name)(lambda a: np.max(a).astype("float32").reshape(1, 1))
            inner.append(Let(result, text, run))
            branches.append(inner)
        body.append(Branch(f"c{self.rng.randint(0, 1)}", *branches))
        values.append(Value(result, (Dim(1), Dim(1)), "float32"))
        return True


def clipped(x: Value, most: int) -> str:
    """Return a call that keeps the numbers of a tensor small."""
    least, largest = (f'R.const({number}, "{x.dtype}")' for number in (-most, most))
    return f"R.minimum(R.maximum({x.name}, {least}), {largest})"


def _extent(dim: Dim) -> Extent:
    return dim if isinstance(dim, Extent) else number(dim.factor)
