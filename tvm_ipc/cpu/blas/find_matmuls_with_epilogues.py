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
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import tvm
import tvm_ffi
from tvm import relax, tirx

from tvm_ipc.analysis.alias_facts import AliasFacts
from tvm_ipc.analysis.elementwise_view_writer_ops import WRITERS
from tvm_ipc.analysis.ffi_arrays import as_list
from tvm_ipc.analysis.find_aliases import ModuleAliasFacts
from tvm_ipc.packed_functions import MAX_STEPS, Epilogue, pack_digits

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
    def work(self) -> int:
        """The number of multiplications; each unknown dimension counts as 8."""
        dims = list(self.bindings[0].var.ty.shape)
        inner = self.bindings[0].value.args[0].ty.shape
        dims.append(inner[-1] if isinstance(inner, relax.ShapeExpr) else None)
        return math.prod(int(d.value) if isinstance(d, tirx.IntImm) else _UNKNOWN for d in dims)


@dataclass(eq=False)
class _Scope:
    """The bindings of a function, with the definition and the uses of each variable."""

    aliases: Callable[[], AliasFacts | None]  #: called only if memory may be written
    definition: dict[Any, tuple[Any, int]] = field(default_factory=dict)  #: binding, block
    positions: dict[Any, int] = field(default_factory=dict)  #: in program order
    uses: Counter[Any] = field(default_factory=Counter)
    user: dict[Any, tuple[Any, int]] = field(default_factory=dict)
    matmuls: list[tuple[Any, int]] = field(default_factory=list)
    writes: list[tuple[int, Any]] = field(
        default_factory=list
    )  #: positions of calls that may write
    blocks: int = 0

    def read(self, body: Any) -> None:
        if not isinstance(body, relax.SeqExpr):
            self._use(body, None, -1)
            return
        for block in as_list(body.blocks):
            self.blocks += 1
            number = self.blocks
            for binding in as_list(block.bindings):
                self.definition[binding.var] = (binding, number)
                self.positions[binding.var] = len(self.positions)
                value = binding.value
                if isinstance(value, relax.If):
                    self._use(value.cond, binding, number)
                    self.read(value.true_branch)
                    self.read(value.false_branch)
                    continue
                self._use(value, binding, number)
                if isinstance(value, relax.Call):
                    name = _name(value)
                    if name == "relax.matmul":
                        self.matmuls.append((binding, number))
                    elif not name or name in WRITERS:
                        self.writes.append((self.positions[binding.var], value))
        self._use(body.body, None, -1)

    def may_move(self, values: Iterable[tuple[Any, int]], until: int) -> bool:
        """Return whether reads of values can be moved to a later position."""
        end = bisect_left(self.writes, until, key=_position_of)
        return not any(
            self._may_write(call, value)
            for value, bound_at in values
            for _, call in self.writes[bisect_right(self.writes, bound_at, key=_position_of) : end]
        )

    def _may_write(self, call: Any, value: Any) -> bool:
        if not isinstance(call.op, tvm.ir.Op | tvm.ir.GlobalVar | relax.ExternFunc):
            return True  # a closure, which may have captured the value
        aliases = self.aliases()
        assert aliases is not None
        return any(aliases.may_be_same(value, argument) for argument in as_list(call.args))

    def _use(self, value: Any, binding: Any, block: int) -> None:
        if isinstance(value, relax.Var):
            self.uses[value] += 1
            self.user[value] = (binding, block)
        elif isinstance(value, relax.Call):
            self._use(value.op, binding, block)
            for argument in as_list(value.args):
                self._use(argument, binding, block)
        elif isinstance(value, relax.Tuple):
            for item in as_list(value.fields):
                self._use(item, binding, block)
        elif isinstance(value, relax.TupleGetItem):
            self._use(value.tuple_value, binding, block)
        elif isinstance(value, relax.Function):
            for variable in relax.analysis.free_vars(value):
                self.uses[variable] += 2  # a captured variable counts as having several uses
                self.user[variable] = (None, -1)


def _position_of(write: tuple[int, Any]) -> int:
    return write[0]


def find_matmuls(module: ModuleAliasFacts, name: str) -> list[Matmul]:
    """Return the matmuls of a function, in order; each binding belongs to at most one."""
    function = module.functions[name]
    scope = _Scope(lambda: module.of(name))
    scope.read(function.body)
    taken: set[Any] = set()
    matmuls = []
    for binding, block in scope.matmuls:
        matmul = _start(binding, block, scope)
        if not matmul.refusal:
            _add_epilogue(matmul, block, scope, taken)
        matmuls.append(matmul)
    return matmuls


def _start(binding: Any, block: int, scope: _Scope) -> Matmul:
    matmul = Matmul([binding], *as_list(binding.value.args))
    types = [matmul.a.ty, matmul.b.ty, binding.var.ty]
    matmul.refusal = refusal(types)
    if matmul.refusal:
        return matmul
    position = scope.positions[binding.var]
    matmul.a, matmul.a_axes = _look_through(matmul, matmul.a, block, scope)
    matmul.b, matmul.b_axes = _look_through(matmul, matmul.b, block, scope)
    matmul.reads += [(matmul.a, position), (matmul.b, position)]
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


def _look_through(matmul: Matmul, operand: Any, block: int, scope: _Scope) -> tuple[Any, int]:
    """Return the source of a permuted operand and its axes, if matrices can be read in place."""
    if not isinstance(operand, relax.Var) or operand not in scope.definition:
        return operand, 0
    binding, source_block = scope.definition[operand]
    call = binding.value
    if not isinstance(call, relax.Call) or _name(call) != "relax.permute_dims":
        return operand, 0
    (source,) = call.args
    ndim = source.ty.ndim
    # A dataflow variable is only visible in its block.
    visible = source_block == block or not isinstance(source, relax.DataflowVar)
    if not visible or not 2 <= ndim <= _MAX_DIMS:
        return operand, 0
    permutation = call.attrs.axes
    axes = (
        [int(x) % ndim for x in permutation] if permutation is not None else list(range(ndim))[::-1]
    )
    # One dimension of the matrix has to be contiguous in memory: the last one of the source.
    if ndim - 1 not in axes[-2:]:
        return operand, 0
    position = scope.positions[matmul.bindings[0].var]
    if not scope.may_move([(source, scope.positions[operand])], position):
        return operand, 0
    matmul.permutations.append((operand, scope.uses[operand]))
    return source, pack_digits(axes)


def _add_epilogue(matmul: Matmul, block: int, scope: _Scope, taken: set[Any]) -> None:
    """Add the steps after a matmul, as long as each result has one use in the same block."""
    while True:
        last = matmul.bindings[-1].var
        if scope.uses[last] != 1:
            return
        binding, user_block = scope.user[last]
        if binding is None or user_block != block or binding.var in taken:
            return
        position = scope.positions[binding.var]
        if not scope.may_move(matmul.reads, position) or not _add_step(matmul, last, binding):
            return
        if len(matmul.operands) > len(matmul.reads) - 2:
            matmul.reads.append((matmul.operands[-1], position))
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
    name = _name(call)
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
    if not isinstance(operand, relax.Var | tvm.ir.GenericConst):
        return False
    ty = operand.ty
    return isinstance(ty, relax.TensorType) and 0 <= ty.ndim <= _MAX_DIMS and _dtype(ty) == dtype


def _name(call: Any) -> str:
    return str(call.op.name) if isinstance(call.op, tvm.ir.Op) else ""


def _dtype(ty: Any) -> str | None:
    dtype = ty.dtype
    return str(dtype) if dtype is not None else None
