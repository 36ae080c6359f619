# SPDX-License-Identifier: Apache-2.0
"""What random programs are written with: names, values to choose from, and statements."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.end_to_end.programs import EXACT, Arrays, Dim, Env, Function, Let, Value, local


class Scope:
    """The statements of a sequence, and the values that they may use."""

    def __init__(self, values: list[Value]) -> None:
        self.values = values
        self.body: list[Any] = []


class Writer:
    """A program while it is written."""

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

    def _name(self, start: str = "v") -> str:
        self.count += 1
        return f"{start}{self.count}"

    def _pick(self, scope: Scope, test: Callable[[Value], bool]) -> Value | None:
        fit = [v for v in scope.values if v.exact and v.dtype != "bool" and test(v)]
        if not fit:
            return None
        # Mostly what is new, so that programs are deep.
        return self.rng.choice(fit[-4:] if self.rng.random() < 0.7 else fit)

    def _any(self, scope: Scope) -> Value:
        """Draw a value; there are parameters at least."""
        value = self._pick(scope, lambda v: True)
        assert value is not None
        return value

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

    def _even_axis(self, x: Value, parts: int) -> int | None:
        axes = [i for i, d in enumerate(x.shape) if d.factor % parts == 0]
        return self.rng.choice(axes) if axes else None
