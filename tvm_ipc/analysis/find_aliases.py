# SPDX-License-Identifier: Apache-2.0
"""Find the memory objects that each value of a function may be, and where they are used.

    y = f(x)                     a packed function may return its argument, or older memory
    p = (x, y)                   a tuple refers to its fields
    z = R.reshape(p[0], ...)     a view refers to its argument
    z = R.add(x, y)              new memory
    z = R.squeeze(x)             new memory, or a view of the argument
    r = z if c else w            a branch refers to either of them
    s = cls.g(x, w)              the body of g decides

Two values may alias, and are in one alias class, if they share a memory object, or if both may be
memory that existed before the function ran. As in TVM's own plan, packed functions are assumed not
to keep their arguments, but they may return one of them. Operators may be lowered to kernels, views
or constants later: the results of those that may only copy are new memory or one of their
arguments.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import tvm
from tvm import relax, tirx

from tvm_ipc.analysis.alias_facts import (
    CONSTANTS,
    NOTHING,
    VARIABLES,
    AliasFacts,
    Allocation,
    FreshObject,
    MemoryObject,
    Parameter,
    Use,
    Value,
    Values,
    fresh_value,
    holds_tensor,
    join,
    leaves,
    value_of,
)
from tvm_ipc.analysis.collective_calls import match_collective
from tvm_ipc.analysis.ffi_arrays import as_list
from tvm_ipc.analysis.primfunc_effects import PrimFuncs
from tvm_ipc.analysis.program_order import Linear, Region, Step, linearize
from tvm_ipc.analysis.views_and_writes_of_calls import (
    KEEPERS,
    PACKED_CALLERS,
    VIEWS,
    computes_result,
    viewed,
)

_ALLOC_TENSOR = tvm.ir.Op.get("relax.builtin.alloc_tensor")
_ALLOC_TENSOR_ADDRESS = _ALLOC_TENSOR.__chandle__()
_CALL_TIR_DYN = tvm.ir.Op.get("relax.vm.call_tir_dyn")
#: Operators that allocate their results, and whether they may become a view in a dataflow block.
_DESTINATION_PASSING = {"relax.call_tir": True, "relax.call_dps_packed": False}
#: Functions of TVM's caches, which copy their arguments and return the cache.
_COPIERS = ("vm.builtin.attention_kv_cache_", "vm.builtin.rnn_state_")


class ModuleAliasFacts:
    """The alias facts of the functions of a module, computed on demand.

    `makers` are the names of functions, of any kind, that return new tensors and keep no argument.
    `programs` are the events of functions, by name, for callers that have them already; so is
    `primfuncs`.
    """

    def __init__(
        self,
        mod: tvm.IRModule,
        makers: Collection[str] = (),
        programs: Mapping[str, Linear] = MappingProxyType({}),
        primfuncs: PrimFuncs | None = None,
    ) -> None:
        self.functions = {str(var.name_hint): function for var, function in mod.functions_items()}
        self.primfuncs = primfuncs or PrimFuncs(mod)
        self.makers = frozenset(makers)
        self._programs = programs
        self._facts: dict[str, AliasFacts] = {}
        self._active: set[str] = set()

    def of(self, name: str) -> AliasFacts | None:
        """Return the facts of a Relax function, None while they are computed: for recursion."""
        if name in self._active:
            return None
        if name not in self._facts:
            self._active.add(name)
            program = self._programs.get(name) or linearize(name, self.functions[name])
            self._facts[name] = _Walk(self, program).run()
            self._active.discard(name)
        return self._facts[name]

    def function(self, callee: relax.Expr) -> Any:
        """Return the function of the module that is a callee, None for other callees."""
        if type(callee) is tvm.ir.GlobalVar:
            return self.functions.get(str(callee.name_hint))
        return None


class _Walk:
    """Computes the facts of one function in one pass over its events."""

    def __init__(self, module: ModuleAliasFacts, program: Linear) -> None:
        self._module = module
        self._program = program
        self._outside = MemoryObject()
        self._foreign: Value = frozenset((self._outside,))
        self._values: Values = {CONSTANTS: self._foreign}
        self._kernels: set[int] = set()  #: addresses of PrimFuncs that were called
        self._allocations: list[Allocation] = []
        self._collectives: list[Step] = []

    def run(self) -> AliasFacts:
        function = self._program.function
        parameters = [Parameter() for _ in function.params]
        for var, parameter in zip(function.params, parameters, strict=True):
            self._values[var.__chandle__()] = frozenset([parameter])
        self._region(self._program.body)
        result = value_of(self._values, self._program.body.result)
        for memory in leaves(result):
            memory.returned = True
            memory.plain = False
        return AliasFacts(
            self._program,
            parameters,
            self._allocations,
            self._values,
            result,
            self._outside,
            self._collectives,
        )

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
            for region in step.branches:
                self._region(region)
                results.append(value_of(self._values, region.result))
            joined = join(*results)
            for memory in leaves(joined):
                memory.plain = False
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
            self._use_all(step, as_list(call.args))
            return NOTHING
        kind = type(op)
        if kind is tvm.ir.Op:
            return self._operator(step, call)
        if kind is relax.ExternFunc:
            return self._packed(step, call, str(op.global_symbol))
        function = self._module.function(op)
        if isinstance(function, tirx.PrimFunc):
            self._kernels.add(address)
            self._use_all(step, as_list(call.args))
            return NOTHING
        if function is not None and str(op.name_hint) in self._module.makers:
            self._use_all(step, as_list(call.args))
            return fresh_value(step, step.var.ty)
        if isinstance(function, relax.Function):
            step.region.crossings.append(step)
            return self._relax_call(step, call, str(op.name_hint))
        self._use_all(step, as_list(call.args), plain=False)
        for memory in self._leaves(as_list(call.args)):
            memory.keep("it is passed to an unknown function")
        return self._foreign if holds_tensor(step.var.ty) else NOTHING

    def _packed(self, step: Step, call: relax.Call, name: str) -> Value:
        self._use_all(step, as_list(call.args))
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
        return self._any_of(as_list(call.args))

    def _operator(self, step: Step, call: relax.Call) -> Value:
        source, name = viewed(call), call.op.name
        if source is not None:
            return value_of(self._values, source)
        if call.op.same_as(_CALL_TIR_DYN):
            self._use_all(step, as_list(call.args[1].fields))
            return NOTHING
        self._use_all(step, as_list(call.args), plain=False)
        holds = holds_tensor(step.var.ty)
        if name in PACKED_CALLERS:
            return self._any_of(as_list(call.args)) if holds else NOTHING
        if name in _DESTINATION_PASSING:
            new = fresh_value(step, step.var.ty, certain=False)
            if not (step.in_dataflow and _DESTINATION_PASSING[name]):
                return new
            return frozenset((*self._leaves(as_list(call.args)), *leaves(new)))
        if name not in KEEPERS and not holds:
            return NOTHING
        objects = self._leaves(as_list(call.args))
        pure = name not in KEEPERS and bool(call.op.get_attr("FPurity"))
        for memory in objects:
            memory.keep(f"it is passed to the operator {name}", escapes=not pure)
        if pure:
            older = () if computes_result(call) else objects
            return frozenset((*older, FreshObject(step=step, certain=False)))
        return self._foreign if holds else NOTHING

    def _relax_call(self, step: Step, call: relax.Call, name: str) -> Value:
        self._use_all(step, as_list(call.args), plain=False)
        facts = self._module.of(name)
        if facts is None:
            for memory in self._leaves(as_list(call.args)):
                memory.keep(f"it is passed to {name}, which calls itself")
            return self._foreign if holds_tensor(step.var.ty) else NOTHING
        here: dict[MemoryObject, frozenset[MemoryObject]] = {
            facts.outside: frozenset((self._outside,))
        }
        for argument, parameter in zip(as_list(call.args), facts.parameters, strict=False):
            here[parameter] = frozenset(leaves(value_of(self._values, argument)))
            if parameter.kept is not None:
                for memory in here[parameter]:
                    reason = f"it is passed to {name}, where {parameter.kept}"
                    memory.keep(reason, escapes=parameter.escaped)
        return self._returned(step, name, facts.result, here)

    def _returned(
        self, step: Step, name: str, value: Value, here: dict[MemoryObject, frozenset[MemoryObject]]
    ) -> Value:
        """Return the caller's value for a callee's; `here` maps the objects of the callee."""
        if isinstance(value, tuple):
            return tuple(self._returned(step, name, field, here) for field in value)
        for memory in value:
            if memory not in here and isinstance(memory, FreshObject):
                new = FreshObject(step=step, certain=False)
                if memory.kept is not None:
                    reason = f"{name} returns it, and there {memory.kept}"
                    new.keep(reason, escapes=memory.escaped)
                here[memory] = frozenset((new,))
        outside = (self._outside,)
        return frozenset(target for memory in value for target in here.get(memory, outside))

    def _any_of(self, arguments: Any) -> Value:
        """Return the result of a packed function: an argument, or memory that existed before."""
        return frozenset((*self._leaves(arguments), self._outside))

    def _leaves(self, arguments: Any) -> set[MemoryObject]:
        """Return the memory objects that some arguments may be."""
        objects: set[MemoryObject] = set()
        for argument in arguments:
            objects.update(leaves(value_of(self._values, argument)))
        return objects

    def _use_all(self, step: Step, arguments: Any, *, plain: bool = True) -> None:
        for argument in arguments:
            self._use(step, argument, step.entry, plain=plain)

    def _use(self, step: Step, expr: relax.Expr, point: int, *, plain: bool) -> None:
        value = value_of(self._values, expr)
        if not value:
            return
        for memory in leaves(value):
            if not isinstance(memory, FreshObject):
                continue  # uses of memory that existed before do not matter
            memory.uses.append(Use(step, point, step.region))
            home = memory.step
            if not plain or home.region is not step.region or home.block != step.block:
                memory.plain = False

    def _keep_free(self, expr: relax.Expr, reason: str) -> None:
        """Record that the memory of the free variables of an expression may be kept."""
        for var in relax.analysis.free_vars(expr):
            for memory in leaves(self._values.get(var.__chandle__(), NOTHING)):
                memory.keep(reason)
