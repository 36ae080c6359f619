# SPDX-License-Identifier: Apache-2.0
"""Legalizes operators as TVM's pass does, calls that are alike once.

Before:
    a = R.add(x, y)             # all of one shape and type
    b = R.add(a, z)

After:
    a = R.call_tir(cls.add, (x, y), out_ty=R.Tensor((4,), "float32"))
    b = R.call_tir(cls.add, (a, z), out_ty=R.Tensor((4,), "float32"))

TVM makes the kernel of `b`, finds that it has it, and drops it; in a model of many layers that is
most of what a pipeline takes. Here the second call is made after the pattern of the first. Modules
come out the same, names included.

Calls are alike if their operators, attributes and types are equal, and whatever else they are
given; where variables are tensors that is all that a legalization looks at. Calls that are given
other variables, or constants that are not scalars, are legalized one by one, and so are those whose
legalization makes more than one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import relax

from tvm_ipc import arguments
from tvm_ipc.transform.ir.roots import VARIABLES
from tvm_ipc.transform.module_pass import module_pass, option

#: What TVM calls a legalization: given the builder and a call, it returns what the call becomes.
Legalization = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]


def _operators(name: str, given: object) -> list[str]:
    names = list(arguments.texts(name, given, "names of operators"))
    known = frozenset(map(str, tvm.ir.Op.list_op_names()))
    if not known.issuperset(names):
        raise arguments.wrong_value(name, "names of operators that TVM has", given)
    return names


def _customized(name: str, given: object) -> dict[str, Legalization]:
    found = arguments.instance(name, given, Mapping, "a mapping from operators to functions")
    operators = _operators(name, found)
    return {one: arguments.function(f"{name}[{one!r}]", found[one]) for one in operators}


@module_pass
class LegalizeOps:
    """Legalize operators to kernels, as TVM's pass does, calls that are alike once.

    Parameters
    ----------
    customize_legalize_map : by operator, a function that takes the place of TVM's; it is called for
        every call.
    skip_ops : names of operators that stay as they are.
    enable_warning : whether TVM logs what it cannot legalize.
    """

    customize_legalize_map: Mapping[str, Legalization] | None = option(_customized, default=None)
    skip_ops: Sequence[str] | None = option(_operators, default=None)
    enable_warning: bool = option(arguments.flag, default=False)

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the legalized module."""
        chosen = {**dict(_legalizations()), **(self.customize_legalize_map or {})}
        skipped = list(self.skip_ops or ())
        return relax.transform.LegalizeOps(chosen, skipped, self.enable_warning)(mod)


def _legalizations() -> Iterator[tuple[str, Legalization]]:
    """Yield the operators that have a legalization, and one that remembers what it made."""
    for name in tvm.ir.Op.list_op_names():
        legalization = tvm.ir.Op.get(name).get_attr("FLegalize")
        if legalization is not None:
            yield str(name), _remembering(legalization)


def _remembering(legalization: Legalization) -> Legalization:
    patterns: dict[Any, _Pattern | None] = {}

    def legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        given = _Given(call)
        if given.key is None:
            return legalization(builder, call)
        pattern = patterns.get(given.key, _UNKNOWN)
        if isinstance(pattern, _Pattern):
            return pattern.filled(given.tensors)
        made = legalization(builder, call)
        if pattern is _UNKNOWN:
            patterns[given.key] = _pattern(made, given)
        return made

    return legalize


_UNKNOWN = object()
_CONSTANTS = frozenset((relax.ShapeExpr, tvm.ir.GenericConst))
_CALLEES = frozenset((tvm.ir.GlobalVar, relax.ExternFunc))


class _Given:
    """What a call is given: its tensors in the order in which they come up, and all else."""

    def __init__(self, call: relax.Call) -> None:
        self.tensors: list[Any] = []
        self._places: dict[int, int] = {}  #: by the address of a variable, which the call keeps
        self.facts: list[Any] = [call.attrs, call.ty, call.ty_args]
        alike = all(map(self._add, call.args[:]))
        self.key = tvm_ffi.StructuralKey(self.facts) if alike else None

    def place(self, expr: Any) -> int | None:
        """Return which tensor an expression is, None if it is none of them."""
        return self._places.get(expr.__chandle__())

    def _add(self, argument: Any) -> bool:
        """Note an argument; False for one of which more may count than is noted."""
        kind = type(argument)
        if kind in VARIABLES:
            ty = argument.ty
            place = self._places.setdefault(argument.__chandle__(), len(self.tensors))
            if place == len(self.tensors):
                self.tensors.append(argument)
            self.facts += [place, ty]
            return type(ty) is relax.TensorType
        if kind is relax.Tuple:
            fields = argument.fields[:]
            self.facts.append(len(fields))
            return all(map(self._add, fields))
        self.facts.append(argument)
        if kind is tvm.ir.GenericConst and type(argument.ty) is relax.TensorType:
            return int(argument.ty.ndim) == 0
        return kind in _CONSTANTS or bool(tvm.ir.is_prim_expr(argument))


class _Pattern:
    """A call in destination-passing style whose tensors are still to be put in their places."""

    def __init__(self, call: relax.Call, operands: list[Any]) -> None:
        self._call = call
        self._callee, _, *self._rest = call.args
        self._operands = operands  #: which tensor stands there, or what stands there always

    def filled(self, tensors: list[Any]) -> relax.Call:
        """Return the call with these tensors."""
        operands = [tensors[one] if type(one) is int else one for one in self._operands]
        call = self._call
        arguments = [self._callee, relax.Tuple(operands), *self._rest]
        return relax.Call(call.op, arguments, call.attrs, call.ty_args)


def _pattern(made: relax.Expr, given: _Given) -> _Pattern | None:
    """Return the pattern of what a call became, None where it refers to more than was given."""
    if type(made) is not relax.Call or len(made.args) < 2:
        return None
    callee, operands, *rest = made.args
    if type(callee) not in _CALLEES or type(operands) is not relax.Tuple:
        return None
    places = [given.place(field) for field in operands.fields]
    fields = [
        field if place is None else place
        for field, place in zip(operands.fields, places, strict=True)
    ]
    constant = [field for field in fields if type(field) is not int]
    if _variables([*constant, *rest, *made.ty_args]) <= _variables(given.facts):
        return _Pattern(made, fields)
    return None


def _variables(things: list[Any]) -> set[Any]:
    found: set[Any] = set()
    tvm_ffi.structural_walk(things, [(tuple(VARIABLES), found.add)])
    return found
