# SPDX-License-Identifier: Apache-2.0
"""Interpret a Relax function over abstract memory states, and summarize it for its callers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tvm
from tvm import relax

from tvm_ipc import packed_functions
from tvm_ipc.packed_functions import RESULT
from tvm_ipc.packed_functions.program_function_declarations import (
    OWN_SLICE,
    PEER_VIEW,
    WAIT,
    WORKER_RANK,
)
from tvm_ipc.verify import known_calls
from tvm_ipc.verify.access_checker import AccessChecker
from tvm_ipc.verify.allocations_and_views_with_bounds import Allocations, item_bytes, text_of
from tvm_ipc.verify.hazard_types_and_messages import HazardKind, HazardReporter
from tvm_ipc.verify.known_calls import KnownCall
from tvm_ipc.verify.memory_state import MemoryState, Pending
from tvm_ipc.verify.module_functions_and_summary_cache import Module
from tvm_ipc.verify.relax_as_plain_statements import (
    CALL_GLOBAL,
    CALL_OPERATOR,
    CALL_PACKED,
    IF,
    ITEM,
    KILL,
    LITERAL,
    SAME,
    Argument,
    Sequence,
    Statement,
    Statements,
)
from tvm_ipc.verify.relax_function_effect_summary import CallMapping, Summary
from tvm_ipc.verify.storage_and_buffer_types import (
    NOTHING,
    Buffer,
    Leaf,
    Memory,
    Storage,
    Value,
    leaves,
    objects,
    storage_of,
)


class Interpreter:
    """Interprets one function: evaluates its statements and applies them to the memory state.

    All accesses to memory go through an `AccessChecker`, which holds the state and reports hazards.
    """

    def __init__(
        self,
        module: Module,
        name: str,
        function: relax.Function,
        statements: Statements,
        is_local: bool = False,
    ) -> None:
        self._module = module
        self._name = name
        self._function = function
        self._statements = statements
        self._is_local = is_local  #: whether the function is local to another one
        self._extents = module.extents
        self._reporter = HazardReporter(name, module.hazards, module.useless_overlaps)
        self._accesses = AccessChecker(module.extents, self._reporter)
        self._allocations = Allocations(statements, module.extents, self._accesses)
        self._values: dict[int, Value] = {}  #: of variables, by their hash
        self._parameter_values: set[Value] = set()
        #: Whether the last evaluated value has a hold for its variable already. An inlined call
        #: adds that hold.
        self._result_is_held = False
        self._cached_allocations: dict[str, Value] = {}

    def run(self) -> Summary:
        """Interpret the whole function, and return its summary."""
        function, accesses, summary = self._function, self._accesses, self._accesses.summary
        self._bound_variables(function)
        for parameter in function.params:
            value = self._values[hash(parameter)] = _parameter(parameter.name, parameter.ty)
            summary.parameters.append(value)
            self._parameter_values.update(leaves(value))
        step = Statement(relax.Var("return", None), function.body.body)
        result = self._sequence(self._statements.body, step)
        accesses.read(objects(result), step)
        accesses.give_away(objects(result), step)
        state = accesses.state
        for request in state.requests.values():
            accesses.report_never_waited(request, step, "")
        returned = {storage_of(memory) for memory in objects(result)}
        for pending in state.pending:
            storage = storage_of(pending.memory)
            is_lost = not storage.external and storage not in returned
            if is_lost or self._is_local or self._module.has_unknown_callers(self._name):
                accesses.report_pending(HazardKind.RETURN, storage, step, pending)
            else:
                summary.pending += (pending,)
        summary.result = result
        summary.passed = state.passed
        return summary

    def _bound_variables(self, function: relax.Function) -> None:
        """Apply the bounds of shape variables that are specified in a function's attributes."""
        attributes = function.attrs or {}
        lower, upper = (
            {str(key): int(value) for key, value in attributes.get(name, {}).items()}
            for name in ("tir_var_lower_bound", "tir_var_upper_bound")
        )
        if lower or upper:
            variables = relax.analysis.tir_vars_in_type(function.ty)
            self._extents.bound(variables, lower, upper)

    # ---- sequences --------------------------------------------------------------------------

    def _sequence(self, sequence: Sequence, around: Statement) -> Value:
        """Interpret a sequence, and return its result, which is held once for the caller."""
        values, parameter_values, state = self._values, self._parameter_values, self._accesses.state
        for step in sequence.steps:
            if step.kind == KILL:
                for killed in step.args:
                    self._drop(killed, step)
                continue
            variable = step.variable
            if step.kind == IF:
                values[variable] = self._if(step)
                state.holding.add(variable)
            else:
                result = values[variable] = self._evaluate(step)
                if step.kind == SAME and step.ends == step.args:
                    # The new variable takes over from the old one.
                    if step.ends[0] in state.holding:
                        state.holding.discard(step.ends[0])
                        state.holding.add(variable)
                    continue
                if self._result_is_held:
                    self._result_is_held = False
                    state.holding.add(variable)
                # The caller holds the parameters; nothing frees them here.
                elif result and result not in parameter_values:
                    state.hold(result)
                    state.holding.add(variable)
            for ended in step.ends:
                self._drop(ended, step)
        result = self._value(sequence.result)
        state.hold(result)
        for step in sequence.steps:
            if step.variable in state.holding:
                self._drop(step.variable, around, HazardKind.RETURN)
        return result

    def _drop(self, variable: int, step: Statement, kind: HazardKind = HazardKind.FREE) -> None:
        """Remove a variable's hold on its value, and check the storages that this frees."""
        state = self._accesses.state
        if variable not in state.holding:
            return
        state.holding.discard(variable)
        freed = state.release(self._values[variable])
        if state.pending:
            for storage in freed:
                for pending in state.pending:
                    if storage_of(pending.memory) is storage and not storage.external:
                        self._accesses.report_pending(kind, storage, step, pending)

    def _if(self, step: Statement) -> Value:
        """Interpret each branch on its own state, and join the states and the results."""
        accesses = self._accesses
        accesses.read(objects(self._value(step.args[0])), step)
        before = accesses.state
        then_state = accesses.state = before.copy()
        then_value = self._sequence(step.then, step)
        accesses.state = before
        else_value = self._sequence(step.otherwise, step)
        result = _merge(
            then_value,
            else_value,
            lambda leaf: _renamed(leaf, then_state),
            lambda leaf: _renamed(leaf, before),
        )
        before.join(then_state)
        return result

    def _inline(
        self, name: str, inlined: Statements, values: list[Value], step: Statement
    ) -> Value:
        """Interpret a function at its only call, where the values of its parameters are known."""
        function = self._module.function(name)
        self._bound_variables(function)
        self._values.update(zip(map(hash, function.params), values, strict=True))
        self._statements.variables.update(inlined.variables)
        caller, self._reporter.function = self._reporter.function, name
        result = self._sequence(inlined.body, step)
        self._reporter.function, self._result_is_held = caller, True
        return result

    # ---- expressions ------------------------------------------------------------------------

    def _value(self, argument: Argument) -> Value:
        kind = type(argument)
        if kind is int:
            value = self._values.get(argument)
            if value is None:  # a variable of the enclosing function
                variable = self._statements.variables[argument]
                value = self._values[argument] = _parameter(variable.name, variable.ty)
            return value
        if kind is tuple:
            return tuple([self._value(field) for field in argument])
        return self._evaluate(argument) if kind is Statement else NOTHING

    def _arguments(self, args: Iterable[Argument]) -> list[Value]:
        return [self._value(argument) for argument in args]

    def _evaluate(self, step: Statement) -> Value:
        kind, args = step.kind, step.args
        if kind == SAME:
            return self._value(args[0])
        if kind == ITEM:
            whole = self._value(args[0])
            return whole[args[1]] if type(whole) is tuple else whole
        if kind == CALL_OPERATOR:
            return self._operator(step, args)
        if kind == CALL_GLOBAL:
            return self._global(step.name, args, step)
        if kind == CALL_PACKED:
            return self._packed(step.name, args, step)
        if kind == LITERAL:
            return self._local_function(step)
        return self._unknown(self._arguments(args), step)

    def _local_function(self, step: Statement) -> Value:
        """Check a local function, and return the memory that it captures."""
        name = f"{self._reporter.function}.{step.bound.name}"
        statements = Statements(step.value)
        Interpreter(self._module, name, step.value, statements, is_local=True).run()
        return frozenset(objects(tuple(self._arguments(step.args))))

    def _operator(self, step: Statement, args: list[Argument]) -> Value:
        handler = _OPERATORS.get(step.name)
        if handler is not None:
            return handler(self, args, step)
        values = self._arguments(args)
        if step.name in known_calls.UNKNOWN_OPERATORS:
            return self._unknown(values, step)
        if step.name not in known_calls.SAME_MEMORY:
            self._accesses.read(objects(tuple(values)), step)
        if step.name in known_calls.VIEW_OPERATORS:
            return values[0]
        return _fresh(step.value.ty, step)

    def _global(self, name: str, args: Iterable[Argument], step: Statement) -> Value:
        """Interpret a call of a function of the module."""
        written, values = self._module.written(name), self._arguments(args)
        if written is not None:
            accesses = self._accesses
            accesses.run_kernel(objects(tuple(values)), step)
            for index, value in enumerate(values):
                if index not in written and value:
                    accesses.read(objects(value), step)
            for index in written:
                if index < len(values):
                    accesses.write(objects(values[index]), step)
            return NOTHING
        function = self._module.function(name)
        if isinstance(function, relax.Function):
            inlined = self._module.inlined_statements(name)
            if inlined is not None and len(function.params) == len(values):
                return self._inline(name, inlined, values, step)
            summary = self._module.summary(name)
            if summary is not None and len(summary.parameters) == len(values):
                return self._apply(summary, values, step)
        return self._unknown(values, step)

    def _apply(self, summary: Summary, values: list[Value], step: Statement) -> Value:
        """Interpret a call of a function of the module by applying its summary."""
        accesses = self._accesses
        accesses.state.done += 1
        accesses.give_away(objects(tuple(values)), step)
        mapping = CallMapping(summary, values, step)
        for storage in summary.reads:
            accesses.read(mapping.argument(storage) or NOTHING, step)
        for access in summary.writes:
            if mapping.argument(storage_of(access.memory)) is not None:
                accesses.write(mapping.memory(access.memory), step, access.passed)
        for team in summary.passed:
            accesses.state.sync(team)
        result = mapping.value(summary.result)
        for pending in summary.pending:
            for memory in mapping.memory(pending.memory):
                accesses.state.pending += (Pending(memory, pending.team, pending.reader),)
        return result

    def _unknown(self, values: list[Value], step: Statement) -> Value:
        """Interpret an unknown call, which may read, write and return any of its arguments."""
        accesses = self._accesses
        accesses.state.done += 1
        arguments = list(objects(tuple(values)))
        accesses.give_away(arguments, step)
        accesses.read(arguments, step)
        accesses.write(arguments, step, certain=False)
        ty = step.bound.ty
        if type(ty) is not relax.TensorType and _reaches_no_memory(ty):
            return NOTHING
        weak: set[Memory] = set()
        for memory in arguments:
            if isinstance(memory, Buffer):
                name, storage, begin, end = memory.name, memory.storage, memory.begin, memory.end
                memory = Buffer(
                    name, storage, begin, end, weak=True, assumptions=memory.assumptions
                )
            weak.add(memory)
        return frozenset({*weak, Storage(step.bound.name, None, external=True)})

    # ---- packed functions -------------------------------------------------------------------

    def _packed(self, name: str, args: list[Argument], step: Statement) -> Value:
        handler = _PACKED.get(name)
        if handler is not None:
            return handler(self, args, step)
        values = self._arguments(args)
        function = packed_functions.find(name)
        if function is not None:
            return self._known(KnownCall(function, args), values, step)
        if name in known_calls.READERS:
            self._accesses.read(objects(tuple(values)), step)
            return NOTHING
        if name in known_calls.VIEWS:
            if name not in known_calls.SAME_MEMORY:
                self._accesses.read(objects(values[0]), step)
            return values[0]
        return self._unknown(values, step)

    def _known(self, call: KnownCall, values: list[Value], step: Statement) -> Value:
        """Interpret a call of a function of `packed_functions` according to its signature."""
        function = call.function
        if function is WORKER_RANK:
            limits = {str(step.bound.name): self._module.max_workers - 1}
            self._extents.bound([step.bound], {}, limits)
        if not call.fits():
            return self._unknown(values, step)
        if function.starts:
            return self._start_request(values[1:], step.args[1:], text_of(step.args[0]), step)
        if function is WAIT:
            self._accesses.wait(objects(values[0]), step)
            return NOTHING
        if function.exposes or function.releases or function is PEER_VIEW:
            return self._accesses.access_exposed(call, values, step)
        if function.reads or function.writes:
            self._access(call, values, step)
        if function.result == "Storage":
            shape, item = call.argument("shape"), item_bytes(call.argument("dtype"))
            scope = function.scopes.get(RESULT)
            return frozenset({self._allocations.storage(shape, item, scope, step)})
        if not function.result_of:
            return NOTHING
        source = values[call.positions(function.result_of)[0]]
        if function is OWN_SLICE:
            return source  # where the slice begins depends on the rank
        if not call.positions("offset"):
            return source
        offset, shape = call.argument("offset"), call.argument("shape")
        if not call.positions("dtype"):
            return self._allocations.view(source, step, offset, shape)
        return self._allocations.tensor(source, step, offset, shape, call.argument("dtype"))

    def _start_request(
        self, values: list[Value], args: list[Argument], name: str | None, step: Statement
    ) -> Value:
        """Start a request, which accesses the same memory as the function that it runs."""
        function = packed_functions.find(name or "")
        call = None if function is None else KnownCall(function, args)
        if function is None or call is None or not call.fits():
            everything = tuple(objects(tuple(values)))
            return self._accesses.start(everything, everything, (), step)
        reads = tuple(_operands(call, function.reads, values))
        writes = tuple(_operands(call, function.writes, values))
        pending: tuple[Memory, ...] = ()
        if call.leaves_pending(False):
            pending = tuple(_operands(call, function.peers_read, values))
        return self._accesses.start(reads, writes, pending, step)

    def _access(self, call: KnownCall, values: list[Value], step: Statement) -> None:
        """Read, write and synchronize as the signature of the called function specifies."""
        accesses = self._accesses
        accesses.state.done += 1
        function = call.function
        written = list(_operands(call, function.writes, values))
        accesses.read(_operands(call, function.reads, values), step)
        accesses.write(written, step)
        team = call.barrier_team()
        if team is not None:
            accesses.state.sync(team)
        if call.leaves_pending(self._module.assume_no_exit_barrier):
            for memory in _operands(call, function.peers_read, values):
                accesses.add_pending(memory, call.team(), written, step)

    # ---- calls with handlers of their own ---------------------------------------------------

    def _alloc_storage(self, args: list[Argument], step: Statement) -> Value:
        scope = text_of(args[2])
        return frozenset({self._allocations.storage(args[0], 1, scope, step)})

    def _alloc_vm_storage(self, args: list[Argument], step: Statement) -> Value:
        item, scope = item_bytes(args[2]), text_of(args[3])
        return frozenset({self._allocations.storage(args[0], item, scope, step)})

    def _alloc_tensor(self, args: list[Argument], step: Statement) -> Value:
        return self._allocations.tensor(self._value(args[0]), step, *args[1:4])

    def _alloc_builtin_tensor(self, args: list[Argument], step: Statement) -> Value:
        return self._allocations.tensor_with_storage(args[0], args[1], args[3], step)

    def _call_tir_dyn(self, args: list[Argument], step: Statement) -> Value:
        return self._global(args[0].name_hint, args[1], step)

    def _call_builtin_tir_dyn(self, args: list[Argument], step: Statement) -> Value:
        return self._global(args[0].name_hint, args[1:], step)

    def _call_tir_inplace(self, args: list[Argument], step: Statement) -> Value:
        values = self._arguments(args[1])
        self._accesses.read(objects(tuple(values)), step)
        results = []
        for index in step.value.attrs.inplace_indices:
            in_place = int(index) >= 0
            results.append(values[int(index)] if in_place else _fresh(step.value.ty, step))
            if in_place:
                self._accesses.write(objects(results[-1]), step)
        return results[0] if len(results) == 1 else tuple(results)

    def _call_first_argument(self, args: list[Argument], step: Statement) -> Value:
        """Interpret a call of the packed function that is the first argument."""
        callee, operands = args[0], list(args[1:])
        if isinstance(callee, relax.ExternFunc):
            return self._packed(str(callee.global_symbol), operands, step)
        return self._unknown(self._arguments(args), step)

    def _call_with_context(self, args: list[Argument], step: Statement) -> Value:
        return self._call_first_argument([args[0], *_fields(args[1])], step)

    def _cuda_graph_alloc(self, args: list[Argument], step: Statement) -> Value:
        """Return the storages of a CUDA graph, which are allocated once and never freed."""
        name = args[0].name_hint
        if name not in self._cached_allocations:
            self._cached_allocations[name] = self._global(name, [], step)
            self._accesses.state.hold(self._cached_allocations[name])
        return self._cached_allocations[name]

    def _cuda_graph_run(self, args: list[Argument], step: Statement) -> Value:
        """Interpret a captured function, and report host calls that a replay would not repeat."""
        name = args[0].name_hint
        for captured in self._module.statements(name).body.steps:
            is_packed = captured.kind == CALL_PACKED
            function = packed_functions.find(captured.name) if is_packed else None
            if function is not None and (function.exposes or function.releases or function.starts):
                kind = HazardKind.CAPTURED
                key = (kind, captured.variable)
                self._reporter.add(kind, key, function.name, captured, name, "")
        return self._global(name, _fields(args[1]), step)


_Handler = Callable[[Interpreter, list[Argument], Statement], Value]

_OPERATORS: dict[str, _Handler] = {
    "relax.memory.alloc_storage": Interpreter._alloc_storage,
    "relax.vm.alloc_storage": Interpreter._alloc_vm_storage,
    "relax.memory.alloc_tensor": Interpreter._alloc_tensor,
    "relax.vm.alloc_tensor": Interpreter._alloc_tensor,
    "relax.builtin.alloc_tensor": Interpreter._alloc_builtin_tensor,
    "relax.vm.call_tir_dyn": Interpreter._call_tir_dyn,
    "relax.call_tir_inplace": Interpreter._call_tir_inplace,
    "relax.call_builtin_with_ctx": Interpreter._call_with_context,
    "relax.call_pure_packed": Interpreter._call_first_argument,
}

_PACKED: dict[str, _Handler] = {
    "vm.builtin.call_tir_dyn": Interpreter._call_builtin_tir_dyn,
    "vm.builtin.cuda_graph.get_cached_alloc": Interpreter._cuda_graph_alloc,
    "vm.builtin.cuda_graph.run_or_capture": Interpreter._cuda_graph_run,
}


def _fields(argument: Argument) -> tuple[Argument, ...]:
    """Return the fields of a tuple argument; any other argument as a tuple of one field."""
    return argument if type(argument) is tuple else (argument,)


def _operands(call: KnownCall, names: tuple[str, ...], values: list[Value]) -> Iterator[Memory]:
    """Yield all memory that may be reached from the arguments for the named parameters."""
    return objects(tuple(values[index] for index in call.positions(*names)))


def _parameter(name: str, ty: Any) -> Value:
    """Return the value of a parameter, whose memory is external to the function."""
    if isinstance(ty, relax.TupleType):
        return tuple(_parameter(f"{name}[{i}]", field) for i, field in enumerate(ty.fields))
    if isinstance(ty, (relax.ShapeType, tvm.ir.PrimType, relax.FuncType)):
        return NOTHING
    storage = Storage(name, None, external=True)
    # A value that is not a tensor may be a storage, or another object that refers to memory.
    return frozenset({Buffer(name, storage) if isinstance(ty, relax.TensorType) else storage})


def _fresh(ty: Any, step: Statement) -> Value:
    """Return the value of a new tensor, or of a tuple of new tensors."""
    if isinstance(ty, relax.TupleType):
        return tuple(_fresh(field, step) for field in ty.fields)
    if not isinstance(ty, relax.TensorType):
        return NOTHING
    name = step.bound.name
    return frozenset({Buffer(name, Storage(name, "global"))})


def _reaches_no_memory(ty: Any) -> bool:
    """Return whether values of a type can never refer to memory."""
    if isinstance(ty, relax.TupleType):
        return not len(ty.fields)
    return isinstance(ty, (relax.ShapeType, tvm.ir.PrimType))


def _renamed(leaf: Leaf, state: MemoryState) -> Leaf:
    """Return the result of a branch with every buffer replaced by a copy.

    If the state of the branch marks a buffer as valid or as lost, it marks the new one likewise.
    """
    renamed: list[Memory] = []
    for memory in leaf:
        if isinstance(memory, Buffer):
            copy = Buffer(
                memory.name,
                memory.storage,
                memory.begin,
                memory.end,
                memory.weak,
                memory.origin or memory,
                memory.assumptions,
            )
            if memory in state.lost:
                state.lost[copy] = state.lost[memory]
            if memory in state.valid.get(memory.storage, ()):
                state.valid[memory.storage].add(copy)
            renamed.append(copy)
        else:
            renamed.append(memory)
    result = frozenset(renamed)
    state.hold(result)
    state.release(leaf)
    return result


def _merge(
    then_value: Value,
    else_value: Value,
    of_then: Callable[[Leaf], Leaf],
    of_else: Callable[[Leaf], Leaf],
) -> Value:
    """Return a value that stands for the result of either branch.

    If the results are equal, it is that result. Otherwise it is the union of both, after `of_then`
    is applied to the result of the then branch and `of_else` to that of the else branch.
    """
    if (
        isinstance(then_value, tuple)
        and isinstance(else_value, tuple)
        and len(then_value) == len(else_value)
    ):
        pairs = zip(then_value, else_value, strict=True)
        return tuple(_merge(a, b, of_then, of_else) for a, b in pairs)
    a, b = frozenset(objects(then_value)), frozenset(objects(else_value))
    return a if a == b else of_then(a) | of_else(b)
