# SPDX-License-Identifier: Apache-2.0
"""Which allocations a value may lie in, where they are used, and which of them escape.

Values are followed through variables, tuples and their fields, reshapes and views, match_cast, if
branches, and calls of Relax functions of the module. A packed function is taken not to keep its
arguments, as TVM's own plan takes it, but what it returns may be one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import tvm
from tvm import relax, tirx

from tvm_ipc.transform.collectives import match_collective
from tvm_ipc.transform.ir.program import Program, Region, Step, linearise

_ALLOC_TENSOR = tvm.ir.Op.get("relax.builtin.alloc_tensor")
_ALLOC_TENSOR_ADDRESS = _ALLOC_TENSOR.__chandle__()
_CALL_TIR_DYN = tvm.ir.Op.get("relax.vm.call_tir_dyn")
_VIEWS = {
    tvm.ir.Op.get(name).name
    for name in ("relax.reshape", "relax.memory.view", "relax.memory.ensure_zero_offset")
}
#: What these do with their arguments is up to the function that they call.
_KEEPERS = {
    "relax.call_builtin_with_ctx",
    "relax.call_py_func",
    "relax.invoke_closure",
    "relax.invoke_pure_closure",
    "relax.make_closure",
}
#: TVM's caches copy what they are given, and return themselves.
_COPIERS = ("vm.builtin.attention_kv_cache_", "vm.builtin.rnn_state_")


@dataclass(eq=False, slots=True)
class Use:
    """A value in the memory of a root is read or written."""

    step: Step
    event: int
    region: Region


@dataclass(eq=False)
class Root:
    """What values may lie in: an allocation of the function, or what its caller passed."""

    uses: list[Use] = field(default_factory=list)
    kept: str | None = None  #: why somebody outside may hold it for ever
    returned: bool = False
    #: TVM's plan gives it a storage that others may reuse; it gives up at branches and calls
    plain: bool = True

    def keep(self, reason: str) -> None:
        """Note that it escapes; the first reason stands."""
        self.kept = self.kept or reason


@dataclass(eq=False)
class Parameter(Root):
    """What the caller passes for one parameter, with all its fields."""


@dataclass(eq=False)
class Allocation(Root):
    """One `builtin.alloc_tensor`."""

    step: Step = None  # type: ignore[assignment]

    @property
    def call(self) -> Any:
        """The call that allocates."""
        return self.step.value

    @property
    def name(self) -> str:
        """The name of its variable."""
        return str(self.step.var.name)


#: The roots of a value, or of each field of a tuple.
Value: TypeAlias = "frozenset[Root] | tuple[Value, ...]"
_NOTHING: frozenset[Root] = frozenset()
#: By the address of a variable, which the function keeps where it is: hashing it is slow.
Values: TypeAlias = "dict[int, Value]"
_VARIABLES = frozenset((tvm.ir.Var, relax.DataflowVar))


@dataclass
class Facts:
    """What is known of one function."""

    program: Program
    parameters: list[Parameter]
    allocations: list[Allocation]
    values: Values
    collectives: list[Step]  #: in the order of the program

    def roots(self, expr: relax.Expr) -> frozenset[Root]:
        """Return what the value of an argument may lie in."""
        return frozenset(leaves(_value(self.values, expr)))


class ModuleFacts:
    """What is known of the functions of a module, found when it is asked for."""

    def __init__(self, mod: tvm.IRModule) -> None:
        self.functions = {str(var.name_hint): function for var, function in mod.functions_items()}
        self._facts: dict[str, Facts] = {}
        self._active: set[str] = set()

    def of(self, name: str) -> Facts | None:
        """Return the facts of a Relax function; None for one that is being looked at: recursion."""
        if name in self._active:
            return None
        if name not in self._facts:
            self._active.add(name)
            program = linearise(name, self.functions[name])
            self._facts[name] = _Walk(self, program).run()
            self._active.discard(name)
        return self._facts[name]

    def function(self, callee: relax.Expr) -> Any:
        """Return the function of the module that a call calls, or None."""
        if isinstance(callee, tvm.ir.GlobalVar):
            return self.functions.get(str(callee.name_hint))
        return None


def leaves(value: Value) -> Iterator[Root]:
    """Yield the roots of a value and of all its fields."""
    if isinstance(value, tuple):
        for part in value:
            yield from leaves(part)
    else:
        yield from value


def _value(values: Values, expr: relax.Expr) -> Value:
    kind = type(expr)
    if kind in _VARIABLES:
        return values.get(expr.__chandle__(), _NOTHING)
    if kind is relax.Tuple:
        return tuple(_value(values, part) for part in expr.fields[:])
    if kind is relax.TupleGetItem:
        value = _value(values, expr.tuple_value)
        return value[int(expr.index)] if isinstance(value, tuple) else value
    if kind is relax.Call:  # not in normal form
        return frozenset(root for part in expr.args[:] for root in leaves(_value(values, part)))
    return _NOTHING


def _join(one: Value, other: Value) -> Value:
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return tuple(_join(a, b) for a, b in zip(one, other, strict=True))
    return frozenset(leaves(one)) | frozenset(leaves(other))


class _Walk:
    """Goes through the events of one function once."""

    def __init__(self, module: ModuleFacts, program: Program) -> None:
        self._module = module
        self._program = program
        self._values: Values = {}
        self._kernels: set[int] = set()  # by address, as values are
        self._allocations: list[Allocation] = []
        self._collectives: list[Step] = []

    def run(self) -> Facts:
        function = self._program.function
        parameters = [Parameter() for _ in function.params]
        for var, parameter in zip(function.params, parameters, strict=True):
            self._values[var.__chandle__()] = frozenset([parameter])
        self._region(self._program.body)
        for root in leaves(self._result(function.body)):
            root.returned = True
            root.plain = False
        return Facts(self._program, parameters, self._allocations, self._values, self._collectives)

    def _result(self, body: relax.Expr) -> Value:
        if not isinstance(body, relax.SeqExpr):
            return _value(self._values, body)
        return _value(self._values, body.body)

    def _region(self, region: Region) -> None:
        values = self._values
        for step in region.steps:
            value = self._step(step)
            if value:
                values[step.var.__chandle__()] = value

    def _step(self, step: Step) -> Value:
        value = step.value
        kind = type(value)
        if kind is relax.Call:
            return self._call(step, value)
        if kind in _VARIABLES or kind is relax.Tuple or kind is relax.TupleGetItem:
            return _value(self._values, value)
        if kind is relax.If:
            self._use(step, value.cond, step.entry, plain=False)
            step.region.crossings.append(step)
            results = []
            for region, body in zip(
                step.branches, (value.true_branch, value.false_branch), strict=True
            ):
                self._region(region)
                results.append(self._result(body))
            joined = _join(*results)
            for root in leaves(joined):
                root.plain = False
            return joined
        if kind is relax.Function:
            self._keep_free(value, "a local function captures it")
        elif kind is relax.SeqExpr:
            self._keep_free(value, "an expression that is not in normal form uses it")
        return _NOTHING

    def _call(self, step: Step, call: relax.Call) -> Value:
        op = call.op
        address = op.__chandle__()
        if address == _ALLOC_TENSOR_ADDRESS:
            allocation = Allocation(step=step)
            self._allocations.append(allocation)
            return frozenset((allocation,))
        if address in self._kernels:
            self._use_all(step, call.args[:])
            return _NOTHING
        if isinstance(op, tvm.ir.Op):
            return self._operator(step, call)
        if isinstance(op, relax.ExternFunc):
            return self._packed(step, call, str(op.global_symbol))
        function = self._module.function(op)
        if isinstance(function, tirx.PrimFunc):
            self._kernels.add(address)
            self._use_all(step, call.args[:])
            return _NOTHING
        if isinstance(function, relax.Function):
            step.region.crossings.append(step)
            return self._relax_call(step, call, str(op.name_hint))
        self._use_all(step, call.args[:], plain=False)
        for root in self._leaves(call.args[:]):
            root.keep("it is given to a function that is not known here")
        return _NOTHING

    def _packed(self, step: Step, call: relax.Call, name: str) -> Value:
        self._use_all(step, call.args[:])
        if name == "vm.builtin.reshape":
            return _value(self._values, call.args[0])
        step.collective = match_collective(call)
        if step.collective is not None:
            self._collectives.append(step)
            step.region.crossings.append(step)
            return _NOTHING
        if name.startswith(_COPIERS) or not _holds_tensor(step.var.ty):
            return _NOTHING
        return frozenset(self._leaves(call.args[:]))

    def _operator(self, step: Step, call: relax.Call) -> Value:
        name = call.op.name
        if name in _VIEWS:
            return _value(self._values, call.args[0])
        if call.op.same_as(_CALL_TIR_DYN):
            self._use_all(step, call.args[1].fields[:])
            return _NOTHING
        self._use_all(step, call.args[:], plain=False)
        if name in _KEEPERS or _holds_tensor(step.var.ty):
            for root in self._leaves(call.args[:]):
                root.keep(f"it is given to the operator {name}")
        return _NOTHING

    def _relax_call(self, step: Step, call: relax.Call, name: str) -> Value:
        self._use_all(step, call.args[:], plain=False)
        facts = self._module.of(name)
        if facts is None:
            for root in self._leaves(call.args[:]):
                root.keep(f"it is given to {name}, which calls itself")
            return _NOTHING
        result: set[Root] = set()
        for argument, parameter in zip(call.args, facts.parameters, strict=False):
            roots = frozenset(leaves(_value(self._values, argument)))
            if parameter.kept is not None:
                for root in roots:
                    root.keep(f"it is given to {name}, where {parameter.kept}")
            if parameter.returned:
                result |= roots
        return frozenset(result)

    def _leaves(self, arguments: Any) -> set[Root]:
        found: set[Root] = set()
        for argument in arguments:
            found.update(leaves(_value(self._values, argument)))
        return found

    def _use_all(self, step: Step, arguments: Any, *, plain: bool = True) -> None:
        for argument in arguments:
            self._use(step, argument, step.entry, plain=plain)

    def _use(self, step: Step, expr: relax.Expr, event: int, *, plain: bool) -> None:
        value = _value(self._values, expr)
        if not value:
            return
        for root in leaves(value):
            if not isinstance(root, Allocation):
                continue  # of what the caller passed only who keeps it matters
            root.uses.append(Use(step, event, step.region))
            home = root.step
            if not plain or home.region is not step.region or home.block != step.block:
                root.plain = False

    def _keep_free(self, expr: relax.Expr, reason: str) -> None:
        for var in relax.analysis.free_vars(expr):
            for root in leaves(self._values.get(var.__chandle__(), _NOTHING)):
                root.keep(reason)


def _holds_tensor(ty: Any) -> bool:
    """Whether a value of the type may be a tensor or contain one."""
    if isinstance(ty, relax.TupleType):
        return any(_holds_tensor(part) for part in ty.fields)
    return not isinstance(ty, (relax.ShapeType, tvm.ir.PrimType))
