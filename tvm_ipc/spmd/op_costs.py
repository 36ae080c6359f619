# SPDX-License-Identifier: Apache-2.0
"""Predicted times of operators and collectives, from a calibration or from nominal figures.

A matmul takes the calibrated time for its extents, and a collective that for its bytes. Other
operators take as long as a copy of their results. Unknown extents count as 128.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any, Final

import tvm
from tvm import relax

from tvm_ipc.analysis.resolve_variables import body_bindings
from tvm_ipc.analysis.views_and_writes_of_calls import operator_of
from tvm_ipc.calibration import COLLECTIVES, Calibration, Times
from tvm_ipc.comm.collective_relax_op import NAME as COLLECTIVE
from tvm_ipc.comm.collective_relax_op import dtype_of, extents
from tvm_ipc.comm.expert_ops import MOE
from tvm_ipc.comm.extent_arithmetic import constant, item_bytes
from tvm_ipc.packed_functions import KINDS
from tvm_ipc.spmd.rules.operation import short_name, tensor_types

#: The number that is assumed for an unknown extent.
TYPICAL: Final = 128
#: Operators without cost: views, and operators that are fused into a matmul.
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
    """Return nominal figures for one server core per worker, for use without a calibration."""
    shard_bytes = tuple(4**k for k in range(3, 15))

    def matmul_seconds(rows: int, inner: int, columns: int) -> float:
        return 2e-6 + max(2 * rows * inner * columns / 5e10, 4 * inner * columns / 1e10)

    def gather_seconds(size: int) -> float:
        return 1e-5 + (workers - 1) * size / 5e9

    sizes = (1, 16, 128, 1024), (16, 128, 1024, 8192), (16, 128, 1024, 8192)
    matmul = Times.measured(sizes, matmul_seconds)
    copy = Times.measured([shard_bytes], lambda size: 1e-7 + size / 1e10)
    return Calibration(
        machine="nominal figures",
        backend="any",
        workers=workers,
        matmul=matmul,
        blas_matmul=None,
        collectives={
            "allgather": Times.measured([shard_bytes], gather_seconds),
            "reduce_scatter": Times.measured([shard_bytes], gather_seconds),
            "allreduce": Times.measured([shard_bytes], lambda size: 2 * gather_seconds(size)),
        },
        reduce=copy,
        copy=copy,
        **dict.fromkeys(("bandwidth", "latency", "wake", "chunk", "hide", "noise"), 0.0),
    )


@dataclass(frozen=True)
class Seconds:
    """The predicted time of a rank in seconds.

    Attributes
    ----------
    computing : the time of operators.
    communicating : the time of collectives.
    """

    computing: float = 0.0
    communicating: float = 0.0

    @property
    def total(self) -> float:
        """Return the sum of both times."""
        return self.computing + self.communicating

    def __add__(self, other: Seconds) -> Seconds:
        """Add computing and communicating separately."""
        return Seconds(self.computing + other.computing, self.communicating + other.communicating)


@dataclass(frozen=True)
class Costs:
    """The predicted times of operators and collectives for a number of workers."""

    calibration: Calibration
    _matmul_cache: dict[Any, float] = field(default_factory=dict, compare=False)

    def collective(self, name: str, size: float) -> float:
        """Return the seconds of a collective, given its kind and the bytes of a rank's input."""
        workers = self.calibration.workers
        if workers == 1 or not size:
            return 0.0
        kind = KINDS[name]
        slice_bytes = kind.slice_bytes(size, workers)
        if not kind.communicates:
            return self.calibration.copy.at(slice_bytes)
        measured_kind = name if name in COLLECTIVES else "allgather"
        seconds = self.calibration.collectives[measured_kind].at(slice_bytes)
        if self.calibration.bandwidth:
            seconds += kind.bytes_received(size, workers) / self.calibration.bandwidth
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
            return batch * heads * 2 * self._matrix_product(rows, width, keys)
        if name.startswith("nn.conv"):
            elements, weight = prod(results[0].extents), operands[1].extents
            return self._matrix_product(elements / max(1, weight[0]), prod(weight[1:]), weight[0])
        if name == "einsum":
            largest = max(prod(shape.extents) for shape in operands)
            columns = results[0].extents[-1] if results[0].extents else 1
            rows = prod(results[0].extents) / max(1, columns)
            return self._matrix_product(rows, largest / max(1, columns), columns)
        return self.calibration.copy.at(sum(shape.bytes for shape in results))

    def moe(self, operands: Sequence[Shape], workers: int) -> Seconds:
        """Return the times of a mixture of experts, whose tokens are spread evenly over experts."""
        tokens, features = operands[0].extents
        rows = tokens * operands[1].extents[1]
        inner = operands[4].extents[2]
        up, down = ((features, 2 * inner), (inner, features))
        computing = self._matrix_product(rows, *up) + self._matrix_product(rows, *down)
        if workers == 1:
            return Seconds(computing)
        sent = rows * features * operands[0].item
        return Seconds(computing, 2 * self.collective("all_to_all", sent))

    def _matmul(self, a: Sequence[float], b: Sequence[float], result: Sequence[float]) -> float:
        inner = a[-1]
        columns = b[-1] if len(b) > 1 else 1
        if len(b) <= 2:
            return self._matrix_product(prod(a[:-1]), inner, columns)
        rows = a[-2] if len(a) > 1 else 1
        return prod(b[:-2]) * self._matrix_product(
            rows * prod(result) / max(1, prod(b[:-2]) * rows * columns), inner, columns
        )

    def _matrix_product(self, rows: float, inner: float, columns: float) -> float:
        key = rows, inner, columns
        if key not in self._matmul_cache:
            times = self.calibration.blas_matmul or self.calibration.matmul
            self._matmul_cache[key] = times.at(*key)
        return self._matmul_cache[key]


@dataclass(frozen=True)
class Shape:
    """The shape of a tensor as numbers, with the bytes of an element."""

    extents: tuple[float, ...]
    item: int

    @property
    def bytes(self) -> float:
        """Return the bytes of the tensor."""
        return prod(self.extents) * self.item


def shape_of(ty: Any) -> Shape:
    """Return the shape of a tensor, with `TYPICAL` for unknown extents."""
    dims = tuple(map(number, extents(ty) or [TYPICAL] * max(0, int(ty.ndim))))
    return Shape(dims, item_bytes(tvm.DataType(dtype_of(ty) or "float32")))


def number(extent: Any) -> float:
    """Return an extent as a number, with `TYPICAL` for its symbols."""
    value = constant(extent)
    if value is not None:
        return value
    kind = type(extent).__name__
    if kind in _EVALUATED:
        return float(_EVALUATED[kind](number(extent.a), number(extent.b)))
    if kind == "Cast":
        return number(extent.value)
    return TYPICAL


_EVALUATED: Final[dict[str, Any]] = {
    "Add": operator.add,
    "Sub": lambda a, b: max(0, a - b),
    "Mul": operator.mul,
    **dict.fromkeys(("FloorDiv", "Div"), lambda a, b: a // b if b else 0),
    **dict.fromkeys(("FloorMod", "Mod"), lambda a, b: a % b if b else 0),
    "Max": max,
    "Min": min,
}


def seconds_of(var: relax.Var, value: relax.Expr, costs: Costs) -> Seconds:
    """Return the predicted time of a binding on one rank."""
    if not isinstance(value, relax.Call):
        return Seconds()
    operand_types = [ty for x in value.args for ty in tensor_types(x.ty)]
    if operator_of(value) == COLLECTIVE:
        size = shape_of(operand_types[0]).bytes
        return Seconds(0.0, costs.collective(str(value.attrs.kind), size))
    operands = list(map(shape_of, operand_types))
    if operator_of(value) == MOE:
        return costs.moe(operands, int(value.attrs.workers))
    results = [shape_of(ty) for ty in tensor_types(var.ty)]
    return Seconds(costs.operator(short_name(value), operands, results), 0.0)


def seconds_of_function(function: relax.Function, costs: Costs) -> Seconds:
    """Return the predicted time of one rank for one call of a function."""
    bindings = body_bindings(function)
    return sum((seconds_of(each.var, each.value, costs) for each in bindings), Seconds())


def predicted(mod: tvm.IRModule, costs: Costs) -> Seconds:
    """Return the predicted time of one rank for one call of each function."""
    functions = (function for _, function in mod.functions_items())
    of_functions = (
        seconds_of_function(function, costs)
        for function in functions
        if isinstance(function, relax.Function)
    )
    return sum(of_functions, Seconds())
