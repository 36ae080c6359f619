# SPDX-License-Identifier: Apache-2.0
"""Modules of any size, each with many of one thing: branches, operators, functions, weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import tvm
from tvm import relax
from tvm.relax import op
from tvm.relax.transform import (
    CallTIRRewrite,
    LegalizeOps,
    Normalize,
    RemovePurityChecking,
    ToNonDataflow,
)

TENSOR = relax.TensorType((8,), "float32")


class Body:
    """The body of a function; what it computes is up to packed functions."""

    def __init__(self, *types: Any, builder: relax.BlockBuilder | None = None) -> None:
        self.builder = builder or relax.BlockBuilder()
        self.params = [relax.Var(f"p{number}", ty) for number, ty in enumerate(types)]

    def call(self, *arguments: Any, elements: int = 8) -> Any:
        ty = relax.TensorType((elements,), "float32")
        return self.builder.emit(op.call_dps_packed("f", list(arguments), out_ty=ty))

    def allreduce(self, x: Any) -> Any:
        return self.builder.emit(op.ccl.allreduce(x, "sum", False))

    def branches(self, *sides: Callable[[], Any]) -> Any:
        """Emit an `if` on the last parameter."""
        then, other = map(self._branch, sides)
        return self.builder.emit(relax.If(self.params[-1], then, other))

    def _branch(self, side: Callable[[], Any]) -> relax.SeqExpr:
        self.builder._begin_binding_block()
        result = side()
        return relax.SeqExpr([self.builder._end_block()], result)

    def function(self, build: Callable[[Body], Any], name: str = "main", **options: Any) -> None:
        with self.builder.function(name, self.params, **options):
            self.builder.emit_func_output(build(self))


def lowered(body: Body) -> tvm.IRModule:
    """Return the module as `IPCAllReduceRewrite` takes it."""
    passes = [LegalizeOps(), ToNonDataflow(), RemovePurityChecking(), CallTIRRewrite()]
    return tvm.transform.Sequential([Normalize(), *passes])(body.builder.get())


CONDITION = relax.TensorType((), "bool")


def ifs(count: int) -> tvm.IRModule:
    def build(body: Body) -> Any:
        x = body.params[0]
        for _ in range(count):
            x = body.branches(
                lambda x=x: body.allreduce(body.call(x)),  # type: ignore[misc]
                lambda x=x: body.call(body.call(x)),  # type: ignore[misc]
            )
        return body.call(x)

    body = Body(TENSOR, CONDITION)
    body.function(build)
    return lowered(body)


def reducing_ifs(count: int) -> tvm.IRModule:
    """Ifs with nothing but an all-reduce in each branch, as the pipeline takes them."""

    def build(body: Body) -> Any:
        x = body.params[0]
        for _ in range(count):
            x = body.branches(
                lambda x=x: body.allreduce(x),  # type: ignore[misc]
                lambda x=x: body.allreduce(x),  # type: ignore[misc]
            )
        return x

    body = Body(TENSOR, CONDITION)
    body.function(build)
    return body.builder.get()


def ifs_and_values(count: int) -> tvm.IRModule:
    """As many values live through the ifs, each until one of them reads it."""

    def build(body: Body) -> Any:
        x = body.params[0]
        for y in [body.call(x) for _ in range(count)]:
            x = body.branches(
                lambda x=x, y=y: body.allreduce(body.call(x, y)),  # type: ignore[misc]
                lambda x=x: body.call(x),  # type: ignore[misc]
            )
        return body.call(x)

    body = Body(TENSOR, CONDITION)
    body.function(build)
    return lowered(body)


def nested(count: int) -> tvm.IRModule:
    def level(body: Body, x: Any, below: int) -> Any:
        y = body.call(x)
        if not below:
            return body.allreduce(y)
        inner = body.branches(
            lambda: level(body, y, below - 1), lambda: body.allreduce(body.call(y))
        )
        return body.call(inner, y)

    body = Body(TENSOR, CONDITION)
    body.function(lambda body: level(body, body.params[0], count))
    return lowered(body)


def deep(count: int) -> tvm.IRModule:
    """A chain whose links also read what was there long before."""

    def build(body: Body) -> Any:
        values = [body.params[0]]
        for number in range(count):
            made = body.call(
                values[-1], values[-min(9, len(values))], elements=8 + 8 * (number % 5)
            )
            values.append(body.allreduce(made) if number % 3 == 0 else made)
        return body.call(values[-1])

    body = Body(TENSOR)
    body.function(build)
    return lowered(body)


def wide(count: int) -> tvm.IRModule:
    """Sums that are all live together, in one storage."""

    def build(body: Body) -> Any:
        made = [body.call(body.params[0], elements=8 + number % 7) for number in range(count)]
        return body.call(*map(body.allreduce, made))

    body = Body(TENSOR)
    body.function(build)
    return lowered(body)


def results(count: int) -> tvm.IRModule:
    """One tensor, summed again and again."""

    def build(body: Body) -> Any:
        x = body.call(body.params[0])
        return body.builder.emit(relax.Tuple([body.allreduce(x) for _ in range(count)]))

    body = Body(TENSOR)
    body.function(build)
    return lowered(body)


def weights(count: int) -> tvm.IRModule:
    def build(body: Body) -> Any:
        x, every = body.params
        for number in range(count):
            x = body.call(x, body.builder.emit(relax.TupleGetItem(every, number)))
            x = body.allreduce(x) if number % 3 == 0 else x
        return x

    body = Body(TENSOR, relax.TupleType([TENSOR] * count))
    body.function(build)
    return lowered(body)


def functions(count: int) -> tvm.IRModule:
    """Private functions, each of which is called twice."""
    builder = relax.BlockBuilder()
    for number in range(count):
        part = Body(TENSOR, builder=builder)
        part.function(partial(_sum, number), f"part{number}", private=True)
    parts = [builder.get().get_global_var(f"part{number}") for number in range(count)]

    def build(body: Body) -> Any:
        x = body.params[0]
        for part in parts + parts:
            x = builder.emit(relax.Call(part, [body.call(x)]))
        return x

    body = Body(TENSOR, builder=builder)
    body.function(build)
    return lowered(body)


def _sum(number: int, body: Body) -> Any:
    """Equal functions would become one."""
    return body.call(body.allreduce(body.call(body.params[0], elements=8 + number)))


#: With the least size at which growth shows.
SHAPES: list[tuple[Callable[[int], tvm.IRModule], int]] = [
    (ifs, 10),
    (ifs_and_values, 10),
    (nested, 10),
    (deep, 40),
    (wide, 40),
    (results, 40),
    (weights, 40),
    (functions, 10),
]
