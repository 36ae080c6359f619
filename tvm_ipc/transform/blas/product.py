# SPDX-License-Identifier: Apache-2.0
"""A product as the BLAS takes it: a matmul, the permutations before it, the steps after it.

    wt = R.permute_dims(w)          b = w, its axes permuted (1, 0)
    y0 = R.matmul(x, wt)            a = x
    y1 = R.add(y0, bias)            ADD bias
    y2 = R.nn.gelu(y1)              GELU
    y3 = R.astype(y2, "bfloat16")   the type of the result

Analysis only: `find_products` returns facts, and `offload` puts calls in their places.
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

from tvm_ipc.contract import MAX_STEPS, Epilogue, pack_digits
from tvm_ipc.transform.ir.aliases import ModuleFacts
from tvm_ipc.transform.ir.roots import Facts
from tvm_ipc.transform.ir.views import WRITERS

_MAX_DIMS: Final = 8
_UNKNOWN: Final = 8
_FLOATS: Final = ("float16", "bfloat16", "float32", "float64")
_CPUS: Final = ("llvm", "c")
#: Operators of steps.
STEPS: Final = {
    "relax.add": Epilogue.ADD,
    "relax.multiply": Epilogue.MULTIPLY,
    "relax.nn.relu": Epilogue.RELU,
    "relax.nn.gelu": Epilogue.GELU,
    "relax.nn.gelu_tanh": Epilogue.GELU_TANH,
    "relax.nn.silu": Epilogue.SILU,
}


@dataclass
class Product:
    """A matmul with what belongs to it; if `refusal` says why, the BLAS cannot have it."""

    bindings: list[Any]  #: the matmul, then the steps in their order
    a: Any
    b: Any
    a_axes: int = 0
    b_axes: int = 0
    steps: list[Epilogue] = field(default_factory=list)
    operands: list[Any] = field(default_factory=list)
    #: Variables that it reads through, and how often the function uses them.
    permutations: list[tuple[Any, int]] = field(default_factory=list)
    #: What it reads, and the place where the module reads it.
    reads: list[tuple[Any, int]] = field(default_factory=list)
    refusal: str = ""

    @property
    def subject(self) -> str:
        """The product in a report."""
        first, last = self.bindings[0], self.bindings[-1]
        steps = "".join(f", {step.name.lower()}" for step in self.steps)
        return f"matmul {first.var.name}{steps}: {last.var.ty}"

    @property
    def dtype(self) -> str:
        """The type of the operands."""
        return str(self.a.ty.dtype)

    @property
    def work(self) -> int:
        """Multiplications; each dimension that is not known yet counts as 8."""
        dims = list(self.bindings[0].var.ty.shape)
        inner = self.bindings[0].value.args[0].ty.shape
        dims.append(inner[-1] if isinstance(inner, relax.ShapeExpr) else None)
        return math.prod(int(d.value) if isinstance(d, tirx.IntImm) else _UNKNOWN for d in dims)


@dataclass
class _Scope:
    """The bindings of a function: who defines a variable, in which block, and who uses it."""

    aliases: Callable[[], Facts | None]  #: asked only where memory may be written
    definition: dict[Any, tuple[Any, int]] = field(default_factory=dict)  #: binding, block
    place: dict[Any, int] = field(default_factory=dict)  #: in the order of bindings
    uses: Counter[Any] = field(default_factory=Counter)
    user: dict[Any, tuple[Any, int]] = field(default_factory=dict)
    products: list[tuple[Any, int]] = field(default_factory=list)
    writes: list[tuple[int, Any]] = field(default_factory=list)  #: places, and calls that may write
    blocks: int = 0

    def read(self, body: Any) -> None:
        if not isinstance(body, relax.SeqExpr):
            self._use(body, None, -1)
            return
        for block in body.blocks[:]:
            self.blocks += 1
            number = self.blocks
            for binding in block.bindings[:]:
                self.definition[binding.var] = (binding, number)
                self.place[binding.var] = len(self.place)
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
                        self.products.append((binding, number))
                    elif not name or name in WRITERS:
                        self.writes.append((self.place[binding.var], value))
        self._use(body.body, None, -1)

    def may_wait(self, values: Iterable[tuple[Any, int]], until: int) -> bool:
        """Whether values can be read at a place instead of where they were."""
        end = bisect_left(self.writes, until, key=_place_of)
        return not any(
            self._may_write(call, value)
            for value, since in values
            for _, call in self.writes[bisect_right(self.writes, since, key=_place_of) : end]
        )

    def _may_write(self, call: Any, value: Any) -> bool:
        if not isinstance(call.op, tvm.ir.Op | tvm.ir.GlobalVar | relax.ExternFunc):
            return True  # a closure, which may have captured it
        aliases = self.aliases()
        assert aliases is not None
        return any(aliases.may_be_same(value, argument) for argument in call.args[:])

    def _use(self, value: Any, binding: Any, block: int) -> None:
        if isinstance(value, relax.Var):
            self.uses[value] += 1
            self.user[value] = (binding, block)
        elif isinstance(value, relax.Call):
            self._use(value.op, binding, block)
            for argument in value.args[:]:
                self._use(argument, binding, block)
        elif isinstance(value, relax.Tuple):
            for item in value.fields[:]:
                self._use(item, binding, block)
        elif isinstance(value, relax.TupleGetItem):
            self._use(value.tuple_value, binding, block)
        elif isinstance(value, relax.Function):
            for variable in relax.analysis.free_vars(value):
                self.uses[variable] += 2  # nothing of it may move
                self.user[variable] = (None, -1)


def _place_of(write: tuple[int, Any]) -> int:
    return write[0]


def find_products(module: ModuleFacts, name: str) -> list[Product]:
    """Return every matmul of a function, in order, each binding in one of them at most."""
    function = module.functions[name]
    scope = _Scope(lambda: module.of(name))
    scope.read(function.body)
    taken: set[Any] = set()
    products = []
    for binding, block in scope.products:
        product = _start(binding, block, scope)
        if not product.refusal:
            _grow(product, block, scope, taken)
        products.append(product)
    return products


def _start(binding: Any, block: int, scope: _Scope) -> Product:
    product = Product([binding], *binding.value.args[:])
    types = [product.a.ty, product.b.ty, binding.var.ty]
    product.refusal = refusal(types)
    if product.refusal:
        return product
    place = scope.place[binding.var]
    product.a, product.a_axes = _look_through(product, product.a, block, scope)
    product.b, product.b_axes = _look_through(product, product.b, block, scope)
    product.reads += [(product.a, place), (product.b, place)]
    return product


def refusal(types: list[Any]) -> str:
    """Say why it cannot have a product with these types of a, b and the result, or nothing."""
    for what, ty in zip(("a", "b", "the result"), types, strict=True):
        if not isinstance(ty, relax.TensorType) or ty.ndim < 0:
            return f"{what} has no known number of dimensions"
        if ty.ndim > _MAX_DIMS:
            return f"{what} has {ty.ndim} dimensions, more than {_MAX_DIMS}"
        if ty.vdevice is not None and ty.vdevice.target.kind.name not in _CPUS:
            return f"{what} lives on {ty.vdevice.target.kind.name}"
    a, b, result = (_dtype(ty) for ty in types)
    if a != b or a not in _FLOATS or result not in _FLOATS:
        return f"{a or 'unknown'} x {b or 'unknown'} -> {result or 'unknown'} is no type it has"
    if (a == "float64") != (result == "float64"):
        return f"{a} is not accumulated to {result}"
    if not isinstance(types[2].shape, relax.ShapeExpr):
        return "the shape of the result is not known before it runs"
    return ""


def _look_through(product: Product, operand: Any, block: int, scope: _Scope) -> tuple[Any, int]:
    """Return what is permuted and how, where a matrix of the result can be read in place."""
    if not isinstance(operand, relax.Var) or operand not in scope.definition:
        return operand, 0
    binding, home = scope.definition[operand]
    call = binding.value
    if not isinstance(call, relax.Call) or _name(call) != "relax.permute_dims":
        return operand, 0
    (source,) = call.args
    ndim = source.ty.ndim
    # What a dataflow block does not hand out can be read in it only.
    visible = home == block or not isinstance(source, relax.DataflowVar)
    if not visible or not 2 <= ndim <= _MAX_DIMS:
        return operand, 0
    given = call.attrs.axes
    axes = [int(x) % ndim for x in given] if given is not None else list(range(ndim))[::-1]
    # One dimension of the matrix has to lie densely in memory, which is the last one.
    if ndim - 1 not in axes[-2:]:
        return operand, 0
    here = scope.place[product.bindings[0].var]
    if not scope.may_wait([(source, scope.place[operand])], here):
        return operand, 0
    product.permutations.append((operand, scope.uses[operand]))
    return source, pack_digits(axes)


def _grow(product: Product, block: int, scope: _Scope, taken: set[Any]) -> None:
    """Add what follows the product, as long as only it is used, and only there."""
    while True:
        last = product.bindings[-1].var
        if scope.uses[last] != 1:
            return
        binding, home = scope.user[last]
        if binding is None or home != block or binding.var in taken:
            return
        place = scope.place[binding.var]
        if not scope.may_wait(product.reads, place) or not _take(product, last, binding):
            return
        if len(product.operands) > len(product.reads) - 2:
            product.reads.append((product.operands[-1], place))
        product.bindings.append(binding)
        taken.add(binding.var)


def _take(product: Product, last: Any, binding: Any) -> bool:
    """Add one call to the steps; whether it is one."""
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
    if step is None or len(product.steps) == MAX_STEPS:
        return False
    if step in (Epilogue.ADD, Epilogue.MULTIPLY):
        x, y = call.args
        other = y if isinstance(x, relax.Var) and x.same_as(last) else x
        if not _is_operand(other, dtype):
            return False
        product.operands.append(other)
    product.steps.append(step)
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
