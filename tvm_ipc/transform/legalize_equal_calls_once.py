# SPDX-License-Identifier: Apache-2.0
"""The pass `LegalizeOps`, which does what TVM's does but legalizes equal calls only once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import relax

from tvm_ipc import arguments
from tvm_ipc.analysis.alias_facts import VARIABLES
from tvm_ipc.analysis.ffi_arrays import as_list
from tvm_ipc.analysis.walk_and_rewrite_bindings import calls, relax_functions
from tvm_ipc.transform.module_pass import ModulePass, module_pass, option
from tvm_ipc.tvm_moved_names import GenericConst

#: A legalization as TVM defines it: a function of the builder and a call that returns the new form.
Legalization = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]


def _operators(name: str, value: object) -> list[str]:
    """Return names of operators, or raise an error that names the argument."""
    names = list(arguments.texts(name, value, "names of operators"))
    registered = frozenset(map(str, tvm.ir.Op.list_op_names()))
    if not registered.issuperset(names):
        raise arguments.wrong_value(name, "names of operators that TVM has", value)
    return names


def _customized(name: str, value: object) -> dict[str, Legalization]:
    """Return a map of legalizations, or raise an error that names the argument."""
    table = arguments.instance(name, value, Mapping, "a mapping from operators to functions")
    operators = _operators(name, table)
    return {op: arguments.function(f"{name}[{op!r}]", table[op]) for op in operators}


@module_pass
class LegalizeOps(ModulePass):
    """Legalize operators to kernels as TVM's pass does, but equal calls only once.

    Before:

        a = R.add(x, y)             # all of one shape and type
        b = R.add(a, z)

    After:

        a = R.call_tir(cls.add, (x, y), out_ty=R.Tensor((4,), "float32"))
        b = R.call_tir(cls.add, (a, z), out_ty=R.Tensor((4,), "float32"))

    TVM's pass builds the kernel of `b` and drops it, because it equals the kernel of `a`. In a
    model with many layers this takes most of the compilation time. This pass builds the second call
    from the pattern of the first. The result is the same module, with the same names.

    Calls are equal if their operators, attributes, types and other arguments are equal. Tensor
    variables may differ, because a legalization only looks at their types. Calls with variables
    that are not tensors, with constants that are not scalars, or whose legalization emits more than
    one call are legalized one by one.

    Parameters
    ----------
    customize_legalize_map : by operator, a function to use in place of TVM's. It is called for each
        call.
    skip_ops : the names of operators to skip.
    enable_warning : whether TVM logs the operators that it cannot legalize.

    Examples
    --------
    >>> import tvm
    >>> from tvm_ipc.transform import LegalizeOps
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class Model:
    ...     @R.function
    ...     def main(x: R.Tensor((4,), "float32")):
    ...         y = R.add(x, x)
    ...         z = R.add(y, x)
    ...         return z
    ... ''')
    >>> legalized = LegalizeOps()(mod)
    >>> legalized.script().count("R.call_tir")
    2
    """

    customize_legalize_map: Mapping[str, Legalization] | None = option(_customized, default=None)
    skip_ops: Sequence[str] | None = option(_operators, default=None)
    enable_warning: bool = option(arguments.flag, default=False)

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the legalized module."""
        chosen = {**dict(_legalizations(mod)), **(self.customize_legalize_map or {})}
        skipped = list(self.skip_ops or ())
        return relax.transform.LegalizeOps(chosen, skipped, self.enable_warning)(mod)


def _legalizations(mod: tvm.IRModule) -> Iterator[tuple[str, Legalization]]:
    """Yield the operators of a module that have a legalization, each with a cached version."""
    operators: dict[int, tvm.ir.Op] = {}  # by address, because each operator is one object
    for call in (call for _, function in relax_functions(mod) for call in calls(function)):
        if type(call.op) is tvm.ir.Op:
            operators.setdefault(call.op.__chandle__(), call.op)
    for op in operators.values():
        legalization = op.get_attr("FLegalize")
        if legalization is not None:
            yield str(op.name), _cached(legalization)


def _cached(legalization: Legalization) -> Legalization:
    """Return a legalization that builds equal calls from a pattern."""
    patterns: dict[Any, _Pattern | None] = {}

    def legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        operands = _CallOperands(call)
        if operands.key is None:
            return legalization(builder, call)
        pattern = patterns.get(operands.key, _MISSING)
        if isinstance(pattern, _Pattern):
            return pattern.filled(operands.tensors)
        legalized = legalization(builder, call)
        if pattern is _MISSING:
            patterns[operands.key] = _make_pattern(legalized, operands)
        return legalized

    return legalize


_MISSING = object()
_CONSTANTS = frozenset((relax.ShapeExpr, GenericConst))
_CALLEES = frozenset((tvm.ir.GlobalVar, relax.ExternFunc))


class _CallOperands:
    """The tensor variables of a call, in order of first use, and a key of all else.

    The key is None if the arguments do not determine the result of a legalization.
    """

    def __init__(self, call: relax.Call) -> None:
        self.tensors: list[Any] = []
        self._index: dict[int, int] = {}  #: by the address of a variable, which the call keeps
        self.key_parts: list[Any] = [call.attrs, call.ty, call.ty_args]
        is_determined = all(map(self._add, as_list(call.args)))
        self.key = tvm_ffi.StructuralKey(self.key_parts) if is_determined else None

    def index(self, expr: Any) -> int | None:
        """Return the index of a tensor variable, None for any other expression."""
        return self._index.get(expr.__chandle__())

    def _add(self, argument: Any) -> bool:
        """Add an argument; return whether the key holds all that a legalization may look at."""
        kind = type(argument)
        if kind in VARIABLES:
            ty = argument.ty
            index = self._index.setdefault(argument.__chandle__(), len(self.tensors))
            if index == len(self.tensors):
                self.tensors.append(argument)
            self.key_parts += [index, ty]
            return type(ty) is relax.TensorType
        if kind is relax.Tuple:
            fields = as_list(argument.fields)
            self.key_parts.append(len(fields))
            return all(map(self._add, fields))
        self.key_parts.append(argument)
        if kind is GenericConst and type(argument.ty) is relax.TensorType:
            return int(argument.ty.ndim) == 0
        return kind in _CONSTANTS or bool(tvm.ir.is_prim_expr(argument))


class _Pattern:
    """A call in destination-passing style with indices in place of its tensors."""

    def __init__(self, call: relax.Call, fields: list[Any]) -> None:
        self._call = call
        self._callee, _, *self._other_args = call.args
        self._fields = fields  #: for each operand the index of a tensor, or a constant

    def filled(self, tensors: list[Any]) -> relax.Call:
        """Return the call with the given tensors."""
        operands = [tensors[field] if type(field) is int else field for field in self._fields]
        call = self._call
        args = [self._callee, relax.Tuple(operands), *self._other_args]
        return relax.Call(call.op, args, call.attrs, call.ty_args)


def _make_pattern(legalized: relax.Expr, operands: _CallOperands) -> _Pattern | None:
    """Return the pattern of a legalized call, None if it uses variables beyond the operands."""
    if type(legalized) is not relax.Call or len(legalized.args) < 2:
        return None
    callee, packed, *other_args = legalized.args
    if type(callee) not in _CALLEES or type(packed) is not relax.Tuple:
        return None
    tensors = as_list(packed.fields)
    indices = [operands.index(tensor) for tensor in tensors]
    fields = [
        tensor if index is None else index for tensor, index in zip(tensors, indices, strict=True)
    ]
    constants = [field for field in fields if type(field) is not int]
    used = _variables([*constants, *other_args, *legalized.ty_args])
    return _Pattern(legalized, fields) if used <= _variables(operands.key_parts) else None


def _variables(nodes: list[Any]) -> set[Any]:
    variables: set[Any] = set()
    tvm_ffi.structural_walk(nodes, [(tuple(VARIABLES), variables.add)])
    return variables
