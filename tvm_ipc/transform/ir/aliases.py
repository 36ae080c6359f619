# SPDX-License-Identifier: Apache-2.0
"""Which memory a value may be, where that is used, and who else holds it.

    y = f(x)                     a packed function may return its argument, or what others hold
    p = (x, y)                   a tuple is its fields
    z = R.reshape(p[0], ...)     a view is what it views
    r = z if c else w            either of them
    s = cls.g(x, w)              what the body of g says

Memory is a set of roots: tensors that the function makes, each apart from all others, and what was
there before. Of the latter each may be any other: a caller may pass one tensor twice. A packed
function is taken not to keep its arguments, as TVM's own plan takes it, but what it returns may be
one of them. Operators may yet become kernels, views or constants: what one of them returns is new,
or one of its arguments.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import tvm
from tvm import relax, tirx

from tvm_ipc.transform.collectives import match_collective
from tvm_ipc.transform.ir.program import Program, Region, Step, exclusive, linearise
from tvm_ipc.transform.ir.views import VIEWS

_ALLOC_TENSOR = tvm.ir.Op.get("relax.builtin.alloc_tensor")
_ALLOC_TENSOR_ADDRESS = _ALLOC_TENSOR.__chandle__()
_CALL_TIR_DYN = tvm.ir.Op.get("relax.vm.call_tir_dyn")
#: What these do with their arguments is up to the function that they call.
_KEEPERS = {
    "relax.call_builtin_with_ctx",
    "relax.call_py_func",
    "relax.invoke_closure",
    "relax.invoke_pure_closure",
    "relax.make_closure",
}
#: They return what a packed function returns.
_PACKED = {"relax.call_pure_packed", "relax.call_inplace_packed"}
#: They allocate their results; kernels that only reshape become views in dataflow blocks.
_DESTINATION_PASSING = {"relax.call_tir": True, "relax.call_dps_packed": False}
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
    """What values may be: a tensor that the function makes, or what was there before."""

    uses: list[Use] = field(default_factory=list)
    kept: str | None = None  #: why it may be held for ever
    escaped: bool = False  #: whether somebody outside may hand it back
    returned: bool = False
    #: TVM's plan gives it a storage that others may reuse; it gives up at branches and calls
    plain: bool = True

    def keep(self, reason: str, *, escapes: bool = True) -> None:
        """Note that it may be held for ever; the first reason stands."""
        self.kept = self.kept or reason
        self.escaped |= escapes

    @property
    def foreign(self) -> bool:
        """Whether others may hold it, so that what comes from outside may be it."""
        return True


@dataclass(eq=False)
class Parameter(Root):
    """What the caller passes for one parameter, with all its fields."""


@dataclass(eq=False)
class Made(Root):
    """A tensor that the function makes."""

    step: Step = None  # type: ignore[assignment]
    #: Whether it is one whatever passes follow; what an operator makes may become a constant, or
    #: one with what an equal operator makes.
    certain: bool = True

    @property
    def foreign(self) -> bool:
        """Whether it escapes."""
        return self.escaped


@dataclass(eq=False)
class Allocation(Made):
    """One `builtin.alloc_tensor`."""

    @property
    def call(self) -> Any:
        """The call that allocates."""
        return self.step.value

    @property
    def scope(self) -> str:
        """The memory scope that it is allocated in."""
        return str(self.call.args[3].value)

    @property
    def name(self) -> str:
        """The name of its variable."""
        return str(self.step.var.name)


#: The roots of a value, or of each field of a tuple.
Value: TypeAlias = "frozenset[Root] | tuple[Value, ...]"
_NOTHING: frozenset[Root] = frozenset()
#: By the address of a variable, which the function keeps where it is: hashing it is slow.
Values: TypeAlias = "dict[int, Value]"
_CONSTANTS = 0  #: no variable is there; all constants have one value
_VARIABLES = frozenset((tvm.ir.Var, relax.DataflowVar))


@dataclass
class Facts:
    """What is known of one function."""

    program: Program
    parameters: list[Parameter]
    allocations: list[Allocation]
    values: Values
    result: Value
    outside: Root  #: what was there before and is no parameter: constants, what callees return
    collectives: list[Step]  #: in the order of the program

    def roots(self, expr: relax.Expr) -> frozenset[Root]:
        """Return what the value of an argument may lie in."""
        return frozenset(leaves(_value(self.values, expr)))

    def may_be_same(self, one: relax.Expr, other: relax.Expr) -> bool:
        """Whether two values, or fields of them, may be the same memory."""
        roots, others = self.roots(one), self.roots(other)
        if not roots.isdisjoint(others):
            return True
        return any(root.foreign for root in roots) and any(root.foreign for root in others)

    def may_overwrite(self, expr: relax.Expr, step: Step) -> bool:
        """Whether a value is memory of this function that nobody looks at after a step."""
        roots = self.roots(expr)
        return bool(roots) and all(
            isinstance(root, Made) and root.certain and _ends_by(root, step) for root in roots
        )

    def scope(self, expr: relax.Expr) -> str | None:
        """Return the memory scope that a value is known to be in."""
        roots = self.roots(expr)
        scopes = {root.scope if isinstance(root, Allocation) else None for root in roots}
        return scopes.pop() if len(scopes) == 1 else None


def _ends_by(root: Made, step: Step) -> bool:
    if root.kept is not None or root.returned:
        return False
    return all(use.event <= step.index or exclusive(use.region, step.region) for use in root.uses)


class ModuleFacts:
    """What is known of the functions of a module, found when it is asked for.

    `makers` are names of functions, of any kind, that return new tensors and keep nothing.
    """

    def __init__(self, mod: tvm.IRModule, makers: Collection[str] = ()) -> None:
        self.functions = {str(var.name_hint): function for var, function in mod.functions_items()}
        self.makers = frozenset(makers)
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
        parts = [_value(values, part) for part in expr.args[:]]
        return frozenset(leaves((*parts, values[_CONSTANTS])))
    if kind is tvm.ir.GenericConst and type(expr.ty) is relax.TensorType:
        return values[_CONSTANTS]
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
        self._outside = Root()
        self._foreign: Value = frozenset((self._outside,))
        self._values: Values = {_CONSTANTS: self._foreign}
        self._kernels: set[int] = set()  # by address, as values are
        self._allocations: list[Allocation] = []
        self._collectives: list[Step] = []

    def run(self) -> Facts:
        function = self._program.function
        parameters = [Parameter() for _ in function.params]
        for var, parameter in zip(function.params, parameters, strict=True):
            self._values[var.__chandle__()] = frozenset([parameter])
        self._region(self._program.body)
        result = self._result(function.body)
        for root in leaves(result):
            root.returned = True
            root.plain = False
        return Facts(
            self._program,
            parameters,
            self._allocations,
            self._values,
            result,
            self._outside,
            self._collectives,
        )

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
            return self._foreign
        if kind is relax.SeqExpr:
            self._keep_free(value, "an expression that is not in normal form uses it")
            return self._foreign
        return _value(self._values, value)

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
        if function is not None and str(op.name_hint) in self._module.makers:
            self._use_all(step, call.args[:])
            return _made(step, step.var.ty)
        if isinstance(function, relax.Function):
            step.region.crossings.append(step)
            return self._relax_call(step, call, str(op.name_hint))
        self._use_all(step, call.args[:], plain=False)
        for root in self._leaves(call.args[:]):
            root.keep("it is given to a function that is not known here")
        return self._foreign if _holds_tensor(step.var.ty) else _NOTHING

    def _packed(self, step: Step, call: relax.Call, name: str) -> Value:
        self._use_all(step, call.args[:])
        if name in VIEWS:
            return _value(self._values, call.args[0])
        step.collective = match_collective(call)
        if step.collective is not None:
            self._collectives.append(step)
            step.region.crossings.append(step)
            return _NOTHING
        if not _holds_tensor(step.var.ty):
            return _NOTHING
        if name.startswith(_COPIERS):
            return self._foreign
        return self._any_of(call.args[:])

    def _operator(self, step: Step, call: relax.Call) -> Value:
        name = call.op.name
        if name in VIEWS:
            return _value(self._values, call.args[0])
        if call.op.same_as(_CALL_TIR_DYN):
            self._use_all(step, call.args[1].fields[:])
            return _NOTHING
        self._use_all(step, call.args[:], plain=False)
        holds = _holds_tensor(step.var.ty)
        if name in _PACKED:
            return self._any_of(call.args[:]) if holds else _NOTHING
        if name in _DESTINATION_PASSING:
            dataflow = type(step.region.blocks[step.block]) is relax.DataflowBlock
            made = _made(step, step.var.ty, certain=False)
            may_be_view = dataflow and _DESTINATION_PASSING[name]
            return frozenset((*self._leaves(call.args[:]), *leaves(made))) if may_be_view else made
        if name not in _KEEPERS and not holds:
            return _NOTHING
        roots = self._leaves(call.args[:])
        pure = name not in _KEEPERS and bool(call.op.get_attr("FPurity"))
        for root in roots:
            root.keep(f"it is given to the operator {name}", escapes=not pure)
        if pure:
            return frozenset((*roots, Made(step=step, certain=False)))
        return self._foreign if holds else _NOTHING

    def _relax_call(self, step: Step, call: relax.Call, name: str) -> Value:
        self._use_all(step, call.args[:], plain=False)
        facts = self._module.of(name)
        if facts is None:
            for root in self._leaves(call.args[:]):
                root.keep(f"it is given to {name}, which calls itself")
            return self._foreign if _holds_tensor(step.var.ty) else _NOTHING
        here: dict[Root, frozenset[Root]] = {facts.outside: frozenset((self._outside,))}
        for argument, parameter in zip(call.args, facts.parameters, strict=False):
            here[parameter] = frozenset(leaves(_value(self._values, argument)))
            if parameter.kept is not None:
                for root in here[parameter]:
                    reason = f"it is given to {name}, where {parameter.kept}"
                    root.keep(reason, escapes=parameter.escaped)
        return self._returned(step, name, facts.result, here)

    def _returned(
        self, step: Step, name: str, value: Value, here: dict[Root, frozenset[Root]]
    ) -> Value:
        """Return what a callee's value is here, where `here` says what its roots are."""
        if isinstance(value, tuple):
            return tuple(self._returned(step, name, part, here) for part in value)
        for root in value:
            if root not in here and isinstance(root, Made):
                made = Made(step=step, certain=False)
                if root.kept is not None:
                    reason = f"{name} made it, and there {root.kept}"
                    made.keep(reason, escapes=root.escaped)
                here[root] = frozenset((made,))
        return frozenset(one for root in value for one in here.get(root, (self._outside,)))

    def _any_of(self, arguments: Any) -> Value:
        """Return what a packed function returns: an argument, or what it has from elsewhere."""
        return frozenset((*self._leaves(arguments), self._outside))

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
            if not isinstance(root, Made):
                continue  # of what was there before only who keeps it matters
            root.uses.append(Use(step, event, step.region))
            home = root.step
            if not plain or home.region is not step.region or home.block != step.block:
                root.plain = False

    def _keep_free(self, expr: relax.Expr, reason: str) -> None:
        for var in relax.analysis.free_vars(expr):
            for root in leaves(self._values.get(var.__chandle__(), _NOTHING)):
                root.keep(reason)


def _made(step: Step, ty: Any, *, certain: bool = True) -> Value:
    """Return new tensors for a type."""
    if isinstance(ty, relax.TupleType):
        return tuple(_made(step, part, certain=certain) for part in ty.fields)
    return frozenset((Made(step=step, certain=certain),)) if _holds_tensor(ty) else _NOTHING


def _holds_tensor(ty: Any) -> bool:
    """Whether a value of the type may be a tensor or contain one."""
    if isinstance(ty, relax.TupleType):
        return any(_holds_tensor(part) for part in ty.fields)
    return not isinstance(ty, (relax.ShapeType, tvm.ir.PrimType))
