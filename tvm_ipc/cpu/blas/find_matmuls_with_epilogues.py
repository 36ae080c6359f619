# SPDX-License-Identifier: Apache-2.0
"""Analysis of matmuls for BLAS: a matmul, the permutations before it, and the steps after it.

    wt = R.permute_dims(w)          b = w, its axes permuted (1, 0)
    y0 = R.matmul(x, wt)            a = x
    y1 = R.add(y0, bias)            ADD bias
    y2 = R.nn.gelu(y1)              GELU
    y3 = R.astype(y2, "bfloat16")   the type of the result

`find_matmuls` returns the matmuls of a function; `offload` replaces them by calls.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import tvm
import tvm_ffi
from tvm import relax, tirx

from tvm_ipc.analysis.ffi_arrays import as_list
from tvm_ipc.analysis.find_aliases import ModuleAliasFacts
from tvm_ipc.analysis.program_order import Step, linearize
from tvm_ipc.analysis.uses import Uses
from tvm_ipc.analysis.views_and_writes_of_calls import operator_of
from tvm_ipc.packed_functions import MAX_STEPS, Epilogue, pack_digits
from tvm_ipc.tvm_moved_names import GenericConst

_MAX_DIMS: Final = 8
#: The assumed extent of an unknown dimension.
_UNKNOWN: Final = 8
_FLOATS: Final = ("float16", "bfloat16", "float32", "float64")
_CPUS: Final = ("llvm", "c")
#: The epilogue step of each operator.
STEPS: Final = {
    "relax.add": Epilogue.ADD,
    "relax.multiply": Epilogue.MULTIPLY,
    "relax.nn.relu": Epilogue.RELU,
    "relax.nn.gelu": Epilogue.GELU,
    "relax.nn.gelu_tanh": Epilogue.GELU_TANH,
    "relax.nn.silu": Epilogue.SILU,
}


@dataclass(eq=False)
class Matmul:
    """A matmul with its permutations and epilogue; `refusal` is the reason if BLAS lacks it."""

    bindings: list[Any]  #: the matmul, then the steps in order
    a: Any
    b: Any
    a_axes: int = 0
    b_axes: int = 0
    steps: list[Epilogue] = field(default_factory=list)
    operands: list[Any] = field(default_factory=list)
    #: The permuted variables that the call replaces by their sources, with their number of uses.
    permutations: list[tuple[Any, int]] = field(default_factory=list)
    #: The inputs, each with the position at which the module reads it.
    reads: list[tuple[Any, int]] = field(default_factory=list)
    refusal: str = ""

    @property
    def subject(self) -> str:
        """The description of the matmul in a report."""
        first, last = self.bindings[0], self.bindings[-1]
        steps = "".join(f", {step.name.lower()}" for step in self.steps)
        return f"matmul {first.var.name}{steps}: {last.var.ty}"

    @property
    def dtype(self) -> str:
        """The element type of the operands."""
        return str(self.a.ty.dtype)

    @property
    def inner(self) -> int | None:
        """The extent of the inner dimension, None if it is symbolic or unknown."""
        shape = self.bindings[0].value.args[0].ty.shape
        inner = shape[-1] if isinstance(shape, relax.ShapeExpr) else None
        return int(inner.value) if isinstance(inner, tirx.IntImm) else None

    @property
    def work(self) -> int:
        """The number of multiplications; each unknown dimension counts as 8."""
        dims = list(self.bindings[0].var.ty.shape)
        sizes = [int(d.value) if isinstance(d, tirx.IntImm) else _UNKNOWN for d in dims]
        return math.prod(sizes) * (_UNKNOWN if self.inner is None else self.inner)


class Scope:
    """The uses of the variables of a function, and the calls that may write memory."""

    def __init__(self, module: ModuleAliasFacts, name: str) -> None:
        self.module, self.name = module, name
        self.uses = Uses(linearize(name, module.functions[name]))

    def may_move(self, values: Iterable[tuple[Any, int]], until: int) -> bool:
        """Return whether reads of values can be moved to a later position."""
        writers, events = self.uses.writers, self.uses.program.points
        return not any(
            self._may_write(events[event].value, value)
            for value, bound in values
            for event in writers[bisect_right(writers, bound) : bisect_left(writers, until)]
        )

    def _may_write(self, call: Any, value: Any) -> bool:
        if not isinstance(call.op, tvm.ir.Op | tvm.ir.GlobalVar | relax.ExternFunc):
            return True  # a closure, which may have captured the value
        aliases = self.module.of(self.name)  # computed only if memory may be written
        assert aliases is not None
        return any(aliases.may_be_same(value, argument) for argument in as_list(call.args))


def find_matmuls(
    module: ModuleAliasFacts, name: str, *, with_epilogues: bool = True
) -> list[Matmul]:
    """Return the matmuls of a function, in order; each binding belongs to at most one."""
    scope = Scope(module, name)
    taken: set[Any] = set()
    matmuls = []
    for step in scope.uses.bound.values():
        if operator_of(step.value) == "relax.matmul":
            matmul = _start(step, scope)
            if with_epilogues and not matmul.refusal:
                _add_epilogue(matmul, step, scope, taken)
            matmuls.append(matmul)
    return matmuls


def _start(step: Step, scope: Scope) -> Matmul:
    binding = step.binding
    matmul = Matmul([binding], *as_list(binding.value.args))
    matmul.refusal = refusal([matmul.a.ty, matmul.b.ty, binding.var.ty])
    if not matmul.refusal:
        matmul.a, matmul.a_axes = _look_through(matmul, matmul.a, step, scope)
        matmul.b, matmul.b_axes = _look_through(matmul, matmul.b, step, scope)
        matmul.reads += [(matmul.a, step.entry), (matmul.b, step.entry)]
    return matmul


def refusal(types: list[Any]) -> str:
    """Return why BLAS lacks a matmul of these types of a, b and the result, "" if it has one."""
    for operand, ty in zip(("a", "b", "the result"), types, strict=True):
        if not isinstance(ty, relax.TensorType) or ty.ndim < 0:
            return f"{operand} has an unknown number of dimensions"
        if ty.ndim > _MAX_DIMS:
            return f"{operand} has {ty.ndim} dimensions, more than {_MAX_DIMS}"
        if ty.vdevice is not None and ty.vdevice.target.kind.name not in _CPUS:
            return f"{operand} is on the device {ty.vdevice.target.kind.name}"
    a, b, result = (_dtype(ty) for ty in types)
    if a != b or a not in _FLOATS or result not in _FLOATS:
        types_of = f"{a or 'unknown'} x {b or 'unknown'} -> {result or 'unknown'}"
        return f"BLAS has no matmul of the types {types_of}"
    if (a == "float64") != (result == "float64"):
        return f"BLAS does not accumulate {a} to {result}"
    if not isinstance(types[2].shape, relax.ShapeExpr):
        return "the shape of the result is unknown before the program runs"
    return ""


def _look_through(matmul: Matmul, operand: Any, step: Step, scope: Scope) -> tuple[Any, int]:
    """Return the source of a permuted operand and its axes, if matrices can be read in place."""
    permuted = scope.uses.binding_of(operand)
    if permuted is None or operator_of(permuted.value) != "relax.permute_dims":
        return operand, 0
    call = permuted.value
    (source,) = call.args
    ndim = source.ty.ndim
    # A dataflow variable is only visible in its block.
    visible = permuted.shares_block(step) or not isinstance(source, relax.DataflowVar)
    if not visible or not 2 <= ndim <= _MAX_DIMS:
        return operand, 0
    permutation = call.attrs.axes
    axes = (
        [int(x) % ndim for x in permutation] if permutation is not None else list(range(ndim))[::-1]
    )
    # One dimension of the matrix has to be contiguous in memory: the last one of the source.
    if ndim - 1 not in axes[-2:]:
        return operand, 0
    if not scope.may_move([(source, permuted.entry)], step.entry):
        return operand, 0
    matmul.permutations.append((operand, len(scope.uses.users[operand])))
    return source, pack_digits(axes)


def _add_epilogue(matmul: Matmul, step: Step, scope: Scope, taken: set[Any]) -> None:
    """Add the steps after a matmul, as long as each result has one use in the same block."""
    while True:
        last = matmul.bindings[-1].var
        users = scope.uses.users[last]
        binding = users[0].binding if len(users) == 1 else None
        if binding is None or not users[0].shares_block(step) or binding.var in taken:
            return
        at = users[0].entry
        if not scope.may_move(matmul.reads, at) or not _add_step(matmul, last, binding):
            return
        if len(matmul.operands) > len(matmul.reads) - 2:
            matmul.reads.append((matmul.operands[-1], at))
        matmul.bindings.append(binding)
        taken.add(binding.var)


def _add_step(matmul: Matmul, last: Any, binding: Any) -> bool:
    """Add a call to the steps of a matmul; return whether it is a step."""
    call, ty = binding.value, binding.var.ty
    if not isinstance(call, relax.Call) or not isinstance(ty, relax.TensorType):
        return False
    dtype = _dtype(ty)
    if dtype not in _FLOATS or (dtype == "float64") != (_dtype(last.ty) == "float64"):
        return False
    if not tvm_ffi.structural_equal(ty.shape, last.ty.shape):
        return False
    name = operator_of(call)
    if name == "relax.astype":
        return True
    step = STEPS.get(name)
    if step is None or len(matmul.steps) == MAX_STEPS:
        return False
    if step in (Epilogue.ADD, Epilogue.MULTIPLY):
        x, y = call.args
        operand = y if isinstance(x, relax.Var) and x.same_as(last) else x
        if not _is_operand(operand, dtype):
            return False
        matmul.operands.append(operand)
    matmul.steps.append(step)
    return True


def _is_operand(operand: Any, dtype: str | None) -> bool:
    if not isinstance(operand, relax.Var | GenericConst):
        return False
    ty = operand.ty
    return isinstance(ty, relax.TensorType) and 0 <= ty.ndim <= _MAX_DIMS and _dtype(ty) == dtype


def _dtype(ty: Any) -> str | None:
    dtype = ty.dtype
    return str(dtype) if dtype is not None else None
