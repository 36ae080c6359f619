# SPDX-License-Identifier: Apache-2.0
"""Random programs from a seed: the same seed, size and number of ranks give the same program."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from programs import (
    EXACT,
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
    reduced,
)

WIDTHS = (1, 2, 4, 8, 16, 40, 64)
#: How often a program's variables have which type.
DTYPES = ("float32",) * 5 + ("float16",) * 3 + ("int32",) * 2 + ("int8", "float64")
#: What functions say that n is at most, if they say so.
BOUND = 64
ROWS = (Dim(1, ("n",)), Dim(1, ("m",)))


class Scope:
    """The statements of a sequence, and the values that they may use."""

    def __init__(self, values: list[Value]) -> None:
        self.values = values
        self.body: list[Any] = []


class Generator:
    """One program: a public function, and the private ones that it calls."""

    def __init__(self, seed: int, size: int, world: int, groups: int = 1) -> None:
        self.rng = random.Random(seed)
        self.size = size
        self.world = world
        self.groups = groups
        self.prefix = f"p{seed}"
        #: Whether straight parts are dataflow blocks, in which TVM fuses operators.
        self.dataflow = self.rng.random() < 0.8
        self.functions: list[Function] = []
        self.count = 0

    def program(self) -> list[Function]:
        """Return the functions; the last one is the public one."""
        rng = self.rng
        for _ in range(rng.choice((0, 0, 1, 2)) if self.size > 3 else 0):
            self._function(private=True, steps=rng.randint(1, 4))
        self._function(private=False, steps=self.size)
        return self.functions

    def arguments(self, function: Function, sizes: dict[str, int], seed: int) -> list[Arrays]:
        """Return the arrays to call it with."""
        source = np.random.default_rng(seed)
        arguments = []
        for parameter in function.parameters:
            shape = tuple(dim.value(sizes) for dim in parameter.shape)
            bound = int(parameter.bound)
            low = 0 if parameter.dtype == "bool" else -bound
            high = 2 if parameter.dtype == "bool" else bound + 1
            arrays = [
                as_dtype(source.integers(low, high, shape), parameter.dtype)
                for _ in range(self.world)
            ]
            arguments.append([arrays[0]] * self.world if parameter.same else arrays)
        return arguments

    # ---- functions ------------------------------------------------------------------------

    def _function(self, private: bool, steps: int) -> None:
        rng = self.rng
        symbolic = rng.random() < 0.5
        parameters = []
        for index in range(rng.randint(2, 4)):
            rows = Dim(rng.choice(WIDTHS))
            if symbolic and index != 1:
                rows = ROWS[not private and rng.random() < 0.2]
            shape: Shape = (rows, Dim(rng.choice(WIDTHS[2:])))
            if rng.random() < 0.15:
                shape = (shape[0], Dim(rng.choice((1, 2, 3))), shape[1])
            parameters.append(Value(self._name("x"), shape, rng.choice(DTYPES)))
        values = list(parameters)
        if rng.random() < 0.5:
            parameters.append(Value(self._name("c"), (), "bool", same=True))
            values.append(parameters[-1])
        if private:
            parameters = [p for p in parameters if p.dtype != "bool"]
            values = [p for p in values if p.dtype != "bool"]
        name = f"{self.prefix}_{len(self.functions)}" if private else self.prefix
        function = Function(name, parameters, private=private)
        function.dataflow = self.dataflow
        function.tupled = private and rng.random() < 0.3
        scope = Scope(values)
        self.symbolic = symbolic
        self._steps(scope, steps, depth=0)
        new = [v for v in scope.values if v not in parameters and v.dtype != "bool"]
        if not new:
            new = [self._unary(scope) or parameters[0]]
        # What nothing uses would be removed, so it is a result.
        text = "\n".join(line for one in scope.body for line in one.lines())
        unused = [v for v in new if len(re.findall(rf"\b{v.name}\b", text)) < 2]
        chosen = unused[-6:] or new[-1:]
        if rng.random() < 0.3:
            chosen.append(rng.choice(scope.values[: len(parameters) + 2]))
        chosen = [v for v in dict.fromkeys(chosen) if v.dtype != "bool"]
        if private:
            chosen = [v for v in chosen if v.exact] or [parameters[0]]
        function.body, function.results = scope.body, chosen
        if symbolic and rng.random() < 0.3:
            function.upper_bound = BOUND
            function.plans_output = rng.random() < 0.5
        self.functions.append(function)

    def _steps(self, scope: Scope, steps: int, depth: int) -> None:
        makers: list[tuple[int, Callable[[Scope], Value | None]]] = [
            (3, self._unary),
            (6, self._binary),
            (5, self._matmul),
            (4, self._reshape),
            (2, self._transpose),
            (2, self._concat),
            (2, self._split),
            (1, self._slice),
            (2, self._reduce),
            (2, self._cast),
            (1, self._tuple),
            (1, self._match_cast),
            (1, self._full),
            (2, self._copy),
            (12, self._allreduce),
            (3, self._allgather),
            (2, self._broadcast),
            (2, self._scatter),
            (3, self._call),
        ]
        if depth < 2:
            makers.append((3, lambda s: self._if(s, depth)))
        weights = [weight for weight, _ in makers]
        made = tries = 0
        while made < steps and tries < 20 * steps:
            tries += 1
            maker = self.rng.choices(makers, weights)[0][1]
            made += maker(scope) is not None

    # ---- helpers --------------------------------------------------------------------------

    def _name(self, start: str = "v") -> str:
        self.count += 1
        return f"{start}{self.count}"

    def _pick(self, scope: Scope, test: Callable[[Value], bool]) -> Value | None:
        fit = [v for v in scope.values if v.exact and v.dtype != "bool" and test(v)]
        if not fit:
            return None
        # Mostly what is new, so that programs are deep.
        return self.rng.choice(fit[-4:] if self.rng.random() < 0.7 else fit)

    def _emit(
        self,
        scope: Scope,
        text: str,
        run: Callable[[Env], Arrays],
        like: Value,
        **changes: Any,
    ) -> Value | None:
        """Bind a value, unless its numbers may be too large; make large ones small again."""
        fields = {**vars(like), **changes, "name": self._name()}
        value = Value(**fields)
        if value.dtype != "bool" and value.bound > EXACT[value.dtype]:
            return None
        if sum(1 for _ in value.shape) and self._elements(value) > 64 * 1024:
            return None
        scope.body.append(Let(value.name, text, run))
        if value.exact and value.dtype != "bool" and value.bound > 16:
            value = self._fold(scope, value)
        scope.values.append(value)
        return value

    def _elements(self, value: Value) -> int:
        total = Dim(1)
        for dim in value.shape:
            total = total * dim
        return total.value({"n": 40, "m": 30}) if len(total.symbols) < 3 else 2**30

    def _fold(self, scope: Scope, value: Value) -> Value:
        """Bring numbers into a small range, without making different ones equal too often."""
        name, dtype = value.name, value.dtype
        if dtype.startswith("int"):
            result = Value(self._name(), value.shape, dtype, 12, True, value.same)
            text = f'R.floor_mod({name}, R.const(13, "{dtype}"))'
            run = local(name)(lambda x: np.mod(x, np.asarray(13, dtype)))
            scope.body.append(Let(result.name, text, run))
            return result
        # x - 8 * floor(x / 8), every step of it exact.
        eighth, whole, result = (
            Value(self._name(), value.shape, dtype, 8, True, value.same) for _ in range(3)
        )
        text = f'R.floor(R.multiply({name}, R.const(0.125, "{dtype}")))'
        run = local(name)(lambda x: np.floor(x * np.asarray(0.125, dtype)))
        scope.body.append(Let(eighth.name, text, run))
        text = f'R.multiply({eighth.name}, R.const(8, "{dtype}"))'
        run = local(eighth.name)(lambda x: x * np.asarray(8, dtype))
        scope.body.append(Let(whole.name, text, run))
        text = f"R.subtract({name}, {whole.name})"
        scope.body.append(Let(result.name, text, local(name, whole.name)(lambda x, y: x - y)))
        return result

    # ---- operators ------------------------------------------------------------------------

    def _unary(self, scope: Scope) -> Value | None:
        x = self._pick(scope, lambda v: True)
        if x is None:
            return None
        text, function = self.rng.choice(
            [("R.negative({})", np.negative), ("R.abs({})", np.abs), ("relu", None)]
        )
        if text == "relu":
            text, function = "R.nn.relu({})", lambda a: np.maximum(a, np.asarray(0, a.dtype))
        return self._emit(scope, text.format(x.name), local(x.name)(function), x)

    def _binary(self, scope: Scope) -> Value | None:
        rng = self.rng
        x = self._pick(scope, lambda v: True)
        if x is None:
            return None
        names = {
            "add": (np.add, lambda a, b: a + b),
            "subtract": (np.subtract, lambda a, b: a + b),
            "multiply": (np.multiply, lambda a, b: a * b),
            "maximum": (np.maximum, max),
            "minimum": (np.minimum, max),
        }
        op = rng.choice(list(names))
        function, bound = names[op]
        y = self._pick(scope, lambda v: v.shape == x.shape and v.dtype == x.dtype)
        if rng.random() < 0.25 or y is None:
            number = rng.randint(2, 4)
            constant = np.asarray(number, x.dtype)
            return self._emit(
                scope,
                f'R.{op}({x.name}, R.const({number}, "{x.dtype}"))',
                local(x.name)(lambda a: function(a, constant)),
                x,
                bound=bound(x.bound, number),
            )
        return self._emit(
            scope,
            f"R.{op}({x.name}, {y.name})",
            local(x.name, y.name)(function),
            x,
            bound=bound(x.bound, y.bound),
            same=x.same and y.same,
        )

    def _matmul(self, scope: Scope) -> Value | None:
        x = self._pick(scope, lambda v: len(v.shape) == 2 and not v.shape[1].symbols)
        if x is None or x.dtype == "int8":
            return None
        inner = x.shape[1]
        w = self._pick(
            scope, lambda v: len(v.shape) == 2 and v.shape[0] == inner and v.dtype == x.dtype
        )
        if w is None:
            return None
        return self._emit(
            scope,
            f"R.matmul({x.name}, {w.name})",
            local(x.name, w.name)(np.matmul),
            x,
            shape=(x.shape[0], w.shape[1]),
            bound=inner.factor * x.bound * w.bound,
            same=x.same and w.same,
        )

    def _reshape(self, scope: Scope) -> Value | None:
        x = self._pick(scope, lambda v: len(v.shape) > 0)
        if x is None:
            return None
        total = Dim(1)
        for dim in x.shape:
            total = total * dim
        shapes: list[Shape] = [(total,)]
        if len(x.shape) == 2:
            shapes.append((x.shape[0], Dim(1), x.shape[1]))
        for width in (4, 8, 16, 40):
            if total.factor % width == 0:
                shapes += [(Dim(total.factor // width, total.symbols), Dim(width))] * 2
        shape = self.rng.choice(shapes)
        if shape == x.shape:
            return None
        dims = ", ".join(map(str, shape))

        def run(env: Env) -> Arrays:
            concrete = [dim.value(env.sizes) for dim in shape]
            return [array.reshape(concrete) for array in env.arrays[x.name]]

        return self._emit(scope, f"R.reshape({x.name}, R.shape([{dims}]))", run, x, shape=shape)

    def _transpose(self, scope: Scope) -> Value | None:
        x = self._pick(scope, lambda v: len(v.shape) == 2)
        if x is None:
            return None
        run = local(x.name)(lambda a: np.ascontiguousarray(a.T))
        return self._emit(scope, f"R.permute_dims({x.name})", run, x, shape=x.shape[::-1])

    def _concat(self, scope: Scope) -> Value | None:
        x = self._pick(scope, lambda v: len(v.shape) > 0)
        if x is None:
            return None
        y = self._pick(scope, lambda v: v.shape == x.shape and v.dtype == x.dtype)
        assert y is not None
        axis = self.rng.randrange(len(x.shape))
        shape = tuple(d * Dim(2) if i == axis else d for i, d in enumerate(x.shape))
        return self._emit(
            scope,
            f"R.concat(({x.name}, {y.name}), axis={axis})",
            local(x.name, y.name)(lambda a, b: np.concatenate([a, b], axis)),
            x,
            shape=shape,
            bound=max(x.bound, y.bound),
            same=x.same and y.same,
        )

    def _even_axis(self, x: Value, parts: int) -> int | None:
        axes = [i for i, d in enumerate(x.shape) if d.factor % parts == 0]
        return self.rng.choice(axes) if axes else None

    def _split(self, scope: Scope) -> Value | None:
        x = self._pick(scope, lambda v: self._even_axis(v, 2) is not None)
        if x is None:
            return None
        axis = self._even_axis(x, 2)
        assert axis is not None
        pair = self._name("t")
        run = local(x.name)(lambda a: tuple(np.split(a, 2, axis)))
        scope.body.append(Let(pair, f"R.split({x.name}, 2, axis={axis})", run))
        shape = tuple(
            Dim(d.factor // 2, d.symbols) if i == axis else d for i, d in enumerate(x.shape)
        )
        last = None
        for part in self.rng.sample((0, 1), self.rng.choice((1, 2))):
            run = local(pair)(lambda t, part=part: t[part])
            last = self._emit(scope, f"{pair}[{part}]", run, x, shape=shape)
        return last

    def _slice(self, scope: Scope) -> Value | None:
        x = self._pick(
            scope, lambda v: bool(v.shape) and not v.shape[-1].symbols and v.shape[-1].factor > 2
        )
        if x is None:
            return None
        axis, width = len(x.shape) - 1, x.shape[-1].factor
        begin = self.rng.randint(0, width // 2)
        end = self.rng.randint(width // 2 + 1, width)
        return self._emit(
            scope,
            f"R.strided_slice({x.name}, [{axis}], [{begin}], [{end}])",
            local(x.name)(lambda a: a[..., begin:end]),
            x,
            shape=(*x.shape[:-1], Dim(end - begin)),
        )

    def _reduce(self, scope: Scope) -> Value | None:
        x = self._pick(scope, lambda v: bool(v.shape) and not v.shape[-1].symbols)
        if x is None or x.dtype == "int8":
            return None
        width, axis = x.shape[-1].factor, len(x.shape) - 1
        op, function, factor = self.rng.choice((("sum", np.sum, width), ("max", np.max, 1)))
        return self._emit(
            scope,
            f"R.{op}({x.name}, axis={axis}, keepdims=True)",
            local(x.name)(lambda a: function(a, axis=axis, keepdims=True).astype(a.dtype)),
            x,
            shape=(*x.shape[:-1], Dim(1)),
            bound=x.bound * factor,
        )

    def _cast(self, scope: Scope) -> Value | None:
        x = self._pick(scope, lambda v: True)
        if x is None:
            return None
        dtype = self.rng.choice(DTYPES)
        if dtype == x.dtype or x.bound > EXACT[dtype]:
            return None
        run = local(x.name)(lambda a: a.astype(dtype))
        return self._emit(scope, f'R.astype({x.name}, "{dtype}")', run, x, dtype=dtype)

    def _tuple(self, scope: Scope) -> Value | None:
        x, y = self._pick(scope, lambda v: True), self._pick(scope, lambda v: True)
        if x is None or y is None:
            return None
        pair = self._name("t")
        run = local(x.name, y.name)(lambda a, b: (a, b))
        scope.body.append(Let(pair, f"({x.name}, {y.name})", run))
        part = self.rng.randrange(2)
        run = local(pair)(lambda t: t[part])
        return self._emit(scope, f"{pair}[{part}]", run, (x, y)[part])

    def _match_cast(self, scope: Scope) -> Value | None:
        # TVM's FuseOps fails at it, and CanonicalizeTIRVariables never ends where it says that n is
        # something made of n.
        x = self._pick(scope, lambda v: bool(v.shape) and v.is_static)
        if x is None or self.dataflow:
            return None
        dims = ", ".join(map(str, x.shape))
        text = f'R.match_cast({x.name}, R.Tensor(({dims},), "{x.dtype}"))'
        return self._emit(scope, text, local(x.name)(lambda a: a), x)

    def _full(self, scope: Scope) -> Value | None:
        x = self._pick(scope, lambda v: bool(v.shape))
        if x is None:
            return None
        number = self.rng.randint(1, 4)
        dims = ", ".join(map(str, x.shape))
        text = f'R.full(R.shape([{dims}]), R.const({number}, "{x.dtype}"), "{x.dtype}")'
        run = local(x.name)(lambda a: np.full_like(a, number))
        return self._emit(scope, text, run, x, bound=number, same=True)

    def _copy(self, scope: Scope) -> Value | None:
        x = self._pick(scope, lambda v: bool(v.shape))
        if x is None:
            return None
        dims = ", ".join(map(str, x.shape))
        out = f'out_ty=R.Tensor(({dims},), "{x.dtype}")'
        name = self.rng.choice(("tvm_ipc.copy", "tests.race_copy"))  # known to compilers, or not
        text = f'R.call_dps_packed("{name}", ({x.name},), {out})'
        return self._emit(scope, text, local(x.name)(np.copy), x)

    def _team(self) -> tuple[bool, list[range]]:
        """Choose who takes part: all workers, or each group for itself."""
        in_group = self.rng.random() < 0.5
        size = self.world // self.groups if in_group else self.world
        return in_group, [range(first, first + size) for first in range(0, self.world, size)]

    # ---- collectives ----------------------------------------------------------------------

    def _allreduce(self, scope: Scope) -> Value | None:
        x = self._pick(scope, lambda v: True)
        if x is None:
            return None
        kind = self.rng.choice(("sum",) * 5 + ("max", "min", "prod", "avg"))
        if kind == "avg" and x.dtype.startswith("int"):
            return None
        in_group, parts = self._team()
        ranks = len(parts[0])
        bound = {"sum": x.bound * ranks, "prod": x.bound**ranks}.get(kind, x.bound)
        result = self._emit(
            scope,
            f'R.ccl.allreduce({x.name}, "{kind}", {in_group})',
            in_teams(x.name, parts, lambda arrays: reduced(arrays, kind)),
            x,
            bound=min(bound, 16) if kind == "avg" else bound,
            same=len(parts) == 1 or x.same,
            exact=kind != "avg",
        )
        if kind == "avg" and result is not None and self.rng.random() < 0.8:
            text = f'R.floor(R.add({result.name}, R.const(0.25, "{x.dtype}")))'
            quarter = np.asarray(0.25, x.dtype)
            run = local(result.name)(lambda a: np.floor(a + quarter))
            result = self._emit(scope, text, run, result, exact=True)
        return result

    def _allgather(self, scope: Scope) -> Value | None:
        x = self._pick(scope, lambda v: bool(v.shape))
        if x is None:
            return None
        in_group, parts = self._team()
        ranks = len(parts[0])
        return self._emit(
            scope,
            f"R.ccl.allgather({x.name}, {ranks}, {in_group})",
            in_teams(x.name, parts, lambda arrays: [np.concatenate(arrays)] * ranks),
            x,
            shape=(x.shape[0] * Dim(ranks), *x.shape[1:]),
            same=len(parts) == 1 or x.same,
        )

    def _broadcast(self, scope: Scope) -> Value | None:
        x = self._pick(scope, lambda v: True)
        if x is None:
            return None
        return self._emit(
            scope,
            f"R.ccl.broadcast_from_worker0({x.name})",
            lambda env: [env.arrays[x.name][0]] * env.world,
            x,
            same=True,
        )

    def _scatter(self, scope: Scope) -> Value | None:
        x = self._pick(scope, lambda v: self._even_axis(v, self.world) is not None)
        if x is None:
            return None
        axis = self._even_axis(x, self.world)
        assert axis is not None
        shape = tuple(
            Dim(d.factor // self.world, d.symbols) if i == axis else d
            for i, d in enumerate(x.shape)
        )
        return self._emit(
            scope,
            f"R.ccl.scatter_from_worker0({x.name}, {self.world}, {axis})",
            lambda env: np.split(env.arrays[x.name][0], env.world, axis),
            x,
            shape=shape,
            same=False,
        )

    # ---- control --------------------------------------------------------------------------

    def _condition(self, scope: Scope) -> Value | None:
        given = [v for v in scope.values if v.dtype == "bool"]
        x = self._pick(scope, lambda v: v.same and v.is_static and bool(v.shape))
        if x is None or (given and self.rng.random() < 0.6):
            return self.rng.choice(given) if given else None
        text = f'R.greater(R.max({x.name}), R.const(2, "{x.dtype}"))'
        run = local(x.name)(lambda a: np.max(a) > 2)
        return self._emit(scope, text, run, x, shape=(), dtype="bool")

    def _if(self, scope: Scope, depth: int) -> Value | None:
        condition = self._condition(scope)
        if condition is None or self._pick(scope, lambda v: True) is None:
            return None
        result = self._name("r")
        kinds = {(v.shape, v.dtype) for v in scope.values if v.exact and v.dtype != "bool"}
        also = self._pick(scope, lambda v: True) if self.rng.random() < 0.3 else None
        branches, ends = [], []
        for _ in range(2):
            inner = Scope(list(scope.values))
            self._steps(inner, self.rng.randint(0, 4), depth + 1)
            # What the first branch made last, if the second one has anything like it.
            fit = [v for v in inner.values if v.exact and (v.shape, v.dtype) in kinds]
            end = fit[-1]
            kinds = {(end.shape, end.dtype)}
            text, run = end.name, local(end.name)(lambda a: a)
            if also is not None:
                text = f"({end.name}, {also.name})"
                run = local(end.name, also.name)(lambda a, b: (a, b))
            inner.body.append(Let(result, text, run))
            branches.append(inner.body)
            ends.append(end)
        scope.body.append(Branch(condition.name, *branches))
        bound, same = max(end.bound for end in ends), all(end.same for end in ends)
        value = Value(result, end.shape, end.dtype, bound, same=same)
        if also is None:
            scope.values.append(value)
            return value
        self._emit(scope, f"{result}[1]", local(result)(lambda t: t[1]), also)
        return self._emit(scope, f"{result}[0]", local(result)(lambda t: t[0]), value)

    def _call(self, scope: Scope) -> Value | None:
        callees = [f for f in self.functions if f.private]
        if not callees:
            return None
        callee = self.rng.choice(callees)
        sizes: dict[str, Dim] = {}
        arguments = []
        for parameter in callee.parameters:
            argument = self._pick(scope, lambda v, p=parameter: _fits(v, p, sizes))
            if argument is None:
                return None
            for wanted, given in zip(parameter.shape, argument.shape, strict=True):
                if wanted.symbols:
                    sizes[wanted.symbols[0]] = given
            arguments.append(argument)
        names = [argument.name for argument in arguments]

        def run(env: Env) -> Arrays:
            inner = {symbol: dim.value(env.sizes) for symbol, dim in sizes.items()}
            results = callee.execute(env.world, inner, [env.arrays[name] for name in names])
            if len(results) == 1:
                return results[0]
            return [tuple(result[rank] for result in results) for rank in range(env.world)]

        given = [f"({', '.join(names[:2])})", *names[2:]] if callee.tupled else names
        text = f"Module.{callee.name}({', '.join(given)})"
        shapes = [tuple(d.replace(sizes) for d in result.shape) for result in callee.results]
        if len(callee.results) == 1:
            return self._emit(scope, text, run, callee.results[0], shape=shapes[0])
        whole = self._name("t")
        scope.body.append(Let(whole, text, run))
        part = self.rng.randrange(len(shapes))
        return self._emit(
            scope,
            f"{whole}[{part}]",
            local(whole)(lambda t: t[part]),
            callee.results[part],
            shape=shapes[part],
        )


def _fits(value: Value, parameter: Value, sizes: dict[str, Dim]) -> bool:
    if value.dtype != parameter.dtype or value.bound > parameter.bound:
        return False
    if len(value.shape) != len(parameter.shape):
        return False
    return all(
        sizes.get(wanted.symbols[0], given) == given if wanted.symbols else wanted == given
        for wanted, given in zip(parameter.shape, value.shape, strict=True)
    )
