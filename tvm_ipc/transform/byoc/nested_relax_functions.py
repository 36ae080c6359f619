# SPDX-License-Identifier: Apache-2.0
"""Analysis of function literals: finding them, closing them, and comparing their structure."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import relax
from tvm.relax.utils import copy_with_new_vars

from tvm_ipc.analysis.walk_and_rewrite_bindings import relax_functions, walk
from tvm_ipc.transform.byoc.outlined_function_symbol_policies import GLOBAL_SYMBOL
from tvm_ipc.tvm_moved_names import GenericConst

CODEGEN = "Codegen"
COMPOSITE = "Composite"


def compiler_of(function: object) -> str | None:
    """Return the compiler of a Relax function, None if it has none."""
    if not isinstance(function, relax.Function) or not function.attrs:
        return None
    compiler = function.attrs.get(CODEGEN)
    return None if compiler is None else str(compiler)


def is_for(compiler: str | None) -> Callable[[object], bool]:
    """Return a predicate for functions of a compiler, or of any compiler if None."""
    return lambda function: (
        (attribute := compiler_of(function)) is not None and compiler in (None, attribute)
    )


def contains_literal(function: relax.Function, wanted: Callable[[relax.Function], bool]) -> bool:
    """Return whether a function contains a function literal that satisfies a predicate."""
    for _, value in walk(function):
        literal = value.op if isinstance(value, relax.Call) else value
        if isinstance(literal, relax.Function) and (
            wanted(literal) or (value is not literal and contains_literal(literal, wanted))
        ):
            return True
    return False


def used_global_vars(function: relax.Function) -> Iterator[tuple[tvm.ir.GlobalVar, bool]]:
    """Yield the global variables that a function uses, and whether it only calls them."""
    for _, value in walk(function):
        operands = [value]
        if isinstance(value, relax.Call):
            if isinstance(value.op, tvm.ir.GlobalVar):
                yield value.op, True
            operands = list(value.args)
        for operand in operands:
            yield from ((used, False) for used in _leaves(operand))


def used_functions(mod: tvm.IRModule) -> set[tvm.ir.GlobalVar]:
    """Return the global variables that the Relax functions of a module use."""
    return {used for _, function in relax_functions(mod) for used, _ in used_global_vars(function)}


def _leaves(value: relax.Expr) -> Iterator[tvm.ir.GlobalVar]:
    if isinstance(value, tvm.ir.GlobalVar):
        yield value
    elif isinstance(value, relax.Tuple):
        for field in value.fields:
            yield from _leaves(field)


@dataclass(frozen=True, eq=False)
class Closed:
    """A function literal whose free variables have become parameters."""

    function: relax.Function
    variables: tuple[relax.Var, ...]  #: further arguments, after the literal's own
    symbols: tuple[relax.Var, ...]  #: the extents of a last argument, a shape, if there are any

    def arguments(self) -> list[relax.Expr]:
        """Return the arguments that a call adds to those of the literal."""
        shape = [relax.ShapeExpr(list(self.symbols))] if self.symbols else []
        return [*self.variables, *shape]


def close(literal: relax.Function) -> Closed:
    """Return a literal as a closed function, with its free variables as parameters.

    Symbolic variables that the types of the parameters do not define become one more parameter, a
    shape.
    """
    free = [*relax.analysis.free_vars(literal), *relax.analysis.free_symbolic_vars(literal)]
    variables = [v for v in dict.fromkeys(free) if not isinstance(v.ty, tvm.ir.PrimType)]
    new = {v: relax.Var(v.name, v.ty) for v in variables}
    body = tvm_ffi.structural_map(
        literal, ((tvm.ir.Var, relax.DataflowVar), lambda var: new.get(var, var))
    )
    params = [*body.params, *new.values()]
    opened = relax.Function(params, body.body, body.ret_ty, body.is_pure, body.attrs)
    symbols = list(
        dict.fromkeys(
            [*relax.analysis.free_symbolic_vars(opened), *relax.analysis.free_vars(opened)]
        )
    )
    if symbols:
        params.append(relax.Var("symbols", relax.ShapeType(symbols)))
        opened = relax.Function(params, body.body, body.ret_ty, body.is_pure, body.attrs)
    return Closed(copy_with_new_vars(opened), tuple(variables), tuple(symbols))


class Equals:
    """A table of functions by their structure, without `global_symbol`."""

    def __init__(self) -> None:
        self._groups: dict[object, list[tuple[relax.Function, tvm.ir.GlobalVar]]] = {}

    def find(
        self, function: relax.Function, may_share: Callable[[tvm.ir.GlobalVar], bool]
    ) -> tvm.ir.GlobalVar | None:
        """Return the global variable of an equal function that may be shared, None if none is."""
        nameless = _without_symbol(function)
        for other, global_var in self._groups.get(self._key(nameless), []):
            if tvm_ffi.structural_equal(nameless, other) and may_share(global_var):
                return global_var
        return None

    def add(self, function: relax.Function, global_var: tvm.ir.GlobalVar) -> None:
        """Add a function, which later ones may share."""
        nameless = _without_symbol(function)
        self._groups.setdefault(self._key(nameless), []).append((nameless, global_var))

    def _key(self, nameless: relax.Function) -> object:
        # A hash of all constants would read all weights of a model. A hash without constants would
        # compare every layer with every other layer.
        digests: list[int] = []

        def visit(node: relax.Expr) -> None:
            if isinstance(node, GenericConst) and isinstance(node.value, tvm.runtime.Tensor):
                digests.append(_sample(node.value))

        relax.analysis.post_order_visit(nameless, visit)
        return tvm_ffi.structural_hash(nameless, skip_tensor_content=True), tuple(digests)


def _sample(tensor: tvm.runtime.Tensor, blocks: int = 8, block: int = 512) -> int:
    """Return a hash of samples of a tensor on the CPU, 0 for a tensor on another device."""
    if tensor.device.dlpack_device_type() != tvm.cpu().dlpack_device_type():
        return 0
    size = tensor.numel() * ((tensor.dtype.bits * tensor.dtype.lanes + 7) // 8)
    if size <= blocks * block:
        return hash(ctypes.string_at(tensor.data_ptr(), size))
    step = (size - block) // (blocks - 1)
    samples = [ctypes.string_at(tensor.data_ptr() + i * step, block) for i in range(blocks)]
    return hash(b"".join(samples))


def _without_symbol(function: relax.Function) -> relax.Function:
    if function.attrs and GLOBAL_SYMBOL in function.attrs:
        return function.without_attr(GLOBAL_SYMBOL)
    return function
