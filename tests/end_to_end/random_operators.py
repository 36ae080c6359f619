# SPDX-License-Identifier: Apache-2.0
"""Random uses of Relax's operators."""

from __future__ import annotations

import numpy as np

from tests.end_to_end.programs import EXACT, Arrays, Dim, Env, Let, Shape, Value, local
from tests.end_to_end.random_writer import Scope, Writer

WIDTHS = (1, 2, 4, 8, 16, 40, 64)
#: How often a program's variables have which type.
DTYPES = ("float32",) * 5 + ("float16",) * 3 + ("int32",) * 2 + ("int8", "float64")


class Operators(Writer):
    """What a worker computes alone."""

    def _unary(self, scope: Scope) -> Value | None:
        x = self._any(scope)
        text, function = self.rng.choice(
            [("R.negative({})", np.negative), ("R.abs({})", np.abs), ("relu", None)]
        )
        if text == "relu":
            text, function = "R.nn.relu({})", lambda a: np.maximum(a, np.asarray(0, a.dtype))
        return self._emit(scope, text.format(x.name), local(x.name)(function), x)

    def _binary(self, scope: Scope) -> Value | None:
        rng = self.rng
        x = self._any(scope)
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
        x = self._any(scope)
        dtype = self.rng.choice(DTYPES)
        if dtype == x.dtype or x.bound > EXACT[dtype]:
            return None
        run = local(x.name)(lambda a: a.astype(dtype))
        return self._emit(scope, f'R.astype({x.name}, "{dtype}")', run, x, dtype=dtype)

    def _tuple(self, scope: Scope) -> Value | None:
        x, y = self._any(scope), self._any(scope)
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
