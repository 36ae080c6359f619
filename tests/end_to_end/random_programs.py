# SPDX-License-Identifier: Apache-2.0
"""Random programs from a seed: the same seed, size and number of ranks give the same program."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

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
    local,
)
from tests.end_to_end.random_collectives import Collectives
from tests.end_to_end.random_operators import DTYPES, WIDTHS, Operators
from tests.end_to_end.random_writer import Scope

#: What functions say that n is at most, if they say so.
BOUND = 64
ROWS = (Dim(1, ("n",)), Dim(1, ("m",)))


class Generator(Operators, Collectives):
    """One program: a public function, and the private ones that it calls."""

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
        if condition is None:
            return None
        result = self._name("r")
        kinds = {(v.shape, v.dtype) for v in scope.values if v.exact and v.dtype != "bool"}
        also = self._any(scope) if self.rng.random() < 0.3 else None
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
