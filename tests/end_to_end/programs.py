# SPDX-License-Identifier: Apache-2.0
"""Relax programs as text, each statement with what it does to NumPy arrays of all ranks.

Values are small whole numbers whatever their type, so every operation is exact and the results of
right programs are equal to the last bit; only what comes of an average of three is not, and may
not be used further than to a result.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

#: The largest whole number up to which a type is exact, or that sums may reach.
EXACT = {"float16": 2**11, "float32": 2**24, "float64": 2**50, "int32": 2**28, "int8": 127}

Arrays = list[Any]  #: one array, or tuple of them, for each rank


@dataclass(frozen=True)
class Dim:
    """A dimension: a number times shape variables."""

    factor: int
    symbols: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " * ".join([*self.symbols, *([str(self.factor)] if self.is_plain else [])])

    @property
    def is_plain(self) -> bool:
        return self.factor != 1 or not self.symbols

    def __mul__(self, other: Dim) -> Dim:
        return Dim(self.factor * other.factor, tuple(sorted(self.symbols + other.symbols)))

    def value(self, sizes: dict[str, int]) -> int:
        return self.factor * math.prod(sizes[symbol] for symbol in self.symbols)

    def replace(self, by: dict[str, Dim]) -> Dim:
        result = Dim(self.factor)
        for symbol in self.symbols:
            result = result * by.get(symbol, Dim(1, (symbol,)))
        return result


Shape = tuple[Dim, ...]


@dataclass(frozen=True)
class Value:
    """A variable of a program, or several as a tuple."""

    name: str
    shape: Shape
    dtype: str
    bound: float = 4  #: no element is larger
    exact: bool = True
    same: bool = False  #: on all ranks

    @property
    def annotation(self) -> str:
        dims = "".join(f'"{d}", ' if d.symbols else f"{d}, " for d in self.shape)
        return f'R.Tensor(({dims}), "{self.dtype}")'

    @property
    def is_static(self) -> bool:
        return not any(dim.symbols for dim in self.shape)


@dataclass
class Env:
    """Where a program runs: what its variables are on each rank."""

    world: int
    sizes: dict[str, int]
    arrays: dict[str, Arrays] = field(default_factory=dict)


@dataclass
class Let:
    """A binding of one variable."""

    name: str
    text: str
    run: Callable[[Env], Arrays]

    def lines(self) -> list[str]:
        return [f"{self.name} = {self.text}"]

    def execute(self, env: Env) -> None:
        env.arrays[self.name] = self.run(env)


def sequence(body: list[Any], used: dict[str, int] | None) -> list[str]:
    """Return the lines of statements.

    Straight parts are dataflow blocks, in which TVM fuses operators, if `used` is given: how often
    each variable occurs in the function.
    """
    lines: list[str] = []
    for straight, group in itertools.groupby(body, lambda one: isinstance(one, Let)):
        block = list(group)
        inner = [line for one in block for line in (one.lines() if straight else one.lines(used))]
        if not straight or used is None:
            lines += inner
            continue
        here = count_names(inner)
        outputs = [one.name for one in block if used[one.name] > here[one.name]]
        outputs = outputs or [block[-1].name]
        lines += ["with R.dataflow():", *("    " + line for line in inner)]
        lines.append(f"    R.output({', '.join(outputs)})")
    return lines


def count_names(lines: list[str]) -> Counter[str]:
    """Return how often each word occurs."""
    return Counter(re.findall(r"\w+", "\n".join(lines)))


@dataclass
class Branch:
    """An `if`, whose last variable in both branches has the same name."""

    condition: str
    then: list[Any]
    otherwise: list[Any]

    def lines(self, used: dict[str, int] | None = None) -> list[str]:
        def indented(body: list[Any]) -> list[str]:
            # What an `if` gives is bound outside of dataflow blocks.
            lines = sequence(body[:-1], used) + body[-1].lines()
            return ["    " + line for line in lines]

        return [
            f"if {self.condition}:",
            *indented(self.then),
            "else:",
            *indented(self.otherwise),
        ]

    def execute(self, env: Env) -> None:
        (condition,) = {bool(array) for array in env.arrays[self.condition]}
        for one in self.then if condition else self.otherwise:
            one.execute(env)


@dataclass
class Function:
    """A function with tensors as parameters and a tuple of tensors, or one, as result."""

    name: str
    parameters: list[Value]
    body: list[Any] = field(default_factory=list)
    results: list[Value] = field(default_factory=list)
    private: bool = False
    upper_bound: int | None = None
    plans_output: bool = False
    dataflow: bool = False
    tupled: bool = False  #: takes the first two parameters as a tuple

    @property
    def symbols(self) -> list[str]:
        return sorted({s for p in self.parameters for d in p.shape for s in d.symbols})

    def lines(self) -> list[str]:
        parameters = [f"{p.name}: {p.annotation}" for p in self.parameters]
        body = [f"{symbol} = T.int64()" for symbol in self.symbols]
        if self.tupled:
            first, second = self.parameters[:2]
            pair = f"{self.name}_pair: R.Tuple({first.annotation}, {second.annotation})"
            parameters[:2] = [pair]
        results = [value.annotation for value in self.results]
        returned = results[0] if len(results) == 1 else f"R.Tuple({', '.join(results)})"
        attributes = []
        if self.upper_bound:
            bounds = ", ".join(f'"{symbol}": {self.upper_bound}' for symbol in self.symbols)
            attributes.append(f'"tir_var_upper_bound": {{{bounds}}}')
        if self.plans_output:
            attributes.append('"relax.memory_plan_dynamic_func_output": True')
        names = [value.name for value in self.results]
        if attributes:
            body.append(f"R.func_attr({{{', '.join(attributes)}}})")
        if self.tupled:
            body += [f"{p.name} = {self.name}_pair[{i}]" for i, p in enumerate((first, second))]
        plain = [line for one in self.body for line in one.lines()]
        used = count_names([*plain, *names])
        body += sequence(self.body, used if self.dataflow else None)
        body.append(f"return {names[0] if len(names) == 1 else '(' + ', '.join(names) + ')'}")
        return [
            f"@R.function{'(private=True)' if self.private else ''}",
            f"def {self.name}({', '.join(parameters)}) -> {returned}:",
            *("    " + line for line in body),
        ]

    def execute(self, world: int, sizes: dict[str, int], arguments: list[Arrays]) -> list[Arrays]:
        """Return the results, each with one array for each rank."""
        env = Env(world, sizes)
        for parameter, value in zip(self.parameters, arguments, strict=True):
            env.arrays[parameter.name] = value
        for one in self.body:
            one.execute(env)
        return [env.arrays[value.name] for value in self.results]


def local(*names: str) -> Callable[[Callable[..., Any]], Callable[[Env], Arrays]]:
    """Make a function of one rank's arrays a function of all ranks'."""

    def decorate(function: Callable[..., Any]) -> Callable[[Env], Arrays]:
        def run(env: Env) -> Arrays:
            inputs = [env.arrays[name] for name in names]
            return [function(*(each[rank] for each in inputs)) for rank in range(env.world)]

        return run

    return decorate


def in_teams(
    name: str, teams: list[range], function: Callable[[Arrays], Arrays]
) -> Callable[[Env], Arrays]:
    """Make a function of a team's arrays a function of all ranks'."""

    def run(env: Env) -> Arrays:
        arrays = env.arrays[name]
        return [each for team in teams for each in function([arrays[rank] for rank in team])]

    return run


def as_dtype(array: Any, dtype: str) -> Any:
    return np.asarray(array).astype(dtype)
