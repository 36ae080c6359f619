# SPDX-License-Identifier: Apache-2.0
"""Interpret a Relax function over abstract memory states, and summarize it for its callers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tvm
from tvm import relax

from tvm_ipc import packed_functions
from tvm_ipc.packed_functions import RESULT
from tvm_ipc.packed_functions.nvshmem_names import NO_NVSHMEM, is_nvshmem
from tvm_ipc.packed_functions.program_function_declarations import (
    OWN_SLICE,
    PEER_VIEW,
    WORKER_RANK,
)
from tvm_ipc.verify import known_calls
from tvm_ipc.verify.access_checker import AccessChecker
from tvm_ipc.verify.allocations_and_views_with_bounds import Allocations, item_bytes
from tvm_ipc.verify.hazard_types_and_messages import HazardKind, HazardReporter
from tvm_ipc.verify.known_calls import KnownCall, constant, text_of
from tvm_ipc.verify.memory_state import MemoryState, Pending
from tvm_ipc.verify.module_functions_and_summary_cache import Module
from tvm_ipc.verify.range_loops import Loop
from tvm_ipc.verify.relax_as_plain_statements import (
    CALL_PACKED,
    GRAPH_ALLOC,
    GRAPH_RUN,
    SAME,
    Argument,
    Sequence,
    Statement,
    Statements,
    extents_of,
)
from tvm_ipc.verify.relax_function_effect_summary import CallMapping, Summary
from tvm_ipc.verify.statement_walker import StatementWalker
from tvm_ipc.verify.storage_and_buffer_types import (
    NOTHING,
    Buffer,
    Leaf,
    Memory,
    Storage,
    Value,
    leaves,
    objects,
)


class Interpreter(StatementWalker):
    """Interprets one function: applies its statements to the memory state.

    All accesses to memory go through an `AccessChecker`, which holds the state and reports hazards.
    """

    def __init__(self, module: Module, name: str, function: relax.Function) -> None:
        super().__init__(module)
        self._name = name
        self._function = function
        self._extents = module.extents
        self._reporter = HazardReporter(name, module.hazards, module.useless_overlaps)
        self._accesses = AccessChecker(
            module.extents, self._reporter, uses_streams=module.uses_streams
        )
        self._allocations = Allocations(self._variables, module.extents, self._accesses)
        self._parameter_values: set[Value] = set()
        #: Whether the last evaluated value has a hold for its variable already: that of an `if`, or
        #: of an inlined call.
        self._result_is_held = False
        self._cached_allocations: dict[str, Value] = {}

    def run(self, statements: Statements, *, is_local: bool = False) -> Summary:
        """Interpret the whole function, which may be local to another one; return its summary."""
        function, accesses, summary = self._function, self._accesses, self._accesses.summary
        self._variables.update(statements.variables)
        self._bound_variables(function)
        for parameter in function.params:
            value = self._values[hash(parameter)] = _parameter(parameter.name, parameter.ty)
            summary.parameters.append(value)
            self._parameter_values.update(leaves(value))
        step = Statement(relax.Var("return", None), function.body.body)
        result = self._sequence(statements.body, step)
        accesses.read(objects(result), step)
        accesses.give_away(objects(result), step)
        accesses.check_joined(step)
        state = accesses.state
        for request in state.requests.values():
            accesses.report_never_waited(request, step, "")
        returned = {memory.storage for memory in objects(result)}
        for pending in state.pending:
            storage = pending.memory.storage
            is_lost = not storage.external and storage not in returned
            if is_lost or is_local or self._module.has_unknown_callers(self._name):
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

    # ---- variables that hold values ---------------------------------------------------------

    def _free(self, variable: int) -> Value:
        """Return the value of a variable of the enclosing function."""
        captured = self._variables[variable]
        value = self._values[variable] = _parameter(captured.name, captured.ty)
        return value

    def _constant(self, expr: Any) -> Value:
        return NOTHING

    def _field(self, step: Statement, whole: Value) -> Value:
        return whole

    def _bind(self, step: Statement, value: Value) -> None:
        state = self._accesses.state
        if step.kind == SAME and step.ends == step.args:
            # The new variable takes over from the old one.
            if step.ends[0] in state.holding:
                state.holding.discard(step.ends[0])
                state.holding.add(step.variable)
            return
        if self._result_is_held:
            self._result_is_held = False
            state.holding.add(step.variable)
        # The caller holds the parameters; nothing frees them here.
        elif value and value not in self._parameter_values:
            state.hold(value)
            state.holding.add(step.variable)
        for ended in step.ends:
            self._drop(ended, step)

    def _kill(self, step: Statement) -> None:
        for killed in step.args:
            self._drop(killed, step)

    def _leave(self, sequence: Sequence, result: Value, around: Statement) -> Value:
        """Drop the variables of a sequence; its result is held once for the caller."""
        state = self._accesses.state
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
                    if pending.memory.storage is storage and not storage.external:
                        self._accesses.report_pending(kind, storage, step, pending)

    def _branch(self, step: Statement) -> Value:
        """Interpret each branch on its own state, and join the states and the results."""
        accesses = self._accesses
        accesses.read(objects(self._value(step.args[0])), step)
        before = accesses.state
        then_state = accesses.state = before.copy()
        then_value = self._sequence(step.then, step)
        accesses.state = before
        else_value = self._sequence(step.otherwise, step)
        accesses.check_same_stream(then_state, step)
        result = _merge(then_value, then_state, else_value, before)
        before.join(then_state)
        self._result_is_held = True
        return result

    # ---- functions and operators ------------------------------------------------------------

    def _local_function(self, step: Statement) -> Value:
        """Check a local function, and return the memory that it captures."""
        name = f"{self._reporter.function}.{step.bound.name}"
        Interpreter(self._module, name, step.value).run(Statements(step.value), is_local=True)
        return frozenset(objects(tuple(map(self._value, step.args))))

    def _run_kernel(self, step: Statement, values: list[Value], written: frozenset[int]) -> Value:
        self._accesses.run_kernel(objects(tuple(values)), step)
        if self._module.uses_streams and self._module.has_workspace(step.name):
            self._accesses.use_workspace(step.name, step)
        for index, value in enumerate(values):
            if index not in written and value:
                self._accesses.read(objects(value), step)
        for index in written:
            self._accesses.write(objects(values[index]), step)
        return NOTHING

    def _call_function(self, step: Statement, values: list[Value]) -> Value:
        name, allocations = step.name, self._cached_allocations
        if step.through == GRAPH_RUN:
            self._check_capture(name)
        if step.through == GRAPH_ALLOC and name in allocations:
            return allocations[name]
        loop = self._module.loop(name)
        if loop is not None:
            result = self._run_loop(name, loop, values, step)
        elif self._module.enters(name):
            result = self._inline(name, values, step)
        elif (summary := self._module.summary(name)) is not None:
            result = self._apply(summary, values, step)
        else:
            result = self._unknown(step, values)
        if step.through == GRAPH_ALLOC:  # these storages are allocated once and never freed
            allocations[name] = result
            self._accesses.state.hold(result)
        return result

    def _inline(self, name: str, values: list[Value], step: Statement) -> Value:
        """Interpret a function at its only call, where the values of its parameters are known."""
        self._bound_variables(self._module.function(name))
        self._define_extents(name, step.args)
        caller, self._reporter.function = self._reporter.function, name
        result: Value = self._enter(name, values, step)
        self._reporter.function, self._result_is_held = caller, True
        return result

    def _define_extents(self, name: str, arguments: list[Argument], *free: Any) -> None:
        """Give the shape variables of a function, other than some, their values in a call."""
        for parameter, argument in zip(self._module.function(name).params, arguments, strict=True):
            known = self._variables.get(argument) if type(argument) is int else argument
            ty = getattr(known, "ty", None)
            extents = extents_of(known if isinstance(known, relax.ShapeExpr) else ty)
            for variable, extent in zip(
                extents_of(parameter.ty) or (), extents or (), strict=False
            ):
                if isinstance(variable, tvm.ir.Var) and not any(map(variable.same_as, free)):
                    self._extents.define(variable, extent)

    def _run_loop(self, name: str, loop: Loop, values: list[Value], step: Statement) -> Value:
        """Interpret the body of a loop several times, each in the state that the last one left."""
        module, accesses = self._module, self._accesses
        module.enter_loop(name)
        statements = module.statements(name)
        self._variables.update(statements.variables)
        self._values.update(zip(map(hash, module.function(name).params), values, strict=True))
        bounds, index_left = loop.bounds, None
        if bounds is not None:
            self._define_extents(name, step.args, bounds.begin)
            end = bounds.argument(bounds.end, step.args)
            index_left = None if end is None else self._extents.number(end - bounds.begin - 1)
        outer = self._allocations.assume(index_left)
        in_flight = set(accesses.state.requests)
        body = [self._value(argument) for argument in loop.once.args]
        passes, may_end = loop.passes(step.args)
        states = []  # after each number of iterations after which the loop may end
        for _ in range(passes):
            if may_end:
                states.append(accesses.state.copy())
            self._inline(loop.once.name, body, loop.once)
            for request in accesses.state.requests.keys() - in_flight:
                accesses.report_never_waited(accesses.state.requests.pop(request), loop.once, "")
            self._result_is_held = False
        for state in states:
            accesses.state.join(state)
        self._allocations.assume(outer)
        return NOTHING

    def _apply(self, summary: Summary, values: list[Value], step: Statement) -> Value:
        """Interpret a call of a function of the module by applying its summary."""
        accesses = self._accesses
        accesses.state.done += 1
        if summary.uses_streams:
            accesses.summary.uses_streams = True
            accesses.check_on_program_stream(step.name, step)
        if summary.allocates:
            accesses.use_workspace(step.name, step)
        accesses.give_away(objects(tuple(values)), step)
        mapping = CallMapping(summary, values, step)
        for storage in summary.reads:
            accesses.read(mapping.argument(storage) or NOTHING, step)
        for access in summary.writes:
            if mapping.argument(access.memory.storage) is not None:
                accesses.write(mapping.memory(access.memory), step, access.passed)
        for team in summary.passed:
            accesses.sync(team, step)
        result = mapping.value(summary.result)
        for pending in summary.pending:
            for memory in mapping.memory(pending.memory):
                accesses.state.pending += (Pending(memory, pending.team, pending.reader),)
        return result

    def _check_capture(self, name: str) -> None:
        """Report host calls of a captured function, which a replay would not repeat."""
        for captured in self._module.statements(name).body.steps:
            is_packed = captured.kind == CALL_PACKED
            function = packed_functions.find(captured.name) if is_packed else None
            if function is not None and (
                function.exposes or function.releases or function.starts or function.orders_streams
            ):
                kind = HazardKind.CAPTURED
                key = (kind, captured.variable)
                self._reporter.add(kind, key, function.name, captured, name, "")

    def _unknown(self, step: Statement, values: list[Value]) -> Value:
        """Interpret an unknown call, which may read, write and return any of its arguments."""
        if step.kind == CALL_PACKED and is_nvshmem(step.name):
            kind = HazardKind.UNAVAILABLE
            self._reporter.add(kind, (kind, step.name), step.name, step, NO_NVSHMEM, "")
        accesses = self._accesses
        accesses.state.done += 1
        accesses.use_workspace(step.name or "an unknown function", step, None)
        arguments = list(objects(tuple(values)))
        accesses.give_away(arguments, step)
        accesses.read(arguments, step)
        accesses.write(arguments, step, certain=False)
        ty = step.bound.ty
        if type(ty) is not relax.TensorType and _reaches_no_memory(ty):
            return NOTHING
        weak = {
            memory.renamed(True, None) if isinstance(memory, Buffer) else memory
            for memory in arguments
        }
        return frozenset({*weak, Storage(step.bound.name, None, external=True)})

    def _allocate(self, step: Statement) -> Value:
        args, allocations = step.args, self._allocations
        new: Value
        if step.name == "relax.memory.alloc_storage":
            new = frozenset({allocations.storage(args[0], 1, text_of(args[2]), step)})
        elif step.name == "relax.vm.alloc_storage":
            item, scope = item_bytes(args[2]), text_of(args[3])
            new = frozenset({allocations.storage(args[0], item, scope, step)})
        elif step.name == "relax.builtin.alloc_tensor":
            new = allocations.tensor_with_storage(args[0], args[1], args[3], step)
        else:
            return allocations.tensor(self._value(args[0]), step, *args[1:4])
        self._accesses.allocate(objects(new))
        return new

    def _view(self, step: Statement, values: list[Value]) -> Value:
        if step.name not in known_calls.SAME_MEMORY:
            self._accesses.read(objects(tuple(values)), step)
        return values[0]

    def _access(self, step: Statement, reads: Iterable[Value], writes: Iterable[Value]) -> Value:
        self._accesses.read(objects(tuple(reads)), step)
        self._accesses.write(objects(tuple(writes)), step)
        return _fresh(step.bound.ty, step)

    # ---- packed functions -------------------------------------------------------------------

    def _start(self, step: Statement, call: KnownCall | None, values: list[Value]) -> Value:
        """Start a request, which accesses the same memory as the function that it runs."""
        if call is None:
            everything = tuple(objects(tuple(values)))
            return self._accesses.start(everything, everything, (), step)
        function = call.function
        reads, writes, pending = (
            tuple(objects(call.operands(*names)))
            for names in (function.reads, function.writes, function.peers_read)
        )
        return self._accesses.start(
            reads, writes, pending if call.leaves_pending(False) else (), step
        )

    def _wait(self, step: Statement, request: Value) -> Value:
        self._accesses.wait(objects(request), step)
        return NOTHING

    def _call(self, step: Statement, call: KnownCall) -> Value:
        """Interpret a call of a function of `packed_functions` according to its signature."""
        function, accesses = call.function, self._accesses
        if function.orders_streams:
            return self._order_streams(step, call)
        if function is WORKER_RANK:
            limits = {str(step.bound.name): self._module.max_workers - 1}
            self._extents.bound([step.bound], {}, limits)
        if function.exposes:
            return accesses.expose(frozenset(objects(call.value(function.exposes))), step)
        if function is PEER_VIEW:
            may_wait = constant(call.argument("shift")) != 0
            return accesses.peer_view(frozenset(objects(call.value("exposed"))), may_wait, step)
        written: list[Memory] = []
        if function.releases:
            exposed = call.operands(function.releases)
            accesses.release([frozenset(objects(value)) for value in exposed], step)
        elif function.reads or function.writes:
            accesses.state.done += 1
            written += objects(call.operands(*function.writes))
            accesses.read(objects(call.operands(*function.reads)), step)
            accesses.write(written, step)
        team = call.barrier_team()
        if team is not None:
            accesses.sync(team, step)
        if call.leaves_pending(self._module.assume_no_exit_barrier):
            for memory in objects(call.operands(*function.peers_read)):
                accesses.add_pending(memory, call.team(), written, step)
        return self._result(step, call)

    def _order_streams(self, step: Statement, call: KnownCall) -> Value:
        """Set the current stream, or let it wait for another one."""
        function, accesses = call.function, self._accesses
        accesses.summary.uses_streams = True
        if function.sets_stream:
            accesses.set_stream(constant(call.argument(function.sets_stream)), step)
        if function.waits_for_stream:
            accesses.wait_stream(constant(call.argument(function.waits_for_stream)), step)
        return NOTHING

    def _result(self, step: Statement, call: KnownCall) -> Value:
        """Return the storage or tensor that a packed function returns."""
        function = call.function
        if function.result == "Storage":
            shape, item = call.argument("shape"), item_bytes(call.argument("dtype"))
            scope = function.scopes.get(RESULT)
            storage = self._allocations.storage(shape, item, scope, step)
            self._accesses.allocate((storage,))
            return frozenset({storage})
        if not function.result_of:
            return NOTHING
        source: Value = call.operands(function.result_of)[0]
        # Where an `OWN_SLICE` with a stride begins depends on the rank.
        depends_on_rank = function is OWN_SLICE and constant(call.argument("stride")) != 0
        if depends_on_rank or not call.positions("offset"):
            return source
        offset, shape = call.argument("offset"), call.argument("shape")
        if not call.positions("dtype"):
            # The runtime checks where slices end; in loops, their offsets have no known bounds.
            checks_end = function is not OWN_SLICE
            return self._allocations.view(source, step, offset, shape, checks_end=checks_end)
        return self._allocations.tensor(source, step, offset, shape, call.argument("dtype"))


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
            copy = memory.renamed(memory.weak, memory.origin or memory)
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
    then_value: Value, then_state: MemoryState, else_value: Value, else_state: MemoryState
) -> Value:
    """Return a value that stands for the result of either branch, in the states at their ends.

    If the results are equal, it is that result. Otherwise it is the union of copies of both.
    """
    if (
        isinstance(then_value, tuple)
        and isinstance(else_value, tuple)
        and len(then_value) == len(else_value)
    ):
        pairs = zip(then_value, else_value, strict=True)
        return tuple(_merge(a, then_state, b, else_state) for a, b in pairs)
    a, b = frozenset(objects(then_value)), frozenset(objects(else_value))
    return a if a == b else _renamed(a, then_state) | _renamed(b, else_state)
