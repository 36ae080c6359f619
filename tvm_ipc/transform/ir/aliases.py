# SPDX-License-Identifier: Apache-2.0
"""Finds which memory the values of a function may be, where it is used, and who else holds it.

    y = f(x)                     a packed function may return its argument, or what others hold
    p = (x, y)                   a tuple is its fields
    z = R.reshape(p[0], ...)     a view is what it views
    r = z if c else w            either of them
    s = cls.g(x, w)              what the body of g says

Values that may be the same memory are one alias class: they share a root, or have roots that were
there before the function ran. A packed function is taken not to keep its arguments, as TVM's own
plan takes it, but what it returns may be one of them. Operators may yet become kernels, views or
constants: what one of them returns is new, or one of its arguments.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import tvm
from tvm import relax, tirx

from tvm_ipc.transform.ir.collectives import match_collective
from tvm_ipc.transform.ir.program import Program, Region, Step, linearise
from tvm_ipc.transform.ir.roots import (
    CONSTANTS,
    NOTHING,
    VARIABLES,
    Allocation,
    Facts,
    Made,
    Parameter,
    Root,
    Use,
    Value,
    Values,
    holds_tensor,
    join,
    leaves,
    made,
    value_of,
)
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


class _Walk:
    """Goes through the events of one function once."""

    def __init__(self, module: ModuleFacts, program: Program) -> None:
        self._module = module
        self._program = program
        self._outside = Root()
        self._foreign: Value = frozenset((self._outside,))
        self._values: Values = {CONSTANTS: self._foreign}
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
            return value_of(self._values, body)
        return value_of(self._values, body.body)

    def _region(self, region: Region) -> None:
        values = self._values
        for step in self._program.steps[region]:
            value = self._step(step)
            if value:
                values[step.var.__chandle__()] = value

    def _step(self, step: Step) -> Value:
        value = step.value
        kind = type(value)
        if kind is relax.Call:
            return self._call(step, value)
        if kind in VARIABLES or kind is relax.Tuple or kind is relax.TupleGetItem:
            return value_of(self._values, value)
        if kind is relax.If:
            self._use(step, value.cond, step.entry, plain=False)
            step.region.crossings.append(step)
            results = []
            for region, body in zip(
                step.branches, (value.true_branch, value.false_branch), strict=True
            ):
                self._region(region)
                results.append(self._result(body))
            joined = join(*results)
            for root in leaves(joined):
                root.plain = False
            return joined
        if kind is relax.Function:
            self._keep_free(value, "a local function captures it")
            return self._foreign
        if kind is relax.SeqExpr:
            self._keep_free(value, "an expression that is not in normal form uses it")
            return self._foreign
        return value_of(self._values, value)

    def _call(self, step: Step, call: relax.Call) -> Value:
        op = call.op
        address = op.__chandle__()
        if address == _ALLOC_TENSOR_ADDRESS:
            allocation = Allocation(step=step)
            self._allocations.append(allocation)
            return frozenset((allocation,))
        if address in self._kernels:
            self._use_all(step, call.args[:])
            return NOTHING
        if isinstance(op, tvm.ir.Op):
            return self._operator(step, call)
        if isinstance(op, relax.ExternFunc):
            return self._packed(step, call, str(op.global_symbol))
        function = self._module.function(op)
        if isinstance(function, tirx.PrimFunc):
            self._kernels.add(address)
            self._use_all(step, call.args[:])
            return NOTHING
        if function is not None and str(op.name_hint) in self._module.makers:
            self._use_all(step, call.args[:])
            return made(step, step.var.ty)
        if isinstance(function, relax.Function):
            step.region.crossings.append(step)
            return self._relax_call(step, call, str(op.name_hint))
        self._use_all(step, call.args[:], plain=False)
        for root in self._leaves(call.args[:]):
            root.keep("it is given to a function that is not known here")
        return self._foreign if holds_tensor(step.var.ty) else NOTHING

    def _packed(self, step: Step, call: relax.Call, name: str) -> Value:
        self._use_all(step, call.args[:])
        if name in VIEWS:
            return value_of(self._values, call.args[0])
        step.collective = match_collective(call)
        if step.collective is not None:
            self._collectives.append(step)
            step.region.crossings.append(step)
            return NOTHING
        if not holds_tensor(step.var.ty):
            return NOTHING
        if name.startswith(_COPIERS):
            return self._foreign
        return self._any_of(call.args[:])

    def _operator(self, step: Step, call: relax.Call) -> Value:
        name = call.op.name
        if name in VIEWS:
            return value_of(self._values, call.args[0])
        if call.op.same_as(_CALL_TIR_DYN):
            self._use_all(step, call.args[1].fields[:])
            return NOTHING
        self._use_all(step, call.args[:], plain=False)
        holds = holds_tensor(step.var.ty)
        if name in _PACKED:
            return self._any_of(call.args[:]) if holds else NOTHING
        if name in _DESTINATION_PASSING:
            dataflow = type(step.region.blocks[step.block]) is relax.DataflowBlock
            new = made(step, step.var.ty, certain=False)
            may_be_view = dataflow and _DESTINATION_PASSING[name]
            return frozenset((*self._leaves(call.args[:]), *leaves(new))) if may_be_view else new
        if name not in _KEEPERS and not holds:
            return NOTHING
        roots = self._leaves(call.args[:])
        pure = name not in _KEEPERS and bool(call.op.get_attr("FPurity"))
        for root in roots:
            root.keep(f"it is given to the operator {name}", escapes=not pure)
        if pure:
            return frozenset((*roots, Made(step=step, certain=False)))
        return self._foreign if holds else NOTHING

    def _relax_call(self, step: Step, call: relax.Call, name: str) -> Value:
        self._use_all(step, call.args[:], plain=False)
        facts = self._module.of(name)
        if facts is None:
            for root in self._leaves(call.args[:]):
                root.keep(f"it is given to {name}, which calls itself")
            return self._foreign if holds_tensor(step.var.ty) else NOTHING
        here: dict[Root, frozenset[Root]] = {facts.outside: frozenset((self._outside,))}
        for argument, parameter in zip(call.args, facts.parameters, strict=False):
            here[parameter] = frozenset(leaves(value_of(self._values, argument)))
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
                new = Made(step=step, certain=False)
                if root.kept is not None:
                    reason = f"{name} made it, and there {root.kept}"
                    new.keep(reason, escapes=root.escaped)
                here[root] = frozenset((new,))
        return frozenset(one for root in value for one in here.get(root, (self._outside,)))

    def _any_of(self, arguments: Any) -> Value:
        """Return what a packed function returns: an argument, or what it has from elsewhere."""
        return frozenset((*self._leaves(arguments), self._outside))

    def _leaves(self, arguments: Any) -> set[Root]:
        found: set[Root] = set()
        for argument in arguments:
            found.update(leaves(value_of(self._values, argument)))
        return found

    def _use_all(self, step: Step, arguments: Any, *, plain: bool = True) -> None:
        for argument in arguments:
            self._use(step, argument, step.entry, plain=plain)

    def _use(self, step: Step, expr: relax.Expr, event: int, *, plain: bool) -> None:
        value = value_of(self._values, expr)
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
            for root in leaves(self._values.get(var.__chandle__(), NOTHING)):
                root.keep(reason)
