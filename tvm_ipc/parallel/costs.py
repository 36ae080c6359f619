# SPDX-License-Identifier: Apache-2.0
"""How long a rank is predicted to take, by a calibration, or by round figures without one.

Matrix products take what the calibration says of their extents, collectives what it says of their
bytes, and other operators as long as it takes to copy what they make. Extents that are not known
count as 128.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any, Final

import tvm
from tvm import relax

from tvm_ipc.calibration import COLLECTIVES, Calibration, Times
from tvm_ipc.comm.extents import constant, item_bytes
from tvm_ipc.comm.operator import NAME as COLLECTIVE
from tvm_ipc.comm.operator import dtype_of, extents
from tvm_ipc.transform.ir.rewrite import walk
from tvm_ipc.transform.rules.operation import short_name, tensor_types

#: What an extent counts as that is not known.
TYPICAL: Final = 128
#: What costs nothing: other names of the same bytes, and what becomes part of a product.
_FREE: Final = frozenset(
    (
        "reshape",
        "permute_dims",
        "expand_dims",
        "squeeze",
        "broadcast_to",
        "shape_of",
        "full",
        "size",
    )
)


@cache
def nominal(workers: int) -> Calibration:
    """Return round figures for one core of a server for each worker, where nothing was measured."""
    part = tuple(4**k for k in range(3, 15))

    def product(rows: int, inner: int, columns: int) -> float:
        return 2e-6 + max(2 * rows * inner * columns / 5e10, 4 * inner * columns / 1e10)

    def gather(size: int) -> float:
        return 1e-5 + (workers - 1) * size / 5e9

    sizes = (1, 16, 128, 1024), (16, 128, 1024, 8192), (16, 128, 1024, 8192)
    matmul = Times.measured(sizes, product)
    copy = Times.measured([part], lambda size: 1e-7 + size / 1e10)
    return Calibration(
        machine="round figures",
        backend="any",
        workers=workers,
        bandwidth=0.0,
        latency=0.0,
        wake=0.0,
        matmul=matmul,
        blas_matmul=None,
        collectives={
            "allgather": Times.measured([part], gather),
            "reduce_scatter": Times.measured([part], gather),
            "allreduce": Times.measured([part], lambda size: 2 * gather(size)),
        },
        reduce=copy,
        copy=copy,
        chunk=0.0,
        hide=0.0,
        noise=0.0,
    )


@dataclass(frozen=True)
class Seconds:
    """What a rank is predicted to spend.

    Attributes
    ----------
    computing : with operators.
    communicating : with collectives.
    """

    computing: float = 0.0
    communicating: float = 0.0

    @property
    def total(self) -> float:
        """Both."""
        return self.computing + self.communicating

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.computing + other.computing, self.communicating + other.communicating)


@dataclass(frozen=True)
class Costs:
    """What operators and collectives cost among some workers."""

    calibration: Calibration
    _known: dict[Any, float] = field(default_factory=dict, compare=False)

    def collective(self, kind: str, size: float) -> float:
        """Return the seconds of a collective, given the bytes of the whole tensor."""
        workers = self.calibration.workers
        if workers == 1 or not size:
            return 0.0
        if kind == "take_part":
            return self.calibration.copy.at(size / workers)
        part = size / workers / (workers if kind == "all_to_all" else 1)
        of = kind if kind in COLLECTIVES else "allgather"
        seconds = self.calibration.collectives[of].at(part)
        if self.calibration.bandwidth:
            moves = (2 if kind == "allreduce" else 1) * (workers - 1) * part
            seconds += moves / self.calibration.bandwidth
        if self.calibration.bandwidth or self.calibration.latency:
            seconds += self.calibration.latency + self.calibration.wake
        return seconds

    def operator(self, name: str, operands: Sequence[Shape], results: Sequence[Shape]) -> float:
        """Return the seconds of an operator on one rank."""
        if name in _FREE:
            return 0.0
        if name == "matmul":
            return self._matmul(operands[0].extents, operands[1].extents, results[0].extents)
        if name.startswith("nn.attention"):
            batch, rows, heads, width = operands[0].extents
            keys = operands[1].extents[1]
            return batch * heads * 2 * self._product(rows, width, keys)
        if name.startswith("nn.conv"):
            made, weight = prod(results[0].extents), operands[1].extents
            return self._product(made / max(1, weight[0]), prod(weight[1:]), weight[0])
        if name == "einsum":
            largest = max(prod(one.extents) for one in operands)
            columns = results[0].extents[-1] if results[0].extents else 1
            rows = prod(results[0].extents) / max(1, columns)
            return self._product(rows, largest / max(1, columns), columns)
        return self.calibration.copy.at(sum(one.bytes for one in results))

    def _matmul(self, a: Sequence[float], b: Sequence[float], made: Sequence[float]) -> float:
        inner = a[-1]
        columns = b[-1] if len(b) > 1 else 1
        if len(b) <= 2:
            return self._product(prod(a[:-1]), inner, columns)
        rows = a[-2] if len(a) > 1 else 1
        return prod(b[:-2]) * self._product(
            rows * prod(made) / max(1, prod(b[:-2]) * rows * columns), inner, columns
        )

    def _product(self, rows: float, inner: float, columns: float) -> float:
        key = rows, inner, columns
        if key not in self._known:
            times = self.calibration.blas_matmul or self.calibration.matmul
            self._known[key] = times.at(*key)
        return self._known[key]


@dataclass(frozen=True)
class Shape:
    """The extents of a tensor, as numbers, and its bytes."""

    extents: tuple[float, ...]
    item: int

    @property
    def bytes(self) -> float:
        """Its size."""
        return prod(self.extents) * self.item


def shape_of(ty: Any) -> Shape:
    """Return the extents of a tensor, and guesses where they are not known."""
    found = tuple(map(number, extents(ty) or [TYPICAL] * max(0, int(ty.ndim))))
    return Shape(found, item_bytes(tvm.DataType(dtype_of(ty) or "float32")))


def number(extent: Any) -> float:
    """Return an extent as a number, where symbolic ones count as `TYPICAL`."""
    known = constant(extent)
    if known is not None:
        return known
    kind = type(extent).__name__
    if kind in ("Add", "Sub", "Mul", "FloorDiv", "Div", "FloorMod", "Mod", "Max", "Min"):
        a, b = number(extent.a), number(extent.b)
        return float(_EVALUATED[kind](a, b))
    if kind == "Cast":
        return number(extent.value)
    return TYPICAL


_EVALUATED: Final[dict[str, Any]] = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: max(0, a - b),
    "Mul": lambda a, b: a * b,
    "FloorDiv": lambda a, b: a // b if b else 0,
    "Div": lambda a, b: a // b if b else 0,
    "FloorMod": lambda a, b: a % b if b else 0,
    "Mod": lambda a, b: a % b if b else 0,
    "Max": max,
    "Min": min,
}


def seconds_of(var: relax.Var, value: relax.Expr, costs: Costs) -> Seconds:
    """Return what one rank is predicted to take for a value that a variable is bound to."""
    if not isinstance(value, relax.Call):
        return Seconds()
    given = [ty for x in value.args for ty in tensor_types(x.ty)]
    if str(getattr(value.op, "name", "")) == COLLECTIVE:
        kind = str(value.attrs.kind)
        workers = costs.calibration.workers
        size = shape_of(given[0]).bytes * (workers if kind in ("allgather", "all_to_all") else 1)
        return Seconds(0.0, costs.collective(kind, size))
    made = [shape_of(ty) for ty in tensor_types(var.ty)]
    return Seconds(costs.operator(short_name(value), list(map(shape_of, given)), made), 0.0)


def predicted(mod: tvm.IRModule, costs: Costs) -> Seconds:
    """Return what one rank is predicted to take for all functions of what it runs, once each."""
    total = Seconds()
    for _, function in mod.functions_items():
        if not isinstance(function, relax.Function):
            continue
        for binding, value in walk(function):
            if binding is not None:
                total += seconds_of(binding.var, value, costs)
    return total
